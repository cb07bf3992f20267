#![doc = include_str!("../README.md")]

mod copied;
mod cut;
mod deleting;
mod filter;
mod foreign;
mod frame;
mod history;
mod in_place;
mod known;
mod metadata;
pub mod moved;
mod put;
mod read;
mod reading;
mod removal;
mod runs;
mod steps;
mod store;
mod task;
mod types;
mod value;
mod version;
mod waiting;
mod writes;

pub use frame::Frame;
pub use steps::after;
pub use store::{Fence, LangGraph};
pub use types::{Caller, ChannelReplay, ListRequest, Pending, Place, Put, PutWrites, Seed, Strategy, Tuple};
pub use value::{Typed, elements, is_message_pack, list, stored, typed};
pub use version::{Label, next};

#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod change;
mod draft;
mod element;
mod format;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod keys;
mod memo;
mod newest;
mod overlay;
mod packed;
mod queries;
mod reader;
mod record;
mod rewrite;
mod rows;
mod saver;
mod store;
pub mod testing;
mod writer;

pub use format::FORMAT_VERSION;
pub use packed::Packed;
pub use saver::KvSaver;
pub use store::{Changes, Order, Plan, Snapshot, Store, Visit};

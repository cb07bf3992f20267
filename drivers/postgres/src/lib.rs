#![doc = include_str!("../README.md")]

mod address;
mod applied;
mod aside;
mod attempts;
mod change;
mod config;
mod connect;
mod convoy;
mod copy;
mod create;
mod doubt;
mod draft;
mod element;
mod error;
mod function;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod history;
mod keys;
mod listing;
mod memory;
mod plan;
mod pool;
mod read;
mod record;
mod rewrite;
mod rows;
mod saver;
pub mod schema;
mod seal;
mod serving;
mod session;
mod sql;
mod step;
mod store;
mod summary;
mod thread;
mod tls;
mod used;
mod view;
mod watch;

pub use config::{Address, Connected, Opener, Options};
pub use saver::PostgresSaver;
pub use schema::setup;

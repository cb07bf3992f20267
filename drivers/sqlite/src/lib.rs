#![doc = include_str!("../README.md")]

mod check;
mod commit;
mod config;
mod directory;
mod element;
mod error;
mod extra;
#[cfg(test)]
mod fault;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod memory;
mod names;
mod pack;
mod read;
mod reader;
mod record;
mod rewrite;
mod rows;
mod saver;
pub mod schema;
mod seal;
mod space;
mod sql;
mod stats;
mod thread;
mod train;
mod used;
mod value;
mod view;
mod writer;

pub use check::Finding;
pub use config::{Options, Synchronous};
pub use saver::SqliteSaver;
pub use space::FileSize;
pub use stats::Stats;

#![doc = include_str!("../README.md")]

mod care;
mod config;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod read;
mod rows;
mod saver;
pub mod schema;
mod sql;
mod stats;
#[cfg(test)]
mod tests;
mod write;

pub use care::backup::{BackupFile, copy_database};
pub use care::check::Finding;
pub use care::space::FileSize;
pub use config::{Options, Synchronous};
pub use error::is_locked;
pub use saver::SqliteSaver;
pub use stats::Stats;

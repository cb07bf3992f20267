#![doc = include_str!("../README.md")]

pub mod acceptance;
pub mod admission;
pub mod batches;
pub mod bounds;
pub mod budget;
pub mod catalog;
pub mod citations;
mod concluded;
pub mod contract;
mod delegator;
mod deletion;
mod events;
mod evidence;
mod execution;
pub mod external;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod hooks;
pub mod ledger;
pub mod managed;
pub mod neutral;
mod observer;
pub mod outcome;
pub mod owned;
mod progress;
mod prompts;
mod recheck;
mod snapshot;
mod task;
mod watched;

pub use delegator::{CatchUpError, Delegator, limit_tokens};
pub use deletion::{DeletionError, delete_checkpoints, remove_directory};
pub use prompts::TASK_TOOL;
pub use recheck::recheck;

#![doc = include_str!("../README.md")]

pub mod cache;
pub mod cadence;
pub mod channel;
pub mod checkpoint;
pub mod convert;
pub mod deletion;
mod error;
mod extra;
pub mod foreign;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod id;
pub mod json;
mod materialize;
pub mod metadata;
pub mod mode;
mod replay;
pub mod saver;
pub mod state;
pub mod step;
pub mod value;
pub mod verify;

pub use error::{
    CADENCE_RECONFIGURATION, Error, FREQUENCY_NOT_POSITIVE, MODE_MISMATCH, MODE_RECONFIGURATION, Result,
    SECOND_OVERWRITE,
};

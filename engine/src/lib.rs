#![doc = include_str!("../README.md")]

pub mod cadence;
pub mod channel;
pub mod checkpoint;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod id;
mod materialize;
pub mod metadata;
pub mod mode;
pub mod saver;
pub mod state;
pub mod step;
pub mod value;

pub use error::{
    CADENCE_RECONFIGURATION, Error, FREQUENCY_NOT_POSITIVE, MODE_MISMATCH, MODE_RECONFIGURATION, Result,
    SECOND_OVERWRITE,
};

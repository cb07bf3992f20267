//! Runs: admission, the worker that lives one run, its stream, its events, its duration.

pub(crate) mod admission;
pub mod bridge;
pub(crate) mod control;
pub(crate) mod duration;
pub(crate) mod frames;
pub(crate) mod journal;
pub(crate) mod worker;

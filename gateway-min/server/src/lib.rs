#![doc = include_str!("../README.md")]

pub mod app;
pub mod auth;
pub mod connections;
pub mod directory;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod http;
mod metrics;
pub mod process;
pub mod program;
pub mod runs;
pub mod streams;
pub mod telemetry;
#[doc(hidden)]
pub mod testing;
mod threads;

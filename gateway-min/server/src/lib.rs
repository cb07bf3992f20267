#![doc = include_str!("../README.md")]

mod agent;
pub mod app;
pub mod auth;
pub mod client;
pub mod console;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod http;
mod metrics;
pub mod model;
pub mod ops;
pub mod runs;
mod serialize;
mod settings;
pub mod store;
pub mod telemetry;
pub mod tools;

pub use threadkeep_config as config;

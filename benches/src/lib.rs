#![doc = include_str!("../README.md")]

pub mod transcript;
pub mod workload;

#[cfg(feature = "runner")]
pub mod case;
#[cfg(feature = "runner")]
pub mod conversation;
#[cfg(feature = "runner")]
pub mod delegation;
#[cfg(feature = "runner")]
pub mod load;
#[cfg(feature = "runner")]
pub mod measure;
#[cfg(feature = "runner")]
pub mod meter;
#[cfg(feature = "runner")]
pub mod raw;
#[cfg(feature = "runner")]
pub mod row;
#[cfg(feature = "runner")]
pub mod runner;
#[cfg(feature = "runner")]
pub mod store;
#[cfg(feature = "runner")]
pub mod summary;

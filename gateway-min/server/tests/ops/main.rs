//! The operator commands as an operator runs them: the binary, on databases that the engine wrote.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

mod backup;
mod batches;
mod configuration;
mod damaged;
mod deleting;
mod errors;
#[path = "../support/graph.rs"]
mod graph;
mod langgraph;
#[cfg(target_os = "linux")]
mod long;
mod looking;
mod moving;
mod postgres;
mod questions;
mod store;

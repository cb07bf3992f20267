//! Runs.

pub mod bridge;

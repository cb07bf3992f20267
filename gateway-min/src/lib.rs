//! Placeholder.

pub mod runs;

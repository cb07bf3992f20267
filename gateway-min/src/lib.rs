//! Placeholder.

pub mod http;
pub mod runs;

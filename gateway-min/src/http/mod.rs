//! The HTTP surface.

pub mod error;
pub mod extract;
pub mod fields;
pub mod run_body;
pub mod sse;

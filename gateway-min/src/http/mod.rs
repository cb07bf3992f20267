//! The HTTP surface.

pub mod error;
pub mod extract;
pub mod fields;
pub mod sse;

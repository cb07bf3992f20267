//! Placeholder.

pub mod model;
pub mod tools;

#![doc = include_str!("../README.md")]

pub mod actor;
pub mod child;
pub mod disk;
mod exercise;
pub mod exercises;
pub mod place;
pub mod report;
pub mod trace;
pub mod vfs;
pub mod witness;

pub use exercise::{Exercise, Tally, Turn};

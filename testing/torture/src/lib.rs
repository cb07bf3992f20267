#![doc = include_str!("../README.md")]

pub mod actor;
pub mod child;
pub mod disk;
mod exercise;
pub mod exercises;
pub mod report;
mod settled;
pub mod storage;
pub mod trace;
pub mod vfs;
pub mod witness;

pub use exercise::{About, Exercise, NotTried, Tally, Turn};

//! The engine through its interface, on savers in memory: one program, which builds faster than many.

// Helpers are test code too, but the lint does not know it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod caches;
mod convert;
mod deletion;
mod doubt;
mod ends;
mod fences;
mod foreign;
mod modes_agree;
mod numbers;
mod open_writers;
mod retention;
mod rewind;
mod steps;
mod verify;

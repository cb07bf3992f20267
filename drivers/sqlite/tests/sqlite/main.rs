//! The SQLite saver beyond the conformance suite: one program, which builds faster than many.

// Helpers are test code too, but the lint does not know it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod backup;
#[path = "../common/mod.rs"]
mod common;
mod contract;
mod crash;
mod damaged;
mod files;
mod fixture;
mod format;
mod handles;
mod locks;
mod model;
mod revisions;
mod size;
mod space;
mod turns;

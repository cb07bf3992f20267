//! The Postgres saver beyond the conformance suite: one program, which builds faster than many.

// Helpers are test code too, but the lint does not know it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod addresses;
mod aside;
mod attempts;
#[path = "../common/mod.rs"]
mod common;
mod concurrency;
mod damage;
mod failover;
mod faults;
mod flush;
mod full;
mod history;
mod listing;
mod memory;
mod memory_model;
mod names;
mod pooler;
mod round_trips;
mod servers;
mod serving;
mod setup;
mod size;
mod third_party;
mod versions;
mod warnings;

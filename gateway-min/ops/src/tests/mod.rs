//! Tests of commands on a store that somebody keeps writing to, or that fails.

mod busy;
mod store;

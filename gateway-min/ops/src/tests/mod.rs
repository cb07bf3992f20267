//! Tests of commands on a store that somebody keeps writing to, or that fails, or whose values are not JSON.

mod busy;
mod commands;
mod importing;
mod states;
mod store;

#![doc = include_str!("../README.md")]

mod change;
mod codec;
mod config;
mod draft;
mod element;
mod error;
mod keys;
mod manifest;
mod plan;
mod pool;
mod read;
mod record;
mod rewrite;
mod rows;
mod saver;
pub mod schema;
mod sql;
mod store;
mod thread;
mod view;

pub use config::{Address, Options};
pub use saver::PostgresSaver;
pub use schema::setup;

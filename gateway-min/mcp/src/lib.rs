#![doc = include_str!("../README.md")]

mod connection;
mod listed;
mod server;
mod servers;
mod tool;

pub use servers::McpServers;

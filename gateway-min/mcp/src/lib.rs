#![doc = include_str!("../README.md")]

mod connection;
mod hidden;
mod listed;
mod server;
mod servers;
mod tool;

pub use hidden::is_of_client;
pub use servers::McpServers;

#![doc = include_str!("../README.md")]

mod connection;
mod http;
mod listed;
mod logged;
mod pipes;
mod schema;
mod server;
mod servers;
mod tool;

pub use logged::is_of_client;
pub use servers::McpServers;

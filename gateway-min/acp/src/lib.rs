#![doc = include_str!("../README.md")]

mod connection;
mod invocation;
mod lines;
mod protocol;
mod servers;
mod tool;

pub use tool::{INVOKE_ACP_AGENT, InvokeAcpAgent, external_agents};

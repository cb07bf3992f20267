//! The gateway: an HTTP server that runs agents on threads kept by Threadkeep.

pub mod config;
pub mod store;

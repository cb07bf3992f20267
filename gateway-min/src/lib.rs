#![doc = include_str!("../README.md")]

mod agent;
pub mod app;
pub mod config;
pub mod model;
pub mod runs;
pub mod http;
mod settings;
pub mod store;
pub mod tools;

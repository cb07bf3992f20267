//! Servers of ours, which are shell scripts or answer over HTTP: well-behaved, hanging, dying, and sending too much.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

mod http;
mod stdio;
mod support;

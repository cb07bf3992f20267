//! The tool against agents of ours, which are shell scripts, well-behaved and hostile.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

mod dialogue;
mod hostile;
mod support;

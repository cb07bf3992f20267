//! What the driver's tests share.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "each test uses its part"
)]

pub mod damage;

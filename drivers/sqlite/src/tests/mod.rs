//! Tests of the whole driver that reach into it.

#[path = "../../tests/common/mod.rs"]
pub(crate) mod common;
pub(crate) mod faults;
mod power;
mod statements;

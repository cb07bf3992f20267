//! Tests of the whole driver that need its internals.

#[path = "../../tests/common/mod.rs"]
pub(crate) mod common;
pub(crate) mod faults;
mod place;
mod power;
mod statements;

//! Tests of the whole driver that need its internals.

mod chunks;
#[path = "../../tests/common/mod.rs"]
pub(crate) mod common;
mod doubt;
pub(crate) mod faults;
mod groups;
mod lists;
mod log;
mod pieces;
mod place;
mod power;
mod reads;
mod remains;
mod remembered;
mod rewritten;
mod statements;
mod vacuum;

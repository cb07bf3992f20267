#![doc = include_str!("../README.md")]

mod group;
mod guard;
mod guarded;
mod program;

pub use group::ProcessGroup;
pub use guard::run_guard_if_asked;
pub use guarded::{ENDS_WITHIN, Guard, Guarded};
pub use program::{Program, SpawnError};

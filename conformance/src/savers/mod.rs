//! The factories of our own savers, for the command and for the drivers' tests. Each is behind a feature of its name.

#[cfg(feature = "memory")]
mod memory;
#[cfg(feature = "sqlite")]
mod sqlite;

#[cfg(feature = "memory")]
pub use memory::Memory;
#[cfg(feature = "sqlite")]
pub use sqlite::Sqlite;

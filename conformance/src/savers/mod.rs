//! The factories of our own savers, for the command and for the drivers' tests, and one for the savers over key-value
//! stores of anybody. Each is behind a feature with the driver's name.

mod cached;
#[cfg(feature = "kv")]
mod kv;
#[cfg(feature = "memory")]
mod memory;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

pub use cached::Cached;
#[cfg(feature = "kv")]
pub use kv::{Directory, Kv};
#[cfg(feature = "memory")]
pub use memory::Memory;
#[cfg(feature = "postgres")]
pub use postgres::Postgres;
#[cfg(feature = "sqlite")]
pub use sqlite::Sqlite;

//! Tests of the records through their interface, and of races, faults and dropped futures: on each database.

mod on_postgres;
mod on_sqlite;
pub(crate) mod support;

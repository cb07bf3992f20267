//! Tests of the store through its interface, and of races, faults and dropped futures: on each database.

pub(super) mod fault;
mod on_postgres;
mod on_sqlite;
mod support;

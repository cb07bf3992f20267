//! Tests of the store through its interface, and of races, faults and dropped futures: on each database.

mod on_postgres;
mod on_sqlite;
mod support;

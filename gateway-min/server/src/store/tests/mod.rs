//! Tests of the store as its users see it, and of what races, faults and dropped futures leave: on each database.

pub(super) mod fault;
mod on_postgres;
mod on_sqlite;
mod support;

//! The names of channels and the row of a thread in Postgres.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep_postgres::fuzzing::names(data));

//! A chunk of a manifest in Postgres.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep_postgres::fuzzing::chunk(data));

//! The tasks of a checkpoint row in Postgres.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep_postgres::fuzzing::tasks(data));

//! The body of a checkpoint row.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep_sqlite::fuzzing::checkpoint(data));

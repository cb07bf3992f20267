//! The body of a scope row.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep_sqlite::fuzzing::scope(data));

//! The checksum that ends a row.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep_sqlite::fuzzing::sealed(data));

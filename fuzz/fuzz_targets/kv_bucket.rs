//! A bucket of rows in a key-value store.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep_kv::fuzzing::bucket(data));

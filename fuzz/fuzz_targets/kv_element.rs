//! An element in a key-value store, compressed or not.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep_kv::fuzzing::element(data));

//! The bodies of a task and of a thread in a key-value store.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep_kv::fuzzing::row(data));

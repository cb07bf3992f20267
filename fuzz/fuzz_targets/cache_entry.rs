//! A path of the history cache in Redis.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep_redis::fuzzing::cache_entry(data));

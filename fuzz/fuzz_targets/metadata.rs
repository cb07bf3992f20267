//! The JSON of a checkpoint's metadata.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep::fuzzing::metadata(data));

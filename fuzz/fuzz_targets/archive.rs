//! The file of an exported thread.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep_ops::fuzzing::archive(data));

//! The text of a configuration file.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep_config::fuzzing::config(data));

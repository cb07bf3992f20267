//! The events of a model's answer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep_agent::fuzzing::answer(data));

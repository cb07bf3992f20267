//! A channel value: MessagePack, cut into elements.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep::fuzzing::value(data));

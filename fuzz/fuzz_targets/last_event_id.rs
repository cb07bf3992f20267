//! The `Last-Event-ID` of a client that comes back.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep_gateway::fuzzing::last_event_id(data));

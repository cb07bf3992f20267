//! A subagent's command line, and the criterion that it is compared with.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep_subagents::fuzzing::command_line(data));

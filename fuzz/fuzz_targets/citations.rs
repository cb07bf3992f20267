//! A subagent's report, with citations of its receipts.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| threadkeep_subagents::fuzzing::citations(data));

//! Random programs of calls on the memory saver and on the naive model.
#![no_main]

use std::sync::LazyLock;

use threadkeep_conformance::fuzzing::Programs;
use threadkeep_conformance::savers::Memory;

static PROGRAMS: LazyLock<Programs> = LazyLock::new(|| Programs::on(Memory));

libfuzzer_sys::fuzz_target!(|data: &[u8]| PROGRAMS.play(data));

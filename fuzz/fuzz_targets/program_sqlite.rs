//! Random programs of calls on the SQLite saver and on the naive model.
#![no_main]

use std::sync::LazyLock;

use threadkeep_conformance::fuzzing::Programs;
use threadkeep_conformance::savers::Sqlite;

static PROGRAMS: LazyLock<Programs> = LazyLock::new(|| Programs::on(Sqlite));

libfuzzer_sys::fuzz_target!(|data: &[u8]| PROGRAMS.play(data));

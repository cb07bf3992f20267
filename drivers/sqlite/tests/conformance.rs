//! The conformance suite on the SQLite saver.

use std::process::ExitCode;

use threadkeep_conformance::savers::Sqlite;

fn main() -> ExitCode {
    threadkeep_conformance::main(Sqlite)
}

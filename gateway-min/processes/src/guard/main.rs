//! A guard and nothing else, for tests and for programs that are not the `threadkeep` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    threadkeep_processes::run_guard_if_asked().unwrap_or(ExitCode::from(2))
}

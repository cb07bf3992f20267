//! The guard of the tests' servers; that of the gateway's is the gateway.

use std::process::ExitCode;

fn main() -> ExitCode {
    threadkeep_processes::run_guard_if_asked().unwrap_or(ExitCode::from(2))
}

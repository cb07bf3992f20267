//! The `threadkeep` binary.

use std::process::ExitCode;

use threadkeep_gateway::program;
use threadkeep_storage::Stores;

fn main() -> ExitCode {
    program::main(Stores::default())
}

//! The conformance suite on the memory saver.

use std::process::ExitCode;

use threadkeep_conformance::savers::Memory;

fn main() -> ExitCode {
    threadkeep_conformance::main(Memory)
}

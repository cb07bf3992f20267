//! The suite on the memory saver behind a history cache: a decorated saver must do everything that it does alone.

use std::process::ExitCode;

use threadkeep_conformance::savers::{Cached, Memory};

fn main() -> ExitCode {
    threadkeep_conformance::main(Cached(Memory))
}

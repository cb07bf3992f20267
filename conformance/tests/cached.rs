//! The suite on the memory saver behind a history cache: a saver in a decorated stack must do all that it does alone.

use std::process::ExitCode;

use threadkeep_conformance::savers::{Cached, Memory};

fn main() -> ExitCode {
    threadkeep_conformance::main(Cached(Memory))
}

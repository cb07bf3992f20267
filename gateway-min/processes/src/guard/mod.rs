//! The guard: a process between the gateway and a program, which ends everything that the program starts.

use std::process::ExitCode;
use std::time::Duration;

#[cfg(target_os = "linux")]
mod descendants;
#[cfg(target_os = "linux")]
mod watch;

/// The first argument of a guard. The others are the program and its arguments.
pub(crate) const GUARD: &str = "guard-a-program";

/// How long a program has to end by itself when its standard input is closed.
pub(crate) const TERM_AFTER: Duration = Duration::from_millis(250);
/// How long it then has to obey SIGTERM.
pub(crate) const KILL_AFTER: Duration = Duration::from_millis(450);

/// Makes this process a guard, if it was started as one, and returns its exit code when everything has ended. `None`: it
/// was not. Call it first in `main`.
pub fn run_guard_if_asked() -> Option<ExitCode> {
    let mut args = std::env::args_os().skip(1);
    if args.next()? != GUARD {
        return None;
    }
    Some(guard(&args.collect::<Vec<_>>()))
}

#[cfg(target_os = "linux")]
fn guard(command: &[std::ffi::OsString]) -> ExitCode {
    watch::guard(command)
}

#[cfg(not(target_os = "linux"))]
fn guard(_: &[std::ffi::OsString]) -> ExitCode {
    use std::io::Write as _;
    // The gateway reads it.
    let _ = writeln!(std::io::stderr(), "external programs can be run on Linux only");
    ExitCode::FAILURE
}

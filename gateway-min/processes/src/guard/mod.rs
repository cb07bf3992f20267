//! The guards: a process between the gateway and a program, which ends everything that the program starts; or one
//! beside a command, which kills its process group when the gateway is gone.

use std::ffi::OsStr;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[cfg(target_os = "linux")]
mod descendants;
mod group;
#[cfg(target_os = "linux")]
mod watch;

/// The first argument of a guard. The others are the program and its arguments.
pub(crate) const GUARD: &str = "guard-a-program";
/// The only argument of the guard of a process group.
pub(crate) const GROUP_GUARD: &str = "guard-a-group";
/// The file that runs, even if an update has replaced it meanwhile.
pub(crate) const THIS_PROGRAM: &str = "/proc/self/exe";

/// Whether this program was asked at its start whether it is to be a guard. One that was not, as that of a test, would
/// do its own work in the place of a guard's.
static CAN_GUARD: AtomicBool = AtomicBool::new(false);

/// How long a program has to end by itself when its standard input is closed.
pub(crate) const TERM_AFTER: Duration = Duration::from_millis(250);
/// How long it then has to obey SIGTERM.
pub(crate) const KILL_AFTER: Duration = Duration::from_millis(450);

/// Makes this process a guard, if it was started as one, and returns its exit code when everything has ended. `None`: it
/// was not; from then on each command that it starts gets a guard, on Linux. Call it first in `main`.
pub fn run_guard_if_asked() -> Option<ExitCode> {
    let mut args = std::env::args_os().skip(1);
    let asked = args.next();
    match asked.as_deref().and_then(OsStr::to_str) {
        Some(GUARD) => Some(guard(&args.collect::<Vec<_>>())),
        Some(GROUP_GUARD) => Some(group::guard()),
        _ => {
            CAN_GUARD.store(cfg!(target_os = "linux"), Ordering::Relaxed);
            None
        }
    }
}

/// Whether [`THIS_PROGRAM`] can be a guard.
pub(crate) fn can_guard() -> bool {
    CAN_GUARD.load(Ordering::Relaxed)
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

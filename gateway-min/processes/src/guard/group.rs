//! Kills a process group when the gateway is gone.

use std::io::Read as _;
use std::process::ExitCode;

use rustix::process::{Pid, Signal, kill_process_group};

/// Waits for the end of the gateway, which is that of the input, and kills the group whose id was read. A gateway that
/// goes on ends this process before it closes the input.
pub(super) fn guard() -> ExitCode {
    let mut id = Vec::new();
    // An error ends the input, too.
    let _ = std::io::stdin().read_to_end(&mut id);
    // Without an id the gateway died before it started the command.
    let id = <[u8; 4]>::try_from(id.as_slice()).ok().map(i32::from_ne_bytes);
    if let Some(leader) = id.and_then(Pid::from_raw) {
        // Fails if all have ended, which is the goal.
        let _ = kill_process_group(leader, Signal::KILL);
    }
    ExitCode::SUCCESS
}

//! The processes that a command starts.

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::Child;

/// The process group of a command, which was started with `process_group(0)`. All of it is killed when this is dropped,
/// whether the command has ended or not.
#[derive(Debug)]
pub struct ProcessGroup(Option<Pid>);

impl ProcessGroup {
    /// The group that `child` leads.
    pub fn of(child: &Child) -> Self {
        Self(child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw))
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if let Some(leader) = self.0 {
            // Fails if all have ended, which is the goal. The process group's id cannot be reused while one of its
            // processes lives.
            let _ = kill_process_group(leader, Signal::KILL);
        }
    }
}

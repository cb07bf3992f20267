//! A command that runs in a process group of its own, as the gateway sees it.

use std::io::{PipeWriter, Write as _};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};

use super::guard::{GROUP_GUARD, THIS_PROGRAM, can_guard};

/// The process group of a command. All of it is killed when this is dropped, whether the command has ended or not, and
/// also when the gateway dies: a guard sees to that if this program [can be one](crate::run_guard_if_asked).
#[derive(Debug)]
pub struct ProcessGroup {
    leader: Option<Pid>,
    /// Held: it lives as long as this does.
    _guard: Option<GroupGuard>,
}

/// A guard of a process group. Dropping it ends it, and leaves the group alone.
#[derive(Debug)]
struct GroupGuard {
    /// Dropped, which kills it, before its input ends: by then the group's id may be that of another one.
    _process: Child,
    /// Ends with the gateway.
    input: PipeWriter,
}

impl ProcessGroup {
    /// Starts `command` as the leader of a process group of its own.
    ///
    /// The guard runs beside the command, not above it: exit code, signals and standard streams stay the command's own,
    /// and its parent stays the gateway, whose environment it cannot read.
    ///
    /// # Errors
    /// The command, or its guard, cannot be started.
    pub fn spawn(command: &mut Command) -> std::io::Result<(Child, Self)> {
        // First: nothing but a write lies between the start of the command and the moment from which it is guarded.
        let mut guard = if can_guard() { Some(GroupGuard::start()?) } else { None };
        let child = command.process_group(0).kill_on_drop(true).spawn()?;
        let leader = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        let watching = match (&mut guard, leader) {
            (Some(guard), Some(leader)) => guard.watch(leader),
            _ => Ok(()),
        };
        let group = Self { leader, _guard: guard };
        // After an error the group is dropped, and with it the command.
        watching.map(|()| (child, group))
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if let Some(leader) = self.leader {
            // Fails if all have ended, which is the goal. The process group's id cannot be reused while one of its
            // processes lives.
            let _ = kill_process_group(leader, Signal::KILL);
        }
    }
}

impl GroupGuard {
    fn start() -> std::io::Result<Self> {
        let (output, input) = std::io::pipe()?;
        let process = Command::new(THIS_PROGRAM)
            .arg(GROUP_GUARD)
            .env_clear()
            .stdin(output)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Neither a signal of the terminal nor one to the group of the command or the gateway reaches the guard.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        Ok(Self { _process: process, input })
    }

    /// Has the group of `leader` killed when the gateway dies. Does not block: the pipe is empty.
    fn watch(&mut self, leader: Pid) -> std::io::Result<()> {
        self.input.write_all(&leader.as_raw_nonzero().get().to_ne_bytes())
    }
}

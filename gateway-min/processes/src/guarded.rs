//! A running program and its guard, as the gateway sees them.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::task::JoinHandle;

use super::guard::{GUARD, KILL_AFTER, TERM_AFTER, THIS_PROGRAM};
use super::program::{Program, SpawnError};

/// How much of the end of a program's standard error is kept, in bytes.
const SAID_MAX: usize = 2_000;

/// How long a program has to end by itself, and then to obey a signal, before it is killed.
pub const ENDS_WITHIN: Duration = TERM_AFTER.saturating_add(KILL_AFTER);
/// How long a guard may take beyond that.
const GUARD_GRACE: Duration = Duration::from_secs(2);

/// Starts programs under guards.
#[derive(Debug, Clone)]
pub struct Guard {
    program: PathBuf,
}

/// A program that was started with [`Guard::spawn`]. Dropping it ends the program and everything that it started, within
/// [`ENDS_WITHIN`], without waiting for it.
#[derive(Debug)]
pub struct Guarded {
    guard: Child,
    said: Arc<Mutex<VecDeque<u8>>>,
    listening: JoinHandle<()>,
}

impl Guard {
    /// Guards that are this program, whose `main` calls [`run_guard_if_asked`](crate::run_guard_if_asked).
    pub fn this_program() -> Self {
        Self::program(THIS_PROGRAM)
    }

    /// Guards that are the program in this file.
    pub fn program(program: impl Into<PathBuf>) -> Self {
        Self { program: program.into() }
    }

    /// Starts `program` under a guard. Closing the standard input, which is returned with the standard output, ends it.
    ///
    /// # Errors
    /// [`SpawnError`]. A program that the operating system cannot execute starts and ends at once; it
    /// [says](Guarded::said) why.
    pub fn spawn(&self, program: &Program) -> Result<(Guarded, ChildStdin, ChildStdout), SpawnError> {
        let failed = |source| SpawnError::Failed { command: program.command.clone(), source };
        let file = program.resolved()?;
        let mut guard = Command::new(&self.program)
            .arg(GUARD)
            .arg(file)
            .args(&program.args)
            .current_dir(&program.directory)
            .env_clear()
            .envs(program.environment())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Neither a signal of the terminal nor one to the program's group reaches the guard.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let (stdin, stdout, stderr) = (guard.stdin.take(), guard.stdout.take(), guard.stderr.take());
        let (Some(stdin), Some(stdout), Some(stderr)) = (stdin, stdout, stderr) else {
            return Err(failed(std::io::Error::other("it has no pipes")));
        };
        let said = Arc::default();
        let listening = tokio::spawn(keep_end(stderr, Arc::clone(&said)));
        Ok((Guarded { guard, said, listening }, stdin, stdout))
    }
}

impl Guarded {
    /// The end of what the program has written to its standard error, at most 2,000 bytes.
    pub fn said(&self) -> String {
        let said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: Vec<u8> = said.iter().copied().collect();
        String::from_utf8_lossy(&bytes).trim().to_owned()
    }

    /// Ends the program by closing its standard input, and returns when nothing of it is left, or when its guard takes
    /// too long, which goes on then.
    pub async fn end(mut self, stdin: ChildStdin) {
        drop(stdin);
        self.ended().await;
    }

    /// Waits for the end of a program whose standard input is closed, or which ends by itself. `None` if its guard
    /// takes too long; it goes on, and may be waited for again.
    pub async fn ended(&mut self) -> Option<ExitStatus> {
        if let Ok(status) = tokio::time::timeout(ENDS_WITHIN + GUARD_GRACE, self.guard.wait()).await {
            // Nobody is left who could say more.
            let _ = tokio::time::timeout(GUARD_GRACE, &mut self.listening).await;
            return status.ok();
        }
        // The machine is busy, or the kernel holds a process. Only the guard ends what is left: it is not killed.
        None
    }
}

/// Reads to the end, and keeps the end of it.
async fn keep_end(mut stream: impl AsyncRead + Unpin, kept: Arc<Mutex<VecDeque<u8>>>) {
    let mut buffer = [0; 1024];
    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(&buffer[..count]);
        let excess = kept.len().saturating_sub(SAID_MAX);
        kept.drain(..excess);
    }
}

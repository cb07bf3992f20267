//! Servers that end with the test process.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::Result;
use crate::tools::User;

/// How long a server may take to answer.
const PATIENCE: Duration = Duration::from_mins(10);
/// The pause between two checks.
const PAUSE: Duration = Duration::from_millis(10);

/// A server, started and stopped by a shell that watches a pipe from this process: when this process ends in any way,
/// the pipe closes, and the shell kills the server and removes its directory.
pub(crate) struct Supervisor {
    directory: PathBuf,
    shell: Child,
    orders: Mutex<Orders>,
}

struct Orders {
    /// `None` once the server is to end.
    ask: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Supervisor {
    /// Takes over a directory and the command of a server in it, which is not started yet and is stopped with `signal`.
    pub(crate) fn new(
        user: User,
        directory: TempDir,
        signal: &str,
        program: &Path,
        args: &[&str],
    ) -> Result<Self> {
        let path = directory.path().to_owned();
        let mut shell = user.command(Path::new("/bin/sh"), &path);
        shell
            .args(["-c", include_str!("supervisor.sh"), "supervisor"])
            .arg(&path)
            .arg(signal)
            .arg(program)
            .args(args);
        // An interrupt from the terminal is for the tests; the supervisor notices when they end.
        shell.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = shell.spawn()?;
        let _now_the_shell_removes_it = directory.keep();
        let (ask, answers) = (shell.stdin.take(), shell.stdout.take());
        let answers = BufReader::new(answers.ok_or("the supervisor has no pipes")?);
        Ok(Self { directory: path, shell, orders: Mutex::new(Orders { ask, answers }) })
    }

    /// Starts the server and waits until `ready` returns true.
    pub(crate) fn start(&self, mut ready: impl FnMut() -> bool) -> Result<()> {
        self.order("start")?;
        let started = Instant::now();
        while !ready() {
            if started.elapsed() > PATIENCE {
                let log = fs::read_to_string(self.directory.join("log")).unwrap_or_default();
                self.stop()?;
                return Err(format!("the server did not answer; its log:\n{log}").into());
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Ends the server and waits until it has ended.
    pub(crate) fn stop(&self) -> Result<()> {
        self.order("stop")
    }

    /// The same with another signal.
    pub(crate) fn stop_with(&self, signal: &str) -> Result<()> {
        self.order(&format!("stop {signal}"))
    }

    fn order(&self, order: &str) -> Result<()> {
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ask) = &mut orders.ask {
            writeln!(ask, "{order}")?;
        }
        let mut answer = String::new();
        orders.answers.read_line(&mut answer)?;
        if order.split(' ').next() == Some(answer.trim()) {
            Ok(())
        } else {
            Err(format!("the supervisor of {} has ended", self.directory.display()).into())
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.orders.get_mut().unwrap_or_else(PoisonError::into_inner).ask = None;
        let _whatever_it_ended_with = self.shell.wait();
    }
}

//! A process for a job: this program again, or Python.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::case::Kind;
use crate::measure::Job;
use crate::row::{Row, parse};

/// The program that sends the operations to LangGraph's savers.
const DRIVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/driver.py");

/// Starts a process for a job and waits for it; after `patience` it is killed, and the row says so. Its last line of
/// output is the row.
pub(super) fn run(job: &Job, python: Option<&Path>, directory: &Path, patience: Duration) -> Result<Row> {
    let text = serde_json::to_string(job)?;
    let mut command = if let (Kind::Peer, Some(python)) = (job.case.backend.kind(), python) {
        let mut command = Command::new(python);
        command.arg(DRIVER);
        command
    } else {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("job");
        command
    };
    command.arg(&text);
    let errors = directory.join("stderr");
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(File::create(&errors)?).spawn()?;
    let output = child.stdout.take().context("the process has no output")?;
    let (lines, incoming) = channel();
    let reading = std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if lines.send(line).is_err() {
                break;
            }
        }
    });
    let (deadline, mut last, mut killed) = (Instant::now() + patience, None, false);
    loop {
        match incoming.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => last = Some(line),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                child.kill()?;
                killed = true;
                break;
            }
        }
    }
    let status = child.wait()?;
    // The process has exited, so its end of the pipe is closed.
    let _ended = reading.join();
    if !status.success() && !killed {
        let said = fs::read_to_string(&errors).unwrap_or_default();
        let said = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it printed nothing");
        bail!("{status}: {said}");
    }
    let mut row = match last {
        Some(line) => parse(&line)?.pop().context("the process reported nothing")?,
        None if killed => Row::new(job.case.clone()),
        None => bail!("the process reported nothing"),
    };
    if killed {
        row.found.capped = Some("killed".to_owned());
    }
    Ok(row)
}

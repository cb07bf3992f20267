//! A process for a job: this program again, or Python.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::case::Kind;
use crate::measure::{Job, Phase};
use crate::row::{Row, parse};

/// The program that sends the operations to LangGraph's savers.
const DRIVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/driver.py");

/// Starts a process for a job and waits for it; its last line of output is the row. After `patience` it is killed: then
/// the row of a writer has what was measured until then, and the error.
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
    finished(command, job.phase, directory, patience)
}

fn finished(mut command: Command, phase: Phase, directory: &Path, patience: Duration) -> Result<Row> {
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
    let hung = killed.then(|| format!("it hung, and was killed after {} s", patience.as_secs()));
    row_of(last.as_deref(), phase, hung)
}

/// The row in the last line. A process that hung has not read what it should: its case does not count, although what it
/// had written is shown.
fn row_of(last: Option<&str>, phase: Phase, hung: Option<String>) -> Result<Row> {
    match (last, hung) {
        (Some(line), Some(hung)) if phase == Phase::Write => {
            let mut row = row_in(line)?;
            row.found.error = Some(hung);
            Ok(row)
        }
        (_, Some(hung)) => bail!(hung),
        (Some(line), None) => row_in(line),
        (None, None) => bail!("the process reported nothing"),
    }
}

fn row_in(line: &str) -> Result<Row> {
    parse(line)?.pop().context("the process reported nothing")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::Matrix;

    const PHASES: [Phase; 3] = [Phase::Write, Phase::ColdHead, Phase::ColdBack];

    #[test]
    fn a_process_that_is_killed_has_failed() {
        let directory = tempfile::tempdir().unwrap();
        for phase in PHASES {
            let mut command = Command::new("sleep");
            command.arg("1000");
            let error = finished(command, phase, directory.path(), Duration::ZERO).unwrap_err();
            assert_eq!(error.to_string(), "it hung, and was killed after 0 s");
        }
    }

    #[test]
    fn what_a_killed_writer_had_measured_is_shown_and_does_not_count() {
        let mut row = Row::new(Matrix::default().cases().remove(0));
        row.found.turns_done = Some(7);
        let line = serde_json::to_string(&row).unwrap();
        let killed = || Some("killed".to_owned());
        let shown = row_of(Some(&line), Phase::Write, killed()).unwrap().found;
        assert_eq!((shown.turns_done, shown.error, shown.capped), (Some(7), killed(), None));
        assert!(row_of(Some(&line), Phase::ColdHead, killed()).is_err());
        for phase in PHASES {
            assert!(row_of(None, phase, killed()).is_err() && row_of(None, phase, None).is_err());
            let ended = row_of(Some(&line), phase, None).unwrap().found;
            assert_eq!((ended.turns_done, ended.error), (Some(7), None));
        }
    }
}

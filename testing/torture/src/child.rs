//! Child processes: this crate's binary again, with work to do on a store until it is killed.

use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Stdio;
use std::str::FromStr as _;
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use clap::{Args, ValueEnum};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::Flush;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout, Command};

use crate::actor::{Actor, accessor};
use crate::exercise::Turn;
use crate::exercises::{processes, registers};
use crate::storage::{Kind, open_at};
use crate::witness::{Watch, Witness};

/// The work of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Work {
    /// Does what an actor does with the seed, and prints the number of each acknowledged write.
    Act,
    /// Adds to a shared thread, and prints what was acknowledged.
    Share,
    /// Writes to an SQLite file and moves its log into it, again and again.
    Checkpoint,
    /// Reads registers and appends to them, as it is asked line by line.
    Registers,
}

/// The arguments of a child process.
#[derive(Debug, Args)]
pub struct Task {
    /// Its work.
    work: Work,
    /// The saver.
    saver: Kind,
    /// The address of the store.
    address: String,
    /// The seed.
    seed: u64,
}

/// The number of the signal that ends a child.
const SIGKILL: i32 = 9;
/// The most that a child adds to a shared thread.
const LINES: usize = 60;

struct Say;

impl Watch for Say {
    fn began(&self, _: usize) {}

    fn acknowledged(&self, n: usize, _: Flush) {
        say(&n.to_string());
    }
}

/// Prints a line for the parent.
pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A parent that is gone needs no answer.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Does the work of a child.
///
/// # Errors
/// What went wrong; it is reported to the parent.
pub async fn work(task: Task) -> anyhow::Result<()> {
    let Task { work, saver, address, seed } = task;
    match work {
        Work::Act => {
            let seen = Arc::new(Witness::new(open_at(saver, &address).await?, Some(Arc::new(Say))));
            let mut actor = Actor::new(seen, seed)?;
            loop {
                actor.step().await?;
            }
        }
        Work::Share => {
            let saver = open_at(saver, &address).await?;
            let accessor = accessor(&saver, ChannelMode::Delta, seed)?;
            for n in 0..LINES {
                let text = format!("{seed}/{n}");
                processes::say_for_sure(&accessor, &text).await?;
                say(&text);
            }
            // Until it is killed.
            std::future::pending().await
        }
        Work::Checkpoint => processes::checkpoint_for_ever(Path::new(&address)),
        Work::Registers => registers::serve(&address).await,
    }
}

/// A child as seen by its parent. It is killed when this is dropped.
pub(crate) struct Child {
    process: tokio::process::Child,
    questions: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Child {
    /// Starts a child.
    pub(crate) fn start(turn: &Turn, work: Work, address: &str, seed: u64) -> anyhow::Result<Self> {
        let work = work.to_possible_value().context("a work without a name")?;
        let mut process = Command::new(&turn.program)
            .args(["child", work.get_name(), turn.saver.name(), address, &seed.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("{} does not start", turn.program.display()))?;
        let questions = process.stdin.take().context("the child has no input")?;
        let out = process.stdout.take().context("the child has no output")?;
        Ok(Self { process, questions, lines: BufReader::new(out).lines() })
    }

    /// What it answers to a line.
    pub(crate) async fn ask(&mut self, question: &str) -> anyhow::Result<String> {
        // If it has ended, that is what is heard.
        let _it_may_have_ended = self.questions.write_all(format!("{question}\n").as_bytes()).await;
        self.hear().await
    }

    /// The next line that it prints.
    pub(crate) async fn hear(&mut self) -> anyhow::Result<String> {
        match self.lines.next_line().await? {
            Some(line) => Ok(line),
            None => bail!("the child ended by itself: {}; see its output above", self.process.wait().await?),
        }
    }

    /// Kills it with SIGKILL, so that it cannot clean up. Returns its last lines.
    ///
    /// # Errors
    /// If it ended by itself, which it does only if it has found something.
    pub(crate) async fn kill(mut self) -> anyhow::Result<Vec<String>> {
        self.process.start_kill()?;
        let ended = self.process.wait().await?;
        ensure!(ended.signal() == Some(SIGKILL), "the child ended by itself: {ended}; see its output above");
        let mut last = Vec::new();
        while let Some(line) = self.lines.next_line().await? {
            last.push(line);
        }
        Ok(last)
    }
}

/// A number that a child printed; none if the line is truncated.
pub(crate) fn number(line: &str) -> Option<usize> {
    usize::from_str(line).ok()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::exercise::Tally;
    use crate::storage::HUNG;

    #[tokio::test]
    async fn a_child_that_ended_by_itself_is_not_taken_for_a_killed_one() {
        // It prints its arguments, and ends.
        let program = "echo".into();
        let turn = Turn { seed: 1, effort: 1, saver: Kind::Memory, program, tally: Tally::default() };
        let mut child = Child::start(&turn, Work::Act, "nowhere", 1).unwrap();
        assert_eq!(child.hear().await.unwrap(), "child act memory nowhere 1");
        let stat = format!("/proc/{}/stat", child.process.id().unwrap());
        let began = Instant::now();
        // Until it has ended; it stays there until somebody waits for it.
        while !std::fs::read_to_string(&stat).unwrap().contains(") Z ") {
            assert!(began.elapsed() < HUNG, "it does not end");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let error = child.kill().await.unwrap_err();
        assert!(error.to_string().starts_with("the child ended by itself"), "{error}");
    }
}

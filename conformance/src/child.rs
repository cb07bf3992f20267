//! Child processes that the suite starts to kill them: this program once more, told by its environment what to do.
//!
//! A child says on its standard output what it was promised by the saver, a line for each, before it goes on. What it
//! has said by the time of its death must be true of the store afterwards.

use std::io::Write as _;
use std::process::{ExitCode, Stdio};

use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{ChildStdout, Command};

use crate::case::Failure;
use crate::cases::killed;
use crate::factory::{Factory, Store};

const SAVER: &str = "THREADKEEP_CONFORMANCE_CHILD_OF";
const ADDRESS: &str = "THREADKEEP_CONFORMANCE_ADDRESS";
const WORK: &str = "THREADKEEP_CONFORMANCE_WORK";

/// What a line of ours begins with; the program may have other things to say.
const MARK: &str = "threadkeep-child: ";
const FAILED: &str = "failed: ";

/// Does the work of a child process, if this is one that was started for a factory of this name. For a program with a
/// `main` of its own, which must ask this first; [`crate::main`] does.
pub fn child<F: Factory>(factory: &F) -> Option<ExitCode> {
    let told = |name| std::env::var(name).ok();
    if told(SAVER)? != factory.name() {
        return None;
    }
    let (address, work) = (told(ADDRESS)?, told(WORK)?);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let done = runtime.map_err(Failure::from).and_then(|runtime| {
        runtime.block_on(async {
            let saver = factory.open_at(&address).await.map_err(Failure::new)?;
            killed::work(&work, saver).await
        })
    });
    Some(match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // The parent sees the end of the child if even this cannot be said.
            drop(say(&format!("{FAILED}{}", failure.to_string().replace('\n', " "))));
            ExitCode::FAILURE
        }
    })
}

/// Says a line to the parent.
pub(crate) fn say(what: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{MARK}{what}")?;
    out.flush()
}

/// A child, seen from its parent. Dropping it kills it.
pub(crate) struct Child {
    process: tokio::process::Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Child {
    /// Starts a child that does this work on the store.
    pub(crate) fn start(store: &Store, work: &str) -> Result<Self, Failure> {
        let (saver, address, command) = store.child()?;
        let mut process = Command::from(command)
            .env(SAVER, saver)
            .env(ADDRESS, address)
            .env(WORK, work)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let out = process.stdout.take().ok_or_else(|| Failure::new("the child has no output"))?;
        Ok(Self { process, lines: BufReader::new(out).lines() })
    }

    /// What the child says next; none when it has ended.
    pub(crate) async fn heard(&mut self) -> Result<Option<String>, Failure> {
        while let Some(line) = self.lines.next_line().await? {
            let Some((_, said)) = line.split_once(MARK) else { continue };
            if let Some(failure) = said.strip_prefix(FAILED) {
                return Err(Failure::new(format_args!("the child failed: {failure}")));
            }
            return Ok(Some(said.to_owned()));
        }
        Ok(None)
    }

    /// What the child says next.
    pub(crate) async fn hear(&mut self) -> Result<String, Failure> {
        let said = self.heard().await?;
        said.ok_or_else(|| {
            Failure::new("the child ended by itself; does its main call threadkeep_conformance::main?")
        })
    }

    /// Kills it, in the way that leaves it no time for anything, and returns what it said last.
    pub(crate) async fn kill(mut self) -> Result<Vec<String>, Failure> {
        self.process.kill().await?;
        let mut last = Vec::new();
        while let Some(said) = self.heard().await? {
            last.push(said);
        }
        Ok(last)
    }
}

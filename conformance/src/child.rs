//! Child processes that the suite starts and kills: this program again, with its task in the environment.
//!
//! A child prints a line for each promise of the saver before it continues. What it has printed by the time of its
//! death must be true of the store afterwards.

use std::io::Write as _;
use std::process::{ExitCode, Stdio};

use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{ChildStdout, Command};

use crate::case::Failure;
use crate::cases::killed;
use crate::factory::{Factory, Store};
use crate::waits::Waits;

const SAVER: &str = "THREADKEEP_CONFORMANCE_CHILD_OF";
const ADDRESS: &str = "THREADKEEP_CONFORMANCE_ADDRESS";
const WORK: &str = "THREADKEEP_CONFORMANCE_WORK";

/// The prefix of our lines; the program may print others.
const MARK: &str = "threadkeep-child: ";
const FAILED: &str = "failed: ";

/// Runs the work of a child process, if this process is one for a factory of this name. For a program with its own
/// `main`, which must call this first; [`crate::main`] does.
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
            // If even this cannot be printed, the parent sees that the child has ended.
            drop(say(&format!("{FAILED}{}", failure.to_string().replace('\n', " "))));
            ExitCode::FAILURE
        }
    })
}

/// Ends a child of another factory: it would run a whole suite before it did what its parent waits for.
pub(crate) fn stray<F: Factory>(factory: &F) -> Option<ExitCode> {
    let saver = std::env::var(SAVER).ok()?;
    let own = factory.name();
    drop(say(&format!(
        "{FAILED}it is for {saver:?}; its main must call threadkeep_conformance::child for that before \
         threadkeep_conformance::main for {own:?}"
    )));
    Some(ExitCode::FAILURE)
}

/// Prints a line for the parent.
pub(crate) fn say(what: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{MARK}{what}")?;
    out.flush()
}

/// A child process, as seen by its parent. Dropping it kills it.
pub(crate) struct Child {
    process: tokio::process::Child,
    lines: Lines<BufReader<ChildStdout>>,
    waits: Waits,
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
        Ok(Self { process, lines: BufReader::new(out).lines(), waits: store.waits.clone() })
    }

    /// The child's next line; `None` when it has ended.
    pub(crate) async fn heard(&mut self) -> Result<Option<String>, Failure> {
        let _wait = self.waits.begin("a line that a child process should print");
        while let Some(line) = self.lines.next_line().await? {
            let Some((_, said)) = line.split_once(MARK) else { continue };
            if let Some(failure) = said.strip_prefix(FAILED) {
                return Err(Failure::new(format_args!("the child failed: {failure}")));
            }
            return Ok(Some(said.to_owned()));
        }
        Ok(None)
    }

    /// The child's next line.
    pub(crate) async fn hear(&mut self) -> Result<String, Failure> {
        let said = self.heard().await?;
        said.ok_or_else(|| {
            Failure::new("the child ended by itself; does its main call threadkeep_conformance::main?")
        })
    }

    /// Kills it without giving it time for anything, and returns its remaining lines.
    pub(crate) async fn kill(mut self) -> Result<Vec<String>, Failure> {
        self.process.kill().await?;
        let mut last = Vec::new();
        while let Some(said) = self.heard().await? {
            last.push(said);
        }
        Ok(last)
    }
}

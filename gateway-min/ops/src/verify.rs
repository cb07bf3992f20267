//! `threadkeep verify`: checks every invariant of a store, and makes the safe repairs.

use std::collections::HashSet;
use std::io::Write as _;

use clap::Args;
use serde_json::json;
use threadkeep::Error;
use threadkeep::channel::ChannelTable;
use threadkeep::id::ThreadId;
use threadkeep::saver::Saver;
use threadkeep::verify::{Violation, repair, verify};
use threadkeep_langgraph::is_of_langgraph;

use super::error::{Exit, OpsError, Result};
use super::output::{Out, confirmed, count, cut, one_line, things};
use super::progress::Progress;
use super::target::{StoreArgs, Target, Threads, retried_while_stale};

/// Check every invariant of threads and of the database.
///
/// Lineages, applied rows, replay, markers, counters, versions; on SQLite also every row's checksum, every reference,
/// and unreferenced rows. Prints one line per violation, with its ids. Writers can continue meanwhile.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  threadkeep verify --all
  threadkeep verify --thread my-thread --json
  threadkeep verify --all --repair

Exit codes: 0 no violations, or all repaired; 3 violations remain.

--json prints one document per line, one for each violation, then one with the counts.

A damaged part of the database does not end the check: the threads in it are named, and the others are checked.

--repair fixes what can be fixed safely: markers and counters, and unreferenced rows. For the rest, restore a backup
(docs/backup.md), or prune or delete the damaged part.")]
pub(crate) struct VerifyCommand {
    #[command(flatten)]
    threads: Threads,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Make the safe repairs, after confirmation.
    #[arg(long)]
    repair: bool,
    /// Do not ask for confirmation.
    #[arg(long, requires = "repair")]
    yes: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The longest line for people.
const LINE_CHARS: usize = 1_000;

/// What helps against what cannot be repaired.
const REMEDY: &str = "What --repair does not fix: restore a backup (docs/backup.md), or export the threads that are not \
    named above and import them into a new store.";

/// A violation for output.
struct Line {
    thread: Option<String>,
    namespace: Option<String>,
    checkpoint: Option<String>,
    rule: String,
    found: String,
    text: String,
    repairable: bool,
}

impl Line {
    fn of(violation: &Violation) -> Self {
        let (namespace, checkpoint) = violation.at.clone().unzip();
        Self {
            thread: Some(violation.thread.to_string()),
            namespace: namespace.map(|namespace| namespace.to_string()),
            checkpoint: checkpoint.map(|id| id.to_string()),
            rule: violation.rule.to_string(),
            found: violation.found.clone(),
            text: violation.to_string(),
            repairable: violation.rule.is_repairable(),
        }
    }
}

/// The table of a thread that LangGraph wrote, whose reducers are not known here.
async fn foreign(saver: &dyn Saver, thread: &ThreadId) -> Option<ChannelTable> {
    // What cannot be read is reported by `verify`.
    is_of_langgraph(saver, thread).await.unwrap_or_default().then(ChannelTable::foreign)
}

impl VerifyCommand {
    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<Exit> {
        let mut lines = Vec::new();
        let mut threads = self.checked(target, out, &mut lines).await?;
        let repairable = lines.iter().filter(|line| line.repairable).count();
        let mut repaired = 0;
        if self.repair && repairable > 0 {
            // Show what would be repaired before asking.
            for line in lines.iter().filter(|line| line.repairable && !self.json) {
                out.line(format!("repairable: {}", one_line(&line.text)))?;
            }
            out.flush()?;
            self.ask(repairable)?;
            self.put_right(target).await?;
            let found = lines.len();
            lines.clear();
            threads = self.checked(target, out, &mut lines).await?;
            repaired = found.saturating_sub(lines.len());
        }
        self.print(out, &lines)?;
        let damaged: HashSet<&str> = lines.iter().filter_map(|line| line.thread.as_deref()).collect();
        let intact = threads.iter().filter(|thread| !damaged.contains(thread.as_str())).count();
        if self.json {
            out.json(&json!({
                "threads": threads.len(), "intact": intact, "violations": lines.len(), "repaired": repaired,
            }))?;
            return Ok(if lines.is_empty() { Exit::Done } else { Exit::Found });
        }
        if lines.is_empty() {
            let repaired =
                if repaired > 0 { format!(", {} were repaired", count(repaired)) } else { String::new() };
            out.line(format!("{}: no violations{repaired}.", things(threads.len(), "thread")))?;
            return Ok(Exit::Done);
        }
        out.line(format!(
            "{}: {}, {} repaired. In {} of the threads nothing was found.",
            things(threads.len(), "thread"),
            things(lines.len(), "violation"),
            count(repaired),
            count(intact)
        ))?;
        if lines.iter().any(|line| !line.repairable) {
            out.line(REMEDY)?;
        }
        Ok(Exit::Found)
    }

    /// The threads that were checked. What a check found before it was interrupted, or failed, is printed.
    async fn checked(&self, target: &Target, out: &mut Out, lines: &mut Vec<Line>) -> Result<Vec<ThreadId>> {
        let checked = self.check(target, lines).await;
        if checked.is_err() {
            self.print(out, lines)?;
        }
        checked
    }

    fn print(&self, out: &mut Out, lines: &[Line]) -> Result<()> {
        for line in lines {
            if self.json {
                out.json(&json!({
                    "thread": line.thread, "namespace": line.namespace, "checkpoint": line.checkpoint,
                    "rule": line.rule, "found": line.found, "repairable": line.repairable,
                }))?;
            } else {
                let note = if line.repairable { " (--repair fixes it)" } else { "" };
                out.line(format!("{}{note}", cut(&line.text, LINE_CHARS, "--json shows them")))?;
            }
        }
        Ok(())
    }

    /// The threads to check. The list itself may be damaged: what can be read of it, and the check of the database reports the
    /// damage. A named thread that is there and cannot be read is one to check.
    async fn listed(&self, target: &Target) -> Result<Vec<ThreadId>> {
        if self.threads.are_all() {
            return Ok(target.listed_threads().await?.0);
        }
        let mut threads = self.threads.named();
        for thread in &threads {
            match target.newest(thread).await {
                Ok(_) | Err(OpsError::Checkpoints(Error::Corrupt { .. } | Error::BrokenLineage { .. })) => {}
                Err(error) => return Err(error),
            }
        }
        threads.sort_unstable();
        threads.dedup();
        Ok(threads)
    }

    async fn check(&self, target: &Target, lines: &mut Vec<Line>) -> Result<Vec<ThreadId>> {
        let threads = self.listed(target).await?;
        let mut progress = Progress::reading("threads checked", threads.len() as u64);
        for thread in &threads {
            progress.interrupted()?;
            let saver = &**target.saver();
            let foreign = foreign(saver, thread).await;
            let table = foreign.as_ref().unwrap_or(&target.table);
            lines.extend(verify(saver, thread, table).await?.iter().map(Line::of));
            progress.next();
        }
        if let Some(sqlite) = target.sqlite() {
            let wanted: HashSet<&str> = threads.iter().map(ThreadId::as_str).collect();
            let findings = sqlite.check().await?.into_iter().filter(|finding| {
                let thread = finding.scope.as_ref().map(|(thread, _)| thread.as_str());
                self.threads.are_all() || thread.is_some_and(|thread| wanted.contains(thread))
            });
            lines.extend(findings.map(|finding| {
                let text = finding.to_string();
                let (thread, namespace) = finding.scope.unzip();
                Line {
                    thread,
                    namespace,
                    checkpoint: None,
                    rule: if finding.orphan { "referred to" } else { "stored whole" }.to_owned(),
                    found: format!("{}: {}", finding.place, finding.what),
                    text,
                    repairable: finding.orphan,
                }
            }));
        }
        Ok(threads)
    }

    fn ask(&self, repairable: usize) -> Result<()> {
        if self.yes {
            return Ok(());
        }
        match confirmed(&format!("Repair {} violations?", count(repairable)))? {
            Some(true) => Ok(()),
            Some(false) => Err(OpsError::Refused("the repair was not confirmed")),
            None => Err(OpsError::Refused("pass --yes to repair without confirmation")),
        }
    }

    async fn put_right(&self, target: &Target) -> Result<()> {
        for thread in self.listed(target).await? {
            let foreign = foreign(&**target.saver(), &thread).await;
            let table = foreign.as_ref().unwrap_or(&target.table);
            match retried_while_stale(|| repair(&**target.saver(), &thread, table)).await {
                // A run that keeps writing does not keep other threads from being repaired; the second check reports what
                // is left.
                Ok(_) | Err(Error::Stale { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        match target.sqlite() {
            // The sweep refuses while a row is damaged; the second check reports that row.
            Some(sqlite) => match sqlite.sweep().await {
                Ok(()) | Err(Error::Corrupt { .. }) => Ok(()),
                Err(error) => Err(error.into()),
            },
            None => Ok(()),
        }
    }
}

//! `threadkeep verify`: checks every invariant of a store, and makes the safe repairs.

use std::collections::HashSet;

use clap::Args;
use serde_json::json;
use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep::verify::{Violation, repair, verify};

use super::error::{Exit, OpsError, Result};
use super::output::{Out, count, cut, one_line, things};
use super::pace::Pace;
use super::progress::Progress;
use super::question::{self, can_be_asked};
use super::target::{StoreArgs, Target, Threads, retried_while_stale};

/// Check every invariant of threads, and with --all of the database.
///
/// Lineages, applied rows, replay, markers, counters, versions; on SQLite also every row's checksum, every reference,
/// and unreferenced rows, with --all of the whole file. Prints one line per violation, with its ids. Writers can continue
/// meanwhile.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  threadkeep verify --all
  threadkeep verify --thread my-thread --json
  threadkeep verify --all --repair

Exit codes: 0 no violations, or all repaired; 3 violations remain.

--json prints one document per line, one for each violation, then one with the counts; those that are left, and with
`\"repaired\": true` those that were repaired.

A damaged part of the database does not end the check: the threads in it are named, and the others are checked.

--repair fixes what can be fixed safely: markers and counters, and unreferenced rows. For the rest, restore a backup
(`threadkeep backup --out FILE` makes one, see docs/backup.md), or prune or delete the damaged part.")]
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
const REMEDY: &str = "What --repair does not fix: restore a backup (`threadkeep backup --out FILE` makes one, see \
    docs/backup.md), or export the threads that are not named above and import them into a new store.";

/// A violation for output.
struct Line {
    thread: Option<String>,
    namespace: Option<String>,
    checkpoint: Option<String>,
    rule: String,
    found: String,
    text: String,
    repairable: bool,
    repaired: bool,
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
            repaired: false,
        }
    }
}

impl VerifyCommand {
    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<Exit> {
        let mut lines = Vec::new();
        let mut threads = self.checked(target, out, &mut lines).await?;
        let repairable = lines.iter().filter(|line| line.repairable).count();
        let mut failed = None;
        if self.repair && repairable > 0 {
            if !self.yes {
                self.ask(out, &lines, repairable).await?;
            }
            // What a repair leaves, and why it ended, is said after what was found.
            failed = self.put_right(target).await.err();
            let mut left = Vec::new();
            match self.check(target, &mut left).await {
                Ok(checked) => {
                    threads = checked;
                    mark_repaired(&mut lines, left);
                }
                Err(error) => {
                    self.print(out, &lines)?;
                    return Err(failed.unwrap_or(error));
                }
            }
        }
        let (repaired, left): (Vec<Line>, Vec<Line>) = lines.into_iter().partition(|line| line.repaired);
        self.print(out, &repaired)?;
        self.print(out, &left)?;
        self.total(out, &threads, repaired.len(), &left)?;
        match failed {
            Some(error) => Err(error),
            None if left.is_empty() => Ok(Exit::Done),
            None => Ok(Exit::Found),
        }
    }

    fn total(&self, out: &mut Out, threads: &[ThreadId], repaired: usize, left: &[Line]) -> Result<()> {
        let damaged: HashSet<&str> = left.iter().filter_map(|line| line.thread.as_deref()).collect();
        let intact = threads.iter().filter(|thread| !damaged.contains(thread.as_str())).count();
        if self.json {
            return Ok(out.json(&json!({
                "threads": threads.len(), "intact": intact, "violations": left.len(), "repaired": repaired,
            }))?);
        }
        if left.is_empty() {
            let repaired = match repaired {
                0 => String::new(),
                1 => ", 1 was repaired".to_owned(),
                repaired => format!(", {} were repaired", count(repaired)),
            };
            return Ok(out.line(format!("{}: no violations{repaired}.", things(threads.len(), "thread")))?);
        }
        out.line(format!(
            "{}: {}, {} repaired. In {} of the threads nothing was found.",
            things(threads.len(), "thread"),
            things(left.len(), "violation"),
            count(repaired),
            count(intact)
        ))?;
        if left.iter().any(|line| !line.repairable) {
            out.line(REMEDY)?;
        }
        Ok(())
    }

    /// The threads that were checked. What a check found before it was interrupted, or failed, is printed.
    async fn checked(&self, target: &Target, out: &mut Out, lines: &mut Vec<Line>) -> Result<Vec<ThreadId>> {
        let checked = self.check(target, lines).await;
        if checked.is_err() {
            self.print(out, &*lines)?;
        }
        checked
    }

    fn print<'a>(&self, out: &mut Out, lines: impl IntoIterator<Item = &'a Line>) -> Result<()> {
        for line in lines {
            if self.json {
                out.json(&json!({
                    "thread": line.thread, "namespace": line.namespace, "checkpoint": line.checkpoint,
                    "rule": line.rule, "found": line.found, "repairable": line.repairable, "repaired": line.repaired,
                }))?;
            } else {
                let note = match line {
                    Line { repaired: true, .. } => " (repaired)",
                    Line { repairable: true, .. } => " (--repair fixes it)",
                    _ => "",
                };
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
        let mut pace = Pace::new();
        for thread in &threads {
            pace.rest(target).await;
            progress.interrupted()?;
            let saver = &**target.saver();
            lines.extend(verify(saver, thread, &target.table).await?.iter().map(Line::of));
            progress.next();
        }
        progress.interrupted()?;
        // From here on a signal ends the command at once: this only reads, and may take long.
        drop(progress);
        if let Some(sqlite) = target.sqlite() {
            let findings = if self.threads.are_all() {
                sqlite.check().await?
            } else {
                sqlite.check_threads(threads.clone()).await?
            };
            lines.extend(findings.into_iter().map(|finding| {
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
                    repaired: false,
                }
            }));
        }
        Ok(threads)
    }

    /// Shows what would be repaired, and asks. If the answer is no, the rest is printed as well.
    async fn ask(&self, out: &mut Out, lines: &[Line], repairable: usize) -> Result<()> {
        if !self.json && can_be_asked() {
            for line in lines.iter().filter(|line| line.repairable) {
                out.line(format!("repairable: {}", one_line(&line.text)))?;
            }
            out.show()?;
        }
        let asked = question::ask(
            format!("Repair {}?", things(repairable, "violation")),
            "the repair was not confirmed",
            "pass --yes to repair without confirmation",
        );
        let asked = asked.await;
        if asked.is_err() {
            self.print(out, lines)?;
        }
        asked
    }

    /// Makes the safe repairs of each thread. What could not be repaired, the second check reports.
    async fn put_right(&self, target: &Target) -> Result<()> {
        for thread in self.listed(target).await? {
            let repaired = retried_while_stale(|| repair(&**target.saver(), &thread, &target.table)).await;
            passed_over(repaired.map(drop))?;
        }
        match target.sqlite() {
            // It refuses while a row is damaged, and gives way to a run that writes to a long thread.
            Some(sqlite) => passed_over(retried_while_stale(|| sqlite.sweep()).await),
            None => Ok(()),
        }
    }
}

/// A thread that is damaged, or that a run keeps writing to, does not keep the others from being repaired.
fn passed_over(repaired: threadkeep::Result<()>) -> Result<()> {
    match repaired.map_err(OpsError::from) {
        Err(error) if error.is_of_one_thread() => Ok(()),
        repaired => repaired,
    }
}

/// Marks what a second check no longer finds, and adds what only that one finds.
fn mark_repaired(lines: &mut Vec<Line>, left: Vec<Line>) {
    let still: HashSet<&str> = left.iter().map(|line| line.text.as_str()).collect();
    for line in lines.iter_mut() {
        line.repaired = !still.contains(line.text.as_str());
    }
    let known: HashSet<String> = lines.iter().map(|line| line.text.clone()).collect();
    lines.extend(left.into_iter().filter(|line| !known.contains(&line.text)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Line {
        let (rule, found, text) = (String::new(), String::new(), text.to_owned());
        Line {
            thread: None,
            namespace: None,
            checkpoint: None,
            rule,
            found,
            text,
            repairable: true,
            repaired: false,
        }
    }

    #[test]
    fn what_a_second_check_does_not_find_was_repaired() {
        let mut lines = vec![line("a"), line("b"), line("b")];
        mark_repaired(&mut lines, vec![line("d"), line("b"), line("b"), line("c")]);
        let shown: Vec<_> = lines.iter().map(|line| (line.text.as_str(), line.repaired)).collect();
        assert_eq!(shown, [("a", true), ("b", false), ("b", false), ("d", false), ("c", false)]);
    }

    #[test]
    fn a_sweep_beside_a_writer_does_not_end_a_repair() {
        let thread = ThreadId::from("busy");
        passed_over(Err(Error::Stale { thread })).unwrap();
        passed_over(Err(Error::corrupt("table element", "no"))).unwrap();
        passed_over(Err(Error::Unavailable { saver: "sqlite", reason: "the disk is full".to_owned() }))
            .unwrap_err();
    }
}

//! `threadkeep convert`: converts threads from delta to full mode and back.

use clap::{Args, ValueEnum};
use serde_json::json;
use threadkeep::channel::ChannelTable;
use threadkeep::convert::{Conversion, convert, plan_conversion};
use threadkeep::id::ThreadId;
use threadkeep::mode::ChannelMode;

use super::error::{OpsError, Result};
use super::output::{Columns, Out, bytes, count, things};
use super::pass::Pass;
use super::progress::Progress;
use super::target::{StoreArgs, Target, Threads, retried_while_stale, table};

/// Convert threads to the other mode.
///
/// A process in full mode refuses a thread with delta checkpoints; after conversion to full it reads the thread's whole
/// history. With --all the store remembers the mode as its own, and the cadence if --frequency names one: processes
/// that differ say so when they start.
///
/// Each thread is converted in one atomic change while gateways may run, and an interrupted pass can be
/// repeated. Nothing is lost: every checkpoint keeps its state, its id and its rows. What LangGraph wrote stays as it is,
/// and where a gateway continued delta channels that only LangGraph can replay, those stay delta channels.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  threadkeep convert --thread my-thread --to full --dry-run
  threadkeep convert --all --to full
  threadkeep convert --all --to delta --frequency 10

--json prints one document per line, one for each thread.")]
pub(crate) struct ConvertCommand {
    #[command(flatten)]
    threads: Threads,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// The mode.
    #[arg(long, value_enum)]
    to: Mode,
    /// For delta: updates between two snapshots [default: as configured, otherwise 10]. With --all the store remembers
    /// it as its own.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    frequency: Option<u64>,
    /// Only count what would change.
    #[arg(long)]
    dry_run: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The values of `--to`.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Mode {
    Full,
    Delta,
}

impl ConvertCommand {
    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<()> {
        let mode = match self.to {
            Mode::Full => ChannelMode::Full,
            Mode::Delta => ChannelMode::Delta,
        };
        // That all threads have another mode is noted in them at the end.
        let records = if self.threads.are_all() && !self.dry_run { target.needed_records()? } else { None };
        let channels = table(mode, self.frequency.unwrap_or_else(|| target.table.frequency()))?;
        let (threads, unlisted) = target.threads(&self.threads).await?;
        let mut pass =
            Pass::new(self.progress(threads.len()), "converted", threads.len(), self.threads.are_all())
                .giving_way(target);
        let mut rows = Columns::new(&["THREAD", "CHECKPOINTS>", "CHANGED>", "STORED BYTES>"]);
        let (mut changed, mut left) = (0, 0);
        for thread in &threads {
            if !pass.goes_on().await {
                break;
            }
            let done = self.one(target, thread, &channels).await;
            let Some(Converted { done, before, after }) = pass.note(thread, done) else { continue };
            changed += done.changed;
            left += done.left;
            if self.json {
                out.json(&json!({
                    "thread": thread.as_str(), "to": mode.as_str(), "dry_run": self.dry_run,
                    "checkpoints": done.checkpoints, "changed": done.changed, "of_langgraph": done.left,
                    "stored_bytes_before": before, "stored_bytes_after": after,
                }))?;
            } else {
                let size = |size: Option<u64>| super::output::or_dash(size.map(bytes));
                let size =
                    if self.dry_run { size(before) } else { format!("{} -> {}", size(before), size(after)) };
                rows.row([thread.to_string(), count(done.checkpoints), count(done.changed), size]);
            }
        }
        let ended = pass.end(unlisted);
        let noted = match records {
            Some(records) if ended.is_ok() => records.remember_form(mode.as_str(), self.frequency).await,
            _ => Ok(()),
        };
        // What failed is not called nothing to do.
        if !self.json && (ended.is_ok() || changed > 0) {
            out.table_or(&rows, "No threads.")?;
            if left > 0 {
                let (stay, them) =
                    if left == 1 { ("stays as it is", "it") } else { ("stay as they are", "them") };
                out.line(format!(
                    "{} {stay}: LangGraph wrote {them}, or only LangGraph can replay {them}.",
                    things(left, "checkpoint")
                ))?;
            }
            out.line(match (changed, self.dry_run) {
                (0, _) if left > 0 => {
                    format!("Nothing to convert: every other checkpoint is stored in {mode} mode.")
                }
                (0, _) => format!("Nothing to convert: every checkpoint is stored in {mode} mode."),
                (_, true) => format!("{} would be converted to {mode} mode.", things(changed, "checkpoint")),
                (1, false) => format!("1 checkpoint was converted to {mode} mode."),
                (_, false) => format!("{} were converted to {mode} mode.", things(changed, "checkpoint")),
            })?;
        }
        ended?;
        // The threads are converted all the same.
        noted.map_err(|error| {
            OpsError::Unsupported(format!(
                "every thread is in {mode} mode, but the gateway's records do not say so: {error}; repeat the command"
            ))
        })
    }

    fn progress(&self, threads: usize) -> Progress {
        let total = threads as u64;
        if self.dry_run {
            Progress::reading("threads read", total)
        } else {
            Progress::new("threads converted", total)
        }
    }

    /// Converts a thread, or counts what would change.
    async fn one(&self, target: &Target, thread: &ThreadId, channels: &ChannelTable) -> Result<Converted> {
        let before = target.stored_bytes(thread).await?;
        let done = if self.dry_run {
            let image = target.image(thread).await?;
            plan_conversion(&image, channels)?.1
        } else {
            retried_while_stale(|| convert(&**target.saver(), thread, channels)).await?
        };
        let is_unchanged = self.dry_run || done.changed == 0;
        // It is done, whatever its size is.
        let after = if is_unchanged { before } else { target.stored_bytes(thread).await.unwrap_or_default() };
        Ok(Converted { done, before, after })
    }
}

/// What became of a thread, and the bytes of its rows.
struct Converted {
    done: Conversion,
    before: Option<u64>,
    after: Option<u64>,
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches as _;

    use super::*;

    #[test]
    fn an_interrupted_dry_run_does_not_say_that_anything_was_converted() {
        for (dry_run, says) in [
            (&["--dry-run"][..], "interrupted: 0 of 3 threads read; the same command begins again"),
            (
                &[],
                "interrupted: 0 of 3 threads converted; what was done stays, and the same command does the rest",
            ),
        ] {
            let arguments = [&["threadkeep", "--all", "--to", "full"], dry_run].concat();
            let matches = ConvertCommand::augment_args(clap::Command::new("threadkeep"));
            let matches = matches.get_matches_from(arguments);
            let command = ConvertCommand::from_arg_matches(&matches).unwrap();
            assert_eq!(command.progress(3).error().to_string(), says);
        }
    }
}

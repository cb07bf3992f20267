//! `threadkeep vacuum`: returns the space freed by deletions to the file system.

use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use threadkeep_storage::{FileSize, SqliteSaver};

use super::error::{OpsError, Result};
use super::output::{Out, bytes, one_line};
use super::progress::Progress;
use super::target::{StoreArgs, Target};

/// Pages returned per transaction: two megabytes.
const STEP: u32 = 512;
/// The bounds of the pause between two transactions, in which other processes get the lock.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// Return the space freed by deletions to the file system.
///
/// SQLite: free pages are returned two megabytes at a time; a running gateway can write in between. Postgres: nothing
/// to do, because autovacuum reuses the space of deleted rows and returns free space at the end of a table. Other stores
/// reuse it in their own way.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  threadkeep vacuum
  threadkeep vacuum --full    once, for a database created by a version that could not return pages; stop the gateway first")]
pub(crate) struct VacuumCommand {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Rewrite the database. Blocks all other writers, and needs up to twice the database's size.
    #[arg(long)]
    full: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl VacuumCommand {
    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<()> {
        let Some(sqlite) = target.sqlite() else {
            let why = match target.saver().capabilities().name {
                "postgres" => "autovacuum reuses the space of deleted rows",
                _ => "the store reuses freed space in its own way",
            };
            if self.json {
                out.json(
                    &json!({"database": target.name(), "bytes_before": null, "bytes_after": null, "note": why}),
                )?;
            } else {
                out.line(format!("{}: there is nothing to do, {why}.", one_line(target.name())))?;
            }
            return Ok(());
        };
        let before = sqlite.file_size().await?;
        if !before.incremental && !self.full && before.free > 0 {
            return Err(OpsError::Unsupported(format!(
                "{} was created by a version that could not return pages: {} are free, and are reused before the file \
                 grows. {} rewrites the database; it blocks all other writers meanwhile",
                target.name(),
                bytes(before.free),
                target.again.command("vacuum --full")
            )));
        }
        let after =
            if self.full { sqlite.vacuum_fully().await? } else { step_by_step(sqlite, before).await? };
        if self.json {
            out.json(&json!({
                "database": target.name(), "bytes_before": before.bytes, "bytes_after": after.bytes,
                "free_before": before.free, "free_after": after.free,
            }))?;
        } else {
            out.line(format!(
                "{}: {} -> {}, {} of it free.",
                one_line(target.name()),
                bytes(before.bytes),
                bytes(after.bytes),
                bytes(after.free)
            ))?;
        }
        Ok(())
    }
}

async fn step_by_step(sqlite: &SqliteSaver, before: FileSize) -> Result<FileSize> {
    let mut progress = Progress::new("bytes returned", before.free);
    let mut size = before;
    while size.free > 0 {
        let started = Instant::now();
        let now = sqlite.vacuum(STEP).await?;
        if now.free >= size.free {
            // Other processes delete as fast; leave what they free to the next run.
            return Ok(now);
        }
        size = now;
        progress.at(before.free.saturating_sub(size.free));
        progress.interrupted()?;
        tokio::time::sleep(started.elapsed().clamp(PAUSE.0, PAUSE.1)).await;
    }
    Ok(size)
}

//! `threadkeep vacuum`: giving the space that deletions freed back to the disk.

use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use threadkeep_sqlite::{FileSize, SqliteSaver};

use super::error::{OpsError, Result};
use super::output::{Out, bytes, one_line};
use super::progress::Progress;
use super::target::{StoreArgs, Target};

/// Pages that are given back in one transaction: two megabytes.
const STEP: u32 = 512;
/// The bounds of the pause between two transactions, in which others get the lock.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// Give the space that deletions freed back to the disk.
///
/// SQLite: free pages are given back two megabytes at a time; a running gateway writes in between. On Postgres there is
/// nothing to do: autovacuum makes the space of deleted rows usable again, and returns what is free at the end of a table.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  threadkeep vacuum
  threadkeep vacuum --full    once, for a database of a version that could not give pages back; stop the gateway first")]
pub(crate) struct VacuumCommand {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Write the database anew. Nobody else can write meanwhile, and it takes up to twice the database's room.
    #[arg(long)]
    full: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl VacuumCommand {
    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<()> {
        let Some(sqlite) = &target.sqlite else {
            let why = "autovacuum makes the space of deleted rows usable again";
            if self.json {
                out.json(
                    &json!({"database": target.name, "bytes_before": null, "bytes_after": null, "note": why}),
                )?;
            } else {
                out.line(format!("{}: there is nothing to do, {why}.", one_line(&target.name)))?;
            }
            return Ok(());
        };
        let before = sqlite.file_size().await?;
        if !before.incremental && !self.full && before.free > 0 {
            return Err(OpsError::Unsupported(format!(
                "{} was made by a version that could not give pages back: {} are free, and used again before the file \
                 grows. `threadkeep vacuum --full` writes the database anew; nobody else can write meanwhile",
                target.name,
                bytes(before.free)
            )));
        }
        let after =
            if self.full { sqlite.vacuum_fully().await? } else { step_by_step(sqlite, before).await? };
        if self.json {
            out.json(&json!({
                "database": target.name, "bytes_before": before.bytes, "bytes_after": after.bytes,
                "free_before": before.free, "free_after": after.free,
            }))?;
        } else {
            out.line(format!(
                "{}: {} -> {}, {} of it free.",
                one_line(&target.name),
                bytes(before.bytes),
                bytes(after.bytes),
                bytes(after.free)
            ))?;
        }
        Ok(())
    }
}

async fn step_by_step(sqlite: &SqliteSaver, before: FileSize) -> Result<FileSize> {
    let mut progress = Progress::new("bytes given back", before.free);
    let mut size = before;
    while size.free > 0 {
        let started = Instant::now();
        let now = sqlite.vacuum(STEP).await?;
        if now.free >= size.free {
            // Others delete as fast; what they free is for the next time.
            return Ok(now);
        }
        size = now;
        progress.at(before.free.saturating_sub(size.free));
        tokio::time::sleep(started.elapsed().clamp(PAUSE.0, PAUSE.1)).await;
    }
    Ok(size)
}

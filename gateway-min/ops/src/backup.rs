//! `threadkeep backup`: copies a store that is in use.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use super::error::{OpsError, Result};
use super::output::{Out, bytes, one_line};
use super::target::{StoreArgs, Target};

/// Copy the store into new files, while gateways read and write.
///
/// SQLite: FILE holds the checkpoints as of one moment. The gateway's records, if gateway.db is beside the checkpoints,
/// are copied first, into a file beside FILE: NAME.gateway.db for NAME.db, NAME-gateway.db for any other NAME, and gateway.db
/// for checkpoints.db; so the checkpoints of every run that the records call finished are in the backup. A command with
/// --sqlite FILE finds them there. Both are checked before they get their names. Postgres: use pg_dump, or
/// pg_basebackup with an archive of the write-ahead log. docs/backup.md describes the restore, and what it loses.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  threadkeep backup --out /backup/2026-11-22.db
  threadkeep backup --sqlite .svc/data/checkpoints.db --out copy.db --json")]
pub(crate) struct BackupCommand {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// The file to create. It must not exist; only you may read it.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl BackupCommand {
    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<()> {
        let Some(copied) = target.backup(&self.out).await? else {
            let instead = match target.saver().capabilities().name {
                "postgres" => {
                    "use Postgres' own tools, `pg_dump` for a copy as of one moment, or `pg_basebackup` with an archive of \
                     the write-ahead log to restore any moment"
                        .to_owned()
                }
                _ => format!(
                    "use the store's own tools, or {}, which writes every thread but those of subagents to a file that any \
                     store can import",
                    target.again.command("export --all --out DIR")
                ),
            };
            return Err(OpsError::Unsupported(format!("{} was not backed up: {instead}", target.name())));
        };
        let size = |file: &PathBuf| std::fs::metadata(file).map(|metadata| metadata.len());
        if self.json {
            let records = copied.records.as_ref().map(|file| file.display().to_string());
            out.json(&json!({
                "database": target.name(), "checkpoints": copied.checkpoints.display().to_string(),
                "records": records, "bytes": size(&copied.checkpoints)?,
            }))?;
            return Ok(());
        }
        let name = one_line(&copied.checkpoints.display().to_string());
        out.line(format!("{name}: the checkpoints, {}, checked.", bytes(size(&copied.checkpoints)?)))?;
        match &copied.records {
            Some(records) => {
                let name = one_line(&records.display().to_string());
                out.line(format!("{name}: the gateway's records, {}, checked.", bytes(size(records)?)))?;
            }
            None => out.line(
                "There are no records of a gateway beside the checkpoints, so no records were copied.",
            )?,
        }
        Ok(())
    }
}

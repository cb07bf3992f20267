//! `threadkeep batches`: the durable batches of a thread, from the gateway's records.

use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::{Map, Value as Json, json};
use threadkeep::id::ThreadId;
use threadkeep_records::{BatchItemRow, BatchItemStatus, BatchRow, Batches, ItemCounts, RecordsError};

use super::Exit;
use super::error::{OpsError, Result};
use super::output::{Columns, Out, one_line, or_dash, short, things, time};
use super::progress::Progress;
use super::target::{StoreArgs, Target};

/// How often `watch` looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How many rows are read at once.
const PAGE: u32 = 500;
/// The longest title, key and error in a table, in characters.
const TITLE_CHARS: usize = 40;
const KEY_CHARS: usize = 30;
const ERROR_CHARS: usize = 50;

/// Follow the durable batches of a thread: list, show, watch, export.
#[derive(Debug, Subcommand)]
pub(crate) enum BatchesCommand {
    /// List the batches of a thread, newest first.
    #[command(
        after_help = "Example:\n  threadkeep batches list my-thread\n\n--json prints one document per line."
    )]
    List(OfThread),
    /// Show a batch and its items.
    #[command(
        after_help = "Example:\n  threadkeep batches show my-thread subagent-batch-0ec7b888 --status failed"
    )]
    Show {
        #[command(flatten)]
        of: OfBatch,
        /// Only items with this status.
        #[arg(long, value_parser = status)]
        status: Option<BatchItemStatus>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Follow a batch with a progress bar until it has ended. Exits with 3 if it failed or was cancelled.
    #[command(after_help = "Example:\n  threadkeep batches watch my-thread subagent-batch-0ec7b888")]
    Watch(OfBatch),
    /// Print all items of a batch with their results, one JSON document per line.
    #[command(
        after_help = "Example:\n  threadkeep batches export my-thread subagent-batch-0ec7b888 > results.jsonl"
    )]
    Export(OfBatch),
}

/// The thread, and where it is.
#[derive(Debug, Args)]
pub(crate) struct OfThread {
    /// The thread that submitted them.
    #[arg(value_name = "THREAD")]
    thread: String,
    #[command(flatten)]
    store: StoreArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A batch, and where it is.
#[derive(Debug, Args)]
pub(crate) struct OfBatch {
    /// The thread that submitted it.
    #[arg(value_name = "THREAD")]
    thread: String,
    /// The batch, or the beginning of its id.
    #[arg(value_name = "BATCH")]
    batch: String,
    #[command(flatten)]
    store: StoreArgs,
}

fn status(text: &str) -> Result<BatchItemStatus, String> {
    text.parse().map_err(|_| {
        let names: Vec<&str> = BatchItemStatus::ALL.iter().map(|status| status.as_str()).collect();
        format!("one of {}", names.join(", "))
    })
}

impl BatchesCommand {
    pub(crate) fn store(&self) -> &StoreArgs {
        match self {
            Self::List(of) => &of.store,
            Self::Show { of, .. } | Self::Watch(of) | Self::Export(of) => &of.store,
        }
    }

    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<Exit> {
        let Some(records) = target.needed_records()? else {
            return Err(OpsError::Unsupported(
                "batches are in the gateway's records, which are not beside this store".to_owned(),
            ));
        };
        let batches = records.batches();
        match self {
            Self::List(of) => list(target, batches, out, of).await?,
            Self::Show { of, status, json } => {
                show(batches, out, &found(target, batches, of).await?, *status, *json).await?;
            }
            Self::Watch(of) => return watch(batches, out, found(target, batches, of).await?).await,
            Self::Export(of) => export(batches, out, &found(target, batches, of).await?).await?,
        }
        Ok(Exit::Done)
    }
}

/// The batch with this id or beginning of one.
async fn found(target: &Target, batches: &Batches, of: &OfBatch) -> Result<BatchRow> {
    let all = batches.of_thread(&of.thread, u32::MAX).await?;
    let mut found = all.into_iter().filter(|row| row.id.starts_with(&of.batch));
    match (found.next(), found.next()) {
        (Some(row), None) => Ok(row),
        (Some(_), Some(_)) => Err(OpsError::Unsupported(format!(
            "several batches of the thread begin with '{}': give more of the id",
            one_line(&of.batch)
        ))),
        (None, _) => Err(OpsError::Unsupported(format!(
            "the thread has no batch '{}': {} lists them",
            one_line(&of.batch),
            target.again.command_on("batches list", &of.thread)
        ))),
    }
}

async fn counts(batches: &Batches, batch_id: &str) -> Result<ItemCounts, RecordsError> {
    let all = batches.counts(&[batch_id.to_owned()]).await?;
    Ok(all.get(batch_id).cloned().unwrap_or_default())
}

async fn list(target: &Target, batches: &Batches, out: &mut Out, of: &OfThread) -> Result<()> {
    let mut table =
        Columns::new(&["BATCH", "TITLE", "SUBAGENT", "STATUS", "ITEMS>", "DONE>", "FAILED>", "SUBMITTED"]);
    let rows = batches.of_thread(&of.thread, u32::MAX).await?;
    let thread = ThreadId::from(of.thread.as_str());
    // A thread that does not exist is an error, not one without batches.
    if rows.is_empty() && target.record(&thread).await?.is_none() {
        target.newest(&thread).await?;
    }
    let ids: Vec<String> = rows.iter().map(|row| row.id.clone()).collect();
    let mut counted = batches.counts(&ids).await?;
    for row in rows {
        let counts = counted.remove(&row.id).unwrap_or_default();
        if of.json {
            out.json(&batch_document(&row, &counts))?;
            continue;
        }
        table.row([
            row.id.clone(),
            short(&row.title, TITLE_CHARS),
            row.subagent_type.clone(),
            row.status.to_string(),
            row.total_items.to_string(),
            counts.of(BatchItemStatus::Succeeded).to_string(),
            counts.of(BatchItemStatus::Failed).to_string(),
            time(row.created_at),
        ]);
    }
    if !of.json {
        out.table_or(&table, "The thread has no batches.")?;
    }
    Ok(())
}

async fn show(
    batches: &Batches,
    out: &mut Out,
    row: &BatchRow,
    status: Option<BatchItemStatus>,
    json: bool,
) -> Result<()> {
    let counts = counts(batches, &row.id).await?;
    if json {
        out.json(&batch_document(row, &counts))?;
    } else {
        out.line(format!("{}: {}, {}", row.id, one_line(&row.title), row.status))?;
        out.line(format!("  {}", described(&counts)))?;
    }
    let mut table = Columns::new(&["ITEM", "KEY", "STATUS", "ATTEMPT>", "TOKENS>", "ERROR"]);
    let mut after = None;
    loop {
        let page = batches.items_after(&row.id, status, after, PAGE).await?;
        let Some(last) = page.last() else { break };
        after = Some(last.position);
        for item in page {
            if json {
                out.json(&item_document(&item))?;
                continue;
            }
            table.row([
                item.id,
                short(&item.item_key, KEY_CHARS),
                item.status.to_string(),
                item.attempt.to_string(),
                or_dash(item.token_usage.map(|tokens| tokens.total_tokens.to_string())),
                item.error.map(|error| short(&error, ERROR_CHARS)).unwrap_or_default(),
            ]);
        }
    }
    if !json {
        out.table_or(&table, "No items.")?;
    }
    Ok(())
}

/// The items by status, without zeros.
fn described(counts: &ItemCounts) -> String {
    let some = counts.iter().filter(|(_, number)| *number > 0);
    let texts: Vec<String> = some.map(|(status, number)| format!("{number} {status}")).collect();
    texts.join(", ")
}

/// A batch may take days, longer than the database is available without a break.
async fn watch(batches: &Batches, out: &mut Out, row: BatchRow) -> Result<Exit> {
    let total = u64::try_from(row.total_items).unwrap_or_default();
    let mut progress = Progress::reading("items", total);
    let mut is_out_of_sight = false;
    loop {
        match looked_at(batches, &row.id).await {
            Ok(Some((row, counts))) => {
                is_out_of_sight = false;
                progress.at(total.saturating_sub(counts.unfinished()));
                if row.status.is_terminal() {
                    drop(progress);
                    let items = things(usize::try_from(total).unwrap_or(usize::MAX), "item");
                    out.line(format!("{}: {} ({items}: {})", row.id, row.status, described(&counts)))?;
                    let is_done = row.status == threadkeep_records::BatchStatus::Completed;
                    return Ok(if is_done { Exit::Done } else { Exit::Found });
                }
            }
            Ok(None) => {
                return Err(OpsError::Unsupported("the batch was deleted with its thread".to_owned()));
            }
            Err(error) if error.may_pass() => {
                if !is_out_of_sight {
                    progress.say(&format!("{}; still watching", one_line(&error.to_string())));
                }
                is_out_of_sight = true;
            }
            Err(error) => return Err(error.into()),
        }
        progress.interrupted()?;
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// A batch and its items by status; `None` if it was deleted.
async fn looked_at(
    batches: &Batches,
    batch_id: &str,
) -> Result<Option<(BatchRow, ItemCounts)>, RecordsError> {
    let Some(row) = batches.get(batch_id).await? else { return Ok(None) };
    let counts = counts(batches, batch_id).await?;
    Ok(Some((row, counts)))
}

async fn export(batches: &Batches, out: &mut Out, row: &BatchRow) -> Result<()> {
    let mut after = None;
    loop {
        let page = batches.results(&row.id, after, PAGE).await?;
        // A part of the results looks like all of them.
        let Some((last, _)) = page.last() else { return Ok(out.show_all()?) };
        after = Some(last.position);
        for (item, result) in page {
            let mut document = item_document(&item);
            document["result"] = result.map_or(Json::Null, Json::String);
            out.json(&document)?;
        }
    }
}

fn batch_document(row: &BatchRow, counts: &ItemCounts) -> Json {
    let counts: Map<String, Json> =
        counts.iter().map(|(status, number)| (status.as_str().to_owned(), json!(number))).collect();
    json!({
        "id": row.id, "thread_id": row.thread_id, "title": row.title, "subagent_type": row.subagent_type,
        "status": row.status.as_str(), "total_items": row.total_items, "max_live_items": row.max_live_items,
        "max_running_items": row.max_running_items, "max_attempts": row.max_attempts, "created_at": row.created_at,
        "updated_at": row.updated_at, "completed_at": row.completed_at, "counts": counts,
    })
}

fn item_document(row: &BatchItemRow) -> Json {
    json!({
        "id": row.id, "batch_id": row.batch_id, "item_key": row.item_key, "position": row.position,
        "status": row.status.as_str(), "attempt": row.attempt, "model_name": row.model_name,
        "result_preview": row.result_preview, "result_truncated": row.result_truncated, "error": row.error,
        "stop_reason": row.stop_reason, "token_usage": row.token_usage, "acceptance_criteria": row.acceptance_criteria,
        "acceptance_verdict": row.acceptance_verdict, "started_at": row.started_at, "completed_at": row.completed_at,
        "created_at": row.created_at, "updated_at": row.updated_at,
    })
}

#[cfg(test)]
mod tests {
    use threadkeep_records::{
        JsonObject, MultitaskStrategy, NewBatch, NewBatchItem, NewRun, NewThread, Records, RecordsOptions,
    };

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_batch_is_watched_across_an_outage_of_the_database() {
        let records = Records::open_memory(RecordsOptions::default()).await.unwrap();
        let thread = NewThread { thread_id: "t".to_owned(), ..NewThread::default() };
        records.threads().create(thread).await.unwrap();
        let run = NewRun { run_id: "r".to_owned(), thread_id: "t".to_owned(), ..NewRun::default() };
        records.runs().admit(run, MultitaskStrategy::Reject).await.unwrap();
        let item = NewBatchItem { key: "a".to_owned(), prompt: "do".to_owned(), acceptance_criteria: None };
        let new = NewBatch {
            id: "subagent-batch-1".to_owned(),
            thread_id: "t".to_owned(),
            run_id: "r".to_owned(),
            tool_call_id: "c".to_owned(),
            submission_key: "k".to_owned(),
            title: "Files".to_owned(),
            subagent_type: "bash".to_owned(),
            max_live_items: 1,
            max_running_items: 1,
            max_attempts: 1,
            execution_spec: JsonObject::new(),
            budget_id: None,
            items: vec![item],
        };
        let row = records.batches().submit(new).await.unwrap().batch;
        records.batches().cancel(&row.id).await.unwrap();
        records.fail_reads(3);
        let exit = watch(records.batches(), &mut Out::to(std::io::sink()), row).await.unwrap();
        assert_eq!((exit, records.reads_to_fail()), (Exit::Found, 0));
        records.close().await;
    }
}

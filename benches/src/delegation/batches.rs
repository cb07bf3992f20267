//! Durable batches: items per second with one worker and with several on one store.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::{Value as Json, json};

use super::StoreLocation;
use super::house::House;
use crate::case::Backend;
use crate::meter;

/// The slots of each worker.
const SLOTS: usize = 8;
/// Time for all items.
const PATIENCE: Duration = Duration::from_mins(20);

/// How many items of one answer a second are ended by one worker on SQLite, and by one, two and three on one Postgres,
/// each with a connection pool and slots of its own. Rows of a table: store, workers, items per second, milliseconds an
/// item and slot, statements of the records an item, mebibytes of memory the batch took at most.
///
/// # Errors
/// What the stores or the batch fail with.
pub async fn batches(items: usize, scratch: &Path) -> Result<Vec<Vec<String>>> {
    let mut rows = Vec::new();
    for (backend, workers) in
        [(Backend::Sqlite, 1), (Backend::Postgres, 1), (Backend::Postgres, 2), (Backend::Postgres, 3)]
    {
        rows.push(measured(backend, workers, items, scratch).await?);
    }
    Ok(rows)
}

/// Nobody looks.
struct Silent;

#[async_trait::async_trait]
impl threadkeep_agent::Observer for Silent {}

/// A lead that submits the items, and subagents that answer at once.
fn script(items: usize) -> Json {
    let items: Json = (0..items).map(|n| json!({"key": n.to_string(), "prompt": "work"})).collect();
    let call = json!({"name": "batch_task", "args": {"title": "items", "items": items,
        "subagent_type": "general-purpose"}});
    json!({"chunk_chars": 1_000_000, "rules": [
        {"when": {"caller": "subagent"}, "answers": [{"text": "Done."}]},
        {"answers": [{"tool_calls": [call]}, {"text": "Submitted."}]},
    ]})
}

async fn measured(backend: Backend, workers: usize, items: usize, scratch: &Path) -> Result<Vec<String>> {
    let location = StoreLocation::new(backend, scratch).await?;
    let script = script(items);
    let mut houses = Vec::new();
    for _ in 0..workers {
        houses.push(House::open(backend, &location, &script, SLOTS).await?);
    }
    let at_work = houses.iter().map(House::worker).collect::<Result<Vec<_>>>()?;
    let statements = || houses.iter().map(|house| house.records().commits().statements()).sum::<u64>();
    let base = meter::resident();
    let mut most = base;
    let (first, before) = (houses.first().context("a worker")?, statements());
    let started = Instant::now();
    first.turn("t", &mut Silent).await?;
    let batches = first.records().batches();
    loop {
        let batch = batches.of_thread("t", 1).await?.into_iter().next().context("no batch was submitted")?;
        if batch.status.is_terminal() {
            anyhow::ensure!(batch.status.as_str() == "completed", "the batch is {}", batch.status);
            break;
        }
        most = most.max(meter::resident());
        anyhow::ensure!(started.elapsed() < PATIENCE, "the batch does not end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let took = started.elapsed();
    let memory = most.saturating_sub(base) >> 20;
    let statements = statements() - before;
    for worker in at_work {
        worker.stop().await;
    }
    #[allow(clippy::cast_precision_loss, reason = "shown with a few digits")]
    let (number, statements) = (items as f64, statements as f64);
    #[allow(clippy::cast_precision_loss, reason = "a small number")]
    let slots = (workers * SLOTS) as f64;
    Ok(vec![
        backend.to_string(),
        workers.to_string(),
        format!("{:.0}", number / took.as_secs_f64()),
        format!("{:.1}", took.as_secs_f64() * 1_000.0 * slots / number),
        format!("{:.1}", statements / number),
        memory.to_string(),
    ])
}

//! Durable batches: items per second with one process and with several on one store, and memory with many live items.

use std::io::{self, BufRead as _, BufReader, Lines, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use threadkeep_records::BatchItemStatus;

use super::StoreLocation;
use super::house::House;
use crate::case::Backend;
use crate::meter;

/// The slots of each process.
const SLOTS: usize = 8;
/// The slots that a process can have.
const MOST_SLOTS: usize = 64;
/// Time for all items.
const PATIENCE: Duration = Duration::from_mins(20);

/// How many items of one answer a second are ended by one process on SQLite, and by one, two and three on one Postgres.
/// Rows of a table: store, processes, items per second, milliseconds an item and slot, statements and round trips of the
/// records an item, and milliseconds of the processes' CPU time an item.
///
/// # Errors
/// What the stores or the batch fail with.
pub async fn batches(items: usize, scratch: &Path) -> Result<Vec<Vec<String>>> {
    let mut rows = Vec::new();
    for (backend, processes) in
        [(Backend::Sqlite, 1), (Backend::Postgres, 1), (Backend::Postgres, 2), (Backend::Postgres, 3)]
    {
        rows.push(measured(backend, processes, items, scratch).await?);
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

/// What a process did.
#[derive(Default, Serialize, Deserialize)]
struct Done {
    statements: u64,
    trips: u64,
    cpu_seconds: f64,
}

impl Done {
    /// What this process has done, of which only the records of `house` are counted.
    fn by_now(house: &House) -> Self {
        let commits = house.records().commits();
        Self {
            statements: commits.statements(),
            trips: commits.round_trips(),
            cpu_seconds: meter::cpu().as_secs_f64(),
        }
    }

    fn since(&self, before: &Self) -> Self {
        Self {
            statements: self.statements - before.statements,
            trips: self.trips - before.trips,
            cpu_seconds: self.cpu_seconds - before.cpu_seconds,
        }
    }
}

/// A worker in a process of its own, on the Postgres at `url`. It prints a line when it works, and what it has done when its
/// standard input ends.
///
/// # Errors
/// What the store fails with.
pub async fn work(url: &str, scratch: &Path) -> Result<()> {
    let location = StoreLocation::existing(url, scratch)?;
    let house = House::open(Backend::Postgres, &location, &script(1), SLOTS).await?;
    let before = Done::by_now(&house);
    let worker = house.worker().await?;
    writeln!(io::stdout(), "ready")?;
    tokio::task::spawn_blocking(|| io::copy(&mut io::stdin(), &mut io::sink())).await??;
    worker.stop().await;
    writeln!(io::stdout(), "{}", serde_json::to_string(&Done::by_now(&house).since(&before))?)?;
    Ok(())
}

/// A process that runs [`work`].
struct Beside {
    child: Child,
    said: Lines<BufReader<ChildStdout>>,
}

impl Beside {
    fn start(url: &str, scratch: &Path) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--worker-of").arg(url).arg("--scratch").arg(scratch);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut said = BufReader::new(child.stdout.take().context("its output")?).lines();
        said.next().context("the worker ended before it worked")??;
        Ok(Self { child, said })
    }

    fn end(mut self) -> Result<Done> {
        drop(self.child.stdin.take());
        let done = self.said.next().context("the worker said nothing of what it has done")??;
        anyhow::ensure!(self.child.wait()?.success(), "the worker failed");
        Ok(serde_json::from_str(&done)?)
    }
}

async fn measured(backend: Backend, processes: usize, items: usize, scratch: &Path) -> Result<Vec<String>> {
    let location = StoreLocation::new(backend, scratch).await?;
    let house = House::open(backend, &location, &script(items), SLOTS).await?;
    let others = (1..processes).map(|_| Beside::start(location.url().context("a server")?, scratch));
    let others = others.collect::<Result<Vec<_>>>()?;
    let worker = house.worker().await?;
    house.admit("t").await?;
    let (started, before) = (Instant::now(), Done::by_now(&house));
    house.turn("t", &mut Silent).await?;
    let batches = house.records().batches();
    loop {
        let batch = batches.of_thread("t", 1).await?.into_iter().next().context("no batch was submitted")?;
        if batch.status.is_terminal() {
            anyhow::ensure!(batch.status.as_str() == "completed", "the batch is {}", batch.status);
            break;
        }
        anyhow::ensure!(started.elapsed() < PATIENCE, "the batch does not end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let took = started.elapsed();
    let mut done = Done::by_now(&house).since(&before);
    worker.stop().await;
    for other in others {
        let other = other.end()?;
        done.statements += other.statements;
        done.trips += other.trips;
        done.cpu_seconds += other.cpu_seconds;
    }
    #[allow(clippy::cast_precision_loss, reason = "shown with a few digits")]
    let (number, statements, trips) = (items as f64, done.statements as f64, done.trips as f64);
    #[allow(clippy::cast_precision_loss, reason = "a small number")]
    let slots = (processes * SLOTS) as f64;
    Ok(vec![
        backend.to_string(),
        processes.to_string(),
        format!("{:.0}", number / took.as_secs_f64()),
        format!("{:.1}", took.as_secs_f64() * 1_000.0 * slots / number),
        format!("{:.1}", statements / number),
        format!("{:.1}", trips / number),
        format!("{:.2}", done.cpu_seconds * 1_000.0 / number),
    ])
}

/// How many bytes of memory a process takes more when `items` items of a batch are live: as many at work as the largest
/// number of slots allows, each waiting for its model, and the rest queued. Rows of a table: store, items at work, items that
/// wait, and mebibytes more than before the submission, then and at most.
///
/// # Errors
/// What the stores or the batch fail with.
pub async fn live(items: usize, scratch: &Path) -> Result<Vec<Vec<String>>> {
    let mut rows = Vec::new();
    for backend in [Backend::Sqlite, Backend::Postgres] {
        let location = StoreLocation::new(backend, scratch).await?;
        let mut script = script(items);
        let gate = format!("live-{backend}");
        if let Some(answer) = script.pointer_mut("/rules/0/answers/0") {
            answer["gate"] = json!({"name": gate});
        }
        if let Some(args) = script.pointer_mut("/rules/1/answers/0/tool_calls/0/args") {
            args["max_running_items"] = json!(MOST_SLOTS);
            args["max_live_items"] = json!(items);
        }
        let house = House::open(backend, &location, &script, MOST_SLOTS).await?;
        let worker = house.worker().await?;
        house.admit("t").await?;
        meter::reset_peak();
        let base = meter::resident();
        house.turn("t", &mut Silent).await?;
        let batches = house.records().batches();
        let batch = batches.of_thread("t", 1).await?.into_iter().next().context("no batch was submitted")?;
        let started = Instant::now();
        let counts = loop {
            let all = batches.counts(std::slice::from_ref(&batch.id)).await?;
            let counts = all.get(&batch.id).cloned().unwrap_or_default();
            if counts.of(BatchItemStatus::Running) == MOST_SLOTS as u64 {
                break counts;
            }
            anyhow::ensure!(started.elapsed() < PATIENCE, "the items do not begin");
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        // They have written their first checkpoints and wait for their models.
        gate_reached(&gate).await;
        let (now, most) = (meter::resident(), meter::peak());
        rows.push(vec![
            backend.to_string(),
            counts.of(BatchItemStatus::Running).to_string(),
            counts.of(BatchItemStatus::Queued).to_string(),
            mebibytes(now, base),
            mebibytes(most, base),
        ]);
        batches.cancel(&batch.id).await?;
        worker.stop().await;
    }
    Ok(rows)
}

async fn gate_reached(name: &str) {
    threadkeep_agent::model::scripted::gate(name).reached().await;
}

#[allow(clippy::cast_precision_loss, reason = "shown with a digit")]
fn mebibytes(now: u64, base: u64) -> String {
    format!("{:.1}", now.saturating_sub(base) as f64 / f64::from(1 << 20))
}

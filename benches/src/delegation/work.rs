//! Dispatching subagents, and having many of them.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use async_trait::async_trait;
use serde_json::Value as Json;
use threadkeep::channel::Schema;
use threadkeep::deletion::{RetentionPolicy, plan_retention};
use threadkeep::id::ThreadId;
use threadkeep::mode::ChannelMode;
use threadkeep::step::Task;
use threadkeep_agent::{Observer, TaskInput};

use super::house::{House, script};
use super::{STORES, StoreLocation};
use crate::case::Backend;
use crate::measure::{median, ms, percentile};
use crate::meter;

/// When what was seen of one subagent.
#[derive(Default)]
struct Watch {
    dispatched: Option<Instant>,
    event: Option<Instant>,
    /// From the call of the tool to its result.
    results: Vec<Duration>,
    /// Between one event of a subagent and the next.
    events: Vec<Duration>,
}

#[async_trait]
impl Observer for Watch {
    fn task_started(&mut self, _: i64, _: &Task, input: TaskInput<'_>) -> threadkeep::Result<()> {
        if let TaskInput::Call(_) = input {
            self.dispatched = Some(Instant::now());
        }
        Ok(())
    }

    fn task_ended(&mut self, _: i64, _: &Task, _: Result<&Json, &str>) {
        self.results.extend(self.dispatched.take().map(|since| since.elapsed()));
    }

    async fn custom(&mut self, event: &Json) {
        let since = self.event.replace(Instant::now());
        if event["type"] != "task_started" {
            self.events.extend(since.map(|since| since.elapsed()));
        }
    }
}

/// Times from the dispatch of a subagent to its result, and from one of its events to the next, on every store: rows of
/// store, p50 and p99 of both in milliseconds. The subagent's model answers at once, so the second one is more than the
/// time that an event takes from the subagent to its run.
///
/// # Errors
/// If a store cannot be opened, or a subagent does not complete.
pub async fn dispatch(runs: usize, scratch: &Path) -> Result<Vec<Vec<String>>> {
    let mut rows = Vec::new();
    for backend in STORES {
        let (mut short, mut long) = (Watch::default(), Watch::default());
        for (turns, watch) in [(1, &mut short), (10, &mut long)] {
            let location = StoreLocation::new(backend, scratch).await?;
            let house = House::open(backend, &location, &script(1, turns), 1).await?;
            // The first ones open files and connections.
            for run in 0..runs + 20 {
                if run == 20 {
                    *watch = Watch::default();
                }
                watch.event = None;
                house.turn(&format!("t{run}"), watch).await.with_context(|| backend.to_string())?;
            }
        }
        short.results.sort_unstable();
        long.events.sort_unstable();
        let of = |times: &[Duration], percent| percentile(times, percent).map_or(0.0, ms);
        rows.push(vec![
            backend.to_string(),
            format!("{:.2}", of(&short.results, 50.0)),
            format!("{:.2}", of(&short.results, 99.0)),
            format!("{:.2}", of(&long.events, 50.0)),
            format!("{:.2}", of(&long.events, 99.0)),
        ]);
    }
    Ok(rows)
}

/// What many subagents leave.
#[derive(Debug, Clone, Copy)]
pub struct Growth {
    /// How much more memory the process has at most, in bytes.
    pub bytes: u64,
    /// How long they took together.
    pub took: Duration,
    /// A retention pass over a parent of these subagents, which removes nothing.
    pub pass: Duration,
    /// The same when they are deleted.
    pub pass_without: Duration,
}

/// Has `subagents` at once make `turns` model calls each, on SQLite.
///
/// # Errors
/// If the store cannot be opened, or a subagent does not complete.
pub async fn growth(subagents: usize, turns: usize, scratch: &Path) -> Result<Growth> {
    let location = StoreLocation::new(Backend::Sqlite, scratch).await?;
    let house = House::open(Backend::Sqlite, &location, &script(subagents, turns), subagents).await?;
    let base = meter::resident();
    let started = Instant::now();
    house.turn("parent", &mut Watch::default()).await?;
    let took = started.elapsed();
    let bytes = meter::peak().saturating_sub(base);
    let pass = pass(&house, "parent").await?;

    // The same parent without them: what it says of their work makes it longer.
    for thread in house.accessor.saver().threads(None, usize::MAX).await? {
        if thread.as_str() != "parent" {
            house.accessor.delete_thread(&thread).await?;
        }
    }
    let pass_without = self::pass(&house, "parent").await?;
    Ok(Growth { bytes, took, pass, pass_without })
}

/// The median time of a retention pass: reading the thread whole, and planning.
async fn pass(house: &House, thread: &str) -> Result<Duration> {
    let table = Schema::thread_state().compile(ChannelMode::Delta, 10)?;
    let (thread, mut times) = (ThreadId::from(thread), Vec::new());
    for _ in 0..50 {
        let started = Instant::now();
        let image = house.accessor.saver().read_thread(&thread).await?;
        let plan = plan_retention(&image, &RetentionPolicy::default(), &table)?;
        anyhow::ensure!(!plan.verdicts.is_empty(), "the thread has checkpoints");
        times.push(started.elapsed());
    }
    median(times).context("fifty passes")
}

//! Many conversations on one saver: each writer gives each of its conversations one turn in rotation.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use tokio::sync::Barrier;

use super::{Job, Turns, seconds};
use crate::case::{Backend, Case};
use crate::conversation::{Conversation, accessor, messages, thread};
use crate::meter;
use crate::row::Row;
use crate::store::{Store, file_bytes};
use crate::workload::digest;

pub(super) async fn write(job: &Job, row: &mut Row, report: &mut impl FnMut(&Row)) -> Result<()> {
    let case = &job.case;
    let store = Store::open(case.backend, &job.target).await?;
    row.found.settings = Some(store.settings(case.backend).await?);
    row.found.layout = Some("tasks".to_owned());
    row.found.rss_base = Some(meter::resident());
    let server = store.watch().and_then(|watch| watch.server);
    let (flushes, busy, served) = (store.flushes(), meter::cpu(), server.map(|server| server.cpu()));
    let together = Arc::new(Barrier::new(case.writers));
    let mut writers = Vec::new();
    for writer in 0..case.writers {
        let indexes = (writer..case.threads).step_by(case.writers);
        let conversations = indexes.map(|index| Conversation::new(case, index, store.saver.clone()));
        let conversations = conversations.collect::<Result<Vec<_>>>()?;
        let (together, case) = (together.clone(), case.clone());
        writers.push(tokio::spawn(async move {
            together.wait().await;
            write_all(&case, conversations).await
        }));
    }
    let (mut turns, mut open) = (Turns::default(), Vec::new());
    let mut started: Option<Instant> = None;
    for writer in writers {
        let written = writer.await.context("a writer panicked")??;
        // The first of all: this task would get its turn again after some of their work.
        started = Some(started.map_or(written.started, |first| first.min(written.started)));
        turns.wall.extend(written.latencies);
        row.found.capped = row.found.capped.take().or(written.capped.then(|| "time".to_owned()));
        row.found.raw_bytes = Some(row.found.raw_bytes.unwrap_or_default() + written.raw_bytes);
        // Kept until all have ended, as open threads would be.
        open.push(written.conversations);
    }
    let wall = started.context("the case has no writer")?.elapsed();
    let found = &mut row.found;
    found.rss_peak = Some(meter::peak());
    found.wall_s = Some(seconds(wall));
    found.cpu_s = Some(seconds(meter::cpu().saturating_sub(busy)));
    let served = server.zip(served).map(|(server, before)| server.cpu().saturating_sub(before));
    found.server_cpu_s = served.map(seconds);
    found.flushes = store.flushes().zip(flushes).map(|(now, before)| now - before);
    found.bytes_open = Some(store.bytes().await?);
    turns.describe(found);
    #[allow(clippy::cast_precision_loss, reason = "a count of turns")]
    let rate = turns.wall.len() as f64 / wall.as_secs_f64();
    found.turns_per_s = Some((rate * 10.0).round() / 10.0);
    drop(open);
    report(row);

    if row.found.capped.is_none() {
        row.found.ok = Some(is_as_expected(case, &store).await?);
    }
    store.close().await;
    row.found.bytes_closed = match case.backend {
        Backend::Memory => None,
        Backend::Postgres => row.found.bytes_open,
        _ => Some(file_bytes(&job.target)),
    };
    Ok(())
}

struct Written {
    started: Instant,
    conversations: Vec<Conversation>,
    latencies: Vec<Duration>,
    raw_bytes: u64,
    capped: bool,
}

async fn write_all(case: &Case, conversations: Vec<Conversation>) -> Result<Written> {
    let started = Instant::now();
    let deadline = started + Duration::from_secs(case.cap_s);
    let mut written = Written { started, conversations, latencies: Vec::new(), raw_bytes: 0, capped: false };
    for _ in 0..case.turns {
        for conversation in &mut written.conversations {
            if Instant::now() > deadline {
                written.capped = true;
                return Ok(written);
            }
            let spent = conversation.turn(None).await?;
            written.latencies.push(spent.wall);
            written.raw_bytes += spent.raw_bytes;
        }
    }
    Ok(written)
}

/// Whether every conversation has the messages of its script.
async fn is_as_expected(case: &Case, store: &Store) -> Result<bool> {
    let accessor = accessor(case.mode, store.saver.clone())?;
    for index in 0..case.threads {
        let state = accessor.get(&thread(index), None).await?.context("a thread is gone")?;
        let expected = case.workload.expected(case.size, case.seed + index as u64, case.turns);
        if digest(&messages(&state)?) != expected.digest() {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Mode;
    use crate::measure::Phase;
    use crate::runner::Matrix;

    /// On one thread, the writer does all of its work in memory before any other task gets a turn.
    #[tokio::test]
    async fn the_wall_time_has_all_turns_of_the_writers() {
        let matrix = Matrix {
            backends: vec![Backend::Memory],
            modes: vec![Mode::Full],
            turns: vec![500],
            threads: vec![2],
            ..Matrix::default()
        };
        let case = matrix.cases().remove(0);
        let job = Job { case: case.clone(), target: String::new(), floor_target: None, phase: Phase::Write };
        let mut row = Row::new(case);
        write(&job, &mut row, &mut |_: &Row| {}).await.unwrap();
        let found = &row.found;
        assert_eq!((found.turns_done, found.ok), (Some(1000), Some(true)));
        // Both are rounded to a millisecond.
        assert!(found.wall_s.unwrap() + 0.002 > found.turn_sum_s.unwrap(), "{found:?}");
    }
}

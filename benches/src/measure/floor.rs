//! Raw stores: write the same bytes in the same number of flushed inserts, then read and decode them once.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::{Job, Turns, median, ms, seconds};
use crate::case::Backend;
use crate::meter;
use crate::raw::{self, Raw};
use crate::row::{Found, Row};
use crate::store::{Watch, file_bytes};

pub(super) async fn write(job: &Job, row: &mut Row, report: &mut impl FnMut(&Row)) -> Result<()> {
    let case = &job.case;
    let mut raw = Raw::open(case.backend, &job.target).await?;
    let mut script = case.workload.script(case.size, case.seed);
    let (mut turns, mut steps) = (Turns::default(), Vec::new());
    let (mut raw_bytes, mut inserts) = (0, 0);
    let found = &mut row.found;
    found.rss_base = Some(meter::resident());
    let started = Instant::now();
    for _ in 0..case.turns {
        let turn = script.turn();
        let new = turn.steps.iter().flat_map(|step| step.emit.messages());
        raw_bytes += new.map(|message| message.to_string().len() as u64).sum::<u64>();
        let mut rows = turn.steps.iter().map(raw::bytes).collect::<Result<Vec<_>>>()?;
        if turn.note {
            // A saver stores a checkpoint for the note, with its own flush.
            rows.push(Vec::new());
        }
        inserts += rows.len() as u64;
        let (mut spent, busy) = (Duration::ZERO, meter::cpu());
        for bytes in rows {
            let inserting = Instant::now();
            raw.insert(&bytes).await?;
            let taken = inserting.elapsed();
            spent += taken;
            if !bytes.is_empty() {
                steps.push(taken);
            }
        }
        turns.wall.push(spent);
        turns.cpu.push(meter::cpu().saturating_sub(busy));
        if started.elapsed() > Duration::from_secs(case.cap_s) {
            found.capped = (turns.wall.len() < case.turns).then(|| "time".to_owned());
            break;
        }
    }
    found.wall_s = Some(seconds(started.elapsed()));
    found.cpu_s = Some(seconds(turns.cpu.iter().sum()));
    found.rss_peak = Some(meter::peak());
    found.raw_bytes = Some(raw_bytes);
    found.flushes = Some(inserts);
    found.checkpoints = Some(inserts);
    found.step_p50_ms = median(steps).map(ms);
    turns.describe(found);
    report(row);

    let found = &mut row.found;
    let mut times = Vec::new();
    for _ in 0..5 {
        let reading = Instant::now();
        let read = raw.read().await?;
        times.push(reading.elapsed());
        found.messages = Some(read.len() as u64);
    }
    found.head_warm_ms = median(times).map(ms);
    drop(raw);
    if case.backend == Backend::RawSqlite {
        found.settings = Some(format!("SQLite {}, WAL, synchronous=FULL", rusqlite::version()));
        found.bytes_closed = Some(file_bytes(&job.target));
    } else {
        let watch = Watch::open(&job.target).await?;
        found.settings = Some(watch.settings().await?);
        found.bytes_closed = Some(watch.bytes().await?);
    }
    found.bytes_open = found.bytes_closed;
    Ok(())
}

pub(super) async fn cold(job: &Job, found: &mut Found) -> Result<()> {
    let started = Instant::now();
    let mut raw = Raw::open(job.case.backend, &job.target).await?;
    found.cold_open_ms = Some(ms(started.elapsed()));
    let started = Instant::now();
    let read = raw.read().await?;
    found.cold_head_ms = Some(ms(started.elapsed()));
    drop(read);
    Ok(())
}

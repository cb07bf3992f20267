//! One conversation, turn by turn, then the reads.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::{Job, Turns, median, ms, reads, seconds};
use crate::case::Backend;
use crate::conversation::{Conversation, Spent};
use crate::meter;
use crate::raw::Raw;
use crate::row::{Found, Point, Row};
use crate::store::{Store, file_bytes};

/// Points of a curve, and turns for which the server's CPU time is reported.
const POINTS: usize = 40;

pub(super) async fn write(job: &Job, row: &mut Row, report: &mut impl FnMut(&Row)) -> Result<()> {
    let case = &job.case;
    let store = Store::open(case.backend, &job.target).await?;
    let mut floor = match (case.backend.floor(), &job.floor_target) {
        (Some(backend), Some(target)) => Some(Raw::open(backend, target).await?),
        _ => None,
    };
    let mut conversation = Conversation::new(case, 0, store.saver.clone())?;
    let found = &mut row.found;
    found.settings = Some(store.settings(case.backend).await?);
    found.rss_base = Some(meter::resident());
    let before = Counts::of(&store).await?;
    let mut progress = Progress::new(case.turns);
    let started = Instant::now();
    for turn in 0..case.turns {
        progress.note(conversation.turn(floor.as_mut()).await?);
        if progress.is_due() {
            progress.point(&store).await?;
        }
        if started.elapsed() > Duration::from_secs(case.cap_s) && turn + 1 < case.turns {
            found.capped = Some("time".to_owned());
            break;
        }
    }
    found.wall_s = Some(seconds(started.elapsed()));
    found.rss_peak = Some(meter::peak());
    found.bytes_open = Some(store.bytes().await?);
    before.until(&Counts::of(&store).await?, found);
    progress.describe(found);
    report(row);

    reads::read(case, &store, &conversation, &mut row.found).await?;
    row.found.rss_peak_all = Some(meter::peak());
    if case.backend == Backend::Postgres {
        row.found.bytes_closed = row.found.bytes_open;
    }
    store.close().await;
    if case.backend != Backend::Postgres && case.backend != Backend::Memory {
        row.found.bytes_closed = Some(file_bytes(&job.target));
    }
    let done = usize::try_from(row.found.turns_done.unwrap_or_default())?;
    let expected = case.workload.expected(case.size, case.seed, done).digest();
    row.found.ok = Some(row.found.digest.as_deref() == Some(&expected));
    Ok(())
}

/// Counters that only grow.
struct Counts {
    flushes: Option<u64>,
    server_cpu: Option<Duration>,
    written: u64,
    log: Option<u64>,
}

impl Counts {
    async fn of(store: &Store) -> Result<Self> {
        let log = match store.watch() {
            Some(watch) => Some(watch.log_position().await?),
            None => None,
        };
        let server_cpu = store.watch().and_then(|watch| watch.server).map(|server| server.cpu());
        Ok(Self { flushes: store.flushes(), server_cpu, written: meter::written(), log })
    }

    fn until(&self, later: &Self, found: &mut Found) {
        let grown = |a: Option<u64>, b: Option<u64>| Some(b? - a?);
        found.flushes = grown(self.flushes, later.flushes);
        found.wal_bytes = grown(self.log, later.log);
        found.io_write_bytes = Some(later.written - self.written);
        let server = later.server_cpu.zip(self.server_cpu);
        found.server_cpu_s = server.map(|(later, earlier)| seconds(later.saturating_sub(earlier)));
    }
}

/// What the turns cost, and the curve so far.
struct Progress {
    turns: Turns,
    every: usize,
    total: Spent,
    curve: Vec<Point>,
    server_cpu: Vec<Duration>,
}

impl Progress {
    fn new(turns: usize) -> Self {
        Self {
            turns: Turns::default(),
            every: turns.div_ceil(POINTS).max(1),
            total: Spent::default(),
            curve: Vec::new(),
            server_cpu: Vec::new(),
        }
    }

    fn note(&mut self, spent: Spent) {
        self.turns.wall.push(spent.wall);
        self.turns.cpu.push(spent.cpu);
        self.total.cpu += spent.cpu;
        self.total.raw_bytes += spent.raw_bytes;
        self.total.checkpoints += spent.checkpoints;
        self.total.steps.extend(spent.steps);
        self.total.floor.extend(spent.floor);
    }

    fn is_due(&self) -> bool {
        self.turns.wall.len().is_multiple_of(self.every)
    }

    async fn point(&mut self, store: &Store) -> Result<()> {
        let done = self.turns.wall.len();
        let stretch = done - self.every..done;
        let typical = |times: &[Duration]| median(times[stretch.clone()].iter().copied()).map(ms);
        self.curve.push(Point {
            turn: done as u64,
            ms: typical(&self.turns.wall).context("no turn")?,
            cpu_ms: typical(&self.turns.cpu).context("no turn")?,
            bytes: store.bytes().await?,
            raw_bytes: self.total.raw_bytes,
        });
        if let Some(server) = store.watch().and_then(|watch| watch.server) {
            self.server_cpu.push(server.cpu());
        }
        Ok(())
    }

    fn describe(self, found: &mut Found) {
        self.turns.describe(found);
        found.cpu_s = Some(seconds(self.total.cpu));
        found.raw_bytes = Some(self.total.raw_bytes);
        found.checkpoints = Some(self.total.checkpoints);
        found.step_p50_ms = median(self.total.steps).map(ms);
        found.floor_step_p50_ms = median(self.total.floor).map(ms);
        found.curve = self.curve;
        // The first stretch warms up the server.
        let turns = u32::try_from(self.every).unwrap_or(u32::MAX);
        let stretch = |pair: &[Duration]| ms(pair[1].saturating_sub(pair[0]) / turns);
        let early = self.server_cpu.windows(2).next().map(stretch);
        found.server_cpu_turn_at20_ms = early;
        found.server_cpu_turn_end_ms = self.server_cpu.windows(2).next_back().map(stretch);
    }
}

//! Failovers under several savers, and a history that knows what was acknowledged.
//!
//! Each thread is a register that savers append to and read, in this process and in processes of their own. A value that
//! was acknowledged before a read began is in what it reads, in the order of the appends, once; a value that was refused
//! is never there. A doubt is settled by repeating the commit: by the driver, or, for a saver that tries once, by its
//! caller. A turn in which no commit was in doubt fails.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, ensure};
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use threadkeep::id::ThreadId;
use threadkeep::saver::Saver as _;
use threadkeep_postgres::{Options, PostgresSaver, setup};
use threadkeep_testing::{BoxError, Cluster, Replication};

use self::side::{Answer, Answered, Request, Side, connect, read};
use crate::actor::verified;
use crate::child::{Child, Work};
use crate::exercise::{About, Tally, Turn};
use crate::storage::{HUNG, PATIENCE};

mod side;

pub(crate) use self::side::serve;

/// What it tries, and what each run of it does.
pub const ABOUT: About = About {
    what: "a primary crashes, is killed, hangs; its standby hangs or takes over; waits are cancelled; processes append and read",
    needs: &["acknowledged commits", "failovers", "reads"],
};

/// Threads that are appended to at a time.
const THREADS: usize = 8;
/// Values of a thread; then another one takes its place.
const VALUES: usize = 100;
/// How long a saver retries. A server that hangs is left after a quarter of it.
const RETRIES: Duration = Duration::from_secs(4);
/// Before what was refused is tried again.
const PAUSE: Duration = Duration::from_millis(5);
/// The name of the sessions of the saver that tries once.
const HASTY: &str = "hasty";

/// Waits, for a minute at most, until a commit of each kind of saver waits for the standby, or for such a commit.
const WAITING: &str = "DO $$ BEGIN
    FOR n IN 1..6000 LOOP
        EXIT WHEN (SELECT count(DISTINCT application_name) = 2 FROM pg_stat_activity
            WHERE application_name IN ('threadkeep', 'hasty')
            AND (wait_event = 'SyncRep' OR wait_event_type = 'Lock'));
        PERFORM pg_sleep(0.01);
        PERFORM pg_stat_clear_snapshot();
    END LOOP;
END $$";
const CANCEL: &str =
    "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";

/// What happens to the servers.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Crash,
    Kill,
    Zombie,
    Restart,
    FrozenStandby,
    CancelledWaits,
}

/// How often each fault strikes for each unit of effort.
const FAULTS: [(Fault, u32); 6] = [
    (Fault::Crash, 6),
    (Fault::Kill, 6),
    (Fault::Zombie, 4),
    (Fault::CancelledWaits, 4),
    (Fault::Restart, 2),
    (Fault::FrozenStandby, 2),
];

impl Fault {
    fn name(self) -> &'static str {
        match self {
            Self::Crash => "crashes with failover",
            Self::Kill => "kills with failover",
            Self::Zombie => "frozen primaries with failover",
            Self::Restart => "restarts",
            Self::FrozenStandby => "frozen standbys with cancelled waits",
            Self::CancelledWaits => "cancelled waits with failover",
        }
    }

    /// Whether the standby becomes the primary.
    fn fails_over(self) -> bool {
        !matches!(self, Self::Restart | Self::FrozenStandby)
    }

    fn strike(self, cluster: &Cluster) -> Result<(), BoxError> {
        match self {
            Self::Crash => cluster.crash_primary()?,
            Self::Kill => cluster.kill_primary()?,
            Self::Zombie => cluster.freeze_primary()?,
            Self::Restart => {
                cluster.crash_primary()?;
                cluster.resume_primary()?;
                return cluster.wait_for_standby();
            }
            Self::FrozenStandby => {
                cluster.freeze_standby()?;
                // Their commits are stored, and in doubt until the standby has them.
                cluster.execute(WAITING)?;
                cluster.execute(CANCEL)?;
                std::thread::sleep(Duration::from_millis(200));
                cluster.thaw_standby()?;
                return cluster.wait_for_standby();
            }
            Self::CancelledWaits => {
                cluster.hold_replication()?;
                cluster.execute(WAITING)?;
                for _ in 0..5 {
                    cluster.execute(CANCEL)?;
                    std::thread::sleep(Duration::from_millis(20));
                }
                cluster.kill_primary()?;
            }
        }
        cluster.promote()?;
        if matches!(self, Self::Zombie) {
            cluster.thaw_old_primary()?;
        }
        cluster.rebuild()
    }
}

/// What is known of the values of a thread.
#[derive(Debug, Default)]
struct Known {
    acknowledged: Vec<u64>,
    refused: HashSet<u64>,
}

#[derive(Default)]
struct History {
    threads: Mutex<BTreeMap<String, Known>>,
    /// The generations at whose threads workers are, and how many.
    entered: Mutex<BTreeMap<usize, usize>>,
    values: AtomicUsize,
    /// Commits that were in doubt for their callers.
    doubts: AtomicUsize,
    /// Doubts that the driver settled.
    settled: AtomicUsize,
    reads: AtomicUsize,
    reported: AtomicUsize,
    progress: AtomicUsize,
}

impl History {
    fn with<T>(&self, thread: &str, with: impl FnOnce(&mut Known) -> T) -> T {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        with(threads.entry(thread.to_owned()).or_default())
    }

    /// The generation of threads that is appended to now.
    fn generation(&self) -> usize {
        self.values.load(Ordering::SeqCst) / (THREADS * VALUES)
    }

    /// Enters the current generation: its threads stay until what is returned is dropped.
    fn enter(&self) -> Entered<'_> {
        let mut entered = self.entered.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = self.generation();
        *entered.entry(generation).or_default() += 1;
        Entered { history: self, generation }
    }

    /// The first of the last `keep` generations, or an earlier one at which a worker still is: a call may take as long as
    /// the others take for two generations.
    fn first_to_keep(&self, keep: usize) -> usize {
        let entered = self.entered.lock().unwrap_or_else(PoisonError::into_inner);
        let first = (self.generation() + 1).saturating_sub(keep);
        entered.keys().next().map_or(first, |oldest| first.min(*oldest))
    }

    /// Checks the threads of all generations but the last `keep`, and deletes them, so that the files of a long run stay
    /// small.
    async fn retire(&self, reader: &PostgresSaver, keep: usize, tally: &Tally) -> anyhow::Result<()> {
        let end = self.first_to_keep(keep);
        let is_old = |thread: &str| {
            thread.split_once('-').and_then(|(number, _)| number.parse().ok()).is_some_and(|n: usize| n < end)
        };
        let threads: Vec<String> = {
            let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
            threads.keys().filter(|thread| is_old(thread)).cloned().collect()
        };
        for thread in threads {
            let before = self.with(&thread, |known| known.acknowledged.clone());
            let (_, found) = read(reader, &thread).await?;
            self.check(&thread, &before, &found)?;
            let id = ThreadId::from(thread.as_str());
            verified(reader, &id).await?;
            reader.delete_thread(&id).await?;
            tally.add("acknowledged commits", before.len());
            self.threads.lock().unwrap_or_else(PoisonError::into_inner).remove(&thread);
        }
        Ok(())
    }

    /// Asks a saver, and counts the doubts and the reports.
    async fn ask(&self, side: &mut Side, request: &Request) -> anyhow::Result<Answer> {
        let Answered { answer, was_in_doubt, settled } = side.ask(request).await?;
        self.doubts.fetch_add(usize::from(was_in_doubt), Ordering::SeqCst);
        self.settled.fetch_add(settled, Ordering::SeqCst);
        if matches!(answer, Answer::HistoryLost) {
            self.reported.fetch_add(1, Ordering::SeqCst);
        }
        Ok(answer)
    }

    /// Checks what was read by a read that began when these values were acknowledged.
    fn check(&self, thread: &str, before: &[u64], found: &[u64]) -> anyhow::Result<()> {
        // A value is drawn after those that it is appended to.
        let in_order = found.is_sorted_by(|one, next| one < next);
        ensure!(in_order, "thread {thread}: a value is there twice, or before an earlier one: {found:?}");
        let refused =
            self.with(thread, |known| found.iter().copied().find(|value| known.refused.contains(value)));
        ensure!(refused.is_none(), "thread {thread}: {refused:?} was refused and is there");
        for value in before {
            ensure!(
                found.binary_search(value).is_ok(),
                "thread {thread}: {value} was acknowledged and is not in {found:?}"
            );
        }
        Ok(())
    }
}

/// A worker's stay at a generation of threads.
struct Entered<'h> {
    history: &'h History,
    generation: usize,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut entered = self.history.entered.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(workers) = entered.get_mut(&self.generation) {
            *workers -= 1;
            if *workers == 0 {
                entered.remove(&self.generation);
            }
        }
    }
}

/// Strikes each kind of fault a few times, as often as the effort says, under load: 20 failovers for each unit.
///
/// # Errors
/// The first acknowledged value that is lost, stale read or refused value that is there.
pub async fn run(turn: Turn) -> anyhow::Result<()> {
    let (seed, effort, tally) = (turn.seed, turn.effort, &turn.tally);
    // A short test needs failovers more than it needs commits. Five units are a hundred failovers and a million commits.
    let between = if effort == 1 { 20 } else { 1700 * effort as usize };
    let cluster = tokio::task::spawn_blocking(|| Cluster::start(Replication::Synchronous)).await?;
    let cluster = Arc::new(cluster.map_err(|error| anyhow!(error))?);
    let url = cluster.url("postgres");
    setup(&url, &Options { patience: PATIENCE, ..Options::default() }).await?;
    let (history, done) = (Arc::new(History::default()), Arc::new(AtomicBool::new(false)));
    let patient = connect(&url, RETRIES).await?;
    let hasty = connect(&format!("{url}&application_name={HASTY}"), Duration::ZERO).await?;
    let mut sides = vec![
        Side::here(&patient, &patient),
        Side::here(&patient, &patient),
        Side::here(&patient, &patient),
        Side::here(&patient, &patient),
        // It waits for a primary that hangs, and does not look for another one. So it must not be asked what is there.
        Side::here(&patient, &hasty),
        Side::here(&patient, &hasty),
    ];
    for _ in 0..2 {
        sides.push(Side::Process(Box::new(Child::start(&turn, Work::Registers, &url, seed)?)));
    }
    let mut workers = Vec::new();
    for (side, worker) in sides.into_iter().zip(1_u64..) {
        let (history, done) = (history.clone(), done.clone());
        let rng = StdRng::seed_from_u64(seed ^ (worker << 8));
        workers.push(tokio::spawn(async move { work(side, &history, &done, rng).await }));
    }
    let mut rng = StdRng::seed_from_u64(seed);
    let planned = FAULTS.iter().flat_map(|(fault, often)| vec![*fault; (often * effort) as usize]);
    let mut planned: Vec<Fault> = planned.collect();
    planned.shuffle(&mut rng);
    let reader = PostgresSaver::connect(&url, Options { patience: PATIENCE, ..Options::default() }).await?;
    for fault in planned {
        if !progress(&history, between, &workers).await? {
            break;
        }
        history.retire(&reader, 2, tally).await?;
        let struck = cluster.clone();
        let outcome = tokio::task::spawn_blocking(move || fault.strike(&struck)).await?;
        outcome.map_err(|error| anyhow!("{}: {error}", fault.name()))?;
        tally.add(fault.name(), 1);
        if fault.fails_over() {
            tally.add("failovers", 1);
        }
    }
    progress(&history, between, &workers).await?;
    done.store(true, Ordering::SeqCst);
    for worker in workers {
        worker.await??;
    }
    history.retire(&reader, 0, tally).await?;
    let doubts = history.doubts.load(Ordering::SeqCst);
    ensure!(doubts > 0, "no commit was in doubt, so nothing was tried");
    tally.add("doubts settled by a repeat", doubts);
    tally.add("doubts settled by the driver", history.settled.load(Ordering::SeqCst));
    tally.add("lost histories reported", history.reported.load(Ordering::SeqCst));
    tally.add("reads", history.reads.load(Ordering::SeqCst));
    Ok(())
}

/// Waits until some values more are acknowledged; `false` if a worker has ended, because it has found something.
async fn progress(
    history: &History,
    values: usize,
    workers: &[tokio::task::JoinHandle<anyhow::Result<()>>],
) -> anyhow::Result<bool> {
    let goal = history.progress.load(Ordering::SeqCst) + values;
    let (mut last, mut moved) = (0, Instant::now());
    loop {
        let now = history.progress.load(Ordering::SeqCst);
        if workers.iter().any(tokio::task::JoinHandle::is_finished) {
            return Ok(false);
        }
        if now >= goal {
            return Ok(true);
        }
        if now != last {
            (last, moved) = (now, Instant::now());
        }
        ensure!(moved.elapsed() < HUNG, "nothing is acknowledged any more");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Appends and reads until it is done.
async fn work(mut side: Side, history: &History, done: &AtomicBool, mut rng: StdRng) -> anyhow::Result<()> {
    while !done.load(Ordering::SeqCst) {
        let entered = history.enter();
        let thread = format!("{}-{}", entered.generation, rng.random_range(0..THREADS));
        let before = history.with(&thread, |known| known.acknowledged.clone());
        let request = Request::Read { thread: thread.clone() };
        let Answer::Read { mut head, mut values } = history.ask(&mut side, &request).await? else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        history.check(&thread, &before, &values)?;
        history.reads.fetch_add(1, Ordering::SeqCst);
        // A few in a row, without a look: with a warm head.
        for _ in 0..rng.random_range(1..6) {
            let value = history.values.fetch_add(1, Ordering::SeqCst) as u64;
            values.push(value);
            let request = Request::Append { thread: thread.clone(), head, values: values.clone() };
            match history.ask(&mut side, &request).await? {
                Answer::Stored(id) => {
                    history.with(&thread, |known| known.acknowledged.push(value));
                    history.progress.fetch_add(1, Ordering::SeqCst);
                    head = Some(id);
                }
                Answer::Refused => {
                    history.with(&thread, |known| known.refused.insert(value));
                    break;
                }
                Answer::HistoryLost => break,
                Answer::Read { .. } => bail!("asked to append, it has read"),
            }
        }
    }
    side.end().await
}

#[cfg(test)]
mod tests;

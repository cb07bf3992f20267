//! Failovers under two savers, and a history that knows what was acknowledged.
//!
//! Each thread is a register of which two savers append and read. A value that was acknowledged before a read began is in
//! what it reads, in the order of the appends, once; a value that was refused is never there; a doubt is settled by
//! repeating the commit.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure};
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, Stored};
use threadkeep::id::{IdSource, ThreadId};
use threadkeep::metadata::{Metadata, Source};
use threadkeep::saver::{CheckpointSelector, Flush, Saver, StepCommit};
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};
use threadkeep_postgres::{Options, PostgresSaver, setup};
use threadkeep_testing::{Cluster, Replication};

use crate::exercise::{About, Tally, Turn};
use crate::storage::{HUNG, PATIENCE};

/// What it tries, and what each run of it does.
pub const ABOUT: About = About {
    what: "a primary crashes, is killed, hangs; its standby hangs or takes over; waits are cancelled; two savers append and read",
    needs: &["acknowledged commits", "failovers", "reads"],
};

/// Threads that are appended to at a time.
const THREADS: usize = 8;
/// Values of a thread; then another one takes its place.
const VALUES: usize = 100;
/// How long a saver retries. A server that hangs is left after a quarter of it.
const RETRIES: Duration = Duration::from_secs(4);

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
            Self::FrozenStandby => "frozen standbys",
            Self::CancelledWaits => "cancelled waits with failover",
        }
    }

    /// Whether the standby becomes the primary.
    fn fails_over(self) -> bool {
        !matches!(self, Self::Restart | Self::FrozenStandby)
    }

    fn strike(self, cluster: &Cluster) -> Result<(), threadkeep_testing::BoxError> {
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
                std::thread::sleep(Duration::from_millis(200));
                cluster.thaw_standby()?;
                return cluster.wait_for_standby();
            }
            Self::CancelledWaits => {
                cluster.hold_replication()?;
                for _ in 0..5 {
                    std::thread::sleep(Duration::from_millis(20));
                    let cancel = "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
                    cluster.execute(cancel)?;
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
    doubts: AtomicUsize,
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
            reader.delete_thread(&ThreadId::from(thread.as_str())).await?;
            tally.add("acknowledged commits", before.len());
            self.threads.lock().unwrap_or_else(PoisonError::into_inner).remove(&thread);
        }
        Ok(())
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
    let Turn { seed, effort, tally, .. } = turn;
    // A short test needs failovers more than it needs commits. Five units are a hundred failovers and a million commits.
    let between = if effort == 1 { 20 } else { 1700 * effort as usize };
    let cluster = tokio::task::spawn_blocking(|| Cluster::start(Replication::Synchronous)).await?;
    let cluster = Arc::new(cluster.map_err(|error| anyhow!(error))?);
    let url = cluster.url("postgres");
    setup(&url, &Options { patience: PATIENCE, ..Options::default() }).await?;
    let (history, done) = (Arc::new(History::default()), Arc::new(AtomicBool::new(false)));
    let mut workers = Vec::new();
    for worker in 0..2 {
        let options = Options { patience: RETRIES, ..Options::default() };
        // Its retries may be over early on a busy machine.
        let connected = async {
            loop {
                match PostgresSaver::connect(&url, options.clone()).await {
                    Err(Error::Unavailable { .. }) => {}
                    connected => return connected,
                }
            }
        };
        let saver = Arc::new(tokio::time::timeout(HUNG, connected).await??);
        for task in 0..4 {
            let (saver, history, done) = (saver.clone(), history.clone(), done.clone());
            let rng = StdRng::seed_from_u64(seed ^ (worker << 8) ^ task);
            workers.push(tokio::spawn(async move { work(&saver, &history, &done, rng).await }));
        }
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
        history.retire(&reader, 2, &tally).await?;
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
    history.retire(&reader, 0, &tally).await?;
    tally.add("doubts", history.doubts.load(Ordering::SeqCst));
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
async fn work(
    saver: &PostgresSaver,
    history: &History,
    done: &AtomicBool,
    mut rng: StdRng,
) -> anyhow::Result<()> {
    let ids = IdSource::default();
    while !done.load(Ordering::SeqCst) {
        let entered = history.enter();
        let thread = format!("{}-{}", entered.generation, rng.random_range(0..THREADS));
        let before = history.with(&thread, |known| known.acknowledged.clone());
        let (head, found) = match read(saver, &thread).await {
            Ok(read) => read,
            Err(Error::Unavailable { .. }) => continue,
            // It had read what a cancelled wait left on the old primary alone. Nobody acknowledged that.
            Err(Error::HistoryLost { .. }) => {
                history.reported.fetch_add(1, Ordering::SeqCst);
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        history.check(&thread, &before, &found)?;
        history.reads.fetch_add(1, Ordering::SeqCst);
        // A few in a row, without a look: with a warm head.
        let (mut head, mut values) = (head, found);
        for _ in 0..rng.random_range(1..6) {
            let value = history.values.fetch_add(1, Ordering::SeqCst) as u64;
            values.push(value);
            let step = append(&ids, &thread, head, &values)?;
            let mut doubtful = false;
            let outcome = loop {
                match saver.commit(step.clone()).await {
                    Err(Error::InDoubt { .. }) => {
                        doubtful = true;
                        history.doubts.fetch_add(1, Ordering::SeqCst);
                    }
                    // Nothing was written this time; the doubt remains.
                    Err(Error::Unavailable { .. }) if doubtful => {}
                    other => break other,
                }
            };
            match outcome {
                Ok(_) => {
                    history.with(&thread, |known| known.acknowledged.push(value));
                    history.progress.fetch_add(1, Ordering::SeqCst);
                    head = Some(step.checkpoint.id);
                }
                Err(Error::Conflict { .. } | Error::Unavailable { .. }) => {
                    history.with(&thread, |known| known.refused.insert(value));
                    break;
                }
                Err(Error::HistoryLost { .. }) => {
                    history.reported.fetch_add(1, Ordering::SeqCst);
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

type Head = Option<threadkeep::id::CheckpointId>;

async fn read(saver: &PostgresSaver, thread: &str) -> Result<(Head, Vec<u64>)> {
    let Some(head) = saver.get(&CheckpointSelector::head(&ThreadId::from(thread))).await? else {
        return Ok((None, Vec::new()));
    };
    let value = head.checkpoint.channels.get("values").and_then(|entry| entry.stored.value());
    let json = value.map(ChannelValue::to_json).transpose()?.unwrap_or_default();
    let numbers = json.as_array().into_iter().flatten().filter_map(serde_json::Value::as_u64);
    Ok((Some(head.checkpoint.id), numbers.collect()))
}

fn append(ids: &IdSource, thread: &str, head: Head, values: &[u64]) -> Result<StepCommit> {
    let stored = Stored::Value(ChannelValue::from_json(&serde_json::json!(values))?);
    let entry = ChannelEntry { version: ids.version_after(None), stored };
    Ok(StepCommit {
        thread: thread.into(),
        namespace: "".into(),
        parent: head,
        expected_head: head,
        checkpoint: Checkpoint {
            id: ids.checkpoint_after(head),
            channels: [("values".into(), entry)].into(),
            next: Vec::new(),
            applied: Vec::new(),
        },
        metadata: Metadata::new(Source::Loop, 0),
        writes: Vec::new(),
        pending: Vec::new(),
        flush: Flush::Now,
    })
}

#[cfg(test)]
mod tests;

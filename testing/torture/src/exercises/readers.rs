//! Readers during every kind of rewrite: no read of a healthy thread is an error, and each answer is correct.
//!
//! One task adds to a thread. Another one prunes, enforces the retention policy, deletes for runs, converts, copies and
//! deletes. Readers read the head, old checkpoints and histories, warm and cold. A checkpoint's state never changes, so
//! each answer is compared with what the writer saw when it created the checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, ensure};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Map, json};
use threadkeep::Error;
use threadkeep::convert::convert;
use threadkeep::deletion::{
    Boundary, Keep, Prune, RetentionPolicy, copy_thread, delete_for_runs, enforce, prune,
};
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::Saver;
use threadkeep::state::{HistoryQuery, StateAccessor, StateSnapshot, Update};
use threadkeep::verify::verify;
use tokio::task::JoinHandle;

use crate::actor::{accessor, table, texts};
use crate::exercise::{About, Turn};
use crate::storage::Storage;

/// What it tries, and what each run of it does.
pub const ABOUT: About = About {
    what: "reads beside prune, retention, delete-for-runs, convert, copy and delete",
    needs: &["commits", "rewrites", "states"],
};

const THREAD: &str = "t";

/// What the writer saw of each checkpoint.
type Known = Arc<Mutex<BTreeMap<CheckpointId, Vec<String>>>>;

/// What happened beside the writer.
#[derive(Default)]
struct Beside {
    rewrites: AtomicUsize,
    states: AtomicUsize,
    /// The writer has ended, and so do the others.
    over: AtomicBool,
}

impl Beside {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Whether the writer was beside both.
    fn happened(&self) -> bool {
        [&self.rewrites, &self.states].iter().all(|count| count.load(Ordering::SeqCst) > 0)
    }
}

/// Reads during rewrites for a while.
///
/// # Errors
/// The first error or wrong answer.
pub async fn run(turn: Turn) -> anyhow::Result<()> {
    let place = Storage::new(turn.saver).await?;
    let known = Known::default();
    let beside = Arc::new(Beside::default());
    let rewriter = place.open().await?;
    let reader = place.open().await?;
    let rewriting = tokio::spawn(rewrite(rewriter, turn.clone(), beside.clone()));
    let mut reading = Vec::new();
    for (n, warm) in [(1, true), (2, false)] {
        let seed = turn.seed.wrapping_mul(3) + n;
        reading.push(tokio::spawn(read(reader.clone(), seed, warm, known.clone(), beside.clone())));
    }
    let writer = place.open().await?;
    // One that ends before the writer does has failed.
    let goes_on = || {
        let ended = rewriting.is_finished() || reading.iter().any(JoinHandle::is_finished);
        !beside.happened() && !ended
    };
    let written = write(&writer, &turn, &known, goes_on).await;
    // Ends the other tasks too, however this one ended.
    beside.over.store(true, Ordering::SeqCst);
    let mut answers = Vec::new();
    for reader in reading {
        answers.extend(reader.await?.context("a reader")?);
    }
    rewriting.await?.context("a rewrite")?;
    written.context("the writer")?;
    turn.tally.add("states", answers.len());
    let known = known.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for (id, read) in answers {
        let expected = known.get(&id).with_context(|| format!("checkpoint {id} comes from nowhere"))?;
        ensure!(read == *expected, "checkpoint {id} reads {read:?}, expected {expected:?}");
    }
    let found = verify(&*writer, &THREAD.into(), &*table(ChannelMode::Delta)?).await?;
    ensure!(found.is_empty(), "verify: {}", found[0]);
    Ok(())
}

/// Adds to the thread a number of times, and longer while `goes_on` says so.
async fn write(
    saver: &Arc<dyn Saver>,
    turn: &Turn,
    known: &Known,
    goes_on: impl Fn() -> bool,
) -> anyhow::Result<()> {
    let accessor = accessor(saver, ChannelMode::Delta, turn.seed)?;
    for n in 0.. {
        if n >= 60 * turn.effort && !goes_on() {
            break;
        }
        loop {
            match add(&accessor, n).await {
                // The thread was deleted between the read of its head and the commit.
                Err(Error::Conflict { .. } | Error::NotFound { .. }) => {}
                made => {
                    let made = made?;
                    known.lock().unwrap_or_else(PoisonError::into_inner).insert(made.key.id, texts(&made)?);
                    break;
                }
            }
        }
        turn.tally.add("commits", 1);
        // In memory no call waits, and the others may have no other worker.
        tokio::task::yield_now().await;
    }
    Ok(())
}

async fn add(accessor: &StateAccessor, n: u32) -> threadkeep::Result<StateSnapshot> {
    let writes =
        vec![accessor.write("messages", json!([{ "type": "ai", "content": format!("{n}") }]), false)?];
    let extra = Map::from_iter([("run_id".to_owned(), json!(format!("run {}", n / 3)))]);
    let update = Update { at: None, node: "writer".into(), writes, extra };
    accessor.update(&THREAD.into(), update).await
}

async fn rewrite(saver: Arc<dyn Saver>, turn: Turn, beside: Arc<Beside>) -> anyhow::Result<()> {
    let mut rng = StdRng::seed_from_u64(turn.seed ^ 0xde1);
    let (thread, saver) = (ThreadId::from(THREAD), &*saver);
    let (full, delta) = (table(ChannelMode::Full)?, table(ChannelMode::Delta)?);
    let mut copies = 0;
    while !beside.is_over() {
        let table = if rng.random_bool(0.5) { &full } else { &delta };
        let rewritten = match rng.random_range(0..12) {
            0..3 => {
                let boundary = if rng.random_bool(0.5) { Boundary::KeepSet } else { Boundary::FreshSnapshot };
                let what = Prune { boundary, ..Prune::keeping(Keep::Last(rng.random_range(1..6))) };
                prune(saver, &thread, &what, &delta).await.map(drop)
            }
            3..5 => {
                let policy = RetentionPolicy {
                    prune_leaf_sibling_branches: true,
                    graft_duration_links: true,
                    ..RetentionPolicy::default()
                };
                enforce(saver, &thread, &policy, &delta, true).await.map(drop)
            }
            5..7 => {
                let runs = BTreeSet::from([format!("run {}", rng.random_range(0..40))]);
                delete_for_runs(saver, &thread, &runs, &delta).await.map(drop)
            }
            7..10 => convert(saver, &thread, table).await.map(drop),
            10 => {
                copies += 1;
                let copy = ThreadId::from(format!("copy {copies}"));
                match copy_thread(saver, &thread, &copy).await {
                    // It does not exist at the moment.
                    Err(Error::InvalidInput(_)) => Ok(()),
                    Err(error) => Err(error),
                    Ok(_) => {
                        let found = verify(saver, &copy, &delta).await?;
                        ensure!(found.is_empty(), "verify of a copy: {}", found[0]);
                        saver.delete_thread(&copy).await
                    }
                }
            }
            _ => saver.delete_thread(&thread).await,
        };
        match rewritten {
            Ok(()) => {
                turn.tally.add("rewrites", 1);
                beside.rewrites.fetch_add(1, Ordering::SeqCst);
            }
            // The writer came first, and nothing was rewritten.
            Err(Error::Stale { .. }) => turn.tally.add("stale rewrites", 1),
            Err(error) => return Err(error.into()),
        }
        tokio::task::yield_now().await;
    }
    Ok(())
}

/// Reads until all is done. Returns each checkpoint that was read with its messages.
async fn read(
    saver: Arc<dyn Saver>,
    seed: u64,
    warm: bool,
    known: Known,
    beside: Arc<Beside>,
) -> anyhow::Result<Vec<(CheckpointId, Vec<String>)>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let thread = ThreadId::from(THREAD);
    let mut answers = Vec::new();
    let remembering = accessor(&saver, ChannelMode::Delta, seed)?;
    while !beside.is_over() {
        let accessor = if warm { remembering.clone() } else { accessor(&saver, ChannelMode::Delta, seed)? };
        let states = match rng.random_range(0..3) {
            0 => accessor.get(&thread, None).await.context("the head")?.into_iter().collect(),
            1 => {
                let some = {
                    let known = known.lock().unwrap_or_else(PoisonError::into_inner);
                    let n = known.len().checked_sub(1).map(|last| rng.random_range(0..=last));
                    n.and_then(|n| known.keys().nth(n).copied())
                };
                let Some(id) = some else {
                    tokio::task::yield_now().await;
                    continue;
                };
                accessor.get(&thread, Some(id)).await.context("a checkpoint")?.into_iter().collect()
            }
            _ => {
                let limit = Some(rng.random_range(1..10));
                let query = HistoryQuery { limit, ..HistoryQuery::default() };
                accessor.history(&thread, query).await.context("a history")?
            }
        };
        for state in states {
            answers.push((state.key.id, texts(&state)?));
            beside.states.fetch_add(1, Ordering::SeqCst);
        }
        tokio::task::yield_now().await;
    }
    Ok(answers)
}

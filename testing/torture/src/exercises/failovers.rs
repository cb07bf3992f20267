//! Failovers of a primary with a synchronous standby, while writers go on: nothing that was acknowledged is missing.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep::mode::ChannelMode;
use threadkeep::state::StateAccessor;
use threadkeep_postgres::setup;
use threadkeep_testing::{Cluster, Replication};
use tokio::task::{JoinHandle, spawn_blocking};
use tracing::instrument::WithSubscriber as _;

use crate::actor::{accessor, say, texts, verified};
use crate::exercise::{About, Turn};
use crate::settled::Settled;
use crate::storage::{HUNG, Kind, open_at, postgres_options};

/// What it tries, and what each run of it does.
pub const ABOUT: About = About {
    what: "a primary is killed, crashed, frozen or restarted under writers, its standby promoted",
    needs: &["failovers", "commits"],
};

/// Between two looks whether writes go on, and before what was refused is tried again.
const PAUSE: Duration = Duration::from_millis(5);

/// Processes that write, each to a thread of its own.
const WRITERS: u64 = 3;

/// What a writer was promised, and what it does not know.
struct Written {
    thread: ThreadId,
    acknowledged: Vec<String>,
    doubtful: BTreeSet<String>,
}

/// Lets some failovers happen under writers.
///
/// # Errors
/// What was lost, or written twice.
pub async fn run(turn: Turn) -> anyhow::Result<()> {
    let cluster = Arc::new(blocking(|| Cluster::start(Replication::Synchronous)).await?);
    let url = cluster.url("postgres");
    setup(&url, &postgres_options()).await?;
    let done = Arc::new(AtomicBool::new(false));
    let acknowledged = Arc::new(AtomicUsize::new(0));
    let settled = Settled::default();
    let mut writing = Vec::new();
    for n in 0..WRITERS {
        let saver = open_at(Kind::Postgres, &url).await?;
        let engine = accessor(&saver, ChannelMode::Delta, turn.seed + n)?;
        let thread = ThreadId::from(format!("t{n}"));
        let write = write(engine, thread, acknowledged.clone(), done.clone());
        writing.push(tokio::spawn(write.with_subscriber(settled.dispatch())));
    }
    let mut rng = StdRng::seed_from_u64(turn.seed);
    let mut happened = Ok(());
    for _ in 0..2 * turn.effort {
        let which = rng.random_range(0..5);
        let failing = cluster.clone();
        happened = blocking(move || fail_over(&failing, which)).await;
        if happened.is_err() {
            break;
        }
        turn.tally.add("failovers", 1);
        // Writes go on.
        let wanted = acknowledged.load(Ordering::SeqCst) + 20;
        let went_on = async {
            while acknowledged.load(Ordering::SeqCst) < wanted && !writing.iter().all(JoinHandle::is_finished)
            {
                tokio::time::sleep(PAUSE).await;
            }
        };
        if tokio::time::timeout(HUNG, went_on).await.is_err() {
            happened = Err(anyhow::anyhow!("no writes go on within {HUNG:?} after failover {which}"));
            break;
        }
    }
    done.store(true, Ordering::SeqCst);
    let saver = open_at(Kind::Postgres, &url).await?;
    let cold = accessor(&saver, ChannelMode::Delta, 0)?;
    for writer in writing {
        let Written { thread, acknowledged, doubtful } = writer.await?.context("a writer")?;
        turn.tally.add("commits", acknowledged.len());
        turn.tally.add("in doubt", doubtful.len());
        let head = cold.get(&thread, None).await?;
        let read = head.as_ref().map(texts).transpose()?.unwrap_or_default();
        let known: Vec<_> = read.iter().filter(|text| !doubtful.contains(*text)).cloned().collect();
        ensure!(known == acknowledged, "{thread} reads {known:?}, acknowledged were {acknowledged:?}");
        let once: BTreeSet<_> = read.iter().collect();
        ensure!(once.len() == read.len(), "{thread}: something was written twice: {read:?}");
        verified(&*saver, &thread).await?;
    }
    turn.tally.add("doubts settled by the driver", settled.count());
    happened
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> threadkeep_testing::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    spawn_blocking(work).await?.map_err(anyhow::Error::from_boxed)
}

fn fail_over(cluster: &Cluster, which: u32) -> threadkeep_testing::Result<()> {
    match which {
        0 => cluster.kill_primary()?,
        1 => cluster.crash_primary()?,
        2 => {
            cluster.freeze_primary()?;
            cluster.promote()?;
            // It believes to be the primary still.
            cluster.thaw_old_primary()?;
            return cluster.rebuild();
        }
        3 => {
            cluster.crash_primary()?;
            cluster.resume_primary()?;
            return cluster.wait_for_standby();
        }
        _ => {
            cluster.freeze_standby()?;
            cluster.thaw_standby()?;
            return cluster.wait_for_standby();
        }
    }
    cluster.promote()?;
    cluster.rebuild()
}

async fn write(
    engine: StateAccessor,
    thread: ThreadId,
    acknowledged: Arc<AtomicUsize>,
    done: Arc<AtomicBool>,
) -> anyhow::Result<Written> {
    let mut written = Written { thread, acknowledged: Vec::new(), doubtful: BTreeSet::new() };
    let mut n = 0;
    // Nobody else writes to the thread: a conflict can only be with an earlier write, one in doubt.
    let mut in_doubt = false;
    while !done.load(Ordering::SeqCst) {
        n += 1;
        let text = format!("{n}");
        match say(&engine, &written.thread, &text).await {
            Ok(_) => {
                written.acknowledged.push(text);
                acknowledged.fetch_add(1, Ordering::SeqCst);
                in_doubt = false;
            }
            Err(Error::InDoubt { .. }) => {
                written.doubtful.insert(text);
                in_doubt = true;
            }
            // Nothing was written.
            Err(Error::Unavailable { .. }) => tokio::time::sleep(PAUSE).await,
            Err(Error::Conflict { .. }) if in_doubt => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(written)
}

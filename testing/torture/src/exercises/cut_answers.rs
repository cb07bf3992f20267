//! Lost answers, with a third party that acts before the retry.
//!
//! The answer to a write is lost, before or after the store has carried it out. Before the caller retries, a third
//! party adds to the thread, deletes it, creates another one in its place, prunes or converts it. Afterwards the thread
//! reads as if each had acted once, one after the other; and the write is in it if it was acknowledged.
//!
//! On memory and SQLite a wrapper around the saver loses the answer, and the engine retries. On Postgres a proxy cuts
//! the connection at any of the driver's requests, and the driver retries.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, bail, ensure};
use async_trait::async_trait;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::convert::convert;
use threadkeep::deletion::{Boundary, Keep, Prune, prune};
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, ListQuery, Revision, Rewrite, Saver, StepCommit,
    ThreadImage,
};
use threadkeep::state::StateAccessor;
use threadkeep::verify::verify;
use threadkeep::{Error, Result};
use threadkeep_testing::proxy::{Cut, Proxy};
use tokio::sync::Notify;

use crate::actor::{accessor, say, table, texts};
use crate::exercise::{About, Turn};
use crate::storage::{HUNG, Kind, Storage, open_at};

/// What it tries, and what each run of it does.
pub const ABOUT: About = About {
    what: "an answer is lost, and somebody else acts before the retry",
    needs: &["cuts", "commits", "states"],
};

/// The write whose answer is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Say,
    Delete,
}

/// What the third party does meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Third {
    Nothing,
    Say,
    Delete,
    MakeAnew,
    Prune,
    Convert,
}

const THIRDS: [Third; 6] =
    [Third::Nothing, Third::Say, Third::Delete, Third::MakeAnew, Third::Prune, Third::Convert];

/// Cuts a number of answers.
///
/// # Errors
/// The first thread that reads as if either had acted twice, or not at all.
pub async fn run(turn: Turn) -> anyhow::Result<()> {
    let place = Storage::new(turn.saver).await?;
    let saver = place.open().await?;
    let proxy = match turn.saver {
        Kind::Postgres => Some(Proxy::before(&place.address()).await),
        Kind::Memory | Kind::Sqlite => None,
    };
    let through = match &proxy {
        Some(proxy) => Some(open_at(Kind::Postgres, proxy.url()).await?),
        None => None,
    };
    let mut rng = StdRng::seed_from_u64(turn.seed);
    for n in 0..20 * turn.effort {
        let thread = ThreadId::from(format!("cut {n}"));
        let call = if rng.random_bool(0.7) { Call::Say } else { Call::Delete };
        let third = THIRDS[rng.random_range(0..THIRDS.len())];
        let cut = if rng.random_bool(0.7) { Cut::After } else { Cut::Before };
        let lines = rng.random_range(0..4);
        let nth = rng.random_range(0..4);
        let way = match (&proxy, &through) {
            (Some(proxy), Some(saver)) => Way::Proxy(proxy, saver.clone()),
            _ => Way::Wrapper(Arc::new(Lossy::new(saver.clone(), cut))),
        };
        let one = one(&turn, &place, &saver, way, &thread, (call, third, cut), (lines, nth)).await;
        let about =
            || format!("{call:?} after {lines} lines, cut {cut:?} (request {nth}), meanwhile {third:?}");
        one.with_context(about)?;
    }
    Ok(())
}

/// How the answer is lost.
enum Way<'a> {
    Wrapper(Arc<Lossy>),
    Proxy(&'a Proxy, Arc<dyn Saver>),
}

async fn one(
    turn: &Turn,
    place: &Storage,
    saver: &Arc<dyn Saver>,
    way: Way<'_>,
    thread: &ThreadId,
    (call, third, cut): (Call, Third, Cut),
    (lines, nth): (usize, usize),
) -> anyhow::Result<()> {
    let (mode, seed) = (ChannelMode::Delta, turn.seed);
    let through: Arc<dyn Saver> = match &way {
        Way::Wrapper(lossy) => lossy.clone(),
        Way::Proxy(_, saver) => saver.clone(),
    };
    let mine = accessor(&through, mode, seed)?;
    let mut before = Vec::new();
    for n in 0..lines {
        before.push(format!("line {n}"));
        say(&mine, thread, &before[n]).await?;
    }
    let (come, go) = match &way {
        Way::Wrapper(lossy) => {
            lossy.armed.store(1, Ordering::SeqCst);
            (lossy.come.clone(), lossy.go.clone())
        }
        Way::Proxy(proxy, _) => {
            proxy.cut(nth, cut);
            // The request after the lost one is the first of the retry.
            proxy.hold(nth + 1)
        }
    };
    let asking = tokio::spawn({
        let thread = thread.clone();
        async move {
            match call {
                Call::Say => say(&mine, &thread, "mine").await.map(drop),
                Call::Delete => mine.delete_thread(&thread).await,
            }
        }
    });
    let mut asking = asking;
    // The call may have fewer requests than that, and then the third party does not come between.
    let early = tokio::select! {
        () = come.notified() => None,
        done = &mut asking => Some(done?),
        () = tokio::time::sleep(HUNG) => bail!("neither a retry nor an answer"),
    };
    let between = early.is_none();
    let mut acting = tokio::spawn(act(saver.clone(), thread.clone(), third, seed));
    // The held request may have a lock that the third party needs; then the two run concurrently. A third party that is
    // only slow is waited for: the request could come between its deletion and its creation.
    let acted = tokio::select! {
        acted = &mut acting => Some(acted),
        blocked = place.blocked() => blocked.map(|()| None)?,
        () = tokio::time::sleep(HUNG) => bail!("the third party neither acts nor waits for a lock"),
    };
    go.notify_one();
    let said = match early {
        Some(said) => said,
        None => asking.await?,
    };
    let there = match acted {
        Some(acted) => acted??,
        None => acting.await??,
    };
    if let Way::Proxy(proxy, _) = &way {
        proxy.mend();
    }
    turn.tally.add("cuts", usize::from(between));
    turn.tally.add("commits", lines + 1);

    let cold = accessor(saver, mode, 0)?;
    let read = match cold.get(thread, None).await? {
        Some(head) => Some(texts(&head)?),
        None => None,
    };
    turn.tally.add("states", 1);
    let expected = outcomes(&before, call, third, there, &said)?;
    let said = said.map_err(|error| error.to_string());
    ensure!(
        expected.contains(&read),
        "the answer was {said:?}; it reads {read:?}, and may read {expected:?}"
    );
    let found = verify(&**saver, thread, &*table(mode)?).await?;
    ensure!(found.is_empty(), "verify: {}", found[0]);
    Ok(())
}

/// The third party's action; returns whether the thread existed for it.
async fn act(saver: Arc<dyn Saver>, thread: ThreadId, third: Third, seed: u64) -> anyhow::Result<bool> {
    let thread = &thread;
    let theirs = accessor(&saver, ChannelMode::Delta, seed ^ 0x731)?;
    let there = theirs.get(thread, None).await?.is_some();
    match third {
        Third::Nothing => {}
        Third::Say => say_soon(&theirs, thread, "theirs").await?,
        Third::Delete => theirs.delete_thread(thread).await?,
        Third::MakeAnew => {
            theirs.delete_thread(thread).await?;
            say_soon(&theirs, thread, "another").await?;
        }
        Third::Prune => {
            let what = Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(Keep::Latest) };
            prune(&*saver, thread, &what, theirs.table()).await?;
        }
        Third::Convert => drop(convert(&*saver, thread, &*table(ChannelMode::Full)?).await?),
    }
    Ok(there)
}

/// Adds to a thread; the other's action may come between the read of the head and the commit.
async fn say_soon(accessor: &StateAccessor, thread: &ThreadId, text: &str) -> Result<()> {
    loop {
        match say(accessor, thread, text).await {
            Err(Error::Conflict { .. } | Error::NotFound { .. }) => {}
            said => return said.map(drop),
        }
    }
}

/// The possible states of the thread: the two acted one after the other, in either order, each at most once.
fn outcomes(
    before: &[String],
    call: Call,
    third: Third,
    there: bool,
    said: &Result<()>,
) -> anyhow::Result<BTreeSet<Option<Vec<String>>>> {
    type Thread = Option<Vec<String>>;
    let mine = |thread: Thread| -> Thread {
        match call {
            Call::Say => Some(thread.into_iter().flatten().chain(["mine".to_owned()]).collect()),
            Call::Delete => None,
        }
    };
    let theirs = |thread: Thread| -> Thread {
        match third {
            Third::Nothing | Third::Prune | Third::Convert => thread,
            Third::Say => Some(thread.into_iter().flatten().chain(["theirs".to_owned()]).collect()),
            Third::Delete => None,
            Third::MakeAnew => Some(vec!["another".to_owned()]),
        }
    };
    let start: Thread = (!before.is_empty()).then(|| before.to_vec());
    let first = theirs(mine(start.clone()));
    // The third party can have come first only if it found the thread as it was at the start: existing, or not.
    let last = (there == start.is_some()).then(|| mine(theirs(start.clone())));
    let never = theirs(start);
    Ok(match said {
        Ok(()) => [Some(first), last].into_iter().flatten().collect(),
        // Refused: it may have been carried out and undone by what came then, or not at all.
        Err(Error::InDoubt { .. }) => [Some(first), last, Some(never)].into_iter().flatten().collect(),
        Err(Error::Conflict { .. } | Error::NotFound { .. } | Error::Stale { .. }) => {
            let taken_back = matches!(third, Third::Delete | Third::MakeAnew).then_some(first);
            [Some(never), taken_back].into_iter().flatten().collect()
        }
        Err(Error::Unavailable { .. }) => [never].into(),
        Err(error) => bail!("{error}"),
    })
}

/// A saver that loses the answer to one write.
struct Lossy {
    inner: Arc<dyn Saver>,
    cut: Cut,
    /// Writes whose answers will be lost.
    armed: AtomicU32,
    /// Notified when an answer is lost.
    come: Arc<Notify>,
    /// Waited for before the caller learns that.
    go: Arc<Notify>,
}

impl Lossy {
    fn new(inner: Arc<dyn Saver>, cut: Cut) -> Self {
        let (come, go) = (Arc::default(), Arc::default());
        Self { inner, cut, armed: AtomicU32::new(0), come, go }
    }

    async fn write<T>(&self, carry_out: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let lose = self.armed.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
        if !lose {
            return carry_out.await;
        }
        if self.cut != Cut::Before {
            carry_out.await?;
        }
        self.come.notify_one();
        self.go.notified().await;
        let saver = self.inner.capabilities().name;
        Err(Error::InDoubt { saver, reason: "the exercise lost the answer".to_owned() })
    }
}

#[async_trait]
impl Saver for Lossy {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        self.inner.get(at).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        self.inner.list(query).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        self.write(self.inner.put_writes(at, task)).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        self.write(self.inner.commit(step)).await
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        self.inner.flush(thread).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        self.inner.delta_history(at, channels, reach).await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        self.write(self.inner.delete_thread(thread)).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        self.inner.threads(after, limit).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        self.inner.read_thread(thread).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        self.write(self.inner.rewrite_thread(thread, expected, rewrite)).await
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}

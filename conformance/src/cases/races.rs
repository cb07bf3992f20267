//! Writers of different kinds at once: the first commit of a thread, and puts beside commits, rewrites and deletions.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::json;
use threadkeep::Error;
use threadkeep::checkpoint::{CheckpointKey, TaskWrites};
use threadkeep::id::ThreadId;
use threadkeep::saver::{CheckpointSelector, ListQuery, LocalKey, Rewrite, Saver};
use tokio::sync::{Barrier, Notify, watch};
use tokio::task::{JoinSet, yield_now};

use super::concurrency::join;
use crate::case::{Case, Failure, Outcome, case, check, check_eq};
use crate::factory::Store;
use crate::kit::{MESSAGES, Step, all, dump, get, list, plain, replayed, says, task, task_id, write};

pub(super) const CASES: &[Case] = &[
    case!(
        Concurrency,
        one_writer_begins_a_thread,
        "two runs that begin a thread together would both believe that it is theirs"
    ),
    case!(
        Concurrency,
        puts_race_with_commits_and_rewrites,
        "a task that finishes while its thread is pruned or converted would run again, or undo the change"
    ),
    case!(
        Concurrency,
        one_rewrite_of_a_revision_wins,
        "two passes over one thread would undo each other, or two imports would mix"
    ),
    case!(
        Concurrency,
        a_deletion_beats_a_racing_put_and_a_racing_rewrite,
        "a deleted thread would come back in part"
    ),
];

/// There is nothing to lock yet: neither a row of the thread, nor one of the namespace.
async fn one_writer_begins_a_thread(store: Store) -> Outcome {
    const WRITERS: u16 = 8;
    const ROUNDS: u16 = 10;
    let handles = [store.open().await?, store.open().await?];
    for round in 0..ROUNDS {
        // Every other time a thread of this name was there, and was deleted.
        let name = format!("t{}", round / 2);
        handles[0].delete_thread(&name.as_str().into()).await?;
        for namespace in ["", "nested"] {
            let barrier = Arc::new(Barrier::new(WRITERS.into()));
            let mut racers = JoinSet::new();
            for writer in 0..WRITERS {
                let (saver, barrier) = (handles[usize::from(writer % 2)].clone(), barrier.clone());
                let step = Step::first(&name, 1 + writer).namespace(namespace).value("by", plain(writer)?);
                racers.spawn(async move {
                    barrier.wait().await;
                    let outcome = step.commit(&*saver).await;
                    Ok((step, outcome))
                });
            }
            let outcomes = join(racers).await?;
            let won = outcomes.iter().filter(|(_, outcome)| outcome.is_ok());
            let winners: Vec<&Step> = won.map(|(step, _)| step).collect();
            check_eq!(winners.len(), 1, "how many of {WRITERS} first commits went through: {outcomes:?}");
            let winner = winners[0].commit.key();
            let conflict = Error::Conflict {
                thread: winner.thread.clone(),
                namespace: winner.namespace.clone(),
                expected: None,
                found: Some(winner.id),
            };
            for (step, outcome) in outcomes.iter().filter(|(step, _)| step.commit.key() != winner) {
                check_eq!(*outcome, Err(conflict.clone()), "the losing commit of {:?}", step.commit.key());
            }
            for saver in &handles {
                let query = ListQuery { namespace: Some(namespace.into()), ..all(&name) };
                let found = saver.list(&query).await?;
                check_eq!(found, [winners[0].tuple([])], "{name:?}, namespace {namespace:?}");
            }
            // The winner goes on; a loser does not.
            let next = Step::after(&winner, 20).commit(&*handles[1]).await?;
            let late = winners[0].commit.checkpoint.id;
            let late = Step::first(&name, 30).namespace(namespace).value("late", plain(late.to_string())?);
            let late = late.commit(&*handles[0]).await;
            check!(matches!(late, Err(Error::Conflict { .. })), "a first commit that came late: {late:?}");
            let head = CheckpointSelector { id: None, ..CheckpointSelector::at(&next) };
            let head = handles[0].get(&head).await?.map(|tuple| tuple.checkpoint.id);
            check_eq!(head, Some(next.id), "the head of {name:?}, namespace {namespace:?}");
        }
    }
    Ok(())
}

/// The metadata key that counts passes over a thread.
const PASS: &str = "pass";

/// The writers of one thread, and what was acknowledged to them.
struct Racers {
    /// Checkpoints that take writes: the root and the head.
    open: Mutex<[CheckpointKey; 2]>,
    /// How many writers still work.
    busy: AtomicUsize,
    /// Something of theirs was acknowledged.
    moved: Notify,
    /// The pass that each checkpoint has seen last.
    passed: Mutex<BTreeMap<LocalKey, u64>>,
}

impl Racers {
    fn open(&self) -> [CheckpointKey; 2] {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts a row. A saver may give up when others change the thread again and again, and say that nothing was written.
    async fn acknowledged(&self, saver: &dyn Saver, at: &CheckpointKey, row: &TaskWrites) -> Outcome {
        const PATIENCE: usize = 1_000;
        for _ in 0..PATIENCE {
            match saver.put_writes(at, row).await {
                Err(Error::Unavailable { .. }) => yield_now().await,
                done => {
                    self.moved.notify_one();
                    return Ok(done?);
                }
            }
        }
        Err(Failure::new(format_args!("a row under checkpoint {} was refused {PATIENCE} times", at.id)))
    }

    /// Ends a writer; who waits for it need not wait any more.
    fn finish(&self) {
        self.busy.fetch_sub(1, Ordering::SeqCst);
        self.moved.notify_one();
    }

    /// Puts tasks under the root and the head, each in two calls, of which the second one adds a write.
    async fn put(
        &self,
        saver: &dyn Saver,
        tasks: std::ops::Range<u16>,
        mut passes: Passes,
    ) -> Result<Vec<Put>, Failure> {
        let mut put = Vec::new();
        for n in tasks {
            passes.mark_unchanged();
            let at = self.open()[usize::from(n % 2)].clone();
            let first = write(MESSAGES, list([&format!("task {n}")])?);
            self.acknowledged(saver, &at, &task(n, [first.clone()])).await?;
            let row = task(n, [first, write("note", plain(n)?)]);
            self.acknowledged(saver, &at, &row).await?;
            put.push((at, row));
            is_passed(&mut passes).await;
        }
        self.finish();
        Ok(put)
    }

    /// Advances the thread.
    async fn commit(
        &self,
        saver: &dyn Saver,
        steps: std::ops::RangeInclusive<u16>,
        mut passes: Passes,
    ) -> Outcome {
        for n in steps {
            passes.mark_unchanged();
            let [root, head] = self.open();
            let step = Step::after(&head, n).sentinel(MESSAGES).runs(says(n, &n.to_string())?);
            let head = loop {
                match step.commit(saver).await {
                    Err(Error::Unavailable { .. }) => yield_now().await,
                    done => break done?,
                }
            };
            self.moved.notify_one();
            *self.open.lock().unwrap_or_else(PoisonError::into_inner) = [root, head];
            is_passed(&mut passes).await;
        }
        self.finish();
        Ok(())
    }

    /// Puts every checkpoint again, as a conversion does, until the others are done and once more.
    async fn rewrite(&self, saver: &dyn Saver, passing: &watch::Sender<()>) -> Outcome {
        let (thread, mut pass, mut last) = (ThreadId::from("t"), 0_u64, false);
        while !last {
            last = self.busy.load(Ordering::SeqCst) == 0;
            let image = saver.read_thread(&thread).await?;
            let mut put: Vec<_> = image.checkpoints.into_values().collect();
            for tuple in &mut put {
                tuple.metadata.extra.insert(PASS.to_owned(), json!(pass));
            }
            let places: Vec<LocalKey> =
                put.iter().map(|tuple| (tuple.namespace.clone(), tuple.checkpoint.id)).collect();
            let rewrite = Rewrite { put, ..Rewrite::default() };
            let rewritten = saver.rewrite_thread(&thread, &image.revision, rewrite).await;
            passing.send_replace(());
            match rewritten {
                Ok(()) => {
                    let mut passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
                    passed.extend(places.into_iter().map(|place| (place, pass)));
                    pass += 1;
                }
                Err(Error::Stale { .. } | Error::Unavailable { .. }) if !last => {
                    yield_now().await;
                    continue;
                }
                Err(other) => return Err(other.into()),
            }
            // The others are not starved.
            if !last {
                self.moved.notified().await;
            }
        }
        Ok(())
    }
}

/// Changes whenever the rewriter has tried a pass.
type Passes = watch::Receiver<()>;

/// Waits until the rewriter has tried a pass since the mark, as it does after each acknowledgement, or has ended. On a
/// busy machine the writers would otherwise be done before it has begun.
async fn is_passed(passes: &mut Passes) {
    // An error is that the rewriter has ended; what ended it is its outcome.
    let _ = passes.changed().await;
}

/// A row, and the checkpoint under which it was acknowledged.
type Put = (CheckpointKey, TaskWrites);

async fn puts_race_with_commits_and_rewrites(store: Store) -> Outcome {
    const STEPS: u16 = 24;
    const PUTTERS: u16 = 3;
    const TASKS: u16 = 24;
    let root = Step::first("t", 1).snapshot(MESSAGES, list(["seed"])?);
    let root = root.commit(&*store.open().await?).await?;
    let racers = Arc::new(Racers {
        open: Mutex::new([root.clone(), root]),
        busy: AtomicUsize::new(usize::from(PUTTERS) + 1),
        moved: Notify::new(),
        passed: Mutex::default(),
    });
    let (passing, passes) = watch::channel(());
    let mut putters = JoinSet::new();
    // Handles of their own: what a saver guards within one of them does not exclude the others.
    for putter in 0..PUTTERS {
        let (saver, racers, passes) = (store.open().await?, racers.clone(), passes.clone());
        let first = 1_000 + putter * TASKS;
        putters.spawn(async move { racers.put(&*saver, first..first + TASKS, passes).await });
    }
    let mut others = JoinSet::new();
    let (saver, of) = (store.open().await?, racers.clone());
    others.spawn(async move { of.commit(&*saver, 2..=STEPS, passes).await });
    let (saver, of) = (store.open().await?, racers.clone());
    // If a writer fails, the rewriter would go on for ever.
    let rewriter = tokio::spawn(async move { of.rewrite(&*saver, &passing).await });
    let stop = rewriter.abort_handle();
    let written = async { Ok::<_, Failure>((join(others).await?, join(putters).await?)) }.await;
    let (_, put) = written.inspect_err(|_| stop.abort())?;
    rewriter.await??;

    let saver = store.open().await?;
    let found: BTreeMap<LocalKey, _> = dump(&*saver, "t")
        .await?
        .into_iter()
        .map(|tuple| ((tuple.namespace.clone(), tuple.checkpoint.id), tuple))
        .collect();
    check_eq!(found.len(), usize::from(STEPS), "the checkpoints, all of which were acknowledged");
    for (at, row) in put.iter().flatten() {
        let under = found.get(&(at.namespace.clone(), at.id));
        let stored = under.and_then(|tuple| tuple.writes.iter().find(|stored| stored.task == row.task));
        check_eq!(stored, Some(row), "a row that was put under checkpoint {}", at.id);
    }
    let rows = found.values().flat_map(|tuple| &tuple.writes).map(|row| row.task);
    let mut expected: Vec<_> = (2..=STEPS).chain(1_000..1_000 + PUTTERS * TASKS).map(task_id).collect();
    let mut tasks: Vec<_> = rows.collect();
    expected.sort();
    tasks.sort();
    check_eq!(tasks, expected, "the tasks of all checkpoints");
    let passed = racers.passed.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for (place, tuple) in &found {
        let seen = tuple.metadata.extra.get(PASS).cloned();
        check_eq!(seen, passed.get(place).map(|pass| json!(pass)), "the last pass over {}", place.1);
    }
    let said: Vec<String> =
        ["seed".to_owned()].into_iter().chain((2..=STEPS).map(|n| n.to_string())).collect();
    check_eq!(replayed(&*saver, &racers.open()[1]).await?, json!(said), "the messages at the head");
    Ok(())
}

/// Of a thread that is there, of one that is absent, and of one that a first commit may begin.
async fn one_rewrite_of_a_revision_wins(store: Store) -> Outcome {
    const WRITERS: u16 = 6;
    const ROUNDS: u16 = 12;
    let handles = [store.open().await?, store.open().await?];
    for round in 0..ROUNDS {
        let name = format!("t{round}");
        let thread = ThreadId::from(name.as_str());
        if round % 2 == 0 {
            Step::first(&name, 1).commit(&*handles[0]).await?;
        }
        let revision = handles[0].read_thread(&thread).await?.revision;
        let barrier = Arc::new(Barrier::new(usize::from(WRITERS) + usize::from(round % 2)));
        let mut racers = JoinSet::new();
        for writer in 0..WRITERS {
            let (saver, barrier) = (handles[usize::from(writer % 2)].clone(), barrier.clone());
            let by = Step::first(&name, 1).meta("by", json!(writer)).tuple([]);
            let rewrite = Rewrite { put: vec![by.clone()], ..Rewrite::default() };
            let (thread, revision) = (thread.clone(), revision.clone());
            racers.spawn(async move {
                barrier.wait().await;
                Ok((by, saver.rewrite_thread(&thread, &revision, rewrite).await))
            });
        }
        if round % 2 == 1 {
            let (saver, barrier) = (handles[1].clone(), barrier.clone());
            let step = Step::first(&name, 2).meta("by", json!("a commit"));
            racers.spawn(async move {
                barrier.wait().await;
                let committed = step.commit(&*saver).await;
                let conflict = matches!(committed, Err(Error::Conflict { .. }));
                let stale = Error::Stale { thread: step.commit.thread.clone() };
                let as_rewrite = committed.map(drop).map_err(|error| if conflict { stale } else { error });
                Ok((step.tuple([]), as_rewrite))
            });
        }
        let outcomes = join(racers).await?;
        let won: Vec<_> = outcomes.iter().filter(|(_, outcome)| outcome.is_ok()).map(|(by, _)| by).collect();
        check_eq!(won.len(), 1, "how many of {WRITERS} changes of one revision went through: {outcomes:?}");
        let stale = Err(Error::Stale { thread: thread.clone() });
        let refused = outcomes.iter().filter(|(_, outcome)| *outcome == stale).count();
        check_eq!(refused, outcomes.len() - 1, "how many of them are stale: {outcomes:?}");
        for saver in &handles {
            check_eq!(dump(&**saver, &name).await?, [won[0].clone()], "thread {name:?}");
        }
    }
    Ok(())
}

async fn a_deletion_beats_a_racing_put_and_a_racing_rewrite(store: Store) -> Outcome {
    let (saver, other) = (store.open().await?, store.open().await?);
    for round in 0..20 {
        let root = Step::first("t", 1).snapshot(MESSAGES, list(["x"])?).commit(&*saver).await?;
        let thread = root.thread.clone();
        let image = saver.read_thread(&thread).await?;
        let (putter, rewriter, deleter) = (other.clone(), other.clone(), saver.clone());
        let row = says(1, "late")?;
        let at = root.clone();
        let put = async move { putter.put_writes(&at, &row).await };
        let of = thread.clone();
        let rewrite = Rewrite { put: image.checkpoints.into_values().collect(), ..Rewrite::default() };
        let rewrite = async move { rewriter.rewrite_thread(&of, &image.revision, rewrite).await };
        let delete = async move { deleter.delete_thread(&thread).await };
        let (put, rewrite, delete) = if round % 2 == 0 {
            let tasks = (tokio::spawn(put), tokio::spawn(rewrite), tokio::spawn(delete));
            (tasks.0.await?, tasks.1.await?, tasks.2.await?)
        } else {
            let tasks = (tokio::spawn(delete), tokio::spawn(put), tokio::spawn(rewrite));
            (tasks.1.await?, tasks.2.await?, tasks.0.await?)
        };
        delete?;
        check!(
            matches!(put, Ok(()) | Err(Error::NotFound { .. })),
            "the put came before the deletion or found nothing: {put:?}"
        );
        check!(
            matches!(rewrite, Ok(()) | Err(Error::Stale { .. })),
            "the rewrite came before the deletion or is stale: {rewrite:?}"
        );
        for saver in [&saver, &other] {
            check_eq!(dump(&**saver, "t").await?, [], "the thread after {put:?} and {rewrite:?}");
            check_eq!(get(&**saver, &root).await?, None, "its root");
        }
        let there: BTreeSet<ThreadId> = other.threads(None, 10).await?.into_iter().collect();
        check_eq!(there, BTreeSet::new(), "the threads");
    }
    Ok(())
}

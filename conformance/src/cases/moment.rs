//! Everything that a read returns was stored at one moment.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use threadkeep::checkpoint::{ChannelEntry, CheckpointKey, CheckpointTuple, Stored};
use threadkeep::id::{Namespace, ThreadId};
use threadkeep::saver::{DeltaHistory, ListQuery, LocalKey, Revision, Rewrite, Saver, Summary};
use tokio::sync::watch;
use tokio::task::{JoinSet, yield_now};

use super::concurrency::{Calls, are_made, counted, join};
use crate::case::{Case, Failure, Outcome, case, check, check_eq};
use crate::factory::Store;
use crate::kit::{
    MESSAGES, Step, all, channels, dump, get, head, id, list, plain, replayed, says, task, version, write,
};

pub(super) const CASES: &[Case] = &[
    case!(
        Concurrency,
        reads_are_of_one_moment,
        "a healthy thread would be called damaged while it is pruned, or read as it never was"
    ),
    case!(
        Concurrency,
        a_thread_that_is_there_is_never_missing,
        "a thread that is pruned while it runs would be taken for a new one"
    ),
];

const NOTES: &str = "notes";

/// What reads show of thread `t` at one moment.
#[derive(Debug, PartialEq)]
struct Moment {
    paths: threadkeep::Result<DeltaHistory>,
    head: Option<CheckpointTuple>,
    fourth: Option<CheckpointTuple>,
    listed: Vec<CheckpointTuple>,
    even: Vec<CheckpointTuple>,
    summary: Summary,
    image: BTreeMap<LocalKey, CheckpointTuple>,
}

impl Moment {
    /// The reads, and the revision of the image.
    async fn read(saver: &dyn Saver, calls: &Calls) -> Result<(Self, Revision), Failure> {
        let key = |n| CheckpointKey { thread: "t".into(), namespace: Namespace::root(), id: id(n) };
        let filter = [("even".to_owned(), json!(true))].into_iter().collect();
        let (t, both) = ("t".into(), channels([MESSAGES, NOTES]));
        let even = ListQuery { filter, limit: Some(3), ..all("t") };
        let image = counted(calls, saver.read_thread(&t)).await?;
        let moment = Self {
            paths: counted(calls, saver.delta_history(&key(6), &both, None)).await,
            head: counted(calls, head(saver, "t")).await?,
            fourth: counted(calls, get(saver, &key(4))).await?,
            listed: counted(calls, dump(saver, "t")).await?,
            even: counted(calls, saver.list(&even)).await?,
            summary: counted(calls, saver.summary(&t)).await?,
            image: image.checkpoints,
        };
        Ok((moment, image.revision))
    }

    fn put(&self) -> Rewrite {
        Rewrite { put: self.image.values().cloned().collect(), ..Rewrite::default() }
    }
}

/// The contents that were read with each revision, as their place among the moments.
type Revisions = BTreeMap<String, BTreeSet<usize>>;

/// Fails unless each revision is that of one moment.
fn each_is_of_one(seen: impl IntoIterator<Item = Revisions>) -> Outcome {
    let mut revisions = Revisions::new();
    for (revision, of) in seen.into_iter().flatten() {
        revisions.entry(revision).or_default().extend(of);
    }
    let mixed = revisions.into_iter().find(|(_, of)| of.len() > 1);
    check!(mixed.is_none(), "a revision was read with the contents of different moments: {mixed:?}");
    Ok(())
}

/// Reads until `done`, and fails unless everything is of one of the moments. Returns the revisions that it saw.
async fn follow(
    saver: &dyn Saver,
    moments: &[Moment],
    done: &AtomicBool,
    calls: &Calls,
) -> Result<Revisions, Failure> {
    let mut revisions = Revisions::new();
    while !done.load(Ordering::SeqCst) {
        let (read, revision) = Moment::read(saver, calls).await?;
        let one = |is: &dyn Fn(&Moment) -> bool| moments.iter().any(is);
        check!(one(&|m| m.paths == read.paths), "paths of no moment: {:?}", read.paths);
        check!(one(&|m| m.head == read.head), "a head of no moment: {:?}", read.head);
        check!(one(&|m| m.fourth == read.fourth), "a checkpoint of no moment: {:?}", read.fourth);
        check!(one(&|m| m.listed == read.listed), "a list of no moment: {:?}", read.listed);
        check!(one(&|m| m.even == read.even), "a filtered list of no moment: {:?}", read.even);
        check!(one(&|m| m.summary == read.summary), "a summary of no moment: {:?}", read.summary);
        let of = moments.iter().position(|m| m.image == read.image);
        check!(of.is_some(), "a thread of no moment: {:?}", read.image);
        revisions.entry(format!("{revision:?}")).or_default().extend(of);
        yield_now().await;
    }
    Ok(revisions)
}

async fn reads_are_of_one_moment(store: Store) -> Outcome {
    const ROUNDS: u8 = 25;
    let (saver, thread) = (store.open().await?, ThreadId::from("t"));
    let first = Step::first("t", 1).snapshot(MESSAGES, list(["1"])?).snapshot(NOTES, list(["1"])?);
    let mut last = first.commit(&*saver).await?;
    for n in 2..=6 {
        let text = list([&n.to_string()])?;
        let step = Step::after(&last, n).sentinel(MESSAGES).sentinel(NOTES);
        let step = step.runs(task(n, [write(MESSAGES, text.clone()), write(NOTES, text)]));
        last = step.meta("even", json!(n % 2 == 0)).commit(&*saver).await?;
    }
    let expected = replayed(&*saver, &last).await?;
    let (calls, mut made) = watch::channel(0);
    let (whole, _) = Moment::read(&*saver, &calls).await?;
    // As pruning does: the fourth checkpoint becomes the root.
    let mut root = whole.fourth.clone().ok_or_else(|| Failure::new("the fourth checkpoint is missing"))?;
    (root.parent, root.checkpoint.applied) = (None, Vec::new());
    root.metadata.extra.insert("pruned".to_owned(), json!(true));
    for channel in [MESSAGES, NOTES] {
        let kept = Stored::Snapshot(list(["1", "2", "3", "4"])?);
        root.checkpoint.channels.insert(channel.into(), ChannelEntry { version: version(4), stored: kept });
    }
    let remove = whole.image.keys().take(3).cloned().collect();
    let prune = Rewrite { remove, put: vec![root] };
    let revision = async || saver.read_thread(&thread).await.map(|image| image.revision);
    saver.rewrite_thread(&thread, &revision().await?, prune.clone()).await?;
    let (pruned, _) = Moment::read(&*saver, &calls).await?;
    check_eq!(replayed(&*saver, &last).await?, expected, "the messages of the pruned thread");
    saver.delete_thread(&thread).await?;
    let (absent, _) = Moment::read(&*saver, &calls).await?;
    let create = whole.put();

    let (moments, done) = (Arc::new([whole, pruned, absent]), Arc::new(AtomicBool::new(false)));
    let mut readers = JoinSet::new();
    for calls in [calls.clone(), calls.clone(), calls] {
        // Handles of their own: one that excludes its own writers may still see half of what another one writes.
        let (saver, moments, done) = (store.open().await?, moments.clone(), done.clone());
        readers.spawn(async move { follow(&*saver, &*moments, &done, &calls).await });
    }
    let mut own = Revisions::new();
    let mut note = |revision: &Revision, of| {
        own.entry(format!("{revision:?}")).or_default().insert(of);
    };
    let changes = async {
        for round in 0..ROUNDS {
            saver.rewrite_thread(&thread, &Revision::absent(), create.clone()).await?;
            are_made(&mut made, round).await;
            let whole = revision().await?;
            note(&whole, 0);
            saver.rewrite_thread(&thread, &whole, prune.clone()).await?;
            are_made(&mut made, round).await;
            note(&revision().await?, 1);
            saver.delete_thread(&thread).await?;
            note(&revision().await?, 2);
        }
        Ok::<_, Failure>(())
    };
    let changed = changes.await;
    done.store(true, Ordering::SeqCst);
    let mut seen = join(readers).await?;
    seen.push(own);
    changed?;
    each_is_of_one(seen)
}

/// Commits to a thread and prunes it to its head in turn, and moves another thread between two names.
async fn a_thread_that_is_there_is_never_missing(store: Store) -> Outcome {
    const STEPS: u16 = 60;
    let saver = store.open().await?;
    let step = |step: Step, n: u16| Ok::<_, Failure>(step.value("n", plain(n)?).meta("n", json!(n)));
    let mut last = step(Step::first("t", 1), 1)?.commit(&*saver).await?;
    Step::first("u0", 1).commit(&*saver).await?;
    let done = Arc::new(AtomicBool::new(false));
    let (calls, mut made) = watch::channel(0);
    let mut readers = JoinSet::new();
    for calls in [calls.clone(), calls.clone(), calls] {
        let (saver, done) = (store.open().await?, done.clone());
        readers.spawn(async move {
            let mut newest = 0;
            while !done.load(Ordering::SeqCst) {
                newest = follow_the_head(&*saver, newest, &calls).await?;
                yield_now().await;
            }
            Ok(())
        });
    }
    let changes = async {
        for n in 2..=STEPS {
            let row = says(n, &n.to_string())?;
            last = step(Step::after(&last, n), n)?.runs(row).commit(&*saver).await?;
            are_made(&mut made, n % 16).await;
            let image = saver.read_thread(&"t".into()).await?;
            let place = (last.namespace.clone(), last.id);
            let Some(mut root) = image.checkpoints.get(&place).cloned() else {
                return Err(Failure::new(format_args!("the head {n} is missing")));
            };
            (root.parent, root.checkpoint.applied) = (None, Vec::new());
            let remove = image.checkpoints.into_keys().filter(|other| *other != place).collect();
            let prune = Rewrite { remove, put: vec![root] };
            saver.rewrite_thread(&"t".into(), &image.revision, prune).await?;
            are_made(&mut made, n % 16).await;
            // The new name is there before the old one goes.
            let [old, new] = [n % 2, 1 - n % 2].map(|n| format!("u{n}"));
            Step::first(&new, n).commit(&*saver).await?;
            saver.delete_thread(&old.as_str().into()).await?;
        }
        Ok::<_, Failure>(())
    };
    let changed = changes.await;
    done.store(true, Ordering::SeqCst);
    join(readers).await?;
    changed
}

/// Reads the head in every way, and fails unless it is whole and not older than the one before. Returns its number.
async fn follow_the_head(saver: &dyn Saver, newest: u64, calls: &Calls) -> Result<u64, Failure> {
    // A checkpoint says its number three times: in its id, in its metadata and in a value.
    let number = |tuple: &CheckpointTuple| -> Result<u64, Failure> {
        let n = tuple.metadata.extra.get("n").and_then(serde_json::Value::as_u64).unwrap_or(0);
        let value = tuple.checkpoint.channels.get("n").and_then(|entry| entry.stored.value());
        let value = value.map(threadkeep::value::ChannelValue::to_json).transpose()?;
        check_eq!(value, Some(json!(n)), "the value beside the metadata of {n}");
        let at = u16::try_from(n)?;
        check_eq!(tuple.checkpoint.id, id(at), "the id beside the metadata of {n}");
        let parent = (!tuple.checkpoint.applied.is_empty()).then(|| id(at.saturating_sub(1)));
        check_eq!(tuple.parent, parent, "the parent of {n}, beside its tasks");
        Ok(n)
    };
    let Some(found) = counted(calls, head(saver, "t")).await? else {
        return Err(Failure::new("the head of a thread that is there is missing"));
    };
    let first = number(&found)?;
    check!(first >= newest, "the head went back from {newest} to {first}");
    let listed = counted(calls, saver.list(&ListQuery { limit: Some(1), ..all("t") })).await?;
    check_eq!(listed.len(), 1, "the newest of a list of a thread that is there");
    let second = number(&listed[0])?;
    check!(second >= first, "the newest of a list is {second}, and the head was {first}");
    let whole = counted(calls, dump(saver, "t")).await?;
    let image = counted(calls, saver.read_thread(&"t".into())).await?;
    check!(image.revision != Revision::absent(), "a thread that is there has the revision of none");
    let read: Vec<CheckpointTuple> = image.checkpoints.into_values().rev().collect();
    let mut seen = second;
    for checkpoints in [&whole, &read] {
        // One checkpoint, or a child and the parent from which it ran.
        check!(matches!(checkpoints.len(), 1 | 2), "a thread of no moment: {checkpoints:?}");
        let third = number(&checkpoints[0])?;
        check!(third >= seen, "a thread ends at {third}, and {seen} was there");
        seen = third;
        let parent = checkpoints.get(1).map(|parent| parent.checkpoint.id);
        check_eq!(checkpoints[0].parent, parent, "the parent of {third}, and what else is there");
        let rows = checkpoints.get(1).map(|parent| parent.writes.len()).unwrap_or_default();
        check_eq!(rows, checkpoints[0].checkpoint.applied.len(), "the rows that made {third}");
    }
    let threads = counted(calls, saver.threads(None, 10)).await?;
    check!(threads.contains(&"t".into()), "the list of threads lacks one that is there: {threads:?}");
    let moved = threads.iter().filter(|thread| thread.as_str().starts_with('u')).count();
    check!(moved > 0, "the list of threads has neither the old name nor the new one: {threads:?}");
    Ok(seen)
}

//! [`threadkeep::saver::Saver::read_thread`] and [`threadkeep::saver::Saver::rewrite_thread`].

use std::collections::BTreeMap;

use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, Stored};
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::saver::{CheckpointSelector, LocalKey, Revision, Rewrite, Saver, ThreadImage};
use threadkeep::{Error, Result};
use tokio::sync::watch;
use tokio::task::yield_now;

use crate::case::{Case, Failure, Outcome, case, check, check_eq};
use crate::factory::Store;
use crate::kit::{
    MESSAGES, Step, dump, get, head, id, list, message, messages, path, plain, replayed, says, scatter,
    stored, version,
};

pub(super) const CASES: &[Case] = &[
    case!(Deletion, read_thread_is_everything, "a plan made from it would delete what it did not see"),
    case!(
        Deletion,
        read_thread_of_an_unknown_thread_is_absent,
        "a missing thread could be taken for an empty one"
    ),
    case!(Deletion, rewrite_removes_and_puts, "a deletion would damage what it should keep"),
    case!(Deletion, rewrite_of_a_changed_thread_is_stale, "a deletion would remove what a run just wrote"),
    case!(Deletion, rewrite_that_breaks_a_lineage_is_refused, "a wrong plan would destroy the thread"),
    case!(Deletion, rewrite_makes_a_thread, "threads could not be copied, imported or restored"),
    case!(Deletion, rewrite_may_leave_nothing, "a deleted thread would linger"),
    case!(Deletion, a_commit_after_a_rewrite_goes_on, "a conversation could not continue after a deletion"),
    case!(Deletion, history_ends_at_a_root, "a page of history would fail for a pruned thread"),
    case!(
        Deletion,
        a_rewrite_that_shuffles_long_lists_reads_back,
        "a conversion would mix up the messages of a long thread"
    ),
    case!(
        Concurrency,
        rewrites_and_commits_exclude_each_other,
        "a deletion and a run would destroy a thread"
    ),
    case!(Durability, a_rewrite_is_there_after_reopening, "deleted checkpoints would come back", needs Durable),
];

fn place(key: &CheckpointKey) -> LocalKey {
    (key.namespace.clone(), key.id)
}

pub(super) async fn image(saver: &dyn Saver, thread: &str) -> Result<ThreadImage> {
    saver.read_thread(&thread.into()).await
}

/// Rewrites the current thread.
pub(super) async fn rewrite(saver: &dyn Saver, thread: &str, rewrite: Rewrite) -> Result<()> {
    let thread = ThreadId::from(thread);
    let revision = saver.read_thread(&thread).await?.revision;
    saver.rewrite_thread(&thread, &revision, rewrite).await
}

pub(super) fn removing<'a>(keys: impl IntoIterator<Item = &'a CheckpointKey>) -> Rewrite {
    Rewrite { remove: keys.into_iter().map(place).collect(), put: Vec::new() }
}

/// A thread with a trunk of four, a fork from the second, a pending task, and a nested namespace.
///
/// ```text
/// 1 -- 2 -- 3 -- 5      messages: a | b | c | d;  title by 1, taken over by all
///       \-- 4           messages: a | b | x
/// ```
pub(super) struct Tree {
    pub(super) keys: Vec<CheckpointKey>,
    pub(super) nested: CheckpointKey,
}

pub(super) async fn tree(saver: &dyn Saver) -> Result<Tree> {
    let title = plain("a title that is long enough to be stored somewhere else")?;
    let first = Step::first("t", 1).snapshot(MESSAGES, list(["a"])?).value("title", title);
    let one = first.meta("run_id", "r1".into()).commit(saver).await?;
    let two = Step::after(&one, 2).sentinel(MESSAGES).held("title", 1).runs(says(2, "b")?);
    let two = two.meta("run_id", "r2".into()).commit(saver).await?;
    let three = Step::after(&two, 3).sentinel(MESSAGES).held("title", 1).runs(says(3, "c")?);
    let three = three.meta("run_id", "r3".into()).commit(saver).await?;
    let four = Step::fork(&two, &three, 4).sentinel(MESSAGES).held("title", 1).runs(says(4, "x")?);
    let four = four.meta("run_id", "r4".into()).commit(saver).await?;
    let five = Step::fork(&three, &four, 5).sentinel(MESSAGES).held("title", 1).runs(says(5, "d")?);
    let five = five.meta("run_id", "r5".into()).commit(saver).await?;
    saver.put_writes(&five, &says(6, "pending")?).await?;
    let nested = Step::first("t", 1).namespace("nested").value("inner", plain(7)?).commit(saver).await?;
    Ok(Tree { keys: vec![one, two, three, four, five], nested })
}

async fn read_thread_is_everything(store: Store) -> Outcome {
    let saver = store.open().await?;
    tree(&*saver).await?;
    Step::first("t2", 1).value("title", plain("another thread")?).commit(&*saver).await?;
    let image = image(&*saver, "t").await?;
    let listed: BTreeMap<LocalKey, CheckpointTuple> =
        dump(&*saver, "t").await?.into_iter().map(|tuple| (place(&tuple.key()), tuple)).collect();
    check_eq!(image.thread, ThreadId::from("t"), "its thread");
    check_eq!(image.checkpoints.len(), 6, "its checkpoints");
    check_eq!(image.checkpoints, listed, "what it holds");
    Ok(())
}

async fn read_thread_of_an_unknown_thread_is_absent(store: Store) -> Outcome {
    let saver = store.open().await?;
    Step::first("t", 1).commit(&*saver).await?;
    check_eq!(image(&*saver, "u").await?, ThreadImage::absent(&"u".into()), "a thread that never was");
    saver.delete_thread(&"t".into()).await?;
    check_eq!(image(&*saver, "t").await?, ThreadImage::absent(&"t".into()), "a thread that is gone");
    check!(Step::first("t", 1).commit(&*saver).await.is_ok(), "the thread cannot be created again");
    check!(image(&*saver, "t").await?.revision != Revision::absent(), "a thread has the revision of none");
    Ok(())
}

async fn rewrite_removes_and_puts(store: Store) -> Outcome {
    let saver = store.open().await?;
    let tree = tree(&*saver).await?;
    let before = image(&*saver, "t").await?;

    // Removes a leaf; nothing else changes.
    rewrite(&*saver, "t", removing([&tree.keys[3]])).await?;
    let mut expected = before.checkpoints.clone();
    expected.remove(&place(&tree.keys[3]));
    check_eq!(image(&*saver, "t").await?.checkpoints, expected, "the thread without a leaf");
    check_eq!(get(&*saver, &tree.keys[3]).await?, None, "the leaf");
    check_eq!(replayed(&*saver, &tree.keys[4]).await?, serde_json::json!(["a", "b", "c", "d"]), "the trunk");

    // Removes the two oldest; the third becomes a root with a snapshot. The title that it held stays.
    let mut root = expected[&place(&tree.keys[2])].clone();
    root.parent = None;
    root.checkpoint.applied.clear();
    root.metadata.extra.insert("pruned".into(), true.into());
    let snapshot = Stored::Snapshot(list(["a", "b", "c"])?);
    root.checkpoint.channels.entry(MESSAGES.into()).and_modify(|entry| entry.stored = snapshot);
    let plan = Rewrite { put: vec![root.clone()], ..removing([&tree.keys[0], &tree.keys[1]]) };
    rewrite(&*saver, "t", plan).await?;
    expected.remove(&place(&tree.keys[0]));
    expected.remove(&place(&tree.keys[1]));
    expected.insert(place(&tree.keys[2]), root);
    check_eq!(image(&*saver, "t").await?.checkpoints, expected, "the thread with a new root");
    // By id, although the oldest was stored last.
    let listed: Vec<CheckpointId> =
        dump(&*saver, "t").await?.iter().map(|tuple| tuple.checkpoint.id).collect();
    check_eq!(listed, [id(5), id(3), id(1)], "what is listed");
    let now = head(&*saver, "t").await?.map(|tuple| tuple.checkpoint.id);
    check_eq!(now, Some(id(5)), "the head after its grandparent was put again");
    check_eq!(replayed(&*saver, &tree.keys[4]).await?, serde_json::json!(["a", "b", "c", "d"]), "the trunk");
    let seed = path(&*saver, &tree.keys[4], None).await?.seed.map(|seed| seed.checkpoint);
    check_eq!(seed, Some(id(3)), "where its path begins");

    // Removes rows under a checkpoint: the writes of a task that no child applied.
    let mut last = expected[&place(&tree.keys[4])].clone();
    check_eq!(last.writes.len(), 1, "its pending tasks");
    last.writes.clear();
    rewrite(&*saver, "t", Rewrite { put: vec![last.clone()], ..Rewrite::default() }).await?;
    check_eq!(get(&*saver, &tree.keys[4]).await?, Some(last.clone()), "the head without its pending task");
    put_beside_what_stays(&*saver, last, expected).await
}

/// Puts a child of the head and the first checkpoint of a namespace, and then other rows under the former head.
async fn put_beside_what_stays(
    saver: &dyn Saver,
    mut parent: CheckpointTuple,
    mut expected: BTreeMap<LocalKey, CheckpointTuple>,
) -> Outcome {
    let child = Step::after(&parent.key(), 6).sentinel(MESSAGES).value("title", plain("put")?).applies(8);
    let inner = Step::first("t", 2).namespace("put").value("inner", plain(9)?);
    parent.writes = vec![says(9, "pending")?, says(8, "e")?];
    let put = vec![child.tuple([]), parent.clone(), inner.tuple([])];
    expected.extend(put.iter().map(|tuple| (place(&tuple.key()), tuple.clone())));
    rewrite(saver, "t", Rewrite { put, ..Rewrite::default() }).await?;
    check_eq!(image(saver, "t").await?.checkpoints, expected, "the thread with new checkpoints");
    check_eq!(head(saver, "t").await?, Some(child.tuple([])), "the head that was put");

    // The applied row stays as it is, in another place; the pending one is another one now.
    parent.writes = vec![says(8, "e")?, says(9, "changed")?];
    rewrite(saver, "t", Rewrite { put: vec![parent.clone()], ..Rewrite::default() }).await?;
    expected.insert(place(&parent.key()), parent);
    check_eq!(image(saver, "t").await?.checkpoints, expected, "the thread with other rows");

    // Both go on.
    let seven = Step::after(&child.commit.key(), 7).held("title", 6).sentinel(MESSAGES).runs(says(7, "f")?);
    let seven = seven.commit(saver).await?;
    let said = serde_json::json!(["a", "b", "c", "d", "e", "f"]);
    check_eq!(replayed(saver, &seven).await?, said, "the step after the head that was put");
    let title = stored(saver, &seven, "title").await?;
    check_eq!(title, Some(Stored::Value(plain("put")?)), "what it takes over");
    let next = Step::after(&inner.commit.key(), 3).held("inner", 2).commit(saver).await?;
    let value = stored(saver, &next, "inner").await?;
    check_eq!(value, Some(Stored::Value(plain(9)?)), "what the new namespace takes over");
    Ok(())
}

async fn rewrite_of_a_changed_thread_is_stale(store: Store) -> Outcome {
    let saver = store.open().await?;
    let tree = tree(&*saver).await?;
    let thread = ThreadId::from("t");
    let plan = || removing([&tree.keys[3]]);
    let old = image(&*saver, "t").await?.revision;
    saver.put_writes(&tree.keys[3], &says(8, "somebody works on it")?).await?;
    let before = image(&*saver, "t").await?;
    for stale in [&old, &Revision::absent(), &Revision::new(*b"of another saver")] {
        for (plan, what) in [(plan(), "a plan"), (Rewrite::default(), "an empty plan")] {
            let done = saver.rewrite_thread(&thread, stale, plan).await;
            check_eq!(done, Err(Error::Stale { thread: thread.clone() }), "{what} for another revision");
            check_eq!(image(&*saver, "t").await?, before, "the thread after {what}");
        }
    }
    saver.rewrite_thread(&thread, &before.revision, plan()).await?;
    let again = saver.rewrite_thread(&thread, &before.revision, plan()).await;
    check_eq!(again, Err(Error::Stale { thread: thread.clone() }), "the same plan again");
    let absent = saver.rewrite_thread(&"u".into(), &before.revision, Rewrite::default()).await;
    check_eq!(absent, Err(Error::Stale { thread: "u".into() }), "a plan for a missing thread");
    let nothing = saver.rewrite_thread(&"u".into(), &Revision::absent(), Rewrite::default()).await;
    check_eq!(nothing, Ok(()), "an empty plan for a missing thread");
    check_eq!(image(&*saver, "u").await?, ThreadImage::absent(&"u".into()), "the missing thread after it");
    Ok(())
}

async fn rewrite_that_breaks_a_lineage_is_refused(store: Store) -> Outcome {
    let saver = store.open().await?;
    let tree = tree(&*saver).await?;
    let before = image(&*saver, "t").await?;
    let tuple = |n: usize| before.checkpoints[&place(&tree.keys[n])].clone();
    let put = |tuple: CheckpointTuple| Rewrite { put: vec![tuple], ..Rewrite::default() };
    let changed = |n: usize, change: &dyn Fn(&mut CheckpointTuple)| {
        let mut tuple = tuple(n);
        change(&mut tuple);
        put(tuple)
    };
    let unknown = CheckpointKey { id: id(99), ..tree.keys[0].clone() };
    let held = |tuple: &mut CheckpointTuple| {
        tuple.checkpoint.channels.entry("title".into()).and_modify(|entry| entry.stored = Stored::Held);
    };
    let plans: Vec<(&str, Rewrite)> = vec![
        ("an ancestor goes", removing([&tree.keys[1]])),
        ("the root goes", removing([&tree.keys[0]])),
        ("something unknown goes", removing([&unknown])),
        ("it goes and comes", Rewrite { put: vec![tuple(4)], ..removing([&tree.keys[4]]) }),
        ("it comes twice", Rewrite { put: vec![tuple(4), tuple(4)], ..Rewrite::default() }),
        ("another thread's", changed(4, &|tuple| tuple.thread = "u".into())),
        ("a channel is held", changed(4, &held)),
        (
            "a sentinel at a root",
            changed(2, &|tuple| {
                tuple.parent = None;
                tuple.checkpoint.applied.clear();
            }),
        ),
        ("a root that applies tasks", changed(0, &|tuple| tuple.checkpoint.applied = vec![says_task()])),
        ("an unknown parent", changed(4, &|tuple| tuple.parent = Some(id(77)))),
        ("a parent that is not older", changed(2, &|tuple| tuple.parent = Some(id(5)))),
        ("an unknown task", changed(4, &|tuple| tuple.checkpoint.applied.push(says_task()))),
        ("the rows of a child go", changed(2, &|tuple| tuple.writes.clear())),
        ("a task with two rows", changed(4, &|tuple| tuple.writes.push(tuple.writes[0].clone()))),
        ("new among older ones", changed(4, &|tuple| tuple.checkpoint.id = id(0))),
    ];
    for (what, plan) in plans {
        let done = rewrite(&*saver, "t", plan).await;
        check!(matches!(done, Err(Error::InvalidInput(_))), "{what}: {done:?}");
        check_eq!(image(&*saver, "t").await?, before, "the thread after it was refused: {what}");
    }
    // The saver continues to work.
    let six = Step::after(&tree.keys[4], 6).sentinel(MESSAGES).held("title", 1).applies(6);
    let six = six.commit(&*saver).await?;
    check_eq!(
        replayed(&*saver, &six).await?,
        serde_json::json!(["a", "b", "c", "d", "pending"]),
        "the next step"
    );
    Ok(())
}

fn says_task() -> threadkeep::id::TaskId {
    crate::kit::task_id(4000)
}

async fn rewrite_makes_a_thread(store: Store) -> Outcome {
    let saver = store.open().await?;
    let tree = tree(&*saver).await?;
    let source = image(&*saver, "t").await?;
    let copy = |thread: &str| Rewrite {
        put: source
            .checkpoints
            .values()
            .map(|tuple| CheckpointTuple { thread: thread.into(), ..tuple.clone() })
            .collect(),
        ..Rewrite::default()
    };
    saver.rewrite_thread(&"copy".into(), &Revision::absent(), copy("copy")).await?;
    saver.delete_thread(&"t".into()).await?;
    let made = image(&*saver, "copy").await?;
    let expected: BTreeMap<_, _> =
        copy("copy").put.into_iter().map(|tuple| (place(&tuple.key()), tuple)).collect();
    check_eq!(made.checkpoints, expected, "the copy");
    let keys: Vec<_> =
        tree.keys.iter().map(|key| CheckpointKey { thread: "copy".into(), ..key.clone() }).collect();
    check_eq!(replayed(&*saver, &keys[3]).await?, serde_json::json!(["a", "b", "x"]), "a branch of the copy");
    let six = Step::after(&keys[4], 6).sentinel(MESSAGES).held("title", 1).applies(6).commit(&*saver).await?;
    check_eq!(
        replayed(&*saver, &six).await?,
        serde_json::json!(["a", "b", "c", "d", "pending"]),
        "the continued copy"
    );
    // Under the id of a deleted thread, with the same ids as before.
    saver.rewrite_thread(&"t".into(), &Revision::absent(), copy("t")).await?;
    check_eq!(image(&*saver, "t").await?.checkpoints, source.checkpoints, "the source, created again");
    let again = saver.rewrite_thread(&"t".into(), &Revision::absent(), copy("t")).await;
    check_eq!(again, Err(Error::Stale { thread: "t".into() }), "creation of an existing thread");
    Ok(())
}

async fn rewrite_may_leave_nothing(store: Store) -> Outcome {
    let saver = store.open().await?;
    let tree = tree(&*saver).await?;
    rewrite(&*saver, "t", removing([&tree.nested])).await?;
    check_eq!(image(&*saver, "t").await?.checkpoints.len(), 5, "the thread without its nested namespace");
    // The namespace has no head any more, and may begin again with the same id.
    let at = CheckpointSelector { id: None, ..CheckpointSelector::at(&tree.nested) };
    check_eq!(saver.get(&at).await?, None, "the head of the namespace that is gone");
    let inner = Step::first("t", 1).namespace("nested").value("inner", plain(8)?);
    inner.commit(&*saver).await?;
    check_eq!(saver.get(&at).await?, Some(inner.tuple([])), "the namespace that began again");
    rewrite(&*saver, "t", removing([&tree.nested])).await?;
    rewrite(&*saver, "t", removing(&tree.keys)).await?;
    check_eq!(image(&*saver, "t").await?, ThreadImage::absent(&"t".into()), "the thread");
    check_eq!(saver.threads(None, 10).await?, [], "the threads");
    check_eq!(head(&*saver, "t").await?, None, "its head");
    let first = Step::first("t", 1).value("title", plain("new")?);
    first.commit(&*saver).await?;
    check_eq!(head(&*saver, "t").await?, Some(first.tuple([])), "a new life");
    Ok(())
}

async fn a_commit_after_a_rewrite_goes_on(store: Store) -> Outcome {
    let saver = store.open().await?;
    let tree = tree(&*saver).await?;
    // A second handle read the thread before.
    let other = store.open().await?;
    head(&*other, "t").await?;

    rewrite(&*saver, "t", removing([&tree.keys[4]])).await?;
    let now = head(&*saver, "t").await?.map(|tuple| tuple.key());
    check_eq!(now, Some(tree.keys[3].clone()), "the head when the newest is gone");
    let lost = Step::after(&tree.keys[4], 6).held("title", 1).commit(&*saver).await;
    check!(matches!(lost, Err(Error::Conflict { .. })), "a run that did not notice: {lost:?}");
    // The id of a removed one is free, and so is a smaller one.
    for n in [5, 6, 5] {
        let again = Step::after(&tree.keys[3], n).value("title", plain(format!("again {n}"))?);
        let key = again.runs(says(n + 60, "again")?).commit(&*saver).await?;
        let title = Stored::Value(plain(format!("again {n}"))?);
        check_eq!(stored(&*saver, &key, "title").await?, Some(title), "checkpoint {n} after its removal");
        let mut put = image(&*saver, "t").await?.checkpoints[&place(&tree.keys[3])].clone();
        put.writes.clear();
        rewrite(&*saver, "t", Rewrite { put: vec![put], ..removing([&key]) }).await?;
    }
    let seven = Step::after(&tree.keys[3], 7).sentinel(MESSAGES).held("title", 1).runs(says(7, "y")?);
    let seven = seven.commit(&*other).await?;
    check_eq!(replayed(&*saver, &seven).await?, serde_json::json!(["a", "b", "x", "y"]), "after the rewrite");
    let title = stored(&*saver, &seven, "title").await?;
    check_eq!(title, stored(&*saver, &tree.keys[0], "title").await?, "what is taken over");

    // What a step holds from a checkpoint whose own source was removed.
    let mut root = image(&*saver, "t").await?.checkpoints[&place(&tree.keys[3])].clone();
    root.parent = None;
    root.checkpoint.applied.clear();
    let snapshot = Stored::Snapshot(list(["a", "b", "x"])?);
    root.checkpoint.channels.entry(MESSAGES.into()).and_modify(|entry| entry.stored = snapshot);
    let plan = Rewrite { put: vec![root], ..removing(&tree.keys[..3]) };
    rewrite(&*other, "t", plan).await?;
    let eight = Step::after(&seven, 8).held(MESSAGES, 7).held("title", 1).commit(&*saver).await?;
    check_eq!(stored(&*saver, &eight, "title").await?, title, "what is taken over after its holder is gone");
    Ok(())
}

async fn history_ends_at_a_root(store: Store) -> Outcome {
    let saver = store.open().await?;
    let tree = tree(&*saver).await?;
    // Checkpoint 1 is unchanged, 2 is removed, and its children become roots.
    let before = image(&*saver, "t").await?;
    let mut plan = removing([&tree.keys[1]]);
    for (n, texts) in [(2, ["a", "b", "c"]), (3, ["a", "b", "x"])] {
        let mut root = before.checkpoints[&place(&tree.keys[n])].clone();
        root.parent = None;
        root.checkpoint.applied.clear();
        let snapshot = Stored::Snapshot(list(texts)?);
        root.checkpoint.channels.entry(MESSAGES.into()).and_modify(|entry| entry.stored = snapshot);
        plan.put.push(root);
    }
    rewrite(&*saver, "t", plan).await?;
    for reach in [None, Some(id(5)), Some(id(3)), Some(id(2)), Some(id(1))] {
        let found = path(&*saver, &tree.keys[4], reach).await?;
        check_eq!(found.seed.map(|seed| seed.checkpoint), Some(id(3)), "the seed with reach {reach:?}");
        check_eq!(found.steps.len(), 1, "the steps with reach {reach:?}");
        let found = path(&*saver, &tree.keys[3], reach).await?;
        check_eq!(
            found.seed.map(|seed| seed.value),
            Some(list(["a", "b", "x"])?),
            "the other root's, {reach:?}"
        );
    }
    Ok(())
}

async fn a_rewrite_that_shuffles_long_lists_reads_back(store: Store) -> Outcome {
    let saver = store.open().await?;
    let mut key = Step::first("t", 1).snapshot(MESSAGES, messages(0..40)?.into()).commit(&*saver).await?;
    for n in 2..30_u16 {
        let row = crate::kit::task(
            n,
            [crate::kit::write(MESSAGES, messages(40 + usize::from(n)..41 + usize::from(n))?.into())],
        );
        key = Step::after(&key, n).sentinel(MESSAGES).runs(row).commit(&*saver).await?;
    }
    // Every checkpoint gets its whole list, as a conversion stores it; then other lists, made from those.
    let mut put: Vec<CheckpointTuple> = image(&*saver, "t").await?.checkpoints.into_values().collect();
    let mut whole = messages(0..40)?;
    for (n, tuple) in put.iter_mut().enumerate() {
        if n > 0 {
            whole.push(message(&format!("m{}", 41 + n), &format!("the text of message {}", 41 + n))?);
        }
        let v = tuple.checkpoint.channels[MESSAGES].version;
        let value = Stored::Value(whole.clone().into());
        tuple.checkpoint.channels.entry(MESSAGES.into()).and_modify(|entry| entry.stored = value);
        whole.rebase(v);
    }
    rewrite(&*saver, "t", Rewrite { put: put.clone(), ..Rewrite::default() }).await?;
    let expect = |put: &[CheckpointTuple]| -> BTreeMap<LocalKey, CheckpointTuple> {
        put.iter().map(|tuple| (place(&tuple.key()), tuple.clone())).collect()
    };
    check_eq!(image(&*saver, "t").await?.checkpoints, expect(&put), "whole lists");
    for (n, tuple) in put.iter_mut().enumerate() {
        let numbers = (0..40 + n).filter(|m| scatter(*m as u64) % 5 != n as u64 % 5);
        let value = Stored::Value(messages(numbers)?.into());
        let entry = threadkeep::checkpoint::ChannelEntry {
            version: version(1000 + u16::try_from(n)?),
            stored: value,
        };
        tuple.checkpoint.channels.insert(MESSAGES.into(), entry);
    }
    rewrite(&*saver, "t", Rewrite { put: put.clone(), ..Rewrite::default() }).await?;
    check_eq!(image(&*saver, "t").await?.checkpoints, expect(&put), "other lists");
    Ok(())
}

/// The attempts to remove everything but the head of a thread to which another writer commits.
#[derive(Debug, Clone, Copy, Default)]
struct Attempts {
    /// All of them.
    ended: u64,
    /// Those that went through.
    pruned: u64,
    /// Those that were refused, because the other writer was faster.
    refused: u64,
}

/// Removes everything but the head, which gets its whole list. Returns whether that was refused, or none if there was
/// nothing to remove.
async fn prune_to_the_head(saver: &dyn Saver) -> Result<Option<bool>> {
    let image = image(saver, "t").await?;
    let Some((_, head)) = image.checkpoints.last_key_value() else { return Ok(None) };
    if head.parent.is_none() {
        return Ok(None);
    }
    let Ok(whole) = replayed(saver, &head.key()).await else { return Ok(None) };
    let mut head = head.clone();
    head.parent = None;
    head.checkpoint.applied.clear();
    let value = threadkeep::value::ChannelValue::from_json(&whole)?;
    head.checkpoint.channels.entry(MESSAGES.into()).and_modify(|e| e.stored = Stored::Snapshot(value));
    let remove = image.checkpoints.keys().filter(|place| place.1 != head.checkpoint.id).cloned();
    let plan = Rewrite { remove: remove.collect(), put: vec![head] };
    // Savers in memory never wait, so nothing would come in between.
    yield_now().await;
    match saver.rewrite_thread(&"t".into(), &image.revision, plan).await {
        Ok(()) => Ok(Some(false)),
        Err(Error::Stale { .. }) => Ok(Some(true)),
        Err(error) => Err(error),
    }
}

async fn rewrites_and_commits_exclude_each_other(store: Store) -> Outcome {
    /// Rewrites that had something to remove.
    const REWRITES: u64 = 60;
    /// Commits that wait for one between the read and the rewrite of the other writer.
    const MOST: u16 = 1_000;
    let (writer, other) = (store.open().await?, store.open().await?);
    let first = Step::first("t", 1).snapshot(MESSAGES, list(["0"])?).commit(&*writer).await?;
    let (attempts, mut seen) = watch::channel(Attempts::default());
    let pruning = tokio::spawn(async move {
        while !attempts.is_closed() {
            let refused = prune_to_the_head(&*other).await?;
            attempts.send_modify(|attempts| {
                attempts.ended += 1;
                attempts.pruned += u64::from(refused == Some(false));
                attempts.refused += u64::from(refused == Some(true));
            });
            yield_now().await;
        }
        Ok::<_, Error>(())
    });
    let (mut key, mut n): (CheckpointKey, u16) = (first, 1);
    loop {
        for _ in 0..5 {
            yield_now().await;
            n += 1;
            let step = Step::after(&key, n).sentinel(MESSAGES).runs(says(n, &n.to_string())?);
            key = step.commit(&*writer).await?;
        }
        // However slow the other writer is, and however fast: the second attempt from here on has begun after the last
        // commit, and before the next one.
        let ended = seen.borrow().ended + 2;
        let Ok(now) = seen.wait_for(|now| now.ended >= ended).await.map(|now| *now) else { break };
        let have_met = now.pruned > 0 && now.refused > 0;
        if now.pruned + now.refused >= REWRITES && (have_met || n >= MOST) {
            break;
        }
    }
    let pruned = seen.borrow().pruned;
    drop(seen);
    pruning.await.map_err(|error| Failure::new(format_args!("{error}")))??;
    let texts: Vec<String> = std::iter::once("0".to_owned()).chain((2..=n).map(|n| n.to_string())).collect();
    check_eq!(replayed(&*writer, &key).await?, serde_json::json!(texts), "the list after {pruned} prunes");
    Ok(())
}

async fn a_rewrite_is_there_after_reopening(store: Store) -> Outcome {
    let saver = store.open().await?;
    let tree = tree(&*saver).await?;
    rewrite(&*saver, "t", removing([&tree.keys[3], &tree.nested])).await?;
    let before = image(&*saver, "t").await?;
    drop(saver);
    let saver = store.open().await?;
    let ids: Vec<CheckpointId> = before.checkpoints.keys().map(|(_, id)| *id).collect();
    check_eq!(ids, [id(1), id(2), id(3), id(5)], "what is left");
    check_eq!(image(&*saver, "t").await?, before, "the thread");
    Ok(())
}

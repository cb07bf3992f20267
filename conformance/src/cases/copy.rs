//! [`threadkeep::saver::Saver::copy_thread`].

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use threadkeep::Error;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple};
use threadkeep::saver::{LocalKey, Revision, Rewrite, Saver};
use tokio::sync::Barrier;
use tokio::task::{JoinSet, yield_now};

use super::concurrency::join;
use super::rewrite::{image, removing, rewrite, tree};
use crate::case::{Case, Failure, Outcome, case, check, check_eq};
use crate::factory::Store;
use crate::kit::{MESSAGES, Step, list, messages, plain, replayed, says};

pub(super) const CASES: &[Case] = &[
    case!(Deletion, a_copy_is_the_whole_thread, "what is made from a thread would lack a part of it"),
    case!(Deletion, a_copy_is_independent, "a deletion of one thread would damage another one"),
    case!(Deletion, a_copy_replaces_no_thread, "a copy would destroy the thread whose id it takes"),
    case!(
        Concurrency,
        a_copy_is_of_one_moment,
        "a copy of a thread that runs would be a thread that never was"
    ),
    case!(Concurrency, one_of_two_copies_is_made, "two copies under one id would mix"),
];

type Contents = Vec<(LocalKey, CheckpointTuple)>;

/// What a thread holds, without its name.
async fn contents(saver: &dyn Saver, thread: &str) -> Result<Contents, Failure> {
    let image = image(saver, thread).await?;
    let nameless = |(place, tuple)| (place, CheckpointTuple { thread: "".into(), ..tuple });
    Ok(image.checkpoints.into_iter().map(nameless).collect())
}

fn of(thread: &str, key: &CheckpointKey) -> CheckpointKey {
    CheckpointKey { thread: thread.into(), ..key.clone() }
}

async fn copy(saver: &dyn Saver, from: &str, to: &str) -> threadkeep::Result<usize> {
    saver.copy_thread(&from.into(), &to.into()).await
}

async fn a_copy_is_the_whole_thread(store: Store) -> Outcome {
    let saver = store.open().await?;
    check_eq!(copy(&*saver, "t", "copy").await?, 0, "the checkpoints of a copy of nothing");
    check_eq!(image(&*saver, "copy").await?.revision, Revision::absent(), "a copy of nothing");
    let tree = tree(&*saver).await?;
    // Many elements, and metadata that is stored by entry.
    let entries: serde_json::Map<_, _> = (0..40).map(|n| (format!("node {n}"), json!(n))).collect();
    let step = Step::after(&tree.keys[4], 6).sentinel(MESSAGES).held("title", 1);
    let step = step.value("all", messages(0..300)?.into()).meta("writes", entries.into());
    let six = step.runs(says(40, "e")?).begins_with(says(41, "it began with")?).commit(&*saver).await?;
    let source = image(&*saver, "t").await?;
    let expected = contents(&*saver, "t").await?;
    check_eq!(copy(&*saver, "t", "copy").await?, expected.len(), "the number of copied checkpoints");
    check_eq!(contents(&*saver, "copy").await?, expected, "the copy");
    check_eq!(image(&*saver, "t").await?, source, "the source, to its revision");
    check!(image(&*saver, "copy").await?.revision != source.revision, "a copy has its source's revision");
    let reopened = store.open().await?;
    check_eq!(contents(&*reopened, "copy").await?, expected, "the copy, on another handle");
    for key in tree.keys.iter().chain([&six]) {
        let (ours, theirs) = (replayed(&*saver, &of("copy", key)).await?, replayed(&*saver, key).await?);
        check_eq!(ours, theirs, "the messages at {} of the copy", key.id);
    }
    // Both go on alike, by what is remembered of the source and by what is read of the copy, with old and new elements.
    for thread in ["t", "copy"] {
        let mut step = Step::after(&of(thread, &six), 7).sentinel(MESSAGES).held("title", 1);
        step = step.value("all", messages(100..320)?.into()).runs(says(42, "f")?).applies(41);
        step.commit(&*saver).await?;
    }
    check_eq!(contents(&*saver, "copy").await?, contents(&*saver, "t").await?, "the copy that went on");
    check_eq!(copy(&*reopened, "copy", "again").await?, expected.len() + 1, "the number of the copy's copy");
    check_eq!(contents(&*saver, "again").await?, contents(&*saver, "t").await?, "the copy of the copy");
    Ok(())
}

async fn a_copy_is_independent(store: Store) -> Outcome {
    let saver = store.open().await?;
    let tree = tree(&*saver).await?;
    let expected = contents(&*saver, "t").await?;
    let [.., fourth, fifth] = &tree.keys[..] else { return Ok(()) };
    copy(&*saver, "t", "a").await?;
    copy(&*saver, "t", "b").await?;
    saver.put_writes(fifth, &says(50, "only in the source")?).await?;
    rewrite(&*saver, "a", removing([&of("a", fourth)])).await?;
    check_eq!(contents(&*saver, "b").await?, expected, "a copy whose source and sibling have changed");
    let without: Contents = expected.iter().filter(|((_, id), _)| *id != fourth.id).cloned().collect();
    check_eq!(contents(&*saver, "a").await?, without, "the copy without a branch");
    saver.delete_thread(&"t".into()).await?;
    saver.delete_thread(&"a".into()).await?;
    check_eq!(contents(&*saver, "b").await?, expected, "a copy whose source and sibling are gone");
    let messages = replayed(&*saver, &of("b", fifth)).await?;
    check_eq!(messages, json!(["a", "b", "c", "d"]), "its messages");
    copy(&*saver, "b", "t").await?;
    check_eq!(contents(&*saver, "t").await?, expected, "a copy under the id of a thread that is gone");
    Ok(())
}

async fn a_copy_replaces_no_thread(store: Store) -> Outcome {
    let saver = store.open().await?;
    tree(&*saver).await?;
    Step::first("u", 1).value("title", plain("another thread")?).commit(&*saver).await?;
    let before = (image(&*saver, "t").await?, image(&*saver, "u").await?);
    for (from, to) in [("t", "u"), ("u", "t"), ("t", "t")] {
        let refused = copy(&*saver, from, to).await;
        check_eq!(refused, Err(Error::Stale { thread: to.into() }), "a copy of {from} to {to}");
    }
    check_eq!((image(&*saver, "t").await?, image(&*saver, "u").await?), before, "both threads");
    Ok(())
}

/// The source is a chain in which the checkpoint n applied the task n, whose row came early; now and then it is pruned to its
/// head, or deleted and begun again.
async fn a_copy_is_of_one_moment(store: Store) -> Outcome {
    const COPIES: usize = 12;
    let saver = store.open().await?;
    let done = Arc::new(AtomicBool::new(false));
    let mut writers = JoinSet::new();
    let (writer, over) = (store.open().await?, done.clone());
    writers.spawn(async move {
        while !over.load(Ordering::SeqCst) {
            let mut last = Step::first("t", 1).snapshot(MESSAGES, list(["1"])?).commit(&*writer).await?;
            for n in 2..=12 {
                writer.put_writes(&last, &says(n, &n.to_string())?).await?;
                let step = Step::after(&last, n).sentinel(MESSAGES).applies(n);
                last = step.runs(says(100 + n, "with the commit")?).commit(&*writer).await?;
                yield_now().await;
            }
            let image = image(&*writer, "t").await?;
            let place = (last.namespace.clone(), last.id);
            let Some(head) = image.checkpoints.get(&place).cloned() else {
                return Err(Failure::new("the head is missing"));
            };
            let mut root = CheckpointTuple { parent: None, ..head };
            root.checkpoint.applied.clear();
            for entry in root.checkpoint.channels.values_mut() {
                entry.stored = threadkeep::checkpoint::Stored::Snapshot(list(["pruned"])?);
            }
            let remove = image.checkpoints.into_keys().filter(|other| *other != place).collect();
            writer.rewrite_thread(&"t".into(), &image.revision, Rewrite { remove, put: vec![root] }).await?;
            writer.delete_thread(&"t".into()).await?;
        }
        Ok(())
    });
    let copies = async {
        let (mut made, mut lengths) = (0, BTreeSet::new());
        // As long as it takes to meet it at two moments.
        while made < COPIES || lengths.len() < 2 {
            let to = format!("copy {made}");
            let count = match copy(&*saver, "t", &to).await {
                // Between its end and its beginning, or changed again and again.
                Ok(0) | Err(Error::Unavailable { .. }) => {
                    yield_now().await;
                    continue;
                }
                copied => copied?,
            };
            made += 1;
            lengths.insert(count);
            let image = image(&*saver, &to).await?;
            check_eq!(image.checkpoints.len(), count, "the checkpoints of a copy");
            one_that_was(&image.checkpoints.into_values().collect::<Vec<_>>())?;
        }
        Ok::<_, Failure>(())
    };
    let mut written = std::pin::pin!(join(writers));
    let copied = tokio::select! {
        copied = copies => copied,
        ended = &mut written => return ended.and_then(|_| Err(Failure::new("the writer has ended"))),
    };
    done.store(true, Ordering::SeqCst);
    written.await?;
    copied
}

/// Fails unless the source was like this at a moment.
fn one_that_was(copy: &[CheckpointTuple]) -> Outcome {
    let [ancestors @ .., head] = copy else { return Err(Failure::new("a copy is empty")) };
    if copy.len() == 1 && head.parent.is_none() && head.checkpoint.id != crate::kit::id(1) {
        // Pruned, with the rows that its head had.
        return Ok(());
    }
    for (n, tuple) in copy.iter().enumerate() {
        let parent = n.checked_sub(1).map(|before| copy[before].checkpoint.id);
        check_eq!(tuple.parent, parent, "the parent of checkpoint {} of a copy", tuple.checkpoint.id);
    }
    for tuple in ancestors {
        check_eq!(tuple.writes.len(), 2, "the rows under checkpoint {} of a copy", tuple.checkpoint.id);
    }
    // The second row of the head comes with its child.
    check!(head.writes.len() <= 1, "the head of a copy has a row of a child: {:?}", head.writes);
    Ok(())
}

async fn one_of_two_copies_is_made(store: Store) -> Outcome {
    const ROUNDS: usize = 10;
    let handles = [store.open().await?, store.open().await?];
    tree(&*handles[0]).await?;
    Step::first("u", 1).value("title", plain("another thread")?).commit(&*handles[0]).await?;
    for round in 0..ROUNDS {
        let to = format!("copy {}", round / 2);
        handles[0].delete_thread(&to.as_str().into()).await?;
        let barrier = Arc::new(Barrier::new(2));
        let mut racers = JoinSet::new();
        for (saver, from) in handles.iter().cloned().zip(["t", "u"]) {
            let (barrier, to) = (barrier.clone(), to.clone());
            racers.spawn(async move {
                barrier.wait().await;
                Ok((from, copy(&*saver, from, &to).await))
            });
        }
        let mut made = Vec::new();
        for (from, outcome) in join(racers).await? {
            match outcome {
                Ok(_) => made.push(from),
                refused => {
                    check_eq!(refused, Err(Error::Stale { thread: to.as_str().into() }), "the other copy");
                }
            }
        }
        check_eq!(made.len(), 1, "how many copies were made under one id");
        let expected = contents(&*handles[0], made[0]).await?;
        check_eq!(contents(&*handles[0], &to).await?, expected, "the copy of {}", made[0]);
    }
    Ok(())
}

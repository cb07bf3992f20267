//! Concurrent writers and readers, several handles, and callers that stop waiting.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use serde_json::json;
use threadkeep::Error;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, Stored};
use threadkeep::id::TaskId;
use threadkeep::saver::{Rewrite, Saver};
use threadkeep::value::ListValue;
use tokio::sync::{Barrier, watch};
use tokio::task::{JoinSet, yield_now};

use crate::case::{Case, Failure, Outcome, case, check, check_eq};
use crate::factory::Store;
use crate::kit::{
    MESSAGES, Step, dump, get, head, id, list, message, messages, plain, replayed, says, version,
};

pub(super) const CASES: &[Case] = &[
    case!(
        Concurrency,
        one_writer_wins_each_round,
        "two runs would both believe that they advanced the thread"
    ),
    case!(Concurrency, racing_writers_leave_one_chain, "a step that was acknowledged would be lost"),
    case!(
        Concurrency,
        racing_repeats_of_one_commit_all_succeed,
        "a retry that overtakes its first try would fail"
    ),
    case!(Concurrency, parallel_threads_do_not_disturb_each_other, "busy threads would mix up their states"),
    case!(
        Concurrency,
        parallel_tasks_all_keep_their_writes,
        "of tasks that finish together one would run again"
    ),
    case!(
        Concurrency,
        readers_see_whole_commits,
        "a reader would see a checkpoint without its writes or values"
    ),
    case!(Concurrency, two_handles_share_one_store, "two processes would see different states"),
    case!(Concurrency, two_handles_race_for_one_head, "two processes would fork a thread"),
    case!(Concurrency, a_deletion_beats_a_racing_commit, "a deleted thread would come back in part"),
];

/// Waits for all tasks; the first failure is the outcome.
pub(super) async fn join<T: 'static>(mut tasks: JoinSet<Result<T, Failure>>) -> Result<Vec<T>, Failure> {
    let mut all = Vec::new();
    while let Some(done) = tasks.join_next().await {
        all.push(done??);
    }
    Ok(all)
}

/// The calls that readers have made, for the writer whose changes they watch.
pub(super) type Calls = watch::Sender<u64>;

/// Makes a call of a reader, and counts it.
pub(super) async fn counted<T>(calls: &Calls, call: impl Future<Output = T>) -> T {
    let outcome = call.await;
    calls.send_modify(|made| *made += 1);
    outcome
}

/// Waits until the readers have made `more` calls, or all of them have ended. On a busy machine the changes would otherwise
/// be over before the readers have begun. Each change has to wait for another number: readers that all begin with the
/// same change go on in step, and would always be in the same call when the next one comes.
pub(super) async fn are_made(calls: &mut watch::Receiver<u64>, more: impl Into<u64>) {
    let all = *calls.borrow() + more.into();
    // An error is that no reader is left; what ended them is their outcome.
    let _ = calls.wait_for(|made| *made >= all).await;
}

/// Lets writers race for the head of one thread in many rounds. Writer `n` uses handle `n` modulo their number.
async fn race(handles: &[Arc<dyn Saver>]) -> Outcome {
    const WRITERS: u16 = 8;
    const ROUNDS: u16 = 15;
    let mut last = Step::first("t", 1).commit(&*handles[0]).await?;
    let mut chain = vec![last.id];
    for round in 1..=ROUNDS {
        let barrier = Arc::new(Barrier::new(WRITERS.into()));
        let mut racers = JoinSet::new();
        for writer in 0..WRITERS {
            let n = round * WRITERS * 2 + writer;
            let (saver, barrier) = (handles[usize::from(writer) % handles.len()].clone(), barrier.clone());
            let step = Step::after(&last, n).value("winner", plain(n)?).runs(says(n, "won")?);
            racers.spawn(async move {
                barrier.wait().await;
                Ok((step.commit.key(), step.commit(&*saver).await))
            });
        }
        let outcomes = join(racers).await?;
        let winners: Vec<&CheckpointKey> =
            outcomes.iter().filter(|(_, outcome)| outcome.is_ok()).map(|(key, _)| key).collect();
        check_eq!(winners.len(), 1, "how many of {WRITERS} racing commits went through: {outcomes:?}");
        let conflict = Error::Conflict {
            thread: last.thread.clone(),
            namespace: last.namespace.clone(),
            expected: Some(last.id),
            found: Some(winners[0].id),
        };
        for (key, outcome) in outcomes.iter().filter(|(key, _)| key != winners[0]) {
            check_eq!(*outcome, Err(conflict.clone()), "the losing commit of {}", key.id);
        }
        let rows = get(&*handles[0], &last).await?.map_or(0, |tuple| tuple.writes.len());
        check_eq!(rows, 1, "the tasks under the parent: the winner's alone");
        last = winners[0].clone();
        chain.push(last.id);
    }
    for saver in handles {
        let found = dump(&**saver, "t").await?;
        let links: Vec<_> = found.iter().rev().map(|tuple| (tuple.checkpoint.id, tuple.parent)).collect();
        let expected: Vec<_> =
            chain.iter().copied().zip([None].into_iter().chain(chain.iter().copied().map(Some))).collect();
        check_eq!(links, expected, "the winners, each the parent of the next");
    }
    Ok(())
}

async fn one_writer_wins_each_round(store: Store) -> Outcome {
    race(&[store.open().await?]).await
}

async fn two_handles_race_for_one_head(store: Store) -> Outcome {
    race(&[store.open().await?, store.open().await?]).await
}

async fn racing_writers_leave_one_chain(store: Store) -> Outcome {
    const WRITERS: u16 = 6;
    const COMMITS: u16 = 8;
    let saver = store.open().await?;
    Step::first("t", 1).snapshot(MESSAGES, list([])?).commit(&*saver).await?;
    let numbers = Arc::new(AtomicU16::new(2));
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let (saver, numbers) = (saver.clone(), numbers.clone());
        writers.spawn(async move {
            let mut conflicts = 0;
            for commit in 0..COMMITS {
                loop {
                    let Some(seen) = head(&*saver, "t").await? else {
                        return Err(Failure::new("the thread is gone"));
                    };
                    // Drawn after the read, so it is greater than the head that was read.
                    let n = numbers.fetch_add(1, Ordering::SeqCst);
                    let text = format!("{writer}-{commit}");
                    let step = Step::after(&seen.key(), n).sentinel(MESSAGES).runs(says(n, &text)?);
                    match step.commit(&*saver).await {
                        Ok(_) => break,
                        Err(Error::Conflict { .. }) => conflicts += 1,
                        Err(other) => return Err(other.into()),
                    }
                    // Each conflict is another writer's success, so there cannot be more conflicts than commits.
                    check!(conflicts <= WRITERS * COMMITS, "writer {writer} met {conflicts} conflicts");
                }
            }
            Ok(())
        });
    }
    join(writers).await?;

    let found = dump(&*saver, "t").await?;
    check_eq!(found.len(), usize::from(WRITERS * COMMITS) + 1, "the checkpoints");
    for pair in found.windows(2) {
        check_eq!(pair[0].parent, Some(pair[1].checkpoint.id), "the parent of {}", pair[0].checkpoint.id);
    }
    let said = replayed(&*saver, &found[0].key()).await?;
    let said: Vec<&str> = said.as_array().into_iter().flatten().filter_map(|text| text.as_str()).collect();
    for writer in 0..WRITERS {
        let own: Vec<_> = said.iter().filter(|text| text.starts_with(&format!("{writer}-"))).collect();
        let expected: Vec<_> = (0..COMMITS).map(|commit| format!("{writer}-{commit}")).collect();
        check!(
            own.iter().map(|text| **text).eq(expected.iter().map(String::as_str)),
            "what writer {writer} said: {own:?}"
        );
    }
    check_eq!(said.len(), usize::from(WRITERS * COMMITS), "everything that was said");
    Ok(())
}

async fn racing_repeats_of_one_commit_all_succeed(store: Store) -> Outcome {
    let saver = store.open().await?;
    let first = Step::first("t", 1).snapshot(MESSAGES, list([])?);
    let root = first.commit(&*saver).await?;
    let step = Step::after(&root, 2).sentinel(MESSAGES).runs(says(1, "once")?).runs(says(2, "each")?);
    let mut repeats = JoinSet::new();
    for _ in 0..8 {
        let (saver, step) = (saver.clone(), step.clone());
        repeats.spawn(async move { Ok(step.commit(&*saver).await?) });
    }
    let keys = join(repeats).await?;
    check_eq!(keys, vec![step.commit.key(); 8], "what the repeats returned");
    let expected = [step.tuple([]), first.tuple(step.commit.writes.clone())];
    check_eq!(dump(&*saver, "t").await?, expected, "the thread");
    Ok(())
}

async fn parallel_threads_do_not_disturb_each_other(store: Store) -> Outcome {
    let saver = store.open().await?;
    let mut threads = JoinSet::new();
    for thread in 0..12 {
        let saver = saver.clone();
        threads.spawn(async move {
            // The same ids, versions and tasks in each thread.
            let name = format!("t{thread}");
            let mut last = Step::first(&name, 1).snapshot(MESSAGES, list([&name])?).commit(&*saver).await?;
            for n in 2..=15_u16 {
                let step =
                    Step::after(&last, n).value("who", plain(format!("{name} {n}"))?).sentinel(MESSAGES);
                saver.put_writes(&last, &says(n, &format!("{name} {n}"))?).await?;
                last = step.applies(n).commit(&*saver).await?;
            }
            Ok((name, last))
        });
    }
    for (name, last) in join(threads).await? {
        let expected: Vec<_> =
            [name.clone()].into_iter().chain((2..=15).map(|n| format!("{name} {n}"))).collect();
        check_eq!(replayed(&*saver, &last).await?, json!(expected), "messages of {name}");
        let who = crate::kit::stored(&*saver, &last, "who").await?;
        check_eq!(who, Some(Stored::Value(plain(format!("{name} 15"))?)), "the last value of {name}");
        check_eq!(dump(&*saver, &name).await?.len(), 15, "the checkpoints of {name}");
    }
    Ok(())
}

async fn parallel_tasks_all_keep_their_writes(store: Store) -> Outcome {
    const TASKS: u16 = 16;
    let saver = store.open().await?;
    let root = Step::first("t", 1).snapshot(MESSAGES, list([])?).commit(&*saver).await?;
    let barrier = Arc::new(Barrier::new(usize::from(TASKS) * 2));
    let mut tasks = JoinSet::new();
    for n in 0..TASKS * 2 {
        // Each task reports twice, as after a timeout.
        let (saver, root, barrier, n) = (saver.clone(), root.clone(), barrier.clone(), n % TASKS);
        tasks.spawn(async move {
            let row = says(n, &format!("task {n}"))?;
            barrier.wait().await;
            Ok(saver.put_writes(&root, &row).await?)
        });
    }
    join(tasks).await?;
    let mut rows = get(&*saver, &root).await?.map(|tuple| tuple.writes).unwrap_or_default();
    rows.sort_by_key(|row| row.index);
    let expected: Result<Vec<_>, _> = (0..TASKS).map(|n| says(n, &format!("task {n}"))).collect();
    check_eq!(rows, expected?, "the rows, by their index");
    Ok(())
}

async fn readers_see_whole_commits(store: Store) -> Outcome {
    const STEPS: u16 = 60;
    let saver = store.open().await?;
    let (mut last, mut all) = first_judged("t")?;
    last.commit(&*saver).await?;
    let (calls, mut made) = watch::channel(0);
    let mut readers = JoinSet::new();
    for calls in [calls.clone(), calls.clone(), calls] {
        let saver = saver.clone();
        readers.spawn(async move {
            let (mut seen, mut newest) = (0, 0);
            while newest < u64::from(STEPS) {
                let Some(tuple) = counted(&calls, head(&*saver, "t")).await? else {
                    return Err(Failure::new("the thread is gone"));
                };
                newest = counted(&calls, whole(&*saver, &tuple)).await?;
                // They come with the child, and what has a child is not the head.
                check_eq!(tuple.writes.len(), 0, "the rows under the head {newest}");
                check!(newest >= seen, "the head went back from {seen} to {newest}");
                seen = newest;
                yield_now().await;
            }
            Ok(())
        });
    }
    for n in 2..=STEPS {
        let step = judged(&last.commit.key(), n, &mut all)?;
        step.commit(&*saver).await?;
        last = step;
        are_made(&mut made, n % 7).await;
    }
    join(readers).await?;
    Ok(())
}

/// The `n`-th step of a thread whose checkpoints [`whole`] can check; `all` is its list, which grows by one.
pub(super) fn judged(last: &CheckpointKey, n: u16, all: &mut ListValue) -> Result<Step, Failure> {
    all.push(message(&format!("m{n}"), "new")?);
    let step = Step::after(last, n).value("n", plain(n)?).value("all", all.clone().into());
    let step = step.sentinel(MESSAGES).runs(says(n, "a")?).runs(says(1000 + n, "b")?);
    all.rebase(version(n));
    Ok(step)
}

/// The first step of such a thread.
pub(super) fn first_judged(thread: &str) -> Result<(Step, ListValue), Failure> {
    let all = messages(0..1)?;
    let first = Step::first(thread, 1).value("n", plain(1)?).value("all", all.clone().into());
    Ok((first.snapshot(MESSAGES, list([])?), all))
}

/// Fails unless a checkpoint of such a thread is complete; returns its number.
pub(super) async fn whole(saver: &dyn Saver, tuple: &CheckpointTuple) -> Result<u64, Failure> {
    let value = |channel| tuple.checkpoint.channels.get(channel).and_then(|entry| entry.stored.value());
    let n = match value("n") {
        Some(n) => n.to_json()?.as_u64().unwrap_or(0),
        None => 0,
    };
    check_eq!(tuple.checkpoint.id, id(u16::try_from(n)?), "the id of checkpoint {n}");
    let len = value("all").and_then(|all| all.as_list()).map(|all| all.len() as u64);
    check_eq!(len, Some(n), "the elements in checkpoint {n}");
    if let Some(parent) = tuple.parent {
        let parent = get(saver, &CheckpointKey { id: parent, ..tuple.key() }).await?;
        let rows: Option<Vec<TaskId>> = parent.map(|tuple| tuple.writes.iter().map(|row| row.task).collect());
        check_eq!(rows, Some(tuple.checkpoint.applied.clone()), "the rows that made checkpoint {n}");
    }
    let said = replayed(saver, &tuple.key()).await?.as_array().map_or(0, |said| said.len() as u64);
    check_eq!(said, (n - 1) * 2, "the messages at checkpoint {n}");
    Ok(n)
}

async fn two_handles_share_one_store(store: Store) -> Outcome {
    let handles = [store.open().await?, store.open().await?];
    let mut all = messages(0..3)?;
    let first = Step::first("t", 1).value("all", all.clone().into()).snapshot(MESSAGES, list([])?);
    let mut last = first.commit(&*handles[0]).await?;
    all.rebase(version(1));
    let mut expected = Vec::new();
    for n in 2..=12_u16 {
        // Handles take turns; each reads what the other one just wrote, and continues from it.
        let (one, other) = (&*handles[usize::from(n % 2)], &*handles[usize::from((n + 1) % 2)]);
        one.put_writes(&last, &says(n, &n.to_string())?).await?;
        let rows = get(other, &last).await?.map(|tuple| tuple.writes);
        check_eq!(rows, Some(vec![says(n, &n.to_string())?]), "writes put through the other handle");
        all.push(message(&format!("m{n}"), "new")?);
        let step = Step::after(&last, n).value("all", all.clone().into()).sentinel(MESSAGES).applies(n);
        last = step.commit(other).await?;
        all.rebase(version(n));
        expected.push(n.to_string());
        check_eq!(
            head(one, "t").await?,
            Some(step.tuple([])),
            "the head, committed through the other handle"
        );
        check_eq!(
            replayed(one, &last).await?,
            json!(expected),
            "messages, committed through the other handle"
        );
    }
    handles[0].delete_thread(&"t".into()).await?;
    check_eq!(head(&*handles[1], "t").await?, None, "the head, after the other handle deleted the thread");
    let anew = Step::first("t", 1).value("all", all.into()).snapshot(MESSAGES, list(["anew"])?);
    anew.commit(&*handles[1]).await?;
    check_eq!(
        head(&*handles[0], "t").await?,
        Some(anew.tuple([])),
        "the thread, created again by the other handle"
    );
    what_the_other_handle_removed_is_gone(&*handles[0], &*handles[1]).await
}

/// The same ids with other contents, after the other handle deleted the thread or removed a checkpoint: what a handle
/// remembers of them is of the past. Versions and tasks are new, as they are in the engine.
async fn what_the_other_handle_removed_is_gone(saver: &dyn Saver, other: &dyn Saver) -> Outcome {
    let mut n = 100;
    for life in ["first", "second"] {
        saver.delete_thread(&"t".into()).await?;
        n += 1;
        let value = |text: &str| Ok::<_, Failure>(Stored::Value(plain(text)?));
        let first = Step::first("t", 1).store(MESSAGES, version(n), Stored::Snapshot(list([life])?)).store(
            "title",
            version(n),
            value(life)?,
        );
        let root = first.commit(other).await?;
        for attempt in ["one", "two"] {
            n += 1;
            let text = format!("{life} {attempt}");
            let row = says(n, &text)?;
            let second = Step::after(&root, 2)
                .store(MESSAGES, version(n), Stored::Sentinel)
                .store("title", version(n), value(&text)?)
                .runs(row.clone());
            let key = second.commit(other).await?;
            for reader in [saver, other] {
                check_eq!(replayed(reader, &key).await?, json!([life, text]), "the messages of {text}");
                check_eq!(get(reader, &key).await?, Some(second.tuple([])), "the checkpoint of {text}");
                let rows = get(reader, &root).await?.map(|tuple| tuple.writes);
                check_eq!(rows, Some(vec![row.clone()]), "the rows of {text}");
            }
            // The root, without the row under it, stays.
            let image = saver.read_thread(&root.thread).await?;
            let remove = [(key.namespace.clone(), key.id)].into();
            let rewrite = Rewrite { remove, put: vec![first.tuple([])] };
            saver.rewrite_thread(&root.thread, &image.revision, rewrite).await?;
            check_eq!(head(other, "t").await?, Some(first.tuple([])), "the head without {text}");
        }
    }
    Ok(())
}

async fn a_deletion_beats_a_racing_commit(store: Store) -> Outcome {
    let saver = store.open().await?;
    for round in 0..20 {
        let root = Step::first("t", 1).snapshot(MESSAGES, list(["x"])?).commit(&*saver).await?;
        let step = Step::after(&root, 2).held(MESSAGES, 1).runs(says(1, "x")?);
        let (committer, deleter, thread) = (saver.clone(), saver.clone(), root.thread.clone());
        let commit = async move { step.commit(&*committer).await };
        let delete = async move { deleter.delete_thread(&thread).await };
        let (commit, delete) = if round % 2 == 0 {
            let commit = tokio::spawn(commit);
            let delete = tokio::spawn(delete);
            (commit.await?, delete.await?)
        } else {
            let delete = tokio::spawn(delete);
            let commit = tokio::spawn(commit);
            (commit.await?, delete.await?)
        };
        delete?;
        check!(
            matches!(commit, Ok(_) | Err(Error::Conflict { .. } | Error::NotFound { .. })),
            "the commit came before the deletion or found nothing: {commit:?}"
        );
        check_eq!(dump(&*saver, "t").await?, [], "the thread, whichever came first ({commit:?})");
    }
    a_deletion_races_with_a_beginning(&store).await
}

/// A thread begins, in one namespace and then in another one, while it is deleted. The deletion comes before, between
/// or after the two: it never leaves the first commit without the second one, and what it leaves is whole.
async fn a_deletion_races_with_a_beginning(store: &Store) -> Outcome {
    let (saver, other) = (store.open().await?, store.open().await?);
    for round in 0..20 {
        let first = Step::first("t", 1).snapshot(MESSAGES, list(["x"])?);
        let nested = Step::first("t", 1).namespace("nested").value("n", plain(round)?);
        let (writer, deleter, thread) = (saver.clone(), other.clone(), first.commit.thread.clone());
        let steps = [first.clone(), nested.clone()];
        let begin = async move {
            for step in &steps {
                step.commit(&*writer).await?;
                yield_now().await;
            }
            Ok::<_, Error>(())
        };
        let delete = async move { deleter.delete_thread(&thread).await };
        let (begun, deleted) = if round % 2 == 0 {
            let (begin, delete) = (tokio::spawn(begin), tokio::spawn(delete));
            (begin.await?, delete.await?)
        } else {
            // In one task: whenever the deletion waits, the beginning goes on.
            let (deleted, begun) = tokio::join!(delete, begin);
            (begun, deleted)
        };
        begun?;
        deleted?;
        let root = head(&*saver, "t").await?;
        let inner = get(&*saver, &nested.commit.key()).await?;
        check!(
            root.is_none() || inner.is_some(),
            "a deletion left the first commit, and took the second one"
        );
        for reader in [&saver, &other] {
            let mut found = dump(&**reader, "t").await?;
            found.sort_by_key(|tuple| tuple.namespace.clone());
            let there = [(&root, &first), (&inner, &nested)].into_iter().filter(|(read, _)| read.is_some());
            let expected: Vec<_> = there.map(|(_, step)| step.tuple([])).collect();
            check_eq!(found, expected, "what is there of the thread");
            let listed = reader.threads(None, 10).await?;
            check_eq!(listed.is_empty(), expected.is_empty(), "whether the thread is missing in a list");
        }
        // It goes on, or begins again.
        let next = match &root {
            Some(root) => Step::after(&root.key(), 2).sentinel(MESSAGES).runs(says(2, "y")?),
            None => Step::first("t", 2).snapshot(MESSAGES, list(["x", "y"])?),
        };
        let next = next.commit(&*other).await?;
        check_eq!(replayed(&*saver, &next).await?, json!(["x", "y"]), "the messages after the race");
        saver.delete_thread(&next.thread).await?;
        check_eq!(dump(&*other, "t").await?, [], "the thread after a deletion without a race");
    }
    Ok(())
}

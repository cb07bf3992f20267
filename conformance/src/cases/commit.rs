//! [`threadkeep::saver::Saver::commit`].

use serde_json::json;
use threadkeep::checkpoint::{CheckpointKey, INTERRUPT_CHANNEL, Stored};
use threadkeep::id::{CheckpointId, Namespace, Version};
use threadkeep::metadata::Counters;
use threadkeep::saver::{Flush, Rewrite, Saver};
use threadkeep::{Error, Result};

use crate::case::{Case, Failure, Outcome, case, check, check_eq};
use crate::factory::Store;
use crate::kit::{
    MESSAGES, Step, dump, get, head, id, key, list, not_found, path, plain, replayed, says, stored, task,
    task_id, version, write,
};

pub(super) const CASES: &[Case] = &[
    case!(Core, commit_on_a_stale_head_conflicts, "two runs would silently fork a thread"),
    case!(Core, commit_of_the_same_id_is_idempotent, "a commit in doubt could not be repeated"),
    case!(Core, commit_needs_its_parent, "a checkpoint would have no parent in the store"),
    case!(
        Core,
        commit_stores_pending_rows_with_its_checkpoint,
        "what had finished would run again on a checkpoint that takes the place of another one"
    ),
    case!(Core, commit_applies_only_known_tasks, "a checkpoint could never be replayed"),
    case!(Core, commit_takes_over_held_values, "channels that a step did not write would be lost"),
    case!(
        Core,
        commit_on_a_parent_in_another_form_is_stale,
        "a writer that was open during a conversion or a prune would leave a checkpoint that cannot be replayed"
    ),
    case!(Core, commit_of_siblings_keeps_both, "a fork would change the branch beside it"),
    case!(
        Core,
        commit_that_waits_for_a_flush_is_like_any_other,
        "a step that may be flushed later would be seen later, or not be fenced"
    ),
    case!(Core, flush_of_anything_is_fine, "a turn that was flushed already could not end"),
    case!(Core, commit_that_fails_stores_nothing, "a refused step would be half stored"),
    case!(Core, commit_refuses_ids_that_do_not_grow, "the newest state would not be the greatest id"),
    case!(Core, commit_expects_the_head_of_its_own_namespace, "nested graphs would block each other"),
    case!(
        Core,
        commit_merges_writes_that_are_stored_already,
        "a task's writes would be applied twice when they came early and with the commit"
    ),
];

fn conflict(
    key: &CheckpointKey,
    expected: Option<CheckpointId>,
    found: Option<CheckpointId>,
) -> Result<CheckpointKey> {
    let CheckpointKey { thread, namespace, .. } = key.clone();
    Err(Error::Conflict { thread, namespace, expected, found })
}

/// Fails unless the commit is refused with this error and leaves the thread unchanged.
async fn refused(saver: &dyn Saver, step: &Step, expected: Result<CheckpointKey>) -> Outcome {
    let before = dump(saver, "t").await?;
    check_eq!(step.commit(saver).await, expected, "the commit of {:?}", step.commit.key());
    check_eq!(dump(saver, "t").await?, before, "the thread after the refused commit");
    Ok(())
}

/// Fails unless the commit is refused as invalid input and leaves the thread unchanged.
async fn invalid(saver: &dyn Saver, step: &Step, why: &str) -> Outcome {
    let before = dump(saver, "t").await?;
    let outcome = step.commit(saver).await;
    check!(matches!(outcome, Err(Error::InvalidInput(_))), "expected InvalidInput ({why}), got {outcome:?}");
    check_eq!(dump(saver, "t").await?, before, "the thread after the refused commit ({why})");
    Ok(())
}

async fn commit_on_a_stale_head_conflicts(store: Store) -> Outcome {
    let saver = store.open().await?;
    let early = Step::first("t", 5);
    let mut hopeful = early.clone();
    hopeful.commit.expected_head = Some(id(1));
    refused(&*saver, &hopeful, conflict(&early.commit.key(), Some(id(1)), None)).await?;

    let one = Step::first("t", 1).commit(&*saver).await?;
    refused(&*saver, &early, conflict(&one, None, Some(id(1)))).await?;

    let two = Step::after(&one, 2).commit(&*saver).await?;
    let stale = Step::after(&one, 3).runs(says(1, "lost")?).value("title", plain("lost")?);
    refused(&*saver, &stale, conflict(&one, Some(id(1)), Some(id(2)))).await?;

    // A fork names its old parent and the current head; a stale fork conflicts, too.
    let fork = Step::fork(&one, &two, 3).commit(&*saver).await?;
    refused(&*saver, &Step::fork(&one, &two, 4), conflict(&one, Some(id(2)), Some(id(3)))).await?;
    refused(&*saver, &Step::after(&two, 4), conflict(&one, Some(id(2)), Some(id(3)))).await?;
    Step::after(&fork, 4).commit(&*saver).await?;
    Ok(())
}

async fn commit_of_the_same_id_is_idempotent(store: Store) -> Outcome {
    let saver = store.open().await?;
    let first = Step::first("t", 1).snapshot(MESSAGES, list(["a"])?);
    let root = first.commit(&*saver).await?;
    let step = Step::after(&root, 2).sentinel(MESSAGES).value("title", plain("x")?).runs(says(1, "b")?);
    let key = step.commit(&*saver).await?;
    let mut changed = step.clone().value("title", plain("y")?).runs(says(2, "c")?);
    changed.commit.checkpoint.next.push("tools".into());

    for head_moved in [false, true] {
        let before = dump(&*saver, "t").await?;
        for repeat in [&first, &step, &step, &changed] {
            check_eq!(
                repeat.commit(&*saver).await,
                Ok(repeat.commit.key()),
                "committed again, head moved: {head_moved}"
            );
        }
        check_eq!(
            dump(&*saver, "t").await?,
            before,
            "the thread after the repeats, head moved: {head_moved}"
        );
        if !head_moved {
            Step::after(&key, 3).held("title", 2).commit(&*saver).await?;
        }
    }
    repeats_after_a_rewrite(&*saver).await
}

/// Repeats a commit whose parent was removed since, and one whose parent stores its value since.
async fn repeats_after_a_rewrite(saver: &dyn Saver) -> Outcome {
    let counting = |mut step: Step| {
        step.commit.metadata.delta_marker = true;
        step.commit.metadata.counters.insert(MESSAGES.into(), Counters { updates: 1, supersteps: 1 });
        step
    };
    let root = Step::first("u", 1).snapshot(MESSAGES, list(["a"])?).commit(saver).await?;
    let two = counting(Step::after(&root, 2).sentinel(MESSAGES).runs(says(1, "b")?));
    let three = counting(Step::after(&two.commit(saver).await?, 3).held(MESSAGES, 2));
    three.commit(saver).await?;

    let mut cut = two.clone().snapshot(MESSAGES, list(["a", "b"])?).tuple([]);
    cut.parent = None;
    cut.checkpoint.applied.clear();
    cut.metadata.counters.clear();
    let revision = saver.read_thread(&root.thread).await?.revision;
    let remove = [(root.namespace.clone(), root.id)].into();
    saver.rewrite_thread(&root.thread, &revision, Rewrite { remove, put: vec![cut] }).await?;
    let before = dump(saver, "u").await?;
    check_eq!(before.len(), 2, "what is left of the thread");
    for repeat in [&two, &three] {
        let key = repeat.commit.key();
        check_eq!(repeat.commit(saver).await, Ok(key.clone()), "{key:?} committed again after a rewrite");
    }
    check_eq!(dump(saver, "u").await?, before, "the thread after the repeats that followed a rewrite");
    Ok(())
}

async fn commit_needs_its_parent(store: Store) -> Outcome {
    let saver = store.open().await?;
    let one = Step::first("t", 1).commit(&*saver).await?;
    let three = Step::after(&one, 3).commit(&*saver).await?;
    Step::first("t", 2).namespace("nested").commit(&*saver).await?;
    Step::first("u", 2).commit(&*saver).await?;

    // Checkpoint 2 exists, but in another namespace and in another thread.
    let missing = key("t", id(2));
    let orphan = Step::fork(&missing, &three, 4).value("title", plain("lost")?).brings(says(1, "lost")?);
    refused(&*saver, &orphan, not_found(&missing)).await
}

async fn commit_stores_pending_rows_with_its_checkpoint(store: Store) -> Outcome {
    let (saver, other) = (store.open().await?, store.open().await?);
    let question = |text: &str| Ok::<_, Error>(write(INTERRUPT_CHANNEL, plain(text)?));
    let asked = task(3, [write(MESSAGES, list(["three"])?), question("which one?")?]);
    let rows = [says(2, "two")?, asked.clone(), task(1, [])];
    // A first checkpoint may begin with rows, too.
    let first = Step::first("t", 1).snapshot(MESSAGES, list(["seed"])?);
    let first = rows.iter().cloned().fold(first, Step::begins_with);
    let root = first.commit(&*saver).await?;
    check_eq!(get(&*saver, &root).await?, Some(first.tuple(rows.clone())), "the first checkpoint");
    check_eq!(path(&*saver, &root, None).await?.steps, [], "pending rows are no history");

    // One that takes its place has the same rows, the first of which comes in two parts.
    let longer = task(2, [write(MESSAGES, list(["two"])?), write(MESSAGES, list(["and more"])?)]);
    let second = Step::after(&root, 2).snapshot(MESSAGES, list(["seed", "between"])?);
    let second = second.runs(says(4, "between")?);
    let mut second = rows.iter().chain([&longer]).cloned().fold(second, Step::begins_with);
    second.commit.flush = Flush::WithNext;
    let mut stale = second.clone();
    stale.commit.expected_head = None;
    refused(&*saver, &stale, conflict(&second.commit.key(), None, Some(root.id))).await?;
    invalid(&*saver, &second.clone().applies(1).applies(9), "one of two is unknown").await?;
    let own = Step::after(&root, 2).begins_with(says(9, "its own")?).applies(9);
    invalid(&*saver, &own, "it applies a row that it begins with").await?;
    let at = second.commit(&*saver).await?;
    let merged = [longer, asked, task(1, [])];
    for reader in [&saver, &other] {
        check_eq!(get(&**reader, &at).await?, Some(second.tuple(merged.clone())), "the second checkpoint");
    }
    let under_root = rows.iter().cloned().chain([says(4, "between")?]).collect::<Vec<_>>();
    check_eq!(
        get(&*saver, &root).await?,
        Some(first.tuple(under_root)),
        "the first one, in whose place it is"
    );

    // From then on they are rows like others: what is put later stays when the commit is repeated.
    let mut now = merged;
    let later = task(3, [question("which one, really?")?]);
    saver.put_writes(&at, &later).await?;
    now[1].merge(&later);
    let changed = second.clone().begins_with(says(9, "never")?);
    for (repeat, writer) in [(&second, &saver), (&changed, &saver), (&second, &other)] {
        check_eq!(repeat.commit(&**writer).await, Ok(at.clone()), "committed again");
        check_eq!(get(&*saver, &at).await?, Some(second.tuple(now.clone())), "after the repeat");
    }
    let third = Step::after(&at, 3).sentinel(MESSAGES).applies(3).applies(2).commit(&*other).await?;
    check_eq!(
        replayed(&*saver, &third).await?,
        json!(["seed", "between", "three", "two", "and more"]),
        "a child"
    );
    saver.put_writes(&at, &task(3, [question("and now?")?])).await?;
    check_eq!(second.commit(&*saver).await, Ok(at.clone()), "committed again after a child");
    check_eq!(get(&*saver, &at).await?, Some(second.tuple(now)), "what a child has applied is final");
    Ok(())
}

async fn commit_applies_only_known_tasks(store: Store) -> Outcome {
    let saver = store.open().await?;
    let root = Step::first("t", 1).commit(&*saver).await?;
    invalid(&*saver, &Step::after(&root, 2).applies(1), "no such task").await?;
    invalid(&*saver, &Step::after(&root, 2).runs(says(2, "two")?).applies(1), "one of two is unknown")
        .await?;

    saver.put_writes(&root, &says(1, "early")?).await?;
    let two = Step::after(&root, 2).runs(says(2, "comes along")?).applies(1).commit(&*saver).await?;
    let applied = get(&*saver, &two).await?.map(|tuple| tuple.checkpoint.applied);
    check_eq!(applied, Some(vec![task_id(2), task_id(1)]), "the applied tasks, in the order of the commit");

    invalid(&*saver, &Step::after(&two, 3).applies(1), "its writes are under the grandparent").await?;
    let nested = Step::first("t", 2).namespace("nested").commit(&*saver).await?;
    saver.put_writes(&nested, &says(3, "elsewhere")?).await?;
    invalid(&*saver, &Step::after(&two, 3).applies(3), "its writes are in another namespace").await
}

async fn commit_takes_over_held_values(store: Store) -> Outcome {
    let saver = store.open().await?;
    let root = Step::first("t", 1)
        .value("title", plain("Tides")?)
        .value("todos", list(["t"])?)
        .snapshot(MESSAGES, list(["a", "b"])?)
        .commit(&*saver)
        .await?;
    let two = Step::after(&root, 2)
        .held("title", 1)
        .held("todos", 1)
        .sentinel(MESSAGES)
        .runs(says(1, "c")?)
        .commit(&*saver)
        .await?;
    let three = Step::after(&two, 3)
        .held("title", 1)
        .value("todos", list([])?)
        .held(MESSAGES, 2)
        .commit(&*saver)
        .await?;
    let fork = Step::fork(&root, &three, 4).held("title", 1).held(MESSAGES, 1).held("todos", 1);
    let fork = fork.commit(&*saver).await?;

    let title = Stored::Value(plain("Tides")?);
    let todos = Stored::Value(list(["t"])?);
    let messages = Stored::Snapshot(list(["a", "b"])?);
    for (at, expected) in [
        (&two, [("title", &title), ("todos", &todos), (MESSAGES, &Stored::Sentinel)]),
        (&three, [("title", &title), ("todos", &Stored::Value(list([])?)), (MESSAGES, &Stored::Sentinel)]),
        (&fork, [("title", &title), ("todos", &todos), (MESSAGES, &messages)]),
    ] {
        for (channel, expected) in expected {
            check_eq!(stored(&*saver, at, channel).await?.as_ref(), Some(expected), "{channel} at {}", at.id);
        }
    }
    let versions = head(&*saver, "t")
        .await?
        .map(|tuple| tuple.checkpoint.channels.values().map(|entry| entry.version).collect::<Vec<Version>>());
    check_eq!(versions, Some(vec![version(1); 3]), "the versions of what the fork holds");

    let next = || Step::after(&fork, 5).held("title", 1);
    for (step, why) in [
        (next().held("never written", 1), "the parent does not have the channel"),
        (Step::fork(&three, &fork, 5).held("todos", 1), "the parent has the channel at a newer version"),
        (next().held(MESSAGES, 2), "the parent has the channel at an older version"),
        (Step::first("t", 5).held("title", 1), "there is no parent"),
    ] {
        invalid(&*saver, &step, why).await?;
    }
    next().held("todos", 1).held(MESSAGES, 1).commit(&*saver).await?;
    Ok(())
}

/// Puts the newest checkpoint again with its messages in this form, and with these counters.
async fn reform(saver: &dyn Saver, form: Stored, counters: Option<Counters>) -> Outcome {
    let image = saver.read_thread(&"t".into()).await?;
    let Some(mut tuple) = image.checkpoints.values().next_back().cloned() else {
        return Err(Failure::new("the thread is gone"));
    };
    tuple.metadata.delta_marker = counters.is_some();
    tuple.metadata.counters = counters.map(|counters| (MESSAGES.into(), counters)).into_iter().collect();
    tuple.checkpoint.channels.entry(MESSAGES.into()).and_modify(|entry| entry.stored = form);
    let rewrite = Rewrite { put: vec![tuple], ..Rewrite::default() };
    Ok(saver.rewrite_thread(&"t".into(), &image.revision, rewrite).await?)
}

async fn commit_on_a_parent_in_another_form_is_stale(store: Store) -> Outcome {
    let saver = store.open().await?;
    let counting = |mut step: Step, updates, supersteps| {
        step.commit.metadata.delta_marker = true;
        step.commit.metadata.counters.insert(MESSAGES.into(), Counters { updates, supersteps });
        step
    };
    let stale = |what: &'static str, step: Step| {
        let saver = &*saver;
        async move {
            let before = dump(saver, "t").await?;
            let outcome = step.commit(saver).await;
            check!(matches!(outcome, Err(Error::Stale { .. })), "expected Stale ({what}), got {outcome:?}");
            check_eq!(dump(saver, "t").await?, before, "the thread after the refused commit ({what})");
            Ok::<_, Failure>(())
        }
    };
    let root = Step::first("t", 1).snapshot(MESSAGES, list(["a"])?).commit(&*saver).await?;
    let two = counting(Step::after(&root, 2).sentinel(MESSAGES).runs(says(1, "b")?), 3, 4);
    let two = two.commit(&*saver).await?;

    // The parent stores changes.
    let says = |n| says(n, "c");
    stale("it holds a value", Step::after(&two, 3).held(MESSAGES, 2)).await?;
    let fewer = counting(Step::after(&two, 3).sentinel(MESSAGES).runs(says(2)?), 1, 5);
    stale("it goes on with fewer updates", fewer).await?;
    let fewer = counting(Step::after(&two, 3).sentinel(MESSAGES).runs(says(2)?), 4, 1);
    stale("it goes on with fewer supersteps", fewer).await?;
    let note = |after: &CheckpointKey, n| counting(Step::after(after, n).held(MESSAGES, 2), 3, 4);
    let three = note(&two, 3).commit(&*saver).await?;

    // A conversion to full: it stores the value.
    reform(&*saver, Stored::Value(list(["a", "b"])?), None).await?;
    stale("it repeats changes", note(&three, 4)).await?;
    let four = Step::after(&three, 4).held(MESSAGES, 2).commit(&*saver).await?;
    // Changes may follow a value, however it is counted.
    let five = counting(Step::after(&four, 5).sentinel(MESSAGES).runs(says(5)?), 7, 7);
    let five = five.commit(&*saver).await?;
    check_eq!(replayed(&*saver, &five).await?, json!(["a", "b", "c"]), "what follows the value");

    // A conversion to delta of a checkpoint that a writer knows as a value.
    let six = Step::after(&five, 6).value(MESSAGES, list(["a", "b", "c"])?).commit(&*saver).await?;
    let held = Step::after(&six, 7).held(MESSAGES, 6);
    reform(&*saver, Stored::Sentinel, Some(Counters { updates: 8, supersteps: 8 })).await?;
    stale("it holds a value that became changes", held).await?;
    // Another value does not depend on the form of the parent.
    Step::after(&six, 7).value(MESSAGES, list(["x"])?).commit(&*saver).await?;
    Ok(())
}

async fn commit_of_siblings_keeps_both(store: Store) -> Outcome {
    let saver = store.open().await?;
    let root = Step::first("t", 1).snapshot(MESSAGES, list(["seed"])?).commit(&*saver).await?;
    // Both children write the same channels with the same counter; only the random part of the version differs.
    let twin = |random: u64| Version { counter: 2, random };
    let mut last = root.clone();
    let mut children = Vec::new();
    for (n, text) in [(2_u16, "left"), (3, "right"), (4, "middle")] {
        let random = [7, u64::MAX, 0][usize::from(n) - 2];
        let step = Step::fork(&root, &last, n)
            .store("title", twin(random), Stored::Value(plain(text)?))
            .store("notes", twin(random), Stored::Snapshot(list([text])?))
            .store(MESSAGES, twin(random), Stored::Sentinel)
            .runs(says(n, text)?);
        last = step.commit(&*saver).await?;
        children.push((text, step));
    }
    for (text, step) in &children {
        let at = step.commit.key();
        check_eq!(get(&*saver, &at).await?, Some(step.tuple([])), "the {text} child");
        let expected = serde_json::json!(["seed", text]);
        check_eq!(replayed(&*saver, &at).await?, expected, "messages of the {text} child");
    }
    let rows = get(&*saver, &root).await?.map(|tuple| tuple.writes);
    let expected: Result<Vec<_>> = children.iter().zip(2..).map(|((text, _), n)| says(n, text)).collect();
    check_eq!(rows, Some(expected?), "the writes under the parent");
    Ok(())
}

async fn commit_that_waits_for_a_flush_is_like_any_other(store: Store) -> Outcome {
    let (saver, other) = (store.open().await?, store.open().await?);
    let waiting = |mut step: Step| {
        step.commit.flush = Flush::WithNext;
        step
    };
    let one = waiting(Step::first("t", 1).snapshot(MESSAGES, list(["seed"])?).value("title", plain("x")?));
    let root = one.commit(&*saver).await?;
    check_eq!(get(&*other, &root).await?, Some(one.tuple([])), "another handle sees it at once");
    let stale = waiting(Step::first("t", 2).value("title", plain("lost")?));
    refused(&*other, &stale, conflict(&root, None, Some(id(1)))).await?;
    check_eq!(one.commit(&*other).await, Ok(root.clone()), "the same commit by another handle");
    // Each handle in turn, flushed and not, on what the other one left.
    let mut last = root;
    let mut said = vec!["seed".to_owned()];
    for n in 2..=9_u16 {
        let mut step = Step::after(&last, n).sentinel(MESSAGES).runs(says(n, &n.to_string())?);
        step.commit.flush = if n % 4 == 0 { Flush::Now } else { Flush::WithNext };
        let writer = if n % 2 == 0 { &other } else { &saver };
        last = step.commit(&**writer).await?;
        said.push(n.to_string());
        for reader in [&saver, &other] {
            check_eq!(head(&**reader, "t").await?, Some(step.tuple([])), "the head after step {n}");
            check_eq!(replayed(&**reader, &last).await?, serde_json::json!(said), "messages after step {n}");
        }
    }
    Ok(())
}

async fn flush_of_anything_is_fine(store: Store) -> Outcome {
    let saver = store.open().await?;
    saver.flush(&"unknown".into()).await?;
    check_eq!(dump(&*saver, "unknown").await?, [], "a flush makes no thread");
    let mut step = Step::first("t", 1).value("title", plain("x")?);
    step.commit.flush = Flush::WithNext;
    let key = step.commit(&*saver).await?;
    let revision = saver.read_thread(&key.thread).await?.revision;
    for _ in 0..2 {
        saver.flush(&key.thread).await?;
    }
    check_eq!(dump(&*saver, "t").await?, [step.tuple([])], "the thread after two flushes");
    check_eq!(saver.read_thread(&key.thread).await?.revision, revision, "a flush changes nothing");
    saver.delete_thread(&key.thread).await?;
    saver.flush(&key.thread).await?;
    check_eq!(dump(&*saver, "t").await?, [], "the deleted thread");
    Ok(())
}

async fn commit_that_fails_stores_nothing(store: Store) -> Outcome {
    let saver = store.open().await?;
    let root = Step::first("t", 1).value("title", plain("x")?).commit(&*saver).await?;
    saver.put_writes(&root, &says(1, "early")?).await?;
    // Each of these has new writes, more writes for a stored task, and new values, and one flaw.
    let good = || -> Result<Step, Failure> {
        let more = task(1, [write(MESSAGES, list(["early"])?), write(MESSAGES, list(["more"])?)]);
        let step = Step::after(&root, 2).brings(says(2, "new")?).runs(more).sentinel(MESSAGES);
        Ok(step.value("notes", list(["n"])?))
    };
    let mut stale = good()?;
    stale.commit.expected_head = None;
    refused(&*saver, &stale, conflict(&root, None, Some(root.id))).await?;
    let mut orphan = good()?;
    orphan.commit.parent = Some(id(0));
    refused(&*saver, &orphan, not_found(&key("t", id(0)))).await?;
    invalid(&*saver, &good()?.applies(3), "an unknown task").await?;
    invalid(&*saver, &good()?.held("title", 7), "a version that the parent does not hold").await?;
    let mut elsewhere = good()?;
    elsewhere.commit.namespace = Namespace::new("nested");
    refused(&*saver, &elsewhere, conflict(&elsewhere.commit.key(), Some(root.id), None)).await?;

    // Without the flaw it is accepted.
    good()?.commit(&*saver).await?;
    Ok(())
}

async fn commit_refuses_ids_that_do_not_grow(store: Store) -> Outcome {
    let saver = store.open().await?;
    let three = Step::first("t", 3).commit(&*saver).await?;
    let five = Step::after(&three, 5).commit(&*saver).await?;
    invalid(&*saver, &Step::after(&five, 4), "smaller than its parent's").await?;
    invalid(&*saver, &Step::fork(&three, &five, 4), "smaller than the head's").await?;
    invalid(&*saver, &Step::after(&five, 5), "equal to its parent's").await
}

async fn commit_expects_the_head_of_its_own_namespace(store: Store) -> Outcome {
    let saver = store.open().await?;
    let outer = Step::first("t", 5).commit(&*saver).await?;
    let inner = Step::first("t", 1).namespace("nested").commit(&*saver).await?;
    let inner = Step::after(&inner, 2).commit(&*saver).await?;
    let outer = Step::after(&outer, 6).commit(&*saver).await?;
    Step::after(&inner, 3).commit(&*saver).await?;
    Step::after(&outer, 7).commit(&*saver).await?;
    check_eq!(
        head(&*saver, "t").await?.map(|tuple| tuple.checkpoint.id),
        Some(id(7)),
        "the head of the root"
    );
    Ok(())
}

async fn commit_merges_writes_that_are_stored_already(store: Store) -> Outcome {
    let saver = store.open().await?;
    let first = Step::first("t", 1).snapshot(MESSAGES, list([])?);
    let root = first.commit(&*saver).await?;
    saver.put_writes(&root, &says(1, "one")?).await?;
    let longer = task(2, [write(MESSAGES, list(["two"])?), write(MESSAGES, list(["three"])?)]);
    saver.put_writes(&root, &says(2, "two")?).await?;
    let child = Step::after(&root, 2).sentinel(MESSAGES).runs(says(1, "one")?).runs(longer.clone());
    let child = child.commit(&*saver).await?;
    check_eq!(
        get(&*saver, &root).await?,
        Some(first.tuple([says(1, "one")?, longer])),
        "the writes under the parent"
    );
    let expected = serde_json::json!(["one", "two", "three"]);
    check_eq!(replayed(&*saver, &child).await?, expected, "messages of the child");
    Ok(())
}

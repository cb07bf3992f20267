//! [`threadkeep::saver::Saver::put_writes`].

use serde_json::json;
use threadkeep::checkpoint::{
    CheckpointKey, ERROR_CHANNEL, INTERRUPT_CHANNEL, RESUME_CHANNEL, SCHEDULED_CHANNEL,
};
use threadkeep::saver::CheckpointSelector;

use crate::case::{Case, Outcome, case, check_eq};
use crate::factory::Store;
use crate::kit::{
    MESSAGES, Step, dump, get, id, key, list, not_found, path, plain, replayed, says, task, write,
};

pub(super) const CASES: &[Case] = &[
    case!(
        Core,
        put_writes_survive_without_a_child,
        "a task that finished before a crash would run a second time"
    ),
    case!(Core, put_writes_is_idempotent, "a repeated call would apply a task's writes twice"),
    case!(
        Core,
        put_writes_are_merged_by_position,
        "what a task adds to its writes would be lost, or what it wrote first would change"
    ),
    case!(
        Core,
        put_writes_special_rows_are_replaced,
        "an interrupted task could be answered only once, and keep an error that is over"
    ),
    case!(Core, applied_rows_are_final, "the history of a checkpoint would change after it was read"),
    case!(Core, put_writes_needs_its_checkpoint, "writes of a deleted thread would come back with its id"),
    case!(Core, put_writes_keeps_a_task_without_writes, "a task that had nothing to write would run again"),
    case!(
        Core,
        put_writes_may_repeat_a_task_elsewhere,
        "a task that a fork runs again would lose its writes"
    ),
];

async fn put_writes_survive_without_a_child(store: Store) -> Outcome {
    let saver = store.open().await?;
    let first = Step::first("t", 1).snapshot(MESSAGES, list(["hello"])?);
    let root = first.commit(&*saver).await?;
    let pending = [
        says(2, "two")?,
        task(
            1,
            [
                write(MESSAGES, list(["one", "more"])?),
                write("title", plain("Tides")?),
                write(MESSAGES, plain("last")?),
            ],
        ),
        task(3, [write(ERROR_CHANNEL, plain("it broke")?)]),
    ];
    for row in &pending {
        saver.put_writes(&root, row).await?;
    }
    check_eq!(
        get(&*saver, &root).await?,
        Some(first.tuple(pending.clone())),
        "the checkpoint with its pending writes"
    );
    check_eq!(path(&*saver, &root, None).await?.steps, [], "pending writes are no history");

    // A child that applies none of them leaves them pending.
    let child = Step::after(&root, 2).held(MESSAGES, 1).commit(&*saver).await?;
    check_eq!(
        get(&*saver, &root).await?,
        Some(first.tuple(pending)),
        "the checkpoint after a child that applied none"
    );
    check_eq!(path(&*saver, &child, None).await?.steps, [], "the child's history");
    Ok(())
}

async fn put_writes_is_idempotent(store: Store) -> Outcome {
    let saver = store.open().await?;
    let first = Step::first("t", 1);
    let root = first.commit(&*saver).await?;
    let other = says(9, "other")?;
    let row =
        task(1, [write(MESSAGES, list(["a"])?), write(MESSAGES, list(["a"])?), write("title", plain(1)?)]);
    saver.put_writes(&root, &row).await?;
    saver.put_writes(&root, &other).await?;
    for _ in 0..3 {
        saver.put_writes(&root, &row).await?;
        check_eq!(get(&*saver, &root).await?, Some(first.tuple([row.clone(), other.clone()])), "put again");
    }
    // Existing writes stay: a child may have applied them.
    let changed = task(1, [write("title", plain("changed")?)]);
    saver.put_writes(&root, &changed).await?;
    check_eq!(
        get(&*saver, &root).await?,
        Some(first.tuple([row.clone(), other.clone()])),
        "put with other content"
    );
    check_eq!(row.writes.len(), 3, "the writes of the task");
    Ok(())
}

async fn put_writes_are_merged_by_position(store: Store) -> Outcome {
    let saver = store.open().await?;
    let first = Step::first("t", 1);
    let root = first.commit(&*saver).await?;
    let mut row = task(1, [write(MESSAGES, list(["a"])?), write(INTERRUPT_CHANNEL, plain("which one?")?)]);
    saver.put_writes(&root, &row).await?;
    let longer = task(
        1,
        [write(MESSAGES, list(["other"])?), write(MESSAGES, list(["b"])?), write("title", plain(1)?)],
    );
    for _ in 0..2 {
        saver.put_writes(&root, &longer).await?;
        row.merge(&longer);
        check_eq!(get(&*saver, &root).await?, Some(first.tuple([row.clone()])), "put with more writes");
    }
    check_eq!(row.writes.len(), 4, "the interrupt, the first write and what the second put added");
    let shorter = task(1, [write("title", plain(2)?)]);
    saver.put_writes(&root, &shorter).await?;
    check_eq!(get(&*saver, &root).await?, Some(first.tuple([row.clone()])), "put with fewer writes");
    Ok(())
}

async fn put_writes_special_rows_are_replaced(store: Store) -> Outcome {
    let saver = store.open().await?;
    let first = Step::first("t", 1);
    let root = first.commit(&*saver).await?;
    let mut expected =
        task(1, [write(MESSAGES, list(["a"])?), write(INTERRUPT_CHANNEL, plain("which one?")?)]);
    saver.put_writes(&root, &expected).await?;
    for more in [
        task(1, [write(INTERRUPT_CHANNEL, plain("which one, really?")?)]),
        task(1, [write(RESUME_CHANNEL, list(["the first"])?)]),
        task(
            1,
            [write(RESUME_CHANNEL, list(["the first", "the second"])?), write(ERROR_CHANNEL, plain("no")?)],
        ),
        task(
            1,
            [
                write(MESSAGES, list(["a"])?),
                write(ERROR_CHANNEL, plain("never")?),
                write(MESSAGES, list(["b"])?),
            ],
        ),
        task(1, [write(SCHEDULED_CHANNEL, plain(json!({"send": 1}))?)]),
        task(1, [write(SCHEDULED_CHANNEL, plain(json!(null))?)]),
    ] {
        saver.put_writes(&root, &more).await?;
        expected.merge(&more);
        check_eq!(
            get(&*saver, &root).await?,
            Some(first.tuple([expected.clone()])),
            "after putting {more:?}"
        );
    }
    check_eq!(expected.writes.len(), 6, "two ordinary writes and four special rows");
    Ok(())
}

async fn applied_rows_are_final(store: Store) -> Outcome {
    let saver = store.open().await?;
    let first = Step::first("t", 1).snapshot(MESSAGES, list(["before"])?);
    let root = first.commit(&*saver).await?;
    // A task that only asked, one that had nothing to write, one that wrote; the fourth is not applied.
    let rows =
        [task(1, [write(INTERRUPT_CHANNEL, plain("which one?")?)]), task(2, []), says(3, "a")?, task(4, [])];
    for row in &rows {
        saver.put_writes(&root, row).await?;
    }
    let child = Step::after(&root, 2).sentinel(MESSAGES).applies(1).applies(2).applies(3);
    child.commit(&*saver).await?;
    let last = Step::after(&child.commit.key(), 3).sentinel(MESSAGES).runs(says(9, "b")?);
    last.commit(&*saver).await?;
    let history = path(&*saver, &last.commit.key(), None).await?;
    let special = [write(RESUME_CHANNEL, list(["this one"])?), write(INTERRUPT_CHANNEL, plain("again?")?)];
    for n in 1..=3 {
        for late in [task(n, special.clone()), says(n, "late")?, task(n, special.clone())] {
            saver.put_writes(&root, &late).await?;
            check_eq!(get(&*saver, &root).await?, Some(first.tuple(rows.clone())), "after {late:?} was put");
        }
    }
    let fork = Step::fork(&root, &last.commit.key(), 4).sentinel(MESSAGES).runs(says(1, "late")?);
    fork.commit(&*saver).await?;
    check_eq!(
        get(&*saver, &root).await?,
        Some(first.tuple(rows.clone())),
        "after a fork brought the task again"
    );
    check_eq!(path(&*saver, &last.commit.key(), None).await?, history, "the history of what was applied");

    // A row that no child has applied takes what comes.
    saver.put_writes(&root, &task(4, special.clone())).await?;
    let fourth = [rows[0].clone(), rows[1].clone(), rows[2].clone(), task(4, special)];
    check_eq!(get(&*saver, &root).await?, Some(first.tuple(fourth)), "after a pending row was put again");
    Ok(())
}

async fn put_writes_needs_its_checkpoint(store: Store) -> Outcome {
    let saver = store.open().await?;
    let row = says(1, "lost")?;
    let nowhere = key("t", id(1));
    check_eq!(saver.put_writes(&nowhere, &row).await, not_found(&nowhere), "in a thread that does not exist");
    check_eq!(dump(&*saver, "t").await?, [], "the thread afterwards");

    let first = Step::first("t", 1);
    let root = first.commit(&*saver).await?;
    for wrong in
        [key("t", id(2)), key("u", root.id), CheckpointKey { namespace: "nested".into(), ..root.clone() }]
    {
        check_eq!(saver.put_writes(&wrong, &row).await, not_found(&wrong), "under {wrong:?}");
    }
    // These checkpoints are created afterwards and have no writes.
    let second = Step::after(&root, 2);
    second.commit(&*saver).await?;
    let nested = Step::first("t", 1).namespace("nested");
    nested.commit(&*saver).await?;
    check_eq!(get(&*saver, &root).await?, Some(first.tuple([])), "the first checkpoint");
    check_eq!(
        get(&*saver, &second.commit.key()).await?,
        Some(second.tuple([])),
        "the one that did not exist"
    );
    let at = CheckpointSelector { namespace: "nested".into(), ..CheckpointSelector::head(&"t".into()) };
    check_eq!(saver.get(&at).await?, Some(nested.tuple([])), "the one of another namespace");
    Ok(())
}

async fn put_writes_keeps_a_task_without_writes(store: Store) -> Outcome {
    let saver = store.open().await?;
    let first = Step::first("t", 1).snapshot(MESSAGES, list(["a"])?);
    let root = first.commit(&*saver).await?;
    saver.put_writes(&root, &task(1, [])).await?;
    check_eq!(get(&*saver, &root).await?, Some(first.tuple([task(1, [])])), "the task without writes");
    let child = Step::after(&root, 2).held(MESSAGES, 1).applies(1).runs(task(2, []));
    child.commit(&*saver).await?;
    check_eq!(get(&*saver, &root).await?, Some(first.tuple([task(1, []), task(2, [])])), "both tasks");
    let applied = get(&*saver, &child.commit.key()).await?.map(|tuple| tuple.checkpoint.applied);
    check_eq!(applied, Some(child.commit.checkpoint.applied), "the applied tasks of the child");
    Ok(())
}

/// The id of a task names its row under one checkpoint, not in a thread or a store.
async fn put_writes_may_repeat_a_task_elsewhere(store: Store) -> Outcome {
    let saver = store.open().await?;
    let mut expected = Vec::new();
    for (thread, namespace) in [("t", ""), ("t", "nested"), ("u", "")] {
        let first = Step::first(thread, 1).namespace(namespace).snapshot(MESSAGES, list(["seed"])?);
        let root = first.commit(&*saver).await?;
        let second = Step::after(&root, 2).sentinel(MESSAGES).runs(says(9, "before")?);
        let head = second.commit(&*saver).await?;
        for (at, n) in [(&root, 1), (&head, 2)] {
            saver.put_writes(at, &says(5, &format!("{n} of {thread}/{namespace}"))?).await?;
        }
        let third = Step::after(&head, 3).sentinel(MESSAGES).applies(5).runs(says(9, "again")?);
        let last = third.commit(&*saver).await?;
        let texts =
            ["before".to_owned(), format!("1 of {thread}/{namespace}"), format!("2 of {thread}/{namespace}")];
        let rows =
            [vec![says(9, &texts[0])?, says(5, &texts[1])?], vec![says(5, &texts[2])?, says(9, "again")?]];
        expected.push((last, [(root, rows[0].clone()), (head, rows[1].clone())], texts));
    }
    for (last, checkpoints, texts) in expected {
        for (at, rows) in checkpoints {
            let found = get(&*saver, &at).await?.map(|tuple| tuple.writes);
            check_eq!(found, Some(rows), "the rows under {at:?}");
        }
        let said = json!(["seed", texts[0], texts[2], "again"]);
        check_eq!(replayed(&*saver, &last).await?, said, "the messages at {last:?}");
    }
    Ok(())
}

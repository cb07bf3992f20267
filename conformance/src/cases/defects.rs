//! Minimal reproductions of defects that other checkpoint stores have or had, if they show at the saver level. Each
//! names the report in the store's public issue tracker.

use serde_json::json;
use threadkeep::checkpoint::{
    CheckpointKey, CheckpointTuple, ERROR_CHANNEL, INTERRUPT_CHANNEL, RESUME_CHANNEL, SCHEDULED_CHANNEL,
    Stored, Write,
};
use threadkeep::saver::{ListQuery, Revision, Rewrite, Seed};

use crate::case::{Case, Failure, Outcome, case, check, check_eq};
use crate::factory::Store;
use crate::kit::{
    MESSAGES, Step, all, get, id, ids, list, path, plain, replayed, says, stored, task, task_id, version,
    write,
};

pub(super) const CASES: &[Case] = &[
    case!(
        Delta,
        r8382_parallel_tasks_replay_in_the_order_they_ran,
        "a reload would permute the messages of a step"
    ),
    case!(
        Delta,
        r8447_old_checkpoints_are_exact_however_much_is_newer,
        "old checkpoints would come back empty"
    ),
    case!(
        Delta,
        r8443_sibling_inputs_on_one_parent_stay_apart,
        "a fork would contain the input of its sibling"
    ),
    case!(
        Delta,
        r8551_a_fork_leaves_the_existing_branch_alone,
        "the old head would show the message of a new fork"
    ),
    case!(Delta, r8384_the_first_write_after_full_mode_is_kept, "a switch to delta mode would lose a turn"),
    case!(Delta, r8534_a_plain_value_is_a_seed, "a switch to delta mode would lose everything before it"),
    case!(Delta, r8686_null_and_empty_seeds_are_seeds, "an emptied channel would get its old content back"),
    case!(
        Delta,
        r8011_the_first_write_of_a_fresh_thread_is_kept,
        "a thread that begins with an update would be empty"
    ),
    case!(Core, r4_4_a_raw_write_with_a_new_version_survives, "the title of an interrupted run would vanish"),
    case!(Delta, special_rows_never_replay, "an error text would appear as a message"),
    case!(Delta, pending_writes_never_replay, "a copy of a head with a failed step would gain its messages"),
    case!(Delta, writes_put_after_the_commit_never_replay, "a restored pending write would change the past"),
    case!(Delta, a_long_unwritten_stretch_keeps_its_path, "a rarely written channel would lose its value"),
];

/// <https://github.com/langchain-ai/langgraph/issues/8382>
async fn r8382_parallel_tasks_replay_in_the_order_they_ran(store: Store) -> Outcome {
    let saver = store.open().await?;
    // Many threads, so that no storage or id order is correct by chance.
    for thread in 0..12_u16 {
        let name = format!("t{thread}");
        let mut last = Step::first(&name, 1).snapshot(MESSAGES, list(["seed"])?).commit(&*saver).await?;
        let mut expected = vec!["seed".to_owned()];
        for turn in 2..5_u16 {
            let numbers = [0, 1, 2, 3, 4].map(|place| thread * 100 + turn * 10 + place);
            let mut step = Step::after(&last, turn).sentinel(MESSAGES);
            // Tasks finish in another order than the one in which they are applied; some writes come early.
            let mut finished = numbers;
            finished.rotate_left(usize::from(thread % 5));
            finished[1..].reverse();
            for (place, n) in finished.into_iter().enumerate() {
                let mut row = says(n, &format!("task {n}"))?;
                row.index = u32::from(n % 10);
                if place % 2 == 0 {
                    saver.put_writes(&last, &row).await?;
                } else {
                    step = step.brings(row);
                }
            }
            for n in numbers {
                step = step.applies(n);
                expected.push(format!("task {n}"));
            }
            last = step.commit(&*saver).await?;
            check_eq!(replayed(&*saver, &last).await?, json!(expected), "thread {name} after step {turn}");
        }
    }
    Ok(())
}

/// <https://github.com/langchain-ai/langgraph/issues/8447>
async fn r8447_old_checkpoints_are_exact_however_much_is_newer(store: Store) -> Outcome {
    const LENGTH: u16 = 1_100; // More than the 1,024 rows of a page in the store that had the defect.
    let saver = store.open().await?;
    let first = Step::first("t", 1).snapshot(MESSAGES, list(["1"])?).meta("run_id", json!("the first"));
    let mut keys = vec![first.commit(&*saver).await?];
    for n in 2..=LENGTH {
        let step = Step::after(&keys[keys.len() - 1], n).sentinel(MESSAGES).runs(says(n, &n.to_string())?);
        keys.push(step.commit(&*saver).await?);
    }
    let numbers = |to: usize| json!((1..=to).map(|n| n.to_string()).collect::<Vec<_>>());
    for at in [1, 2, 3, 5, 40, 76, 77, 1024, 1025, 1099, 1100] {
        check_eq!(replayed(&*saver, &keys[at - 1]).await?, numbers(at), "messages at {at}");
    }
    let far = path(&*saver, &keys[1099], Some(id(1))).await?;
    check_eq!(
        (far.seed.map(|seed| seed.checkpoint), far.steps.len()),
        (Some(id(1)), 1099),
        "all in one call"
    );
    let old = ListQuery { before: Some(id(4)), ..all("t") };
    check_eq!(ids(&*saver, &old).await?, [3, 2, 1].map(id), "the oldest checkpoints");
    // Without a limit, everything: also if the store returns pages.
    let everything: Vec<_> = (1..=LENGTH).rev().map(id).collect();
    check!(ids(&*saver, &all("t")).await? == everything, "the list of all checkpoints lacks some");
    let image = saver.read_thread(&"t".into()).await?;
    let read = image.checkpoints.keys().rev().map(|(_, id)| *id);
    check!(read.eq(everything.iter().copied()), "the whole thread lacks some checkpoints");
    let filter = [("run_id".to_owned(), json!("the first"))].into_iter().collect();
    let only = ListQuery { filter, limit: Some(1), ..all("t") };
    check_eq!(ids(&*saver, &only).await?, [id(1)], "the one that matches, after pages without a match");
    // Changes of more checkpoints than one request of a store may have.
    let put = image.checkpoints.into_values().map(|tuple| CheckpointTuple { thread: "u".into(), ..tuple });
    let copy = Rewrite { put: put.collect(), ..Rewrite::default() };
    saver.rewrite_thread(&"u".into(), &Revision::absent(), copy).await?;
    check!(ids(&*saver, &all("u")).await? == everything, "the copy lacks some checkpoints");
    let copied = CheckpointKey { thread: "u".into(), ..keys[1099].clone() };
    check_eq!(replayed(&*saver, &copied).await?, numbers(1100), "messages of the copy");
    saver.delete_thread(&"u".into()).await?;
    check_eq!(ids(&*saver, &all("u")).await?.len(), 0, "the checkpoints of the copy after its deletion");
    check_eq!(saver.threads(None, 10).await?, ["t".into()], "the threads after its deletion");
    let middle = get(&*saver, &keys[500]).await?.map(|tuple| (tuple.parent, tuple.checkpoint.applied));
    check_eq!(middle, Some((Some(id(500)), vec![task_id(501)])), "a checkpoint in the middle");
    Ok(())
}

/// A thread with two turns: in-1, out-1, in-2, out-2; each message one step.
async fn two_turns(
    store: &Store,
) -> Result<(std::sync::Arc<dyn threadkeep::saver::Saver>, Vec<CheckpointKey>), Failure> {
    let saver = store.open().await?;
    let mut keys = vec![Step::first("t", 1).snapshot(MESSAGES, list([])?).commit(&*saver).await?];
    for (n, text) in (2..).zip(["in-1", "out-1", "in-2", "out-2"]) {
        let step = Step::after(&keys[keys.len() - 1], n).sentinel(MESSAGES).runs(says(n, text)?);
        keys.push(step.commit(&*saver).await?);
    }
    Ok((saver, keys))
}

/// <https://github.com/langchain-ai/langgraph/issues/8443>
async fn r8443_sibling_inputs_on_one_parent_stay_apart(store: Store) -> Outcome {
    let (saver, keys) = two_turns(&store).await?;
    let (after_out_1, head) = (&keys[2], &keys[4]);
    // A fork from the checkpoint after out-1; its input is stored under the same parent as in-2.
    let input = Step::fork(after_out_1, head, 6).sentinel(MESSAGES).runs(says(6, "in-3")?);
    let input = input.commit(&*saver).await?;
    let output = Step::after(&input, 7).sentinel(MESSAGES).runs(says(7, "out-3")?).commit(&*saver).await?;
    // A fork of the fork, and one that takes a snapshot at once.
    let again = Step::fork(after_out_1, &output, 8).runs(says(8, "in-4")?);
    let again = again.snapshot(MESSAGES, list(["in-1", "out-1", "in-4"])?).commit(&*saver).await?;
    let on_fork =
        Step::fork(&input, &again, 9).sentinel(MESSAGES).runs(says(9, "out-5")?).commit(&*saver).await?;
    for (at, expected) in [
        (head, json!(["in-1", "out-1", "in-2", "out-2"])),
        (&output, json!(["in-1", "out-1", "in-3", "out-3"])),
        (&again, json!(["in-1", "out-1", "in-4"])),
        (&on_fork, json!(["in-1", "out-1", "in-3", "out-5"])),
        (after_out_1, json!(["in-1", "out-1"])),
    ] {
        check_eq!(replayed(&*saver, at).await?, expected, "messages at {}", at.id);
    }
    Ok(())
}

/// <https://github.com/langchain-ai/langgraph/issues/8551>
async fn r8551_a_fork_leaves_the_existing_branch_alone(store: Store) -> Outcome {
    let (saver, keys) = two_turns(&store).await?;
    let mut before = Vec::new();
    for key in &keys {
        before.push((path(&*saver, key, None).await?, stored(&*saver, key, MESSAGES).await?));
    }
    let mut head = keys[4].clone();
    for (n, from) in (6..).zip(&keys) {
        let fork = Step::fork(from, &head, n).sentinel(MESSAGES).runs(says(n, "an update of the past")?);
        head = fork.commit(&*saver).await?;
        saver.put_writes(from, &says(n + 50, "pending")?).await?;
    }
    for (key, (old_path, old_stored)) in keys.iter().zip(before) {
        check_eq!(path(&*saver, key, None).await?, old_path, "the path to {} after the forks", key.id);
        check_eq!(stored(&*saver, key, MESSAGES).await?, old_stored, "what {} stores", key.id);
    }
    Ok(())
}

/// <https://github.com/langchain-ai/langgraph/issues/8384>
async fn r8384_the_first_write_after_full_mode_is_kept(store: Store) -> Outcome {
    let saver = store.open().await?;
    let full = Step::first("t", 1).value(MESSAGES, list(["full"])?).commit(&*saver).await?;
    let first = Step::after(&full, 2).sentinel(MESSAGES).runs(says(1, "delta")?).commit(&*saver).await?;
    let second = Step::after(&first, 3).sentinel(MESSAGES).runs(says(2, "more")?).commit(&*saver).await?;
    check_eq!(replayed(&*saver, &first).await?, json!(["full", "delta"]), "after the switch");
    check_eq!(replayed(&*saver, &second).await?, json!(["full", "delta", "more"]), "one step further");
    check_eq!(replayed(&*saver, &full).await?, json!(["full"]), "before the switch");
    Ok(())
}

/// <https://github.com/langchain-ai/langgraph/issues/8534>
async fn r8534_a_plain_value_is_a_seed(store: Store) -> Outcome {
    let saver = store.open().await?;
    let mut last = Step::first("t", 1).value(MESSAGES, list(["1"])?).commit(&*saver).await?;
    for n in 2..=5_u16 {
        let all: Vec<String> = (1..=n).map(|n| n.to_string()).collect();
        last = Step::after(&last, n)
            .value(MESSAGES, plain(all)?)
            .runs(says(n, &n.to_string())?)
            .commit(&*saver)
            .await?;
    }
    let delta = Step::after(&last, 6).sentinel(MESSAGES).runs(says(6, "6")?).commit(&*saver).await?;
    let path = path(&*saver, &delta, None).await?;
    let seed = Seed { checkpoint: id(5), value: list(["1", "2", "3", "4", "5"])?, version: version(5) };
    check_eq!(path.seed, Some(seed), "the seed is the last full value");
    check_eq!(path.steps.len(), 1, "steps after it");
    Ok(())
}

/// <https://github.com/langchain-ai/langgraph/issues/8686>
async fn r8686_null_and_empty_seeds_are_seeds(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (n, empty) in (1..).zip([json!(null), json!([]), json!({}), json!("")]) {
        for snapshot in [false, true] {
            let thread = format!("{n} {snapshot}");
            let old = Step::first(&thread, 1).snapshot(MESSAGES, list(["old"])?).commit(&*saver).await?;
            let kind = if snapshot { Stored::Snapshot } else { Stored::Value };
            let emptied = Step::after(&old, 2).store(MESSAGES, version(2), kind(plain(empty.clone())?));
            let emptied = emptied.commit(&*saver).await?;
            let next =
                Step::after(&emptied, 3).sentinel(MESSAGES).runs(says(1, "new")?).commit(&*saver).await?;
            for at in [&emptied, &next] {
                let seed = path(&*saver, at, None).await?.seed;
                let expected = Seed { checkpoint: id(2), value: plain(empty.clone())?, version: version(2) };
                check_eq!(seed, Some(expected), "the seed of {} in thread {thread:?}", at.id);
            }
        }
    }
    Ok(())
}

/// <https://github.com/langchain-ai/langgraph/issues/8011>
async fn r8011_the_first_write_of_a_fresh_thread_is_kept(store: Store) -> Outcome {
    let saver = store.open().await?;
    let created = Step::first("t", 1).commit(&*saver).await?;
    let first = Step::after(&created, 2).sentinel(MESSAGES).runs(says(1, "first")?).commit(&*saver).await?;
    let second = Step::after(&first, 3).sentinel(MESSAGES).runs(says(2, "second")?).commit(&*saver).await?;
    let got = path(&*saver, &second, None).await?;
    let texts: Vec<_> =
        got.steps.iter().flat_map(|step| &step.writes).map(|write| write.value.clone()).collect();
    check_eq!(
        (got.seed, texts),
        (None, vec![list(["first"])?, list(["second"])?]),
        "no seed, and both writes"
    );
    Ok(())
}

/// Known defect 4 of the service reference: a write outside a run that gives one channel a new version.
async fn r4_4_a_raw_write_with_a_new_version_survives(store: Store) -> Outcome {
    let saver = store.open().await?;
    let first = Step::first("t", 1).value("title", plain("draft")?).snapshot(MESSAGES, list(["a"])?);
    let first = first.value("goal", plain(json!(null))?).commit(&*saver).await?;
    let titled = Step::after(&first, 2).value("title", plain("Tides")?).held(MESSAGES, 1).held("goal", 1);
    let titled = titled.commit(&*saver).await?;
    drop(saver);

    let saver = store.open().await?;
    let channels = get(&*saver, &titled).await?.map(|tuple| {
        tuple.checkpoint.channels.into_iter().map(|(name, entry)| (name.to_string(), entry.version)).collect()
    });
    let versions = [("goal", 1), (MESSAGES, 1), ("title", 2)].map(|(name, n)| (name.to_owned(), version(n)));
    check_eq!(channels, Some(Vec::from(versions)), "the versions");
    let title = stored(&*saver, &titled, "title").await?;
    check_eq!(title, Some(Stored::Value(plain("Tides")?)), "the title, through another handle");
    Ok(())
}

async fn special_rows_never_replay(store: Store) -> Outcome {
    let saver = store.open().await?;
    let root = Step::first("t", 1).snapshot(MESSAGES, list([])?).commit(&*saver).await?;
    let special = [ERROR_CHANNEL, INTERRUPT_CHANNEL, RESUME_CHANNEL, SCHEDULED_CHANNEL];
    let mut writes: Vec<Write> = Vec::new();
    for channel in special {
        writes.push(write(channel, list([channel])?));
        writes.push(write(MESSAGES, list(["said"])?));
    }
    let two = Step::after(&root, 2).sentinel(MESSAGES).runs(task(1, writes)).commit(&*saver).await?;
    // A late answer to a task that was already applied.
    saver.put_writes(&root, &task(1, [write(RESUME_CHANNEL, list(["late"])?)])).await?;
    check_eq!(replayed(&*saver, &two).await?, json!(["said", "said", "said", "said"]), "messages");
    Ok(())
}

/// <https://github.com/langchain-ai/langgraph/issues/8443>, with rows that nothing ever applied.
async fn pending_writes_never_replay(store: Store) -> Outcome {
    let saver = store.open().await?;
    let root = Step::first("t", 1).snapshot(MESSAGES, list(["seed"])?).commit(&*saver).await?;
    let head = Step::after(&root, 2).sentinel(MESSAGES).runs(says(1, "said")?).commit(&*saver).await?;
    // One task of a parallel step finished, the other one failed; then the head is copied to carry new metadata.
    saver.put_writes(&head, &says(2, "of a failed step")?).await?;
    saver.put_writes(&head, &task(3, [write(ERROR_CHANNEL, plain("it broke")?)])).await?;
    let copy = Step::after(&head, 3)
        .held(MESSAGES, 2)
        .meta("run_durations", json!({"run": 3}))
        .commit(&*saver)
        .await?;
    let next = Step::after(&copy, 4).sentinel(MESSAGES).runs(says(4, "next")?).commit(&*saver).await?;
    check_eq!(replayed(&*saver, &copy).await?, json!(["seed", "said"]), "messages of the copy");
    check_eq!(replayed(&*saver, &next).await?, json!(["seed", "said", "next"]), "messages of the next turn");
    Ok(())
}

async fn writes_put_after_the_commit_never_replay(store: Store) -> Outcome {
    let (saver, keys) = two_turns(&store).await?;
    for (n, key) in (20..).zip(&keys) {
        let before = path(&*saver, &keys[4], Some(id(1))).await?;
        saver.put_writes(key, &says(n, "late")?).await?;
        check_eq!(
            path(&*saver, &keys[4], Some(id(1))).await?,
            before,
            "the path after a late write under {}",
            key.id
        );
    }
    // Until a child applies them.
    let fork = Step::fork(&keys[1], &keys[4], 6).sentinel(MESSAGES).applies(21).commit(&*saver).await?;
    check_eq!(replayed(&*saver, &fork).await?, json!(["in-1", "late"]), "a child that applies one of them");
    Ok(())
}

async fn a_long_unwritten_stretch_keeps_its_path(store: Store) -> Outcome {
    let saver = store.open().await?;
    let root = Step::first("t", 1).snapshot(MESSAGES, list(["seed"])?).commit(&*saver).await?;
    let mut last = Step::after(&root, 2).sentinel(MESSAGES).runs(says(2, "one")?).commit(&*saver).await?;
    for n in 3..=60 {
        let title = task(n, [write("title", plain(n)?)]);
        last = Step::after(&last, n)
            .held(MESSAGES, 2)
            .value("title", plain(n)?)
            .runs(title)
            .commit(&*saver)
            .await?;
    }
    last = Step::after(&last, 61).sentinel(MESSAGES).runs(says(61, "two")?).commit(&*saver).await?;
    check_eq!(replayed(&*saver, &last).await?, json!(["seed", "one", "two"]), "messages");
    let steps = path(&*saver, &last, None).await?.steps;
    let written: Vec<_> =
        steps.iter().filter(|step| !step.writes.is_empty()).map(|step| step.checkpoint).collect();
    check_eq!((steps.len(), written), (60, vec![id(2), id(61)]), "the steps, and those that wrote");
    Ok(())
}

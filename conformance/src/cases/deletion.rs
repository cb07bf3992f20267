//! Deletions, copies and conversions as the engine plans them, executed on the saver: what remains reads as before, in
//! both modes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Map, Value as Json, json};
use threadkeep::Error;
use threadkeep::convert::convert;
use threadkeep::deletion::{
    Boundary, Keep, Prune, RUN_ID_KEY, RetentionPolicy, copy_thread, delete_for_runs, enforce, prune,
};
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::metadata::{DURATION_NODE, Source};
use threadkeep::mode::ChannelMode::{Delta, Full};
use threadkeep::saver::Saver;
use threadkeep::state::{HistoryQuery, StateAccessor, StateSnapshot};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::verify::verify;
use tokio::sync::watch;
use tokio::task::yield_now;

use crate::case::{Case, Failure, Outcome, case, check, check_eq};
use crate::factory::Store;
use crate::live::{LOG, MODES, accessor, at, create, ids, open, says, turn, update, whole_history};

pub(super) const CASES: &[Case] = &[
    case!(Deletion, prune_keeps_the_state_of_what_stays, "a pruned conversation would have lost messages"),
    case!(Deletion, prune_leaves_everything_else_alone, "pruning one thread would damage another one"),
    case!(
        Deletion,
        delete_for_runs_spares_what_others_need,
        "deleting a run would take away the history of a later one"
    ),
    case!(Deletion, copies_are_equal_and_their_own, "deleting a thread would damage the copies of it"),
    case!(
        Deletion,
        retention_takes_only_what_nobody_needs,
        "a pass over idle threads would delete a branch in use"
    ),
    case!(
        Deletion,
        conversions_keep_every_state,
        "a converted thread would read differently, or could not be converted back"
    ),
    case!(
        Concurrency,
        a_pass_that_races_with_a_run_loses_nothing,
        "a run that continues while its thread is pruned would lose steps"
    ),
];

/// A superstep of a run with one task that writes one message.
async fn step(writer: &mut StepWriter, run: &str, says: &str) -> Result<StateSnapshot, Failure> {
    let task = writer.start_task(&"agent".into(), 0);
    let writes = vec![
        writer.write("messages", crate::live::message(says), false)?,
        writer.write(LOG, json!([says]), false)?,
    ];
    writer.finish_task(task, writes, Durability::WithCommit).await?;
    let extra = Map::from_iter([(RUN_ID_KEY.to_owned(), Json::from(run))]);
    Ok(writer.commit(Source::Loop, vec![], extra).await?.clone())
}

/// Ten turns, each in its own run, a title, a branch from the fourth turn, a note of durations on the head, and a
/// nested namespace; returns the checkpoints of the trunk, oldest first.
async fn talk(accessor: &StateAccessor, thread: &str) -> Result<Vec<StateSnapshot>, Failure> {
    let mut trunk = vec![create(accessor, thread).await?];
    let mut writer = open(accessor, thread, None).await?;
    for n in 0..10 {
        trunk.push(step(&mut writer, &format!("run {n}"), &format!("m{n}")).await?);
        if n == 4 {
            let title = vec![accessor.write("title", json!("Tides"), false)?];
            trunk.push(update(accessor, thread, None, title).await?);
            writer = open(accessor, thread, None).await?;
        }
    }
    let mut branch = open(accessor, thread, Some(trunk[4].key.id)).await?;
    step(&mut branch, "a branch", "beside").await?;
    // The trunk becomes the head again.
    let mut writer = open(accessor, thread, trunk.last().map(|state| state.key.id)).await?;
    trunk.push(step(&mut writer, "the last run", "last").await?);
    let inner = accessor.clone().in_namespace("nested".into());
    create(&inner, thread).await?;
    update(&inner, thread, None, vec![says(&inner, "inner")?]).await?;
    Ok(trunk)
}

/// The values at every checkpoint of the root namespace.
async fn states(
    accessor: &StateAccessor,
    thread: &str,
) -> Result<BTreeMap<CheckpointId, Map<String, Json>>, Failure> {
    let states = accessor.history(&ThreadId::from(thread), HistoryQuery::default()).await?;
    states.iter().map(|state| Ok((state.key.id, state.values()?))).collect()
}

/// Fails unless the thread reads as before, through another handle too, and every invariant holds.
async fn reads_as(
    store: &Store,
    accessor: &StateAccessor,
    thread: &str,
    expected: &BTreeMap<CheckpointId, Map<String, Json>>,
    what: &str,
) -> Outcome {
    let table = accessor.table();
    let saver = store.open().await?;
    let other = crate::live::accessor(&saver, table.mode(), table.frequency())?;
    for reader in [accessor, &other] {
        check_eq!(states(reader, thread).await?, *expected, "the states of {thread} {what}");
    }
    let violations = verify(&*saver, &thread.into(), table).await?;
    check_eq!(violations, [], "the broken rules of {thread} {what}");
    Ok(())
}

async fn prune_keeps_the_state_of_what_stays(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (mode, frequency) in MODES {
        for keep in [Keep::Latest, Keep::Last(3), Keep::Last(100), Keep::Nothing] {
            for boundary in [Boundary::KeepSet, Boundary::FreshSnapshot] {
                let thread = format!("{mode:?} {frequency} {keep:?} {boundary:?}");
                let accessor = accessor(&saver, mode, frequency)?;
                let trunk = talk(&accessor, &thread).await?;
                let before = states(&accessor, &thread).await?;
                let head = trunk.last().map(|state| state.key.id);
                // A task in progress during the pass.
                let mut writer = open(&accessor, &thread, None).await?;
                let task = writer.start_task(&"agent".into(), 0);
                let said = vec![says(&accessor, "under way")?];
                writer.finish_task(task, said, Durability::Now).await?;

                let order = Prune { boundary, ..Prune::keeping(keep) };
                let plan = prune(&*saver, &thread.as_str().into(), &order, accessor.table()).await?;
                let gone: BTreeSet<CheckpointId> =
                    plan.removed().filter(|place| place.0.as_str().is_empty()).map(|place| place.1).collect();
                let mut expected = before.clone();
                expected.retain(|id, _| !gone.contains(id));
                reads_as(&store, &accessor, &thread, &expected, "after the pass").await?;
                if keep == Keep::Nothing {
                    check_eq!(expected.len(), 0, "what is left of {thread}");
                    continue;
                }
                check!(head.is_some_and(|head| expected.contains_key(&head)), "the head of {thread} is gone");
                if keep == Keep::Latest && boundary == Boundary::FreshSnapshot {
                    check_eq!(expected.len(), 1, "what is left of {thread}");
                }
                // A second pass finds nothing to do; and the task in progress completes.
                let again = prune(&*saver, &thread.as_str().into(), &order, accessor.table()).await?;
                check_eq!(again.removed().count(), 0, "what a second pass over {thread} removed");
                let live = writer.commit(Source::Loop, vec![], Map::new()).await?.clone();
                let read = at(&accessor, &thread, None).await?;
                check_eq!(read.values()?, live.values()?, "the step that was under way in {thread}");
                check_eq!(ids(&read)?.last().map(String::as_str), Some("under way"), "its message");
            }
        }
    }
    Ok(())
}

async fn prune_leaves_everything_else_alone(store: Store) -> Outcome {
    let saver = store.open().await?;
    let accessor = accessor(&saver, Delta, 3)?;
    let inner = accessor.clone().in_namespace("nested".into());
    for thread in ["t", "t2", ""] {
        talk(&accessor, thread).await?;
    }
    let (others, nested) =
        ([states(&accessor, "t2").await?, states(&accessor, "").await?], states(&inner, "t").await?);
    let order = Prune::keeping(Keep::Latest);
    prune(&*saver, &"t".into(), &order, accessor.table()).await?;
    check_eq!([states(&accessor, "t2").await?, states(&accessor, "").await?], others, "the other threads");
    let head = nested.last_key_value().map(|(id, state)| (*id, state.clone()));
    let left = states(&inner, "t").await?;
    check_eq!(left.last_key_value().map(|(id, state)| (*id, state.clone())), head, "the nested head");

    let unknown = prune(&*saver, &"never there".into(), &order, accessor.table()).await?;
    check_eq!(unknown.removed().count(), 0, "what a pass over an unknown thread removed");
    check_eq!(saver.threads(None, 10).await?.len(), 3, "the threads");
    Ok(())
}

async fn delete_for_runs_spares_what_others_need(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (mode, frequency) in MODES {
        let (thread, accessor) = (format!("{mode:?} {frequency}"), accessor(&saver, mode, frequency)?);
        talk(&accessor, &thread).await?;
        let mut expected = states(&accessor, &thread).await?;
        let id = ThreadId::from(thread.as_str());
        for (run, goes) in [("run 3", 0), ("unknown", 0), ("a branch", 1), ("the last run", 1)] {
            let runs = BTreeSet::from([run.to_owned()]);
            let plan = delete_for_runs(&*saver, &id, &runs, accessor.table()).await?;
            let gone: Vec<CheckpointId> = plan.removed().map(|place| place.1).collect();
            check_eq!(gone.len(), goes, "how many checkpoints of {run} went, {thread}");
            expected.retain(|id, _| !gone.contains(id));
            reads_as(&store, &accessor, &thread, &expected, &format!("without {run}")).await?;
        }
        let next = turn(&mut open(&accessor, &thread, None).await?, "next").await?;
        check_eq!(ids(&next)?.len(), 11, "the messages of the next turn, {thread}");
        let none = delete_for_runs(&*saver, &id, &BTreeSet::new(), accessor.table()).await?;
        check_eq!(none.removed().count(), 0, "what went for no run, {thread}");
    }
    Ok(())
}

async fn copies_are_equal_and_their_own(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (mode, frequency) in MODES {
        let (thread, accessor) = (format!("{mode:?} {frequency}"), accessor(&saver, mode, frequency)?);
        let (source, copy) = (ThreadId::from(thread.as_str()), format!("a copy of {thread}"));
        talk(&accessor, &thread).await?;
        let expected = states(&accessor, &thread).await?;
        let image = saver.read_thread(&source).await?;
        let count = copy_thread(&*saver, &source, &copy.as_str().into()).await?;
        check_eq!(count, image.checkpoints.len(), "how many checkpoints were copied");
        check_eq!(saver.read_thread(&source).await?, image, "the source, to its revision");
        reads_as(&store, &accessor, &copy, &expected, "at first").await?;

        for refused in [
            copy_thread(&*saver, &source, &copy.as_str().into()).await,
            copy_thread(&*saver, &"never there".into(), &"new".into()).await,
        ] {
            check!(matches!(refused, Err(Error::InvalidInput(_))), "a copy that cannot be: {refused:?}");
        }
        // Each continues independently; then the source is deleted.
        turn(&mut open(&accessor, &copy, None).await?, "in the copy").await?;
        turn(&mut open(&accessor, &thread, None).await?, "in the source").await?;
        let copied = states(&accessor, &copy).await?;
        check_eq!(copied.len(), expected.len() + 1, "the checkpoints of the copy");
        saver.delete_thread(&source).await?;
        reads_as(&store, &accessor, &copy, &copied, "without its source").await?;
        let order = Prune::keeping(Keep::Latest);
        copy_thread(&*saver, &copy.as_str().into(), &source).await?;
        prune(&*saver, &copy.as_str().into(), &order, accessor.table()).await?;
        reads_as(&store, &accessor, &thread, &copied, "copied back").await?;
    }
    Ok(())
}

async fn retention_takes_only_what_nobody_needs(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (mode, frequency) in MODES {
        let (thread, accessor) = (format!("{mode:?} {frequency}"), accessor(&saver, mode, frequency)?);
        let id = ThreadId::from(thread.as_str());
        talk(&accessor, &thread).await?;
        let mut expected = states(&accessor, &thread).await?;
        let policy = RetentionPolicy::default();
        let pass = enforce(&*saver, &id, &policy, accessor.table(), true).await?;
        check_eq!(pass.deleted_checkpoint_ids, [], "what a pass took that had nothing to take, {thread}");
        check_eq!(pass.stats_before, pass.stats_after, "the thread before and after that pass, {thread}");

        // A note of durations after the head belongs to no run.
        let note = Map::from_iter([("writes".to_owned(), json!({ (DURATION_NODE): {} }))]);
        let leaf = accessor.annotate(&at(&accessor, &thread, None).await?, note).await?;
        let cap = RetentionPolicy { max_delete_per_run: Some(0), ..policy.clone() };
        let capped = enforce(&*saver, &id, &cap, accessor.table(), false).await?;
        check_eq!(capped.deleted_checkpoint_ids, [], "what went under a cap of 0, {thread}");
        let pass = enforce(&*saver, &id, &policy, accessor.table(), true).await?;
        check_eq!(pass.deleted_checkpoint_ids, [leaf.key.id], "what the pass took, {thread}");
        reads_as(&store, &accessor, &thread, &expected, "after the pass").await?;

        // The branch is removed when requested.
        let policy = RetentionPolicy { prune_leaf_sibling_branches: true, ..policy };
        let pass = enforce(&*saver, &id, &policy, accessor.table(), false).await?;
        check_eq!(pass.deleted_checkpoint_ids.len(), 1, "the branch of {thread}");
        expected.retain(|id, _| !pass.deleted_checkpoint_ids.contains(id));
        reads_as(&store, &accessor, &thread, &expected, "without its branch").await?;
    }
    Ok(())
}

async fn conversions_keep_every_state(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (mode, frequency) in MODES {
        let thread = format!("{mode:?} {frequency}");
        let mut expected = {
            let accessor = accessor(&saver, mode, frequency)?;
            talk(&accessor, &thread).await?;
            states(&accessor, &thread).await?
        };
        for (mode, frequency) in [(Full, 10), (Delta, 4), (Full, 10), (Delta, 1)] {
            let accessor = accessor(&saver, mode, frequency)?;
            convert(&*saver, &thread.as_str().into(), accessor.table()).await?;
            reads_as(&store, &accessor, &thread, &expected, &format!("converted to {mode:?}")).await?;
            let next = turn(&mut open(&accessor, &thread, None).await?, &format!("in {mode:?}")).await?;
            expected.insert(next.key.id, next.values()?);
            reads_as(&store, &accessor, &thread, &expected, &format!("a turn later in {mode:?}")).await?;
        }
    }
    Ok(())
}

/// The passes over a thread in which a run goes on.
#[derive(Debug, Clone, Copy, Default)]
struct Passes {
    /// All of them.
    ended: usize,
    /// Those that removed something, and during which a turn was committed.
    raced: usize,
    /// The checkpoints that they removed.
    removed: usize,
}

async fn a_pass_that_races_with_a_run_loses_nothing(store: Store) -> Outcome {
    const TURNS: usize = 40;
    /// Turns that wait for one that is committed during a pass. Savers in memory, whose calls never wait, may have none.
    const MOST: usize = 200;
    for (mode, frequency) in [(Full, 10), (Delta, 3)] {
        let thread = format!("{mode:?}");
        let (writer_side, pass_side): (Arc<dyn Saver>, Arc<dyn Saver>) =
            (store.open().await?, store.open().await?);
        let accessor = accessor(&writer_side, mode, frequency)?;
        create(&accessor, &thread).await?;
        let table = accessor.table().clone();
        let id = ThreadId::from(thread.as_str());
        let (passes, mut seen) = watch::channel(Passes::default());
        let turns = Arc::new(AtomicUsize::new(0));
        let committed = turns.clone();
        let passing = tokio::spawn(async move {
            let order = Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(Keep::Last(2)) };
            while !passes.is_closed() {
                let before = committed.load(Ordering::SeqCst);
                let removed = match prune(&*pass_side, &id, &order, &table).await {
                    Ok(plan) => plan.removed().count(),
                    Err(Error::Stale { .. }) => 0,
                    Err(error) => return Err(Failure::from(error)),
                };
                let raced = removed > 0 && committed.load(Ordering::SeqCst) > before;
                passes.send_modify(|passes| {
                    passes.ended += 1;
                    passes.raced += usize::from(raced);
                    passes.removed += removed;
                });
                yield_now().await;
            }
            Ok(())
        });
        let mut writer = open(&accessor, &thread, None).await?;
        let mut said = Vec::new();
        for n in 0.. {
            said.push(n.to_string());
            let state = turn(&mut writer, &n.to_string()).await?;
            turns.fetch_add(1, Ordering::SeqCst);
            check_eq!(ids(&state)?, said, "the messages as they ran, {thread}");
            if n % 5 == 4 {
                // However slow the passes are, one of them begins after these turns, and ends before the next ones.
                let ended = seen.borrow().ended + 2;
                let Ok(now) = seen.wait_for(|now| now.ended >= ended).await.map(|now| *now) else { break };
                if n + 1 >= TURNS && (now.raced > 0 || n >= MOST) {
                    break;
                }
            }
        }
        let done = seen.borrow().removed;
        drop(seen);
        passing.await??;
        let left = whole_history(&accessor, &thread).await?;
        let last = left.last().map(|(_, messages)| messages.clone());
        check_eq!(last, Some(said), "the messages of {thread} after {done} checkpoints went");
        check_eq!(
            verify(&*writer_side, &thread.as_str().into(), accessor.table()).await?,
            [],
            "the broken rules of {thread}"
        );
    }
    Ok(())
}

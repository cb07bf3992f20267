//! Minimal reproductions of defects that other stores have, with the engine on top: what a run computed must be what is
//! read back, through this handle and through another one.
//!
//! `r4_<n>` is the n-th known defect of the service reference; `r<number>` is the report in the LangGraph repository.
//! Those that show below the engine are in [`super::defects`].

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};
use threadkeep::checkpoint::Stored;
use threadkeep::id::CheckpointId;
use threadkeep::metadata::Counters;
use threadkeep::mode::ChannelMode::{self, Delta, Full};
use threadkeep::state::{HistoryQuery, StateAccessor, StateSnapshot};
use threadkeep::{Error, Result};

use crate::case::{Case, Failure, Outcome, case, check, check_eq};
use crate::factory::Store;
use crate::kit::{MESSAGES, Step, list, stored};
use crate::live::{
    LOG, MODES, accessor, at, create, ids, message, open, parallel, says, turn, update, whole_history,
};

pub(super) const CASES: &[Case] = &[
    case!(
        Delta,
        r4_1_parallel_steps_reload_as_they_ran,
        "after a reload the answers of parallel tasks would be in another order"
    ),
    case!(
        Delta,
        r4_2_pages_of_history_are_exact_at_any_depth,
        "old checkpoints of a long thread would look empty"
    ),
    case!(
        Delta,
        r4_3_forks_and_updates_of_the_past_keep_every_branch,
        "a regenerated answer would appear next to the old one"
    ),
    case!(
        Core,
        r4_4_a_title_written_from_outside_survives,
        "the title of an interrupted run would vanish, or take messages with it"
    ),
    case!(
        Delta,
        r8821_an_overwrite_beside_other_writes_reloads_as_it_ran,
        "a summary would bring back the messages that it replaced"
    ),
    case!(
        Delta,
        r6909_an_overwrite_may_be_the_first_write,
        "the first value of a list would be a list in a list"
    ),
    case!(
        Delta,
        r8384_a_thread_goes_on_across_a_change_of_mode,
        "a turn before or after the switch to delta mode would be lost"
    ),
    case!(
        Delta,
        r8011_an_update_is_the_first_that_a_thread_sees,
        "a thread that begins with an update would be empty"
    ),
    case!(
        Delta,
        r8290_updates_from_outside_bring_snapshots_at_the_cadence,
        "a thread that is only edited would be replayed from its beginning for ever"
    ),
    case!(
        Delta,
        r8653_an_update_by_another_process_keeps_what_is_there,
        "an edit from another process would erase the conversation"
    ),
    case!(
        Delta,
        r7746_a_rarely_written_channel_gets_its_snapshot,
        "reading a rarely written channel would walk the whole thread"
    ),
    case!(Delta, r4_5_messages_have_the_same_ids_at_every_reading, "a client could not recognize a message"),
    case!(
        Delta,
        r4_5_what_was_read_before_is_not_changed_by_late_rows,
        "a cache would show a fork's messages on the branch beside it"
    ),
    case!(
        Delta,
        r4_5_a_cancelled_half_step_leaves_no_trace,
        "a cancelled run would leave some of its messages"
    ),
    case!(
        Delta,
        r4_5_restored_pending_rows_do_not_replay,
        "after a rollback, what a failed step had written would appear in the next run"
    ),
];

/// The accessor through another handle: nothing that this one remembers can help it.
async fn elsewhere(store: &Store, mode: ChannelMode, frequency: u64) -> Result<StateAccessor, Failure> {
    Ok(accessor(&store.open().await?, mode, frequency)?)
}

fn texts<const N: usize>(texts: [&str; N]) -> Vec<String> {
    texts.map(str::to_owned).into()
}

/// Known defect 1, <https://github.com/langchain-ai/langgraph/issues/8382>
async fn r4_1_parallel_steps_reload_as_they_ran(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (mode, frequency) in MODES {
        // Many threads, so that no order of storage or of ids is right by luck.
        for n in 0..10_usize {
            let (thread, accessor) =
                (format!("{mode:?} {frequency} {n}"), accessor(&saver, mode, frequency)?);
            create(&accessor, &thread).await?;
            let mut writer = open(&accessor, &thread, None).await?;
            let mut expected = Vec::new();
            for step in 0..2 {
                let tags: Vec<String> = (0..5).map(|place| format!("step {step}, task {place}")).collect();
                let says =
                    |tag: &String| Ok(vec![writer.write(LOG, json!([tag]), false)?, says(&accessor, tag)?]);
                let tasks = tags.iter().map(says).collect::<Result<Vec<_>>>()?;
                let mut finished = [0, 1, 2, 3, 4];
                finished.rotate_left(n % 5);
                finished[n / 5..].reverse();
                let live = parallel(&mut writer, tasks, &finished).await?;
                expected.extend(tags);
                let read = at(&elsewhere(&store, mode, frequency).await?, &thread, None).await?;
                for state in [&live, &read] {
                    check_eq!(state.json(LOG)?, Some(json!(expected)), "the log of {thread}");
                    check_eq!(ids(state)?, expected, "the messages of {thread}");
                }
            }
            // A commit that continues from this read stores the tasks that ran.
            let reader = elsewhere(&store, mode, frequency).await?;
            let next = turn(&mut open(&reader, &thread, None).await?, "next").await?;
            expected.push("next".to_owned());
            check_eq!(ids(&next)?, expected, "the next turn of {thread}");
            check_eq!(ids(&at(&accessor, &thread, None).await?)?, expected, "and reloaded, {thread}");
        }
    }
    Ok(())
}

/// Known defect 2, <https://github.com/langchain-ai/langgraph/issues/8447>: also with the seed on another page than the
/// target, and for whole pages.
async fn r4_2_pages_of_history_are_exact_at_any_depth(store: Store) -> Outcome {
    const TURNS: usize = 60;
    let saver = store.open().await?;
    for frequency in [7, 25, 1000] {
        let (thread, writer_side) = (format!("t{frequency}"), accessor(&saver, Delta, frequency)?);
        let mut expected = vec![(create(&writer_side, &thread).await?.key.id, Vec::new())];
        let mut writer = open(&writer_side, &thread, None).await?;
        let mut said = Vec::new();
        for n in 0..TURNS {
            said.push(n.to_string());
            expected.push((turn(&mut writer, &n.to_string()).await?.key.id, said.clone()));
        }
        let reader = elsewhere(&store, Delta, frequency).await?;
        check_eq!(whole_history(&reader, &thread).await?, expected, "the whole history of {thread}");
        for size in [1, 2, 3, 20] {
            let mut before = None;
            let mut read = Vec::new();
            loop {
                let query = HistoryQuery { before, limit: Some(size), ..HistoryQuery::default() };
                let page = reader.history(&thread.as_str().into(), query).await?;
                let Some(last) = page.last() else { break };
                before = Some(last.key.id);
                check!(read.len() <= expected.len(), "the pages of {size} of {thread} do not end");
                for state in &page {
                    read.push((state.key.id, ids(state)?));
                }
            }
            read.reverse();
            check_eq!(read, expected, "the history of {thread} in pages of {size}");
        }
        for (id, messages) in expected.iter().step_by(9) {
            check_eq!(ids(&at(&reader, &thread, Some(*id)).await?)?, *messages, "{id} of {thread}");
        }
    }
    Ok(())
}

/// Known defect 3, <https://github.com/langchain-ai/langgraph/issues/8443> and, for the branch that was there before,
/// <https://github.com/langchain-ai/langgraph/issues/8551>.
async fn r4_3_forks_and_updates_of_the_past_keep_every_branch(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (mode, frequency) in MODES.into_iter().chain([(Delta, 4)]) {
        let (thread, accessor) = (format!("{mode:?} {frequency}"), accessor(&saver, mode, frequency)?);
        let mut tree: BTreeMap<CheckpointId, Vec<String>> = BTreeMap::new();
        tree.insert(create(&accessor, &thread).await?.key.id, Vec::new());
        let mut writer = open(&accessor, &thread, None).await?;
        for n in 0..9 {
            let state = turn(&mut writer, &format!("m{n}")).await?;
            tree.insert(state.key.id, ids(&state)?);
        }
        // Forks from before, at and after each snapshot, by runs and by updates, then forks of those.
        for generation in 0..3 {
            let places: Vec<_> = tree.keys().copied().collect();
            let places = places.into_iter().step_by(if generation == 0 { 1 } else { 4 + generation });
            for (n, from) in places.enumerate() {
                for by in ["run", "update"] {
                    let id = format!("{by} {generation}.{n}");
                    let mut expected = tree.get(&from).cloned().unwrap_or_default();
                    expected.push(id.clone());
                    let state = if by == "run" {
                        turn(&mut open(&accessor, &thread, Some(from)).await?, &id).await?
                    } else {
                        update(&accessor, &thread, Some(from), vec![says(&accessor, &id)?]).await?
                    };
                    check_eq!(state.parent, Some(from), "the parent of {id:?}");
                    check_eq!(ids(&state)?, expected, "the messages of {id:?} as it ran, {thread}");
                    tree.insert(state.key.id, expected);
                }
            }
        }
        let read = whole_history(&elsewhere(&store, mode, frequency).await?, &thread).await?;
        check_eq!(read, tree.into_iter().collect::<Vec<_>>(), "every checkpoint of {thread}, reloaded");
    }
    Ok(())
}

/// Known defect 4.
async fn r4_4_a_title_written_from_outside_survives(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (mode, frequency) in MODES {
        let (thread, accessor) = (format!("{mode:?} {frequency}"), accessor(&saver, mode, frequency)?);
        create(&accessor, &thread).await?;
        let mut writer = open(&accessor, &thread, None).await?;
        turn(&mut writer, "question").await?;
        let title = |text: &str| accessor.write("title", json!(text), false);
        let head =
            update(&accessor, &thread, None, vec![title("first")?, says(&accessor, "answer")?]).await?;
        let titled = update(&accessor, &thread, None, vec![title("Tides")?]).await?;
        check!(titled.version("title") > head.version("title"), "the title has no new version, {thread}");
        check_eq!(titled.version(MESSAGES), head.version(MESSAGES), "the version of messages, {thread}");
        let reader = elsewhere(&store, mode, frequency).await?;
        for (state, text) in [(&titled, "Tides"), (&head, "first")] {
            let read = at(&reader, &thread, Some(state.key.id)).await?;
            check_eq!(read.json("title")?, Some(json!(text)), "the title, {thread}");
            check_eq!(ids(&read)?, texts(["question", "answer"]), "the messages, {thread}");
            check_eq!(read.version("title"), state.version("title"), "the version of the title, {thread}");
        }
        let next = turn(&mut open(&reader, &thread, None).await?, "next").await?;
        check_eq!(next.json("title")?, Some(json!("Tides")), "the title a turn later, {thread}");
    }
    Ok(())
}

/// <https://github.com/langchain-ai/langgraph/issues/8821>
async fn r8821_an_overwrite_beside_other_writes_reloads_as_it_ran(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (mode, frequency) in MODES {
        for place in 0..3 {
            let thread = format!("{mode:?} {frequency}, overwritten by task {place}");
            let accessor = accessor(&saver, mode, frequency)?;
            create(&accessor, &thread).await?;
            let mut writer = open(&accessor, &thread, None).await?;
            turn(&mut writer, "old").await?;
            let mut tasks = Vec::new();
            for n in 0..3 {
                let id = format!("task {n}");
                let over = n == place;
                let log = writer.write(LOG, json!([id]), over)?;
                tasks.push(vec![log, writer.write(MESSAGES, message(&id), over)?]);
            }
            let live = parallel(&mut writer, tasks.clone(), &[2, 0, 1]).await?;
            let mut expected = vec![live];
            expected.push(turn(&mut writer, "behind").await?);

            // Two of them in one step are refused, and leave nothing.
            let twice = vec![tasks[place].clone(), tasks[place].clone()];
            let refused = parallel(&mut writer, twice, &[1, 0]).await.map(|_| ());
            check!(matches!(refused, Err(Error::InvalidUpdate(_))), "two overwrites gave {refused:?}");
            let reader = elsewhere(&store, mode, frequency).await?;
            for state in &expected {
                let read = at(&reader, &thread, Some(state.key.id)).await?;
                check_eq!(read.values()?, state.values()?, "what was read and what ran, {thread}");
            }
            let head = at(&reader, &thread, None).await?.key;
            check_eq!(Some(head), expected.pop().map(|state| state.key), "the head, {thread}");
        }
    }
    Ok(())
}

/// <https://github.com/langchain-ai/langgraph/issues/6909>
async fn r6909_an_overwrite_may_be_the_first_write(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (mode, frequency) in MODES {
        let (thread, accessor) = (format!("{mode:?} {frequency}"), accessor(&saver, mode, frequency)?);
        create(&accessor, &thread).await?;
        let channels = [("artifacts", json!(["a", "b"])), (LOG, json!(["l"])), (MESSAGES, message("m"))];
        let first = |(name, value): &(&str, Json)| accessor.write(name, value.clone(), true);
        let writes = channels.iter().map(first).collect::<Result<Vec<_>>>()?;
        update(&accessor, &thread, None, writes).await?;
        let reader = elsewhere(&store, mode, frequency).await?;
        let read = at(&reader, &thread, None).await?;
        for (name, value) in &channels {
            check_eq!(read.json(name)?.as_ref(), Some(value), "{name}, {thread}");
        }
        let more = vec![reader.write("artifacts", json!(["b", "c"]), false)?];
        let read = update(&reader, &thread, None, more).await?;
        check_eq!(read.json("artifacts")?, Some(json!(["a", "b", "c"])), "and more of it, {thread}");
    }
    Ok(())
}

/// <https://github.com/langchain-ai/langgraph/issues/8384> and <https://github.com/langchain-ai/langgraph/issues/8534>
async fn r8384_a_thread_goes_on_across_a_change_of_mode(store: Store) -> Outcome {
    let saver = store.open().await?;
    for frequency in [1, 2, 3, 1000] {
        for full_turns in [1, 2, 5] {
            let thread = format!("{frequency} {full_turns}");
            let full = accessor(&saver, Full, frequency)?;
            let mut expected = Vec::new();
            if full_turns == 1 {
                expected.push((create(&full, &thread).await?.key.id, Vec::new()));
            } // Otherwise the first turn makes the root, which has a value and no writes that would tell it as well.
            let mut said = Vec::new();
            let mut writer = open(&full, &thread, None).await?;
            for n in 0..full_turns + 4 {
                if n >= full_turns {
                    // A process of its own each time.
                    writer = open(&elsewhere(&store, Delta, frequency).await?, &thread, None).await?;
                }
                said.push(format!("m{n}"));
                let state = turn(&mut writer, &format!("m{n}")).await?;
                check_eq!(ids(&state)?, said, "as it ran, {thread}");
                expected.push((state.key.id, said.clone()));
            }
            let reader = elsewhere(&store, Delta, frequency).await?;
            check_eq!(whole_history(&reader, &thread).await?, expected, "every checkpoint, {thread}");
            let back = elsewhere(&store, Full, frequency).await?.get(&thread.as_str().into(), None).await;
            check_eq!(back.map(|_| ()), Err(Error::ModeMismatch), "the way back without a conversion");
        }
    }
    Ok(())
}

/// <https://github.com/langchain-ai/langgraph/issues/8011>
async fn r8011_an_update_is_the_first_that_a_thread_sees(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (mode, frequency) in MODES {
        for created in [false, true] {
            let (thread, accessor) =
                (format!("{mode:?} {frequency} {created}"), accessor(&saver, mode, frequency)?);
            if created {
                create(&accessor, &thread).await?;
            }
            for n in 1..=4 {
                let state = update(&accessor, &thread, None, vec![says(&accessor, &n.to_string())?]).await?;
                let expected: Vec<String> = (1..=n).map(|n| n.to_string()).collect();
                let read = at(&elsewhere(&store, mode, frequency).await?, &thread, None).await?;
                check_eq!((ids(&state)?, ids(&read)?), (expected.clone(), expected), "{thread}");
            }
        }
    }
    Ok(())
}

/// <https://github.com/langchain-ai/langgraph/issues/8290>
async fn r8290_updates_from_outside_bring_snapshots_at_the_cadence(store: Store) -> Outcome {
    const CADENCE: u64 = 3;
    let saver = store.open().await?;
    let accessor = accessor(&saver, Delta, CADENCE)?;
    create(&accessor, "t").await?;
    for n in 1..=7_u64 {
        // Every process counts on from what is stored.
        let state = update(
            &elsewhere(&store, Delta, CADENCE).await?,
            "t",
            None,
            vec![says(&accessor, &n.to_string())?],
        )
        .await?;
        let kept = stored(&*saver, &state.key, MESSAGES).await?;
        let due = n % CADENCE == 0;
        check_eq!(matches!(kept, Some(Stored::Snapshot(_))), due, "a snapshot at update {n}: {kept:?}");
        check_eq!(kept == Some(Stored::Sentinel), !due, "a sentinel at update {n}: {kept:?}");
        let counted = state.metadata.counters.get(MESSAGES).map(|counters| counters.updates);
        check_eq!(counted, (!due).then_some(n % CADENCE), "the counted updates at update {n}");
    }
    Ok(())
}

/// <https://github.com/langchain-ai/langgraph/issues/8653>
async fn r8653_an_update_by_another_process_keeps_what_is_there(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (mode, frequency) in MODES {
        let (thread, accessor) = (format!("{mode:?} {frequency}"), accessor(&saver, mode, frequency)?);
        create(&accessor, &thread).await?;
        let mut writer = open(&accessor, &thread, None).await?;
        turn(&mut writer, "one").await?;
        turn(&mut writer, "two").await?;
        let other = elsewhere(&store, mode, frequency).await?;
        let title = vec![other.write("title", json!("by another process"), false)?];
        let expected = texts(["one", "two"]);
        check_eq!(ids(&update(&other, &thread, None, title).await?)?, expected, "after a title, {thread}");
        update(&other, &thread, None, vec![says(&other, "three")?]).await?;
        let expected = texts(["one", "two", "three"]);
        check_eq!(ids(&at(&accessor, &thread, None).await?)?, expected, "in the first process, {thread}");
        let stale = turn(&mut writer, "lost").await.map(|_| ());
        check!(matches!(stale, Err(Error::Conflict { .. })), "a writer that did not notice: {stale:?}");
    }
    Ok(())
}

/// <https://github.com/langchain-ai/langgraph/issues/7746>
async fn r7746_a_rarely_written_channel_gets_its_snapshot(store: Store) -> Outcome {
    const BOUND: u64 = threadkeep::cadence::SUPERSTEP_BOUND;
    let saver = store.open().await?;
    let accessor = accessor(&saver, Delta, 1000)?;
    // The counters are set as if enough supersteps had been made to come near the bound.
    let root = Step::first("t", 1).snapshot(MESSAGES, list([])?).commit(&*saver).await?;
    let mut near = Step::after(&root, 2).sentinel(MESSAGES);
    near.commit.metadata.delta_marker = true;
    near.commit.metadata.counters.insert(MESSAGES.into(), Counters { updates: 0, supersteps: BOUND - 3 });
    near.commit(&*saver).await?;
    for left in [2, 1, 0] {
        let title = vec![accessor.write("title", json!(format!("{left} to go")), false)?];
        let state = update(&accessor, "t", None, title).await?;
        let kept = stored(&*saver, &state.key, MESSAGES).await?;
        let expected = if left == 0 { Stored::Snapshot(list([])?) } else { Stored::Sentinel };
        check_eq!(kept, Some(expected), "what is stored {left} supersteps before the bound");
        check_eq!(ids(&at(&accessor, "t", None).await?)?, texts([]), "the messages");
    }
    Ok(())
}

async fn r4_5_messages_have_the_same_ids_at_every_reading(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (mode, frequency) in MODES {
        let (thread, accessor) = (format!("{mode:?} {frequency}"), accessor(&saver, mode, frequency)?);
        create(&accessor, &thread).await?;
        let mut writer = open(&accessor, &thread, None).await?;
        let nameless = || writer.write(MESSAGES, json!([{ "type": "ai", "content": "no id" }]), false);
        let tasks = vec![vec![nameless()?], vec![nameless()?, nameless()?]];
        let live = parallel(&mut writer, tasks, &[1, 0]).await?;
        let named = ids(&live)?;
        check!(
            named.len() == 3 && named.iter().all(|id| !id.is_empty()),
            "the ids that were given: {named:?}"
        );
        for _ in 0..2 {
            let reader = elsewhere(&store, mode, frequency).await?;
            for _ in 0..2 {
                check_eq!(ids(&at(&reader, &thread, None).await?)?, named, "the ids when read, {thread}");
            }
        }
    }
    Ok(())
}

async fn r4_5_what_was_read_before_is_not_changed_by_late_rows(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (mode, frequency) in MODES {
        let (thread, accessor) = (format!("{mode:?} {frequency}"), accessor(&saver, mode, frequency)?);
        create(&accessor, &thread).await?;
        let mut writer = open(&accessor, &thread, None).await?;
        for n in 0..5 {
            turn(&mut writer, &n.to_string()).await?;
        }
        // Read once, so that every cache is filled.
        let mut expected = whole_history(&accessor, &thread).await?;
        for (id, messages) in expected.clone() {
            let state = update(&accessor, &thread, Some(id), vec![says(&accessor, "a fork")?]).await?;
            let row = crate::kit::says(900, "late")?;
            saver.put_writes(&at(&accessor, &thread, Some(id)).await?.key, &row).await?;
            expected.push((state.key.id, [messages, texts(["a fork"])].concat()));
        }
        for reader in [&accessor, &elsewhere(&store, mode, frequency).await?] {
            check_eq!(whole_history(reader, &thread).await?, expected, "every checkpoint of {thread}");
        }
        // The same thread created again: nothing of the old one may be remembered.
        saver.delete_thread(&thread.as_str().into()).await?;
        check_eq!(whole_history(&accessor, &thread).await?, [], "{thread} after its deletion");
        let root = create(&accessor, &thread).await?.key.id;
        let next = turn(&mut open(&accessor, &thread, None).await?, "anew").await?.key.id;
        let expected = vec![(root, texts([])), (next, texts(["anew"]))];
        check_eq!(whole_history(&accessor, &thread).await?, expected, "{thread} in its second life");
    }
    Ok(())
}

/// Starts a superstep of two tasks of which one finishes, and walks away from it.
async fn half_a_step(accessor: &StateAccessor, thread: &str, id: &str) -> Outcome {
    let mut writer = open(accessor, thread, None).await?;
    let task = writer.start_task(&"worker".into(), 0);
    let writes = vec![says(accessor, id)?, accessor.write(LOG, json!([id]), false)?];
    writer.finish_task(task, writes, threadkeep::step::Durability::Now).await?;
    let failed = writer.start_task(&"worker".into(), 1);
    Ok(writer.fail_task(failed, "it broke").await?)
}

fn same_values(read: &StateSnapshot, expected: &StateSnapshot, what: &str) -> Outcome {
    check_eq!(read.values()?, expected.values()?, "{what}");
    Ok(())
}

async fn r4_5_a_cancelled_half_step_leaves_no_trace(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (mode, frequency) in MODES {
        // Many threads: which task comes first is in their random ids.
        for n in 0..6 {
            let (thread, accessor) =
                (format!("{mode:?} {frequency} {n}"), accessor(&saver, mode, frequency)?);
            let id = threadkeep::id::ThreadId::from(thread.as_str());
            create(&accessor, &thread).await?;
            let mut writer = open(&accessor, &thread, None).await?;
            let before = turn(&mut writer, "before").await?;
            for round in ["first", "second"] {
                let point = accessor.capture(&mut accessor.known_head(&id).await?).await?;
                let mut cancelled = open(&accessor, &thread, None).await?;
                turn(&mut cancelled, "of the cancelled run").await?;
                half_a_step(&accessor, &thread, "half a step").await?;
                accessor.restore(&mut cancelled.head().clone(), &point, Map::new()).await?;
                let read = at(&elsewhere(&store, mode, frequency).await?, &thread, None).await?;
                same_values(&read, &before, &format!("{thread} after its {round} rollback"))?;
            }
            let next = turn(&mut open(&accessor, &thread, None).await?, "next").await?;
            check_eq!(ids(&next)?, texts(["before", "next"]), "the next turn of {thread}");
            let read = at(&elsewhere(&store, mode, frequency).await?, &thread, None).await?;
            same_values(&read, &next, &format!("{thread} reloaded"))?;
        }
    }
    Ok(())
}

async fn r4_5_restored_pending_rows_do_not_replay(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (mode, frequency) in MODES {
        let (thread, accessor) = (format!("{mode:?} {frequency}"), accessor(&saver, mode, frequency)?);
        let id = threadkeep::id::ThreadId::from(thread.as_str());
        create(&accessor, &thread).await?;
        turn(&mut open(&accessor, &thread, None).await?, "before").await?;
        half_a_step(&accessor, &thread, "of a failed step").await?;
        let pending = at(&elsewhere(&store, mode, frequency).await?, &thread, None).await?.writes;
        check!(!pending.is_empty(), "nothing is pending in {thread}");
        let point = accessor.capture(&mut accessor.known_head(&id).await?).await?;
        let mut cancelled = open(&accessor, &thread, None).await?;
        turn(&mut cancelled, "of the cancelled run").await?;
        accessor.restore(&mut cancelled.head().clone(), &point, Map::new()).await?;

        let restored = at(&elsewhere(&store, mode, frequency).await?, &thread, None).await?;
        check_eq!(restored.writes, pending, "the pending rows of {thread}");
        check_eq!(ids(&restored)?, texts(["before"]), "the messages of {thread}");
        let live = turn(&mut open(&accessor, &thread, None).await?, "new input").await?;
        check_eq!(ids(&live)?, texts(["before", "new input"]), "the next run of {thread}");
        let read = at(&elsewhere(&store, mode, frequency).await?, &thread, None).await?;
        same_values(&read, &live, &format!("{thread} reloaded"))?;
    }
    Ok(())
}

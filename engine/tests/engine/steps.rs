//! The superstep writer and the state accessor, rule by rule: what is stored where, which write wins, what a crash
//! leaves.

use std::sync::Arc;

use futures::FutureExt as _;
use serde_json::{Map, Value as Json, json};
use threadkeep::channel::Schema;
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, Stored, TaskWrites};
use threadkeep::id::{IdSource, ThreadId, Version};
use threadkeep::metadata::{Counters, Metadata, Source};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{CheckpointSelector, Flush, Saver, StepCommit};
use threadkeep::state::{HistoryQuery, StateAccessor, StateSnapshot, Update};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};
use threadkeep_memory::MemorySaver;

struct Store {
    saver: MemorySaver,
    accessor: StateAccessor,
    thread: ThreadId,
}

fn store(mode: ChannelMode, frequency: u64) -> Store {
    let saver = MemorySaver::new();
    let table = Arc::new(Schema::thread_state().compile(mode, frequency).unwrap());
    let accessor = StateAccessor::new(Arc::new(saver.clone()), table, Arc::new(IdSource::default()));
    Store { saver, accessor, thread: "t".into() }
}

impl Store {
    fn in_mode(&self, mode: ChannelMode) -> StateAccessor {
        let table = Arc::new(Schema::thread_state().compile(mode, 10).unwrap());
        StateAccessor::new(Arc::new(self.saver.clone()), table, Arc::new(IdSource::default()))
    }

    async fn writer(&self) -> StepWriter {
        StepWriter::open(&self.accessor, &self.thread, None).await.unwrap()
    }

    async fn raw(&self, state: &StateSnapshot) -> Stored {
        let tuple = self.saver.get(&CheckpointSelector::at(&state.key)).await.unwrap().unwrap();
        tuple.checkpoint.channels["messages"].stored.clone()
    }

    async fn count(&self) -> usize {
        self.accessor.history(&self.thread, HistoryQuery::default()).await.unwrap().len()
    }
}

fn say(id: &str) -> Json {
    json!([{"type": "human", "content": id, "id": id}])
}

async fn step(writer: &mut StepWriter, message: &str) -> Result<StateSnapshot> {
    let write = writer.write("messages", say(message), false)?;
    let task = writer.start_task(&"n".into(), 0);
    writer.finish_task(task, vec![write], Durability::WithCommit).await?;
    writer.commit(Source::Loop, vec!["n".into()], Map::new()).await.cloned()
}

fn ids(state: &StateSnapshot) -> Vec<String> {
    let messages = state.json("messages").unwrap().unwrap_or_default();
    messages.as_array().into_iter().flatten().map(|m| m["id"].as_str().unwrap().to_owned()).collect()
}

fn counters(state: &StateSnapshot) -> Option<Counters> {
    state.metadata.counters.get("messages").copied()
}

#[tokio::test]
async fn a_snapshot_is_stored_every_k_updates_and_a_sentinel_between() {
    let store = store(ChannelMode::Delta, 3);
    store.accessor.create(&store.thread, Map::new()).await.unwrap();
    let mut writer = store.writer().await;
    for n in 1..=7_u64 {
        let state = step(&mut writer, &format!("m{n}")).await.unwrap();
        assert!(state.metadata.delta_marker);
        match n % 3 {
            0 => {
                assert!(matches!(store.raw(&state).await, Stored::Snapshot(_)), "{n}");
                assert_eq!(counters(&state), None, "the checkpoint of the snapshot has no counters");
            }
            since => {
                assert_eq!(store.raw(&state).await, Stored::Sentinel, "{n}: a raw read shows no list");
                assert_eq!(counters(&state), Some(Counters { updates: since, supersteps: since }));
            }
        }
    }
}

/// As a graph of LangGraph leaves channels that it consumed or does not save.
#[tokio::test]
async fn channels_with_a_version_and_no_value_are_written_as_if_they_never_were() {
    let store = store(ChannelMode::Delta, 3);
    let created = store.accessor.create(&store.thread, Map::new()).await.unwrap();
    let names = ["todos", "goal", "delegations", "viewed_images", "artifacts", "messages"];
    let absent = |(counter, name): (u64, &&str)| {
        let version = Version { counter, random: 7 };
        ((*name).into(), ChannelEntry { version, stored: Stored::Value(ChannelValue::absent()) })
    };
    let commit = StepCommit {
        thread: store.thread.clone(),
        namespace: created.key.namespace.clone(),
        parent: Some(created.key.id),
        expected_head: Some(created.key.id),
        checkpoint: Checkpoint {
            id: store.accessor.ids().checkpoint_after(Some(created.key.id)),
            channels: (1..).zip(&names).map(absent).collect(),
            next: Vec::new(),
            applied: Vec::new(),
        },
        metadata: Metadata::new(Source::Loop, 1),
        writes: Vec::new(),
        pending: Vec::new(),
        flush: Flush::Now,
    };
    store.saver.commit(commit).await.unwrap();
    let values = [
        json!([{"content": "do it", "status": "pending"}]),
        json!({"objective": "reach it"}),
        json!([{"id": "d", "status": "in_progress"}]),
        json!({"a.png": {}}),
        json!(["file"]),
        say("m"),
    ];
    let writes =
        names.iter().zip(&values).map(|(name, value)| store.accessor.write(name, value.clone(), false));
    let writes = writes.collect::<Result<_>>().unwrap();
    let update = Update { at: None, node: "u".into(), writes, extra: Map::new() };
    store.accessor.update(&store.thread, update).await.unwrap();
    let read = store.in_mode(ChannelMode::Delta).get(&store.thread, None).await.unwrap().unwrap();
    for (name, value) in names.iter().zip(values) {
        assert_eq!(read.json(name).unwrap(), Some(value), "{name}");
    }
}

#[tokio::test]
async fn a_full_checkpoint_stores_its_value_and_carries_no_marker() {
    let store = store(ChannelMode::Full, 3);
    let mut writer = store.writer().await;
    let state = step(&mut writer, "a").await.unwrap();
    assert!(matches!(store.raw(&state).await, Stored::Value(_)));
    assert!(!state.metadata.is_delta());
    assert_eq!(state.metadata.step, -1);
}

#[tokio::test]
async fn manual_updates_advance_the_counters_and_snapshot_exactly_at_k() {
    let store = store(ChannelMode::Delta, 3);
    let mut seen = Vec::new();
    for n in 0..7 {
        let writes = vec![store.accessor.write("messages", say(&format!("m{n}")), false).unwrap()];
        let update = Update { at: None, node: "u".into(), writes, extra: Map::new() };
        let state = store.accessor.update(&store.thread, update).await.unwrap();
        seen.push(counters(&state).map(|c| c.updates));
        let read = store.accessor.get(&store.thread, None).await.unwrap().unwrap();
        assert_eq!(ids(&read).len(), n + 1, "an update of a fresh thread is stored and can be read back");
    }
    assert_eq!(seen, [None, Some(1), Some(2), None, Some(1), Some(2), None]);
}

#[tokio::test]
async fn the_gate_refuses_every_read_and_write_of_a_full_process_on_a_delta_thread() {
    let store = store(ChannelMode::Delta, 1);
    step(&mut store.writer().await, "a").await.unwrap();
    let full = store.in_mode(ChannelMode::Full);
    let (thread, count) = (&store.thread, store.count().await);
    let update = Update { at: None, node: "u".into(), writes: Vec::new(), extra: Map::new() };
    let head = store.accessor.get(thread, None).await.unwrap().unwrap();
    let mut known = store.accessor.known_head(thread).await.unwrap();
    for refused in [
        full.get(thread, None).await.map(|_| ()),
        full.check(thread, None).await.map(|_| ()),
        full.history(thread, HistoryQuery::default()).await.map(|_| ()),
        full.history(thread, HistoryQuery { limit: Some(1), ..HistoryQuery::default() }).await.map(|_| ()),
        full.update(thread, update).await.map(|_| ()),
        full.annotate(&head, Map::new()).await.map(|_| ()),
        full.known_head(thread).await.map(|_| ()),
        full.capture(&mut known).await.map(|_| ()),
        full.linearize(&mut known, head.key.id, Map::new()).await.map(|_| ()),
        StepWriter::open(&full, thread, None).await.map(|_| ()),
    ] {
        assert_eq!(refused, Err(Error::ModeMismatch), "the snapshot has no counters, but it has the marker");
    }
    assert_eq!(store.count().await, count, "nothing was written");
    assert!(full.check(&"other".into(), None).await.is_ok_and(|there| !there));
}

#[tokio::test]
async fn a_stale_writer_gets_a_conflict_and_nothing_is_written() {
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        let store = store(mode, 10);
        let mut first = store.writer().await;
        let mut second = store.writer().await;
        step(&mut first, "a").await.unwrap();
        let error = step(&mut second, "b").await.unwrap_err();
        assert!(matches!(error, Error::Conflict { .. }), "{error}");
        assert_eq!(store.count().await, 1);
        assert!(error.to_string().contains("read the head again"), "{error}");
    }
}

#[tokio::test]
async fn a_finished_task_survives_a_crash_and_is_not_run_again() {
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        let store = store(mode, 10);
        let mut writer = store.writer().await;
        writer.commit(Source::Input, vec!["n".into(), "n".into()], Map::new()).await.unwrap();
        let task = writer.start_task(&"n".into(), 1);
        let write = writer.write("messages", say("second"), false).unwrap();
        writer.finish_task(task, vec![write], Durability::Now).await.unwrap();
        drop(writer);

        let mut writer = store.writer().await;
        let recovered: Vec<_> = writer.recovered().iter().map(|row| (row.task, row.index)).collect();
        assert_eq!(recovered.iter().map(|(_, index)| *index).collect::<Vec<_>>(), [1]);
        writer.adopt(recovered[0].0).unwrap();
        let task = writer.start_task(&"n".into(), 0);
        assert!(writer.adopt(task.id).is_err(), "only what is there can be adopted");
        let write = writer.write("messages", say("first"), false).unwrap();
        writer.finish_task(task, vec![write], Durability::WithCommit).await.unwrap();
        let state = writer.commit(Source::Loop, Vec::new(), Map::new()).await.unwrap();
        assert_eq!(ids(state), ["first", "second"], "in the order of the tasks");
        let read = store.accessor.get(&store.thread, None).await.unwrap().unwrap();
        assert_eq!(ids(&read), ["first", "second"]);
    }
}

/// A process stood still before it stored the row of a task, and does so after another one has repeated the task and
/// died.
#[tokio::test]
async fn of_two_finished_attempts_at_a_task_one_is_recovered() {
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        let store = store(mode, 10);
        let mut stale = store.writer().await;
        stale.commit(Source::Input, vec!["n".into(), "n".into()], Map::new()).await.unwrap();
        let mut second = store.writer().await;
        for (index, id) in [(1, "second"), (0, "again"), (0, "late")] {
            let writer = if id == "late" { &mut stale } else { &mut second };
            let task = writer.start_task(&"n".into(), index);
            let write = writer.write("messages", say(id), false).unwrap();
            writer.finish_task(task, vec![write], Durability::Now).await.unwrap();
        }

        let mut next = store.writer().await;
        let recovered: Vec<_> = next.recovered().iter().map(|row| row.task).collect();
        for task in recovered {
            next.adopt(task).unwrap();
        }
        let state = next.commit(Source::Loop, Vec::new(), Map::new()).await.unwrap();
        assert_eq!(ids(state), ["again", "second"]);
        let read = store.accessor.get(&store.thread, None).await.unwrap().unwrap();
        assert_eq!(ids(&read), ["again", "second"]);
    }
}

/// Something else is written before the tasks go on: their checkpoint is another one then.
#[tokio::test]
async fn what_has_finished_can_be_taken_along_to_the_next_checkpoint() {
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        let store = store(mode, 10);
        let both = || vec!["n".into(), "n".into()];
        let mut writer = store.writer().await;
        writer.commit(Source::Input, both(), Map::new()).await.unwrap();
        let task = writer.start_task(&"n".into(), 1);
        let write = writer.write("messages", say("second"), false).unwrap();
        writer.finish_task(task, vec![write], Durability::Now).await.unwrap();
        drop(writer);

        let mut writer = store.writer().await;
        let rows: Vec<_> = writer.recovered().into_iter().cloned().collect();
        let between = writer.start_task(&"other".into(), 0);
        let write = writer.write("messages", say("between"), false).unwrap();
        writer.finish_task(between, vec![write], Durability::WithCommit).await.unwrap();
        writer.begin_with(rows.clone());
        writer.commit(Source::Input, both(), Map::new()).await.unwrap();
        assert_eq!(writer.recovered(), rows.iter().collect::<Vec<_>>());

        let mut writer = store.writer().await;
        assert_eq!(writer.recovered(), rows.iter().collect::<Vec<_>>(), "they are stored");
        writer.adopt(rows[0].task).unwrap();
        let task = writer.start_task(&"n".into(), 0);
        let write = writer.write("messages", say("first"), false).unwrap();
        writer.finish_task(task, vec![write], Durability::WithCommit).await.unwrap();
        let state = writer.commit(Source::Loop, Vec::new(), Map::new()).await.unwrap();
        assert_eq!(ids(state), ["between", "first", "second"]);
        let read = store.accessor.get(&store.thread, None).await.unwrap().unwrap();
        assert_eq!(ids(&read), ["between", "first", "second"]);
    }
}

/// A run that goes on differently drops them, and a commit takes them along once.
#[tokio::test]
async fn rows_are_taken_along_by_one_commit() {
    let store = store(ChannelMode::Full, 10);
    let row =
        TaskWrites { task: store.accessor.ids().task(), node: "n".into(), index: 0, writes: Vec::new() };
    let mut writer = store.writer().await;
    writer.begin_with([row.clone()]);
    writer.discard();
    let created = writer.commit(Source::Input, vec!["n".into()], Map::new()).await.unwrap();
    assert_eq!(created.writes, [], "they were dropped");
    writer.begin_with([row.clone()]);
    let first = writer.commit(Source::Loop, vec!["n".into()], Map::new()).await.unwrap().clone();
    let second = writer.commit(Source::Loop, vec!["n".into()], Map::new()).await.unwrap().clone();
    assert_eq!((&first.writes, &second.writes), (&vec![row.clone()], &Vec::new()));
    let read = async |state: &StateSnapshot| {
        store.accessor.get(&store.thread, Some(state.key.id)).await.unwrap().unwrap().writes
    };
    assert_eq!((read(&first).await, read(&second).await), (vec![row], Vec::new()));
}

#[tokio::test]
async fn a_failed_task_shows_its_error_and_never_replays() {
    let store = store(ChannelMode::Delta, 10);
    let mut writer = store.writer().await;
    writer.commit(Source::Input, vec!["n".into()], Map::new()).await.unwrap();
    let task = writer.start_task(&"n".into(), 0);
    writer.fail_task(task, "the tool broke").await.unwrap();
    let head = store.accessor.get(&store.thread, None).await.unwrap().unwrap();
    assert_eq!(head.tasks()[0].error.as_deref(), Some("the tool broke"));
    assert!(writer.recovered().is_empty(), "a failed task is run again");
    let state = step(&mut store.writer().await, "after").await.unwrap();
    assert_eq!(ids(&state), ["after"]);
}

#[tokio::test]
async fn tasks_that_have_not_run_have_stable_ids() {
    let store = store(ChannelMode::Full, 10);
    let mut writer = store.writer().await;
    writer.commit(Source::Input, vec!["n".into(), "n".into()], Map::new()).await.unwrap();
    let read = || async { store.accessor.get(&store.thread, None).await.unwrap().unwrap().tasks() };
    let (one, two) = (read().await, read().await);
    assert_eq!(one, two);
    assert_ne!(one[0].id, one[1].id);
}

#[tokio::test]
async fn a_writer_whose_commit_was_dropped_refuses_to_go_on() {
    /// A saver whose commits never return.
    struct Silent(MemorySaver);

    #[async_trait::async_trait]
    impl Saver for Silent {
        async fn get(
            &self,
            at: &CheckpointSelector,
        ) -> Result<Option<threadkeep::checkpoint::CheckpointTuple>> {
            self.0.get(at).await
        }
        async fn list(
            &self,
            query: &threadkeep::saver::ListQuery,
        ) -> Result<Vec<threadkeep::checkpoint::CheckpointTuple>> {
            self.0.list(query).await
        }
        async fn put_writes(
            &self,
            at: &threadkeep::checkpoint::CheckpointKey,
            task: &threadkeep::checkpoint::TaskWrites,
        ) -> Result<()> {
            self.0.put_writes(at, task).await
        }
        async fn commit(
            &self,
            _: threadkeep::saver::StepCommit,
        ) -> Result<threadkeep::checkpoint::CheckpointKey> {
            std::future::pending().await
        }
        async fn flush(&self, thread: &ThreadId) -> Result<()> {
            self.0.flush(thread).await
        }
        async fn delta_history(
            &self,
            at: &threadkeep::checkpoint::CheckpointKey,
            channels: &std::collections::BTreeSet<threadkeep::id::ChannelName>,
            reach: Option<threadkeep::id::CheckpointId>,
        ) -> Result<threadkeep::saver::DeltaHistory> {
            self.0.delta_history(at, channels, reach).await
        }
        async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
            self.0.delete_thread(thread).await
        }
        async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
            self.0.threads(after, limit).await
        }
        async fn read_thread(&self, thread: &ThreadId) -> Result<threadkeep::saver::ThreadImage> {
            self.0.read_thread(thread).await
        }
        async fn rewrite_thread(
            &self,
            thread: &ThreadId,
            expected: &threadkeep::saver::Revision,
            rewrite: threadkeep::saver::Rewrite,
        ) -> Result<()> {
            self.0.rewrite_thread(thread, expected, rewrite).await
        }
        fn capabilities(&self) -> threadkeep::saver::Capabilities {
            self.0.capabilities()
        }
    }

    let table = Arc::new(Schema::thread_state().compile(ChannelMode::Full, 1).unwrap());
    let saver = Arc::new(Silent(MemorySaver::new()));
    let accessor = StateAccessor::new(saver, table, Arc::new(IdSource::default()));
    let mut writer = StepWriter::open(&accessor, &"t".into(), None).await.unwrap();
    assert!(step(&mut writer, "a").now_or_never().is_none(), "the commit hangs, and its future is dropped");
    let error = step(&mut writer, "b").await.unwrap_err();
    assert!(matches!(error, Error::InDoubt { .. }), "{error}");
    assert!(error.to_string().contains("open the writer again"), "{error}");
}

#[tokio::test]
async fn a_missing_write_or_ancestor_is_broken_lineage_and_never_an_empty_list() {
    let store = store(ChannelMode::Delta, 100);
    store.accessor.create(&store.thread, Map::new()).await.unwrap();
    let mut writer = store.writer().await;
    let mut states = Vec::new();
    for id in ["a", "b", "c"] {
        states.push(step(&mut writer, id).await.unwrap());
    }
    assert!(store.saver.lose_writes(&states[0].key, states[1].applied[0]));
    // An accessor that has not cached the head.
    let reader = store.in_mode(ChannelMode::Delta);
    let error = reader.get(&store.thread, None).await.unwrap_err();
    assert!(matches!(error, Error::BrokenLineage { .. }), "{error}");
    assert!(error.to_string().contains(&states[1].key.id.to_string()), "it names the checkpoint: {error}");
    let before = reader.get(&store.thread, Some(states[0].key.id)).await.unwrap().unwrap();
    assert_eq!(ids(&before), ["a"], "what lies before the gap is not affected");
}

#[tokio::test]
async fn an_update_of_an_unknown_checkpoint_or_channel_writes_nothing() {
    let store = store(ChannelMode::Delta, 10);
    store.accessor.create(&store.thread, Map::new()).await.unwrap();
    let unknown = IdSource::default().checkpoint_after(None);
    let update = Update { at: Some(unknown), node: "u".into(), writes: Vec::new(), extra: Map::new() };
    let error = store.accessor.update(&store.thread, update).await.unwrap_err();
    assert!(matches!(error, Error::NotFound { checkpoint, .. } if checkpoint == unknown));
    let error = store.accessor.write("nonsense", json!(1), false).unwrap_err();
    assert!(error.to_string().contains("nonsense"), "{error}");
    assert_eq!(store.count().await, 1);
}

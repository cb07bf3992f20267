use std::collections::BTreeSet;
use std::sync::Mutex;

use serde_json::Map;
use threadkeep::channel::Schema;
use threadkeep::checkpoint::{ChannelEntry, CheckpointKey, CheckpointTuple, Stored, TaskWrites, Write};
use threadkeep::id::{ChannelName, IdSource};
use threadkeep::metadata::Source;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, ListQuery, Revision, Rewrite, Saver, StepCommit,
    ThreadImage,
};
use threadkeep::state::{HistoryQuery, Update};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::value::ChannelValue;
use threadkeep_memory::MemorySaver;

use super::*;

fn accessor(mode: ChannelMode) -> StateAccessor {
    let table = Schema::thread_state().compile(mode, 3).unwrap();
    StateAccessor::new(Arc::new(MemorySaver::default()), Arc::new(table), Arc::new(IdSource::default()))
}

fn notes(run: &str, seconds: u64, message: &str) -> RunNotes {
    RunNotes {
        durations: [(run.to_owned(), seconds)].into(),
        messages: [(message.to_owned(), run.to_owned())].into(),
    }
}

async fn say(accessor: &StateAccessor, thread: &ThreadId, text: &str) -> StateSnapshot {
    let message = json!([{"type": "human", "content": text, "id": text}]);
    let writes = vec![accessor.write("messages", message, false).unwrap()];
    let update = Update { at: None, node: "n".into(), writes, extra: Map::new() };
    accessor.update(thread, update).await.unwrap()
}

#[tokio::test]
async fn a_note_repeats_the_head_and_carries_earlier_maps_forward() {
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        let (accessor, thread) = (accessor(mode), ThreadId::from("t"));
        accessor.create(&thread, Map::new()).await.unwrap();
        say(&accessor, &thread, "one").await;
        let first = note(&accessor, &thread, None, &notes("r1", 4, "one")).await.unwrap().unwrap();
        assert!(first.metadata.is_duration_only());
        let head = say(&accessor, &thread, "two").await;
        let second = note(&accessor, &thread, None, &notes("r2", 0, "two")).await.unwrap().unwrap();
        assert_eq!(second.parent, Some(head.key.id));
        assert_eq!(second.metadata.step, head.metadata.step + 1);
        assert_eq!(second.metadata.counters, head.metadata.counters, "counters are inherited, not advanced");
        assert_eq!(second.metadata.delta_marker, head.metadata.delta_marker);
        assert_eq!(second.metadata.extra[RUN_DURATIONS], json!({"r1": 4, "r2": 0}));
        assert_eq!(second.metadata.extra[RUN_MESSAGE_IDS], json!({"one": "r1", "two": "r2"}));
        assert_eq!(
            second.metadata.extra["writes"],
            json!({"runtime_run_duration": {"run_ids": ["r2"], "message_ids": ["two"]}})
        );
        let read = accessor.get(&thread, None).await.unwrap().unwrap();
        assert_eq!(read.values().unwrap(), head.values().unwrap(), "{mode}");
        assert_eq!(read.version("messages"), head.version("messages"));
    }
}

#[tokio::test]
async fn noting_the_same_again_or_nothing_writes_nothing() {
    let (accessor, thread) = (accessor(ChannelMode::Full), ThreadId::from("t"));
    assert_eq!(note(&accessor, &thread, None, &notes("r", 1, "m")).await.unwrap(), None, "no head");
    accessor.create(&thread, Map::new()).await.unwrap();
    assert!(note(&accessor, &thread, None, &notes("r", 1, "m")).await.unwrap().is_some());
    assert_eq!(note(&accessor, &thread, None, &notes("r", 1, "m")).await.unwrap(), None);
    assert_eq!(note(&accessor, &thread, None, &RunNotes::default()).await.unwrap(), None);
    let all = accessor.history(&thread, HistoryQuery::default()).await.unwrap();
    assert_eq!(all.len(), 2);
}

#[tokio::test]
async fn a_run_that_waits_for_the_user_is_not_noted_over() {
    let (accessor, thread) = (accessor(ChannelMode::Full), ThreadId::from("t"));
    let head = accessor.create(&thread, Map::new()).await.unwrap();
    let question = Write {
        channel: INTERRUPT_CHANNEL.into(),
        value: ChannelValue::from_json(&json!([{"value": "which one?"}])).unwrap(),
        overwrite: false,
    };
    let row = TaskWrites { task: accessor.ids().task(), node: "n".into(), index: 0, writes: vec![question] };
    accessor.saver().put_writes(&head.key, &row).await.unwrap();
    assert_eq!(note(&accessor, &thread, None, &notes("r", 1, "m")).await.unwrap(), None);
    let still = accessor.get(&thread, None).await.unwrap().unwrap();
    assert_eq!((still.key, still.writes), (head.key, vec![row]), "its question is still on the head");
}

/// A run that goes on looks for the rows of finished tasks on the head.
#[tokio::test]
async fn a_head_with_tasks_left_is_not_noted_over() {
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        let (accessor, thread) = (accessor(mode), ThreadId::from("t"));
        let mut writer = StepWriter::open(&accessor, &thread, None).await.unwrap();
        writer.commit(Source::Input, vec!["n".into(), "n".into()], Map::new()).await.unwrap();
        let task = writer.start_task(&"n".into(), 0);
        writer.finish_task(task, Vec::new(), Durability::Now).await.unwrap();
        let head = accessor.get(&thread, None).await.unwrap().unwrap();
        for own in [None, Some(head.key.id)] {
            assert_eq!(note(&accessor, &thread, own, &notes("r", 1, "m")).await.unwrap(), None, "{mode}");
        }
        let writer = StepWriter::open(&accessor, &thread, None).await.unwrap();
        assert_eq!(writer.recovered().len(), 1, "{mode}");
    }
}

#[tokio::test]
async fn two_writers_at_once_both_end_up_in_the_maps() {
    let (accessor, thread) = (accessor(ChannelMode::Delta), ThreadId::from("t"));
    accessor.create(&thread, Map::new()).await.unwrap();
    let (a, b) = (notes("a", 1, "ma"), notes("b", 2, "mb"));
    let (a, b) = tokio::join!(note(&accessor, &thread, None, &a), note(&accessor, &thread, None, &b));
    assert!(a.unwrap().is_some() && b.unwrap().is_some());
    let head = accessor.get(&thread, None).await.unwrap().unwrap();
    assert_eq!(head.metadata.extra[RUN_DURATIONS], json!({"a": 1, "b": 2}));
}

/// Lets another writer commit before the next commit.
struct Crowded {
    inner: MemorySaver,
    others: Mutex<Vec<StepCommit>>,
}

#[async_trait::async_trait]
impl Saver for Crowded {
    async fn get(&self, at: &CheckpointSelector) -> threadkeep::Result<Option<CheckpointTuple>> {
        self.inner.get(at).await
    }

    async fn list(&self, query: &ListQuery) -> threadkeep::Result<Vec<CheckpointTuple>> {
        self.inner.list(query).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> threadkeep::Result<()> {
        self.inner.put_writes(at, task).await
    }

    async fn commit(&self, step: StepCommit) -> threadkeep::Result<CheckpointKey> {
        let other = self.others.lock().unwrap().pop();
        if let Some(other) = other {
            self.inner.commit(other).await?;
        }
        self.inner.commit(step).await
    }

    async fn flush(&self, thread: &ThreadId) -> threadkeep::Result<()> {
        self.inner.flush(thread).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> threadkeep::Result<DeltaHistory> {
        self.inner.delta_history(at, channels, reach).await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> threadkeep::Result<()> {
        self.inner.delete_thread(thread).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> threadkeep::Result<Vec<ThreadId>> {
        self.inner.threads(after, limit).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> threadkeep::Result<ThreadImage> {
        self.inner.read_thread(thread).await
    }

    async fn rewrite_thread(
        &self,
        thread: &ThreadId,
        expected: &Revision,
        rewrite: Rewrite,
    ) -> threadkeep::Result<()> {
        self.inner.rewrite_thread(thread, expected, rewrite).await
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}

/// A commit, not yet executed, that writes a title on the head.
async fn titling(saver: &MemorySaver, thread: &ThreadId) -> StepCommit {
    let head = saver.get(&CheckpointSelector::head(thread)).await.unwrap().unwrap();
    let ids = IdSource::default();
    let mut checkpoint = head.checkpoint.clone();
    checkpoint.id = ids.checkpoint_after(Some(head.checkpoint.id));
    checkpoint.applied.clear();
    for entry in checkpoint.channels.values_mut() {
        entry.stored = Stored::Held;
    }
    let value = ChannelValue::from_json(&json!("a title")).unwrap();
    let title = ChannelEntry { version: ids.version_after(None), stored: Stored::Value(value) };
    checkpoint.channels.insert("title".into(), title);
    StepCommit {
        thread: thread.clone(),
        namespace: head.namespace,
        parent: Some(head.checkpoint.id),
        expected_head: Some(head.checkpoint.id),
        checkpoint,
        metadata: head.metadata,
        writes: Vec::new(),
        pending: Vec::new(),
        flush: Flush::Now,
    }
}

#[tokio::test]
async fn a_title_that_comes_between_is_noted_on() {
    let thread = ThreadId::from("t");
    let memory = MemorySaver::default();
    let crowded = Arc::new(Crowded { inner: memory.clone(), others: Mutex::default() });
    let table = Arc::new(Schema::thread_state().compile(ChannelMode::Delta, 3).unwrap());
    let accessor = StateAccessor::new(crowded.clone(), table, Arc::new(IdSource::default()));
    accessor.create(&thread, Map::new()).await.unwrap();
    say(&accessor, &thread, "one").await;
    let title = titling(&memory, &thread).await;
    crowded.others.lock().unwrap().push(title.clone());
    let noted = note(&accessor, &thread, None, &notes("r", 4, "one")).await.unwrap().unwrap();
    assert_eq!(noted.parent, Some(title.checkpoint.id), "the note is on the intervening checkpoint");
    let read = accessor.get(&thread, None).await.unwrap().unwrap();
    assert_eq!(read.json("title").unwrap(), Some(json!("a title")));
    assert_eq!(read.key.id, noted.key.id);
}

/// Rows of a superstep that failed half-way are on the head, and do not belong to what the note repeats.
#[tokio::test]
async fn a_note_on_leftover_rows_repeats_the_head_and_nothing_else() {
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        let (accessor, thread) = (accessor(mode), ThreadId::from("t"));
        accessor.create(&thread, Map::new()).await.unwrap();
        let head = say(&accessor, &thread, "one").await;
        let message = json!([{"type": "ai", "content": "left over", "id": "two"}]);
        let writes = vec![accessor.write("messages", message, false).unwrap()];
        let row = TaskWrites { task: accessor.ids().task(), node: "n".into(), index: 0, writes };
        accessor.saver().put_writes(&head.key, &row).await.unwrap();
        let noted = note(&accessor, &thread, None, &notes("r", 1, "one")).await.unwrap().unwrap();
        for at in [None, Some(noted.key.id), Some(head.key.id)] {
            let read = accessor.get(&thread, at).await.unwrap().unwrap();
            assert_eq!(read.values().unwrap(), head.values().unwrap(), "{mode}");
        }
        let next = say(&accessor, &thread, "three").await;
        assert_eq!(next.json("messages").unwrap().unwrap().as_array().unwrap().len(), 2, "{mode}");
    }
}

#[test]
fn malformed_entries_are_dropped() {
    let extra = json!({"run_durations": {"": 1, "a": -1, "b": true, "c": 2}, "run_message_ids": {"m": 3, "n": "r", "": "r"}});
    let maps = NotedMaps::of(&extra.as_object().unwrap().clone().into());
    let notes = maps.notes();
    assert_eq!(notes.durations, [("c".to_owned(), 2)].into());
    assert_eq!(notes.messages, [("n".to_owned(), "r".to_owned())].into());
    let mut carried = Extra::default();
    maps.carry_to(&mut carried);
    assert_eq!(carried[RUN_DURATIONS], json!({"c": 2}));
    assert_eq!(carried[RUN_MESSAGE_IDS], json!({"n": "r"}));
}

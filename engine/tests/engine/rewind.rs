//! Going back: resuming from an older checkpoint, and rolling back. Random programs of both yield the same state in
//! full mode, where they fork, and in delta mode, where they continue in one line.

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Map, Value as Json, json};
use threadkeep::channel::Schema;
use threadkeep::checkpoint::TaskWrites;
use threadkeep::deletion::{Boundary, Keep, Prune, prune};
use threadkeep::id::{CheckpointId, IdSource, NodeName, ThreadId};
use threadkeep::metadata::Source;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::Saver;
use threadkeep::state::{HistoryQuery, KnownHead, RollbackPoint, StateAccessor, StateSnapshot};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::{Error, Result};
use threadkeep_memory::MemorySaver;
use threadkeep_sqlite::{Options, SqliteSaver};

struct Store {
    saver: Arc<dyn Saver>,
    mode: (ChannelMode, u64),
    accessor: StateAccessor,
    thread: ThreadId,
}

impl Store {
    fn new(saver: Arc<dyn Saver>, mode: (ChannelMode, u64)) -> Self {
        let accessor = accessor(&saver, mode);
        Self { saver, mode, accessor, thread: "t".into() }
    }

    async fn head(&self) -> StateSnapshot {
        self.accessor.get(&self.thread, None).await.unwrap().unwrap()
    }

    async fn history(&self) -> Vec<StateSnapshot> {
        self.accessor.history(&self.thread, HistoryQuery::default()).await.unwrap()
    }

    /// A superstep on a checkpoint, or on the head, that writes these channels and continues with `next`.
    async fn step(&self, at: Option<CheckpointId>, values: &Json, next: &[&str]) -> StateSnapshot {
        let mut writer = StepWriter::open(&self.accessor, &self.thread, at).await.unwrap();
        let task = writer.start_task(&"n".into(), 0);
        let writes = values.as_object().unwrap().iter();
        let writes =
            writes.map(|(channel, value)| writer.write(channel, value.clone(), false).unwrap()).collect();
        writer.finish_task(task, writes, Durability::WithCommit).await.unwrap();
        let next = next.iter().map(|node| NodeName::from(*node)).collect();
        writer.commit(Source::Loop, next, Map::new()).await.unwrap().clone()
    }

    /// Leaves the row of a finished task on the head.
    async fn pend(&self, id: &str) -> TaskWrites {
        let head = self.head().await;
        let write = self.accessor.write("messages", say(id), false).unwrap();
        let task = self.accessor.ids().task();
        let row = TaskWrites { task, node: "n".into(), index: 0, writes: vec![write] };
        self.saver.put_writes(&head.key, &row).await.unwrap();
        row
    }

    async fn known(&self) -> KnownHead {
        self.accessor.known_head(&self.thread).await.unwrap()
    }

    async fn capture(&self) -> RollbackPoint {
        self.accessor.capture(&mut self.known().await).await.unwrap()
    }

    /// Restores like a run that wrote the head.
    async fn restore(&self, point: &RollbackPoint) -> Option<StateSnapshot> {
        self.accessor.restore(&mut self.known().await, point, Map::new()).await.unwrap()
    }

    async fn linearize(&self, at: CheckpointId, extra: Map<String, Json>) -> Result<Option<StateSnapshot>> {
        self.accessor.linearize(&mut self.known().await, at, extra).await
    }

    /// The head as read by an accessor without a cache.
    async fn reloaded(&self) -> StateSnapshot {
        accessor(&self.saver, self.mode).get(&self.thread, None).await.unwrap().unwrap()
    }
}

fn accessor(saver: &Arc<dyn Saver>, (mode, frequency): (ChannelMode, u64)) -> StateAccessor {
    let table = Schema::thread_state().compile(mode, frequency).unwrap();
    StateAccessor::new(Arc::clone(saver), Arc::new(table), Arc::new(IdSource::default()))
}

fn memory(mode: ChannelMode) -> Store {
    Store::new(Arc::new(MemorySaver::new()), (mode, 3))
}

fn say(id: &str) -> Json {
    json!([{"type": "human", "content": id, "id": id}])
}

#[tokio::test]
async fn a_resume_restores_every_channel_and_what_was_to_run_next_onto_the_head() {
    let store = memory(ChannelMode::Delta);
    store.step(None, &json!({"messages": say("a"), "artifacts": ["x"], "title": "first"}), &[]).await;
    let selected =
        store.step(None, &json!({"messages": say("b"), "todos": ["y"]}), &["tools", "tools"]).await;
    store.pend("of the selected one").await;
    let later = json!({"messages": say("c"), "artifacts": ["z"], "title": "later", "summary_text": "s", "viewed_images": {"i": 1}});
    let head = store.step(None, &later, &["model"]).await;
    let extra = Map::from_iter([("svc_agent_name".to_owned(), json!("writer"))]);
    let restored = store.linearize(selected.key.id, extra.clone()).await.unwrap().unwrap();
    assert_eq!((restored.parent, restored.metadata.step), (Some(head.key.id), head.metadata.step + 1));
    assert_eq!((restored.metadata.source, &*restored.metadata.extra), (Source::Update, &extra));
    assert_eq!(
        (&restored.next, restored.writes.len()),
        (&selected.next, 0),
        "its own rows stay where they are"
    );
    let mut expected = selected.values().unwrap();
    expected.insert("summary_text".to_owned(), Json::Null);
    expected.insert("viewed_images".to_owned(), json!({}));
    assert_eq!(restored.values().unwrap(), expected);
    let read = store.reloaded().await;
    assert_eq!((read.values().unwrap(), read.next), (expected, selected.next), "live == reload");
    let old = store.accessor.get(&store.thread, Some(head.key.id)).await.unwrap().unwrap();
    assert_eq!(old.values().unwrap(), head.values().unwrap());
}

#[tokio::test]
async fn a_resume_from_the_head_from_nowhere_or_in_full_mode_writes_nothing() {
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        let store = memory(mode);
        let older = store.step(None, &json!({"messages": say("a")}), &[]).await.key.id;
        let head = store.step(None, &json!({"messages": say("b")}), &[]).await.key.id;
        let linearize = async |at| store.linearize(at, Map::new()).await;
        assert_eq!(linearize(head).await.unwrap(), None);
        if mode == ChannelMode::Full {
            assert_eq!(linearize(older).await.unwrap(), None);
        } else {
            let unknown = store.accessor.ids().checkpoint_after(Some(head));
            assert!(
                matches!(linearize(unknown).await, Err(Error::NotFound { checkpoint, .. }) if checkpoint == unknown)
            );
        }
        assert_eq!(store.history().await.len(), 2);
        let mut empty = store.accessor.known_head(&"empty".into()).await.unwrap();
        let nowhere = store.accessor.linearize(&mut empty, older, Map::new()).await;
        assert!(matches!(nowhere, Err(Error::NotFound { .. })));
    }
}

#[tokio::test]
async fn a_rollback_restores_what_was_to_run_next_and_the_pending_rows() {
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        let store = memory(mode);
        let before = store.step(None, &json!({"messages": say("a"), "title": "t"}), &["n", "n"]).await;
        let row = store.pend("finished").await;
        let point = store.capture().await;
        store.step(None, &json!({"messages": say("b"), "title": "other"}), &["model"]).await;
        let cancelled = store.step(None, &json!({"messages": say("c")}), &["model"]).await;
        store.pend("of the cancelled run").await;
        let restored = store.restore(&point).await.unwrap();
        let parent = if mode == ChannelMode::Delta { &cancelled } else { &before };
        assert_eq!(restored.parent, Some(parent.key.id));
        assert!(restored.key.id > cancelled.key.id, "the newest");
        let read = store.reloaded().await;
        assert_eq!((&read.key, &read.writes, &read.next), (&restored.key, &vec![row.clone()], &before.next));
        assert_eq!(read.values().unwrap(), before.values().unwrap());

        // The finished task does not run again, and its writes replay once.
        let mut writer = StepWriter::open(&store.accessor, &store.thread, None).await.unwrap();
        assert_eq!(writer.recovered(), [&row]);
        writer.adopt(row.task).unwrap();
        let live = writer.commit(Source::Loop, Vec::new(), Map::new()).await.unwrap().clone();
        assert_eq!(store.reloaded().await.values().unwrap(), live.values().unwrap(), "live == reload");
        assert_eq!(live.json("messages").unwrap().unwrap().as_array().unwrap().len(), 2);
    }
}

/// An operator's prune beside the run, which leaves only what the run has written.
#[tokio::test]
async fn a_rollback_to_a_state_that_was_pruned_since_is_written_onto_the_head() {
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        let dir = tempfile::tempdir().unwrap();
        let sqlite = SqliteSaver::open(dir.path().join("db"), &Options::default()).unwrap();
        for store in [memory(mode), Store::new(Arc::new(sqlite), (mode, 3))] {
            let before = store.step(None, &json!({"messages": say("a"), "title": "t"}), &["n", "n"]).await;
            let row = store.pend("finished").await;
            let point = store.capture().await;
            let more = json!({"messages": say("b"), "title": "other", "summary_text": "s"});
            let cancelled = store.step(None, &more, &["model"]).await;
            let latest = Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(Keep::Latest) };
            prune(&*store.saver, &store.thread, &latest, store.accessor.table()).await.unwrap();
            assert_eq!(store.history().await.len(), 1);

            let restored = store.restore(&point).await.unwrap();
            assert_eq!(restored.parent, Some(cancelled.key.id), "{mode}");
            let mut expected = before.values().unwrap();
            expected.insert("summary_text".to_owned(), Json::Null);
            let read = store.reloaded().await;
            assert_eq!(read.values().unwrap(), expected, "{mode}");
            assert_eq!((&read.key, &read.writes, &read.next), (&restored.key, &vec![row], &before.next));
        }
    }
}

#[tokio::test]
async fn a_rollback_writes_nothing_where_nothing_was_written_and_sheds_rows_that_were() {
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        let store = memory(mode);
        let point = store.capture().await;
        store.step(None, &json!({"messages": say("a")}), &["n", "n"]).await;
        assert_eq!(store.restore(&point).await, None, "there was nothing");
        assert_eq!(store.history().await.len(), 0);

        let before = store.step(None, &json!({"messages": say("a")}), &["n", "n"]).await;
        let point = store.capture().await;
        assert_eq!(store.restore(&point).await.unwrap().key, before.key);
        assert_eq!(store.history().await.len(), 1);
        store.pend("of a cancelled superstep").await;
        let restored = store.restore(&point).await.unwrap();
        assert_eq!((restored.writes.len(), &restored.next), (0, &before.next));
        assert_eq!(store.reloaded().await.values().unwrap(), before.values().unwrap());
    }
}

#[derive(Debug, Clone)]
enum Op {
    /// A superstep that writes these of the channels.
    Step([bool; 4]),
    /// One on a checkpoint this many turns earlier.
    Resume(usize, [bool; 4]),
    /// This many supersteps, possibly after a resume, which are rolled back.
    Rollback(usize, Option<usize>),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => any::<[bool; 4]>().prop_map(Op::Step),
        3 => (0..6_usize, any::<[bool; 4]>()).prop_map(|(back, channels)| Op::Resume(back, channels)),
        2 => (0..4_usize, prop::option::of(0..6_usize)).prop_map(|(steps, back)| Op::Rollback(steps, back)),
    ]
}

/// The values written to these channels in this round.
fn values(round: usize, channels: [bool; 4]) -> Json {
    let id = format!("m{round}");
    let all = [
        ("messages", say(&id)),
        ("artifacts", json!([id])),
        ("summary_text", json!(id)),
        ("viewed_images", json!({ id.as_str(): round })),
    ];
    all.into_iter()
        .zip(channels)
        .filter(|(_, written)| *written)
        .map(|((name, value), _)| (name.to_owned(), value))
        .collect()
}

/// Starts a run on the state `back` turns ago, as the gateway does.
async fn resume(store: &Store, turns: &[CheckpointId], back: usize) -> Option<CheckpointId> {
    let selected = turns[turns.len().saturating_sub(back + 1)];
    let restored = store.linearize(selected, Map::new()).await.unwrap();
    if restored.is_some() { None } else { Some(selected) }
}

/// The heads after each operation; channels that were reset and channels that never existed count as equal.
async fn play(store: &Store, ops: &[Op]) -> Vec<Map<String, Json>> {
    let mut turns = vec![store.step(None, &values(0, [true; 4]), &[]).await.key.id];
    let mut heads = Vec::new();
    for (round, op) in (1..).zip(ops) {
        match op {
            Op::Step(channels) => turns.push(store.step(None, &values(round, *channels), &[]).await.key.id),
            Op::Resume(back, channels) => {
                let at = resume(store, &turns, *back).await;
                turns.push(store.step(at, &values(round, *channels), &[]).await.key.id);
            }
            Op::Rollback(steps, back) => {
                let point = store.capture().await;
                let mut at = match back {
                    Some(back) => resume(store, &turns, *back).await,
                    None => None,
                };
                for step in 0..*steps {
                    store.step(at.take(), &values(1000 * round + step, [true; 4]), &["n"]).await;
                    store.pend(&format!("p{round}-{step}")).await;
                }
                let restored = store.restore(&point).await.unwrap();
                turns.push(restored.key.id);
            }
        }
        let head = store.head().await;
        assert_eq!(store.reloaded().await.values().unwrap(), head.values().unwrap(), "live == reload");
        let mut values = head.values().unwrap();
        values.retain(|_, value| !value.is_null() && *value != json!([]) && *value != json!({}));
        heads.push(values);
    }
    heads
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn resumes_and_rollbacks_leave_the_same_in_every_mode(ops in prop::collection::vec(op(), 1..12)) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let dir = tempfile::tempdir().unwrap();
            let mut played = Vec::new();
            for mode in [(ChannelMode::Full, 1), (ChannelMode::Delta, 1), (ChannelMode::Delta, 2), (ChannelMode::Delta, 10)] {
                let store = Store::new(Arc::new(MemorySaver::new()), mode);
                played.push(play(&store, &ops).await);
            }
            let sqlite = SqliteSaver::open(dir.path().join("t.db"), &Options::default()).unwrap();
            played.push(play(&Store::new(Arc::new(sqlite), (ChannelMode::Delta, 3)), &ops).await);
            for other in &played[1..] {
                prop_assert_eq!(&played[0], other);
            }
            Ok(())
        })?;
    }
}

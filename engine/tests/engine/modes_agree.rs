//! Random programs of supersteps, forks, updates, annotations and abandoned rows: the state at *every* checkpoint
//! equals the naive model's, in full mode and in delta mode with any cadence, live and after reading it back.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Map, Value as Json, json};
use threadkeep::cache::{CachedSaver, HistoryCache, MemoryCache};
use threadkeep::channel::{Behaviour, Fold, Schema};
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, Stored, TaskWrites, Write};
use threadkeep::id::{CheckpointId, IdSource, Namespace, NodeName, ThreadId};
use threadkeep::metadata::{Metadata, Source};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{Flush, Load, Saver, StepCommit};
use threadkeep::state::{HistoryQuery, StateAccessor, StateSnapshot, Update};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};
use threadkeep_memory::MemorySaver;
use threadkeep_sqlite::{Options, SqliteSaver, Synchronous};

#[derive(Debug, Clone)]
struct W {
    channel: &'static str,
    value: Json,
    overwrite: bool,
}

#[derive(Debug, Clone)]
enum Op {
    /// A superstep from the head; its tasks finish in this order (reversed or not), some are stored at once.
    Step { tasks: Vec<Vec<W>>, reversed: bool, early: bool },
    /// A superstep from an older checkpoint.
    Fork { at: usize, tasks: Vec<Vec<W>> },
    /// An update on an older checkpoint or the head.
    Update { at: Option<usize>, writes: Vec<W> },
    /// A duration-only checkpoint.
    Annotate,
    /// A task whose rows stay pending because its superstep is abandoned.
    Abandon { writes: Vec<W> },
    /// Opens the writer again.
    Reopen,
}

fn message(id: u8, text: u8) -> Json {
    json!({"type": "ai", "content": format!("text {text}"), "id": format!("m{id}")})
}

fn write() -> impl Strategy<Value = W> {
    let messages = |value| W { channel: "messages", value, overwrite: false };
    prop_oneof![
        8 => prop::collection::vec((0..12_u8, any::<u8>()), 1..4)
            .prop_map(move |m| messages(m.into_iter().map(|(id, text)| message(id, text)).collect())),
        1 => (0..12_u8).prop_map(move |id| messages(json!([{"type": "remove", "id": format!("m{id}"), "content": ""}]))),
        1 => Just(messages(json!([{"type": "remove", "id": "__remove_all__", "content": ""}]))),
        1 => (0..12_u8, any::<u8>()).prop_map(|(id, text)| W {
            channel: "messages", value: json!([message(id, text)]), overwrite: true
        }),
        1 => Just(W { channel: "messages", value: Json::Null, overwrite: true }),
        4 => any::<u8>().prop_map(|v| W { channel: "log", value: json!([v]), overwrite: false }),
        1 => any::<u8>().prop_map(|v| W { channel: "log", value: json!([v]), overwrite: true }),
        2 => any::<u8>().prop_map(|v| W { channel: "title", value: json!(format!("title {v}")), overwrite: false }),
        2 => (0..4_u8).prop_map(|v| W { channel: "artifacts", value: json!([v]), overwrite: false }),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let writes = || prop::collection::vec(write(), 0..4);
    let tasks = || prop::collection::vec(writes(), 0..4);
    prop_oneof![
        8 => (tasks(), any::<bool>(), any::<bool>())
            .prop_map(|(tasks, reversed, early)| Op::Step { tasks, reversed, early }),
        2 => (any::<usize>(), tasks()).prop_map(|(at, tasks)| Op::Fork { at, tasks }),
        2 => (prop::option::of(any::<usize>()), writes()).prop_map(|(at, writes)| Op::Update { at, writes }),
        1 => Just(Op::Annotate),
        1 => writes().prop_map(|writes| Op::Abandon { writes }),
        1 => Just(Op::Reopen),
    ]
}

/// The naive model: a whole copy of the state at every checkpoint.
#[derive(Debug, Clone, Default, PartialEq)]
struct ModelState(BTreeMap<&'static str, Json>);

impl ModelState {
    fn apply(&self, writes: &[W]) -> Option<Self> {
        let mut next = self.clone();
        for channel in ["messages", "log", "title", "artifacts"] {
            let writes: Vec<&W> = writes.iter().filter(|w| w.channel == channel).collect();
            let overwrites: Vec<&&W> = writes.iter().filter(|w| w.overwrite).collect();
            let mut list = next.0.get(channel).and_then(Json::as_array).cloned().unwrap_or_default();
            match (channel, &writes[..], &overwrites[..]) {
                (_, [], _) => continue,
                ("title", [one], _) => {
                    next.0.insert(channel, one.value.clone());
                    continue;
                }
                ("title", ..) | (_, _, [_, _, ..]) => return None,
                (_, _, [one]) => list = one.value.as_array().cloned().unwrap_or_default(),
                ("messages", many, []) => {
                    for m in many.iter().flat_map(|w| w.value.as_array().unwrap()) {
                        let place = list.iter().position(|have| have["id"] == m["id"]);
                        match (m["type"] == "remove", place) {
                            (true, _) if m["id"] == "__remove_all__" => list.clear(),
                            (true, Some(i)) => drop(list.remove(i)),
                            (true, None) => return None,
                            (false, Some(i)) => list[i] = m.clone(),
                            (false, None) => list.push(m.clone()),
                        }
                    }
                }
                (_, many, []) => {
                    for v in many.iter().flat_map(|w| w.value.as_array().unwrap()) {
                        if channel != "artifacts" || !list.contains(v) {
                            list.push(v.clone());
                        }
                    }
                }
            }
            next.0.insert(channel, Json::Array(list));
        }
        Some(next)
    }

    fn json(&self) -> Map<String, Json> {
        self.0.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
    }
}

fn schema() -> Schema {
    let concat = Fold::new(Some(json!([])), |a, b| match (a, b) {
        (Json::Array(a), Json::Array(b)) => Ok(a.into_iter().chain(b).collect()),
        _ => Err(Error::InvalidUpdate("lists only".into())),
    });
    Schema::thread_state().with("log", Behaviour::Accumulating(Arc::new(concat)))
}

/// A store under test; reopening one on disk reads everything back from the file.
enum Store {
    Memory(MemorySaver),
    Cached(MemorySaver, Arc<dyn HistoryCache>),
    Sqlite { dir: tempfile::TempDir, saver: Arc<SqliteSaver> },
}

impl Store {
    fn cached(max_entries: usize) -> Self {
        let cache = MemoryCache::new(NonZeroUsize::new(max_entries).unwrap());
        Self::Cached(MemorySaver::default(), Arc::new(cache))
    }

    fn sqlite() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let saver = Self::open(dir.path());
        Self::Sqlite { dir, saver }
    }

    fn open(dir: &std::path::Path) -> Arc<SqliteSaver> {
        let options = Options { synchronous: Synchronous::Normal, ..Options::default() };
        Arc::new(SqliteSaver::open(dir.join("checkpoints.db"), &options).unwrap())
    }

    async fn reopen(&mut self) {
        if let Self::Sqlite { dir, saver } = self {
            saver.close().await;
            *saver = Self::open(dir.path());
        }
    }

    fn accessor(&self, mode: ChannelMode, frequency: u64) -> StateAccessor {
        let saver: Arc<dyn Saver> = match self {
            Self::Memory(saver) => Arc::new(saver.clone()),
            Self::Cached(saver, cache) => Arc::new(CachedSaver::new(Arc::new(saver.clone()), cache.clone())),
            Self::Sqlite { saver, .. } => saver.clone(),
        };
        let table = schema().compile(mode, frequency).unwrap();
        StateAccessor::new(saver, Arc::new(table), Arc::new(IdSource::default()))
    }
}

struct Run {
    store: Store,
    mode: (ChannelMode, u64),
    accessor: StateAccessor,
    thread: ThreadId,
    writer: StepWriter,
    /// Every checkpoint so far, with its state when it was created and the model's.
    made: Vec<(CheckpointId, StateSnapshot, ModelState)>,
}

impl Run {
    async fn new(store: Store, mode: (ChannelMode, u64)) -> Self {
        let accessor = store.accessor(mode.0, mode.1);
        let thread = ThreadId::from("t");
        let first = accessor.create(&thread, Map::new()).await.unwrap();
        let writer = StepWriter::open(&accessor, &thread, None).await.unwrap();
        let made = vec![(first.key.id, first, ModelState::default())];
        Self { store, mode, accessor, thread, writer, made }
    }

    async fn step(&mut self, tasks: &[Vec<W>], reversed: bool, early: bool) -> Result<StateSnapshot> {
        let node = NodeName::from("node");
        let mut order: Vec<usize> = (0..tasks.len()).collect();
        if reversed {
            order.reverse();
        }
        for i in order {
            let writes: Result<Vec<_>> =
                tasks[i].iter().map(|w| self.writer.write(w.channel, w.value.clone(), w.overwrite)).collect();
            let durability = if early && i % 2 == 0 { Durability::Now } else { Durability::WithCommit };
            let task = self.writer.start_task(&node, u32::try_from(i).unwrap());
            self.writer.finish_task(task, writes?, durability).await?;
        }
        let committed = self.writer.commit(Source::Loop, vec![node], Map::new()).await.cloned();
        self.writer.discard();
        committed
    }

    /// Runs one operation; the model checks the result.
    async fn run(&mut self, op: &Op) {
        let head = self.made.len() - 1;
        let pick = |i: &usize| i % (head + 1);
        let (base, writes, got) = match op {
            Op::Step { tasks, reversed, early } => {
                (head, tasks.concat(), self.step(tasks, *reversed, *early).await)
            }
            Op::Fork { at, tasks } => {
                let at = pick(at);
                self.writer =
                    StepWriter::open(&self.accessor, &self.thread, Some(self.made[at].0)).await.unwrap();
                let got = self.step(tasks, false, false).await;
                (at, tasks.concat(), got)
            }
            Op::Update { at, writes } => {
                let at = at.as_ref().map(pick);
                let made =
                    writes.iter().map(|w| self.accessor.write(w.channel, w.value.clone(), w.overwrite));
                let update = Update {
                    at: at.map(|at| self.made[at].0),
                    node: "update".into(),
                    writes: made.collect::<Result<_>>().unwrap(),
                    extra: Map::new(),
                };
                (at.unwrap_or(head), writes.clone(), self.accessor.update(&self.thread, update).await)
            }
            Op::Annotate => {
                let state = self.accessor.get(&self.thread, None).await.unwrap().unwrap();
                (head, Vec::new(), self.accessor.annotate(&state, Map::new()).await)
            }
            Op::Abandon { writes } => {
                self.writer = StepWriter::open(&self.accessor, &self.thread, None).await.unwrap();
                let writes =
                    writes.iter().map(|w| self.writer.write(w.channel, w.value.clone(), w.overwrite));
                let writes = writes.collect::<Result<_>>().unwrap();
                let (done, failed) =
                    (self.writer.start_task(&"node".into(), 0), self.writer.start_task(&"node".into(), 1));
                self.writer.finish_task(done, writes, Durability::Now).await.unwrap();
                self.writer.fail_task(failed, "cancelled").await.unwrap();
                self.writer.discard();
                return;
            }
            Op::Reopen => {
                self.reopen_as(self.mode).await;
                return;
            }
        };
        match (self.made[base].2.apply(&writes), got) {
            (Some(model), Ok(state)) => {
                assert_eq!(state.values().unwrap(), model.json(), "live, after {op:?}");
                self.made.push((state.key.id, state, model));
            }
            (None, Err(Error::InvalidUpdate(_))) => {}
            (model, got) => panic!("the model says {model:?}, the engine {got:?}, after {op:?}"),
        }
        self.warm_reads_equal_cold_reads().await;
        // A step on the head by another writer makes the writer stale.
        self.writer = StepWriter::open(&self.accessor, &self.thread, None).await.unwrap();
    }

    /// What the accessor has cached of the head equals what an accessor without a cache reads.
    async fn warm_reads_equal_cold_reads(&self) {
        for load in [Load::All, Load::None, Load::Only(["messages".into(), "title".into()].into())] {
            let warm = self.accessor.get_loading(&self.thread, None, load.clone()).await.unwrap();
            let reader = self.store.accessor(self.mode.0, self.mode.1);
            let cold = reader.get_loading(&self.thread, None, load).await.unwrap();
            assert_eq!(warm, cold);
        }
    }

    async fn reopen_as(&mut self, mode: (ChannelMode, u64)) {
        self.store.reopen().await;
        self.mode = mode;
        self.accessor = self.store.accessor(mode.0, mode.1);
        self.writer = StepWriter::open(&self.accessor, &self.thread, None).await.unwrap();
    }

    /// Reads every checkpoint back, one by one and as history pages of several sizes.
    async fn check(&mut self) {
        self.reopen_as(self.mode).await;
        let reader = &self.accessor;
        for (id, _, model) in &self.made {
            let state = reader.get(&self.thread, Some(*id)).await.unwrap().unwrap();
            assert_eq!(state.values().unwrap(), model.json(), "read back");
        }
        for size in [1, 3, 1000] {
            let mut read = Vec::new();
            let mut before = None;
            loop {
                let query = HistoryQuery { before, limit: Some(size), ..HistoryQuery::default() };
                let page = reader.history(&self.thread, query).await.unwrap();
                let Some(last) = page.last() else { break };
                before = Some(last.key.id);
                read.extend(page);
            }
            let expected: Vec<_> = self.made.iter().rev().map(|(id, _, model)| (*id, model.json())).collect();
            let read: Vec<_> = read.iter().map(|s| (s.key.id, s.values().unwrap())).collect();
            assert_eq!(read, expected, "history in pages of {size}");
        }
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

async fn every_mode_agrees(store: impl Fn() -> Store, ops: &[Op]) {
    let deltas = [1, 2, 3, 10, 1000].map(|k| (ChannelMode::Delta, k));
    for mode in [(ChannelMode::Full, 10)].into_iter().chain(deltas) {
        let mut run = Run::new(store(), mode).await;
        for op in ops {
            run.run(op).await;
        }
        run.check().await;
    }
}

/// A full thread continues in delta mode with its history intact, also when the cadence changes afterwards.
async fn full_continues_in_delta(store: Store, before: &[Op], after: &[Op], frequency: u64) {
    let mut run = Run::new(store, (ChannelMode::Full, 10)).await;
    for op in before {
        run.run(op).await;
    }
    run.reopen_as((ChannelMode::Delta, frequency)).await;
    for op in after {
        run.run(op).await;
    }
    run.reopen_as((ChannelMode::Delta, frequency + 1)).await;
    run.check().await;
}

fn programs(longest: usize) -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(), 1..longest)
}

fn frequencies() -> impl Strategy<Value = u64> {
    prop::sample::select(vec![1, 2, 3, 10, 1000])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn every_mode_and_cadence_gives_the_naive_state_at_every_checkpoint_in_memory(ops in programs(40)) {
        block_on(every_mode_agrees(|| Store::Memory(MemorySaver::default()), &ops));
    }

    #[test]
    fn every_mode_and_cadence_gives_the_naive_state_at_every_checkpoint_through_a_history_cache(
        ops in programs(40), entries in 1..4_usize
    ) {
        block_on(every_mode_agrees(|| Store::cached(entries), &ops));
    }

    #[test]
    fn a_full_thread_continues_in_delta_in_memory(
        before in programs(15), after in programs(15), frequency in frequencies()
    ) {
        block_on(full_continues_in_delta(Store::Memory(MemorySaver::default()), &before, &after, frequency));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn every_mode_and_cadence_gives_the_naive_state_at_every_checkpoint_on_sqlite(ops in programs(25)) {
        block_on(every_mode_agrees(Store::sqlite, &ops));
    }

    #[test]
    fn a_full_thread_continues_in_delta_on_sqlite(
        before in programs(15), after in programs(15), frequency in frequencies()
    ) {
        block_on(full_continues_in_delta(Store::sqlite(), &before, &after, frequency));
    }
}

/// Another program has other reducers: what it writes to `messages` may be no message, and its checkpoints store the values.
#[tokio::test]
async fn a_page_of_history_does_not_replay_what_led_to_a_value_that_another_program_stored() {
    let saver: Arc<dyn Saver> = Arc::new(MemorySaver::default());
    let table = Arc::new(Schema::thread_state().compile(ChannelMode::Delta, 100).unwrap());
    let accessor = StateAccessor::new(saver.clone(), table, Arc::new(IdSource::default()));
    let thread = ThreadId::from("t");
    let say = async |id: u8| {
        let write = accessor.write("messages", json!([message(id, id)]), false).unwrap();
        accessor
            .update(&thread, Update { at: None, node: "say".into(), writes: vec![write], extra: Map::new() })
            .await
            .unwrap()
    };
    say(0).await;
    let head = say(1).await;
    let ids = IdSource::default();
    let task = ids.task();
    let write = Write {
        channel: "messages".into(),
        value: ChannelValue::from_json(&json!([["ai", "x"]])).unwrap(),
        overwrite: false,
    };
    let id = ids.checkpoint_after(Some(head.key.id));
    let version = ids.version_after(head.version("messages"));
    let value = ChannelValue::from_json(&json!([message(0, 0), message(1, 1), message(2, 2)])).unwrap();
    let step = StepCommit {
        thread: thread.clone(),
        namespace: Namespace::root(),
        parent: Some(head.key.id),
        expected_head: Some(head.key.id),
        checkpoint: Checkpoint {
            id,
            channels: [("messages".into(), ChannelEntry { version, stored: Stored::Value(value) })].into(),
            next: Vec::new(),
            applied: vec![task],
        },
        metadata: Metadata::new(Source::Loop, 2),
        writes: vec![TaskWrites { task, node: NodeName::from("other"), index: 0, writes: vec![write] }],
        pending: Vec::new(),
        flush: Flush::Now,
    };
    saver.commit(step).await.unwrap();
    say(3).await;
    say(4).await;
    let history = accessor.history(&thread, HistoryQuery::default()).await.unwrap();
    let lengths: Vec<_> =
        history.iter().map(|state| state.value("messages").unwrap().as_list().unwrap().len()).collect();
    assert_eq!(lengths, [5, 4, 3, 2, 1]);
}

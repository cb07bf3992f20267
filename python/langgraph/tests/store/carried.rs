//! Graphs beside the gateway on one thread: such with a channel `messages`, plain or delta, and such without one, which
//! carry on what they do not have.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Map, Value as Json, json};
use threadkeep::Error;
use threadkeep::channel::{ChannelTable, Schema};
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, CheckpointTuple, Stored};
use threadkeep::convert::convert;
use threadkeep::deletion::{Boundary, Keep, Prune, copy_thread, prune};
use threadkeep::id::{CheckpointId, IdSource};
use threadkeep::metadata::{DURATION_NODE, Metadata, Source};
use threadkeep::mode::ChannelMode::{self, Delta, Full};
use threadkeep::saver::{CheckpointSelector, Flush, Load, Saver, StepCommit};
use threadkeep::state::{StateAccessor, Update};
use threadkeep::step::{Durability, StepWriter};
use threadkeep::value::ChannelValue;
use threadkeep::verify::verify;
use threadkeep_langgraph::{Put, PutWrites, Strategy as Keeping, next};

use crate::lab::Lab;

/// What a graph has under the name `messages`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Messages {
    Nothing,
    Plain,
    Delta,
}

/// Something that happens to the thread. Where it begins at a checkpoint, that is counted back from the newest.
#[derive(Debug, Clone)]
enum Op {
    /// The gateway writes a message, or else a title.
    Turn {
        back: usize,
        message: bool,
    },
    /// The gateway notes how long a run took.
    Note,
    /// The gateway sets a goal, and carries on everything else.
    Goal,
    /// A task of the gateway ends, and the process dies before the step does.
    Dies,
    /// A step of a graph.
    Graph {
        back: usize,
        has: Messages,
        message: bool,
        snapshot: bool,
    },
    Convert(ChannelMode),
    Prune(Boundary, usize),
    /// The graphs' savers prune it.
    GraphPrune,
    /// It is copied, and the copy goes on.
    Copy,
    /// The graphs' savers are opened again.
    Reopen,
}

/// What a checkpoint has, as a model knows it.
#[derive(Debug, Clone, PartialEq, Default)]
struct Expected {
    /// The ids of the messages, once there were some.
    messages: Option<Vec<String>>,
    title: Option<String>,
    /// Whether the gateway cannot read them, because a graph has changed them since they were stored as a value.
    is_refused: bool,
}

struct World {
    lab: Lab,
    mode: ChannelMode,
    frequency: u64,
    ids: IdSource,
    expected: BTreeMap<CheckpointId, Expected>,
    count: u32,
}

fn table(mode: ChannelMode, frequency: u64) -> Arc<ChannelTable> {
    Arc::new(Schema::thread_state().compile(mode, frequency).unwrap())
}

fn value(json: &Json) -> ChannelValue {
    ChannelValue::from_json(json).unwrap()
}

fn ids(list: &[Json]) -> Vec<String> {
    list.iter().map(|message| message["id"].as_str().unwrap().to_owned()).collect()
}

/// A message in the form of a graph.
fn of_graph(message: &Json) -> Json {
    let mut message = message.clone();
    message["of_graph"] = json!(true);
    message
}

/// Messages that a graph gets; those of another program in the form that it gives them.
fn read(found: &ChannelValue, foreign: bool) -> Vec<Json> {
    let list = found.to_json().unwrap();
    let list = list.as_array().unwrap();
    if foreign { list.iter().map(of_graph).collect() } else { list.clone() }
}

impl World {
    fn new(mode: ChannelMode, frequency: u64) -> Self {
        let (lab, ids) = (Lab::new(), IdSource::default());
        Self { lab, mode, frequency, ids, expected: BTreeMap::new(), count: 0 }
    }

    fn accessor(&self, mode: ChannelMode) -> StateAccessor {
        let saver = Arc::new(self.lab.beside.saver.clone());
        StateAccessor::new(saver, table(mode, self.frequency), Arc::new(IdSource::default()))
    }

    fn head(&self) -> Option<CheckpointId> {
        self.expected.keys().next_back().copied()
    }

    fn at(&self, back: usize) -> Option<CheckpointId> {
        let len = self.expected.len();
        self.expected.keys().rev().nth(back % len.max(1)).copied()
    }

    fn at_or_before(&self, at: Option<CheckpointId>) -> Expected {
        at.map(|at| self.expected[&at].clone()).unwrap_or_default()
    }

    /// A message that nobody has yet.
    fn message(&mut self) -> Json {
        self.count += 1;
        json!({"type": "human", "id": format!("m{}", self.count), "content": "hello"})
    }

    async fn play(&mut self, op: &Op) {
        match op {
            Op::Turn { back, message } => self.turn(self.at(*back), *message).await,
            Op::Note => self.note().await,
            Op::Goal => self.goal().await,
            Op::Dies => self.dies().await,
            // A gateway in full mode refuses a thread with delta channels.
            Op::Graph { has: Messages::Delta, .. } if self.mode == Full => {}
            Op::Graph { back, has, message, snapshot } => {
                self.graph(self.at(*back), *has, *message, *snapshot).await;
            }
            Op::Convert(to) => {
                let to = if self.mode == Full { Full } else { *to };
                convert(&self.lab.beside.saver, &self.lab.place.thread, &table(to, self.frequency))
                    .await
                    .unwrap();
            }
            Op::Prune(boundary, last) => {
                let asked = Prune { boundary: *boundary, ..Prune::keeping(Keep::Last(*last)) };
                let table = table(self.mode, self.frequency);
                prune(&self.lab.beside.saver, &self.lab.place.thread, &asked, &table).await.unwrap();
            }
            Op::GraphPrune => {
                let thread = self.lab.place.thread.clone();
                self.lab.graphs.prune(&[thread], Keeping::KeepLatest).await.unwrap();
            }
            Op::Copy if self.expected.is_empty() => {}
            Op::Copy => {
                self.count += 1;
                let copy = self.lab.thread(&format!("copy {}", self.count));
                let (from, to) = (&self.lab.place.thread, &copy.place.thread);
                copy_thread(&self.lab.beside.saver, from, to).await.unwrap();
                self.lab = copy;
            }
            Op::Reopen => self.lab = self.lab.opened_again(),
        }
        let left = self.lab.beside.saver.read_thread(&self.lab.place.thread).await.unwrap();
        let left: BTreeSet<CheckpointId> = left.checkpoints.into_keys().map(|(_, id)| id).collect();
        self.expected.retain(|id, _| left.contains(id));
        assert!(left.iter().eq(self.expected.keys()), "checkpoints that nobody made");
    }

    async fn turn(&mut self, at: Option<CheckpointId>, message: bool) {
        let accessor = self.accessor(self.mode);
        let new = self.message();
        let (channel, written) =
            if message { ("messages", json!([new])) } else { ("title", new["id"].clone()) };
        let write = accessor.write(channel, written, false);
        let update = Update { at, node: "agent".into(), writes: vec![write.unwrap()], extra: Map::new() };
        let made = accessor.update(&self.lab.place.thread, update).await;
        let mut expected = self.at_or_before(at);
        if expected.is_refused {
            assert!(matches!(made, Err(Error::ForeignChanges { .. })), "{made:?}");
            return;
        }
        let id = new["id"].as_str().unwrap().to_owned();
        if message {
            expected.messages.get_or_insert_default().push(id);
        } else {
            expected.title = Some(id);
        }
        self.expected.insert(made.unwrap().key.id, expected);
    }

    async fn note(&mut self) {
        let before = self.at_or_before(self.head());
        if self.expected.is_empty() || before.is_refused {
            return;
        }
        let accessor = self.accessor(self.mode);
        let head = accessor.get(&self.lab.place.thread, None).await.unwrap().unwrap();
        let extra = Map::from_iter([("writes".to_owned(), json!({ DURATION_NODE: {} }))]);
        let noted = accessor.annotate(&head, extra).await.unwrap();
        self.expected.insert(noted.key.id, before);
    }

    async fn goal(&mut self) {
        let Some(head) = self.stored().await else { return };
        let held = head.checkpoint.channels.iter();
        let held = held.map(|(name, entry)| {
            (name.clone(), ChannelEntry { version: entry.version, stored: Stored::Held })
        });
        let mut channels: BTreeMap<_, _> = held.collect();
        let last = channels.values().map(|entry| entry.version).max();
        let goal =
            ChannelEntry { version: self.ids.version_after(last), stored: Stored::Value(value(&json!({}))) };
        channels.insert("goal".into(), goal);
        let id = self.ids.checkpoint_after(Some(head.checkpoint.id));
        let commit = StepCommit {
            thread: head.thread.clone(),
            namespace: head.namespace.clone(),
            parent: Some(head.checkpoint.id),
            expected_head: Some(head.checkpoint.id),
            checkpoint: Checkpoint { id, channels, next: Vec::new(), applied: Vec::new() },
            metadata: Metadata { source: Source::Update, ..head.metadata },
            writes: Vec::new(),
            pending: Vec::new(),
            flush: Flush::Now,
        };
        self.lab.beside.saver.commit(commit).await.unwrap();
        self.expected.insert(id, self.at_or_before(Some(head.checkpoint.id)));
    }

    async fn stored(&self) -> Option<CheckpointTuple> {
        self.lab.beside.saver.get(&CheckpointSelector::head(&self.lab.place.thread)).await.unwrap()
    }

    async fn dies(&mut self) {
        if self.expected.is_empty() || self.at_or_before(self.head()).is_refused {
            return;
        }
        let message = self.message();
        let accessor = self.accessor(self.mode);
        let mut writer = StepWriter::open(&accessor, &self.lab.place.thread, None).await.unwrap();
        let write = writer.write("messages", json!([message]), false).unwrap();
        let task = writer.start_task(&"tools".into(), 0);
        writer.finish_task(task, vec![write], Durability::Now).await.unwrap();
    }

    /// A step of a graph that goes on from a checkpoint, as LangGraph's loop puts it.
    async fn graph(&mut self, at: Option<CheckpointId>, has: Messages, message: bool, snapshot: bool) {
        let place = self.lab.place.clone();
        let found = match at {
            Some(at) => self.lab.graphs.get(&place, Some(at)).await.unwrap(),
            None => None,
        };
        let mut versions = found.as_ref().map(|found| found.versions.clone()).unwrap_or_default();
        let last = versions.values().max_by_key(|label| label.as_str().unwrap().to_owned());
        let version = json!(next(last));
        let (mut values, mut new) = (BTreeMap::new(), BTreeSet::new());
        let (mut snapshots, mut counters) = (BTreeSet::new(), None);
        let mut expected = self.at_or_before(at);
        let before = match (at, has) {
            (_, Messages::Nothing) | (None, _) => None,
            (Some(at), _) => self.messages(at).await,
        };
        let mut list = before.clone().unwrap_or_default();
        if message && has != Messages::Nothing {
            let message = self.message();
            expected.messages.get_or_insert_default().extend(ids(std::slice::from_ref(&message)));
            list.push(of_graph(&message));
            new.insert("messages".to_owned());
        }
        let has_messages = before.is_some() || !new.is_empty();
        match has {
            Messages::Plain if has_messages => {
                values.insert("messages".to_owned(), value(&json!(list)));
                expected.is_refused = false;
            }
            Messages::Delta => {
                // What waits there is another branch's, or nobody's.
                let waits =
                    found.iter().flat_map(|found| &found.writes).any(|(_, name, _)| name == "messages");
                if waits || (has_messages && (snapshot || found.is_none())) {
                    expected.messages.get_or_insert_default();
                    values.insert("messages".to_owned(), value(&json!(list)));
                    snapshots.insert("messages".to_owned());
                    new.insert("messages".to_owned());
                    expected.is_refused = false;
                } else {
                    let given =
                        found.as_ref().and_then(|found| found.metadata.get("counters_since_delta_snapshot"));
                    let since =
                        |at: usize| given.and_then(|given| given["messages"][at].as_u64()).unwrap_or(0);
                    counters = Some(json!({"messages": [since(0) + u64::from(message), since(1) + 1]}));
                    expected.is_refused |= message;
                    if let (true, Some(at)) = (message, at) {
                        let writes = vec![("messages".to_owned(), value(&json!([list.last()])))];
                        let task = format!("task {}", self.count);
                        let put =
                            PutWrites { place: place.clone(), id: at, task, path: String::new(), writes };
                        self.lab.graphs.put_writes(&put).await.unwrap();
                    }
                }
            }
            Messages::Plain | Messages::Nothing => {}
        }
        values.insert("topic".to_owned(), value(&json!("a topic")));
        new.insert("topic".to_owned());
        versions.extend(new.iter().map(|name| (name.clone(), version.clone())));
        let mut metadata = json!({"source": "loop", "step": self.count, "parents": {}});
        if let Some(counters) = counters {
            metadata["counters_since_delta_snapshot"] = counters;
        }
        let metadata = metadata.as_object().unwrap().clone();
        let id = self.ids.checkpoint_after(self.head());
        let put =
            Put { versions, new, values, snapshots, ..Put::new(place.clone(), id, at, metadata.clone()) };
        self.put(&put).await;
        self.expected.insert(id, expected);
        let stored = self.lab.graphs.get(&place, Some(id)).await.unwrap().unwrap();
        assert_eq!(stored.metadata, metadata, "LangGraph's own");
        assert_eq!(stored.versions, put.versions);
    }

    /// Puts a checkpoint with all values of its graph, as the Python package does.
    async fn put(&self, put: &Put) {
        let graphs = &self.lab.graphs;
        for _ in 0..16 {
            let names = || put.values.keys().cloned();
            let mut needed = graphs.needs(&put.place, put.parent, &put.versions, &put.new, names());
            if let (None, Some(parent)) = (&needed, put.parent) {
                graphs.learn(&put.place, parent).await.unwrap();
                needed = graphs.needs(&put.place, put.parent, &put.versions, &put.new, names());
            }
            let needed = needed.unwrap();
            let (values, held): (BTreeMap<_, _>, BTreeMap<_, _>) =
                put.values.clone().into_iter().partition(|(name, _)| needed.contains(name));
            let put = Put { values, held: held.into_keys().collect(), ..put.clone() };
            match graphs.put(&put).await {
                Err(Error::Stale { .. }) => {}
                done => return done.unwrap(),
            }
        }
        panic!("the parent changes all the time");
    }

    /// The messages of a checkpoint as a graph with such a channel gets them, in its form.
    async fn messages(&self, at: CheckpointId) -> Option<Vec<Json>> {
        let (graphs, place) = (&self.lab.graphs, &self.lab.place);
        let found = graphs.get(place, Some(at)).await.unwrap().unwrap();
        found.versions.get("messages")?;
        let list = if let Some(found_value) = found.values.get("messages") {
            read(found_value, found.foreign)
        } else {
            let channels = BTreeSet::from(["messages".to_owned()]);
            let mut history = graphs.history(place, Some(at), &channels).await.unwrap();
            let replay = history.remove("messages").unwrap();
            let seed = replay.seed.map(|seed| read(&seed.value, seed.foreign)).unwrap_or_default();
            let writes = replay.writes.iter().flat_map(|(_, _, write)| read(write, false));
            seed.into_iter().chain(writes).collect()
        };
        assert!(
            list.iter().all(|message| message["of_graph"] == true),
            "{at}: in the gateway's form: {list:?}"
        );
        Some(list)
    }

    /// Compares every checkpoint with what is expected of it.
    async fn check(&self) {
        let accessor = self.accessor(self.mode);
        let thread = &self.lab.place.thread;
        for (id, expected) in &self.expected {
            assert_eq!(self.messages(*id).await.as_deref().map(ids), expected.messages, "{id}: a graph");
            let state = accessor.get(thread, Some(*id)).await;
            if expected.is_refused {
                assert!(
                    matches!(&state, Err(Error::ForeignChanges { checkpoint, .. }) if checkpoint == id),
                    "{id}: {state:?}"
                );
            } else {
                let messages = state.unwrap().unwrap().json("messages").unwrap();
                let messages = messages.map(|messages| ids(messages.as_array().unwrap()));
                assert_eq!(messages, expected.messages, "{id}: the gateway");
            }
            let load = Load::Only(["title".into()].into());
            let title = accessor.get_loading(thread, Some(*id), load).await.unwrap().unwrap();
            let title = title.json("title").unwrap().map(|title| title.as_str().unwrap().to_owned());
            assert_eq!(title, expected.title, "{id}: the title");
        }
        assert_eq!(verify(&self.lab.beside.saver, thread, accessor.table()).await.unwrap(), []);
    }
}

/// Plays a program, and compares after each step.
async fn play(mode: ChannelMode, frequency: u64, ops: &[Op]) -> World {
    let mut world = World::new(mode, frequency);
    for op in ops {
        world.play(op).await;
        world.check().await;
    }
    world
}

const TURN: Op = Op::Turn { back: 0, message: true };

fn step(has: Messages, message: bool) -> Op {
    Op::Graph { back: 0, has, message, snapshot: false }
}

#[tokio::test]
async fn a_graph_without_messages_carries_on_the_gateways_in_whatever_form_they_are_stored() {
    let without = || step(Messages::Nothing, false);
    for (mode, frequency) in [(Full, 1), (Delta, 1), (Delta, 2), (Delta, 1000)] {
        for before in [vec![TURN], vec![TURN, TURN], vec![TURN, TURN, Op::Note], vec![TURN, TURN, Op::Goal]] {
            for reopened in [false, true] {
                let mut ops = before.clone();
                ops.extend(reopened.then_some(Op::Reopen));
                ops.extend([
                    without(),
                    without(),
                    TURN,
                    without(),
                    step(Messages::Plain, true),
                    without(),
                    TURN,
                ]);
                let world = play(mode, frequency, &ops).await;
                let head = &world.expected[&world.head().unwrap()];
                assert_eq!(head.messages.as_ref().unwrap().len(), before.len().min(2) + 3);
            }
        }
    }
}

#[tokio::test]
async fn what_a_graph_carries_on_is_converted_and_read_in_full_mode() {
    let mut world = play(Delta, 1000, &[TURN, TURN, step(Messages::Nothing, false)]).await;
    let full = world.accessor(Full);
    let thread = world.lab.place.thread.clone();
    assert_eq!(full.get(&thread, None).await.unwrap_err(), Error::ModeMismatch);
    world.play(&Op::Convert(Full)).await;
    world.check().await;
    let state = full.get(&thread, None).await.unwrap().unwrap();
    assert_eq!(state.json("messages").unwrap().unwrap().as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_row_that_waits_is_not_replayed_where_a_graph_carries_its_channel_on() {
    let without = |back| Op::Graph { back, has: Messages::Nothing, message: false, snapshot: false };
    for ops in [
        // A task of a run that died, and one that another branch applied.
        vec![TURN, TURN, Op::Dies, without(0), TURN],
        vec![TURN, TURN, TURN, without(1), TURN],
        vec![
            TURN,
            step(Messages::Delta, true),
            step(Messages::Delta, true),
            without(1),
            step(Messages::Delta, true),
        ],
        // The thread had no messages then.
        vec![
            Op::Turn { back: 0, message: false },
            Op::Dies,
            without(0),
            without(0),
            step(Messages::Delta, true),
        ],
    ] {
        play(Delta, 1000, &ops).await;
    }
}

#[tokio::test]
async fn a_delta_channel_that_a_graph_leaves_alone_is_read_by_the_gateway() {
    let delta = |message, snapshot| Op::Graph { back: 0, has: Messages::Delta, message, snapshot };
    let ops = [TURN, TURN, delta(false, false), TURN, delta(true, true), delta(false, false), TURN];
    let world = play(Delta, 1000, &ops).await;
    assert!(world.expected.values().all(|expected| !expected.is_refused));
    let world =
        play(Delta, 1000, &[TURN, delta(true, false), Op::Goal, step(Messages::Nothing, false)]).await;
    assert_eq!(world.expected.values().filter(|expected| expected.is_refused).count(), 3);
}

fn op() -> impl Strategy<Value = Op> {
    let back = || prop_oneof![4 => Just(0), 1 => 0..8_usize];
    let has =
        prop::sample::select(vec![Messages::Nothing, Messages::Nothing, Messages::Plain, Messages::Delta]);
    let boundary = prop::sample::select(vec![Boundary::KeepSet, Boundary::FreshSnapshot]);
    prop_oneof![
        6 => (back(), prop::bool::weighted(0.7)).prop_map(|(back, message)| Op::Turn { back, message }),
        1 => Just(Op::Note),
        1 => Just(Op::Goal),
        1 => Just(Op::Dies),
        9 => (back(), has, any::<bool>(), prop::bool::weighted(0.2))
            .prop_map(|(back, has, message, snapshot)| Op::Graph { back, has, message, snapshot }),
        1 => prop::sample::select(vec![Full, Delta]).prop_map(Op::Convert),
        1 => (boundary, 1..5_usize).prop_map(|(boundary, last)| Op::Prune(boundary, last)),
        1 => Just(Op::GraphPrune),
        1 => Just(Op::Copy),
        1 => Just(Op::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn graphs_and_the_gateway_agree_on_a_thread_whatever_they_do_to_it(
        full in prop::bool::weighted(0.2),
        frequency in prop::sample::select(vec![1_u64, 2, 3, 1000]),
        ops in prop::collection::vec(op(), 1..16),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(play(if full { Full } else { Delta }, frequency, &ops));
    }
}

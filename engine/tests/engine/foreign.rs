//! What LangGraph stored as changes is refused, never computed with reducers that are not LangGraph's.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Map, Value as Json, json};
use threadkeep::Error;
use threadkeep::channel::{Behaviour, ChannelTable, OrderedUnion, Schema};
use threadkeep::checkpoint::{ChannelEntry, CheckpointTuple, Stored};
use threadkeep::convert::convert;
use threadkeep::deletion::{Boundary, Keep, Prune, prune};
use threadkeep::foreign::{FRAME, OWNER_KEY, owner};
use threadkeep::id::{CheckpointId, IdSource, ThreadId, Version};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{Load, Rewrite, Saver, ThreadImage};
use threadkeep::state::{HistoryQuery, StateAccessor, StateSnapshot, Update};
use threadkeep::value::ChannelValue;
use threadkeep::verify::verify;
use threadkeep_memory::MemorySaver;

/// What an update writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrote {
    Messages,
    Title,
    Both,
    Nothing,
}

impl Wrote {
    fn has_messages(self) -> bool {
        matches!(self, Self::Messages | Self::Both)
    }

    fn has_title(self) -> bool {
        matches!(self, Self::Title | Self::Both)
    }
}

struct Store {
    saver: MemorySaver,
    accessor: StateAccessor,
    thread: ThreadId,
}

impl Store {
    /// A thread in delta mode with a snapshot at each `frequency`-th update of messages, and its checkpoints. Each
    /// update is written on the checkpoint that is named, counted back from the newest.
    async fn new(frequency: u64, updates: &[(usize, Wrote)]) -> (Self, Vec<CheckpointId>) {
        let saver = MemorySaver::new();
        let store = Self { accessor: accessor(&saver, frequency), saver, thread: ThreadId::from("t") };
        let mut ids: Vec<CheckpointId> = Vec::new();
        for (n, (back, wrote)) in updates.iter().enumerate() {
            let at = ids.len().checked_sub(1 + back % ids.len().max(1)).map(|at| ids[at]);
            let text = format!("m{n}");
            let messages = wrote.has_messages().then(|| ("messages", message(&text)));
            let title = wrote.has_title().then(|| ("title", json!(text)));
            let writes = messages.into_iter().chain(title).collect();
            ids.push(store.write(at, writes).await.unwrap().key.id);
        }
        (store, ids)
    }

    async fn write(
        &self,
        at: Option<CheckpointId>,
        writes: Vec<(&str, Json)>,
    ) -> threadkeep::Result<StateSnapshot> {
        let writes = writes.into_iter().map(|(channel, value)| self.accessor.write(channel, value, false));
        let writes = writes.collect::<threadkeep::Result<_>>()?;
        let update = Update { at, node: "n".into(), writes, extra: Map::new() };
        self.accessor.update(&self.thread, update).await
    }

    /// What these checkpoints have as messages.
    async fn read(&self, ids: &[CheckpointId]) -> Vec<(CheckpointId, Messages)> {
        let mut all = Vec::new();
        for id in ids {
            all.push((*id, messages(&self.accessor, &self.thread, *id).await));
        }
        all
    }

    /// Compares every checkpoint of the thread with what is expected.
    async fn has(&self, frequency: u64, expected: &[(CheckpointId, Messages)]) {
        let fresh = accessor(&self.saver, frequency);
        for (id, expected) in expected {
            assert_eq!(messages(&fresh, &self.thread, *id).await, *expected);
        }
        let whole = fresh.history(&self.thread, HistoryQuery::default()).await;
        assert_eq!(whole.is_err(), expected.iter().any(|(_, expected)| expected.is_err()), "{whole:?}");
        assert_eq!(verify(&self.saver, &self.thread, fresh.table()).await.unwrap(), []);
    }

    async fn image(&self) -> ThreadImage {
        self.saver.read_thread(&self.thread).await.unwrap()
    }

    /// Makes LangGraph the author of these checkpoints. Those after them keep the frame that they find.
    async fn by_langgraph(&self, theirs: &BTreeSet<CheckpointId>, change: impl Fn(&mut CheckpointTuple)) {
        let image = self.image().await;
        let mut made: Vec<CheckpointTuple> = Vec::new();
        for (number, tuple) in (1..).zip(image.checkpoints.into_values()) {
            let mut tuple = tuple;
            let id = tuple.checkpoint.id;
            let frame = if theirs.contains(&id) {
                change(&mut tuple);
                tuple.metadata.delta_marker = !tuple.metadata.counters.is_empty();
                let frame = ChannelValue::from_json(&json!({OWNER_KEY: owner(id), "v": 4})).unwrap();
                let version = Version { counter: number, random: 7 };
                Some(ChannelEntry { version, stored: Stored::Value(frame) })
            } else {
                let parent = made.iter().find(|before| Some(before.checkpoint.id) == tuple.parent);
                parent.and_then(|parent| parent.checkpoint.channels.get(FRAME).cloned())
            };
            if let Some(frame) = frame {
                tuple.checkpoint.channels.insert(FRAME.into(), frame);
            }
            made.push(tuple);
        }
        let rewrite = Rewrite { put: made, ..Rewrite::default() };
        self.saver.rewrite_thread(&self.thread, &image.revision, rewrite).await.unwrap();
    }
}

/// The messages of a checkpoint, or why they cannot be read.
type Messages = threadkeep::Result<Option<Json>>;

async fn messages(accessor: &StateAccessor, thread: &ThreadId, at: CheckpointId) -> Messages {
    accessor.get(thread, Some(at)).await.map(|state| state.unwrap().json("messages").unwrap())
}

fn message(text: &str) -> Json {
    json!([{"type": "ai", "content": text, "id": text}])
}

fn table(mode: ChannelMode, frequency: u64) -> ChannelTable {
    Schema::thread_state().compile(mode, frequency).unwrap()
}

fn accessor(saver: &MemorySaver, frequency: u64) -> StateAccessor {
    accessor_of(saver, table(ChannelMode::Delta, frequency))
}

fn accessor_of(saver: &MemorySaver, table: ChannelTable) -> StateAccessor {
    StateAccessor::new(Arc::new(saver.clone()), Arc::new(table), Arc::new(IdSource::default()))
}

/// The error of a checkpoint whose messages only LangGraph can replay.
fn refusal(checkpoint: CheckpointId) -> Error {
    Error::ForeignChanges { thread: "t".into(), checkpoint, channel: "messages".into() }
}

#[tokio::test]
async fn changes_of_langgraph_are_refused_however_far_back_they_are() {
    let (store, ids) = Store::new(1000, &[(0, Wrote::Messages); 250]).await;
    let messages = async |at: usize| {
        let state = accessor(&store.saver, 1000).get(&store.thread, Some(ids[at])).await;
        state.map(|state| state.unwrap().json("messages").unwrap())
    };
    let before = messages(19).await.unwrap();
    store.by_langgraph(&[ids[20]].into(), |_| ()).await;
    assert_eq!(messages(19).await.unwrap(), before);
    for at in [20, 21, 119, 120, 121, 249] {
        assert_eq!(messages(at).await.unwrap_err(), refusal(ids[at]), "{at}");
    }
    let fresh = accessor(&store.saver, 1000);
    let head = store.image().await;
    assert_eq!(fresh.get(&store.thread, None).await.unwrap_err(), refusal(ids[249]));
    let more = store.write(None, vec![("messages", message("more"))]).await;
    assert_eq!(more.unwrap_err(), refusal(ids[249]));
    assert_eq!(store.image().await, head, "nothing was written");
    // What does not need them can be read.
    for load in [Load::None, Load::Only(["title".into()].into())] {
        assert!(fresh.get_loading(&store.thread, None, load).await.unwrap().is_some());
    }
    let older = HistoryQuery { before: Some(ids[20]), ..HistoryQuery::default() };
    assert_eq!(fresh.history(&store.thread, older).await.unwrap().len(), 20);
    assert_eq!(verify(&store.saver, &store.thread, fresh.table()).await.unwrap(), []);
}

#[tokio::test]
async fn a_value_that_langgraph_stored_can_be_continued_whatever_its_reducer_did() {
    let (store, ids) = Store::new(1000, &[(0, Wrote::Messages); 6]).await;
    let theirs = json!([{"type": "human", "content": "of its reducer", "id": "other"}]);
    let value = ChannelValue::from_json(&theirs).unwrap();
    let snapshot = |tuple: &mut CheckpointTuple| {
        tuple.checkpoint.channels.get_mut("messages").unwrap().stored = Stored::Snapshot(value.clone());
        tuple.metadata.counters.clear();
    };
    store.by_langgraph(&[ids[3]].into(), snapshot).await;
    let state = accessor(&store.saver, 1000).get(&store.thread, None).await.unwrap().unwrap();
    let contents = state.json("messages").unwrap().unwrap();
    let contents: Vec<_> = contents.as_array().unwrap().iter().map(|m| m["id"].clone()).collect();
    assert_eq!(contents, ["other", "m4", "m5"]);
    // That the writes of its step give another value is LangGraph's affair.
    assert_eq!(verify(&store.saver, &store.thread, store.accessor.table()).await.unwrap(), []);
}

#[tokio::test]
async fn what_langgraph_leaves_at_its_version_is_read_continued_converted_and_pruned() {
    let wrote = [Wrote::Messages, Wrote::Messages, Wrote::Title, Wrote::Nothing, Wrote::Messages];
    let (store, ids) = Store::new(1000, &wrote.map(|wrote| (0, wrote))).await;
    let mut expected = store.read(&ids).await;
    let theirs = [ids[2], ids[3]];
    store.by_langgraph(&theirs.into(), |_| ()).await;
    let image = store.image().await;
    assert_eq!(image.checkpoints.values().filter(|tuple| threadkeep::foreign::wrote(tuple)).count(), 2);
    store.has(1000, &expected).await;
    let more = store.write(None, vec![("messages", message("more"))]).await.unwrap();
    expected.push((more.key.id, more.json("messages")));
    store.has(1000, &expected).await;

    // A process in full mode reads the whole thread once it is converted.
    let full = accessor_of(&store.saver, table(ChannelMode::Full, 1000));
    assert_eq!(full.get(&store.thread, Some(theirs[1])).await.unwrap_err(), Error::ModeMismatch);
    let done = convert(&store.saver, &store.thread, full.table()).await.unwrap();
    assert_eq!((done.changed, done.left), (6, 0));
    let again = convert(&store.saver, &store.thread, full.table()).await.unwrap();
    assert_eq!((again.changed, again.left), (0, 2), "only LangGraph's stay as they are");
    store.has(1000, &expected).await;
    for (id, expected) in &expected {
        assert_eq!(messages(&full, &store.thread, *id).await, *expected);
    }
    convert(&store.saver, &store.thread, &table(ChannelMode::Delta, 1000)).await.unwrap();
    store.has(1000, &expected).await;
    let latest = Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(Keep::Latest) };
    prune(&store.saver, &store.thread, &latest, &table(ChannelMode::Delta, 1000)).await.unwrap();
    store.has(1000, &expected[5..]).await;
    assert_eq!(store.image().await.checkpoints.len(), 1);
}

#[tokio::test]
async fn a_write_that_langgraph_applied_is_its_change_whatever_the_version_says() {
    let (store, ids) = Store::new(1000, &[(0, Wrote::Messages); 3]).await;
    let mut expected = store.read(&ids).await;
    let image = store.image().await;
    let before = image.checkpoints.values().next().unwrap().checkpoint.channels["messages"].version;
    let repeats = |tuple: &mut CheckpointTuple| {
        tuple.checkpoint.channels.get_mut("messages").unwrap().version = before;
    };
    store.by_langgraph(&[ids[1]].into(), repeats).await;
    for (id, expected) in &mut expected[1..] {
        *expected = Err(refusal(*id));
    }
    store.has(1000, &expected).await;
}

/// A table without the channel has no reducer for it, and needs none where nothing was written.
#[tokio::test]
async fn a_channel_that_only_langgraph_knows_has_its_value_where_langgraph_left_it() {
    let saver = MemorySaver::new();
    let schema = Schema::thread_state().with("log", Behaviour::Accumulating(Arc::new(OrderedUnion)));
    let accessor = accessor_of(&saver, schema.compile(ChannelMode::Delta, 1000).unwrap());
    let store = Store { saver, accessor, thread: ThreadId::from("t") };
    let first = store.write(None, vec![("log", json!(["begun"]))]).await.unwrap().key.id;
    let second = store.write(None, vec![("title", json!("a"))]).await.unwrap().key.id;
    let head = store.write(None, vec![("title", json!("b"))]).await.unwrap().key;
    store.by_langgraph(&[first, second].into(), |_| ()).await;
    let known = |mode| table(mode, 1000);
    assert_eq!(verify(&store.saver, &store.thread, &known(ChannelMode::Delta)).await.unwrap(), []);
    let done = convert(&store.saver, &store.thread, &known(ChannelMode::Full)).await.unwrap();
    let full = accessor_of(&store.saver, known(ChannelMode::Full));
    assert!(full.check(&store.thread, Some(first)).await.unwrap());
    for refused in [second, head.id] {
        assert_eq!(full.check(&store.thread, Some(refused)).await, Err(Error::ModeMismatch));
    }
    assert_eq!((done.changed, done.left), (0, 3), "LangGraph's, and the head, which a full process refuses");
    let place = (head.namespace, head.id);
    let log = async || store.image().await.checkpoints[&place].checkpoint.channels["log"].stored.clone();
    assert_eq!(log().await, Stored::Sentinel, "how it is stored is for LangGraph");
    assert_eq!(verify(&store.saver, &store.thread, &known(ChannelMode::Delta)).await.unwrap(), []);
    let latest = Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(Keep::Latest) };
    prune(&store.saver, &store.thread, &latest, &known(ChannelMode::Delta)).await.unwrap();
    assert_eq!(store.image().await.checkpoints.len(), 1);
    assert_eq!(log().await.value().unwrap().to_json().unwrap(), json!(["begun"]));
    assert_eq!(verify(&store.saver, &store.thread, &known(ChannelMode::Delta)).await.unwrap(), []);
}

fn wrote() -> impl Strategy<Value = Wrote> {
    prop_oneof![
        4 => Just(Wrote::Messages), 2 => Just(Wrote::Title), 1 => Just(Wrote::Both), 1 => Just(Wrote::Nothing),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Against a model that walks from each checkpoint to its parent, and knows what the updates wrote.
    #[test]
    fn a_value_is_refused_exactly_if_langgraph_stored_a_change_on_the_way_to_it(
        updates in prop::collection::vec((prop_oneof![4 => Just(0), 1 => 0..6_usize], wrote()), 1..24),
        theirs in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
        frequency in 1..6_u64,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (store, ids) = Store::new(frequency, &updates).await;
            let mut expected = store.read(&ids).await;
            let theirs: BTreeSet<CheckpointId> = theirs.iter().map(|index| *index.get(&ids)).collect();
            let changes: BTreeSet<CheckpointId> =
                ids.iter().zip(&updates).filter(|(_, (_, wrote))| wrote.has_messages()).map(|(id, _)| *id).collect();
            store.by_langgraph(&theirs, |_| ()).await;
            let image = store.image().await;
            let is_refused = |id: &CheckpointId| {
                let at = |id: CheckpointId| &image.checkpoints[&(threadkeep::id::Namespace::root(), id)];
                let is_change = |tuple: &&CheckpointTuple| {
                    let entry = tuple.checkpoint.channels.get("messages");
                    entry.is_some_and(|entry| entry.stored == Stored::Sentinel)
                };
                let up = std::iter::successors(Some(at(*id)), |tuple| tuple.parent.map(at));
                let mut path = up.take_while(is_change).map(|tuple| tuple.checkpoint.id);
                path.any(|id| theirs.contains(&id) && changes.contains(&id))
            };
            for (id, expected) in expected.iter_mut().filter(|(id, _)| is_refused(id)) {
                *expected = Err(refusal(*id));
            }
            store.has(frequency, &expected).await;

            // A conversion replays none of them either, and whatever can be read can be read in the other mode.
            let full = accessor_of(&store.saver, table(ChannelMode::Full, frequency));
            convert(&store.saver, &store.thread, full.table()).await.unwrap();
            store.has(frequency, &expected).await;
            for (id, expected) in &expected {
                let expected = expected.clone().map_err(|_| Error::ModeMismatch);
                assert_eq!(messages(&full, &store.thread, *id).await, expected);
            }
            convert(&store.saver, &store.thread, &table(ChannelMode::Delta, frequency)).await.unwrap();
            store.has(frequency, &expected).await;

            // Pruning leaves what they are replayed from.
            let latest = Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(Keep::Latest) };
            prune(&store.saver, &store.thread, &latest, &table(ChannelMode::Delta, frequency)).await.unwrap();
            let left = store.image().await;
            let left = |id: &CheckpointId| left.checkpoints.keys().any(|(_, at)| at == id);
            expected.retain(|(id, _)| left(id));
            assert!(expected.len() == 1 || expected.last().unwrap().1.is_err(), "only what is refused needs others");
            store.has(frequency, &expected).await;
        });
    }
}

//! What LangGraph stored as changes is refused, never computed with reducers that are not LangGraph's.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Map, json};
use threadkeep::Error;
use threadkeep::channel::Schema;
use threadkeep::checkpoint::{ChannelEntry, CheckpointTuple, Stored};
use threadkeep::deletion::{Boundary, Keep, Prune, prune};
use threadkeep::foreign::{FRAME, OWNER_KEY, owner};
use threadkeep::id::{CheckpointId, IdSource, ThreadId, Version};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{Load, Rewrite, Saver, ThreadImage};
use threadkeep::state::{HistoryQuery, StateAccessor, StateSnapshot, Update};
use threadkeep::value::ChannelValue;
use threadkeep::verify::verify;
use threadkeep_memory::MemorySaver;

struct Store {
    saver: MemorySaver,
    accessor: StateAccessor,
    thread: ThreadId,
}

impl Store {
    /// A thread in delta mode with a snapshot at each `frequency`-th update. Each update is written on the checkpoint that
    /// `bases` names, counted back from the newest.
    async fn new(frequency: u64, bases: &[usize]) -> Self {
        let saver = MemorySaver::new();
        let store = Self { accessor: accessor(&saver, frequency), saver, thread: ThreadId::from("t") };
        let mut ids: Vec<CheckpointId> = Vec::new();
        for (n, back) in bases.iter().enumerate() {
            let at = ids.len().checked_sub(1 + back % ids.len().max(1)).map(|at| ids[at]);
            ids.push(store.update(at, &format!("m{n}")).await.unwrap().key.id);
        }
        store
    }

    async fn update(&self, at: Option<CheckpointId>, message: &str) -> threadkeep::Result<StateSnapshot> {
        let message = json!([{"type": "ai", "content": message, "id": message}]);
        let writes = vec![self.accessor.write("messages", message, false)?];
        let update = Update { at, node: "n".into(), writes, extra: Map::new() };
        self.accessor.update(&self.thread, update).await
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

fn accessor(saver: &MemorySaver, frequency: u64) -> StateAccessor {
    let table = Schema::thread_state().compile(ChannelMode::Delta, frequency).unwrap();
    StateAccessor::new(Arc::new(saver.clone()), Arc::new(table), Arc::new(IdSource::default()))
}

/// The error of a checkpoint whose messages only LangGraph can replay.
fn refusal(checkpoint: CheckpointId) -> Error {
    Error::ForeignChanges { thread: "t".into(), checkpoint, channel: "messages".into() }
}

#[tokio::test]
async fn changes_of_langgraph_are_refused_however_far_back_they_are() {
    let store = Store::new(1000, &[0; 250]).await;
    let ids: Vec<CheckpointId> = store.image().await.checkpoints.into_keys().map(|(_, id)| id).collect();
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
    assert_eq!(store.update(None, "more").await.unwrap_err(), refusal(ids[249]));
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
    let store = Store::new(1000, &[0; 6]).await;
    let ids: Vec<CheckpointId> = store.image().await.checkpoints.into_keys().map(|(_, id)| id).collect();
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Against a model that walks from each checkpoint to its parent.
    #[test]
    fn a_value_is_refused_exactly_if_langgraph_stored_a_change_on_the_way_to_it(
        bases in prop::collection::vec(prop_oneof![4 => Just(0), 1 => 0..6_usize], 1..24),
        theirs in prop::collection::vec(any::<prop::sample::Index>(), 0..3),
        frequency in 1..6_u64,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let store = Store::new(frequency, &bases).await;
            let ids: Vec<CheckpointId> =
                store.image().await.checkpoints.into_keys().map(|(_, id)| id).collect();
            let mut values = Vec::new();
            for id in &ids {
                values.push(store.accessor.get(&store.thread, Some(*id)).await.unwrap().unwrap().json("messages"));
            }
            let theirs: BTreeSet<CheckpointId> = theirs.iter().map(|index| *index.get(&ids)).collect();
            store.by_langgraph(&theirs, |_| ()).await;
            let image = store.image().await;
            let is_refused = |id: &CheckpointId| {
                let at = |id: CheckpointId| &image.checkpoints[&(threadkeep::id::Namespace::root(), id)];
                let up = std::iter::successors(Some(at(*id)), |tuple| tuple.parent.map(at));
                let mut path =
                    up.take_while(|tuple| tuple.checkpoint.channels["messages"].stored == Stored::Sentinel);
                path.any(|tuple| theirs.contains(&tuple.checkpoint.id))
            };
            let fresh = accessor(&store.saver, frequency);
            for (id, value) in ids.iter().zip(&values) {
                let read = fresh.get(&store.thread, Some(*id)).await;
                if is_refused(id) {
                    assert_eq!(read.unwrap_err(), refusal(*id));
                } else {
                    assert_eq!(&read.unwrap().unwrap().json("messages"), value);
                }
            }
            let whole = fresh.history(&store.thread, HistoryQuery::default()).await;
            assert_eq!(whole.is_err(), ids.iter().any(is_refused), "{whole:?}");
            assert_eq!(verify(&store.saver, &store.thread, fresh.table()).await.unwrap(), []);

            // Pruning replays none of them either, and leaves what they are replayed from.
            let latest = Prune { boundary: Boundary::FreshSnapshot, ..Prune::keeping(Keep::Latest) };
            prune(&store.saver, &store.thread, &latest, fresh.table()).await.unwrap();
            let head = ids.last().unwrap();
            let read = accessor(&store.saver, frequency).get(&store.thread, None).await;
            if is_refused(head) {
                assert_eq!(read.unwrap_err(), refusal(*head));
            } else {
                assert_eq!(&read.unwrap().unwrap().json("messages"), values.last().unwrap());
            }
        });
    }
}

//! A thread as a graph of LangGraph writes it, with the Python package's savers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Value as Json, json};
use threadkeep::id::CheckpointId;
use threadkeep::saver::Saver;
use threadkeep::value::ChannelValue;
use threadkeep_langgraph::{Fence, Frame, LangGraph, ListRequest, Place, Put, PutWrites, Seed};

/// What a checkpoint stores of a channel.
pub(crate) enum Entry {
    /// The value, as of a channel that is no delta channel.
    Value(Json),
    /// The value of a delta channel.
    Snapshot(Json),
    /// That a delta channel has changed, with this write of the task that ran before.
    Changed(Json),
}

/// A graph on a thread.
pub(crate) struct Graph {
    graphs: LangGraph,
    place: Place,
}

impl Graph {
    /// On this store.
    pub(crate) fn on(saver: Arc<dyn Saver>, thread: &str) -> Self {
        Self { graphs: LangGraph::new(saver, Fence::Fork), place: Place::new(thread, "") }
    }

    /// The id of its checkpoint with this number.
    pub(crate) fn id(&self, n: u8) -> CheckpointId {
        self.place.id(&format!("1ef4f797-8335-6428-8001-0000000000{n:02x}")).unwrap()
    }

    /// Stores a checkpoint with these channels, after the one with the number before it.
    pub(crate) async fn put(&self, n: u8, channels: Vec<(&str, Entry)>) {
        let parent = n.checked_sub(1).map(|before| self.id(before));
        self.put_after(parent, n, channels).await;
    }

    /// Stores a checkpoint with these channels, after this one.
    pub(crate) async fn put_after(&self, parent: Option<CheckpointId>, n: u8, channels: Vec<(&str, Entry)>) {
        let of = |name: &&str| (*name).to_owned();
        let names: Vec<&str> = channels.iter().map(|(name, _)| *name).collect();
        let (mut values, mut snapshots, mut counters) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
        let mut writes = Vec::new();
        for (name, entry) in channels {
            let name = name.to_owned();
            match entry {
                Entry::Value(json) => drop(values.insert(name, value(&json))),
                Entry::Snapshot(json) => {
                    snapshots.insert(name.clone());
                    values.insert(name, value(&json));
                }
                Entry::Changed(json) => {
                    counters.insert(name.clone(), json!([n, n]));
                    writes.push((name, value(&json)));
                }
            }
        }
        if let Some(id) = parent.filter(|_| !writes.is_empty()) {
            let (task, path) = (format!("task-{n}"), String::new());
            let put = PutWrites { place: self.place.clone(), id, task, path, writes };
            self.graphs.put_writes(&put).await.unwrap();
        }
        let mut metadata = json!({"source": "loop", "step": n, "parents": {}});
        if !counters.is_empty() {
            metadata["counters_since_delta_snapshot"] = json!(counters);
        }
        let put = Put {
            place: self.place.clone(),
            id: self.id(n),
            parent,
            seen: None,
            frame: Frame::default(),
            versions: names.iter().map(|name| (of(name), json!(1_000 + u64::from(n)))).collect(),
            new: names.iter().map(of).collect(),
            values,
            held: BTreeSet::new(),
            snapshots,
            metadata: metadata.as_object().unwrap().clone(),
        };
        self.graphs.put(&put).await.unwrap();
    }

    /// The values of every checkpoint, as a graph gets them.
    pub(crate) async fn values(&self) -> BTreeMap<CheckpointId, BTreeMap<String, ChannelValue>> {
        let all = ListRequest { thread: Some(self.place.thread.clone()), ..ListRequest::default() };
        let listed = self.graphs.list(&all).await.unwrap();
        listed.into_iter().map(|tuple| (tuple.id, tuple.values)).collect()
    }

    /// What a graph replays a delta channel from, at this checkpoint.
    pub(crate) async fn replayed(
        &self,
        at: CheckpointId,
        channel: &str,
    ) -> (Option<Seed>, Vec<ChannelValue>) {
        let channels = BTreeSet::from([channel.to_owned()]);
        let mut history = self.graphs.history(&self.place, Some(at), &channels).await.unwrap();
        let replay = history.remove(channel).unwrap();
        (replay.seed, replay.writes.into_iter().map(|(_, _, value)| value).collect())
    }
}

fn value(json: &Json) -> ChannelValue {
    ChannelValue::from_json(json).unwrap()
}

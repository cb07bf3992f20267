//! LangGraph's calls on a saver that fails, and beside others who change the thread.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::json;
use threadkeep::checkpoint::{
    ChannelEntry, Checkpoint, CheckpointKey, CheckpointTuple, Stored, TaskWrites, Write,
};
use threadkeep::id::{ChannelName, CheckpointId, TaskId, ThreadId, Version};
use threadkeep::metadata::{Counters, Metadata, Source};
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, Flush, ListQuery, Revision, Rewrite, Saver, StepCommit,
    ThreadImage,
};
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};
use threadkeep_langgraph::{Fence, Frame, LangGraph, ListRequest, Place, Put, PutWrites, stored};
use threadkeep_memory::MemorySaver;

/// What somebody else does before the next call of a method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    /// The store fails a put of writes.
    PutWritesFails,
    /// The thread is deleted before a get.
    DeletedBeforeGet,
    /// The thread is deleted before a list.
    DeletedBeforeList,
    /// The thread's head takes the place of all others before a list.
    PrunedBeforeList,
}

struct Beside {
    saver: MemorySaver,
    meanwhile: Mutex<Option<Meanwhile>>,
}

impl Beside {
    fn comes(&self, what: Meanwhile) -> bool {
        self.meanwhile.lock().unwrap().take_if(|next| *next == what).is_some()
    }
}

#[async_trait]
impl Saver for Beside {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        if self.comes(Meanwhile::DeletedBeforeGet) {
            self.saver.delete_thread(&at.thread).await?;
        }
        self.saver.get(at).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        if self.comes(Meanwhile::DeletedBeforeList) {
            self.saver.delete_thread(&query.thread).await?;
        }
        if self.comes(Meanwhile::PrunedBeforeList) {
            let mut image = self.saver.read_thread(&query.thread).await?;
            let (_, mut head) = image.checkpoints.pop_last().unwrap();
            head.parent = None;
            head.checkpoint.applied.clear();
            head.metadata.counters.clear();
            for entry in head.checkpoint.channels.values_mut() {
                if entry.stored == Stored::Sentinel {
                    entry.stored = Stored::Value(text("whole"));
                }
            }
            let rewrite = Rewrite { remove: image.checkpoints.into_keys().collect(), put: vec![head] };
            self.saver.rewrite_thread(&query.thread, &image.revision, rewrite).await?;
        }
        self.saver.list(query).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        if self.saver.get(&CheckpointSelector::at(at)).await?.is_some()
            && self.comes(Meanwhile::PutWritesFails)
        {
            return Err(Error::Unavailable { saver: "beside", reason: "a test".to_owned() });
        }
        self.saver.put_writes(at, task).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        self.saver.commit(step).await
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        self.saver.flush(thread).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        self.saver.delta_history(at, channels, reach).await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        self.saver.delete_thread(thread).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        self.saver.threads(after, limit).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        self.saver.read_thread(thread).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        self.saver.rewrite_thread(thread, expected, rewrite).await
    }

    fn capabilities(&self) -> Capabilities {
        self.saver.capabilities()
    }
}

struct Lab {
    beside: Arc<Beside>,
    graphs: LangGraph,
    place: Place,
}

impl Lab {
    fn new() -> Self {
        let beside = Arc::new(Beside { saver: MemorySaver::default(), meanwhile: Mutex::default() });
        let graphs = LangGraph::new(beside.clone(), Fence::Fork);
        Self { beside, graphs, place: Place::new("t", "") }
    }

    fn meanwhile(&self, what: Meanwhile) {
        *self.beside.meanwhile.lock().unwrap() = Some(what);
    }

    fn id(&self, n: u8) -> CheckpointId {
        self.place.id(&format!("1ef4f797-8335-6428-8001-0000000000{n:02x}")).unwrap()
    }

    /// Checkpoint `n`, after the one before it. The first one has a value of the channel `d`, the others count its changes.
    async fn put(&self, n: u8) -> Result<()> {
        let parent = n.checked_sub(1).map(|parent| self.id(parent));
        let metadata = match n {
            0 => json!({"source": "input", "step": 0, "parents": {}}),
            n => json!({
                "source": "loop", "step": n, "parents": {}, "counters_since_delta_snapshot": {"d": [n, n]},
            }),
        };
        let put = Put {
            place: self.place.clone(),
            id: self.id(n),
            parent,
            seen: None,
            frame: Frame::default(),
            versions: BTreeMap::from([("d".to_owned(), json!(n))]),
            new: BTreeSet::from(["d".to_owned()]),
            values: if n == 0 { BTreeMap::from([("d".to_owned(), text("seed"))]) } else { BTreeMap::new() },
            held: BTreeSet::new(),
            snapshots: BTreeSet::new(),
            metadata: metadata.as_object().unwrap().clone(),
        };
        self.graphs.put(&put).await
    }

    async fn write(&self, n: u8, task: &str) -> Result<()> {
        let put = PutWrites {
            place: self.place.clone(),
            id: self.id(n),
            task: task.to_owned(),
            path: String::new(),
            writes: vec![("d".to_owned(), text(task))],
        };
        self.graphs.put_writes(&put).await
    }

    /// The tasks that wrote under a checkpoint.
    async fn tasks(&self, n: u8) -> Vec<String> {
        let found = self.graphs.get(&self.place, Some(self.id(n))).await.unwrap().unwrap();
        found.writes.into_iter().map(|(task, ..)| task).collect()
    }
}

fn text(text: &str) -> ChannelValue {
    stored("msgpack", Bytes::from(rmp_serde::to_vec(text).unwrap())).unwrap()
}

#[tokio::test]
async fn writes_that_waited_for_a_checkpoint_outlive_a_store_that_fails() {
    for (repeated, tasks) in [("the put", vec!["a", "b"]), ("a write", vec!["a", "b", "c"])] {
        let lab = Lab::new();
        lab.put(0).await.unwrap();
        lab.write(1, "a").await.unwrap();
        lab.write(1, "b").await.unwrap();
        lab.meanwhile(Meanwhile::PutWritesFails);
        assert!(matches!(lab.put(1).await, Err(Error::Unavailable { .. })));
        match repeated {
            "the put" => lab.put(1).await.unwrap(),
            _ => lab.write(1, "c").await.unwrap(),
        }
        assert_eq!(lab.tasks(1).await, tasks, "after {repeated} is repeated");
    }
}

/// A checkpoint of the gateway: its messages are stored as the change that a task made.
async fn change(lab: &Lab) {
    let message = json!({"type": "human", "id": "m1", "content": "hello"});
    let messages = |json: serde_json::Value| ChannelValue::from_json(&json).unwrap();
    let step = |n, stored, parent, counters| StepCommit {
        thread: lab.place.thread.clone(),
        namespace: lab.place.namespace.clone(),
        parent,
        expected_head: parent,
        checkpoint: Checkpoint {
            id: lab.id(n),
            channels: [(
                "messages".into(),
                ChannelEntry { version: Version { counter: u64::from(n) + 1, random: 7 }, stored },
            )]
            .into_iter()
            .collect(),
            next: Vec::new(),
            applied: Vec::new(),
        },
        metadata: Metadata { delta_marker: n > 0, counters, ..Metadata::new(Source::Loop, i64::from(n)) },
        writes: Vec::new(),
        flush: Flush::Now,
    };
    let first = step(0, Stored::Value(messages(json!([]))), None, BTreeMap::new());
    lab.beside.saver.commit(first).await.unwrap();
    let counted = BTreeMap::from([("messages".into(), Counters { updates: 1, supersteps: 1 })]);
    let mut second = step(1, Stored::Sentinel, Some(lab.id(0)), counted);
    let write = Write { channel: "messages".into(), value: messages(json!([message])), overwrite: false };
    let task = TaskId::from_bytes([5; 16]);
    second.checkpoint.applied = vec![task];
    second.writes = vec![TaskWrites { task, node: "agent".into(), index: 0, writes: vec![write] }];
    lab.beside.saver.commit(second).await.unwrap();
}

#[tokio::test]
async fn a_thread_of_the_gateway_that_is_deleted_while_it_is_listed_is_not_listed() {
    let lab = Lab::new();
    change(&lab).await;
    assert_eq!(lab.graphs.list(&ListRequest::default()).await.unwrap().len(), 2);
    lab.meanwhile(Meanwhile::DeletedBeforeGet);
    let left = lab.graphs.list(&ListRequest::default()).await.unwrap();
    assert!(left.iter().all(|tuple| tuple.id == lab.id(0)), "{left:?}");
    assert_eq!(lab.graphs.list(&ListRequest::default()).await.unwrap().len(), 0);
}

#[tokio::test]
async fn a_history_beside_a_change_of_its_thread_is_that_of_one_moment() {
    for (meanwhile, seed, writes) in [
        (None, Some("seed"), 2),
        (Some(Meanwhile::DeletedBeforeList), None, 0),
        (Some(Meanwhile::PrunedBeforeList), None, 0),
    ] {
        let lab = Lab::new();
        for n in 0..3 {
            lab.put(n).await.unwrap();
            lab.write(n, "a").await.unwrap();
        }
        *lab.beside.meanwhile.lock().unwrap() = meanwhile;
        let channels = BTreeSet::from(["d".to_owned()]);
        let history = lab.graphs.history(&lab.place, Some(lab.id(2)), &channels).await;
        let replay = &history.unwrap()["d"];
        assert_eq!(replay.seed.as_ref().map(|seed| seed.value.clone()), seed.map(text), "{meanwhile:?}");
        assert_eq!(replay.writes.len(), writes, "{meanwhile:?}");
    }
}

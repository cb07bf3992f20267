//! LangGraph's calls on a saver that fails, and beside others who change the thread.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
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
use threadkeep_langgraph::{Fence, Frame, LangGraph, ListRequest, Place, Put, PutWrites, Strategy, stored};
use threadkeep_memory::MemorySaver;

/// What somebody else does before the next call of a method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    /// The store fails a put of writes.
    PutWritesFails,
    /// The store fails a put of ordinary writes.
    PutOrdinaryFails,
    /// The store fails a change of the thread `z`, the last one.
    LastThreadFails,
    /// The thread is deleted before a get.
    DeletedBeforeGet,
    /// The thread is deleted before a list.
    DeletedBeforeList,
    /// The thread's head takes the place of all others before a list.
    PrunedBeforeList,
}

#[derive(Default)]
struct Beside {
    saver: MemorySaver,
    meanwhile: Mutex<Option<Meanwhile>>,
    /// How many values were read.
    values: AtomicUsize,
}

fn fails() -> Error {
    Error::Unavailable { saver: "beside", reason: "a test".to_owned() }
}

impl Beside {
    fn count<'t>(&self, tuples: impl IntoIterator<Item = &'t CheckpointTuple>) {
        let has_value = |tuple: &&CheckpointTuple| {
            tuple.checkpoint.channels.get("d").is_some_and(|entry| entry.stored.value().is_some())
        };
        self.values.fetch_add(tuples.into_iter().filter(has_value).count(), Ordering::Relaxed);
    }

    fn change(&self, thread: &ThreadId) -> Result<()> {
        if *thread == ThreadId::from("z") && self.comes(Meanwhile::LastThreadFails) {
            return Err(fails());
        }
        Ok(())
    }

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
        let found = self.saver.get(at).await?;
        self.count(&found);
        Ok(found)
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
        let found = self.saver.list(query).await?;
        self.count(&found);
        Ok(found)
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        if self.saver.get(&CheckpointSelector::at(at)).await?.is_some()
            && self.comes(Meanwhile::PutWritesFails)
        {
            return Err(fails());
        }
        if task.writes.iter().any(|write| write.channel.as_str() == "d")
            && self.comes(Meanwhile::PutOrdinaryFails)
        {
            return Err(fails());
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
        self.change(thread)?;
        self.saver.delete_thread(thread).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        self.saver.threads(after, limit).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        self.saver.read_thread(thread).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        self.change(thread)?;
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
        let beside = Arc::new(Beside::default());
        let graphs = LangGraph::new(beside.clone(), Fence::Fork);
        Self { beside, graphs, place: Place::new("t", "") }
    }

    /// The same store, and another thread.
    fn thread(&self, thread: &str) -> Self {
        let (beside, graphs) = (self.beside.clone(), self.graphs.on(self.beside.clone()));
        Self { beside, graphs, place: Place::new(thread, "") }
    }

    fn meanwhile(&self, what: Meanwhile) {
        *self.beside.meanwhile.lock().unwrap() = Some(what);
    }

    fn id(&self, n: u8) -> CheckpointId {
        self.place.id(&format!("1ef4f797-8335-6428-8001-0000000000{n:02x}")).unwrap()
    }

    /// Checkpoint `n`, after the one before it. The first one has a value of the channel `d`, the others count its changes.
    async fn put(&self, n: u8) -> Result<()> {
        self.put_after(n.checked_sub(1), n).await
    }

    async fn put_after(&self, parent: Option<u8>, n: u8) -> Result<()> {
        let first = parent.is_none();
        let parent = parent.map(|parent| self.id(parent));
        let metadata = match n {
            _ if first => json!({"source": "input", "step": 0, "parents": {}, "run_id": "r"}),
            n => json!({
                "source": "loop", "step": n, "parents": {}, "run_id": "r", "counters_since_delta_snapshot": {"d": [n, n]},
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
            values: if first { BTreeMap::from([("d".to_owned(), text("seed"))]) } else { BTreeMap::new() },
            held: BTreeSet::new(),
            snapshots: BTreeSet::new(),
            metadata: metadata.as_object().unwrap().clone(),
        };
        self.graphs.put(&put).await
    }

    async fn write(&self, n: u8, task: &str) -> Result<()> {
        self.write_to(n, task, &["d"]).await
    }

    async fn write_to(&self, n: u8, task: &str, channels: &[&str]) -> Result<()> {
        let put = PutWrites {
            place: self.place.clone(),
            id: self.id(n),
            task: task.to_owned(),
            path: String::new(),
            writes: channels.iter().map(|channel| ((*channel).to_owned(), text(task))).collect(),
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
        let error = lab.put(1).await.unwrap_err();
        assert!(matches!(error, Error::InDoubt { .. }), "the checkpoint is stored: {error}");
        assert!(error.to_string().contains(&format!("checkpoint {} is stored", lab.id(1))), "{error}");
        match repeated {
            "the put" => lab.put(1).await.unwrap(),
            _ => lab.write(1, "c").await.unwrap(),
        }
        assert_eq!(lab.tasks(1).await, tasks, "after {repeated} is repeated");
    }
}

#[tokio::test]
async fn a_call_that_fails_after_its_first_step_says_what_was_done() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    // Nothing is done before the first step.
    lab.meanwhile(Meanwhile::PutOrdinaryFails);
    assert!(matches!(lab.write(0, "a").await, Err(Error::Unavailable { .. })));
    lab.meanwhile(Meanwhile::PutOrdinaryFails);
    let error = lab.write_to(0, "a", &["__error__", "d"]).await.unwrap_err();
    assert!(matches!(error, Error::InDoubt { .. }), "{error}");
    assert!(error.to_string().contains("the special writes of task a are stored"), "{error}");
    assert_eq!(lab.tasks(0).await, ["a"]);
    // What waited for the checkpoint is stored after what is put now.
    lab.write(1, "a").await.unwrap();
    lab.meanwhile(Meanwhile::PutWritesFails);
    assert!(matches!(lab.put(1).await, Err(Error::InDoubt { .. })));
    lab.write_to(1, "b", &["__error__"]).await.unwrap();

    let threads = ["y", "z"].map(|thread| lab.thread(thread));
    let names = threads.each_ref().map(|lab| lab.place.thread.clone());
    let runs = BTreeSet::from(["r".to_owned()]);
    for strategy in [Some(Strategy::KeepLatest), Some(Strategy::Delete), None] {
        for thread in &threads {
            for n in 0..3 {
                thread.put_after(None, n).await.unwrap();
            }
        }
        if let Some(strategy) = strategy {
            lab.meanwhile(Meanwhile::LastThreadFails);
            let error = lab.graphs.prune(&names[1..], strategy).await.unwrap_err();
            assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        }
        lab.meanwhile(Meanwhile::LastThreadFails);
        let error = match strategy {
            Some(strategy) => lab.graphs.prune(&names, strategy).await.unwrap_err(),
            None => lab.graphs.delete_for_runs(&runs).await.unwrap_err(),
        };
        assert!(matches!(error, Error::InDoubt { .. }), "{error}");
        let expected =
            if strategy.is_some() { "1 of 2 threads were pruned" } else { "2 of 3 threads were changed" };
        assert!(error.to_string().contains(expected), "{error}");
        lab.graphs.prune(&names, Strategy::Delete).await.unwrap();
    }
}

#[tokio::test]
async fn a_thread_that_another_process_deleted_may_be_put_again() {
    let lab = Lab::new();
    lab.put(0).await.unwrap();
    lab.put(1).await.unwrap();
    // Not through this process's memory, which has the old head.
    lab.beside.saver.delete_thread(&lab.place.thread).await.unwrap();
    lab.put(0).await.unwrap();
    lab.put(1).await.unwrap();
    // What is older than the head that exists comes too late.
    lab.put_after(None, 3).await.unwrap();
    let error = lab.put_after(None, 2).await.unwrap_err();
    assert!(matches!(error, Error::Conflict { found, .. } if found == Some(lab.id(3))), "{error}");
}

#[tokio::test]
async fn what_others_wrote_to_a_thread_is_not_taken_back() {
    let lab = Lab::new();
    let thread = &lab.place.thread;
    let key = |n| (lab.place.namespace.clone(), lab.id(n));
    let tasks = |tasks: &[&str]| tasks.iter().map(|task| (*task).to_owned()).collect::<BTreeSet<_>>();
    let put = BTreeMap::from([(key(0), tasks(&["a"])), (key(1), tasks(&[]))]);
    assert!(lab.graphs.take_back(thread, &put).await.unwrap(), "nothing is left of nothing");
    lab.put(0).await.unwrap();
    lab.write(0, "a").await.unwrap();
    let less = BTreeMap::from([(key(0), tasks(&[]))]);
    assert!(!lab.graphs.take_back(thread, &less).await.unwrap(), "somebody else wrote");
    assert!(!lab.graphs.take_back(thread, &BTreeMap::new()).await.unwrap(), "somebody else put");
    assert_eq!(lab.tasks(0).await, ["a"]);
    assert!(lab.graphs.take_back(thread, &put).await.unwrap());
    assert!(lab.graphs.get(&lab.place, None).await.unwrap().is_none());
    lab.put(0).await.unwrap();
    lab.put(1).await.unwrap();
    lab.put(2).await.unwrap();
    assert!(!lab.graphs.take_back(thread, &put).await.unwrap());
    assert!(lab.graphs.get(&lab.place, Some(lab.id(0))).await.unwrap().is_some());
}

#[tokio::test]
async fn a_list_of_all_threads_reads_the_values_that_it_answers() {
    let lab = Lab::new();
    for n in 0..5 {
        lab.thread(&format!("t{n}")).put(0).await.unwrap();
    }
    let filter = json!({"step": 0.0, "absent": null}).as_object().unwrap().clone();
    for (request, found) in [
        (ListRequest { limit: Some(2), ..ListRequest::default() }, 2),
        (ListRequest { limit: Some(2), filter: filter.clone(), ..ListRequest::default() }, 2),
        (ListRequest { limit: Some(9), filter: filter.clone(), ..ListRequest::default() }, 5),
        (ListRequest { limit: Some(1), thread: Some("t3".into()), filter, ..ListRequest::default() }, 1),
        (ListRequest { id: Some(lab.id(0)), limit: Some(3), ..ListRequest::default() }, 3),
        (ListRequest { limit: Some(0), ..ListRequest::default() }, 0),
        (ListRequest::default(), 5),
    ] {
        lab.beside.values.store(0, Ordering::Relaxed);
        let listed = lab.graphs.list(&request).await.unwrap();
        assert_eq!((listed.len(), lab.beside.values.load(Ordering::Relaxed)), (found, found), "{request:?}");
        assert!(listed.iter().all(|tuple| tuple.values.get("d") == Some(&text("seed"))));
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

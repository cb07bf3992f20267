//! A store beside which others do things, and calls on it.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use futures::FutureExt;
use serde_json::json;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, Stored, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, ListQuery, Revision, Rewrite, Saver, StepCommit,
    ThreadImage,
};
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};
use threadkeep_langgraph::{Caller, Fence, LangGraph, Place, Put, PutWrites, stored};
use threadkeep_memory::MemorySaver;
use tokio::sync::Notify;

/// What somebody else does before the next call of a method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meanwhile {
    /// The store fails a put of writes.
    PutWritesFails,
    /// A put of writes waits before it stores them.
    PutWritesWaits,
    /// The store fails a put of ordinary writes.
    PutOrdinaryFails,
    /// The store fails a change of the thread `z`, the last one.
    LastThreadFails,
    /// The thread is deleted before a get.
    DeletedBeforeGet,
    /// The thread is deleted before each get.
    DeletedBeforeEachGet,
    /// The thread is deleted before a list.
    DeletedBeforeList,
    /// The thread is deleted before it is read as a whole.
    DeletedBeforeRead,
    /// The thread's head takes the place of all others before a list.
    PrunedBeforeList,
    /// A get waits once it has read.
    GetWaits,
}

#[derive(Default)]
pub(crate) struct Beside {
    pub(crate) saver: MemorySaver,
    pub(crate) meanwhile: Mutex<Option<Meanwhile>>,
    /// How many values were read.
    pub(crate) values: AtomicUsize,
    /// How many checkpoints were read one by one.
    pub(crate) gets: AtomicUsize,
    /// How many paths of delta channels were read.
    pub(crate) paths: AtomicUsize,
    /// A get has read and waits, with [`Meanwhile::GetWaits`], or a put of writes waits, with
    /// [`Meanwhile::PutWritesWaits`].
    pub(crate) read: Notify,
    /// It goes on.
    pub(crate) goes_on: Notify,
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
        let each = *self.meanwhile.lock().unwrap() == Some(Meanwhile::DeletedBeforeEachGet);
        if each || self.comes(Meanwhile::DeletedBeforeGet) {
            self.saver.delete_thread(&at.thread).await?;
        }
        self.gets.fetch_add(1, Ordering::Relaxed);
        let found = self.saver.get(at).await?;
        if self.comes(Meanwhile::GetWaits) {
            self.read.notify_one();
            self.goes_on.notified().await;
        }
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
        if self.comes(Meanwhile::PutWritesWaits) {
            self.read.notify_one();
            self.goes_on.notified().await;
        }
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
        self.paths.fetch_add(1, Ordering::Relaxed);
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
        if self.comes(Meanwhile::DeletedBeforeRead) {
            self.saver.delete_thread(thread).await?;
        }
        let image = self.saver.read_thread(thread).await?;
        self.count(image.checkpoints.values());
        Ok(image)
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        self.change(thread)?;
        self.saver.rewrite_thread(thread, expected, rewrite).await
    }

    fn capabilities(&self) -> Capabilities {
        self.saver.capabilities()
    }
}

pub(crate) struct Lab {
    pub(crate) beside: Arc<Beside>,
    pub(crate) graphs: LangGraph,
    pub(crate) place: Place,
}

impl Lab {
    pub(crate) fn new() -> Self {
        let beside = Arc::new(Beside::default());
        let graphs = LangGraph::new(beside.clone(), Fence::Fork);
        Self { beside, graphs, place: Place::new("t", "") }
    }

    /// The same store, and another thread.
    pub(crate) fn thread(&self, thread: &str) -> Self {
        let (beside, graphs) = (self.beside.clone(), self.graphs.on(self.beside.clone()));
        Self { beside, graphs, place: Place::new(thread, "") }
    }

    pub(crate) fn meanwhile(&self, what: Meanwhile) {
        *self.beside.meanwhile.lock().unwrap() = Some(what);
    }

    pub(crate) fn id(&self, n: u8) -> CheckpointId {
        self.place.id(&format!("1ef4f797-8335-6428-8001-0000000000{n:02x}")).unwrap()
    }

    /// Begins a call while another one waits in the store, and lets that go on. The call has to wait for it.
    pub(crate) async fn begun_while_one_waits<T>(&self, call: impl Future<Output = T>) -> T {
        self.beside.read.notified().await;
        let mut call = pin!(call);
        assert!(call.as_mut().now_or_never().is_none(), "it waits for the other one");
        self.beside.goes_on.notify_one();
        call.await
    }

    /// Checkpoint `n`, after the one before it. The first one has a value of the channel `d`, the others count its changes.
    pub(crate) async fn put(&self, n: u8) -> Result<()> {
        self.put_after(n.checked_sub(1), n).await
    }

    pub(crate) async fn put_after(&self, parent: Option<u8>, n: u8) -> Result<()> {
        let first = parent.is_none();
        let parent = parent.map(|parent| self.id(parent));
        let metadata = match n {
            _ if first => json!({"source": "input", "step": 0, "parents": {}, "run_id": "r"}),
            n => json!({
                "source": "loop", "step": n, "parents": {}, "run_id": "r", "counters_since_delta_snapshot": {"d": [n, n]},
            }),
        };
        let put = Put {
            versions: BTreeMap::from([("d".to_owned(), json!(n))]),
            new: BTreeSet::from(["d".to_owned()]),
            values: if first { BTreeMap::from([("d".to_owned(), text("seed"))]) } else { BTreeMap::new() },
            ..Put::new(self.place.clone(), self.id(n), parent, metadata.as_object().unwrap().clone())
        };
        self.graphs.put(&put).await
    }

    pub(crate) async fn write(&self, n: u8, task: &str) -> Result<()> {
        self.write_to(n, task, &["d"]).await
    }

    pub(crate) async fn write_to(&self, n: u8, task: &str, channels: &[&str]) -> Result<()> {
        self.write_values(n, task, &channels.iter().map(|channel| (*channel, task)).collect::<Vec<_>>()).await
    }

    /// Writes of a task: channels and values.
    pub(crate) async fn write_values(&self, n: u8, task: &str, writes: &[(&str, &str)]) -> Result<()> {
        let put = PutWrites {
            place: self.place.clone(),
            id: self.id(n),
            task: task.to_owned(),
            path: String::new(),
            writes: writes.iter().map(|(channel, value)| ((*channel).to_owned(), text(value))).collect(),
        };
        self.graphs.put_writes(&put).await
    }

    /// The same store and thread, for the calls of a run.
    pub(crate) fn of_run(&self, run: u64) -> Self {
        self.called_by(Caller::Run(run))
    }

    /// The same store and thread, for the calls of somebody.
    pub(crate) fn called_by(&self, caller: Caller) -> Self {
        let (beside, graphs) = (self.beside.clone(), self.graphs.called_by(caller));
        Self { beside, graphs, place: self.place.clone() }
    }

    /// The same store, of which nothing is remembered.
    pub(crate) fn opened_again(&self) -> Self {
        let graphs = LangGraph::new(self.beside.clone(), Fence::Fork);
        Self { beside: self.beside.clone(), graphs, place: self.place.clone() }
    }

    /// The tasks whose writes to the channel `d` a replay of a checkpoint finds.
    pub(crate) async fn replayed(&self, n: u8) -> Vec<String> {
        let channels = BTreeSet::from(["d".to_owned()]);
        let mut history = self.graphs.history(&self.place, Some(self.id(n)), &channels).await.unwrap();
        history.remove("d").unwrap().writes.into_iter().map(|(task, ..)| task).collect()
    }

    /// The tasks that wrote under a checkpoint.
    pub(crate) async fn tasks(&self, n: u8) -> Vec<String> {
        let found = self.graphs.get(&self.place, Some(self.id(n))).await.unwrap().unwrap();
        found.writes.into_iter().map(|(task, ..)| task).collect()
    }
}

pub(crate) fn text(text: &str) -> ChannelValue {
    stored("msgpack", Bytes::from(rmp_serde::to_vec(text).unwrap())).unwrap()
}

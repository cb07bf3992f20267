//! The saver.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, IdSource, ThreadId};
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, Flush, ListQuery, Revision, Rewrite, Saver, StepCommit,
    ThreadImage,
};
use threadkeep::{Error, Result};
use tokio::task::spawn_blocking;

use crate::format::prepare;
use crate::memo::Memo;
use crate::overlay::Overlay;
use crate::record::Mark;
use crate::store::{Snapshot, Store};
use crate::writer::Writer;
use crate::{change, queries, rewrite};

/// A saver over a [`Store`]. Cloning creates another handle on the same one. Its methods need a tokio runtime.
#[derive(Clone)]
pub struct KvSaver {
    store: Arc<dyn Store>,
    writer: Arc<Writer>,
    memo: Arc<Memo>,
    ids: Arc<IdSource>,
}

impl fmt::Debug for KvSaver {
    /// Shows no content, which is conversations.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvSaver").field("store", &self.store.name()).finish_non_exhaustive()
    }
}

impl KvSaver {
    /// A saver over a store, which is prepared if it is empty. This blocks.
    ///
    /// # Errors
    /// [`Error::NewerFormat`]; [`Error::InvalidInput`] if the store holds something else; those of the store.
    pub fn open(store: impl Store) -> Result<Self> {
        let store: Arc<dyn Store> = Arc::new(store);
        prepare(&*store)?;
        let writer = Arc::new(Writer::new(store.clone()));
        Ok(Self { store, writer, memo: Arc::default(), ids: Arc::default() })
    }

    /// Reads on one snapshot.
    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&dyn Snapshot) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let store = self.store.clone();
        let read = spawn_blocking(move || read(&*store.snapshot()?));
        let name = self.store.name();
        read.await.map_err(|error| Error::Unavailable { saver: name, reason: error.to_string() })?
    }

    /// Changes a thread; `change` is given the mark that the thread then has.
    async fn write(
        &self,
        flush: Flush,
        change: impl Fn(&mut Overlay<'_>, &Memo, Mark) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let (memo, mark) = (self.memo.clone(), *self.ids.task().as_bytes());
        self.writer.write(flush, move |rows| change(rows, &memo, mark)).await
    }
}

#[async_trait]
impl Saver for KvSaver {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        let at = at.clone();
        self.read(move |rows| queries::get(rows, &at)).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        let query = query.clone();
        self.read(move |rows| queries::list(rows, &query)).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        let (at, task) = (at.clone(), task.clone());
        let put =
            move |rows: &mut Overlay<'_>, memo: &Memo, mark| change::put_writes(rows, memo, &at, &task, mark);
        self.write(Flush::Now, put).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        step.validate()?;
        let (key, flush) = (step.key(), step.flush);
        self.write(flush, move |rows, memo, mark| change::commit(rows, memo, &step, mark)).await?;
        Ok(key)
    }

    async fn flush(&self, _: &ThreadId) -> Result<()> {
        self.writer.write(Flush::Now, |_| Ok(())).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        let (at, channels) = (at.clone(), channels.clone());
        self.read(move |rows| queries::delta_history(rows, &at, &channels, reach)).await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        let id = thread.clone();
        self.write(Flush::Now, move |rows, memo, _| change::delete_thread(rows, memo, &id)).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        let after = after.cloned();
        self.read(move |rows| queries::threads(rows, after.as_ref(), limit)).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        let id = thread.clone();
        self.read(move |rows| queries::read_thread(rows, &id)).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        let (id, expected) = (thread.clone(), expected.clone());
        let change = move |rows: &mut Overlay<'_>, memo: &Memo, mark| {
            rewrite::rewrite_thread(rows, memo, &id, (&expected, &rewrite), mark)
        };
        self.write(Flush::Now, change).await
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { name: self.store.name(), durable: self.store.durable(), shared_elements: true }
    }
}

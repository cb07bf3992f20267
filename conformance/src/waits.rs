//! What a case waits for, so that one that never ends says where it hangs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use async_trait::async_trait;
use threadkeep::Result;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::{
    Capabilities, CheckpointSelector, Coming, DeltaHistory, ListQuery, Revision, Rewrite, Saver, StepCommit,
    Summary, ThreadImage,
};

/// What was begun and has not ended: calls of savers and of the factory, and lines that child processes should print.
#[derive(Clone, Default)]
pub(crate) struct Waits(Arc<Mutex<Begun>>);

#[derive(Default)]
struct Begun {
    count: u64,
    open: BTreeMap<u64, (String, Instant)>,
}

impl Waits {
    /// Notes something that ends when the returned value is dropped.
    pub(crate) fn begin(&self, what: impl Into<String>) -> Wait {
        let mut begun = self.begun();
        begun.count += 1;
        let number = begun.count;
        begun.open.insert(number, (what.into(), Instant::now()));
        Wait { waits: self.clone(), number }
    }

    /// What has not ended, oldest first, and how much was done: a case on a slow store is no case that hangs.
    pub(crate) fn report(&self) -> String {
        const SHOWN: usize = 8;
        let begun = self.begun();
        let none = begun.open.is_empty();
        let mut text =
            if none { "it waits for no call of the saver or the factory" } else { "it waits for" }.to_owned();
        for (what, since) in begun.open.values().take(SHOWN) {
            let _ = write!(text, "\n    {what}, for {} s", since.elapsed().as_secs());
        }
        if begun.open.len() > SHOWN {
            let _ = write!(text, "\n    and {} more", begun.open.len() - SHOWN);
        }
        let _ = write!(
            text,
            "\n    it began {} calls; if they are only slow, set more seconds: THREADKEEP_CONFORMANCE_LIMIT or --limit",
            begun.count
        );
        text
    }

    // Each change is one insertion or removal, so a poisoned lock still guards a whole map.
    fn begun(&self) -> MutexGuard<'_, Begun> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Something that has not ended.
pub(crate) struct Wait {
    waits: Waits,
    number: u64,
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.waits.begun().open.remove(&self.number);
    }
}

/// A handle whose calls are noted while they run.
pub(crate) struct Watched {
    pub(crate) saver: Arc<dyn Saver>,
    pub(crate) waits: Waits,
}

#[deny(clippy::missing_trait_methods)] // A default method would hide the saver's own.
#[async_trait]
impl Saver for Watched {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        let which = at.id.map_or_else(|| "the head".to_owned(), |id| format!("checkpoint {id}"));
        let _wait = self.waits.begin(format!("get of {which} of {:?}", at.thread));
        self.saver.get(at).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        let _wait = self.waits.begin(format!("list of {:?}", query.thread));
        self.saver.list(query).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        let what = format!("put_writes under checkpoint {} of {:?}", at.id, at.thread);
        let _wait = self.waits.begin(what);
        self.saver.put_writes(at, task).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        let what = format!("commit of checkpoint {} to {:?}", step.checkpoint.id, step.thread);
        let _wait = self.waits.begin(what);
        self.saver.commit(step).await
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        let _wait = self.waits.begin(format!("flush of {thread:?}"));
        self.saver.flush(thread).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        let what = format!("delta_history of checkpoint {} of {:?}", at.id, at.thread);
        let _wait = self.waits.begin(what);
        self.saver.delta_history(at, channels, reach).await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        let _wait = self.waits.begin(format!("delete_thread of {thread:?}"));
        self.saver.delete_thread(thread).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        let _wait = self.waits.begin(format!("threads after {after:?}"));
        self.saver.threads(after, limit).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        let _wait = self.waits.begin(format!("read_thread of {thread:?}"));
        self.saver.read_thread(thread).await
    }

    async fn revision(&self, thread: &ThreadId) -> Result<Revision> {
        let _wait = self.waits.begin(format!("revision of {thread:?}"));
        self.saver.revision(thread).await
    }

    async fn delete_seen(&self, thread: &ThreadId, expected: &Revision) -> Result<()> {
        let _wait = self.waits.begin(format!("delete_seen of {thread:?}"));
        self.saver.delete_seen(thread, expected).await
    }

    async fn summary(&self, thread: &ThreadId) -> Result<Summary> {
        let _wait = self.waits.begin(format!("summary of {thread:?}"));
        self.saver.summary(thread).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        let _wait = self.waits.begin(format!("rewrite_thread of {thread:?}"));
        self.saver.rewrite_thread(thread, expected, rewrite).await
    }

    async fn create_thread(&self, thread: &ThreadId, coming: &mut dyn Coming) -> Result<()> {
        let _wait = self.waits.begin(format!("create_thread of {thread:?}"));
        self.saver.create_thread(thread, coming).await
    }

    async fn copy_thread(&self, from: &ThreadId, to: &ThreadId) -> Result<usize> {
        let _wait = self.waits.begin(format!("copy_thread of {from:?} to {to:?}"));
        self.saver.copy_thread(from, to).await
    }

    fn capabilities(&self) -> Capabilities {
        self.saver.capabilities()
    }
}

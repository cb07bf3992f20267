//! A store some of whose values are hidden from a walk.

use std::collections::BTreeSet;

use async_trait::async_trait;
use threadkeep::Result;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, Stored, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, ListQuery, Revision, Rewrite, Saver, StepCommit,
    ThreadImage, fallback,
};
use threadkeep::value::ChannelValue;
use threadkeep_memory::MemorySaver;

use super::Fault;

/// The store as seen by a walk that accepts only some stored values as seeds.
pub(super) struct Seeds<'a>(pub(super) &'a MemorySaver, pub(super) Fault);

impl Seeds<'_> {
    fn hide(&self, tuple: &mut CheckpointTuple) {
        for entry in tuple.checkpoint.channels.values_mut() {
            let hidden = match (&entry.stored, self.1) {
                (Stored::Value(_), Fault::IgnoresPlainSeeds) => true,
                (stored, Fault::NullIsNoSeed) => stored.value().is_some_and(ChannelValue::is_null),
                _ => false,
            };
            if hidden {
                entry.stored = Stored::Sentinel;
            }
        }
    }
}

#[async_trait]
impl Saver for Seeds<'_> {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        self.0.get(at).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        self.0.list(query).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        self.0.put_writes(at, task).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        self.0.commit(step).await
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        self.0.flush(thread).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        fallback::delta_history(self, at, channels, reach).await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        self.0.delete_thread(thread).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        self.0.threads(after, limit).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        let mut image = self.0.read_thread(thread).await?;
        image.checkpoints.values_mut().for_each(|tuple| self.hide(tuple));
        Ok(image)
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        self.0.rewrite_thread(thread, expected, rewrite).await
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
}

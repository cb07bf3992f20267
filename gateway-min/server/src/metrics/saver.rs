//! Counts the saver's operations.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::{
    Capabilities, CheckpointSelector, Coming, DeltaHistory, ListQuery, Revision, Rewrite, Saver, StepCommit,
    Summary, ThreadImage,
};
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};
use tracing::Instrument as _;

use super::{CallOutcome, Metrics};
use crate::telemetry::spans;

/// A saver whose commits and replays are counted; it forwards every call.
pub(crate) struct MeteredSaver {
    inner: Arc<dyn Saver>,
    metrics: Metrics,
}

impl MeteredSaver {
    pub(crate) fn new(inner: Arc<dyn Saver>, metrics: Metrics) -> Self {
        Self { inner, metrics }
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)] // A default method would hide the inner saver's faster one.
impl Saver for MeteredSaver {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        self.inner.get(at).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        self.inner.list(query).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        self.inner.put_writes(at, task).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        let (bytes, began) = (bytes(&step), Instant::now());
        let span = spans::commit(&step, bytes);
        let result = self.inner.commit(step).instrument(span.clone()).await;
        let outcome = match &result {
            Ok(_) => CallOutcome::ok,
            Err(Error::Conflict { .. } | Error::Stale { .. }) => CallOutcome::conflict,
            Err(Error::InDoubt { .. }) => CallOutcome::in_doubt,
            Err(_) => CallOutcome::error,
        };
        spans::committed(&span, outcome.as_str(), result.is_err());
        self.metrics.committed(began.elapsed(), bytes, outcome);
        result
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        self.inner.flush(thread).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        let histories = self.inner.delta_history(at, channels, reach).await?;
        for history in histories.values() {
            self.metrics.replayed(history.steps.len());
        }
        Ok(histories)
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        self.inner.delete_thread(thread).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        self.inner.threads(after, limit).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        self.inner.read_thread(thread).await
    }

    async fn revision(&self, thread: &ThreadId) -> Result<Revision> {
        self.inner.revision(thread).await
    }

    async fn delete_seen(&self, thread: &ThreadId, expected: &Revision) -> Result<()> {
        self.inner.delete_seen(thread, expected).await
    }

    async fn summary(&self, thread: &ThreadId) -> Result<Summary> {
        self.inner.summary(thread).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        self.inner.rewrite_thread(thread, expected, rewrite).await
    }

    async fn create_thread(&self, thread: &ThreadId, coming: &mut dyn Coming) -> Result<()> {
        self.inner.create_thread(thread, coming).await
    }

    async fn copy_thread(&self, from: &ThreadId, to: &ThreadId) -> Result<usize> {
        self.inner.copy_thread(from, to).await
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}

/// The logical bytes of a superstep: its size in a store without sharing.
fn bytes(step: &StepCommit) -> u64 {
    let values = step.checkpoint.channels.values().filter_map(|entry| entry.stored.value());
    let rows = step.writes.iter().chain(&step.pending);
    let writes = rows.flat_map(|row| &row.writes).map(|write| &write.value);
    let bytes: usize = values.chain(writes).map(ChannelValue::encoded_len).sum();
    bytes.try_into().unwrap_or(u64::MAX)
}

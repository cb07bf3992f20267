//! A saver wrapper that fails where a test wants it to.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use futures::future::BoxFuture;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::{
    Capabilities, CheckpointSelector, Coming, DeltaHistory, ListQuery, Revision, Rewrite, Saver, StepCommit,
    Summary, ThreadImage,
};
use threadkeep::{Error, Result};

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// Nothing was executed.
    Refused,
    /// The store was unavailable; nothing was executed.
    Away,
    /// It was executed, but the response was lost.
    InDoubt,
    /// The store had lost what it had acknowledged; nothing was executed.
    Lost,
}

/// Which call fails next.
#[derive(Clone, Default)]
pub(super) struct Faults(Arc<Mutex<Armed>>);

#[derive(Default)]
struct Armed {
    before: Option<BoxFuture<'static, ()>>,
    before_read: Option<BoxFuture<'static, ()>>,
    write: Option<(usize, Fault)>,
    read: Option<(usize, Error)>,
    away: usize,
    damaged: Option<CheckpointId>,
}

impl Faults {
    /// Makes the `k`-th write from now, from 1, fail.
    pub(super) fn write(&self, k: usize, fault: Fault) {
        self.0.lock().unwrap().write = Some((k, fault));
    }

    /// Makes the `k`-th read from now, from 1, fail.
    pub(super) fn read(&self, k: usize) {
        self.0.lock().unwrap().read = Some((k, refused()));
    }

    /// Makes the `k`-th read from now, from 1, find that the store lost what it had acknowledged.
    pub(super) fn lose(&self, k: usize) {
        self.0.lock().unwrap().read = Some((k, lost()));
    }

    /// Makes the store unavailable to the next `reads` reads.
    pub(super) fn away(&self, reads: usize) {
        self.0.lock().unwrap().away = reads;
    }

    /// Does this before the next write, as another process may.
    pub(super) fn before_write(&self, what: impl Future<Output = ()> + Send + 'static) {
        self.0.lock().unwrap().before = Some(Box::pin(what));
    }

    /// The same before the next read.
    pub(super) fn before_read(&self, what: impl Future<Output = ()> + Send + 'static) {
        self.0.lock().unwrap().before_read = Some(Box::pin(what));
    }

    /// Makes the values of this checkpoint unreadable from now on.
    pub(super) fn damage(&self, checkpoint: CheckpointId) {
        self.0.lock().unwrap().damaged = Some(checkpoint);
    }

    /// Disarms; `true` if the fault was not used.
    pub(super) fn disarm(&self) -> bool {
        let armed = std::mem::take(&mut *self.0.lock().unwrap());
        armed.write.is_some() || armed.read.is_some() || armed.away > 0
    }

    async fn reads(&self) -> Result<()> {
        let before = self.0.lock().unwrap().before_read.take();
        if let Some(before) = before {
            before.await;
        }
        let mut armed = self.0.lock().unwrap();
        if armed.away > 0 {
            armed.away -= 1;
            return Err(Error::Unavailable { saver: "faulty", reason: "injected fault".to_owned() });
        }
        match armed.read.take() {
            Some((1, error)) => Err(error),
            later => {
                armed.read = later.map(|(k, error)| (k - 1, error));
                Ok(())
            }
        }
    }

    /// Executes the write, or fails, as armed.
    async fn writes<T>(&self, write: impl Future<Output = Result<T>>) -> Result<T> {
        let before = self.0.lock().unwrap().before.take();
        if let Some(before) = before {
            before.await;
        }
        let fault = {
            let mut armed = self.0.lock().unwrap();
            match armed.write.as_mut() {
                Some((1, fault)) => {
                    let fault = *fault;
                    armed.write = None;
                    Some(fault)
                }
                Some((left, _)) => {
                    *left -= 1;
                    None
                }
                None => None,
            }
        };
        match fault {
            None => write.await,
            Some(Fault::Refused) => Err(refused()),
            Some(Fault::Away) => {
                Err(Error::Unavailable { saver: "faulty", reason: "injected fault".to_owned() })
            }
            Some(Fault::InDoubt) => {
                write.await?;
                Err(Error::InDoubt { saver: "faulty", reason: "injected fault".to_owned() })
            }
            Some(Fault::Lost) => Err(lost()),
        }
    }
}

/// Not `Unavailable`, which some callers would retry or report differently.
fn refused() -> Error {
    Error::InvalidInput("injected fault".to_owned())
}

/// What a saver reports once: it has forgotten what it knew by then.
pub(super) fn lost() -> Error {
    Error::HistoryLost { thread: "t".into(), seen: "injected fault".to_owned() }
}

/// The saver that fails.
pub(super) struct FaultySaver {
    pub(super) inner: Arc<dyn Saver>,
    pub(super) faults: Faults,
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Saver for FaultySaver {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        self.faults.reads().await?;
        let damaged = self.faults.0.lock().unwrap().damaged;
        if damaged.is_some() && at.id == damaged && at.load != threadkeep::saver::Load::None {
            return Err(Error::Corrupt {
                place: "a checkpoint".to_owned(),
                reason: "injected fault".to_owned(),
            });
        }
        self.inner.get(at).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        self.faults.reads().await?;
        self.inner.list(query).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        self.faults.writes(self.inner.put_writes(at, task)).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        self.faults.writes(self.inner.commit(step)).await
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        self.faults.writes(self.inner.flush(thread)).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        self.faults.reads().await?;
        self.inner.delta_history(at, channels, reach).await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        self.faults.writes(self.inner.delete_thread(thread)).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        self.inner.threads(after, limit).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        let image = self.inner.read_thread(thread).await?;
        let damaged = self.faults.0.lock().unwrap().damaged;
        if image.checkpoints.keys().any(|(_, id)| Some(*id) == damaged) {
            return Err(Error::corrupt("a checkpoint", "injected fault"));
        }
        Ok(image)
    }

    async fn revision(&self, thread: &ThreadId) -> Result<Revision> {
        self.inner.revision(thread).await
    }

    async fn delete_seen(&self, thread: &ThreadId, expected: &Revision) -> Result<()> {
        self.faults.writes(self.inner.delete_seen(thread, expected)).await
    }

    async fn summary(&self, thread: &ThreadId) -> Result<Summary> {
        self.inner.summary(thread).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        self.faults.writes(self.inner.rewrite_thread(thread, expected, rewrite)).await
    }

    async fn create_thread(&self, thread: &ThreadId, coming: &mut dyn Coming) -> Result<()> {
        self.faults.writes(self.inner.create_thread(thread, coming)).await
    }

    async fn copy_thread(&self, from: &ThreadId, to: &ThreadId) -> Result<usize> {
        self.faults.writes(self.inner.copy_thread(from, to)).await
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}

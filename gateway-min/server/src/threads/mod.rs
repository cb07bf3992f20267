//! Threads: the only access to their state, and the rule of who may write to it.

pub(crate) mod branch;
mod left;
pub(crate) mod lineage;
mod locks;

use std::sync::Arc;

use threadkeep::id::ThreadId;
use threadkeep::mode::ModeRegister;
use threadkeep::state::StateAccessor;
use tokio::sync::OwnedMutexGuard;
use tokio::task::{JoinError, JoinHandle};
use tokio_util::task::TaskTracker;

use self::locks::ThreadLocks;
use threadkeep_config::ConfigHandle;
use threadkeep_records::{Records, RecordsError, Reservation, WriterKind};

/// The threads of this process's stores.
pub(crate) struct Threads {
    records: Records,
    config: ConfigHandle,
    accessor: StateAccessor,
    modes: Arc<ModeRegister>,
    locks: ThreadLocks,
    notes: ThreadLocks,
    /// Writers that continue without the request that started them.
    background: TaskTracker,
}

/// Why a writer did not start, or did not finish.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    /// Another writer holds the thread, or the records are unavailable.
    #[error(transparent)]
    Reservation(RecordsError),
    /// The writer's task died.
    #[error(transparent)]
    Died(#[from] JoinError),
}

impl Threads {
    /// Threads whose state `accessor` reads and writes. `modes` holds what was frozen at the start.
    pub(crate) fn new(
        records: Records,
        config: ConfigHandle,
        accessor: StateAccessor,
        modes: Arc<ModeRegister>,
        background: TaskTracker,
    ) -> Self {
        Self {
            records,
            config,
            accessor,
            modes,
            locks: ThreadLocks::default(),
            notes: ThreadLocks::default(),
            background,
        }
    }

    /// The state accessor of this process: the frozen mode and cadence.
    pub(crate) fn accessor(&self) -> &StateAccessor {
        &self.accessor
    }

    /// The accessor for a run that starts now.
    ///
    /// # Errors
    /// The reconfiguration error, if the cadence was edited since the process started. An edited mode is ignored.
    pub(crate) async fn accessor_for_run(&self) -> threadkeep::Result<&StateAccessor> {
        let frequency = self.config.current_async().await.snapshot_frequency();
        self.modes.freeze_frequency(i64::try_from(frequency).unwrap_or(i64::MAX))?;
        Ok(&self.accessor)
    }

    /// Waits for this process's lock on the thread, which every writer holds.
    pub(crate) async fn lock(&self, thread_id: &str) -> OwnedMutexGuard<()> {
        self.locks.lock(thread_id).await
    }

    /// Waits until this process is not writing a note on the thread that a read has caused. Nobody should be refused
    /// the thread because of it, so it is held while a run is admitted, or the thread is reserved. These wait for
    /// notes of other processes themselves, which takes a little longer than this.
    pub(crate) async fn unnoted(&self, thread_id: &str) -> OwnedMutexGuard<()> {
        self.notes.lock(thread_id).await
    }

    /// Reserves the thread for a writer that is not a run, after the note that a read has caused.
    ///
    /// # Errors
    /// A run or another writer holds the thread, or the records are unavailable.
    pub(crate) async fn reserve(
        &self,
        thread_id: &str,
        kind: WriterKind,
    ) -> Result<Reservation, RecordsError> {
        let _unnoted = self.unnoted(thread_id).await;
        self.records.runs().reserve(thread_id, kind).await
    }

    /// Does work that continues if the request that started it is dropped. A stopping process waits for its end.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.background.spawn(work)
    }

    /// Does `work` while no one else writes to the thread, in this process or another: it is reserved in the records
    /// and locked here. The work continues if the caller drops this future.
    ///
    /// # Errors
    /// [`Refused`]; the work's own error is inside.
    pub(crate) async fn exclusively<T: Send + 'static>(
        self: &Arc<Self>,
        thread: &ThreadId,
        kind: WriterKind,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Refused> {
        let (threads, thread) = (Arc::clone(self), thread.clone());
        let task = self.background.spawn(async move {
            let reserved = threads.reserve(thread.as_str(), kind).await;
            threads.holding(&thread, reserved, work).await
        });
        task.await?
    }

    /// As [`Self::exclusively`], for a note that a read has caused: writers and runs wait for its end.
    ///
    /// # Errors
    /// As [`Self::exclusively`].
    pub(crate) async fn noting<T: Send + 'static>(
        self: &Arc<Self>,
        thread: &ThreadId,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Refused> {
        let (threads, thread) = (Arc::clone(self), thread.clone());
        let task = self.background.spawn(async move {
            let _unnoted = threads.unnoted(thread.as_str()).await;
            let reserved = threads.records.runs().reserve(thread.as_str(), WriterKind::Note).await;
            threads.holding(&thread, reserved, work).await
        });
        task.await?
    }

    /// Does `work` under the reservation, after the last write of a run that has just ended.
    async fn holding<T>(
        &self,
        thread: &ThreadId,
        reserved: Result<Reservation, RecordsError>,
        work: impl Future<Output = T>,
    ) -> Result<T, Refused> {
        let reservation = reserved.map_err(Refused::Reservation)?;
        let result = {
            let _lock = self.lock(thread.as_str()).await;
            work.await
        };
        if let Err(error) = reservation.release().await {
            tracing::warn!(%thread, %error, "releasing the thread's reservation in the background");
        }
        Ok(result)
    }
}

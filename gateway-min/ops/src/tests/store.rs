//! A store in memory, one thread of which somebody keeps writing to, and which fails on request.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use serde_json::Map;
use threadkeep::channel::Schema;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, IdSource, ThreadId};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, ListQuery, Load, Revision, Rewrite, Saver, StepCommit,
    Summary, ThreadImage,
};
use threadkeep::state::StateAccessor;
use threadkeep::{Error, Result};
use threadkeep_memory::MemorySaver;
use threadkeep_records::CHILD_PREFIX;
use threadkeep_storage::OpenSaver;
use tokio::sync::Notify;

/// The thread in the middle of the list that somebody writes to between every plan and its change.
pub(super) const BUSY: &str = "b";

/// The last thread of the list, which is deleted before anything is read of it.
const DELETED: &str = "d";

/// The thread that is imported.
pub(super) const IMPORTED: &str = "imported";

#[derive(Clone, Default)]
pub(super) struct Busy {
    pub(super) store: Arc<MemorySaver>,
    /// Whether the thread cannot be read either.
    pub(super) reads_fail: bool,
    /// Whether it is damaged, and the thread of the subagent with its name.
    pub(super) damaged: bool,
    /// Whether one checkpoint of it alone can be read all the same.
    pub(super) short_reads: bool,
    /// How many changes of the thread pass before nobody pauses any more.
    pub(super) passes: Arc<AtomicUsize>,
    /// Whether Ctrl-C comes with each of them.
    pub(super) interrupts: bool,
    pub(super) import: Import,
    /// Where the write of the imported thread begins, and goes on.
    pub(super) gate: Option<Arc<(Notify, Notify)>>,
}

/// What comes of writing the imported thread.
#[derive(Clone, Copy, Default)]
pub(super) enum Import {
    #[default]
    Written,
    /// It is written, and the answer is lost.
    AnswerLost,
    /// Somebody else makes a thread of that id meanwhile, and the answer is lost.
    AnothersInstead,
    /// Somebody else makes a thread of that id as soon as it was seen that there is none.
    AnothersAfterLook,
    /// Somebody else makes a thread of that id just before the write.
    AnothersBeforeWrite,
    /// It is not written, and the answer is lost.
    Lost,
    /// The disk is full.
    Refused,
    /// Somebody else makes a thread of that id meanwhile, and the disk is full.
    AnothersThenRefused,
}

#[async_trait]
impl OpenSaver for Busy {
    async fn open(&self, _config: &threadkeep_config::Config) -> Result<Arc<dyn Saver>> {
        Ok(Arc::new(self.clone()))
    }
}

impl Busy {
    fn intact(&self, thread: &ThreadId) -> Result<()> {
        let name = thread.as_str();
        if self.damaged && name.strip_prefix(CHILD_PREFIX).unwrap_or(name) == BUSY {
            return Err(Error::corrupt("page 7", "it does not match its checksum"));
        }
        Ok(())
    }
}

#[async_trait]
impl Saver for Busy {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        self.intact(&at.thread)?;
        self.store.get(at).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        if !(self.short_reads && query.limit == Some(1)) {
            self.intact(&query.thread)?;
        }
        if self.reads_fail && query.thread.as_str() == BUSY && query.load != Load::None {
            return Err(Error::Stale { thread: query.thread.clone() });
        }
        let listed = self.store.list(query).await?;
        let is_import = query.thread.as_str() == IMPORTED;
        if is_import && listed.is_empty() && matches!(self.import, Import::AnothersAfterLook) {
            accessor(self).create(&query.thread, Map::new()).await?;
        }
        Ok(listed)
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        self.store.put_writes(at, task).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        self.store.commit(step).await
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        self.store.flush(thread).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        self.store.delta_history(at, channels, reach).await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        self.store.delete_thread(thread).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        let mut threads = self.store.threads(after, limit).await?;
        if after.is_none() {
            threads.push(ThreadId::from(DELETED));
        }
        Ok(threads)
    }

    async fn summary(&self, thread: &ThreadId) -> Result<Summary> {
        self.intact(thread)?;
        if self.reads_fail && thread.as_str() == BUSY {
            return Err(Error::Stale { thread: thread.clone() });
        }
        self.store.summary(thread).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        self.intact(thread)?;
        if self.reads_fail && thread.as_str() == BUSY {
            return Err(Error::Unavailable { saver: "busy", reason: "the disk does not answer".to_owned() });
        }
        self.store.read_thread(thread).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        let left = self.passes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if thread.as_str() == BUSY && left.is_err() {
            return Err(Error::Stale { thread: thread.clone() });
        }
        if self.interrupts && thread.as_str() == BUSY {
            crate::interrupt::ask_here();
        }
        if thread.as_str() != IMPORTED {
            return self.store.rewrite_thread(thread, expected, rewrite).await;
        }
        if let Some(gate) = &self.gate {
            gate.0.notify_one();
            gate.1.notified().await;
        }
        match self.import {
            Import::Written | Import::AnothersAfterLook => {
                return self.store.rewrite_thread(thread, expected, rewrite).await;
            }
            Import::AnothersBeforeWrite => {
                accessor(self).create(thread, Map::new()).await?;
                return self.store.rewrite_thread(thread, expected, rewrite).await;
            }
            Import::AnswerLost => self.store.rewrite_thread(thread, expected, rewrite).await?,
            Import::AnothersInstead => {
                accessor(self).create(thread, Map::new()).await?;
            }
            Import::Lost => {}
            Import::AnothersThenRefused | Import::Refused => {
                if matches!(self.import, Import::AnothersThenRefused) {
                    accessor(self).create(thread, Map::new()).await?;
                }
                return Err(Error::Unavailable { saver: "busy", reason: "the disk is full".to_owned() });
            }
        }
        Err(Error::InDoubt { saver: "busy", reason: "the connection was lost".to_owned() })
    }

    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }
}

pub(super) fn accessor(store: &Busy) -> StateAccessor {
    let table = Schema::thread_state().compile(ChannelMode::Full, 10).unwrap();
    StateAccessor::new(Arc::new(store.clone()), Arc::new(table), Arc::new(IdSource::default()))
}

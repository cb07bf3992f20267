//! Savers that make new threads, which come in parts or are copies, or delete what was seen, each in one wrong way.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::{
    Capabilities, CheckpointSelector, Coming, DeltaHistory, ListQuery, Revision, Rewrite, Saver, StepCommit,
    ThreadImage, collected,
};
use threadkeep::{Error, Result};
use threadkeep_conformance::{BoxError, Claim, Factory};
use threadkeep_memory::MemorySaver;

/// What the saver does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Slip {
    /// Stores each part under the name of the thread.
    ShowsWhatCame,
    /// Stores what came before an error.
    KeepsWhatCame,
    /// Sorts what comes, and takes what comes twice once.
    SortsWhatComes,
    /// Replaces a thread that is there.
    ReplacesWhatIsThere,
    /// Forgets the rows of tasks that no child applied.
    ForgetsPendingRows,
    /// Says that it holds nothing, and holds all.
    HoldsWhatComes,
    /// Copies the root namespace.
    CopiesOneNamespace,
    /// A copy is gone with its source.
    LinksCopies,
    /// A copy takes the place of the thread that is there.
    CopiesOver,
    /// Copies one checkpoint after the other.
    CopiesOneByOne,
    /// Looks whether there is a thread, and then writes the copy.
    LooksThenCopies,
    /// Deletes a thread that has changed.
    DeletesWhatChanged,
    /// Deletes the root namespace of what was seen.
    DeletesTheRootOfWhatWasSeen,
    /// Gives the revision of the first look at each thread.
    RemembersRevisions,
}

/// Creates stores with one slip.
pub(crate) struct Comers(pub(crate) Slip);

#[async_trait]
impl Factory for Comers {
    type Storage = MemorySaver;

    fn name(&self) -> &'static str {
        "comers"
    }

    fn claims(&self) -> &'static [Claim] {
        match self.0 {
            Slip::HoldsWhatComes => &[Claim::WritesAsItComes],
            _ => &[],
        }
    }

    async fn create(&self) -> Result<MemorySaver, BoxError> {
        Ok(MemorySaver::new())
    }

    async fn open(&self, place: &MemorySaver) -> Result<Arc<dyn Saver>, BoxError> {
        Ok(Arc::new(Comer {
            inner: place.clone(),
            slip: self.0,
            copies: Mutex::default(),
            revisions: Mutex::default(),
        }))
    }
}

struct Comer {
    inner: MemorySaver,
    slip: Slip,
    /// Copies, and their sources.
    copies: Mutex<Vec<(ThreadId, ThreadId)>>,
    revisions: Mutex<BTreeMap<ThreadId, Revision>>,
}

impl Comer {
    async fn put(&self, thread: &ThreadId, revision: &Revision, put: Vec<CheckpointTuple>) -> Result<()> {
        self.inner.rewrite_thread(thread, revision, Rewrite { put, ..Rewrite::default() }).await
    }

    async fn show(&self, thread: &ThreadId, coming: &mut dyn Coming) -> Result<()> {
        coming.rewind().await?;
        let mut revision = Revision::absent();
        loop {
            let part = coming.next().await?;
            if part.is_empty() {
                return Ok(());
            }
            self.put(thread, &revision, part).await?;
            revision = self.inner.read_thread(thread).await?.revision;
        }
    }

    /// What a copy of a thread is, and writes it in place of whatever is there.
    async fn copy_over(&self, from: &ThreadId, to: &ThreadId) -> Result<usize> {
        let source = self.inner.read_thread(from).await?;
        let put = of_thread(to, source.checkpoints.into_values());
        let count = put.len();
        self.inner.delete_thread(to).await?;
        self.put(to, &Revision::absent(), put).await?;
        Ok(count)
    }

    /// All that comes, unless there is an error before, which is returned too.
    async fn came(coming: &mut dyn Coming) -> (Vec<CheckpointTuple>, Result<()>) {
        let mut all = Vec::new();
        if let Err(error) = coming.rewind().await {
            return (all, Err(error));
        }
        loop {
            match coming.next().await {
                Ok(part) if part.is_empty() => return (all, Ok(())),
                Ok(part) => all.extend(part),
                Err(error) => return (all, Err(error)),
            }
        }
    }
}

fn of_thread(thread: &ThreadId, tuples: impl IntoIterator<Item = CheckpointTuple>) -> Vec<CheckpointTuple> {
    tuples.into_iter().map(|tuple| CheckpointTuple { thread: thread.clone(), ..tuple }).collect()
}

#[async_trait]
impl Saver for Comer {
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
        self.inner.commit(step).await
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
        self.inner.delta_history(at, channels, reach).await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        let copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (copy, _) in copies.into_iter().filter(|(_, source)| source == thread) {
            self.inner.delete_thread(&copy).await?;
        }
        self.inner.delete_thread(thread).await
    }

    async fn revision(&self, thread: &ThreadId) -> Result<Revision> {
        let revision = self.inner.revision(thread).await?;
        if self.slip == Slip::RemembersRevisions {
            return Ok(self
                .revisions
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .entry(thread.clone())
                .or_insert(revision)
                .clone());
        }
        Ok(revision)
    }

    async fn delete_seen(&self, thread: &ThreadId, expected: &Revision) -> Result<()> {
        match self.slip {
            Slip::DeletesWhatChanged => self.inner.delete_thread(thread).await,
            Slip::DeletesTheRootOfWhatWasSeen => {
                let root = self.inner.list(&ListQuery::new(thread)).await?;
                let remove = root.into_iter().map(|tuple| (tuple.namespace, tuple.checkpoint.id)).collect();
                let rewrite = Rewrite { remove, ..Rewrite::default() };
                self.inner.rewrite_thread(thread, expected, rewrite).await
            }
            _ => self.inner.delete_seen(thread, expected).await,
        }
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        self.inner.threads(after, limit).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        self.inner.read_thread(thread).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        self.inner.rewrite_thread(thread, expected, rewrite).await
    }

    async fn create_thread(&self, thread: &ThreadId, coming: &mut dyn Coming) -> Result<()> {
        let absent = Revision::absent();
        match self.slip {
            Slip::ShowsWhatCame => self.show(thread, coming).await,
            Slip::KeepsWhatCame => {
                let (all, ended) = Self::came(coming).await;
                self.put(thread, &absent, all).await?;
                ended
            }
            Slip::SortsWhatComes => {
                let (mut all, ended) = Self::came(coming).await;
                ended?;
                let place = |tuple: &CheckpointTuple| (tuple.namespace.clone(), tuple.checkpoint.id);
                all.sort_by_key(place);
                all.dedup_by_key(|tuple| place(tuple));
                self.put(thread, &absent, all).await
            }
            Slip::ReplacesWhatIsThere => {
                let all = collected(thread, coming).await?;
                match self.put(thread, &absent, all.clone()).await {
                    Err(Error::Stale { .. }) => {
                        self.inner.delete_thread(thread).await?;
                        self.put(thread, &absent, all).await
                    }
                    done => done,
                }
            }
            Slip::ForgetsPendingRows => {
                let mut all = collected(thread, coming).await?;
                let applied: BTreeSet<_> =
                    all.iter().flat_map(|tuple| tuple.checkpoint.applied.clone()).collect();
                for tuple in &mut all {
                    tuple.writes.retain(|row| applied.contains(&row.task));
                }
                self.put(thread, &absent, all).await
            }
            _ => self.inner.create_thread(thread, coming).await,
        }
    }

    async fn copy_thread(&self, from: &ThreadId, to: &ThreadId) -> Result<usize> {
        let absent = Revision::absent();
        match self.slip {
            Slip::CopiesOneNamespace => {
                let root = of_thread(to, self.inner.list(&ListQuery::new(from)).await?);
                let count = root.len();
                self.put(to, &absent, root).await?;
                Ok(count)
            }
            Slip::LinksCopies => {
                self.copies.lock().unwrap_or_else(PoisonError::into_inner).push((to.clone(), from.clone()));
                self.inner.copy_thread(from, to).await
            }
            Slip::CopiesOver => self.copy_over(from, to).await,
            Slip::CopiesOneByOne => {
                let mut copied = Vec::new();
                for (namespace, id) in self.inner.read_thread(from).await?.checkpoints.into_keys() {
                    tokio::task::yield_now().await;
                    let at = CheckpointKey { thread: from.clone(), namespace, id };
                    copied.extend(self.inner.get(&CheckpointSelector::at(&at)).await?);
                }
                let (count, put) = (copied.len(), of_thread(to, copied));
                if count > 0 {
                    self.put(to, &absent, put).await?;
                }
                Ok(count)
            }
            Slip::LooksThenCopies => {
                if self.inner.read_thread(to).await?.revision != absent {
                    return Err(Error::Stale { thread: to.clone() });
                }
                tokio::task::yield_now().await;
                self.copy_over(from, to).await
            }
            _ => self.inner.copy_thread(from, to).await,
        }
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}

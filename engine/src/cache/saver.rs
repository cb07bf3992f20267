//! A saver behind a history cache.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use super::owed::Owed;
use super::{CachedHistory, HistoryCache, HistoryKey};
use crate::checkpoint::{CheckpointKey, CheckpointTuple, Stored, TaskWrites};
use crate::error::{Error, Result};
use crate::id::{ChannelName, CheckpointId, Namespace, ThreadId, Version};
use crate::saver::fallback::HistoryWalk;
use crate::saver::{
    Capabilities, CheckpointSelector, Coming, DeltaHistory, ListQuery, Load, Revision, Rewrite, Saver,
    StepCommit, Summary, ThreadImage,
};

/// The maximum number of checkpoints between a known path's end and the requested checkpoint. Beyond it, one read of
/// the saver is faster.
const NEAR: usize = 8;

/// A saver that resolves the path of a checkpoint from a known path, if that ends at most a few supersteps earlier: it
/// reads each checkpoint between them instead of walking back to the last snapshot.
///
/// Every answer is the inner saver's. Only a read of a single channel is resolved from a known path: those of several
/// channels may have been stored by reads of different moments. A known path is used only if the inner saver still has
/// the checkpoint at which it ends, with a sentinel of the same version; if anything is wrong on the way, the call goes
/// to the inner saver, which reports it. Rows older than a known path's end are not read again.
///
/// A thread is purged from the cache when it is deleted or rewritten, as pruning does. A rewrite that only removes
/// checkpoints and rows, as the deletion of runs does, does not change the remaining paths, so the entries stay, unless
/// no checkpoint remains. When the inner saver reports that a thread's history was lost, the thread is purged too. A
/// path may have been read before a deletion and stored after its purge, here or in another process; so the checkpoint is
/// read again after a path was stored, and if it is not as before, the thread is purged. A call that is given up before
/// that leaves the purge to the next call. A purge that the cache loses is not repeated: see [`HistoryCache`].
pub struct CachedSaver {
    inner: Arc<dyn Saver>,
    cache: Arc<dyn HistoryCache>,
    owed: Owed,
}

impl fmt::Debug for CachedSaver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedSaver").finish_non_exhaustive()
    }
}

impl CachedSaver {
    /// Puts a cache in front of a saver. All savers of one store may share a cache; two stores must not.
    pub fn new(inner: Arc<dyn Saver>, cache: Arc<dyn HistoryCache>) -> Self {
        Self { inner, cache, owed: Owed::default() }
    }

    /// Purges a thread whose history the inner saver reports as lost, and those that calls before have left.
    async fn purging<T>(&self, thread: &ThreadId, done: Result<T>) -> Result<T> {
        if matches!(done, Err(Error::HistoryLost { .. })) {
            self.purge(thread).await;
        }
        while let Some(left) = self.owed.take_one() {
            self.purge(&left).await;
        }
        done
    }

    async fn purge(&self, thread: &ThreadId) {
        let debt = self.owed.by_call(thread);
        self.cache.purge(thread).await;
        debt.settled();
    }

    async fn tuple(
        &self,
        at: &CheckpointKey,
        id: CheckpointId,
        channels: &BTreeSet<ChannelName>,
    ) -> Result<Option<CheckpointTuple>> {
        let key = CheckpointKey { id, ..at.clone() };
        let selector = CheckpointSelector::at(&key).loading(Load::Only(channels.clone()));
        self.purging(&at.thread, self.inner.get(&selector).await).await
    }

    /// What the cache has for the channels that need a path to `target`, if it ends there or earlier.
    async fn known(
        &self,
        at: &CheckpointKey,
        target: &CheckpointTuple,
        channels: &BTreeSet<ChannelName>,
    ) -> BTreeMap<ChannelName, CachedHistory> {
        let mut known = BTreeMap::new();
        for (channel, _) in sentinels(target, channels) {
            let path = self.cache.get(&history_key(at, channel)).await;
            known.extend(path.filter(|path| path.checkpoint <= at.id).map(|path| (channel.clone(), path)));
        }
        known
    }

    /// The paths to `target`, extended from known ones; `None` if they do not suffice, or something is wrong.
    async fn extend(
        &self,
        at: &CheckpointKey,
        target: &CheckpointTuple,
        channels: &BTreeSet<ChannelName>,
        known: &BTreeMap<ChannelName, CachedHistory>,
    ) -> Result<Option<DeltaHistory>> {
        let mut walk = HistoryWalk::new(at, channels, None);
        let mut between = None;
        for _ in 0..=NEAR {
            let child: &CheckpointTuple = between.as_ref().unwrap_or(target);
            let id = child.checkpoint.id;
            for (channel, version) in sentinels(child, channels) {
                if let Some(path) = known.get(channel).filter(|path| path.ends_at(id, version)) {
                    walk.join(channel, path.history.clone());
                }
            }
            let root = child.parent.is_none();
            match walk.visit(id, root, |channel, _| Ok(child.checkpoint.channels.get(channel).cloned())) {
                Ok(true) => return Ok(Some(walk.finish())),
                Ok(false) => {}
                Err(_) => return Ok(None),
            }
            let ahead = |channel| known.get(channel).is_some_and(|path| path.checkpoint < id);
            let Some(parent) = child.parent.filter(|_| walk.open().all(ahead)) else { return Ok(None) };
            let Some(parent) = self.tuple(at, parent, channels).await? else { return Ok(None) };
            if walk.apply(id, &child.checkpoint.applied, &parent.writes).is_err() {
                return Ok(None);
            }
            between = Some(parent);
        }
        Ok(None)
    }

    /// Whether the paths of all remaining checkpoints are unchanged: the rewrite only removes checkpoints and rows.
    async fn keeps_paths(&self, rewrite: &Rewrite) -> bool {
        for put in &rewrite.put {
            let Ok(Some(stored)) = self.inner.get(&CheckpointSelector::at(&put.key())).await else {
                return false;
            };
            let same = stored.parent == put.parent && stored.checkpoint == put.checkpoint;
            if !same || !put.writes.iter().all(|row| stored.writes.contains(row)) {
                return false;
            }
        }
        true
    }

    /// Whether the saver still has a checkpoint, with the same versions.
    async fn still_has(&self, at: &CheckpointKey, target: &CheckpointTuple) -> bool {
        let versions = |tuple: &CheckpointTuple| -> Vec<_> {
            let channels = tuple.checkpoint.channels.iter();
            channels.map(|(channel, entry)| (channel.clone(), entry.version)).collect()
        };
        let found = self.inner.get(&CheckpointSelector::at(at).loading(Load::None)).await;
        matches!(found, Ok(Some(found)) if versions(&found) == versions(target))
    }

    /// Whether a thread has a checkpoint in one of these namespaces.
    async fn has_any(&self, thread: &ThreadId, namespaces: BTreeSet<Namespace>) -> bool {
        for namespace in namespaces {
            let head = CheckpointSelector { namespace, ..CheckpointSelector::head(thread) };
            if let Ok(Some(_)) = self.inner.get(&head.loading(Load::None)).await {
                return true;
            }
        }
        false
    }
}

fn history_key(at: &CheckpointKey, channel: &ChannelName) -> HistoryKey {
    HistoryKey { thread: at.thread.clone(), namespace: at.namespace.clone(), channel: channel.clone() }
}

/// The channels for which a checkpoint stores a sentinel, with their versions.
fn sentinels<'a>(
    tuple: &'a CheckpointTuple,
    channels: &'a BTreeSet<ChannelName>,
) -> impl Iterator<Item = (&'a ChannelName, Version)> {
    let entries = tuple.checkpoint.channels.iter().filter(|(name, _)| channels.contains(*name));
    entries.filter(|(_, entry)| entry.stored == Stored::Sentinel).map(|(name, entry)| (name, entry.version))
}

#[async_trait]
#[deny(clippy::missing_trait_methods)] // A default method would hide the inner saver's faster one.
impl Saver for CachedSaver {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        self.purging(&at.thread, self.inner.get(at).await).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        self.purging(&query.thread, self.inner.list(query).await).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        self.purging(&at.thread, self.inner.put_writes(at, task).await).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        let thread = step.thread.clone();
        self.purging(&thread, self.inner.commit(step).await).await
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        self.purging(thread, self.inner.flush(thread).await).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        // The path of a page starts before the nearest values; one read of the saver serves all of it.
        let target = match reach {
            Some(reach) if reach < at.id => None,
            // Known paths of several channels may be of different moments, and a read is of one.
            _ if channels.len() > 1 => None,
            _ => self.tuple(at, at.id, channels).await?,
        };
        let Some(target) = target else {
            return self.purging(&at.thread, self.inner.delta_history(at, channels, reach).await).await;
        };
        let known = self.known(at, &target, channels).await;
        let paths = match self.extend(at, &target, channels, &known).await? {
            Some(paths) => paths,
            None => self.purging(&at.thread, self.inner.delta_history(at, channels, reach).await).await?,
        };
        let debt = self.owed.by_call(&at.thread);
        let mut stored = false;
        for (channel, version) in sentinels(&target, channels) {
            let is_known = known.get(channel).is_some_and(|path| path.ends_at(at.id, version));
            if let Some(history) = paths.get(channel).filter(|_| !is_known) {
                let path = CachedHistory { checkpoint: at.id, version, history: history.clone() };
                self.cache.put(&history_key(at, channel), &path).await;
                stored = true;
            }
        }
        // A deletion that is not seen here purges the thread later.
        if stored && !self.still_has(at, &target).await {
            self.cache.purge(&at.thread).await;
        }
        debt.settled();
        Ok(paths)
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        let debt = self.owed.by_call(thread);
        let deleted = self.inner.delete_thread(thread).await;
        // Also after an error, because the thread may have been deleted anyway.
        self.cache.purge(thread).await;
        debt.settled();
        deleted
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        self.inner.threads(after, limit).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        self.purging(thread, self.inner.read_thread(thread).await).await
    }

    async fn revision(&self, thread: &ThreadId) -> Result<Revision> {
        self.purging(thread, self.inner.revision(thread).await).await
    }

    async fn delete_seen(&self, thread: &ThreadId, expected: &Revision) -> Result<()> {
        let debt = self.owed.by_call(thread);
        let deleted = self.inner.delete_seen(thread, expected).await;
        // Also after an error, because the thread may have been deleted anyway.
        self.cache.purge(thread).await;
        debt.settled();
        self.purging(thread, deleted).await
    }

    async fn summary(&self, thread: &ThreadId) -> Result<Summary> {
        self.purging(thread, self.inner.summary(thread).await).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        let namespaces = rewrite.remove.iter().map(|(namespace, _)| namespace.clone()).collect();
        let keeps_paths = self.keeps_paths(&rewrite).await;
        let debt = self.owed.by_call(thread);
        let rewritten = self.inner.rewrite_thread(thread, expected, rewrite).await;
        // Also after an error, because the rewrite may have happened anyway.
        if !keeps_paths || !self.has_any(thread, namespaces).await {
            self.cache.purge(thread).await;
        }
        debt.settled();
        self.purging(thread, rewritten).await
    }

    async fn create_thread(&self, thread: &ThreadId, coming: &mut dyn Coming) -> Result<()> {
        let debt = self.owed.by_call(thread);
        let created = self.inner.create_thread(thread, coming).await;
        // Nothing that was remembered of an earlier thread of this id is true of this one.
        self.cache.purge(thread).await;
        debt.settled();
        self.purging(thread, created).await
    }

    async fn copy_thread(&self, from: &ThreadId, to: &ThreadId) -> Result<usize> {
        let debt = self.owed.by_call(to);
        let copied = self.inner.copy_thread(from, to).await;
        // As above.
        self.cache.purge(to).await;
        debt.settled();
        self.purging(from, copied).await
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}

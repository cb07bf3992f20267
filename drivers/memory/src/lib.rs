#![doc = include_str!("../README.md")]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Bound;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use async_trait::async_trait;
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, CheckpointKey, CheckpointTuple, Stored, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, TaskId, ThreadId, Version};
use threadkeep::saver::fallback::HistoryWalk;
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, ListQuery, Load, Outline, Revision, Rewrite, Saver,
    StepCommit, ThreadImage,
};
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};

/// The checkpoints of a namespace. The rows in a tuple's `writes` are those of the tasks that ran from it.
type Chain = BTreeMap<CheckpointId, CheckpointTuple>;

/// The checkpoints of a thread, and the number of its last write.
#[derive(Default)]
struct Thread {
    chains: BTreeMap<Namespace, Chain>,
    revision: u64,
}

#[derive(Default)]
struct Threads {
    by_id: BTreeMap<ThreadId, Thread>,
    writes: u64,
}

impl Threads {
    /// Records that a thread was changed. Numbers are never reused, so a thread that is created again has another one.
    fn changed(&mut self, thread: &ThreadId) {
        self.writes += 1;
        if let Some(thread) = self.by_id.get_mut(thread) {
            thread.revision = self.writes;
        }
    }
}

/// A store in memory. Cloning creates another handle on the same store.
#[derive(Clone, Default)]
pub struct MemorySaver {
    // One lock for everything, so that each method is one atomic change. It is held only while rows are looked up,
    // cloned (which shares the values) or inserted, and never across an await.
    threads: Arc<RwLock<Threads>>,
}

impl fmt::Debug for MemorySaver {
    /// Shows no content, which is conversations.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemorySaver").field("threads", &self.read().by_id.len()).finish()
    }
}

impl MemorySaver {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Damages the store, for tests: removes a checkpoint and leaves everything that refers to it. Returns whether it
    /// existed.
    pub fn lose_checkpoint(&self, key: &CheckpointKey) -> bool {
        let mut threads = self.write();
        let chains = threads.by_id.get_mut(&key.thread).map(|thread| &mut thread.chains);
        chains.and_then(|chains| chains.get_mut(&key.namespace)?.remove(&key.id)).is_some()
    }

    /// Damages the store, for tests: removes the writes of a task under the checkpoint it ran from. Returns whether
    /// they existed.
    pub fn lose_writes(&self, at: &CheckpointKey, task: TaskId) -> bool {
        let mut threads = self.write();
        let Some(tuple) = tuple_mut(&mut threads, at) else { return false };
        let before = tuple.writes.len();
        tuple.writes.retain(|row| row.task != task);
        tuple.writes.len() < before
    }

    /// Damages the store, for tests: removes a checkpoint's parent link. Returns whether it had one.
    pub fn lose_parent_link(&self, key: &CheckpointKey) -> bool {
        tuple_mut(&mut self.write(), key).and_then(|tuple| tuple.parent.take()).is_some()
    }

    // No change can fail half-way under the lock, so a poisoned lock still guards consistent data.
    fn read(&self) -> RwLockReadGuard<'_, Threads> {
        self.threads.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Threads> {
        self.threads.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn chain<'a>(threads: &'a Threads, thread: &ThreadId, namespace: &Namespace) -> Option<&'a Chain> {
    threads.by_id.get(thread)?.chains.get(namespace)
}

fn tuple_mut<'a>(threads: &'a mut Threads, key: &CheckpointKey) -> Option<&'a mut CheckpointTuple> {
    threads.by_id.get_mut(&key.thread)?.chains.get_mut(&key.namespace)?.get_mut(&key.id)
}

/// Puts the writes of a task under a checkpoint; whether that changed anything, or `None` if there is no such one.
fn put(chain: Option<&mut Chain>, at: &CheckpointKey, task: &TaskWrites) -> Option<bool> {
    let chain = chain?;
    // Taken out, so that its children can be asked. Few rows change once they are there.
    let mut tuple = chain.remove(&at.id)?;
    let children = (Bound::Excluded(at.id), Bound::Unbounded);
    let applied = || chain.range(children).any(|(_, child)| child.has_applied(at, task.task));
    let changed = tuple.put(task, applied);
    chain.insert(at.id, tuple);
    Some(changed)
}

/// A copy of `tuple` with the values that `load` requests.
fn loaded(tuple: &CheckpointTuple, load: &Load) -> CheckpointTuple {
    let entry = |(name, entry): (&ChannelName, &ChannelEntry)| {
        let stored = if load.wants(name) { entry.stored.clone() } else { Stored::Held };
        (name.clone(), ChannelEntry { version: entry.version, stored })
    };
    CheckpointTuple {
        thread: tuple.thread.clone(),
        namespace: tuple.namespace.clone(),
        checkpoint: Checkpoint {
            id: tuple.checkpoint.id,
            channels: tuple.checkpoint.channels.iter().map(entry).collect(),
            next: tuple.checkpoint.next.clone(),
            applied: tuple.checkpoint.applied.clone(),
        },
        parent: tuple.parent,
        metadata: tuple.metadata.clone(),
        writes: tuple.writes.clone(),
    }
}

/// Makes a stored list the base of later lists.
fn rebase(stored: &mut Stored, version: Version) {
    if let Stored::Value(ChannelValue::List(list)) | Stored::Snapshot(ChannelValue::List(list)) = stored {
        list.rebase(version);
    }
}

/// A copy of a thread. Its values are shared.
fn image(id: &ThreadId, thread: &Thread) -> ThreadImage {
    let chains = thread.chains.iter();
    let checkpoints = chains.flat_map(|(namespace, chain)| {
        chain.iter().map(|(id, tuple)| ((namespace.clone(), *id), tuple.clone()))
    });
    ThreadImage {
        thread: id.clone(),
        revision: Revision::new(thread.revision.to_be_bytes()),
        checkpoints: checkpoints.collect(),
    }
}

/// What the commit stores for each channel, with held values resolved from `parent`.
fn entries(
    step: &StepCommit,
    parent: Option<&CheckpointTuple>,
) -> Result<BTreeMap<ChannelName, ChannelEntry>> {
    if let Some(parent) = parent {
        step.check_parent(|name| Ok(parent.counted(name)))?;
    }
    let held = |name: &ChannelName| parent.and_then(|parent| parent.checkpoint.channels.get(name));
    let entry = |(name, entry): (&ChannelName, &ChannelEntry)| {
        let version = entry.version;
        let mut stored = match (&entry.stored, held(name)) {
            (Stored::Held, Some(held)) => held.stored.clone(),
            (stored, _) => stored.clone(),
        };
        rebase(&mut stored, version);
        (name.clone(), ChannelEntry { version, stored })
    };
    Ok(step.checkpoint.channels.iter().map(entry).collect())
}

#[async_trait]
impl Saver for MemorySaver {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        let threads = self.read();
        let found = chain(&threads, &at.thread, &at.namespace).and_then(|chain| match at.id {
            Some(id) => chain.get(&id),
            None => chain.values().next_back(),
        });
        Ok(found.map(|tuple| loaded(tuple, &at.load)))
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        let threads = self.read();
        let namespaces = threads.by_id.get(&query.thread).into_iter().flat_map(|thread| &thread.chains);
        let mut found: Vec<_> = namespaces
            .filter(|(namespace, _)| query.namespace.as_ref().is_none_or(|only| only == *namespace))
            .flat_map(|(_, chain)| chain.values())
            .filter(|tuple| query.before.is_none_or(|before| tuple.checkpoint.id < before))
            .filter(|tuple| tuple.metadata.matches(&query.filter))
            .collect();
        found.sort_by_key(|tuple| Reverse(tuple.checkpoint.id));
        found.truncate(query.limit.unwrap_or(usize::MAX));
        Ok(found.into_iter().map(|tuple| loaded(tuple, &query.load)).collect())
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        let mut threads = self.write();
        let chain = threads.by_id.get_mut(&at.thread).and_then(|of| of.chains.get_mut(&at.namespace));
        if put(chain, at, task)
            .ok_or_else(|| Error::NotFound { thread: at.thread.clone(), checkpoint: at.id })?
        {
            threads.changed(&at.thread);
        }
        Ok(())
    }

    async fn commit(&self, mut step: StepCommit) -> Result<CheckpointKey> {
        step.validate()?;
        let key = step.key();
        let mut threads = self.write();

        let none = Chain::new();
        let chain = chain(&threads, &key.thread, &key.namespace).unwrap_or(&none);
        if chain.contains_key(&key.id) {
            return Ok(key);
        }
        let found = chain.last_key_value().map(|(id, _)| *id);
        if found != step.expected_head {
            let expected = step.expected_head;
            return Err(Error::Conflict { thread: key.thread, namespace: key.namespace, expected, found });
        }
        let parent = match step.parent {
            Some(id) => Some(
                chain
                    .get(&id)
                    .ok_or_else(|| Error::NotFound { thread: key.thread.clone(), checkpoint: id })?,
            ),
            None => None,
        };
        let rows = || parent.into_iter().flat_map(|parent| &parent.writes).chain(&step.writes);
        if let Some(task) = step.checkpoint.applied.iter().find(|task| !rows().any(|row| row.task == **task))
        {
            return Err(Error::InvalidInput(format!(
                "commit of checkpoint {} to thread {}: it applies task {task}, which has no writes under its parent",
                key.id, key.thread
            )));
        }
        step.checkpoint.channels = entries(&step, parent)?;

        // Nothing fails from here on.
        let thread = threads.by_id.entry(key.thread.clone()).or_default();
        let chain = thread.chains.entry(key.namespace.clone()).or_default();
        if let Some(id) = step.parent {
            let parent = CheckpointKey { id, ..key.clone() };
            for task in &step.writes {
                put(Some(chain), &parent, task);
            }
        }
        let tuple = CheckpointTuple {
            thread: key.thread.clone(),
            namespace: key.namespace.clone(),
            checkpoint: step.checkpoint,
            parent: step.parent,
            metadata: step.metadata,
            writes: TaskWrites::merged(&step.pending),
        };
        chain.insert(key.id, tuple);
        threads.changed(&key.thread);
        Ok(key)
    }

    async fn flush(&self, _: &ThreadId) -> Result<()> {
        Ok(())
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        let threads = self.read();
        let tuple = |id| chain(&threads, &at.thread, &at.namespace).and_then(|chain| chain.get(&id));
        let mut child =
            tuple(at.id).ok_or_else(|| Error::NotFound { thread: at.thread.clone(), checkpoint: at.id })?;
        let mut walk = HistoryWalk::new(at, channels, reach);
        loop {
            let Checkpoint { id, channels, applied, .. } = &child.checkpoint;
            let complete = walk.visit(*id, child.parent.is_none(), |channel, wanted| {
                let unwanted =
                    |entry: &ChannelEntry| ChannelEntry { version: entry.version, stored: Stored::Held };
                let entry = channels.get(channel);
                Ok(if wanted { entry.cloned() } else { entry.map(unwanted) })
            })?;
            if complete {
                return Ok(walk.finish());
            }
            let parent = child.parent.ok_or_else(|| walk.no_seed(*id))?;
            let parent = tuple(parent).ok_or_else(|| walk.no_parent(*id, parent))?;
            walk.apply(*id, applied, &parent.writes)?;
            child = parent;
        }
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        // Dropped after releasing the lock: a long thread takes a while.
        let _gone = self.write().by_id.remove(thread);
        Ok(())
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        let behind = (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let threads = self.read();
        Ok(threads.by_id.range::<ThreadId, _>(behind).map(|(id, _)| id.clone()).take(limit).collect())
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        let threads = self.read();
        Ok(threads
            .by_id
            .get(thread)
            .map_or_else(|| ThreadImage::absent(thread), |found| image(thread, found)))
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        let mut threads = self.write();
        let image = threads
            .by_id
            .get(thread)
            .map_or_else(|| ThreadImage::absent(thread), |found| image(thread, found));
        if image.revision != *expected {
            return Err(Error::Stale { thread: thread.clone() });
        }
        let outlines = image.checkpoints.iter().map(|(place, tuple)| (place.clone(), Outline::of(tuple)));
        rewrite.check(thread, outlines.collect())?;
        if rewrite.is_empty() {
            return Ok(());
        }

        // Nothing fails from here on.
        let mut checkpoints = image.checkpoints;
        checkpoints.retain(|place, _| !rewrite.remove.contains(place));
        for mut tuple in rewrite.put {
            for ChannelEntry { version, stored } in tuple.checkpoint.channels.values_mut() {
                rebase(stored, *version);
            }
            checkpoints.insert((tuple.namespace.clone(), tuple.checkpoint.id), tuple);
        }
        let mut chains: BTreeMap<Namespace, Chain> = BTreeMap::new();
        for ((namespace, id), tuple) in checkpoints {
            chains.entry(namespace).or_default().insert(id, tuple);
        }
        if chains.is_empty() {
            threads.by_id.remove(thread);
        } else {
            threads.by_id.entry(thread.clone()).or_default().chains = chains;
        }
        threads.changed(thread);
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { name: "memory", durable: false, shared_elements: true }
    }
}

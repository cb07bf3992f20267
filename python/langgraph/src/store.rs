//! LangGraph's calls on a saver of the engine.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, Stored};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, ThreadId};
use threadkeep::saver::{self, CheckpointSelector, Load, Rewrite, Saver, StepCommit};
use threadkeep::{Error, Result};

use crate::frame::{FRAME, REST, SEEN};
use crate::known::{Known, Memory};
use crate::put::{Versions, needs, plan};
use crate::read;
use crate::runs::{Rows, Runs};
use crate::steps::after;
use crate::types::{Caller, Place, Put, PutWrites, Tuple};
use crate::version::Label;
use crate::waiting::WaitingRoom;

/// How often a put reads the store again before it gives up: others keep changing the thread.
pub(crate) const ATTEMPTS: usize = 64;

/// What happens to a put whose thread moved on since its run read it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Fence {
    /// It forks the thread, as LangGraph expects.
    #[default]
    Fork,
    /// It fails with [`Error::Conflict`].
    Error,
}

/// A store of LangGraph's checkpoints.
pub struct LangGraph {
    pub(crate) saver: Arc<dyn Saver>,
    pub(crate) fence: Fence,
    pub(crate) memory: Arc<Memory>,
    pub(crate) runs: Arc<Runs>,
    /// Whose calls these are.
    pub(crate) caller: Caller,
    waiting: Arc<WaitingRoom>,
}

impl fmt::Debug for LangGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LangGraph").field("saver", &self.saver.capabilities().name).finish_non_exhaustive()
    }
}

impl LangGraph {
    /// LangGraph's checkpoints on this saver.
    pub fn new(saver: Arc<dyn Saver>, fence: Fence) -> Self {
        Self {
            saver,
            fence,
            memory: Arc::default(),
            runs: Arc::default(),
            caller: Caller::default(),
            waiting: Arc::default(),
        }
    }

    /// The same checkpoints on another saver of the same store, which was closed and opened again.
    #[must_use]
    pub fn on(&self, saver: Arc<dyn Saver>) -> Self {
        Self { saver, ..self.called_by(self.caller) }
    }

    /// The same checkpoints, for the calls of one run or update of several at one time: a checkpoint that it puts
    /// applies what it wrote.
    #[must_use]
    pub fn called_by(&self, caller: Caller) -> Self {
        Self {
            saver: self.saver.clone(),
            fence: self.fence,
            memory: self.memory.clone(),
            runs: self.runs.clone(),
            caller,
            waiting: self.waiting.clone(),
        }
    }

    /// The channels with a value whose value a put has to bring: the others are taken from its parent. `None` if the
    /// parent is not known: [`Self::learn`] it.
    pub fn needs(
        &self,
        place: &Place,
        parent: Option<CheckpointId>,
        versions: &BTreeMap<String, Label>,
        new: &BTreeSet<String>,
        values: impl Iterator<Item = String>,
    ) -> Option<BTreeSet<String>> {
        let known = match parent {
            None => None,
            Some(parent) => Some(self.memory.checkpoint(&place.key(parent))?),
        };
        Some(needs(known.as_deref(), versions, new, values))
    }

    /// Reads a checkpoint that is to be a parent.
    ///
    /// # Errors
    /// [`Error::NotFound`] if it does not exist; the saver's.
    pub async fn learn(&self, place: &Place, parent: CheckpointId) -> Result<()> {
        self.learned(&place.key(parent)).await.map(drop)
    }

    pub(crate) async fn learned(&self, key: &CheckpointKey) -> Result<Arc<Known>> {
        let load = Load::Only([FRAME, SEEN, REST].into_iter().map(ChannelName::from).collect());
        let at = CheckpointSelector::at(key).loading(load);
        for _ in 0..ATTEMPTS {
            let since = self.memory.expect(key);
            let found = self.saver.get(&at).await?;
            let found =
                found.ok_or_else(|| Error::NotFound { thread: key.thread.clone(), checkpoint: key.id })?;
            // It may have been forgotten meanwhile, and a row with it.
            if let Some(known) = self.memory.learned(key, Known::new(&found)?, since) {
                return Ok(known);
            }
        }
        Err(Error::Stale { thread: key.thread.clone() })
    }

    pub(crate) async fn parent(&self, put: &Put) -> Result<Option<Arc<Known>>> {
        let Some(parent) = put.parent else { return Ok(None) };
        let key = put.place.key(parent);
        match self.memory.checkpoint(&key) {
            Some(known) => Ok(Some(known)),
            None => self.learned(&key).await.map(Some),
        }
    }

    /// The head that a put expects if `head` is that of its place.
    fn expected(&self, put: &Put, head: Option<CheckpointId>) -> Option<CheckpointId> {
        match self.fence {
            Fence::Fork => head,
            Fence::Error => match put.seen.or(put.parent) {
                // A subgraph with a history of its own, where a run goes back to before it began: nothing was read, so
                // no config says which head its author saw. The run itself is fenced in the root namespace. One that
                // looked for the head and found none began it at the same time as another.
                None if put.place.namespace != Namespace::root()
                    && !self.runs.has_found_none(&put.place, self.caller) =>
                {
                    head
                }
                seen => seen,
            },
        }
    }

    async fn head(&self, put: &Put) -> Result<Option<CheckpointId>> {
        match self.memory.head(&put.place) {
            Some(head) => Ok(head),
            None => self.read_head(&put.place).await,
        }
    }

    pub(crate) async fn read_head(&self, place: &Place) -> Result<Option<CheckpointId>> {
        let head = CheckpointSelector {
            thread: place.thread.clone(),
            namespace: place.namespace.clone(),
            id: None,
            load: Load::None,
        };
        let head = self.saver.get(&head).await?.map(|tuple| tuple.checkpoint.id);
        self.memory.is_head(place, head);
        Ok(head)
    }

    /// Stores a checkpoint, and the writes that wait for it. A checkpoint that exists is replaced.
    ///
    /// # Errors
    /// [`Error::Conflict`] if the thread moved on and the fence is [`Fence::Error`], or if its head is newer than this
    /// checkpoint. [`Error::Stale`] if the parent changed since [`Self::needs`] was asked: ask again. The saver's.
    pub async fn put(&self, put: &Put) -> Result<()> {
        let stored = self.store_put(put).await;
        self.runs.put(&put.place, put.parent, self.caller, stored.is_ok());
        stored
    }

    async fn store_put(&self, put: &Put) -> Result<()> {
        let key = put.place.key(put.id);
        let is_new = self.memory.begins_put(&key);
        for attempt in 0..ATTEMPTS {
            if attempt > 0
                && let Some(parent) = put.parent
            {
                self.memory.forget(&put.place.key(parent));
            }
            let (parent, head) = (self.parent(put).await?, self.head(put).await?);
            let copied = self.copied(put, parent.as_deref()).await?;
            // Another process may have stored what is copied, and its rows, since the parent was remembered.
            if attempt == 0
                && let (Some(parent), Some(copied)) = (&parent, &copied)
                && !copied.are_among(&parent.tasks)
            {
                continue;
            }
            let expected = self.expected(put, head);
            let mut is_late = head.max(expected) >= Some(put.id);
            if !is_late {
                let (step, known) =
                    self.planned(put, parent.as_deref(), copied.as_ref(), expected, Versions::Named)?;
                let since = self.memory.expect(&key);
                match saver::commit(&*self.saver, step).await {
                    Ok(_) => {
                        // A saver leaves a checkpoint that exists as it is.
                        let is_only = is_new && self.memory.is_only_put(&key);
                        if is_only || self.is_stored(&key, &known).await? {
                            // If it was forgotten meanwhile, its first child reads it.
                            let _known = self.memory.learned(&key, known, since);
                            self.memory.is_head(&put.place, Some(put.id));
                            return self.settle_put(&key).await;
                        }
                        is_late = true;
                    }
                    Err(Error::Conflict { found, .. }) if self.fence == Fence::Fork => {
                        self.memory.is_head(&put.place, found);
                    }
                    Err(Error::Stale { .. }) => {}
                    // The parent that is remembered may have been replaced by another process.
                    Err(Error::InvalidInput(_)) if attempt == 0 && parent.is_some() => {}
                    Err(error) => {
                        self.memory.forget_head(&put.place);
                        return Err(error);
                    }
                }
            }
            if is_late && self.put_late(put, parent.as_deref(), copied.as_ref()).await? {
                return self.settle_put(&key).await;
            }
        }
        Err(Error::Stale { thread: key.thread })
    }

    fn planned(
        &self,
        put: &Put,
        parent: Option<&Known>,
        copied: Option<&Rows>,
        head: Option<CheckpointId>,
        versions: Versions,
    ) -> Result<(StepCommit, Known)> {
        let rows = match put.parent {
            Some(id) => self.runs.of(&put.place.key(id), self.caller),
            None => Rows::default(),
        };
        plan(put, parent, copied.unwrap_or(&rows), head, versions)
    }

    /// Whether a commit that succeeded has stored this: each has versions of its own.
    async fn is_stored(&self, key: &CheckpointKey, known: &Known) -> Result<bool> {
        let at = CheckpointSelector::at(key).loading(Load::None);
        let stored = self.saver.get(&at).await;
        let stored = stored.map_err(|error| after(&format!("checkpoint {} is stored", key.id), error))?;
        let version = stored.and_then(|stored| Some(stored.checkpoint.channels.get(FRAME)?.version));
        Ok(version == known.channels.get(FRAME).map(|frame| frame.version))
    }

    /// A put of a checkpoint that exists, or comes too late. Returns whether it is stored; it is not if the head or the
    /// parent that was remembered is not that of the store any more, because another process changed it.
    async fn put_late(&self, put: &Put, parent: Option<&Known>, copied: Option<&Rows>) -> Result<bool> {
        let key = put.place.key(put.id);
        // The checkpoint may have other values under the versions of this put.
        let (step, _) = self.planned(put, parent, copied, None, Versions::Fresh)?;
        for _ in 0..ATTEMPTS {
            let image = self.saver.read_thread(&key.thread).await?;
            let at = (key.namespace.clone(), key.id);
            let here = image.checkpoints.keys().filter(|(namespace, _)| *namespace == key.namespace);
            let head = here.map(|(_, id)| *id).max();
            self.memory.is_head(&put.place, head);
            let Some(stored) = image.checkpoints.get(&at) else {
                let expected = self.expected(put, put.parent);
                if head.max(expected) < Some(key.id) {
                    return Ok(false);
                }
                return Err(Error::Conflict {
                    thread: key.thread.clone(),
                    namespace: key.namespace.clone(),
                    expected,
                    found: head,
                });
            };
            if same(&read::tuple(stored)?, put) {
                return Ok(true);
            }
            let parent =
                put.parent.and_then(|parent| image.checkpoints.get(&(key.namespace.clone(), parent)));
            let mut new = CheckpointTuple {
                checkpoint: step.checkpoint.clone(),
                parent: put.parent,
                metadata: step.metadata.clone(),
                ..stored.clone()
            };
            for (channel, entry) in &mut new.checkpoint.channels {
                if entry.stored == Stored::Held {
                    let held = parent.and_then(|parent| parent.checkpoint.channels.get(channel));
                    let is_change = new.metadata.counters.contains_key(channel);
                    let held = held.filter(|held| {
                        held.version == entry.version && (held.stored == Stored::Sentinel) == is_change
                    });
                    let Some(held) = held else { return Ok(false) };
                    *entry = held.clone();
                }
            }
            let rewrite = Rewrite { put: vec![new], ..Rewrite::default() };
            self.memory.forget(&key);
            match self.saver.rewrite_thread(&key.thread, &image.revision, rewrite).await {
                Err(Error::Stale { .. }) => {}
                done => return done.map(|()| true),
            }
        }
        Err(Error::Stale { thread: key.thread.clone() })
    }

    /// Stores what waited for a checkpoint that was just put.
    async fn settle_put(&self, key: &CheckpointKey) -> Result<()> {
        self.settle(key).await.map_err(|error| after(&format!("checkpoint {} is stored", key.id), error))
    }

    /// Stores what waited for a checkpoint, in the order of its arrival. What cannot be stored goes on waiting, for a
    /// repeated put.
    async fn settle(&self, key: &CheckpointKey) -> Result<()> {
        let Some(turn) = self.waiting.turn(key) else { return Ok(()) };
        let mut failed = match turn.try_lock() {
            Some(mut failed) => {
                *failed = None;
                failed
            }
            None => turn.lock().await,
        };
        // The one waited for failed. Many may have waited, and trying one after the other would take very long.
        if let Some(error) = &*failed {
            return Err(error.clone());
        }
        while let Some((caller, waiting)) = self.waiting.first(key, &turn) {
            // Another run may have come first to a checkpoint whose put failed at what waited.
            if let Err(error) = self.called_by(caller).store_writes(key, &waiting).await {
                *failed = Some(error.clone());
                return Err(error);
            }
            self.waiting.left(key, &waiting);
        }
        Ok(())
    }

    /// Stores writes of a task. If their checkpoint does not exist yet, they wait for it in memory, and its put stores
    /// them before it returns.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if it does not exist and too many writes wait already. The saver's.
    pub async fn put_writes(&self, put: &PutWrites) -> Result<()> {
        let key = put.place.key(put.id);
        // A put of the checkpoint may have failed before it had stored what waited for it. That came earlier: stored
        // after these, it would take their place.
        if !self.waiting.has(&key) {
            match self.store_writes(&key, put).await {
                Err(Error::NotFound { .. }) => {}
                done => return done,
            }
        }
        let Err(full) = self.waiting.wait(&key, self.caller, put.clone(), Instant::now()) else {
            return self.settle_if_there(&key).await.map(drop).map_err(|error| {
                after(&format!("the writes of task {} wait in memory for their checkpoint", put.task), error)
            });
        };
        // Where the checkpoint exists they need no room, once what came earlier is stored.
        if self.settle_if_there(&key).await? { self.store_writes(&key, put).await } else { Err(full) }
    }

    /// Stores what waits for a checkpoint that may have been put meanwhile, by a put that found nobody waiting. Returns
    /// whether it exists.
    async fn settle_if_there(&self, key: &CheckpointKey) -> Result<bool> {
        let load = CheckpointSelector::at(key).loading(Load::None);
        let is_there = self.saver.get(&load).await?.is_some();
        if is_there {
            self.settle(key).await?;
        }
        Ok(is_there)
    }

    /// Forgets what is known of a thread. What waits for its checkpoints was acknowledged: it goes only with the thread.
    pub(crate) fn forget(&self, thread: &ThreadId, deleted: &Result<()>) {
        self.memory.forget_thread(thread);
        self.runs.forget(thread);
        if deleted.is_ok() {
            self.waiting.forget(thread);
        }
    }
}

/// Whether a put repeats what is stored.
fn same(stored: &Tuple, put: &Put) -> bool {
    let with_value = put.values.keys().chain(&put.held).collect::<BTreeSet<_>>();
    stored.parent == put.parent
        && stored.frame == put.frame
        && stored.versions == put.versions
        && stored.metadata == put.metadata
        && stored.snapshots.iter().eq(&put.snapshots)
        && stored.values.keys().eq(with_value)
        && put.values.iter().all(|(channel, value)| stored.values.get(channel) == Some(value))
}

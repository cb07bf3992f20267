//! LangGraph's calls on a saver of the engine.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, Stored};
use threadkeep::deletion;
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::{self, CheckpointSelector, ListQuery, Load, Rewrite, Saver, ThreadImage};
use threadkeep::{Error, Result};

use crate::frame::{FRAME, REST, SEEN};
use crate::known::{Known, Memory};
use crate::put::{needs, plan};
use crate::types::{ChannelReplay, ListRequest, Place, Put, PutWrites, Strategy, Tuple};
use crate::version::Label;
use crate::waiting::WaitingRoom;
use crate::{delete, history, read, writes};

/// How often a put reads the store again before it gives up: others keep changing the thread.
const ATTEMPTS: usize = 64;
/// Threads listed at once.
const THREADS: usize = 256;

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
    saver: Arc<dyn Saver>,
    fence: Fence,
    memory: Memory,
    waiting: WaitingRoom,
}

impl fmt::Debug for LangGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LangGraph").field("saver", &self.saver.capabilities().name).finish_non_exhaustive()
    }
}

impl LangGraph {
    /// LangGraph's checkpoints on this saver.
    pub fn new(saver: Arc<dyn Saver>, fence: Fence) -> Self {
        Self { saver, fence, memory: Memory::default(), waiting: WaitingRoom::default() }
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

    async fn learned(&self, key: &CheckpointKey) -> Result<Arc<Known>> {
        self.memory.expect(key);
        let load = Load::Only([FRAME, SEEN, REST].into_iter().map(ChannelName::from).collect());
        let found = self.saver.get(&CheckpointSelector::at(key).loading(load)).await?;
        let found =
            found.ok_or_else(|| Error::NotFound { thread: key.thread.clone(), checkpoint: key.id })?;
        Ok(self.memory.learned(key, Known::new(&found)?))
    }

    async fn parent(&self, put: &Put) -> Result<Option<Arc<Known>>> {
        let Some(parent) = put.parent else { return Ok(None) };
        let key = put.place.key(parent);
        match self.memory.checkpoint(&key) {
            Some(known) => Ok(Some(known)),
            None => self.learned(&key).await.map(Some),
        }
    }

    async fn head(&self, put: &Put) -> Result<Option<CheckpointId>> {
        if self.fence == Fence::Error {
            return Ok(put.parent.and_then(|parent| self.memory.seen_from(&put.place.key(parent))));
        }
        match self.memory.head(&put.place) {
            Some(head) => Ok(head),
            None => self.read_head(&put.place).await,
        }
    }

    async fn read_head(&self, place: &Place) -> Result<Option<CheckpointId>> {
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
        let key = put.place.key(put.id);
        let mut last = None;
        for attempt in 0..ATTEMPTS {
            if attempt > 0
                && let Some(parent) = put.parent
            {
                self.memory.forget(&put.place.key(parent));
            }
            let (parent, head) = (self.parent(put).await?, self.head(put).await?);
            if head >= Some(put.id) {
                return self.put_late(put, parent.as_deref(), head).await;
            }
            let (step, known) = plan(put, parent.as_deref(), head)?;
            self.memory.expect(&key);
            match saver::commit(&*self.saver, step).await {
                Ok(_) => {
                    self.memory.learned(&key, known);
                    self.memory.is_head(&put.place, Some(put.id));
                    return self.settle(&key).await;
                }
                Err(Error::Conflict { found, .. }) if self.fence == Fence::Fork => {
                    self.memory.is_head(&put.place, found);
                    last = Some(Error::Stale { thread: key.thread.clone() });
                }
                Err(stale @ Error::Stale { .. }) => last = Some(stale),
                Err(error) => return Err(error),
            }
        }
        Err(last.unwrap_or_else(|| Error::Stale { thread: key.thread.clone() }))
    }

    /// A put of a checkpoint that is not newer than the head: it exists, or it comes too late.
    async fn put_late(&self, put: &Put, parent: Option<&Known>, head: Option<CheckpointId>) -> Result<()> {
        let key = put.place.key(put.id);
        let (step, _) = plan(put, parent, None)?;
        for _ in 0..ATTEMPTS {
            let image = self.saver.read_thread(&key.thread).await?;
            let at = (key.namespace.clone(), key.id);
            let Some(stored) = image.checkpoints.get(&at) else {
                return Err(Error::Conflict {
                    thread: key.thread.clone(),
                    namespace: key.namespace.clone(),
                    expected: put.parent,
                    found: head,
                });
            };
            if same(&read::tuple(stored)?, put) {
                return self.settle(&key).await;
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
                    let held = held.filter(|held| held.version == entry.version);
                    *entry = held.cloned().ok_or_else(|| Error::Stale { thread: key.thread.clone() })?;
                }
            }
            let rewrite = Rewrite { put: vec![new], ..Rewrite::default() };
            self.memory.forget(&key);
            match self.saver.rewrite_thread(&key.thread, &image.revision, rewrite).await {
                Err(Error::Stale { .. }) => {}
                done => {
                    done?;
                    return self.settle(&key).await;
                }
            }
        }
        Err(Error::Stale { thread: key.thread.clone() })
    }

    /// Stores what waited for a checkpoint.
    async fn settle(&self, key: &CheckpointKey) -> Result<()> {
        for waiting in self.waiting.take(key) {
            self.store_writes(key, &waiting).await?;
        }
        Ok(())
    }

    /// Stores writes of a task. If their checkpoint does not exist yet, they wait for it in memory, and its put stores
    /// them before it returns.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if too many writes wait already. The saver's.
    pub async fn put_writes(&self, put: &PutWrites) -> Result<()> {
        let key = put.place.key(put.id);
        match self.store_writes(&key, put).await {
            Err(Error::NotFound { .. }) => {}
            done => return done,
        }
        self.waiting.wait(&key, put.clone())?;
        // The checkpoint may have been put meanwhile, and its put may have found nobody waiting.
        let load = CheckpointSelector::at(&key).loading(Load::None);
        if self.saver.get(&load).await?.is_some() {
            self.settle(&key).await?;
        }
        Ok(())
    }

    async fn store_writes(&self, key: &CheckpointKey, put: &PutWrites) -> Result<()> {
        let mut stays = BTreeSet::new();
        if writes::is_mixed(put) {
            let known = match self.memory.checkpoint(key) {
                Some(known) => known,
                None => self.learned(key).await?,
            };
            let of_task = known.tasks.iter().filter(|task| task.author.task == put.task);
            stays = of_task.flat_map(|task| task.special.iter().cloned()).collect();
        }
        for row in writes::rows(put, &stays)? {
            self.saver.put_writes(key, &row).await?;
            self.memory.wrote(key, &row)?;
        }
        Ok(())
    }

    /// A checkpoint, or the head.
    ///
    /// # Errors
    /// The saver's.
    pub async fn get(&self, place: &Place, id: Option<CheckpointId>) -> Result<Option<Tuple>> {
        let at = CheckpointSelector {
            thread: place.thread.clone(),
            namespace: place.namespace.clone(),
            id,
            load: Load::All,
        };
        let rows = self.memory.rows();
        let Some(found) = self.saver.get(&at).await? else { return Ok(None) };
        let key = found.key();
        match id {
            None => self.memory.is_head(place, Some(key.id)),
            Some(_) if self.fence == Fence::Error => {
                let head = self.read_head(place).await?;
                self.memory.saw(&key, head);
            }
            Some(_) => {}
        }
        self.memory.read(&key, Known::new(&found)?, rows);
        read::tuple(&found).map(Some)
    }

    /// Checkpoints, newest first.
    ///
    /// # Errors
    /// The saver's.
    pub async fn list(&self, request: &ListRequest) -> Result<Vec<Tuple>> {
        let threads = match &request.thread {
            Some(thread) => vec![thread.clone()],
            None => self.threads().await?,
        };
        let mut found = Vec::new();
        for thread in &threads {
            self.list_thread(thread, request, &mut found).await?;
        }
        if threads.len() > 1 {
            found.sort_by_key(|tuple| std::cmp::Reverse(tuple.id));
            found.truncate(request.limit.unwrap_or(usize::MAX));
        }
        Ok(found)
    }

    async fn list_thread(
        &self,
        thread: &ThreadId,
        request: &ListRequest,
        found: &mut Vec<Tuple>,
    ) -> Result<()> {
        let mut query = ListQuery {
            thread: thread.clone(),
            namespace: request.namespace.clone(),
            before: request.before,
            limit: request.limit,
            filter: request.filter.clone(),
            load: Load::All,
        };
        if let Some(id) = request.id {
            // Nothing is newer than itself: one checkpoint of each namespace has this id.
            query.limit = None;
            query.load = Load::None;
            let all = self.saver.list(&query).await?;
            for tuple in all.into_iter().filter(|tuple| tuple.checkpoint.id == id) {
                if let Some(tuple) = self.saver.get(&CheckpointSelector::at(&tuple.key())).await? {
                    found.push(read::tuple(&tuple)?);
                }
            }
            found.truncate(request.limit.unwrap_or(usize::MAX));
            return Ok(());
        }
        // What LangGraph's metadata lack, the engine's may have: its source, say.
        let matches =
            |tuple: &Tuple| request.filter.iter().all(|(key, value)| tuple.metadata.get(key) == Some(value));
        let before = found.len();
        loop {
            let page = self.saver.list(&query).await?;
            let (len, last) = (page.len(), page.last().map(|tuple| tuple.checkpoint.id));
            for tuple in &page {
                let tuple = read::tuple(tuple)?;
                if matches(&tuple) {
                    found.push(tuple);
                }
            }
            let Some(limit) = request.limit else { return Ok(()) };
            let left = limit.saturating_sub(found.len() - before);
            if left == 0 || len < query.limit.unwrap_or(usize::MAX) {
                return Ok(());
            }
            query.before = last;
            query.limit = Some(left);
        }
    }

    async fn threads(&self) -> Result<Vec<ThreadId>> {
        let mut all: Vec<ThreadId> = Vec::new();
        loop {
            let page = self.saver.threads(all.last(), THREADS).await?;
            let len = page.len();
            all.extend(page);
            if len < THREADS {
                return Ok(all);
            }
        }
    }

    /// What delta channels are replayed from at a checkpoint, or at the head; nothing if it does not exist.
    ///
    /// # Errors
    /// [`Error::BrokenLineage`] if an ancestor is missing. The saver's.
    pub async fn history(
        &self,
        place: &Place,
        id: Option<CheckpointId>,
        channels: &BTreeSet<String>,
    ) -> Result<BTreeMap<String, ChannelReplay>> {
        let nothing = || channels.iter().map(|channel| (channel.clone(), ChannelReplay::default())).collect();
        let id = match id {
            Some(id) => id,
            None => match self.read_head(place).await? {
                Some(head) => head,
                None => return Ok(nothing()),
            },
        };
        let names = channels.iter().map(|channel| channel.as_str().into()).collect();
        match history::replay(&*self.saver, place, id, &names).await {
            Err(Error::NotFound { .. }) => Ok(nothing()),
            found => Ok(found?.into_iter().map(|(channel, replay)| (channel.to_string(), replay)).collect()),
        }
    }

    /// Deletes a thread.
    ///
    /// # Errors
    /// The saver's.
    pub async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        let deleted = self.saver.delete_thread(thread).await;
        self.forget(thread);
        deleted
    }

    /// Deletes the checkpoints that these runs made, in all threads, except those that a delta channel of another is
    /// replayed from.
    ///
    /// # Errors
    /// The saver's. Threads before the one that failed are done.
    pub async fn delete_for_runs(&self, runs: &BTreeSet<String>) -> Result<()> {
        if runs.is_empty() {
            return Ok(());
        }
        for thread in self.threads().await? {
            if self.has_run(&thread, runs).await? {
                self.rewrite(&thread, |image| delete::without_runs(image, runs)).await?;
            }
        }
        Ok(())
    }

    /// Whether one of these runs wrote to a thread. Reads no values: most threads have nothing of a run.
    async fn has_run(&self, thread: &ThreadId, runs: &BTreeSet<String>) -> Result<bool> {
        for run in runs {
            let query = ListQuery {
                namespace: None,
                limit: Some(1),
                filter: [(deletion::RUN_ID_KEY.to_owned(), run.as_str().into())].into_iter().collect(),
                load: Load::None,
                ..ListQuery::new(thread)
            };
            if !self.saver.list(&query).await?.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Deletes old checkpoints of a thread.
    ///
    /// # Errors
    /// The saver's.
    pub async fn prune(&self, thread: &ThreadId, strategy: Strategy) -> Result<()> {
        match strategy {
            Strategy::Delete => self.delete_thread(thread).await,
            Strategy::KeepLatest => self.rewrite(thread, delete::keep_latest).await,
        }
    }

    /// Copies a thread. Nothing happens if it does not exist.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if the target exists. The saver's.
    pub async fn copy_thread(&self, from: &ThreadId, to: &ThreadId) -> Result<()> {
        if self.saver.read_thread(from).await?.checkpoints.is_empty() {
            return Ok(());
        }
        let copied = deletion::copy_thread(&*self.saver, from, to).await;
        self.forget(to);
        copied.map(drop)
    }

    async fn rewrite(&self, thread: &ThreadId, change: impl Fn(&ThreadImage) -> Rewrite) -> Result<()> {
        for _ in 0..ATTEMPTS {
            let image = self.saver.read_thread(thread).await?;
            let rewrite = change(&image);
            if rewrite.is_empty() {
                return Ok(());
            }
            let done = self.saver.rewrite_thread(thread, &image.revision, rewrite).await;
            self.memory.forget_thread(thread);
            match done {
                Err(Error::Stale { .. }) => {}
                done => return done,
            }
        }
        Err(Error::Stale { thread: thread.clone() })
    }

    fn forget(&self, thread: &ThreadId) {
        self.memory.forget_thread(thread);
        self.waiting.forget(thread);
    }
}

/// Whether LangGraph wrote a thread last.
///
/// # Errors
/// The saver's.
pub async fn is_of_langgraph(saver: &dyn Saver, thread: &ThreadId) -> Result<bool> {
    let query = ListQuery { namespace: None, limit: Some(1), load: Load::None, ..ListQuery::new(thread) };
    let newest = saver.list(&query).await?;
    Ok(newest.iter().any(|tuple| tuple.checkpoint.channels.contains_key(FRAME)))
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

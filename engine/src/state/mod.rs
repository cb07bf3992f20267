//! The state accessor: the only way to read and write thread state. It applies the gate to every read and write, and
//! materializes.

mod deletion;
mod known;
mod note;
mod plan;
mod rewind;
mod snapshot;
mod warm;

use std::sync::Arc;

use serde_json::{Map, Value as Json};

pub use deletion::SeenThread;
pub use known::KnownHead;
pub(crate) use plan::{Plan, Step, plan};
pub use rewind::RollbackPoint;
pub(crate) use snapshot::Channel;
pub use snapshot::{StateSnapshot, TaskView};
use warm::WarmHeads;

use crate::channel::ChannelTable;
use crate::checkpoint::{CheckpointTuple, TaskWrites, Write};
use crate::error::{Error, Result};
use crate::id::{ChannelName, CheckpointId, IdSource, Namespace, NodeName, ThreadId};
use crate::materialize::{Paths, materialize};
use crate::metadata::Source;
use crate::mode::{gate, gate_tuple};
use crate::saver::{self, CheckpointSelector, ListQuery, Load, Saver, ThreadImage, fallback};

/// Reads and writes the state of threads, with the channels, mode and cadence of a [`ChannelTable`]. Cloning is cheap.
///
/// It caches the values of the heads that it read or wrote last (a few, bounded by their bytes), so that continuing a
/// thread costs one small read, however long the thread is. Clones of an accessor share that cache.
#[derive(Clone)]
pub struct StateAccessor {
    saver: Arc<dyn Saver>,
    table: Arc<ChannelTable>,
    ids: Arc<IdSource>,
    namespace: Namespace,
    warm: WarmHeads,
}

/// A change of state from outside a run.
#[derive(Debug, Clone)]
pub struct Update {
    /// The checkpoint to write on; `None` for the head. An older one creates a fork, which becomes the head.
    pub at: Option<CheckpointId>,
    /// The node recorded as the writer.
    pub node: NodeName,
    /// The writes, created with [`StateAccessor::write`].
    pub writes: Vec<Write>,
    /// Further metadata of the new checkpoint.
    pub extra: Map<String, Json>,
}

/// Selects a page of history, newest first.
#[derive(Debug, Clone, Default)]
pub struct HistoryQuery {
    /// Only checkpoints older than this one.
    pub before: Option<CheckpointId>,
    /// Maximum number of checkpoints; `None` for all.
    pub limit: Option<usize>,
    /// Only checkpoints whose metadata has these values.
    pub filter: Map<String, Json>,
    /// Which values to load.
    pub load: Load,
}

impl StateAccessor {
    /// An accessor of the root namespace.
    pub fn new(saver: Arc<dyn Saver>, table: Arc<ChannelTable>, ids: Arc<IdSource>) -> Self {
        Self { saver, table, ids, namespace: Namespace::root(), warm: WarmHeads::default() }
    }

    /// The same accessor with its own cache of at most `heads` heads. The limit is read whenever a head is added, so it
    /// may change.
    pub fn remembering(mut self, heads: impl Fn() -> usize + Send + Sync + 'static) -> Self {
        self.warm = WarmHeads::new(Arc::new(heads));
        self
    }

    /// The number of cached heads.
    pub fn remembered(&self) -> usize {
        self.warm.len()
    }

    /// The same accessor for another namespace.
    pub fn in_namespace(mut self, namespace: Namespace) -> Self {
        self.namespace = namespace;
        self
    }

    /// The same accessor with another source of ids.
    pub fn with_ids(mut self, ids: Arc<IdSource>) -> Self {
        self.ids = ids;
        self
    }

    /// The channels.
    pub fn table(&self) -> &ChannelTable {
        &self.table
    }

    /// The saver, for what is not state: existence checks, rewriting, pending writes.
    pub fn saver(&self) -> &Arc<dyn Saver> {
        &self.saver
    }

    /// The source of ids.
    pub fn ids(&self) -> &IdSource {
        &self.ids
    }

    fn selector(&self, thread: &ThreadId, id: Option<CheckpointId>, load: Load) -> CheckpointSelector {
        CheckpointSelector { thread: thread.clone(), namespace: self.namespace.clone(), id, load }
    }

    /// The state at a checkpoint, or at the head; `None` if it does not exist.
    ///
    /// # Errors
    /// [`Error::ModeMismatch`] from the gate, [`Error::BrokenLineage`], [`Error::ForeignChanges`], and the saver's.
    pub async fn get(&self, thread: &ThreadId, at: Option<CheckpointId>) -> Result<Option<StateSnapshot>> {
        self.get_loading(thread, at, Load::All).await
    }

    /// As [`Self::get`], with only the values of `load`.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub async fn get_loading(
        &self,
        thread: &ThreadId,
        at: Option<CheckpointId>,
        load: Load,
    ) -> Result<Option<StateSnapshot>> {
        if load != Load::None
            && let Some(warm) = self.warm.find(thread, &self.namespace, at)
        {
            let Some(tuple) = self.tuple(thread, at, Load::None).await? else {
                self.warm.forget(thread);
                return Ok(None);
            };
            if warm.is_of(&tuple) {
                return Ok(Some(warm.complete(tuple, &load)));
            }
        }
        let tuples: Vec<_> = self.tuple(thread, at, load.clone()).await?.into_iter().collect();
        let at_that_moment = |image: &ThreadImage| {
            let found = match at {
                Some(id) => image.checkpoints.get(&(self.namespace.clone(), id)),
                None => image.checkpoints.values().rfind(|tuple| tuple.namespace == self.namespace),
            };
            found.map(|tuple| load.of(tuple.clone())).into_iter().collect()
        };
        let state = self.materialized(thread, tuples, &load, at_that_moment).await?.pop();
        if let (Some(head), None) = (&state, at) {
            self.warm.keep(head, &self.table);
        }
        Ok(state)
    }

    /// The saver's checkpoint, after the gate.
    async fn tuple(
        &self,
        thread: &ThreadId,
        at: Option<CheckpointId>,
        load: Load,
    ) -> Result<Option<CheckpointTuple>> {
        let tuple = self.saver.get(&self.selector(thread, at, load)).await?;
        gate_tuple(self.table.mode(), tuple.as_ref())?;
        Ok(tuple)
    }

    /// Only applies the gate, to a checkpoint or the head, before anything is written; returns whether it exists.
    ///
    /// # Errors
    /// [`Error::ModeMismatch`], and the saver's.
    pub async fn check(&self, thread: &ThreadId, at: Option<CheckpointId>) -> Result<bool> {
        Ok(self.tuple(thread, at, Load::None).await?.is_some())
    }

    /// A page of history, newest first, materialized in one pass.
    ///
    /// # Errors
    /// As [`Self::get`]; the gate checks every checkpoint of the page.
    pub async fn history(&self, thread: &ThreadId, query: HistoryQuery) -> Result<Vec<StateSnapshot>> {
        let list = ListQuery {
            thread: thread.clone(),
            namespace: Some(self.namespace.clone()),
            before: query.before,
            limit: query.limit,
            filter: query.filter,
            load: query.load.clone(),
        };
        let tuples = self.saver.list(&list).await?;
        let at_that_moment = |image: &ThreadImage| fallback::list(image.checkpoints.values().cloned(), &list);
        self.materialized(thread, tuples, &query.load, at_that_moment).await
    }

    /// The states of checkpoints that were read, past the gate.
    ///
    /// That takes a second read. Where something is missing then, the thread may have been pruned, converted or deleted
    /// between the two; so the whole thread is read once more at one moment, which `select` picks the checkpoints from.
    async fn materialized(
        &self,
        thread: &ThreadId,
        tuples: Vec<CheckpointTuple>,
        load: &Load,
        select: impl Fn(&ThreadImage) -> Vec<CheckpointTuple>,
    ) -> Result<Vec<StateSnapshot>> {
        let gated = |tuples: &[CheckpointTuple]| {
            tuples.iter().try_for_each(|tuple| gate(self.table.mode(), &tuple.metadata))
        };
        gated(&tuples)?;
        match materialize(Paths::Saver(&*self.saver), &self.table, tuples, load).await {
            Err(Error::NotFound { .. } | Error::BrokenLineage { .. }) => {}
            read => return read,
        }
        let image = self.saver.read_thread(thread).await?;
        let tuples = select(&image);
        gated(&tuples)?;
        materialize(Paths::Image(&image), &self.table, tuples, load).await
    }

    /// Creates a write, completed (for example with message ids) so that it can be stored.
    ///
    /// # Errors
    /// [`Error::InvalidUpdate`] for a channel that the schema does not have, or a value that the channel refuses.
    pub fn write(&self, channel: &str, value: Json, overwrite: bool) -> Result<Write> {
        let named = self.table.named(channel);
        let (channel, behaviour) = named.ok_or_else(|| unknown_channel(&channel.into()))?;
        let value = match behaviour.reducer() {
            Some(reducer) => reducer.prepare(value, &self.ids)?,
            None => value,
        };
        Ok(Write {
            value: crate::value::ChannelValue::from_json(&value)?,
            channel: channel.clone(),
            overwrite,
        })
    }

    /// Writes the first, empty checkpoint of a thread, with step -1 and source `input`. If the thread already has a
    /// head, that is an [`Error::Conflict`].
    ///
    /// # Errors
    /// The saver's.
    pub async fn create(&self, thread: &ThreadId, extra: Map<String, Json>) -> Result<StateSnapshot> {
        let step = Step { source: Source::Input, next: Vec::new(), extra: extra.into() };
        let plan = plan(self, thread, None, None, &[], step)?;
        self.commit(plan).await
    }

    /// Writes to the state from outside a run. The result has no next nodes.
    ///
    /// # Errors
    /// [`Error::NotFound`] if `at` does not exist, [`Error::ModeMismatch`] from the gate (nothing is written),
    /// [`Error::InvalidUpdate`], [`Error::Conflict`] if the head moved meanwhile, and the saver's.
    pub async fn update(&self, thread: &ThreadId, update: Update) -> Result<StateSnapshot> {
        let mut head = self.known_head(thread).await?;
        self.update_known(&mut head, update).await
    }

    /// As [`Self::update`], for a caller that decided by a head that it saw earlier.
    ///
    /// # Errors
    /// As there; [`Error::Conflict`] if `head` is no longer the head; then nothing is written.
    pub async fn update_known(&self, head: &mut KnownHead, update: Update) -> Result<StateSnapshot> {
        let Update { at, node, writes, extra } = update;
        let base = match at.or(head.id()) {
            Some(checkpoint) => {
                let base = self.get(head.thread(), Some(checkpoint)).await?;
                Some(base.ok_or_else(|| Error::NotFound { thread: head.thread().clone(), checkpoint })?)
            }
            None => None,
        };
        let plan = self.plan_update(head, base.as_ref(), node, writes, extra, Vec::new())?;
        self.commit_known(head, plan).await
    }

    fn plan_update(
        &self,
        head: &KnownHead,
        base: Option<&StateSnapshot>,
        node: NodeName,
        writes: Vec<Write>,
        extra: Map<String, Json>,
        next: Vec<NodeName>,
    ) -> Result<Plan> {
        let row = TaskWrites { task: self.ids.task(), node, index: 0, writes };
        let step = Step { source: Source::Update, next, extra: extra.into() };
        plan(self, head.thread(), base, head.id(), &[(row, false)], step)
    }

    /// Commits a planned step.
    pub(crate) async fn commit(&self, plan: Plan) -> Result<StateSnapshot> {
        saver::commit(&*self.saver, plan.commit).await?;
        self.warm.keep(&plan.state, &self.table);
        Ok(plan.state)
    }

    /// Deletes everything of a thread, in every namespace, whatever it contains by then: see [`Self::delete_seen`].
    ///
    /// # Errors
    /// The saver's.
    pub async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        let deleted = self.saver.delete_thread(thread).await;
        self.warm.forget(thread);
        deleted
    }
}

pub(crate) fn unknown_channel(channel: &ChannelName) -> Error {
    Error::InvalidUpdate(format!("the thread state has no channel {channel}"))
}

//! The contract between the engine and a store: the [`Saver`] trait.
//!
//! A saver keeps checkpoints and task writes. It knows nothing of modes, reducers or cadences: what is stored for a
//! channel ([`Stored`]) is decided before it gets here. Each bullet in a method's documentation is the name of a case
//! of the conformance suite.

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;
use serde_json::{Map, Value as Json};

use crate::checkpoint::{
    ChannelEntry, Checkpoint, CheckpointKey, CheckpointTuple, Stored, TaskWrites, Write,
};
use crate::error::{Error, Result};
use crate::id::{ChannelName, CheckpointId, Namespace, TaskId, ThreadId, Version};
use crate::metadata::Metadata;
use crate::value::ChannelValue;

/// Which channel values a read loads. Entries that are not loaded come back as [`Stored::Held`], never as absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Load {
    /// Every value.
    #[default]
    All,
    /// No value: versions, lineage and metadata only.
    None,
    /// The values of these channels.
    Only(BTreeSet<ChannelName>),
}

impl Load {
    /// Whether the value of `channel` is to be loaded.
    pub fn wants(&self, channel: &ChannelName) -> bool {
        match self {
            Self::All => true,
            Self::None => false,
            Self::Only(names) => names.contains(channel),
        }
    }
}

/// Selects one checkpoint: by id, or the head (the greatest id of the namespace).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointSelector {
    /// The thread.
    pub thread: ThreadId,
    /// The namespace in it.
    pub namespace: Namespace,
    /// The checkpoint; none means the head.
    pub id: Option<CheckpointId>,
    /// Which values to load.
    pub load: Load,
}

impl CheckpointSelector {
    /// The head of the root namespace, with every value.
    pub fn head(thread: &ThreadId) -> Self {
        Self { thread: thread.clone(), namespace: Namespace::root(), id: None, load: Load::All }
    }

    /// One checkpoint, with every value.
    pub fn at(key: &CheckpointKey) -> Self {
        Self {
            thread: key.thread.clone(),
            namespace: key.namespace.clone(),
            id: Some(key.id),
            load: Load::All,
        }
    }

    /// The same checkpoint with other values loaded.
    pub fn loading(mut self, load: Load) -> Self {
        self.load = load;
        self
    }
}

/// Selects checkpoints of a thread, newest first. Inside a namespace, newest means greatest id; checkpoints of several
/// namespaces come merged by id.
#[derive(Debug, Clone, PartialEq)]
pub struct ListQuery {
    /// The thread.
    pub thread: ThreadId,
    /// Only this namespace; none means all.
    pub namespace: Option<Namespace>,
    /// Only ids smaller than this one.
    pub before: Option<CheckpointId>,
    /// At most so many; none means no bound.
    pub limit: Option<usize>,
    /// Only checkpoints whose metadata has these values under these keys.
    pub filter: Map<String, Json>,
    /// Which values to load.
    pub load: Load,
}

impl ListQuery {
    /// The whole root namespace of a thread, with every value.
    pub fn new(thread: &ThreadId) -> Self {
        Self {
            thread: thread.clone(),
            namespace: Some(Namespace::root()),
            before: None,
            limit: None,
            filter: Map::new(),
            load: Load::All,
        }
    }
}

/// One superstep, to be made durable whole or not at all.
#[derive(Debug, Clone, PartialEq)]
pub struct StepCommit {
    /// The thread.
    pub thread: ThreadId,
    /// The namespace in it.
    pub namespace: Namespace,
    /// The checkpoint from which the step ran; none for the first one of a namespace.
    pub parent: Option<CheckpointId>,
    /// The head that the writer saw. A fork has an older parent and the current head.
    pub expected_head: Option<CheckpointId>,
    /// The new checkpoint. [`Stored::Held`] entries are taken over from the parent.
    pub checkpoint: Checkpoint,
    /// Its metadata.
    pub metadata: Metadata,
    /// The writes of the step that are not durable yet; they are stored under the parent.
    pub writes: Vec<TaskWrites>,
}

impl StepCommit {
    /// The key of the new checkpoint.
    pub fn key(&self) -> CheckpointKey {
        CheckpointKey {
            thread: self.thread.clone(),
            namespace: self.namespace.clone(),
            id: self.checkpoint.id,
        }
    }

    /// Refuses a commit that no saver may accept. Every saver calls this first.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if the id is not greater than the parent's and the expected head's, or a first
    /// checkpoint refers to something that only a parent could hold.
    pub fn validate(&self) -> Result<()> {
        let refuse = |why: &str| {
            Err(Error::InvalidInput(format!(
                "commit of checkpoint {} to thread {}: {why}",
                self.checkpoint.id, self.thread
            )))
        };
        let floor = self.parent.max(self.expected_head);
        if floor.is_some_and(|floor| floor >= self.checkpoint.id) {
            return refuse("its id is not greater than its parent's and the head's");
        }
        if self.parent.is_none() {
            if !self.writes.is_empty() || !self.checkpoint.applied.is_empty() {
                return refuse("writes belong to a parent checkpoint, and it has none");
            }
            let needs_parent = |e: &ChannelEntry| matches!(e.stored, Stored::Held | Stored::Sentinel);
            if let Some((name, _)) = self.checkpoint.channels.iter().find(|(_, e)| needs_parent(e)) {
                return refuse(&format!("channel {name} stores no value, and there is no parent to hold it"));
            }
        }
        Ok(())
    }

    /// Checks that a [`Stored::Held`] entry can be taken over: `parent` is the version at which the parent has the
    /// channel.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if the parent does not have the channel at this version.
    pub fn check_held(&self, channel: &ChannelName, version: Version, parent: Option<Version>) -> Result<()> {
        match parent {
            Some(held) if held == version => Ok(()),
            _ => Err(Error::InvalidInput(format!(
                "commit of checkpoint {} to thread {}: its parent does not hold channel {channel} at version \
                 {version:?}",
                self.checkpoint.id, self.thread
            ))),
        }
    }
}

/// The path of one channel from its seed to a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct ChannelHistory {
    /// The nearest complete value at or before the oldest point of the path; none if the channel had never been
    /// written there.
    pub seed: Option<Seed>,
    /// The checkpoints behind the seed, oldest first, up to the target.
    pub steps: Vec<HistoryStep>,
}

/// A complete value from which to replay.
#[derive(Debug, Clone, PartialEq)]
pub struct Seed {
    /// The checkpoint that stores it.
    pub checkpoint: CheckpointId,
    /// The value.
    pub value: ChannelValue,
    /// Its version.
    pub version: Version,
}

/// One checkpoint of a path: the writes that it applied to the channel.
#[derive(Debug, Clone, PartialEq)]
pub struct HistoryStep {
    /// The checkpoint.
    pub checkpoint: CheckpointId,
    /// Its writes to the channel, in the order in which they were applied. Often none.
    pub writes: Vec<Write>,
}

/// What [`Saver::delta_history`] returns: a path per channel asked for.
pub type DeltaHistory = BTreeMap<ChannelName, ChannelHistory>;

/// What a saver offers beyond the required behaviour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// The saver's name, as reports and errors use it.
    pub name: &'static str,
    /// Whether what was acknowledged is there after the process ends.
    pub durable: bool,
    /// Whether equal list elements of a thread are stored once.
    pub shared_elements: bool,
}

/// A store of checkpoints.
///
/// **Atomic**: each method happens whole or not at all. **Ordered**: a read that starts after a write was acknowledged
/// sees it. **Idempotent**: `commit` of the same checkpoint id, `put_writes` of the same task, `delete_thread`.
///
/// **Cancellation**: a caller that drops the future of a writing method does not learn the outcome; it may have
/// happened. Repeating it is safe. Reads are cancel-safe.
///
/// **Errors**: [`Error::Conflict`], [`Error::BrokenLineage`], [`Error::Corrupt`], [`Error::Unavailable`] and
/// [`Error::InDoubt`] as their documentation says; absence is never an empty value.
#[async_trait]
pub trait Saver: Send + Sync {
    /// Reads a checkpoint, or the head.
    ///
    /// - `get_head_is_the_greatest_id`: without an id, the checkpoint with the greatest id of the namespace.
    /// - `get_by_id_is_exact`: with an id, that checkpoint or `None`; never another one.
    /// - `get_unknown_is_none`: an unknown thread, namespace or id is `None`.
    /// - `get_returns_what_was_committed`: channels, next nodes, applied tasks, parent and metadata come back equal.
    /// - `get_loads_what_was_asked`: entries outside `load` are [`Stored::Held`] with their version.
    /// - `get_includes_writes_in_stored_order`: the task writes stored under the checkpoint.
    /// - `namespaces_are_separate`: equal ids in two namespaces are two checkpoints.
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>>;

    /// Lists checkpoints, newest first.
    ///
    /// - `list_is_newest_first`
    /// - `list_before_is_exclusive`
    /// - `list_limit_bounds_matches`: the limit counts checkpoints that match the filter; 0 is none.
    /// - `list_filters_on_metadata`: all keys must match; compared as JSON.
    /// - `list_all_namespaces`
    /// - `list_unknown_thread_is_empty`
    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>>;

    /// Stores the writes of a finished (or failed) task under the checkpoint it ran from.
    ///
    /// - `put_writes_survive_without_a_child`: they are pending until a child applies them.
    /// - `put_writes_is_idempotent`: the same task again adds nothing; see [`TaskWrites::merge`] for more writes.
    /// - `put_writes_special_rows_are_replaced`
    /// - `put_writes_needs_its_checkpoint`: an unknown checkpoint is [`Error::NotFound`], and nothing is stored.
    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()>;

    /// Stores a superstep: its writes, its checkpoint and its values, in one atomic change.
    ///
    /// - `commit_on_a_stale_head_conflicts`: if the head is not `expected_head`, [`Error::Conflict`] and nothing stored.
    /// - `commit_of_the_same_id_is_idempotent`: if the checkpoint is already there, that is success, and nothing changes.
    /// - `commit_needs_its_parent`: a parent that is not there is [`Error::NotFound`].
    /// - `commit_applies_only_known_tasks`: `applied` names tasks whose writes are stored under the parent or come with
    ///   the commit; otherwise [`Error::InvalidInput`].
    /// - `commit_takes_over_held_values`: a [`Stored::Held`] entry is the parent's; one that the parent does not have
    ///   at that version is [`Error::InvalidInput`].
    /// - `commit_of_siblings_keeps_both`: two children of one parent never share or lose values or writes.
    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey>;

    /// The paths from which the values of delta channels at a checkpoint are made, oldest step first.
    ///
    /// Each path ends at `at` and starts behind the nearest complete value at or before `reach` (at or before `at` if
    /// none). With `reach`, one call serves a whole page of history.
    ///
    /// - `history_replays_only_applied_writes`: of the rows under the parent, those in the child's `applied`, in that
    ///   order; never a sibling's, pending or special row.
    /// - `history_stops_at_the_nearest_value`
    /// - `history_reaches_back_as_far_as_asked`
    /// - `history_of_a_never_written_channel_has_no_seed_and_no_writes`
    /// - `history_with_a_missing_ancestor_is_broken_lineage`: also a missing applied task, or a sentinel at the root.
    /// - `history_of_an_unknown_checkpoint_is_not_found`
    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory>;

    /// Deletes everything of a thread, in every namespace.
    ///
    /// - `delete_thread_removes_everything_of_it`
    /// - `delete_thread_leaves_other_threads`
    /// - `delete_unknown_thread_is_fine`
    async fn delete_thread(&self, thread: &ThreadId) -> Result<()>;

    /// What this saver offers.
    fn capabilities(&self) -> Capabilities;
}

/// Plain versions of the harder methods, for a saver that has no better one yet.
pub mod fallback {
    use super::*;

    /// [`Saver::delta_history`] by walking `get` and parent links: a round trip per ancestor.
    ///
    /// # Errors
    /// As the method.
    pub async fn delta_history(
        saver: &dyn Saver,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        let load = Load::Only(channels.clone());
        let get = async |id| {
            saver
                .get(&CheckpointSelector::at(&CheckpointKey { id, ..at.clone() }).loading(load.clone()))
                .await
        };
        let mut walk = HistoryWalk::new(at, channels, reach);
        let mut child = get(at.id)
            .await?
            .ok_or_else(|| Error::NotFound { thread: at.thread.clone(), checkpoint: at.id })?;
        loop {
            let id = child.checkpoint.id;
            let channels = &child.checkpoint.channels;
            if walk.visit(id, |channel, _| Ok(channels.get(channel).cloned()))? {
                return Ok(walk.finish());
            }
            let Some(parent_id) = child.parent else { return Err(walk.no_seed(id)) };
            let parent = get(parent_id).await?.ok_or_else(|| walk.no_parent(id, parent_id))?;
            walk.apply(id, &child.checkpoint.applied, &parent.writes)?;
            child = parent;
        }
    }

    /// The bookkeeping of a walk from a checkpoint back to its seeds. The caller visits checkpoints from the target
    /// backwards, and after each one gives it the rows that are stored under its parent.
    #[derive(Debug)]
    pub struct HistoryWalk<'a> {
        at: &'a CheckpointKey,
        reach: CheckpointId,
        open: BTreeSet<ChannelName>,
        done: DeltaHistory,
    }

    impl<'a> HistoryWalk<'a> {
        /// A walk from `at`.
        pub fn new(
            at: &'a CheckpointKey,
            channels: &BTreeSet<ChannelName>,
            reach: Option<CheckpointId>,
        ) -> Self {
            let empty = || ChannelHistory { seed: None, steps: Vec::new() };
            Self {
                at,
                reach: reach.unwrap_or(at.id),
                open: channels.clone(),
                done: channels.iter().map(|channel| (channel.clone(), empty())).collect(),
            }
        }

        /// Looks at the next older checkpoint; returns whether the walk is complete. `entry` tells what the checkpoint
        /// stores for a channel; its second argument says whether a complete value would be taken, so that it need
        /// not be loaded otherwise.
        ///
        /// # Errors
        /// Those of `entry`.
        pub fn visit(
            &mut self,
            id: CheckpointId,
            mut entry: impl FnMut(&ChannelName, bool) -> Result<Option<ChannelEntry>>,
        ) -> Result<bool> {
            let far_enough = id <= self.reach;
            for channel in std::mem::take(&mut self.open) {
                let seed = match entry(&channel, far_enough)? {
                    None => None,
                    Some(ChannelEntry {
                        version,
                        stored: Stored::Value(value) | Stored::Snapshot(value),
                    }) if far_enough => Some(Seed { checkpoint: id, value, version }),
                    Some(_) => {
                        self.open.insert(channel);
                        continue;
                    }
                };
                if let Some(history) = self.done.get_mut(&channel) {
                    history.seed = seed;
                }
            }
            Ok(self.open.is_empty())
        }

        /// Records the writes that `id` applied, out of the rows under its parent.
        ///
        /// # Errors
        /// [`Error::BrokenLineage`] if an applied task has no row.
        pub fn apply(&mut self, id: CheckpointId, applied: &[TaskId], rows: &[TaskWrites]) -> Result<()> {
            let mut tasks = Vec::with_capacity(applied.len());
            for task in applied {
                let row = rows.iter().find(|row| row.task == *task);
                tasks.push(row.ok_or_else(|| {
                    Error::broken(&self.at.thread, id, format!("the writes of its task {task} are missing"))
                })?);
            }
            for channel in &self.open {
                let writes = tasks.iter().flat_map(|row| &row.writes).filter(|w| w.channel == *channel);
                if let Some(history) = self.done.get_mut(channel) {
                    history.steps.push(HistoryStep { checkpoint: id, writes: writes.cloned().collect() });
                }
            }
            Ok(())
        }

        /// The error for a walk that reached a root without a seed.
        pub fn no_seed(&self, root: CheckpointId) -> Error {
            let open: Vec<_> = self.open.iter().map(ChannelName::as_str).collect();
            Error::broken(
                &self.at.thread,
                self.at.id,
                format!("the lineage ends at {root} without a stored value of {}", open.join(", ")),
            )
        }

        /// The error for a parent that is not there.
        pub fn no_parent(&self, child: CheckpointId, parent: CheckpointId) -> Error {
            Error::broken(&self.at.thread, child, format!("its parent {parent} is missing"))
        }

        /// The paths, oldest step first.
        pub fn finish(mut self) -> DeltaHistory {
            for history in self.done.values_mut() {
                history.steps.reverse();
            }
            self.done
        }
    }
}

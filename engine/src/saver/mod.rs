//! The contract between the engine and a store: the [`Saver`] trait.
//!
//! A saver stores checkpoints and task writes. It knows nothing about modes, reducers or cadences: the engine decides
//! what is stored for a channel ([`Stored`]). Each bullet in a method's documentation is the name of a case of the
//! conformance suite.

mod coming;
mod doubt;
pub mod fallback;
mod rewrite;
mod summary;

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;
use serde_json::{Map, Value as Json};

use crate::checkpoint::{
    ChannelEntry, Checkpoint, CheckpointKey, CheckpointTuple, Stored, TaskWrites, Write,
};
use crate::error::{Error, Result};
use crate::id::{ChannelName, CheckpointId, Namespace, ThreadId, Version};
use crate::metadata::{Counters, Metadata};
use crate::value::ChannelValue;

pub use coming::{Coming, check_next, check_order, collected};
pub use doubt::commit;
pub(crate) use doubt::doubt_or;
pub use rewrite::{LocalKey, Outline, Revision, Rewrite, ThreadImage};
pub use summary::{ChainSummary, Counted, Counter, Summary};

/// Which channel values a read loads. Entries that are not loaded are returned as [`Stored::Held`], never as absent.
/// Only channel values are affected: lineage, metadata and the task writes under a checkpoint are always returned.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Load {
    /// Every value.
    #[default]
    All,
    /// No value.
    None,
    /// The values of these channels.
    Only(BTreeSet<ChannelName>),
}

impl Load {
    /// Whether to load the value of `channel`.
    pub fn wants(&self, channel: &ChannelName) -> bool {
        match self {
            Self::All => true,
            Self::None => false,
            Self::Only(names) => names.contains(channel),
        }
    }

    /// The checkpoint as a read with this load returns it.
    pub fn of(&self, mut tuple: CheckpointTuple) -> CheckpointTuple {
        for (name, entry) in &mut tuple.checkpoint.channels {
            if !self.wants(name) {
                entry.stored = Stored::Held;
            }
        }
        tuple
    }
}

/// Selects one checkpoint: by id, or the head (the greatest id of the namespace).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointSelector {
    /// The thread.
    pub thread: ThreadId,
    /// The namespace in it.
    pub namespace: Namespace,
    /// The checkpoint; `None` for the head.
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

    /// The same checkpoint, loading other values.
    pub fn loading(mut self, load: Load) -> Self {
        self.load = load;
        self
    }
}

/// Selects checkpoints of a thread, newest first. Within a namespace, newest means greatest id; checkpoints of several
/// namespaces are merged by id.
#[derive(Debug, Clone, PartialEq)]
pub struct ListQuery {
    /// The thread.
    pub thread: ThreadId,
    /// Only this namespace; `None` for all.
    pub namespace: Option<Namespace>,
    /// Only ids smaller than this one.
    pub before: Option<CheckpointId>,
    /// Maximum number of checkpoints; `None` for no limit.
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

/// When a change is flushed to disk.
///
/// This only concerns power loss (and, if the store has its own server, a crash of that server): in both cases a change
/// is acknowledged when it is stored, atomic, fenced and visible to every reader, and survives a crash of the process
/// that made it. Power loss removes only a suffix of acknowledged changes: everything up to some point survives, which
/// is at or after the last flushed change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Flush {
    /// Before it is acknowledged.
    #[default]
    Now,
    /// With the next change of the store that is flushed before it is acknowledged, or with [`Saver::flush`]. For the
    /// steps of a turn of which only the last one must be durable when acknowledged.
    WithNext,
}

/// One superstep, stored completely or not at all.
#[derive(Debug, Clone, PartialEq)]
pub struct StepCommit {
    /// The thread.
    pub thread: ThreadId,
    /// The namespace in it.
    pub namespace: Namespace,
    /// The checkpoint from which the step ran; `None` for the first one of a namespace.
    pub parent: Option<CheckpointId>,
    /// The head that the writer read. A fork has an older parent and the current head.
    pub expected_head: Option<CheckpointId>,
    /// The new checkpoint. [`Stored::Held`] entries take their value from the parent.
    pub checkpoint: Checkpoint,
    /// Its metadata.
    pub metadata: Metadata,
    /// The step's writes that are not stored yet; they are stored under the parent.
    pub writes: Vec<TaskWrites>,
    /// Rows that the new checkpoint begins with: they are stored under it, in the same change, as
    /// [`Saver::put_writes`] would put them one after the other. For a checkpoint that takes the place of another one:
    /// what has finished of the tasks that run next has finished on it from the first moment on.
    pub pending: Vec<TaskWrites>,
    /// When it is flushed.
    pub flush: Flush,
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

    /// Refuses an invalid commit. Every saver must call this first.
    ///
    /// [Pending](Self::pending) rows need no parent, because they are the new checkpoint's own.
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

    /// Checks that the step continues what its parent stores: `parent` returns the version at which the parent has a
    /// channel, and its metadata's counters of it. Every saver must call this before it stores a step that has a parent.
    ///
    /// A conversion or a prune may have stored the parent in another form since the writer read it: a value where there
    /// were changes, or changes where there was a value. The counters show that. A step that takes over or continues a
    /// channel must count on from the parent's; otherwise readers would expect too few changes, or none.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if the parent does not have a [`Stored::Held`] channel at its version. [`Error::Stale`] if
    /// the step holds a channel for which only one of the two has counters, or holds or continues one with lower
    /// counters than the parent's. Those of `parent`.
    pub fn check_parent(
        &self,
        parent: impl Fn(&ChannelName) -> Result<Option<(Version, Option<Counters>)>>,
    ) -> Result<()> {
        for (channel, entry) in &self.checkpoint.channels {
            let held = match entry.stored {
                Stored::Held => true,
                Stored::Sentinel => false,
                Stored::Value(_) | Stored::Snapshot(_) => continue,
            };
            let stored = parent(channel)?;
            if held && stored.is_none_or(|(version, _)| version != entry.version) {
                return Err(Error::InvalidInput(format!(
                    "commit of checkpoint {} to thread {}: its parent does not hold channel {channel} at version {:?}",
                    self.checkpoint.id, self.thread, entry.version
                )));
            }
            let ours = self.metadata.counters.get(channel);
            let goes_on = match (ours, stored.and_then(|(_, counters)| counters)) {
                (Some(ours), Some(from)) => {
                    ours.updates >= from.updates && ours.supersteps >= from.supersteps
                }
                (None, None) => true,
                _ => !held,
            };
            if !goes_on {
                return Err(Error::Stale { thread: self.thread.clone() });
            }
        }
        Ok(())
    }
}

/// The path of one channel from its seed to a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct ChannelHistory {
    /// The nearest complete value at or before the oldest point of the path; `None` if the channel had never been
    /// written there.
    pub seed: Option<Seed>,
    /// The checkpoints after the seed, oldest first, up to the target.
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
    /// How many tasks it applied. Zero for a checkpoint that repeats its parent.
    pub tasks: usize,
    /// Its writes to the channel, in the order in which they were applied. Often empty.
    pub writes: Vec<Write>,
}

/// The result of [`Saver::delta_history`]: a path per requested channel.
pub type DeltaHistory = BTreeMap<ChannelName, ChannelHistory>;

/// What a saver offers beyond the required behaviour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// The saver's name in reports and errors.
    pub name: &'static str,
    /// Whether acknowledged changes survive the end of the process.
    pub durable: bool,
    /// Whether equal list elements of a thread are stored once: `equal_elements_are_stored_once`.
    pub shared_elements: bool,
}

/// A store of checkpoints.
///
/// **Atomic**: each method is executed completely or not at all. **Ordered**: a read that starts after a write was
/// acknowledged sees it. **Idempotent**: `commit` of the same checkpoint id, `put_writes` of the same task,
/// `delete_thread`. A repeated `rewrite_thread`, `delete_seen`, `create_thread` or `copy_thread` is [`Error::Stale`]; read the
/// thread to see whether the first one was executed.
///
/// **Cancellation**: a caller that drops the future of a writing method does not learn the outcome; it may have been
/// executed. Repeating it is safe. Reads are cancel-safe.
///
/// **One moment**: everything a read returns was stored at one moment, however many statements the saver needs; a
/// concurrent rewrite or deletion is before or after it. A missing row is [`Error::BrokenLineage`] only if it was missing
/// at that moment. `reads_are_of_one_moment` checks the methods that read a thread, with the revision, and
/// `a_thread_that_is_there_is_never_missing` the head and the list of threads.
///
/// **Fenced**: what is compared and what is stored are one step, for all handles of all processes. That includes a thread
/// that nobody has begun, which has no row to lock (`one_writer_begins_a_thread`), and task writes, which change what a
/// commit and a rewrite read (`puts_race_with_commits_and_rewrites`, `one_rewrite_of_a_revision_wins`).
///
/// **In doubt**: a call that returned [`Error::InDoubt`] stays in doubt even if a repeat fails: an [`Error::Unavailable`]
/// of the repeat is about the repeat only. A read that shows the outcome settles it, or a repeat that succeeds or returns
/// [`Error::Conflict`]. A handle that does not know the outcome fails its reads until the store is opened again, and never
/// shows what was before. [`Error::Unavailable`] means absent, also after the store is reopened.
///
/// **Durable**: what a method stores is flushed to disk before it is acknowledged, along with everything acknowledged
/// earlier; only a commit may ask for less, see [`Flush`]. A store that always flushes may ignore that. A repeat that finds
/// its change stored flushes, too: the first call may have failed, or its process ended, before it did. No case sees a
/// flush: the README of the conformance suite names the tests of our drivers that do. What a handle
/// remembers is no proof of what is stored: `a_failed_operation_leaves_all_or_nothing` repeats on the same handle.
///
/// **Errors**: [`Error::Conflict`], [`Error::Stale`], [`Error::HistoryLost`], [`Error::BrokenLineage`], [`Error::Corrupt`],
/// [`Error::Unavailable`] and [`Error::InDoubt`] as their documentation says; absence is never an empty value.
#[async_trait]
pub trait Saver: Send + Sync {
    /// Reads a checkpoint, or the head.
    ///
    /// - `get_head_is_the_greatest_id`: without an id, the checkpoint with the greatest id of the namespace.
    /// - `get_by_id_is_exact`: with an id, that checkpoint or `None`; never another one.
    /// - `get_unknown_is_none`: an unknown thread, namespace or id is `None`.
    /// - `get_returns_what_was_committed`: channels, next nodes, applied tasks, parent and metadata are returned
    ///   unchanged. A value is its bytes: not every one can be expressed as JSON.
    /// - `get_loads_what_was_asked`: entries outside `load` are [`Stored::Held`] with their version.
    /// - `get_includes_writes_in_stored_order`: the task writes stored under the checkpoint.
    /// - `namespaces_are_separate`: equal ids in two namespaces are two checkpoints.
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>>;

    /// Lists checkpoints, newest first. Which of several namespaces comes first at an id that they share is open, and
    /// so is which of them a limit leaves out there: who reads page by page, each [before](ListQuery::before) the last
    /// id of the one before it, reads that id to its end first.
    ///
    /// - `list_is_newest_first`
    /// - `list_before_is_exclusive`
    /// - `list_limit_bounds_matches`: the limit counts checkpoints that match the filter; 0 is none.
    /// - `list_filters_on_metadata`: all keys must match; compared as [`Metadata::matches`] does: 3 is not 3.0.
    /// - `list_all_namespaces`
    /// - `list_unknown_thread_is_empty`
    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>>;

    /// Stores the writes of a finished (or failed) task under the checkpoint it ran from.
    ///
    /// - `put_writes_survive_without_a_child`: they are pending until a child applies them.
    /// - `put_writes_is_idempotent`: the same writes of a task again add nothing; see [`TaskWrites::merge`].
    /// - `put_writes_are_merged_by_position`: a longer list of the same task adds what it has more, and changes nothing of
    ///   what is stored.
    /// - `put_writes_special_rows_are_replaced`
    /// - `applied_rows_are_final`: once a child has applied the row of a task, nothing changes that row: no put, special or
    ///   not, and no commit that brings the task again. The put succeeds all the same, as a repeat does.
    /// - `put_writes_needs_its_checkpoint`: an unknown checkpoint is [`Error::NotFound`], and nothing is stored.
    /// - `put_writes_may_repeat_a_task_elsewhere`: a task has a row under each checkpoint from which it ran.
    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()>;

    /// Stores a superstep: its writes, its checkpoint with its values, and its pending rows, in one atomic change.
    ///
    /// - `commit_on_a_stale_head_conflicts`: if the head is not `expected_head`, [`Error::Conflict`] and nothing stored.
    /// - `commit_of_the_same_id_is_idempotent`: if the checkpoint already exists, the call succeeds and changes
    ///   nothing, also if a rewrite has removed its parent since, or stored that in another form.
    /// - `commit_needs_its_parent`: a missing parent is [`Error::NotFound`].
    /// - `commit_stores_pending_rows_with_its_checkpoint`: [`StepCommit::pending`] is under the new checkpoint as soon as
    ///   that exists, in this order and merged as by [`Self::put_writes`]; a refused commit stores none of it, a repeat
    ///   changes nothing of it, and it is flushed with the step. From then on such a row is like any other of its
    ///   checkpoint.
    /// - `commit_applies_only_known_tasks`: `applied` names tasks whose writes are stored under the parent or come with
    ///   the commit; otherwise [`Error::InvalidInput`].
    /// - `commit_takes_over_held_values`: a [`Stored::Held`] entry is the parent's; one that the parent does not have
    ///   at that version is [`Error::InvalidInput`].
    /// - `commit_on_a_parent_in_another_form_is_stale`: if a rewrite has stored the parent in another form since the step
    ///   was planned, [`Error::Stale`] and nothing stored; [`StepCommit::check_parent`] decides.
    /// - `list_bases_are_told_by_their_version`: a list's parts are relative to the list that was stored under
    ///   [`ListValue::base`](crate::value::ListValue::base), and to no other one, such as the parent's.
    /// - `commit_of_siblings_keeps_both`: two children of one parent never share or lose values or writes.
    /// - `commit_that_waits_for_a_flush_is_like_any_other`: [`Flush::WithNext`] only changes what a power loss may
    ///   remove.
    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey>;

    /// Flushes the acknowledged changes of a thread that are not on disk yet: see [`Flush::WithNext`].
    ///
    /// - `flush_of_anything_is_fine`: also of an unknown thread, and of one that is already flushed.
    async fn flush(&self, thread: &ThreadId) -> Result<()>;

    /// The paths from which the values of delta channels at a checkpoint are computed, oldest step first.
    ///
    /// Each path ends at `at` and starts after the nearest complete value at or before `reach` (at or before `at` if
    /// `None`). With `reach`, one call serves a whole page of history.
    ///
    /// - `history_replays_only_applied_writes`: of the rows under the parent, those in the child's `applied`, in that
    ///   order; never a sibling's, pending or special row.
    /// - `history_stops_at_the_nearest_value`
    /// - `history_reaches_back_as_far_as_asked`
    /// - `history_ends_at_a_root`: after a rewrite a thread may have several; a path that reaches a root newer than
    ///   `reach` begins with what that root stores.
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

    /// The threads that have a checkpoint, by id, at most `limit`.
    ///
    /// - `threads_are_listed_by_page`: those after `after`; each one once, and fewer than `limit` only on the last page.
    /// - `many_threads_are_all_listed`
    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>>;

    /// A whole thread in every namespace, read at one point in time.
    ///
    /// - `read_thread_is_everything`: what [`Self::list`] returns for all namespaces, with every value.
    /// - `read_thread_of_an_unknown_thread_is_absent`: no checkpoints, and [`Revision::absent`].
    /// - `revisions_tell_every_change`: the revision changes after a commit, a put of writes that changed something, a
    ///   rewrite that removes or puts something (also just what is there), or a deletion followed by a creation; it
    ///   does not change after a read, a refused write, or a rewrite that removes and puts nothing.
    /// - `revisions_never_repeat`: a revision is never given twice to different contents of a thread, also if it was
    ///   changed back, or deleted and created again in between.
    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage>;

    /// The revision of a thread, which is that of [`Self::read_thread`]. The default reads the thread.
    ///
    /// - `the_revision_is_that_of_the_thread`: after each change and for each handle; [`Revision::absent`] of an unknown one.
    async fn revision(&self, thread: &ThreadId) -> Result<Revision> {
        Ok(self.read_thread(thread).await?.revision)
    }

    /// Deletes everything of a thread, as [`Self::delete_thread`] does, unless it has changed since somebody looked at it. A
    /// repeat is [`Error::Stale`]. The default reads the thread and rewrites it to nothing.
    ///
    /// - `a_deletion_of_a_changed_thread_is_stale`: if the revision is not `expected`, [`Error::Stale`], nothing changes.
    /// - `a_deletion_of_what_was_seen_removes_everything`: as `delete_thread_removes_everything_of_it`; of nothing that was
    ///   seen and is there, it is fine.
    async fn delete_seen(&self, thread: &ThreadId, expected: &Revision) -> Result<()> {
        let image = self.read_thread(thread).await?;
        if image.revision != *expected {
            return Err(Error::Stale { thread: thread.clone() });
        }
        let remove = image.checkpoints.into_keys().collect();
        self.rewrite_thread(thread, expected, Rewrite { remove, ..Rewrite::default() }).await
    }

    /// What a thread holds, counted at one moment. The default lists the whole thread without its values; a saver that can
    /// read less than its metadata and its rows does so.
    ///
    /// - `summary_counts_everything`: in every namespace, forks, pending rows and duration notes too; of an unknown thread
    ///   nothing.
    async fn summary(&self, thread: &ThreadId) -> Result<Summary> {
        let all = ListQuery { namespace: None, load: Load::None, ..ListQuery::new(thread) };
        summary::of(thread, &self.list(&all).await?)
    }

    /// Removes and puts checkpoints of one thread in one atomic change. Every deletion except [`Self::delete_thread`],
    /// every copy, conversion and import uses it; the engine decides which checkpoints may be removed.
    ///
    /// - `rewrite_removes_and_puts`: afterwards the thread consists of what was not removed, unchanged, and of what was
    ///   put. A channel of a remaining checkpoint reads as before, even if the checkpoint that its value came from was
    ///   removed.
    /// - `rewrite_of_a_changed_thread_is_stale`: if the revision is not `expected`, [`Error::Stale`], nothing changes.
    /// - `rewrite_that_breaks_a_lineage_is_refused`: [`Rewrite::check`] decides; nothing changes.
    /// - `rewrite_makes_a_thread`: with [`Revision::absent`] it may put a whole thread, under new and under used ids.
    /// - `rewrite_may_leave_nothing`: a thread without checkpoints no longer exists.
    /// - `a_commit_after_a_rewrite_goes_on`: the head is the greatest remaining id; what the next commit holds, applies
    ///   and shares is correct.
    ///
    /// - `freed_space_is_free`: the space of values and elements that only removed checkpoints used is free again.
    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()>;

    /// Writes a thread that does not exist, whose checkpoints come a few at a time: what [`Self::rewrite_thread`] with
    /// [`Revision::absent`] would do with all of them at once. The default does just that, and holds the whole thread. A saver
    /// that can write a part so that no reader finds it yet holds only what just came; it calls [`check_next`] for each
    /// checkpoint, and may [begin again](Coming::rewind).
    ///
    /// - `a_thread_is_written_as_it_comes`: afterwards it has every checkpoint as it came, and can be continued.
    /// - `a_thread_that_comes_is_seen_as_a_whole`: no reader finds anything of it before the last checkpoint came.
    /// - `a_thread_that_stops_coming_is_not_there`: an error of `coming` is returned, and nothing is stored; nor is it if the
    ///   future is dropped.
    /// - `a_thread_that_comes_is_not_held`: of what came before the last parts, nothing; only of savers that say so.
    /// - `a_thread_that_comes_is_checked`: one that breaks a lineage, or whose order is wrong, is refused, and nothing is stored.
    /// - `one_of_two_threads_that_come_is_written`: where there is a thread of that id by the end, [`Error::Stale`], and that one
    ///   is unchanged.
    async fn create_thread(&self, thread: &ThreadId, coming: &mut dyn Coming) -> Result<()> {
        let put = collected(thread, coming).await?;
        self.rewrite_thread(thread, &Revision::absent(), Rewrite { put, ..Rewrite::default() }).await
    }

    /// Copies a thread, in every namespace and as it is at one moment, to a thread that does not exist. Returns the number
    /// of checkpoints; none if there is no thread `from`, and then nothing is written. The default reads the thread and writes
    /// it again. A saver that can copy rows as they are stored need not decode them: damage that it does not meet is in the
    /// copy too, and a read of the copy fails as one of the source does.
    ///
    /// - `a_copy_is_the_whole_thread`: every checkpoint with its id, values, metadata and rows; the copy can be continued.
    /// - `a_copy_is_independent`: what is done to one of the two afterwards, the other does not see.
    /// - `a_copy_replaces_no_thread`: where there is a thread `to`, [`Error::Stale`] of that, and it is unchanged; also if it is
    ///   `from` itself.
    /// - `a_copy_is_of_one_moment`: beside commits, rows, rewrites and deletions of `from`.
    /// - `one_of_two_copies_is_made`: of two that are made at once under one id.
    async fn copy_thread(&self, from: &ThreadId, to: &ThreadId) -> Result<usize> {
        let source = self.read_thread(from).await?;
        let mut put: Vec<_> = source.checkpoints.into_values().collect();
        for tuple in &mut put {
            tuple.thread = to.clone();
        }
        let count = put.len();
        if count > 0 {
            let rewrite = Rewrite { put, ..Rewrite::default() };
            self.rewrite_thread(to, &Revision::absent(), rewrite).await?;
        }
        Ok(count)
    }

    /// What this saver offers.
    fn capabilities(&self) -> Capabilities;
}

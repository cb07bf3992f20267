//! Simple versions of the harder saver methods, for a saver without a faster one.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::{ChannelHistory, DeltaHistory, HistoryStep, ListQuery, Saver, Seed, StepCommit, ThreadImage};
use crate::checkpoint::{ChannelEntry, CheckpointKey, CheckpointTuple, Stored, TaskWrites};
use crate::error::{Error, Result};
use crate::id::{ChannelName, CheckpointId, TaskId};

/// [`Saver::list`], computed from all checkpoints of the query's thread.
pub fn list(
    checkpoints: impl IntoIterator<Item = CheckpointTuple>,
    query: &ListQuery,
) -> Vec<CheckpointTuple> {
    let wanted = |tuple: &CheckpointTuple| {
        query.namespace.as_ref().is_none_or(|only| *only == tuple.namespace)
            && query.before.is_none_or(|before| tuple.checkpoint.id < before)
            && tuple.metadata.matches(&query.filter)
    };
    let mut found: Vec<_> = checkpoints.into_iter().filter(wanted).collect();
    found.sort_by_key(|tuple| Reverse(tuple.checkpoint.id));
    found.truncate(query.limit.unwrap_or(usize::MAX));
    found.into_iter().map(|tuple| query.load.of(tuple)).collect()
}

/// [`Saver::commit`] on whole checkpoints: with the head of the namespace, with the parent if it exists, and with whether
/// a child of the parent has already applied a task. Returns the new checkpoint with its pending rows, and the parent
/// with the rows of the step under it; store both in one change. The caller must check that the new checkpoint does not
/// exist yet.
///
/// # Errors
/// As the method.
pub fn commit(
    step: StepCommit,
    head: Option<CheckpointId>,
    mut parent: Option<CheckpointTuple>,
    applied: impl Fn(TaskId) -> bool,
) -> Result<(CheckpointTuple, Option<CheckpointTuple>)> {
    step.validate()?;
    if head != step.expected_head {
        let StepCommit { thread, namespace, expected_head: expected, .. } = step;
        return Err(Error::Conflict { thread, namespace, expected, found: head });
    }
    if let (Some(checkpoint), None) = (step.parent, &parent) {
        return Err(Error::NotFound { thread: step.thread, checkpoint });
    }
    let mut checkpoint = step.checkpoint.clone();
    if let Some(parent) = &parent {
        step.check_parent(|name| Ok(parent.counted(name)))?;
        for (name, entry) in &mut checkpoint.channels {
            if let (Stored::Held, Some(held)) = (&entry.stored, parent.checkpoint.channels.get(name)) {
                entry.stored = held.stored.clone();
            }
        }
    }
    for task in &step.writes {
        parent.as_mut().map(|parent| parent.put(task, || applied(task.task)));
    }
    let rows = parent.as_ref().map_or(&[][..], |parent| &parent.writes);
    if let Some(task) = checkpoint.applied.iter().find(|task| rows.iter().all(|row| row.task != **task)) {
        return Err(Error::InvalidInput(format!(
            "commit of checkpoint {} to thread {}: it applies task {task}, which has no writes under its parent",
            checkpoint.id, step.thread
        )));
    }
    let writes = TaskWrites::merged(&step.pending);
    let StepCommit { thread, namespace, parent: parent_id, metadata, .. } = step;
    let new = CheckpointTuple { thread, namespace, checkpoint, parent: parent_id, metadata, writes };
    Ok((new, parent))
}

/// [`Saver::delta_history`] from the whole thread. Not by a `get` for each ancestor: the thread may be pruned, converted
/// or deleted between two of those, and the path would mix two moments.
///
/// # Errors
/// As the method.
pub async fn delta_history(
    saver: &dyn Saver,
    at: &CheckpointKey,
    channels: &BTreeSet<ChannelName>,
    reach: Option<CheckpointId>,
) -> Result<DeltaHistory> {
    image_history(&saver.read_thread(&at.thread).await?, at, channels, reach)
}

/// [`Saver::delta_history`] at the moment of an image.
///
/// # Errors
/// As the method.
pub fn image_history(
    image: &ThreadImage,
    at: &CheckpointKey,
    channels: &BTreeSet<ChannelName>,
    reach: Option<CheckpointId>,
) -> Result<DeltaHistory> {
    let get = |id| image.checkpoints.get(&(at.namespace.clone(), id));
    let mut walk = HistoryWalk::new(at, channels, reach);
    let mut child =
        get(at.id).ok_or_else(|| Error::NotFound { thread: at.thread.clone(), checkpoint: at.id })?;
    loop {
        let id = child.checkpoint.id;
        let channels = &child.checkpoint.channels;
        if walk.visit(id, child.parent.is_none(), |channel, _| Ok(channels.get(channel).cloned()))? {
            return Ok(walk.finish());
        }
        let Some(parent_id) = child.parent else { return Err(walk.no_seed(id)) };
        let parent = get(parent_id).ok_or_else(|| walk.no_parent(id, parent_id))?;
        walk.apply(id, &child.checkpoint.applied, &parent.writes)?;
        child = parent;
    }
}

/// The bookkeeping of a walk from a checkpoint back to its seeds. The caller visits checkpoints from the target
/// backwards, and after each one passes the rows stored under its parent.
#[derive(Debug)]
pub struct HistoryWalk<'a> {
    at: &'a CheckpointKey,
    reach: CheckpointId,
    /// The checkpoint that was visited last.
    last: Option<CheckpointId>,
    open: BTreeSet<ChannelName>,
    done: DeltaHistory,
}

impl<'a> HistoryWalk<'a> {
    /// A walk from `at`.
    pub fn new(at: &'a CheckpointKey, channels: &BTreeSet<ChannelName>, reach: Option<CheckpointId>) -> Self {
        let empty = || ChannelHistory { seed: None, steps: Vec::new() };
        Self {
            at,
            reach: reach.unwrap_or(at.id),
            last: None,
            open: channels.clone(),
            done: channels.iter().map(|channel| (channel.clone(), empty())).collect(),
        }
    }

    /// Visits the next older checkpoint; returns whether the walk is complete. `root` says that it has no parent: the
    /// walk ends there, even if it should go further. `entry` returns what the checkpoint stores for a channel; its
    /// second argument says whether a complete value would be used, so that it need not be loaded otherwise.
    ///
    /// # Errors
    /// [`Error::BrokenLineage`] if it is not older than the one before it, which would be a cycle. Those of `entry`.
    pub fn visit(
        &mut self,
        id: CheckpointId,
        root: bool,
        mut entry: impl FnMut(&ChannelName, bool) -> Result<Option<ChannelEntry>>,
    ) -> Result<bool> {
        if let Some(child) = self.last.replace(id).filter(|child| id >= *child) {
            return Err(Error::broken(&self.at.thread, child, format!("its parent {id} is not older")));
        }
        let far_enough = root || id <= self.reach;
        for channel in std::mem::take(&mut self.open) {
            let seed = match entry(&channel, far_enough)? {
                None => None,
                Some(ChannelEntry { version, stored: Stored::Value(value) | Stored::Snapshot(value) })
                    if far_enough =>
                {
                    Some(Seed { checkpoint: id, value, version })
                }
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

    /// The channels whose path is not complete yet.
    pub fn open(&self) -> impl Iterator<Item = &ChannelName> {
        self.open.iter()
    }

    /// Completes the path of a channel with a known one: `known` ends at the checkpoint that would be visited next.
    pub fn join(&mut self, channel: &ChannelName, known: ChannelHistory) {
        if self.open.remove(channel)
            && let Some(history) = self.done.get_mut(channel)
        {
            history.seed = known.seed;
            history.steps.extend(known.steps.into_iter().rev());
        }
    }

    /// Records the writes that `id` applied, from the rows under its parent.
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
                let writes = writes.cloned().collect();
                history.steps.push(HistoryStep { checkpoint: id, tasks: applied.len(), writes });
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

    /// The error for a missing parent.
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

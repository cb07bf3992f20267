//! Plain versions of the harder saver methods, for a saver that has no better one yet.

use std::collections::BTreeSet;

use super::{ChannelHistory, CheckpointSelector, DeltaHistory, HistoryStep, Load, Saver, Seed};
use crate::checkpoint::{ChannelEntry, CheckpointKey, Stored, TaskWrites};
use crate::error::{Error, Result};
use crate::id::{ChannelName, CheckpointId, TaskId};

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
        saver.get(&CheckpointSelector::at(&CheckpointKey { id, ..at.clone() }).loading(load.clone())).await
    };
    let mut walk = HistoryWalk::new(at, channels, reach);
    let mut child =
        get(at.id).await?.ok_or_else(|| Error::NotFound { thread: at.thread.clone(), checkpoint: at.id })?;
    loop {
        let id = child.checkpoint.id;
        let channels = &child.checkpoint.channels;
        if walk.visit(id, child.parent.is_none(), |channel, _| Ok(channels.get(channel).cloned()))? {
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
    pub fn new(at: &'a CheckpointKey, channels: &BTreeSet<ChannelName>, reach: Option<CheckpointId>) -> Self {
        let empty = || ChannelHistory { seed: None, steps: Vec::new() };
        Self {
            at,
            reach: reach.unwrap_or(at.id),
            open: channels.clone(),
            done: channels.iter().map(|channel| (channel.clone(), empty())).collect(),
        }
    }

    /// Looks at the next older checkpoint; returns whether the walk is complete. `root` says that it has no parent: the
    /// walk ends there, however far it was to go. `entry` tells what the checkpoint stores for a channel; its second
    /// argument says whether a complete value would be taken, so that it need not be loaded otherwise.
    ///
    /// # Errors
    /// Those of `entry`.
    pub fn visit(
        &mut self,
        id: CheckpointId,
        root: bool,
        mut entry: impl FnMut(&ChannelName, bool) -> Result<Option<ChannelEntry>>,
    ) -> Result<bool> {
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

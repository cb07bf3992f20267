//! Checkpoints as stored by savers, and the task writes that create them.

use std::collections::BTreeMap;

use crate::id::{ChannelName, CheckpointId, Namespace, NodeName, TaskId, ThreadId, Version};
use crate::metadata::{Counters, Metadata};
use crate::value::ChannelValue;

/// Names one checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CheckpointKey {
    /// The thread.
    pub thread: ThreadId,
    /// The namespace in it.
    pub namespace: Namespace,
    /// The checkpoint in that.
    pub id: CheckpointId,
}

/// What a checkpoint stores for a channel. A channel that was never written has no entry at all.
#[derive(Debug, Clone, PartialEq)]
pub enum Stored {
    /// The complete value (`full` mode, and every channel that is not a delta channel).
    Value(ChannelValue),
    /// The complete value of a delta channel, written because its cadence was due.
    Snapshot(ChannelValue),
    /// A delta channel between snapshots: the value is the nearest older value or snapshot plus the writes since.
    Sentinel,
    /// In a commit: the value that the parent stores under the same version. From a read: stored, but not requested.
    Held,
}

impl Stored {
    /// The complete value, if it is stored and loaded.
    pub fn value(&self) -> Option<&ChannelValue> {
        match self {
            Self::Value(value) | Self::Snapshot(value) => Some(value),
            Self::Sentinel | Self::Held => None,
        }
    }
}

/// A channel in a checkpoint: the version of its last write, and what is stored.
#[derive(Debug, Clone, PartialEq)]
pub struct ChannelEntry {
    /// The version of the last write to the channel.
    pub version: Version,
    /// What is stored.
    pub stored: Stored,
}

/// A checkpoint: the state of a namespace of a thread after a superstep.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    /// Its id.
    pub id: CheckpointId,
    /// Every channel that was ever written.
    pub channels: BTreeMap<ChannelName, ChannelEntry>,
    /// The nodes to run next; empty when the graph has finished.
    pub next: Vec<NodeName>,
    /// The tasks whose writes, stored under the parent, created this checkpoint, in the order in which they were
    /// applied.
    pub applied: Vec<TaskId>,
}

/// One write of a task to a channel.
#[derive(Debug, Clone, PartialEq)]
pub struct Write {
    /// The channel.
    pub channel: ChannelName,
    /// What is written.
    pub value: ChannelValue,
    /// Whether it replaces the channel's value instead of going through the reducer (`Overwrite`).
    pub overwrite: bool,
}

/// The channel that holds the error text of a failed task.
pub const ERROR_CHANNEL: &str = "__error__";
/// The channel that holds the question of an interrupted task.
pub const INTERRUPT_CHANNEL: &str = "__interrupt__";
/// The channel that holds the answers for an interrupted task.
pub const RESUME_CHANNEL: &str = "__resume__";
/// The channel that holds what a task scheduled.
pub const SCHEDULED_CHANNEL: &str = "__scheduled__";

impl Write {
    /// Whether the write is about the task rather than the state: such rows never replay and may be overwritten.
    pub fn is_special(&self) -> bool {
        matches!(
            self.channel.as_str(),
            ERROR_CHANNEL | INTERRUPT_CHANNEL | RESUME_CHANNEL | SCHEDULED_CHANNEL
        )
    }
}

/// The writes of one task attempt. They are stored under the checkpoint that the task ran from.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskWrites {
    /// The attempt.
    pub task: TaskId,
    /// The node it ran.
    pub node: NodeName,
    /// The task's index in its superstep; determines the order of application.
    pub index: u32,
    /// What it wrote, in order. Empty for a task that finished without a write.
    pub writes: Vec<Write>,
}

impl TaskWrites {
    /// The rows under a new checkpoint to which these are put, one after the other: see [`Self::merge`].
    pub fn merged(puts: &[Self]) -> Vec<Self> {
        let mut rows: Vec<Self> = Vec::with_capacity(puts.len());
        for put in puts {
            match rows.iter_mut().find(|row| row.task == put.task) {
                Some(row) => row.merge(put),
                None => rows.push(put.clone()),
            }
        }
        rows
    }

    /// Merges `more`, put for the same task. Ordinary writes are merged by their position: the task's second put may be
    /// longer than its first, and what it adds is appended; a stored write never changes. A task that finished without a
    /// write stays empty. A special write is replaced. This is for rows that no child has applied: an applied row is
    /// final, see [`CheckpointTuple::put`].
    pub fn merge(&mut self, more: &Self) {
        let stored = self.writes.iter().filter(|w| !w.is_special()).count();
        if !self.writes.is_empty() {
            self.writes.extend(more.writes.iter().filter(|w| !w.is_special()).skip(stored).cloned());
        }
        for special in more.writes.iter().filter(|w| w.is_special()) {
            match self.writes.iter_mut().find(|w| w.channel == special.channel) {
                Some(old) => old.value = special.value.clone(),
                None => self.writes.push(special.clone()),
            }
        }
    }
}

/// A checkpoint with everything a saver stores about it.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointTuple {
    /// The thread.
    pub thread: ThreadId,
    /// The namespace in it.
    pub namespace: Namespace,
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// The checkpoint's parent.
    pub parent: Option<CheckpointId>,
    /// Its metadata.
    pub metadata: Metadata,
    /// The writes of the tasks that ran from it, in stored order, including those that a child has already committed
    /// (the child's `applied` names them).
    pub writes: Vec<TaskWrites>,
}

impl CheckpointTuple {
    /// The key of this checkpoint.
    pub fn key(&self) -> CheckpointKey {
        CheckpointKey {
            thread: self.thread.clone(),
            namespace: self.namespace.clone(),
            id: self.checkpoint.id,
        }
    }

    /// Stores the writes of a task under it: see [`TaskWrites::merge`]. A row that a child has applied stays as it is;
    /// `applied` is asked for that, and only if the row would change. Returns whether anything changed.
    pub fn put(&mut self, task: &TaskWrites, applied: impl FnOnce() -> bool) -> bool {
        let Some(row) = self.writes.iter_mut().find(|row| row.task == task.task) else {
            self.writes.push(task.clone());
            return true;
        };
        let mut merged = row.clone();
        merged.merge(task);
        if merged == *row || applied() {
            return false;
        }
        *row = merged;
        true
    }

    /// The version of a channel, and its counters: what a child is checked against, see
    /// [`crate::saver::StepCommit::check_parent`].
    pub fn counted(&self, channel: &ChannelName) -> Option<(Version, Option<Counters>)> {
        let entry = self.checkpoint.channels.get(channel)?;
        Some((entry.version, self.metadata.counters.get(channel).copied()))
    }

    /// Whether it is a child of `parent`, a checkpoint of the same thread, and applied the writes of `task`.
    pub fn has_applied(&self, parent: &CheckpointKey, task: TaskId) -> bool {
        self.parent == Some(parent.id)
            && self.namespace == parent.namespace
            && self.checkpoint.applied.contains(&task)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row(channels: &[(&str, i32)]) -> TaskWrites {
        let write = |(channel, value): &(&str, i32)| Write {
            channel: (*channel).into(),
            value: ChannelValue::from_json(&json!(value)).unwrap(),
            overwrite: false,
        };
        TaskWrites {
            task: TaskId::from_bytes([1; 16]),
            node: "n".into(),
            index: 0,
            writes: channels.iter().map(write).collect(),
        }
    }

    #[test]
    fn ordinary_writes_are_merged_by_their_position() {
        for (have, more, merged) in [
            (row(&[("a", 1)]), row(&[("a", 2), ("b", 3)]), row(&[("a", 1), ("b", 3)])),
            (row(&[("a", 1), ("b", 3)]), row(&[("a", 2)]), row(&[("a", 1), ("b", 3)])),
            (row(&[]), row(&[("a", 1)]), row(&[])),
            (row(&[(ERROR_CHANNEL, 1)]), row(&[("a", 2)]), row(&[(ERROR_CHANNEL, 1), ("a", 2)])),
            (
                row(&[("a", 1), (RESUME_CHANNEL, 1)]),
                row(&[(RESUME_CHANNEL, 2)]),
                row(&[("a", 1), (RESUME_CHANNEL, 2)]),
            ),
            (row(&[("a", 1)]), row(&[(INTERRUPT_CHANNEL, 5)]), row(&[("a", 1), (INTERRUPT_CHANNEL, 5)])),
        ] {
            let mut row = have;
            row.merge(&more);
            assert_eq!(row, merged);
            let again = row.clone();
            row.merge(&more);
            assert_eq!(row, again, "merging the same again changes nothing");
        }
    }
}

//! Checkpoints as savers keep them, and the task writes that make them.

use std::collections::BTreeMap;

use crate::id::{ChannelName, CheckpointId, Namespace, NodeName, TaskId, ThreadId, Version};
use crate::metadata::Metadata;
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
    /// In a commit: as the parent stores it under the same version. From a read: stored, but not asked for.
    Held,
}

impl Stored {
    /// The complete value, if it is stored and was loaded.
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
    /// The nodes that are to run next; empty when the graph has finished.
    pub next: Vec<NodeName>,
    /// The tasks whose writes, stored under the parent, made this checkpoint, in the order in which they were applied.
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
/// The channel that holds what an interrupted task asks.
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
    /// The task's place among the tasks of its superstep; the live order of application.
    pub index: u32,
    /// What it wrote, in order. Empty for a task that finished without a write.
    pub writes: Vec<Write>,
}

impl TaskWrites {
    /// What the rows of this task become when `more` is put for the same task: an ordinary write that is already
    /// there stays as it is (told by its position among the ordinary ones), a special one is replaced.
    pub fn merge(&mut self, more: &Self) {
        let have = self.writes.iter().filter(|w| !w.is_special()).count();
        self.writes.extend(more.writes.iter().filter(|w| !w.is_special()).skip(have).cloned());
        for special in more.writes.iter().filter(|w| w.is_special()) {
            match self.writes.iter_mut().find(|w| w.channel == special.channel) {
                Some(old) => old.value = special.value.clone(),
                None => self.writes.push(special.clone()),
            }
        }
    }
}

/// A checkpoint with everything that a saver knows of it.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointTuple {
    /// The thread.
    pub thread: ThreadId,
    /// The namespace in it.
    pub namespace: Namespace,
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// The checkpoint it was made from.
    pub parent: Option<CheckpointId>,
    /// Its metadata.
    pub metadata: Metadata,
    /// The writes of the tasks that ran from it, in the order in which they were stored: also those that a child has
    /// already committed (the child's `applied` tells which).
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
}

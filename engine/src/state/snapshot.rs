//! A checkpoint's state, materialized.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value as Json};

use crate::checkpoint::{CheckpointKey, ERROR_CHANNEL, INTERRUPT_CHANNEL, TaskWrites};
use crate::error::{Error, Result};
use crate::id::{ChannelName, CheckpointId, NodeName, TaskId, Version};
use crate::metadata::Metadata;
use crate::value::ChannelValue;

/// The state of a thread at a checkpoint. Cloning shares the values.
#[derive(Debug, Clone, PartialEq)]
pub struct StateSnapshot {
    /// The checkpoint.
    pub key: CheckpointKey,
    /// The checkpoint's parent.
    pub parent: Option<CheckpointId>,
    /// Its metadata.
    pub metadata: Metadata,
    /// The nodes to run next; empty when the graph has finished.
    pub next: Vec<NodeName>,
    /// The tasks whose writes created it, in the order in which they were applied.
    pub applied: Vec<TaskId>,
    /// The writes of tasks that ran from it, in stored order.
    pub writes: Vec<TaskWrites>,
    /// Shared with the cached head, and with every copy.
    pub(crate) channels: Arc<BTreeMap<ChannelName, Channel>>,
}

/// A channel that was ever written.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Channel {
    pub(crate) version: Version,
    /// `None` if it was not requested, or if the schema does not have the channel.
    pub(crate) value: Option<ChannelValue>,
    /// Whether the checkpoint stores the complete value, not a sentinel.
    pub(crate) complete: bool,
}

impl Channel {
    fn shown(&self) -> Option<&ChannelValue> {
        self.value.as_ref().filter(|value| !value.is_absent())
    }
}

/// A task to run from a checkpoint, as shown to readers of the state.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskView {
    /// The id of its last attempt, or an id derived from the checkpoint if there was none.
    pub id: TaskId,
    /// The node it runs.
    pub name: NodeName,
    /// The error text of the last attempt, if that failed.
    pub error: Option<String>,
    /// The questions of an interrupted task.
    pub interrupts: Vec<Json>,
}

impl StateSnapshot {
    /// Whether it only repeats its parent's state: it is duration-only, and has a parent. A note whose parent was
    /// pruned has the state itself.
    pub fn repeats_its_parent(&self) -> bool {
        self.parent.is_some() && self.metadata.is_duration_only()
    }

    /// The value of a channel; `None` if the channel was never written or not loaded, or has no value
    /// ([`ChannelValue::absent`]).
    pub fn value(&self, channel: &str) -> Option<&ChannelValue> {
        self.channels.get(channel).and_then(Channel::shown)
    }

    /// Every loaded channel, in the order of the names.
    pub fn loaded(&self) -> impl Iterator<Item = (&ChannelName, &ChannelValue)> {
        self.channels.iter().filter_map(|(name, channel)| Some((name, channel.shown()?)))
    }

    /// The value of a channel, decoded. See [`Self::value`].
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the stored bytes do not decode.
    pub fn json(&self, channel: &str) -> Result<Option<Json>> {
        self.value(channel).map(ChannelValue::to_json).transpose()
    }

    /// Every loaded channel, decoded.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if stored bytes do not decode.
    pub fn values(&self) -> Result<Map<String, Json>> {
        self.loaded().map(|(name, value)| Ok((name.to_string(), value.to_json()?))).collect()
    }

    /// The version of a channel; `None` if it was never written.
    pub fn version(&self, channel: &str) -> Option<Version> {
        self.channels.get(channel).map(|c| c.version)
    }

    /// When the checkpoint was created, ISO-8601 in UTC.
    pub fn created_at(&self) -> String {
        self.key.id.created_at()
    }

    /// The tasks to run next, with what is known of earlier attempts.
    pub fn tasks(&self) -> Vec<TaskView> {
        let indexed = self.next.iter().zip(0_u32..);
        indexed
            .map(|(node, index)| {
                let last = self.writes.iter().rfind(|row| row.node == *node && row.index == index);
                let special = |channel: &str| {
                    let write =
                        last.and_then(|row| row.writes.iter().find(|w| w.channel.as_str() == channel));
                    write.and_then(|w| w.value.to_json().ok())
                };
                TaskView {
                    id: last.map_or_else(|| self.planned_task(index), |row| row.task),
                    name: node.clone(),
                    error: special(ERROR_CHANNEL).map(|v| v.as_str().map_or(v.to_string(), str::to_owned)),
                    interrupts: match special(INTERRUPT_CHANNEL) {
                        Some(Json::Array(list)) => list,
                        Some(other) => vec![other],
                        None => Vec::new(),
                    },
                }
            })
            .collect()
    }

    fn planned_task(&self, index: u32) -> TaskId {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.key.id.as_bytes()).update(&index.to_le_bytes());
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        TaskId::from_bytes(*uuid::Builder::from_random_bytes(bytes).as_uuid().as_bytes())
    }

    pub(crate) fn last_version(&self) -> Option<Version> {
        self.channels.values().map(|c| c.version).max()
    }

    pub(crate) fn not_loaded(&self, channel: &ChannelName) -> Error {
        Error::InvalidInput(format!(
            "channel {channel} of thread {}, checkpoint {} was not loaded and cannot be written to",
            self.key.thread, self.key.id
        ))
    }
}

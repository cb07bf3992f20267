//! Plans a superstep: from a state and the writes of tasks to the commit that creates the next state. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::snapshot::{Channel, StateSnapshot};
use super::{StateAccessor, unknown_channel};
use crate::cadence::{Due, advance};
use crate::checkpoint::{ChannelEntry, Checkpoint, CheckpointKey, Stored, TaskWrites, Write};
use crate::error::Result;
use crate::id::{ChannelName, CheckpointId, NodeName, ThreadId};
use crate::metadata::{Counters, Extra, Metadata, Source};
use crate::mode::{ChannelMode, gate};
use crate::saver::{Flush, StepCommit};
use crate::value::ChannelValue;

/// The parts of a superstep besides its writes.
pub(crate) struct Step {
    pub(crate) source: Source,
    pub(crate) next: Vec<NodeName>,
    pub(crate) extra: Extra,
}

/// A commit, and the state once it is stored.
pub(crate) struct Plan {
    pub(crate) commit: StepCommit,
    pub(crate) state: StateSnapshot,
}

impl Plan {
    /// The same, with these rows under the new checkpoint from the beginning: see [`StepCommit::pending`].
    pub(crate) fn with_pending(mut self, rows: Vec<TaskWrites>) -> Self {
        self.state.writes = TaskWrites::merged(&rows);
        self.commit.pending = rows;
        self
    }
}

/// Plans the step in which `tasks`, in live order, ran from `base`; each task comes with whether its row is already
/// stored. The cost depends on the number of channels and writes, not on the size of their values.
pub(crate) fn plan(
    accessor: &StateAccessor,
    thread: &ThreadId,
    base: Option<&StateSnapshot>,
    head: Option<CheckpointId>,
    tasks: &[(TaskWrites, bool)],
    step: Step,
) -> Result<Plan> {
    let (table, ids) = (&*accessor.table, &*accessor.ids);
    if let Some(base) = base {
        gate(table.mode(), &base.metadata)?;
    }
    let parent = base.map(|base| base.key.id);
    let id = ids.checkpoint_after(parent.max(head));
    let last_version = base.and_then(StateSnapshot::last_version);
    let mut metadata = Metadata {
        source: step.source,
        step: base.map_or(-1, |base| base.metadata.step.saturating_add(1)),
        parents: base.map(|base| base.metadata.parents.clone()).unwrap_or_default(),
        delta_marker: table.mode() == ChannelMode::Delta,
        counters: BTreeMap::new(),
        extra: step.extra,
    };

    let mut written: BTreeMap<&ChannelName, Vec<&Write>> = BTreeMap::new();
    for write in tasks.iter().flat_map(|(row, _)| &row.writes).filter(|w| !w.is_special()) {
        written.entry(&write.channel).or_default().push(write);
    }
    let mut channels = base.map(|base| BTreeMap::clone(&base.channels)).unwrap_or_default();
    for (name, writes) in &written {
        let behaviour = table.behaviour(name).ok_or_else(|| unknown_channel(name))?;
        let current = match (channels.get(*name), base) {
            (Some(Channel { value: None, .. }), Some(base)) => return Err(base.not_loaded(name)),
            (channel, _) => channel.and_then(|c| c.value.clone()),
        };
        let value = behaviour.apply(name, current, writes)?;
        // Each channel gets its own version, which also names the value that a list was made from, wherever that list
        // is written.
        let version = ids.version_after(last_version);
        channels.insert((*name).clone(), Channel { version, value, complete: false });
    }

    let mut entries = BTreeMap::new();
    for (name, channel) in &mut channels {
        let is_written = written.contains_key(name);
        let delta = table.delta_channels().contains(name) && base.is_some();
        let mut stored = None;
        if delta {
            let counted = base.and_then(|base| base.metadata.counters.get(name)).copied();
            // Counters of a checkpoint that stores the value itself would refer to an older snapshot.
            let holds_value = base.and_then(|b| b.channels.get(name)).is_some_and(|c| c.complete);
            let since = if holds_value { Counters::default() } else { counted.unwrap_or_default() };
            if let Due::Counters(counters) = advance(since, is_written, table.frequency()) {
                metadata.counters.insert(name.clone(), counters);
                stored = Some(Stored::Sentinel);
            }
        }
        let stored = match stored {
            Some(sentinel) => {
                channel.complete = false;
                sentinel
            }
            None if channel.complete && !is_written && !delta => Stored::Held,
            // Keep a channel that is no longer in the schema unchanged.
            None if channel.value.is_none() => Stored::Held,
            None => complete(channel, table.delta_channels().contains(name)),
        };
        if let (Stored::Held, Some(counted)) = (&stored, base.and_then(|b| b.metadata.counters.get(name))) {
            let supersteps = counted.supersteps.saturating_add(1);
            metadata.counters.insert(name.clone(), Counters { supersteps, ..*counted });
        }
        entries.insert(name.clone(), ChannelEntry { version: channel.version, stored });
    }

    let key = CheckpointKey { thread: thread.clone(), namespace: accessor.namespace.clone(), id };
    // Without a parent there is no place for writes, so the values are stored completely.
    let (applied, writes) = match parent {
        Some(_) => (
            tasks.iter().map(|(row, _)| row.task).collect(),
            tasks.iter().filter(|(_, durable)| !durable).map(|(row, _)| row.clone()).collect(),
        ),
        None => (Vec::new(), Vec::new()),
    };
    let state = StateSnapshot {
        key: key.clone(),
        parent,
        metadata: metadata.clone(),
        next: step.next.clone(),
        applied: Vec::clone(&applied),
        writes: Vec::new(),
        channels: Arc::new(channels),
    };
    let checkpoint = Checkpoint { id, channels: entries, next: step.next, applied };
    let commit = StepCommit {
        thread: key.thread,
        namespace: key.namespace,
        parent,
        expected_head: head,
        checkpoint,
        metadata,
        writes,
        pending: Vec::new(),
        flush: Flush::Now,
    };
    Ok(Plan { commit, state })
}

/// The entry that stores the complete value; from then on, changes of the live value are relative to it.
fn complete(channel: &mut Channel, delta: bool) -> Stored {
    channel.complete = true;
    let Some(value) = &mut channel.value else { return Stored::Held };
    let stored = value.clone();
    if let ChannelValue::List(list) = value {
        list.rebase(channel.version);
    }
    if delta { Stored::Snapshot(stored) } else { Stored::Value(stored) }
}

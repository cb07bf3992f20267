//! Checkpoints with messages of the gateway: those that it wrote, and those of graphs that only carry them on.
//!
//! In delta mode it stores the changes of `messages`. A graph whose channel of messages is a plain one does not ask for a
//! replay and would find none at all, so the value is computed here, with the gateway's reducer.

use std::collections::BTreeSet;
use std::sync::Arc;

use threadkeep::channel::{ChannelTable, Schema};
use threadkeep::checkpoint::{CheckpointTuple, Stored};
use threadkeep::foreign::wrote;
use threadkeep::id::{ChannelName, IdSource};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{Load, Saver};
use threadkeep::state::StateAccessor;
use threadkeep::{Error, Result};

use crate::frame::{self, FRAME};
use crate::known::CARRIED;

/// The cadence of a table that is only read with.
const ANY: u64 = 1;

/// Whether the messages of a checkpoint, which was read with its frame, are those of the gateway, in its form.
pub(crate) fn has_messages(tuple: &CheckpointTuple) -> bool {
    if !wrote(tuple) {
        return true;
    }
    let frame = tuple.checkpoint.channels.get(FRAME).and_then(|entry| entry.stored.value());
    let notes = frame.and_then(|frame| frame::notes(tuple.checkpoint.id, frame).ok());
    notes.is_some_and(|notes| notes.contains_key(CARRIED))
}

/// Computes the messages of the gateway that are stored as changes. Others stay as they are. `false` if the checkpoint
/// carries on changes of a graph, which has a delta channel and asks for the replay itself.
///
/// # Errors
/// [`Error::BrokenLineage`] if something that they are computed from is missing; the saver's.
pub(crate) async fn complete(saver: &Arc<dyn Saver>, tuple: &mut CheckpointTuple) -> Result<bool> {
    let is_sentinel = |channel: &ChannelName| {
        tuple.checkpoint.channels.get(channel).is_some_and(|entry| entry.stored == Stored::Sentinel)
    };
    if !tuple.metadata.delta_marker || !has_messages(tuple) {
        return Ok(true);
    }
    let table: ChannelTable = Schema::thread_state().compile(ChannelMode::Delta, ANY)?;
    let changes: BTreeSet<ChannelName> =
        table.delta_channels().iter().filter(|channel| is_sentinel(channel)).cloned().collect();
    if changes.is_empty() {
        return Ok(true);
    }
    let (thread, id) = (tuple.thread.clone(), tuple.checkpoint.id);
    let accessor = StateAccessor::new(saver.clone(), Arc::new(table), Arc::new(IdSource::default()));
    let accessor = accessor.remembering(|| 0).in_namespace(tuple.namespace.clone());
    let state = match accessor.get_loading(&thread, Some(id), Load::Only(changes.clone())).await {
        Err(Error::ForeignChanges { .. }) => return Ok(false),
        read => read?,
    };
    // It may have been deleted since it was read.
    let state = state.ok_or_else(|| Error::NotFound { thread: thread.clone(), checkpoint: id })?;
    for channel in changes {
        let value = state.value(channel.as_str()).cloned();
        let value =
            value.ok_or_else(|| Error::broken(&thread, id, format!("channel {channel} has no value")))?;
        if let Some(entry) = tuple.checkpoint.channels.get_mut(&channel) {
            entry.stored = Stored::Value(value);
        }
    }
    Ok(true)
}

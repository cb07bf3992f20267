//! What LangGraph wrote to a thread through the savers for it: its reducers are not known here.
//!
//! Those savers leave a frame in every checkpoint that they store. Other programs that continue the thread keep the frame
//! as they keep every channel, so the frame also says which checkpoint it belongs to.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value as Json, json};

use crate::checkpoint::CheckpointTuple;
use crate::deletion::{Lineage, sentinels};
use crate::error::Error;
use crate::id::{ChannelName, CheckpointId, Version};
use crate::saver::LocalKey;
use crate::value::ChannelValue;

/// The channel of the frame: a JSON object.
pub const FRAME: &str = "__threadkeep_frame__";
/// The key of a frame whose value is [`owner`] of its checkpoint.
pub const OWNER_KEY: &str = "i";

/// Names the checkpoint that a frame belongs to.
pub fn owner(id: CheckpointId) -> Json {
    let bytes = id.as_bytes();
    json!(u32::from_be_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]))
}

/// Whether LangGraph wrote a checkpoint, which was read with the value of [`FRAME`]. A frame that cannot be read counts as
/// LangGraph's.
pub fn wrote(tuple: &CheckpointTuple) -> bool {
    let frame = tuple.checkpoint.channels.get(FRAME).and_then(|entry| entry.stored.value());
    frame.is_some_and(|frame| belongs_to(frame, tuple.checkpoint.id))
}

fn belongs_to(frame: &ChannelValue, id: CheckpointId) -> bool {
    frame.to_json().map_or(true, |frame| frame.get(OWNER_KEY) == Some(&owner(id)))
}

/// Whether LangGraph changed a channel in a checkpoint, which was read with the value of [`FRAME`]. Without a parent
/// there is nothing that it could have left as it was.
pub fn changed(tuple: &CheckpointTuple, parent: Option<&CheckpointTuple>, channel: &ChannelName) -> bool {
    let rows = parent.into_iter().flat_map(|parent| &parent.writes);
    let is_written = rows
        .filter(|row| tuple.checkpoint.applied.contains(&row.task))
        .flat_map(|row| &row.writes)
        .any(|write| write.channel == *channel);
    let before = parent.and_then(|parent| version(parent, channel));
    changed_since(tuple, before, channel, is_written)
}

/// As [`changed`], with what it needs of the parent: the version of the channel there, and whether the checkpoint
/// applied a write to the channel.
///
/// A version names a value. What LangGraph leaves at the version that it found has the value that it had, whatever its
/// reducer does, if there is also nothing that a replay would apply.
pub(crate) fn changed_since(
    tuple: &CheckpointTuple,
    before: Option<Version>,
    channel: &ChannelName,
    is_written: bool,
) -> bool {
    (is_written || version(tuple, channel) != before) && wrote(tuple)
}

/// The version of a channel at a checkpoint, if it has the channel.
pub(crate) fn version(tuple: &CheckpointTuple, channel: &ChannelName) -> Option<Version> {
    tuple.checkpoint.channels.get(channel).map(|entry| entry.version)
}

/// Whether LangGraph wrote a checkpoint or one of its ancestors, as far as its own channels show: they all keep a frame.
pub(crate) fn may_follow(tuple: &CheckpointTuple) -> bool {
    tuple.checkpoint.channels.contains_key(FRAME)
}

/// The error of a value that only LangGraph can replay.
pub(crate) fn not_replayed(tuple: &CheckpointTuple, channel: &ChannelName) -> Error {
    Error::ForeignChanges {
        thread: tuple.thread.clone(),
        checkpoint: tuple.checkpoint.id,
        channel: channel.clone(),
    }
}

/// The channels of a checkpoint that are stored as changes which only LangGraph can replay. `above` holds those of its
/// parent.
pub(crate) fn theirs(
    tuple: &CheckpointTuple,
    parent: Option<&CheckpointTuple>,
    above: Option<&BTreeSet<ChannelName>>,
) -> BTreeSet<ChannelName> {
    if !may_follow(tuple) {
        return BTreeSet::new();
    }
    let is_theirs = |channel: &&ChannelName| {
        changed(tuple, parent, channel) || above.is_some_and(|channels| channels.contains(*channel))
    };
    sentinels(tuple).filter(is_theirs).cloned().collect()
}

/// The channels of a thread, by checkpoint, that are stored as changes which only LangGraph can replay: it changed the
/// channel in one of the checkpoints on the way back to the nearest value.
#[derive(Debug)]
pub(crate) struct ForeignChanges(BTreeMap<LocalKey, BTreeSet<ChannelName>>);

impl ForeignChanges {
    pub(crate) fn new(lineage: &Lineage<'_>) -> Self {
        let mut found: BTreeMap<LocalKey, BTreeSet<ChannelName>> = BTreeMap::new();
        // Parents come before their children.
        for (at, tuple) in &lineage.image().checkpoints {
            let parent = lineage.parent(tuple);
            let above = parent.and_then(|parent| found.get(&(at.0.clone(), parent.checkpoint.id)));
            let theirs = theirs(tuple, parent, above);
            if !theirs.is_empty() {
                found.insert(at.clone(), theirs);
            }
        }
        Self(found)
    }

    /// Whether a checkpoint has such a channel.
    pub(crate) fn are_at(&self, place: &LocalKey) -> bool {
        self.0.contains_key(place)
    }

    /// Whether this channel of a checkpoint is one.
    pub(crate) fn contains(&self, place: &LocalKey, channel: &ChannelName) -> bool {
        self.0.get(place).is_some_and(|channels| channels.contains(channel))
    }
}

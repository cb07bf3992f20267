//! A stored checkpoint as LangGraph has it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json};
use threadkeep::Result;
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::ChannelName;

use crate::frame::{self, FRAME, Frame, REST, SEEN};
use crate::known::{CARRIED, LABELS, is_snapshot, label};
use crate::types::{Place, Tuple};
use crate::{metadata, task};

/// The version of LangGraph's format that a checkpoint of another program is shown in.
const FORMAT: i64 = 4;

/// The tuple as LangGraph has it. Checkpoints that another program wrote have no frame, and get a plain one.
pub(crate) fn tuple(stored: &CheckpointTuple) -> Result<Tuple> {
    let channels = &stored.checkpoint.channels;
    let value_of = |name: &str| channels.get(name).and_then(|entry| entry.stored.value());
    let names: Vec<&str> =
        channels.keys().map(ChannelName::as_str).filter(|n| !frame::is_private(n)).collect();
    let framed = match value_of(FRAME) {
        Some(value) => frame::decode(stored.checkpoint.id, value, &names)?,
        None => None,
    };
    let has_no_frame = framed.is_none();
    let (mut frame, mut notes) = framed.unwrap_or_else(|| (plain_frame(stored), Map::new()));
    // Another program takes these over: a node that has seen a version still has.
    if let Some(seen) = value_of(SEEN).and_then(|seen| seen.as_list()) {
        frame.seen = frame::nodes(seen)?;
    }
    frame.rest = value_of(REST).filter(|_| !has_no_frame).cloned();
    let foreign = has_no_frame || notes.remove(CARRIED).is_some();
    let labels = notes.remove(LABELS).unwrap_or(Json::Null);
    let metadata = metadata::join(&stored.metadata, &mut notes);
    let mut versions = BTreeMap::new();
    let mut values = BTreeMap::new();
    let mut snapshots = BTreeSet::new();
    for (name, entry) in channels.iter().filter(|(name, _)| !frame::is_private(name.as_str())) {
        if let Some(label) = label(&labels, name.as_str(), entry.version) {
            versions.insert(name.to_string(), label);
        }
        if let Some(value) = entry.stored.value().filter(|value| !value.is_absent()) {
            values.insert(name.to_string(), value.clone());
            if is_snapshot(&entry.stored) {
                snapshots.insert(name.to_string());
            }
        }
    }
    Ok(Tuple {
        foreign,
        place: Place { thread: stored.thread.clone(), namespace: stored.namespace.clone() },
        id: stored.checkpoint.id,
        parent: stored.parent,
        frame,
        versions,
        values,
        snapshots,
        metadata,
        writes: task::pending(&stored.writes)?,
        head: None,
    })
}

/// The metadata as LangGraph has them. Of the values, only the frame's is needed.
pub(crate) fn metadata(stored: &CheckpointTuple) -> Result<Map<String, Json>> {
    let frame = stored.checkpoint.channels.get(FRAME).and_then(|entry| entry.stored.value());
    let mut notes = match frame {
        Some(frame) => frame::notes(stored.checkpoint.id, frame)?,
        None => Map::new(),
    };
    Ok(metadata::join(&stored.metadata, &mut notes))
}

fn plain_frame(stored: &CheckpointTuple) -> Frame {
    Frame {
        v: Some(FORMAT),
        ts: Some(stored.checkpoint.id.created_at()),
        updated: Some(None),
        ..Frame::default()
    }
}

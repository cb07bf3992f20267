//! Converts threads between the modes: what the mismatch error asks an operator to do ("materialize and convert its
//! checkpoints").
//!
//! A thread is converted in one atomic change; a pass over many threads can be interrupted and repeated, because a
//! converted thread has nothing left to change. Ids, versions, lineage, metadata and rows stay unchanged. Gateways may
//! run meanwhile: a run that continues in the old mode keeps writing in it, and a later pass converts what it wrote.

use std::collections::BTreeMap;

use crate::cadence::{Due, advance};
use crate::channel::ChannelTable;
use crate::checkpoint::{CheckpointTuple, Stored};
use crate::deletion::{Lineage, sentinels};
use crate::error::{Error, Result};
use crate::foreign;
use crate::id::{ChannelName, ThreadId};
use crate::metadata::Counters;
use crate::mode::ChannelMode;
use crate::replay::{Replay, Values};
use crate::saver::{LocalKey, Rewrite, Saver, ThreadImage, doubt_or};

/// What a conversion changed, or would change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Conversion {
    /// The checkpoints of the thread.
    pub checkpoints: usize,
    /// Those that are stored differently afterwards.
    pub changed: usize,
    /// Those that LangGraph wrote, which stay as they are, and those that carry on a channel that is stored as changes
    /// for it. In `full`, all that a process in that mode still refuses are among them.
    pub left: usize,
}

/// Plans the conversion of a thread to the mode of `table`, with its channels and cadence, and says what it would change.
///
/// - To `full`, every checkpoint refers to its complete values, and carries neither marker nor counters.
/// - To `delta`, checkpoints store snapshots as often as the cadence asks, and changes between them. A head, and the
///   parent of an existing delta checkpoint, keep their complete values, so that a writer that has read them can
///   continue safely.
///
/// What LangGraph wrote stays as it is, because LangGraph does not read another form, and its changes cannot be
/// replayed here. Where others continue such changes, they stay changes. Where LangGraph only carries on what can be
/// replayed here, as the messages of the gateway in a graph without messages, its checkpoint gets the complete value in
/// `full`: a graph reads that as well. A channel that `table` does not have is stored as before, also where it is only
/// carried on.
///
/// # Errors
/// [`Error::BrokenLineage`] if a value cannot be replayed.
pub fn plan_conversion(image: &ThreadImage, table: &ChannelTable) -> Result<(Rewrite, Conversion)> {
    let lineage = Lineage::new(image);
    let mut replay = Replay::new(&lineage, table);
    let mut left = 0;
    let mut converted: BTreeMap<LocalKey, CheckpointTuple> = BTreeMap::new();
    let heads = lineage.heads();
    let mut put = Vec::new();
    for (place, tuple) in &image.checkpoints {
        let values = replay.values(place, tuple)?;
        let is_theirs = foreign::wrote(tuple);
        let mut new = tuple.clone();
        match table.mode() {
            ChannelMode::Full => to_full(&mut new, is_theirs, &values, table),
            ChannelMode::Delta if is_theirs || tuple.metadata.is_delta() => {}
            ChannelMode::Delta => {
                let parent = tuple.parent.and_then(|id| converted.get(&(place.0.clone(), id)));
                let seen = heads.get(&place.0) == Some(&place.1)
                    || lineage.children(place).iter().any(|child| child.metadata.is_delta());
                to_delta(&mut new, parent, &values, &mut replay, table, seen)?;
            }
        }
        let is_changed = new != *tuple;
        let is_refused = table.mode() == ChannelMode::Full && new.metadata.is_delta();
        let is_left = is_refused || replay.foreign().are_at(place) || (is_theirs && !is_changed);
        left += usize::from(is_left);
        if is_changed {
            put.push(new.clone());
        }
        // The children of LangGraph's store complete values, no changes of its.
        if !is_theirs {
            converted.insert(place.clone(), new);
        }
    }
    let done = Conversion { checkpoints: image.checkpoints.len(), changed: put.len(), left };
    Ok((Rewrite { put, ..Rewrite::default() }, done))
}

fn to_full(tuple: &mut CheckpointTuple, is_theirs: bool, values: &Values, table: &ChannelTable) {
    for (name, entry) in &mut tuple.checkpoint.channels {
        // How another program's channel is stored is for that program.
        if table.behaviour(name).is_none() {
            continue;
        }
        match &entry.stored {
            Stored::Snapshot(value) if !is_theirs => entry.stored = Stored::Value(value.clone()),
            Stored::Sentinel => {
                if let Some(value) = values.get(name) {
                    entry.stored = Stored::Value(value.clone());
                }
            }
            Stored::Value(_) | Stored::Snapshot(_) | Stored::Held => {}
        }
    }
    let channels = &tuple.checkpoint.channels;
    let is_change =
        |name: &ChannelName| channels.get(name).is_some_and(|entry| entry.stored == Stored::Sentinel);
    tuple.metadata.counters.retain(|name, _| is_change(name));
    let is_delta = sentinels(tuple).next().is_some();
    tuple.metadata.delta_marker = is_delta;
}

fn to_delta(
    tuple: &mut CheckpointTuple,
    parent: Option<&CheckpointTuple>,
    values: &Values,
    replay: &mut Replay<'_>,
    table: &ChannelTable,
    complete: bool,
) -> Result<()> {
    tuple.metadata.delta_marker = true;
    let duration_only = tuple.metadata.is_duration_only();
    for name in table.delta_channels() {
        let Some(entry) = tuple.checkpoint.channels.get_mut(name) else { continue };
        let above = parent.and_then(|parent| Some((parent, parent.checkpoint.channels.get(name)?)));
        // Whether rows lead to the value: those of the parent, or none are needed.
        let given =
            parent.map_or(Ok(true), |parent| replay.gives(parent, &tuple.checkpoint.applied, name, values));
        let (stored, counters) = match above {
            // No counters to continue: there is no parent, or it does not have the channel.
            None => (None, None),
            Some((parent, held)) if duration_only && held.version == entry.version => {
                (Some(held.stored.clone()), parent.metadata.counters.get(name).copied())
            }
            Some((parent, held)) => {
                let counted = parent.metadata.counters.get(name).copied().unwrap_or_default();
                let since = if held.stored == Stored::Sentinel { counted } else { Counters::default() };
                let due = advance(since, held.version != entry.version, table.frequency());
                match due {
                    Due::Counters(counters) if given.clone()? => (Some(Stored::Sentinel), Some(counters)),
                    _ => (None, None),
                }
            }
        };
        let sentinel = stored == Some(Stored::Sentinel);
        entry.stored = match (stored, values.get(name)) {
            (Some(stored), _) if !(sentinel && complete) => stored,
            (_, Some(value)) if given == Ok(true) => Stored::Snapshot(value.clone()),
            // No history may be replayed across it, so it is no snapshot.
            (_, Some(value)) => Stored::Value(value.clone()),
            (stored, None) => stored.unwrap_or_else(|| entry.stored.clone()),
        };
        if let (Some(counters), Stored::Sentinel) = (counters, &entry.stored) {
            tuple.metadata.counters.insert(name.clone(), counters);
        }
    }
    Ok(())
}

/// How often a conversion is replanned because the thread changed.
const ATTEMPTS: usize = 8;

/// Converts a thread to the mode of `table` ([`plan_conversion`]), in one atomic change. Repeating it is safe: it
/// converts what is not converted yet.
///
/// # Errors
/// [`Error::Stale`] if other writers keep changing the thread; those of [`plan_conversion`] and of the saver.
pub async fn convert(saver: &dyn Saver, thread: &ThreadId, table: &ChannelTable) -> Result<Conversion> {
    let mut doubt = None;
    // What the attempt in doubt changed, if nothing is left to convert after it.
    let mut doubted = None;
    for _ in 0..ATTEMPTS {
        let image = saver.read_thread(thread).await.map_err(|error| doubt_or(doubt.clone(), error))?;
        let (rewrite, done) =
            plan_conversion(&image, table).map_err(|error| doubt_or(doubt.clone(), error))?;
        if rewrite.is_empty() {
            return Ok(doubted.unwrap_or(done));
        }
        match saver.rewrite_thread(thread, &image.revision, rewrite).await {
            Ok(()) => return Ok(done),
            Err(Error::Stale { .. }) => {}
            Err(error @ Error::InDoubt { .. }) => {
                doubt.get_or_insert(error.clone());
                doubted.get_or_insert(done);
                // As in a deletion: nothing of it was stored, so trying again would take as long and fail as well.
                let now = saver.read_thread(thread).await.map_err(|error| doubt_or(doubt.clone(), error))?;
                if now.revision == image.revision {
                    return Err(error);
                }
            }
            Err(error) => return Err(doubt_or(doubt, error)),
        }
    }
    Err(doubt_or(doubt, Error::Stale { thread: thread.clone() }))
}

//! Turns a set of checkpoints to remove into a change that leaves all others intact.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::lineage::{Lineage, place, sentinels};
use crate::channel::ChannelTable;
use crate::checkpoint::{CheckpointTuple, Stored};
use crate::error::{Error, Result};
use crate::saver::{LocalKey, Rewrite};

/// The change that removes `remove`. A checkpoint that loses its parent becomes a root, and its changes become
/// snapshots. Rows that only removed checkpoints applied are removed; pending ones stay.
///
/// # Errors
/// [`Error::BrokenLineage`] if a snapshot cannot be created.
pub(super) fn removal(
    lineage: &Lineage<'_>,
    remove: BTreeSet<LocalKey>,
    table: &ChannelTable,
) -> Result<Rewrite> {
    let mut changed: BTreeMap<LocalKey, CheckpointTuple> = BTreeMap::new();
    for (at, tuple) in &lineage.image().checkpoints {
        if remove.contains(at) {
            continue;
        }
        let lost_parent = tuple.parent.is_some_and(|id| remove.contains(&(at.0.clone(), id)));
        if lost_parent {
            root(lineage, tuple, table, &mut changed)?;
        }
        let lost: Vec<_> =
            lineage.children(at).iter().filter(|child| remove.contains(&place(child))).collect();
        if !lost.is_empty() {
            let stay = lineage.children(at).iter().filter(|child| !remove.contains(&place(child)));
            let needed: HashSet<_> = stay.flat_map(|child| &child.checkpoint.applied).collect();
            let unneeded: HashSet<_> = lost
                .iter()
                .flat_map(|child| &child.checkpoint.applied)
                .filter(|task| !needed.contains(task))
                .collect();
            if !unneeded.is_empty() {
                entry(&mut changed, tuple).writes.retain(|row| !unneeded.contains(&row.task));
            }
        }
    }
    Ok(Rewrite { remove, put: changed.into_values().collect() })
}

fn entry<'c>(
    changed: &'c mut BTreeMap<LocalKey, CheckpointTuple>,
    tuple: &CheckpointTuple,
) -> &'c mut CheckpointTuple {
    changed.entry(place(tuple)).or_insert_with(|| tuple.clone())
}

/// Turns a checkpoint into a root. Its descendants keep counting from the older snapshot: counters may claim more than
/// there is to replay, never less.
fn root(
    lineage: &Lineage<'_>,
    tuple: &CheckpointTuple,
    table: &ChannelTable,
    changed: &mut BTreeMap<LocalKey, CheckpointTuple>,
) -> Result<()> {
    for channel in sentinels(tuple) {
        let value = lineage.value(tuple, channel, table)?.ok_or_else(|| {
            let missing = format!("no write of channel {channel} was found");
            Error::broken(&tuple.thread, tuple.checkpoint.id, missing)
        })?;
        let root = entry(changed, tuple);
        if let Some(entry) = root.checkpoint.channels.get_mut(channel) {
            entry.stored = Stored::Snapshot(value);
        }
        root.metadata.counters.remove(channel);
    }
    let root = entry(changed, tuple);
    root.parent = None;
    root.checkpoint.applied.clear();
    Ok(())
}

//! Turns a set of checkpoints to remove into a change that leaves all others intact.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::lineage::{Lineage, place, sentinels};
use crate::channel::ChannelTable;
use crate::checkpoint::{CheckpointTuple, Stored};
use crate::error::{Error, Result};
use crate::metadata::RESTORED_KEY;
use crate::saver::{LocalKey, Rewrite};

/// The change that removes `remove`. A checkpoint that loses its parent becomes a root, and its changes become
/// snapshots. One that restores a removed checkpoint names the nearest that stays of those which that one continued; if
/// none does, the name says so. Rows that only removed checkpoints applied are removed; pending ones stay.
///
/// # Errors
/// [`Error::BrokenLineage`] if a snapshot cannot be created.
pub(super) fn removal(
    lineage: &Lineage<'_>,
    remove: BTreeSet<LocalKey>,
    table: &ChannelTable,
) -> Result<Rewrite> {
    let mut changed: BTreeMap<LocalKey, CheckpointTuple> = BTreeMap::new();
    let left = lineage.left_of(|at| remove.contains(at));
    for (at, tuple) in &lineage.image().checkpoints {
        if remove.contains(at) {
            continue;
        }
        let lost_parent = tuple.parent.is_some_and(|id| remove.contains(&(at.0.clone(), id)));
        if lost_parent {
            root(lineage, tuple, table, &mut changed)?;
        }
        let named = tuple.metadata.restored().and_then(|id| left.get(&(at.0.clone(), id)));
        if let Some(named) = named.filter(|_| lost_parent || lineage.is_whole(tuple)) {
            let extra = &mut entry(&mut changed, tuple).metadata.extra;
            extra.insert(RESTORED_KEY.to_owned(), named.to_string().into());
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

/// The checkpoints to keep because their damaged parent stays: the rows that they applied would go from under it, and
/// [a damaged one cannot be put again](Lineage::can_be_put). Nor may those rows stay without them: they would be pending.
pub(super) fn bound_to_damage(
    lineage: &Lineage<'_>,
    stays: impl Fn(&LocalKey) -> bool,
) -> BTreeSet<LocalKey> {
    let mut bound: BTreeSet<LocalKey> = BTreeSet::new();
    // A parent comes before its children.
    for (at, tuple) in &lineage.image().checkpoints {
        if !stays(at) && !bound.contains(at) {
            continue;
        }
        let appliers = lineage.children(at).iter().filter(|child| !child.checkpoint.applied.is_empty());
        let going: Vec<LocalKey> = appliers.map(|child| place(child)).filter(|child| !stays(child)).collect();
        // It is put as a root.
        let parent = tuple.parent.map(|id| (at.0.clone(), id)).filter(|up| lineage.get(up).is_some());
        let loses_parent = parent.is_some_and(|up| !stays(&up) && !bound.contains(&up));
        if !going.is_empty() && !loses_parent && !lineage.can_be_put(tuple) {
            bound.extend(going);
        }
    }
    bound
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

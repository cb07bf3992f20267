//! Deletes the checkpoints of runs.

use std::collections::BTreeSet;

use super::lineage::{Lineage, place};
use super::removal::{bound_to_damage, removal};
use super::{DeletionPlan, Reason, carry_out, in_order};
use crate::channel::ChannelTable;
use crate::error::Result;
use crate::id::ThreadId;
use crate::saver::{LocalKey, Saver, ThreadImage};

/// The metadata key under which a checkpoint names the run that created it.
pub const RUN_ID_KEY: &str = "run_id";

/// Plans the deletion of the checkpoints that these runs created. A checkpoint with survivors that are its
/// children, or restore its state, stays: it belongs to their history and replay. So does one whose damaged parent stays.
///
/// # Errors
/// None for an intact thread: no snapshot is created.
pub fn plan_delete_for_runs(
    image: &ThreadImage,
    runs: &BTreeSet<String>,
    table: &ChannelTable,
) -> Result<DeletionPlan> {
    let lineage = Lineage::new(image);
    let mut bound: BTreeSet<LocalKey> = BTreeSet::new();
    let (remove, verdicts) = loop {
        let (remove, verdicts) = chosen(&lineage, runs, &bound);
        let more = bound_to_damage(&lineage, |at| !remove.contains(at));
        if more.is_empty() {
            break (remove, verdicts);
        }
        bound.extend(more);
    };
    Ok(DeletionPlan { rewrite: removal(&lineage, remove, table)?, verdicts: in_order(verdicts) })
}

/// What goes if these stay, with all verdicts.
fn chosen(
    lineage: &Lineage<'_>,
    runs: &BTreeSet<String>,
    bound: &BTreeSet<LocalKey>,
) -> (BTreeSet<LocalKey>, Vec<(LocalKey, Reason)>) {
    let continued_by = |at: &LocalKey| lineage.children(at).iter().chain(lineage.restored_by(at));
    let mut remove: BTreeSet<LocalKey> = BTreeSet::new();
    let mut verdicts = Vec::with_capacity(lineage.image().checkpoints.len());
    // Newest first, so that children are decided before their parents.
    for (at, tuple) in lineage.image().checkpoints.iter().rev() {
        let run = tuple.metadata.extra.get(RUN_ID_KEY).and_then(serde_json::Value::as_str);
        let named = run.is_some_and(|run| runs.contains(run));
        let reason = if !named {
            Reason::NotAsked
        } else if bound.contains(at) {
            Reason::BrokenLineage
        } else if continued_by(at).any(|child| !remove.contains(&place(child))) {
            Reason::Ancestor
        } else {
            Reason::Run
        };
        if reason.goes() {
            remove.insert(at.clone());
        }
        verdicts.push((at.clone(), reason));
    }
    (remove, verdicts)
}

/// Deletes the checkpoints that these runs created, in one atomic change, except those that survivors need.
///
/// # Errors
/// [`crate::Error::Stale`] if other writers keep changing the thread; those of the saver.
pub async fn delete_for_runs(
    saver: &dyn Saver,
    thread: &ThreadId,
    runs: &BTreeSet<String>,
    table: &ChannelTable,
) -> Result<DeletionPlan> {
    carry_out(saver, thread, |image| plan_delete_for_runs(image, runs, table)).await.map(|(_, plan)| plan)
}

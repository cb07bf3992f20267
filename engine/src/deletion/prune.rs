//! Pruning: keeps the newest checkpoints of a thread and what they need.

use std::collections::{BTreeMap, BTreeSet};

use super::lineage::Lineage;
use super::removal::{bound_to_damage, removal};
use super::{DeletionPlan, Reason, carry_out, in_order};
use crate::channel::ChannelTable;
use crate::error::Result;
use crate::foreign::ForeignChanges;
use crate::id::{CheckpointId, ThreadId};
use crate::saver::{LocalKey, Saver, ThreadImage};

/// Which checkpoints of each namespace to keep. The head is always kept, unless nothing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// The head.
    Latest,
    /// The newest ones, this many.
    Last(usize),
    /// Those created at this time or later, in milliseconds since the Unix epoch.
    Since(u64),
    /// None: the thread is deleted.
    Nothing,
}

/// What to do if a delta channel would lose the history before the oldest kept checkpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Boundary {
    /// Also keep ancestors, back to those that store a value of each delta channel. Stores nothing new.
    #[default]
    KeepSet,
    /// Store a snapshot of each delta channel in the oldest kept checkpoints, and remove all ancestors. What only LangGraph
    /// can replay is kept as with [`Self::KeepSet`], with [`Reason::Replay`].
    FreshSnapshot,
}

/// What to prune.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prune {
    /// What to keep.
    pub keep: Keep,
    /// What to do at the boundary.
    pub boundary: Boundary,
    /// Checkpoints to keep in any case, in every namespace, with what they need.
    pub protect: BTreeSet<CheckpointId>,
    /// Maximum checkpoints removed per pass, oldest first; run again to continue. `None` means no limit. A pass may
    /// remove more if a delta channel cannot be cut earlier.
    pub batch: Option<usize>,
}

impl Prune {
    /// Keeps these, without protected ids and without a limit.
    pub fn keeping(keep: Keep) -> Self {
        Self { keep, boundary: Boundary::default(), protect: BTreeSet::new(), batch: None }
    }
}

/// Plans the pruning of a thread. `table` replays delta channels to create snapshots.
///
/// # Errors
/// [`crate::Error::BrokenLineage`] if a snapshot is needed and something required for it is missing.
pub fn plan_prune(image: &ThreadImage, prune: &Prune, table: &ChannelTable) -> Result<DeletionPlan> {
    let lineage = Lineage::new(image);
    let foreign = ForeignChanges::new(&lineage);
    let heads = lineage.heads();
    let newest = match prune.keep {
        Keep::Last(count) => newest(image, count),
        _ => BTreeSet::new(),
    };
    let wanted = |place: &LocalKey| {
        // By this reason a report knows the heads, so it goes before the others.
        if prune.keep != Keep::Nothing && heads.get(&place.0) == Some(&place.1) {
            return Some(Reason::Head);
        }
        if prune.protect.contains(&place.1) {
            return Some(Reason::Protected);
        }
        match prune.keep {
            Keep::Nothing | Keep::Latest => None,
            Keep::Last(_) => newest.contains(place).then_some(Reason::Kept),
            Keep::Since(moment) => (place.1.unix_ms() >= moment).then_some(Reason::Kept),
        }
    };
    let places = image.checkpoints.keys();
    let wanted: BTreeMap<&LocalKey, Reason> =
        places.filter_map(|place| Some((place, wanted(place)?))).collect();
    let kept: BTreeSet<LocalKey> = wanted.keys().map(|place| (*place).clone()).collect();
    let replayed = |kept: &BTreeSet<LocalKey>| match prune.boundary {
        Boundary::KeepSet => lineage.replay_closure(kept),
        Boundary::FreshSnapshot => {
            let foreign = kept.iter().filter(|place| foreign.are_at(place)).cloned().collect();
            lineage.replay_closure(&foreign).into_iter().chain(kept.iter().cloned()).collect()
        }
    };
    let with_bound = |mut stays: BTreeSet<LocalKey>| {
        let bound = bound_to_damage(&lineage, |at| stays.contains(at));
        stays.extend(bound);
        stays
    };
    let replay = replayed(&kept);
    let closed = with_bound(replay.clone());
    let mut stays = closed.clone();
    let mut size = prune.batch.unwrap_or(usize::MAX);
    let going = image.checkpoints.len() - closed.len();
    if size < going {
        let mut oldest: Vec<&LocalKey> =
            image.checkpoints.keys().filter(|place| !closed.contains(*place)).collect();
        oldest.sort_by_key(|(namespace, id)| (*id, namespace.clone()));
        // Enlarge the batch while everything in it is still needed.
        while size < going {
            stays = closed.iter().chain(oldest.iter().skip(size).copied()).cloned().collect();
            stays = with_bound(replayed(&stays));
            if stays.len() < image.checkpoints.len() {
                break;
            }
            size = size.saturating_mul(2).max(1);
            stays.clone_from(&closed);
        }
    }
    let verdict = |place: &LocalKey| match wanted.get(place) {
        Some(reason) => *reason,
        None if closed.contains(place) && !replay.contains(place) => Reason::BrokenLineage,
        None if closed.contains(place) => Reason::Replay,
        None if stays.contains(place) => Reason::Cap,
        None if prune.keep == Keep::Nothing => Reason::Thread,
        None => Reason::Old,
    };
    let verdicts = image.checkpoints.keys().map(|place| (place.clone(), verdict(place))).collect();
    let remove = image.checkpoints.keys().filter(|place| !stays.contains(*place)).cloned().collect();
    Ok(DeletionPlan { rewrite: removal(&lineage, remove, table)?, verdicts: in_order(verdicts) })
}

/// The newest `count` checkpoints of each namespace.
fn newest(image: &ThreadImage, count: usize) -> BTreeSet<&LocalKey> {
    let (mut current, mut seen) = (None, 0);
    let places = image.checkpoints.keys().rev();
    let newest = places.filter(|(namespace, _)| {
        #[cfg(test)]
        super::tests::visit();
        if current.replace(namespace) != Some(namespace) {
            seen = 0;
        }
        seen += 1;
        seen <= count
    });
    newest.collect()
}

/// Prunes a thread, in one atomic change. Every remaining checkpoint keeps its state.
///
/// # Errors
/// [`crate::Error::Stale`] if other writers keep changing the thread; those of [`plan_prune`] and of the saver.
pub async fn prune(
    saver: &dyn Saver,
    thread: &ThreadId,
    prune: &Prune,
    table: &ChannelTable,
) -> Result<DeletionPlan> {
    carry_out(saver, thread, |image| plan_prune(image, prune, table)).await.map(|(_, plan)| plan)
}

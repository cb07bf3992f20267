//! Pruning: keeping the newest checkpoints of a thread and what they need.

use std::collections::BTreeSet;
use std::ops::Bound;

use super::lineage::Lineage;
use super::removal::removal;
use super::{DeletionPlan, Reason, carry_out, in_order};
use crate::channel::ChannelTable;
use crate::error::Result;
use crate::id::{CheckpointId, ThreadId};
use crate::saver::{Place, Saver, ThreadImage};

/// Which checkpoints of each namespace are kept. The head is, unless nothing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// The head.
    Latest,
    /// So many of the newest ones.
    Last(usize),
    /// Those that were made at this moment or later, in milliseconds since the Unix epoch.
    Since(u64),
    /// None: the thread is deleted.
    Nothing,
}

/// What happens where a delta channel would lose the history behind the oldest kept checkpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Boundary {
    /// Ancestors stay as well, back to the ones that store a value of each delta channel. Nothing new is stored.
    #[default]
    KeepSet,
    /// The oldest kept checkpoints get a snapshot of each delta channel, and all ancestors go.
    FreshSnapshot,
}

/// What to prune.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prune {
    /// What is kept.
    pub keep: Keep,
    /// What happens at the boundary.
    pub boundary: Boundary,
    /// Checkpoints that stay in any case, in every namespace; with what they need.
    pub protect: BTreeSet<CheckpointId>,
    /// At most so many go in one pass, the oldest first; a later pass goes on. None means no bound. A pass may take
    /// more if a delta channel cannot be cut earlier.
    pub batch: Option<usize>,
}

impl Prune {
    /// Keeps these, with no protected ids and no bound.
    pub fn keeping(keep: Keep) -> Self {
        Self { keep, boundary: Boundary::default(), protect: BTreeSet::new(), batch: None }
    }
}

/// Plans the pruning of a thread. `table` replays delta channels where a snapshot is made.
///
/// # Errors
/// [`crate::Error::BrokenLineage`] if a snapshot is to be made and something that it needs is missing.
pub fn plan_prune(image: &ThreadImage, prune: &Prune, table: &ChannelTable) -> Result<DeletionPlan> {
    let lineage = Lineage::new(image);
    let heads = lineage.heads();
    let wanted = |place: &Place| {
        if prune.protect.contains(&place.1) {
            return Some(Reason::Protected);
        }
        match prune.keep {
            Keep::Nothing => None,
            _ if heads.get(&place.0) == Some(&place.1) => Some(Reason::Head),
            Keep::Latest => None,
            Keep::Last(count) => {
                let newer = image.checkpoints.range((Bound::Excluded(place.clone()), Bound::Unbounded));
                let newer = newer.take_while(|((namespace, _), _)| *namespace == place.0).take(count).count();
                (newer < count).then_some(Reason::Kept)
            }
            Keep::Since(moment) => (place.1.unix_ms() >= moment).then_some(Reason::Kept),
        }
    };
    let kept: BTreeSet<Place> =
        image.checkpoints.keys().filter(|place| wanted(place).is_some()).cloned().collect();
    let close = |kept: &BTreeSet<Place>| match prune.boundary {
        Boundary::KeepSet => lineage.replay_closure(kept),
        Boundary::FreshSnapshot => kept.clone(),
    };
    let closed = close(&kept);
    let mut stays = closed.clone();
    let mut size = prune.batch.unwrap_or(usize::MAX);
    let going = image.checkpoints.len() - closed.len();
    if size < going {
        let mut oldest: Vec<&Place> =
            image.checkpoints.keys().filter(|place| !closed.contains(*place)).collect();
        oldest.sort_by_key(|(namespace, id)| (*id, namespace.clone()));
        // With a larger batch if what is left in this one is all needed for a while.
        while size < going {
            stays = closed.iter().chain(oldest.iter().skip(size).copied()).cloned().collect();
            stays = close(&stays);
            if stays.len() < image.checkpoints.len() {
                break;
            }
            size = size.saturating_mul(2).max(1);
            stays.clone_from(&closed);
        }
    }
    let verdict = |place: &Place| match wanted(place) {
        Some(reason) => reason,
        None if closed.contains(place) => Reason::Replay,
        None if stays.contains(place) => Reason::Cap,
        None if prune.keep == Keep::Nothing => Reason::Thread,
        None => Reason::Old,
    };
    let verdicts = image.checkpoints.keys().map(|place| (place.clone(), verdict(place))).collect();
    let remove = image.checkpoints.keys().filter(|place| !stays.contains(*place)).cloned().collect();
    Ok(DeletionPlan { rewrite: removal(&lineage, remove, table)?, verdicts: in_order(verdicts) })
}

/// Prunes a thread, in one atomic change. Every checkpoint that stays has the state that it had.
///
/// # Errors
/// [`crate::Error::Stale`] if somebody keeps writing to the thread; those of [`plan_prune`] and of the saver.
pub async fn prune(
    saver: &dyn Saver,
    thread: &ThreadId,
    prune: &Prune,
    table: &ChannelTable,
) -> Result<DeletionPlan> {
    carry_out(saver, thread, |image| plan_prune(image, prune, table)).await.map(|(_, plan)| plan)
}

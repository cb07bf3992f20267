//! Removes checkpoints without changing the remaining ones: pruning, retention, deletion by run, copies.
//!
//! Each operation reads a whole thread, plans (a pure function, so every deletion can be previewed), and stores the
//! result in one atomic change that is refused if another writer changed the thread meanwhile; then it plans again.
//! Survivors are chosen first: only what no survivor needs is removed.
//!
//! None of this runs automatically. A caller that drops a future does not learn whether the change happened; it must
//! read the thread again.

mod copy;
mod lineage;
mod prune;
mod removal;
mod retention;
mod runs;
mod stats;
#[cfg(test)]
mod tests;

use std::fmt;

use crate::error::{Error, Result};
use crate::id::ThreadId;
use crate::saver::{LocalKey, Rewrite, Saver, ThreadImage, doubt_or};

pub use copy::copy_thread;
pub use lineage::Lineage;
pub(crate) use lineage::{cannot_replay, sentinels};
pub use prune::{Boundary, Keep, Prune, plan_prune, prune};
pub use retention::{RetentionPolicy, RetentionReport, enforce, plan_retention};
pub use runs::{RUN_ID_KEY, delete_for_runs, plan_delete_for_runs};
pub use stats::{STATS_KEYS, Stats};

/// Why a checkpoint is kept or deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Stays: the newest of its namespace.
    Head,
    /// Stays: selected by the strategy.
    Kept,
    /// Stays: its id is protected.
    Protected,
    /// Stays: the replay of a remaining checkpoint starts here or passes through it.
    Replay,
    /// Stays: a head or another checkpoint that stays continues it, as its descendant or by what it restores.
    Ancestor,
    /// Stays: another checkpoint continues it, as its child or by what it restores.
    HasChildren,
    /// Stays: a task that ran from it has writes that no checkpoint applied.
    PendingWrites,
    /// Stays: the last one of its namespace, or the root of a lineage.
    Root,
    /// Stays: its parent is missing or damaged, and removing more would make that worse.
    BrokenLineage,
    /// Stays: the policy does not select it for removal.
    NotAsked,
    /// Stays for now: this pass already removes its maximum.
    Cap,
    /// Deleted: older than what the strategy keeps.
    Old,
    /// Deleted with the whole thread.
    Thread,
    /// Deleted: a duration-only checkpoint without children.
    DurationLeaf,
    /// Deleted: a duration-only checkpoint, whose children are grafted onto its parent.
    DurationLink,
    /// Deleted: the end of a branch that is not the head's.
    SiblingLeaf,
    /// Deleted: created by a run that is being deleted.
    Run,
}

impl Reason {
    /// Whether the checkpoint is deleted.
    pub fn goes(self) -> bool {
        matches!(
            self,
            Self::Old
                | Self::Thread
                | Self::DurationLeaf
                | Self::DurationLink
                | Self::SiblingLeaf
                | Self::Run
        )
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Head => "the newest of its namespace",
            Self::Kept => "asked to be kept",
            Self::Protected => "protected",
            Self::Replay => "needed to replay a kept checkpoint",
            Self::Ancestor => "a kept checkpoint continues it",
            Self::HasChildren => "another checkpoint continues it",
            Self::PendingWrites => "has pending writes",
            Self::Root => "a root, or the last of its namespace",
            Self::BrokenLineage => "its parent is missing or damaged",
            Self::NotAsked => "not asked for",
            Self::Cap => "beyond the limit of this pass",
            Self::Old => "older than what is kept",
            Self::Thread => "the whole thread goes",
            Self::DurationLeaf => "a trailing duration-only checkpoint",
            Self::DurationLink => "a duration-only checkpoint, its children move to its parent",
            Self::SiblingLeaf => "the end of a side branch",
            Self::Run => "made by a run that is to be deleted",
        })
    }
}

/// What happens to a thread, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct DeletionPlan {
    /// The change to store.
    pub rewrite: Rewrite,
    /// Every checkpoint of the thread, newest first (at the same id, by namespace), with its reason to stay or go.
    pub verdicts: Vec<(LocalKey, Reason)>,
}

impl DeletionPlan {
    /// The checkpoints to remove, newest first.
    pub fn removed(&self) -> impl Iterator<Item = &LocalKey> {
        self.verdicts.iter().filter(|(_, reason)| reason.goes()).map(|(place, _)| place)
    }
}

/// How often a pass is replanned because the thread changed.
const ATTEMPTS: usize = 8;

/// Reads, plans and stores, until no other writer interferes. Returns the thread as it was and the executed plan; a
/// plan without changes is not stored.
///
/// # Errors
/// [`Error::Stale`] if another writer interfered each time; those of `plan` and of the saver. Then nothing was changed,
/// unless it is [`Error::InDoubt`].
pub async fn carry_out(
    saver: &dyn Saver,
    thread: &ThreadId,
    plan: impl Fn(&ThreadImage) -> Result<DeletionPlan>,
) -> Result<(ThreadImage, DeletionPlan)> {
    let mut doubt = None;
    for _ in 0..ATTEMPTS {
        let image = saver.read_thread(thread).await.map_err(|error| doubt_or(doubt.clone(), error))?;
        let planned = plan(&image).map_err(|error| doubt_or(doubt.clone(), error))?;
        if planned.rewrite.is_empty() {
            return Ok((image, planned));
        }
        match saver.rewrite_thread(thread, &image.revision, planned.rewrite.clone()).await {
            Ok(()) => return Ok((image, planned)),
            Err(Error::Stale { .. }) => {}
            Err(error @ Error::InDoubt { .. }) => {
                doubt.get_or_insert(error.clone());
                // The removal and the puts were stored together or not at all.
                let now = saver.read_thread(thread).await.map_err(|error| doubt_or(doubt.clone(), error))?;
                let gone = planned.rewrite.remove.iter().all(|place| !now.checkpoints.contains_key(place));
                if gone && !planned.rewrite.remove.is_empty() {
                    return Ok((image, planned));
                }
                // The thread is as it was: what prevented the change, such as a full disk, would prevent it again.
                if now.revision == image.revision {
                    return Err(error);
                }
            }
            Err(error) => return Err(doubt_or(doubt, error)),
        }
    }
    Err(doubt_or(doubt, Error::Stale { thread: thread.clone() }))
}

/// Sorts verdicts: newest first, at the same id by namespace.
fn in_order(mut verdicts: Vec<(LocalKey, Reason)>) -> Vec<(LocalKey, Reason)> {
    verdicts.sort_by(|((a_ns, a), _), ((b_ns, b), _)| b.cmp(a).then_with(|| a_ns.cmp(b_ns)));
    verdicts
}

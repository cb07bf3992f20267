//! Removing checkpoints without harming what stays: pruning, retention, deletion by run, copies.
//!
//! Each operation reads a whole thread, plans on what it read (a pure function, which can be looked at before anything
//! happens), and stores the result in one atomic change that is refused if anybody wrote to the thread meanwhile; then
//! it is planned anew. Survivors come first: what goes is what no survivor needs.
//!
//! Nothing calls any of this by itself. A caller that drops a future does not learn whether the change happened; looking
//! at the thread again tells.

mod copy;
mod lineage;
mod prune;
mod removal;
mod retention;
mod runs;
mod stats;

use std::fmt;

use crate::error::{Error, Result};
use crate::id::ThreadId;
use crate::saver::{Place, Rewrite, Saver, ThreadImage};

pub use copy::copy_thread;
pub use lineage::Lineage;
pub use prune::{Boundary, Keep, Prune, plan_prune, prune};
pub use retention::{RetentionPolicy, RetentionReport, enforce, plan_retention};
pub use runs::{RUN_ID_KEY, delete_for_runs, plan_delete_for_runs};
pub use stats::{STATS_KEYS, Stats};

/// Why a checkpoint stays or goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Stays: the newest of its namespace.
    Head,
    /// Stays: among those that the strategy keeps.
    Kept,
    /// Stays: its id is protected.
    Protected,
    /// Stays: what is replayed for a checkpoint that stays begins or goes on here.
    Replay,
    /// Stays: an ancestor of a head, or of something else that stays.
    Ancestor,
    /// Stays: it has children.
    HasChildren,
    /// Stays: a task that ran from it has writes that no checkpoint applied.
    PendingWrites,
    /// Stays: the last one of its namespace, or the root of a lineage.
    Root,
    /// Stays: its parent is missing, and removing more would make that worse.
    BrokenLineage,
    /// Stays: the policy does not ask for its removal.
    NotAsked,
    /// Stays for now: as many as may go in one pass go already.
    Cap,
    /// Goes: older than what the strategy keeps.
    Old,
    /// Goes: the whole thread does.
    Thread,
    /// Goes: a duration-only checkpoint that nothing was made from.
    DurationLeaf,
    /// Goes: a duration-only checkpoint, whose children are tied to its parent.
    DurationLink,
    /// Goes: the end of a branch that is not the head's.
    SiblingLeaf,
    /// Goes: a run that is to be deleted made it.
    Run,
}

impl Reason {
    /// Whether the checkpoint goes.
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
            Self::Ancestor => "an ancestor of a kept checkpoint",
            Self::HasChildren => "has children",
            Self::PendingWrites => "has pending writes",
            Self::Root => "a root, or the last of its namespace",
            Self::BrokenLineage => "its parent is missing",
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

/// What is to become of a thread, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct DeletionPlan {
    /// The change to store.
    pub rewrite: Rewrite,
    /// Every checkpoint of the thread, newest first (at the same id, by namespace), with the reason for its fate.
    pub verdicts: Vec<(Place, Reason)>,
}

impl DeletionPlan {
    /// The checkpoints that go, newest first.
    pub fn removed(&self) -> impl Iterator<Item = &Place> {
        self.verdicts.iter().filter(|(_, reason)| reason.goes()).map(|(place, _)| place)
    }
}

/// How often a pass is planned anew because somebody wrote to the thread.
const ATTEMPTS: usize = 8;

/// Reads, plans and stores, until nobody wrote in between. Answers the thread as it was and the plan that was carried
/// out on it; a plan that changes nothing is not stored.
///
/// # Errors
/// [`Error::Stale`] if somebody wrote each time; those of `plan` and of the saver. Then nothing was changed, unless it
/// is [`Error::InDoubt`].
pub async fn carry_out(
    saver: &dyn Saver,
    thread: &ThreadId,
    plan: impl Fn(&ThreadImage) -> Result<DeletionPlan>,
) -> Result<(ThreadImage, DeletionPlan)> {
    let mut last = Error::Stale { thread: thread.clone() };
    for _ in 0..ATTEMPTS {
        let image = saver.read_thread(thread).await?;
        let planned = plan(&image)?;
        if planned.rewrite.is_empty() {
            return Ok((image, planned));
        }
        match saver.rewrite_thread(thread, &image.revision, planned.rewrite.clone()).await {
            Ok(()) => return Ok((image, planned)),
            Err(error @ Error::Stale { .. }) => last = error,
            Err(error @ Error::InDoubt { .. }) => {
                // What was put is stored with what was removed, or not at all.
                let now = saver.read_thread(thread).await?;
                let gone = planned.rewrite.remove.iter().all(|place| !now.checkpoints.contains_key(place));
                if gone && !planned.rewrite.remove.is_empty() {
                    return Ok((image, planned));
                }
                last = error;
            }
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

/// Verdicts in their order: newest first, at the same id by namespace.
fn in_order(mut verdicts: Vec<(Place, Reason)>) -> Vec<(Place, Reason)> {
    verdicts.sort_by(|((a_ns, a), _), ((b_ns, b), _)| b.cmp(a).then_with(|| a_ns.cmp(b_ns)));
    verdicts
}

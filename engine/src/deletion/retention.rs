//! The retention policy (service reference, "Retention policy"). It never runs automatically.
//!
//! Two shapes may be removed: a trailing duration-only checkpoint and, if requested, the end of a side branch. Only
//! leaves of the current graph are considered; a checkpoint that becomes a leaf is left to the next pass. Decisions
//! that the reference leaves open:
//!
//! - A *head* is the newest checkpoint of a namespace that is not duration-only. A namespace with only duration-only
//!   checkpoints has none; then its newest checkpoint counts as one.
//! - Neither a root nor the last checkpoint of a namespace is ever removed: no pass empties a namespace.
//! - A checkpoint whose state another one restores is continued by that one, as by a child: in delta mode a run that
//!   forks from an older checkpoint is written onto the head, and only names what it forked from.
//! - A duration-only leaf of a superseded line is removed like any other; of two stacked ones, the upper one first.
//! - A checkpoint with pending rows is *guarded*: rows of a task that no checkpoint applied. Rows that a child applied
//!   belong to the child.
//! - A leaf that applied rows of a damaged parent stays, and a link on one is not grafted: what is damaged cannot be put
//!   again.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::lineage::{Lineage, place};
use super::removal::removal;
use super::stats::Stats;
use super::{DeletionPlan, Reason, carry_out, in_order};
use crate::channel::ChannelTable;
use crate::checkpoint::CheckpointTuple;
use crate::error::{Error, Result};
use crate::id::{CheckpointId, Namespace, TaskId, ThreadId};
use crate::saver::{LocalKey, Saver, ThreadImage};

/// What may be deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetentionPolicy {
    /// Duration-only leaf checkpoints that no later run forked from.
    pub prune_trailing_duration_leaves: bool,
    /// Leaf checkpoints off the heads' lineages.
    pub prune_leaf_sibling_branches: bool,
    /// Ids that are never deleted, in any namespace.
    pub protect_checkpoint_ids: BTreeSet<CheckpointId>,
    /// Whether a checkpoint with pending rows is protected.
    pub strict_pending_write_guard: bool,
    /// Maximum checkpoints deleted per pass; `None` means no limit.
    pub max_delete_per_run: Option<i64>,
    /// Whether duration-only checkpoints with children are also removed: in the same change their children become
    /// children of their parent, which takes over the rows under them.
    pub graft_duration_links: bool,
}

impl Default for RetentionPolicy {
    fn default() -> Self {
        Self {
            prune_trailing_duration_leaves: true,
            prune_leaf_sibling_branches: false,
            protect_checkpoint_ids: BTreeSet::new(),
            strict_pending_write_guard: true,
            max_delete_per_run: None,
            graft_duration_links: false,
        }
    }
}

impl RetentionPolicy {
    /// The maximum of checkpoints that a pass deletes.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if it is negative.
    pub fn cap(&self) -> Result<usize> {
        match self.max_delete_per_run {
            None => Ok(usize::MAX),
            Some(cap) => usize::try_from(cap)
                .map_err(|_| Error::InvalidInput(format!("max_delete_per_run must be >= 0, got {cap}"))),
        }
    }
}

/// The result of a pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetentionReport {
    /// The thread.
    pub thread_id: ThreadId,
    /// The head of each namespace.
    pub protected_head_ids: BTreeMap<Namespace, CheckpointId>,
    /// What was deleted, newest first, at the same id by namespace.
    pub deleted_checkpoint_ids: Vec<CheckpointId>,
    /// The thread's counts before, by [`super::STATS_KEYS`]; empty if no stats were requested.
    pub stats_before: BTreeMap<&'static str, u64>,
    /// The counts after.
    pub stats_after: BTreeMap<&'static str, u64>,
}

/// Plans a pass over a thread.
///
/// # Errors
/// [`Error::InvalidInput`] for a negative cap.
pub fn plan_retention(
    image: &ThreadImage,
    policy: &RetentionPolicy,
    table: &ChannelTable,
) -> Result<DeletionPlan> {
    let cap = policy.cap()?;
    let lineage = Lineage::new(image);
    let heads = heads(&lineage);
    let ancestors: BTreeSet<LocalKey> =
        heads.iter().flat_map(|(namespace, id)| lineage.continued(&(namespace.clone(), *id))).collect();
    let mut links = Links::new(&lineage);
    // The rows that it applied would go from under a parent that cannot be put again.
    let is_bound = |parent: &CheckpointTuple, tuple: &CheckpointTuple| {
        !tuple.checkpoint.applied.is_empty() && !lineage.can_be_put(parent)
    };
    let mut classify = |at: &LocalKey, tuple: &CheckpointTuple| {
        let is_leaf = lineage.children(at).is_empty() && lineage.restored_by(at).is_empty();
        if heads.get(&at.0) == Some(&at.1) {
            Reason::Head
        } else if policy.protect_checkpoint_ids.contains(&at.1) {
            Reason::Protected
        } else if policy.strict_pending_write_guard
            && lineage.pending(&image.checkpoints[at]).next().is_some()
        {
            Reason::PendingWrites
        } else if tuple.parent.is_none() {
            Reason::Root
        } else if lineage.parent(tuple).is_none_or(|parent| is_leaf && is_bound(parent, tuple)) {
            Reason::BrokenLineage
        } else if policy.graft_duration_links && !is_leaf && links.take(at, tuple) {
            Reason::DurationLink
        } else if ancestors.contains(at) {
            Reason::Ancestor
        } else if !is_leaf {
            Reason::HasChildren
        } else if tuple.metadata.is_duration_only() {
            if policy.prune_trailing_duration_leaves { Reason::DurationLeaf } else { Reason::NotAsked }
        } else if policy.prune_leaf_sibling_branches {
            Reason::SiblingLeaf
        } else {
            Reason::NotAsked
        }
    };
    let verdicts = image.checkpoints.iter().map(|(at, tuple)| (at.clone(), classify(at, tuple)));
    let mut verdicts = in_order(verdicts.collect());
    for (_, reason) in verdicts.iter_mut().filter(|(_, reason)| reason.goes()).skip(cap) {
        *reason = Reason::Cap;
    }
    let going = |wanted: bool| {
        let links = verdicts.iter().filter(move |(_, r)| r.goes() && (*r == Reason::DurationLink) == wanted);
        links.map(|(at, _)| at.clone()).collect::<BTreeSet<LocalKey>>()
    };
    let (links, leaves) = (going(true), going(false));
    let grafted;
    let rewrite = if links.is_empty() {
        removal(&lineage, leaves, table)?
    } else {
        // Leaves are removed from the thread as grafting leaves it.
        let (image, tied) = graft(image, &links);
        grafted = image;
        let mut rewrite = removal(&Lineage::new(&grafted), leaves, table)?;
        let put: BTreeSet<LocalKey> = rewrite.put.iter().map(place).collect();
        let more = tied.into_iter().filter(|at| !put.contains(at) && !rewrite.remove.contains(at));
        let more: Vec<_> = more.filter_map(|at| grafted.checkpoints.get(&at).cloned()).collect();
        rewrite.put.extend(more);
        rewrite.remove.extend(links);
        rewrite
    };
    Ok(DeletionPlan { rewrite, verdicts })
}

/// The head of each namespace: the newest that is not duration-only, or the newest if all are.
fn heads(lineage: &Lineage<'_>) -> BTreeMap<Namespace, CheckpointId> {
    let mut heads = lineage.heads();
    heads.extend(lineage.resumable_heads());
    heads
}

/// The duration links of a thread, found oldest first.
struct Links<'a> {
    lineage: &'a Lineage<'a>,
    /// Where the rows under each link go: to its nearest ancestor that is none.
    ends: HashMap<LocalKey, LocalKey>,
    /// The tasks with rows under such an ancestor once its links are grafted.
    tasks: HashMap<LocalKey, HashSet<TaskId>>,
}

impl<'a> Links<'a> {
    fn new(lineage: &'a Lineage<'a>) -> Self {
        Self { lineage, ends: HashMap::new(), tasks: HashMap::new() }
    }

    /// Whether a checkpoint only notes durations, and its children can be grafted onto its parent: that one exists and
    /// holds the same state, neither it nor a child is damaged, no checkpoint names the link as what it restores, and no
    /// task has rows in both places, of which a child would replay the wrong ones.
    fn take(&mut self, at: &LocalKey, tuple: &CheckpointTuple) -> bool {
        let lineage = self.lineage;
        let Some(parent) = lineage.parent(tuple) else { return false };
        if !tuple.metadata.is_duration_only()
            || !tuple.checkpoint.applied.is_empty()
            || parent.checkpoint.channels != tuple.checkpoint.channels
            || !lineage.restored_by(at).is_empty()
        {
            return false;
        }
        let end = place(parent);
        let end = self.ends.get(&end).cloned().unwrap_or(end);
        let mut put = lineage.children(at).iter().copied().chain(lineage.get(&end));
        if !put.all(|tuple| lineage.can_be_put(tuple)) {
            return false;
        }
        let tasks = self.tasks.entry(end.clone()).or_insert_with(|| {
            let rows = lineage.get(&end).into_iter().flat_map(|tuple| &tuple.writes);
            rows.map(|row| row.task).collect()
        });
        if tuple.writes.iter().any(|row| tasks.contains(&row.task)) {
            return false;
        }
        tasks.extend(tuple.writes.iter().map(|row| row.task));
        self.ends.insert(at.clone(), end);
        true
    }
}

/// The thread without these links: the children of each become children of its parent, and the rows under it move
/// there. Also returns the changed checkpoints.
fn graft(image: &ThreadImage, links: &BTreeSet<LocalKey>) -> (ThreadImage, BTreeSet<LocalKey>) {
    let mut children: HashMap<LocalKey, Vec<&LocalKey>> = HashMap::new();
    for (place, tuple) in &image.checkpoints {
        #[cfg(test)]
        super::tests::visit();
        if let Some(parent) = tuple.parent {
            children.entry((place.0.clone(), parent)).or_default().push(place);
        }
    }
    let mut grafted = image.clone();
    let mut changed = BTreeSet::new();
    for at in links {
        // Oldest first, so that each of several stacked links already has a parent that stays.
        let Some(link) = grafted.checkpoints.remove(at) else { continue };
        let Some(parent) = link.parent else { continue };
        let above = (at.0.clone(), parent);
        if let Some(parent) = grafted.checkpoints.get_mut(&above) {
            parent.writes.extend(link.writes);
            changed.insert(above);
        }
        for place in children.remove(at).unwrap_or_default() {
            #[cfg(test)]
            super::tests::visit();
            if let Some(child) = grafted.checkpoints.get_mut(place) {
                child.parent = Some(parent);
                changed.insert(place.clone());
            }
        }
    }
    changed.retain(|place| !links.contains(place));
    (grafted, changed)
}

/// Runs one pass over a thread in one atomic change, fenced against runs: if a run writes meanwhile, the pass plans
/// again. It needs no lock; a caller that holds the thread's lock in its process may keep it.
///
/// # Errors
/// [`Error::InvalidInput`] for a negative cap, before anything is read; [`Error::Stale`] if other writers keep changing
/// the thread; those of the saver. Nothing was deleted then, unless it is [`Error::InDoubt`].
pub async fn enforce(
    saver: &dyn Saver,
    thread: &ThreadId,
    policy: &RetentionPolicy,
    table: &ChannelTable,
    collect_stats: bool,
) -> Result<RetentionReport> {
    policy.cap()?;
    let (before, plan) = carry_out(saver, thread, |image| plan_retention(image, policy, table)).await?;
    let stats = |image: &ThreadImage| if collect_stats { Stats::of(image).to_map() } else { BTreeMap::new() };
    let (protected_head_ids, stats_before) = (heads(&Lineage::new(&before)), stats(&before));
    Ok(RetentionReport {
        thread_id: thread.clone(),
        protected_head_ids,
        deleted_checkpoint_ids: plan.removed().map(|place| place.1).collect(),
        stats_before,
        stats_after: stats(&before.after(&plan.rewrite)),
    })
}

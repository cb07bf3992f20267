//! What a thread holds, counted without its values.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::Hash;

use crate::checkpoint::CheckpointTuple;
use crate::error::{Error, Result};
use crate::id::{CheckpointId, Namespace, TaskId, ThreadId};

/// What a thread holds, in each namespace that has a checkpoint. An unknown thread holds nothing.
pub type Summary = BTreeMap<Namespace, ChainSummary>;

/// The checkpoints of a namespace, counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainSummary {
    /// Checkpoints.
    pub checkpoints: u64,
    /// Those that were written in delta mode.
    pub delta: u64,
    /// Those that only note how long a run took.
    pub notes: u64,
    /// Those without a parent.
    pub roots: u64,
    /// Those without a child.
    pub leaves: u64,
    /// Rows under checkpoints: one for each task that ran from one.
    pub rows: u64,
    /// Rows that no child applied.
    pub pending: u64,
    /// The writes of all rows.
    pub writes: u64,
    /// The smallest id.
    pub first: CheckpointId,
    /// The greatest id.
    pub head: CheckpointId,
    /// The step of the head.
    pub step: i64,
}

/// A checkpoint, as [`Counter`] counts it. `P` names a checkpoint of the namespace, `T` a task among those of its parent.
#[derive(Debug)]
pub struct Counted<P, T> {
    /// Its place.
    pub place: P,
    /// Its id.
    pub id: CheckpointId,
    /// The place of its parent.
    pub parent: Option<P>,
    /// The tasks of its parent that it applied.
    pub applied: Vec<T>,
    /// The tasks with rows under it.
    pub tasks: Vec<T>,
    /// The writes of these rows.
    pub writes: usize,
    /// Whether it was written in delta mode.
    pub delta: bool,
    /// Whether it only notes how long a run took.
    pub note: bool,
    /// Its step.
    pub step: i64,
}

impl Counted<CheckpointId, TaskId> {
    /// A checkpoint that was read without its values, or with them.
    pub fn of(tuple: &CheckpointTuple) -> Self {
        Self {
            place: tuple.checkpoint.id,
            id: tuple.checkpoint.id,
            parent: tuple.parent,
            applied: tuple.checkpoint.applied.clone(),
            tasks: tuple.writes.iter().map(|row| row.task).collect(),
            writes: tuple.writes.iter().map(|row| row.writes.len()).sum(),
            delta: tuple.metadata.is_delta(),
            note: tuple.metadata.is_duration_only(),
            step: tuple.metadata.step,
        }
    }
}

/// Counts the checkpoints of a namespace, newest first.
#[derive(Debug)]
pub struct Counter<P, T> {
    chain: Option<ChainSummary>,
    /// The parents of the checkpoints so far that did not come themselves yet: one of their children, and the tasks that
    /// all of them applied.
    awaited: HashMap<P, (CheckpointId, HashSet<T>)>,
}

impl<P, T> Default for Counter<P, T> {
    fn default() -> Self {
        Self { chain: None, awaited: HashMap::new() }
    }
}

impl<P: Eq + Hash, T: Eq + Hash> Counter<P, T> {
    /// Adds a checkpoint of `thread`, older than those before it.
    ///
    /// # Errors
    /// [`Error::BrokenLineage`] if it lacks the row of a task that a child applied.
    pub fn add(&mut self, thread: &ThreadId, counted: Counted<P, T>) -> Result<()> {
        let Counted { place, id, parent, applied, tasks, writes, delta, note, step } = counted;
        let empty = ChainSummary {
            checkpoints: 0,
            delta: 0,
            notes: 0,
            roots: 0,
            leaves: 0,
            rows: 0,
            pending: 0,
            writes: 0,
            first: id,
            head: id,
            step,
        };
        let chain = self.chain.get_or_insert(empty);
        let child = self.awaited.remove(&place);
        chain.leaves += u64::from(child.is_none());
        let found = match &child {
            Some((_, applied)) => tasks.iter().filter(|task| applied.contains(task)).count(),
            None => 0,
        };
        if let Some((child, applied)) = child
            && found < applied.len()
        {
            return Err(Error::broken(
                thread,
                child,
                format!(
                    "the writes of a task that it or another child of checkpoint {id} applied are missing"
                ),
            ));
        }
        chain.checkpoints += 1;
        chain.delta += u64::from(delta);
        chain.notes += u64::from(note);
        chain.rows += tasks.len() as u64;
        chain.pending += (tasks.len() - found) as u64;
        chain.writes += writes as u64;
        chain.first = id;
        match parent {
            Some(parent) => {
                let (_, tasks) = self.awaited.entry(parent).or_insert_with(|| (id, HashSet::new()));
                tasks.extend(applied);
            }
            None => chain.roots += 1,
        }
        Ok(())
    }

    /// What all of them are; `None` if none came.
    ///
    /// # Errors
    /// [`Error::BrokenLineage`] if the parent of one did not come.
    pub fn summary(self, thread: &ThreadId) -> Result<Option<ChainSummary>> {
        match self.awaited.into_values().next() {
            Some((child, _)) => Err(Error::broken(thread, child, "its parent is missing")),
            None => Ok(self.chain),
        }
    }
}

/// The summary of a thread with these checkpoints, which are all that it has, newest first.
pub(super) fn of(thread: &ThreadId, tuples: &[CheckpointTuple]) -> Result<Summary> {
    let mut counters: BTreeMap<&Namespace, Counter<CheckpointId, TaskId>> = BTreeMap::new();
    for tuple in tuples {
        counters.entry(&tuple.namespace).or_default().add(thread, Counted::of(tuple))?;
    }
    let mut summary = Summary::new();
    for (namespace, counter) in counters {
        summary.extend(counter.summary(thread)?.map(|chain| (namespace.clone(), chain)));
    }
    Ok(summary)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u8) -> CheckpointId {
        CheckpointId::from_bytes([n; 16])
    }

    fn counted(n: u8, parent: Option<u8>, applied: &[u32], tasks: &[u32]) -> Counted<u8, u32> {
        let (applied, tasks) = (applied.to_vec(), tasks.to_vec());
        Counted { place: n, id: id(n), parent, applied, tasks, writes: 0, delta: false, note: false, step: 0 }
    }

    fn summary(checkpoints: Vec<Counted<u8, u32>>) -> Result<Option<ChainSummary>> {
        let (thread, mut counter) = ("t".into(), Counter::default());
        for checkpoint in checkpoints {
            counter.add(&thread, checkpoint)?;
        }
        counter.summary(&thread)
    }

    #[test]
    fn what_is_missing_is_a_broken_lineage() {
        let broken = |checkpoints| match summary(checkpoints) {
            Err(Error::BrokenLineage { checkpoint, .. }) => checkpoint,
            found => panic!("{found:?}"),
        };
        assert_eq!(summary(Vec::new()).unwrap(), None);
        let whole = vec![
            counted(3, Some(1), &[8], &[]),
            counted(2, Some(1), &[9, 8], &[]),
            counted(1, None, &[], &[7, 8, 9]),
        ];
        let chain = summary(whole).unwrap().unwrap();
        assert_eq!(
            [chain.checkpoints, chain.roots, chain.leaves, chain.rows, chain.pending],
            [3, 1, 2, 3, 1]
        );
        assert_eq!((chain.first, chain.head), (id(1), id(3)));
        assert_eq!(broken(vec![counted(3, Some(2), &[], &[]), counted(1, None, &[], &[])]), id(3));
        assert_eq!(broken(vec![counted(2, Some(1), &[8], &[]), counted(1, None, &[], &[7])]), id(2));
    }
}

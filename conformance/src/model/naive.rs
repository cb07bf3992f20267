//! The model: a saver too simple to be wrong. It copies everything, and stores with each checkpoint the writes that
//! created it, so that later changes cannot affect what it says about the past.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use threadkeep::Error;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, Stored, TaskWrites, Write};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, TaskId, ThreadId};
use threadkeep::metadata::Counters;
use threadkeep::saver::{
    ChainSummary, ChannelHistory, DeltaHistory, HistoryStep, ListQuery, Load, Seed, StepCommit, Summary,
};

/// Why the contract refuses a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The head is not the expected one.
    Conflict,
    /// The thread has another revision, or the parent is stored in another form.
    Stale,
    /// A checkpoint that the call names is missing.
    NotFound,
    /// The call contradicts itself or what is stored.
    InvalidInput,
}

impl Refusal {
    /// Whether a saver's error means this.
    pub fn is(self, error: &Error) -> bool {
        match self {
            Self::Conflict => matches!(error, Error::Conflict { .. }),
            Self::Stale => matches!(error, Error::Stale { .. }),
            Self::NotFound => matches!(error, Error::NotFound { .. }),
            Self::InvalidInput => matches!(error, Error::InvalidInput(_)),
        }
    }
}

#[derive(Debug, Clone)]
struct Node {
    tuple: CheckpointTuple,
    /// The writes that created it, in the order in which they were applied.
    made_by: Vec<Write>,
}

/// A saver too simple to be wrong, to compare others with: it copies whole checkpoints and keeps no revisions.
#[derive(Debug, Clone, Default)]
pub struct Naive {
    nodes: BTreeMap<CheckpointKey, Node>,
}

impl Naive {
    /// The checkpoint with this key.
    pub fn get(&self, key: &CheckpointKey) -> Option<&CheckpointTuple> {
        self.nodes.get(key).map(|node| &node.tuple)
    }

    /// The checkpoints of a namespace, oldest first.
    pub fn chain(&self, thread: &ThreadId, namespace: &Namespace) -> Vec<&CheckpointTuple> {
        let tuples = self.nodes.values().map(|node| &node.tuple);
        tuples.filter(|tuple| tuple.thread == *thread && tuple.namespace == *namespace).collect()
    }

    /// The newest checkpoint of a namespace.
    pub fn head(&self, thread: &ThreadId, namespace: &Namespace) -> Option<&CheckpointTuple> {
        self.chain(thread, namespace).pop()
    }

    /// What [`threadkeep::saver::Saver::list`] returns.
    pub fn list(&self, query: &ListQuery) -> Vec<CheckpointTuple> {
        let mut found: Vec<CheckpointTuple> = self
            .nodes
            .values()
            .map(|node| node.tuple.clone())
            .filter(|tuple| tuple.thread == query.thread)
            .filter(|tuple| query.namespace.as_ref().is_none_or(|only| *only == tuple.namespace))
            .filter(|tuple| query.before.is_none_or(|before| tuple.checkpoint.id < before))
            .filter(|tuple| tuple.metadata.matches(&query.filter))
            .collect();
        found.sort_by_key(|tuple| (Reverse(tuple.checkpoint.id), tuple.namespace.clone()));
        found.truncate(query.limit.unwrap_or(usize::MAX));
        for tuple in &mut found {
            mask(tuple, &query.load);
        }
        found
    }

    /// What [`threadkeep::saver::Saver::summary`] returns.
    pub fn summary(&self, thread: &ThreadId) -> Summary {
        let namespaces: BTreeSet<Namespace> =
            self.thread(thread).iter().map(|tuple| tuple.namespace.clone()).collect();
        let summaries = namespaces.into_iter().filter_map(|namespace| {
            let chain = self.chain(thread, &namespace);
            let count =
                |is: &dyn Fn(&CheckpointTuple) -> bool| chain.iter().filter(|tuple| is(tuple)).count() as u64;
            let children = |of: &CheckpointTuple| {
                let id = Some(of.checkpoint.id);
                chain.iter().filter(move |child| child.parent == id).collect::<Vec<_>>()
            };
            let rows: Vec<(&CheckpointTuple, &TaskWrites)> =
                chain.iter().flat_map(|tuple| tuple.writes.iter().map(|row| (*tuple, row))).collect();
            let is_pending = |(tuple, row): &&(&CheckpointTuple, &TaskWrites)| {
                children(tuple).iter().all(|child| !child.checkpoint.applied.contains(&row.task))
            };
            let (first, head) = (chain.first()?, chain.last()?);
            let summary = ChainSummary {
                checkpoints: chain.len() as u64,
                delta: count(&|tuple| tuple.metadata.is_delta()),
                notes: count(&|tuple| tuple.metadata.is_duration_only()),
                roots: count(&|tuple| tuple.parent.is_none()),
                leaves: count(&|tuple| children(tuple).is_empty()),
                rows: rows.len() as u64,
                pending: rows.iter().filter(is_pending).count() as u64,
                writes: rows.iter().map(|(_, row)| row.writes.len() as u64).sum(),
                first: first.checkpoint.id,
                head: head.checkpoint.id,
                step: head.metadata.step,
            };
            Some((namespace, summary))
        });
        summaries.collect()
    }

    /// Stores a row, or returns every reason for which a saver may refuse it.
    ///
    /// # Errors
    /// The reasons.
    pub fn put_writes(&mut self, at: &CheckpointKey, row: &TaskWrites) -> Result<(), Vec<Refusal>> {
        let applied = self.is_applied(at, row);
        let node = self.nodes.get_mut(at).ok_or_else(|| vec![Refusal::NotFound])?;
        if !applied {
            merge(&mut node.tuple.writes, row);
        }
        Ok(())
    }

    /// Commits, or returns every reason for which a saver may refuse.
    ///
    /// # Errors
    /// The reasons.
    pub fn commit(&mut self, step: &StepCommit) -> Result<(), Vec<Refusal>> {
        step.validate().map_err(|_| vec![Refusal::InvalidInput])?;
        let key = step.key();
        if self.nodes.contains_key(&key) {
            return Ok(());
        }
        let mut refusals = Vec::new();
        let head = self.head(&key.thread, &key.namespace).map(|tuple| tuple.checkpoint.id);
        if head != step.expected_head {
            refusals.push(Refusal::Conflict);
        }
        let parent_key = step.parent.map(|id| CheckpointKey { id, ..key.clone() });
        let parent = parent_key.as_ref().and_then(|key| self.get(key)).cloned();
        if parent_key.is_some() && parent.is_none() {
            refusals.push(Refusal::NotFound);
        }

        let mut rows = parent.as_ref().map(|parent| parent.writes.clone()).unwrap_or_default();
        for row in &step.writes {
            if parent_key.as_ref().is_none_or(|at| !self.is_applied(at, row)) {
                merge(&mut rows, row);
            }
        }
        let mut made_by = Vec::new();
        for task in &step.checkpoint.applied {
            match rows.iter().find(|row| row.task == *task) {
                Some(row) => made_by.extend(row.writes.iter().cloned()),
                None => refusals.push(Refusal::InvalidInput),
            }
        }
        let mut checkpoint = step.checkpoint.clone();
        for (name, entry) in &mut checkpoint.channels {
            let held = parent.as_ref().and_then(|parent| parent.checkpoint.channels.get(name));
            let ours = step.metadata.counters.get(name);
            let parents = parent.as_ref().and_then(|parent| parent.metadata.counters.get(name));
            let fewer = |ours: &Counters, parents: &Counters| {
                ours.updates < parents.updates || ours.supersteps < parents.supersteps
            };
            let counts_fewer = ours.zip(parents).is_some_and(|(ours, parents)| fewer(ours, parents));
            if entry.stored == Stored::Sentinel && held.is_some() && counts_fewer {
                refusals.push(Refusal::Stale);
            }
            if entry.stored == Stored::Held {
                if counts_fewer || ours.is_some() != parents.is_some() {
                    refusals.push(Refusal::Stale);
                }
                match held {
                    Some(held) if held.version == entry.version => entry.stored = held.stored.clone(),
                    _ => refusals.push(Refusal::InvalidInput),
                }
            }
        }
        if !refusals.is_empty() {
            return Err(refusals);
        }

        if let Some(parent) = parent_key.and_then(|key| self.nodes.get_mut(&key)) {
            parent.tuple.writes = rows;
        }
        let mut pending = Vec::new();
        for row in &step.pending {
            merge(&mut pending, row);
        }
        let tuple = CheckpointTuple {
            thread: key.thread.clone(),
            namespace: key.namespace.clone(),
            checkpoint,
            parent: step.parent,
            metadata: step.metadata.clone(),
            writes: pending,
        };
        self.nodes.insert(key, Node { tuple, made_by });
        Ok(())
    }

    /// The paths to a checkpoint. `None` if it, or one of its ancestors, is missing.
    pub fn history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Option<DeltaHistory> {
        let path = |channel: &ChannelName| {
            let mut steps = Vec::new();
            let mut node = self.nodes.get(at)?;
            let seed = loop {
                let checkpoint = &node.tuple.checkpoint;
                let Some(entry) = checkpoint.channels.get(channel) else { break None };
                if let Some(value) = entry.stored.value()
                    && reach.is_none_or(|reach| checkpoint.id <= reach)
                {
                    let (value, version) = (value.clone(), entry.version);
                    break Some(Seed { checkpoint: checkpoint.id, value, version });
                }
                let writes = node.made_by.iter().filter(|write| write.channel == *channel).cloned().collect();
                let tasks = checkpoint.applied.len();
                steps.push(HistoryStep { checkpoint: checkpoint.id, tasks, writes });
                node = self.nodes.get(&CheckpointKey { id: node.tuple.parent?, ..at.clone() })?;
            };
            steps.reverse();
            Some((channel.clone(), ChannelHistory { seed, steps }))
        };
        self.nodes.get(at)?;
        channels.iter().map(path).collect()
    }

    /// The checkpoints of a thread, by place.
    pub fn thread(&self, thread: &ThreadId) -> Vec<&CheckpointTuple> {
        self.nodes.values().map(|node| &node.tuple).filter(|tuple| tuple.thread == *thread).collect()
    }

    /// Removes and puts checkpoints of a thread, unless a checkpoint would lose something it needs.
    ///
    /// # Errors
    /// [`Refusal::InvalidInput`] then.
    pub fn rewrite(&mut self, remove: &[CheckpointKey], put: &[CheckpointTuple]) -> Result<(), Vec<Refusal>> {
        let mut nodes = self.nodes.clone();
        nodes.retain(|key, _| !remove.contains(key));
        for tuple in put {
            nodes.insert(tuple.key(), Node { tuple: tuple.clone(), made_by: Vec::new() });
        }
        for (key, node) in &nodes {
            let parent = node.tuple.parent.map(|id| nodes.get(&CheckpointKey { id, ..key.clone() }));
            let rows = match parent {
                Some(None) => return Err(vec![Refusal::InvalidInput]),
                Some(Some(parent)) => &parent.tuple.writes[..],
                None => &[],
            };
            if node.tuple.checkpoint.applied.iter().any(|task| rows.iter().all(|row| row.task != *task)) {
                return Err(vec![Refusal::InvalidInput]);
            }
        }
        // The current rows define what created a checkpoint.
        let rows: BTreeMap<_, _> =
            nodes.iter().map(|(key, node)| (key.clone(), node.tuple.writes.clone())).collect();
        for (key, node) in &mut nodes {
            let parent = node.tuple.parent.and_then(|id| rows.get(&CheckpointKey { id, ..key.clone() }));
            let row = |task: &TaskId| parent.into_iter().flatten().find(|row| row.task == *task);
            let applied = node.tuple.checkpoint.applied.iter().filter_map(row);
            node.made_by = applied.flat_map(|row| row.writes.iter().cloned()).collect();
        }
        self.nodes = nodes;
        Ok(())
    }

    /// Whether a child has applied the writes of this task under `at`.
    pub fn is_applied(&self, at: &CheckpointKey, row: &TaskWrites) -> bool {
        self.chain(&at.thread, &at.namespace)
            .iter()
            .any(|child| child.parent == Some(at.id) && child.checkpoint.applied.contains(&row.task))
    }

    /// Removes a whole thread.
    pub fn delete_thread(&mut self, thread: &ThreadId) {
        self.nodes.retain(|key, _| key.thread != *thread);
    }
}

/// Removes what a read with this `load` does not return.
pub(super) fn mask(tuple: &mut CheckpointTuple, load: &Load) {
    for (name, entry) in &mut tuple.checkpoint.channels {
        if !load.wants(name) {
            entry.stored = Stored::Held;
        }
    }
}

fn merge(rows: &mut Vec<TaskWrites>, more: &TaskWrites) {
    match rows.iter_mut().find(|row| row.task == more.task) {
        Some(row) => row.merge(more),
        None => rows.push(more.clone()),
    }
}

//! A thread as a graph: parents and children, what is pending, and what the replay of a checkpoint needs.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::channel::ChannelTable;
use crate::checkpoint::{CheckpointTuple, Stored, TaskWrites, Write};
use crate::error::{Error, Result};
use crate::foreign;
use crate::id::{ChannelName, CheckpointId, Namespace, TaskId, ThreadId};
use crate::metadata::Counters;
use crate::saver::{LocalKey, ThreadImage};
use crate::value::ChannelValue;

/// The checkpoints of a thread and the links between them.
#[derive(Debug)]
pub struct Lineage<'a> {
    image: &'a ThreadImage,
    children: HashMap<LocalKey, Vec<&'a CheckpointTuple>>,
    restored_by: HashMap<LocalKey, Vec<&'a CheckpointTuple>>,
}

impl<'a> Lineage<'a> {
    /// The graph of an image.
    pub fn new(image: &'a ThreadImage) -> Self {
        let mut children: HashMap<LocalKey, Vec<&CheckpointTuple>> = HashMap::new();
        let mut restored_by: HashMap<LocalKey, Vec<&CheckpointTuple>> = HashMap::new();
        for ((namespace, _), tuple) in &image.checkpoints {
            if let Some(parent) = older_parent(tuple) {
                children.entry((namespace.clone(), parent)).or_default().push(tuple);
            }
            if let Some(restored) = older_restored(tuple) {
                restored_by.entry((namespace.clone(), restored)).or_default().push(tuple);
            }
        }
        Self { image, children, restored_by }
    }

    /// The image.
    pub fn image(&self) -> &'a ThreadImage {
        self.image
    }

    /// A checkpoint.
    pub fn get(&self, place: &LocalKey) -> Option<&'a CheckpointTuple> {
        self.image.checkpoints.get(place)
    }

    /// The checkpoint's parent, if it has one that exists. One that is not older is none: damaged data may hold a cycle, in
    /// which a walk would never end.
    pub fn parent(&self, tuple: &CheckpointTuple) -> Option<&'a CheckpointTuple> {
        #[cfg(test)]
        super::tests::visit();
        self.get(&(tuple.namespace.clone(), older_parent(tuple)?))
    }

    /// Whether a checkpoint has its parent, and the rows that it applied.
    pub fn is_whole(&self, tuple: &CheckpointTuple) -> bool {
        self.parent(tuple).is_some_and(|parent| {
            let has_row = |task: &TaskId| parent.writes.iter().any(|row| row.task == *task);
            tuple.checkpoint.applied.iter().all(has_row)
        })
    }

    /// Whether a checkpoint may be put again. A damaged one is refused, and with it the whole change.
    pub(crate) fn can_be_put(&self, tuple: &CheckpointTuple) -> bool {
        match tuple.parent {
            Some(_) => self.is_whole(tuple),
            None => tuple.checkpoint.applied.is_empty() && sentinels(tuple).next().is_none(),
        }
    }

    /// The children of a checkpoint, oldest first.
    pub fn children(&self, place: &LocalKey) -> &[&'a CheckpointTuple] {
        self.children.get(place).map_or(&[], Vec::as_slice)
    }

    /// The checkpoints that restore the state of this one, oldest first. They continue it as its children do, but replay
    /// nothing from it.
    pub fn restored_by(&self, place: &LocalKey) -> &[&'a CheckpointTuple] {
        self.restored_by.get(place).map_or(&[], Vec::as_slice)
    }

    /// Everything that a checkpoint continues: its ancestors, what it or one of them restores, and so on; and itself.
    pub fn continued(&self, place: &LocalKey) -> BTreeSet<LocalKey> {
        let (mut all, mut open) = (BTreeSet::new(), vec![place.clone()]);
        while let Some(at) = open.pop() {
            let Some(tuple) = self.get(&at).filter(|_| !all.contains(&at)) else { continue };
            let restored = older_restored(tuple).map(|id| (at.0.clone(), id));
            open.extend(self.parent(tuple).map(self::place).into_iter().chain(restored));
            all.insert(at);
        }
        all
    }

    /// For each checkpoint that goes, the nearest of those it continues that stays: what it restores, or else its
    /// parent, and so on. One of which nothing stays is not in the map.
    pub fn left_of(&self, goes: impl Fn(&LocalKey) -> bool) -> HashMap<LocalKey, CheckpointId> {
        let mut left: HashMap<LocalKey, CheckpointId> = HashMap::new();
        // Those that it continues come before it.
        for (at, tuple) in &self.image.checkpoints {
            if !goes(at) {
                continue;
            }
            // A root continues nothing, as in a walk of the gateway.
            let Some(parent) = older_parent(tuple) else { continue };
            let next = (at.0.clone(), older_restored(tuple).unwrap_or(parent));
            let nearest =
                if goes(&next) { left.get(&next).copied() } else { self.get(&next).map(|_| next.1) };
            left.extend(nearest.map(|id| (at.clone(), id)));
        }
        left
    }

    /// A checkpoint and its ancestors, newest first. Ends where a parent is missing or not older.
    pub fn lineage<'s>(
        &'s self,
        place: &LocalKey,
    ) -> impl Iterator<Item = &'a CheckpointTuple> + use<'a, 's> {
        std::iter::successors(self.get(place), |tuple| self.parent(tuple))
    }

    /// The newest checkpoint of each namespace.
    pub fn heads(&self) -> BTreeMap<Namespace, CheckpointId> {
        let places = self.image.checkpoints.keys();
        places.map(|(namespace, id)| (namespace.clone(), *id)).collect() // The greatest id comes last.
    }

    /// The newest checkpoint of each namespace that is not duration-only: the one to resume from.
    pub fn resumable_heads(&self) -> BTreeMap<Namespace, CheckpointId> {
        let real = self.image.checkpoints.iter().filter(|(_, tuple)| !tuple.metadata.is_duration_only());
        real.map(|((namespace, id), _)| (namespace.clone(), *id)).collect()
    }

    /// The rows under a checkpoint that no child applied.
    pub fn pending(&self, tuple: &'a CheckpointTuple) -> impl Iterator<Item = &'a TaskWrites> {
        let children = self.children(&place(tuple));
        let applied: BTreeSet<_> = children.iter().flat_map(|child| &child.checkpoint.applied).collect();
        tuple.writes.iter().filter(move |row| !applied.contains(&row.task))
    }

    /// What must stay so that these channels can be replayed at `target`: it, and its ancestors back to the nearest one
    /// that stores a value for each channel, or to the root for a channel without one.
    pub fn keep_set<'c>(
        &self,
        target: &LocalKey,
        channels: impl IntoIterator<Item = &'c ChannelName>,
    ) -> BTreeSet<LocalKey> {
        let mut keep: BTreeSet<LocalKey> = self.get(target).into_iter().map(place).collect();
        for channel in channels {
            keep.extend(self.path(target, channel).map(place));
        }
        keep
    }

    /// A checkpoint and its ancestors, newest first, back to the nearest one that stores a value for this channel.
    fn path(&self, from: &LocalKey, channel: &ChannelName) -> impl Iterator<Item = &'a CheckpointTuple> {
        let mut found = false;
        self.lineage(from).take_while(move |tuple| {
            let entry = tuple.checkpoint.channels.get(channel);
            !std::mem::replace(&mut found, entry.is_some_and(|entry| entry.stored.value().is_some()))
        })
    }

    /// Everything that must stay so that each of `targets`, and each checkpoint that stays for their sake, can be
    /// replayed.
    pub fn replay_closure(&self, targets: &BTreeSet<LocalKey>) -> BTreeSet<LocalKey> {
        let mut keep = targets.clone();
        let mut open: Vec<LocalKey> = targets.iter().cloned().collect();
        // Paths that meet are the same from there on.
        let mut walked: HashSet<(&Namespace, CheckpointId, &ChannelName)> = HashSet::new();
        while let Some(at) = open.pop() {
            let Some(tuple) = self.get(&at) else { continue };
            for channel in sentinels(tuple) {
                for needed in self.path(&at, channel) {
                    if !walked.insert((&needed.namespace, needed.checkpoint.id, channel)) {
                        break;
                    }
                    if keep.insert(place(needed)) {
                        open.push(place(needed));
                    }
                }
            }
        }
        keep
    }

    /// The value of a channel at a checkpoint, replayed if it is not stored there; `None` if it was never written.
    ///
    /// # Errors
    /// [`Error::BrokenLineage`] if something it needs is missing, or it was written less often than its counters say;
    /// [`Error::ForeignChanges`] if LangGraph changed it since it was last stored as a value; [`Error::InvalidInput`]
    /// if `table` does not have the channel and something was written to it since; those of the channel's reducer.
    pub fn value(
        &self,
        at: &CheckpointTuple,
        channel: &ChannelName,
        table: &ChannelTable,
    ) -> Result<Option<ChannelValue>> {
        let broken = |why: String| Error::broken(&self.image.thread, at.checkpoint.id, why);
        // From the checkpoint back to the seed, with the writes that each one applied.
        let mut steps: Vec<Vec<&Write>> = Vec::new();
        let mut path = Counters::default();
        let mut child = at;
        let mut value = loop {
            match child.checkpoint.channels.get(channel).map(|entry| (&entry.stored, entry.version)) {
                None => break None,
                Some((Stored::Value(value) | Stored::Snapshot(value), version)) => {
                    let mut value = value.clone();
                    if let ChannelValue::List(list) = &mut value {
                        list.rebase(version);
                    }
                    break Some(value);
                }
                Some((Stored::Sentinel | Stored::Held, _)) => {}
            }
            let parent = self.parent(child);
            if foreign::changed(child, parent, channel) {
                return Err(foreign::not_replayed(at, channel));
            }
            let parent = parent.ok_or_else(|| {
                broken(format!("the lineage ends at {} without a value of {channel}", child.checkpoint.id))
            })?;
            let mut writes = Vec::new();
            for task in &child.checkpoint.applied {
                let row = parent.writes.iter().find(|row| row.task == *task);
                let row = row.ok_or_else(|| broken(format!("the writes of task {task} are missing")))?;
                writes.extend(row.writes.iter().filter(|write| write.channel == *channel));
            }
            path.updates += u64::from(!writes.is_empty());
            path.supersteps += u64::from(!child.checkpoint.applied.is_empty());
            steps.push(writes);
            child = parent;
        };
        let counters = at.metadata.counters.get(channel);
        if let Some(missing) = counters.and_then(|counters| counters.lacking_in(path, channel)) {
            return Err(broken(missing));
        }
        for writes in steps.iter().rev().filter(|writes| !writes.is_empty()) {
            let behaviour =
                table.behaviour(channel).ok_or_else(|| cannot_replay(&self.image.thread, channel))?;
            value = behaviour.apply(channel, value, writes)?;
        }
        Ok(value)
    }
}

/// The error of changes of a channel that the table does not have.
pub(crate) fn cannot_replay(thread: &ThreadId, channel: &ChannelName) -> Error {
    Error::InvalidInput(format!(
        "thread {thread}: channel {channel} is stored as changes, and this program cannot replay it"
    ))
}

/// The parent that a checkpoint names, unless that is not older.
fn older_parent(tuple: &CheckpointTuple) -> Option<CheckpointId> {
    tuple.parent.filter(|parent| *parent < tuple.checkpoint.id)
}

/// The checkpoint that a checkpoint restores, unless that is not older.
fn older_restored(tuple: &CheckpointTuple) -> Option<CheckpointId> {
    tuple.metadata.restored().filter(|restored| *restored < tuple.checkpoint.id)
}

/// The place of a checkpoint.
pub(crate) fn place(tuple: &CheckpointTuple) -> LocalKey {
    (tuple.namespace.clone(), tuple.checkpoint.id)
}

/// The channels that a checkpoint stores as changes.
pub(crate) fn sentinels(tuple: &CheckpointTuple) -> impl Iterator<Item = &ChannelName> {
    let entries = tuple.checkpoint.channels.iter();
    entries.filter(|(_, entry)| entry.stored == Stored::Sentinel).map(|(name, _)| name)
}

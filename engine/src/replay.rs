//! The values of every checkpoint of a thread, each derived from its parent's, so that a pass over a whole thread costs
//! only what its checkpoints changed.

use std::collections::{BTreeMap, HashMap};

use crate::channel::ChannelTable;
use crate::checkpoint::{CheckpointTuple, Stored, Write};
use crate::deletion::{Lineage, cannot_replay};
use crate::error::{Error, Result};
use crate::foreign::ForeignChanges;
use crate::id::{ChannelName, TaskId};
use crate::metadata::Counters;
use crate::saver::LocalKey;
use crate::value::ChannelValue;

/// The values of a checkpoint.
pub(crate) type Values = BTreeMap<ChannelName, ChannelValue>;

/// The values of every checkpoint of a thread, each derived from its parent's.
pub(crate) struct Replay<'a> {
    lineage: &'a Lineage<'a>,
    table: &'a ChannelTable,
    /// They have no value here.
    foreign: ForeignChanges,
    done: HashMap<LocalKey, Values>,
    /// What was replayed since the nearest value of each channel that is stored as changes.
    paths: HashMap<LocalKey, BTreeMap<ChannelName, Counters>>,
}

impl<'a> Replay<'a> {
    pub(crate) fn new(lineage: &'a Lineage<'a>, table: &'a ChannelTable) -> Self {
        let foreign = ForeignChanges::new(lineage);
        Self { lineage, table, foreign, done: HashMap::new(), paths: HashMap::new() }
    }

    /// What only LangGraph can replay.
    pub(crate) fn foreign(&self) -> &ForeignChanges {
        &self.foreign
    }

    /// The complete values at a checkpoint whose parent was already requested, but for foreign changes.
    ///
    /// # Errors
    /// As a read of the checkpoint: [`Error::BrokenLineage`] also where a channel was never written, or was written
    /// less often than its counters say. The first of several channels is named.
    pub(crate) fn values(&mut self, place: &LocalKey, tuple: &CheckpointTuple) -> Result<Values> {
        let (mut values, mut paths) = (Values::new(), BTreeMap::new());
        let mut broken = None;
        for (name, entry) in &tuple.checkpoint.channels {
            let value = match &entry.stored {
                Stored::Value(value) | Stored::Snapshot(value) => Some(value.clone()),
                Stored::Held => None,
                // That its writes are there is checked row by row.
                Stored::Sentinel if self.foreign.contains(place, name) => None,
                Stored::Sentinel => match self.replayed(tuple, name) {
                    Ok((value, path)) => {
                        paths.insert(name.clone(), path);
                        Some(value)
                    }
                    // Its children may read fine: they may store this channel, and go on from the others.
                    Err(error) => {
                        broken.get_or_insert(error);
                        None
                    }
                },
            };
            if let Some(mut value) = value {
                if let ChannelValue::List(list) = &mut value {
                    list.rebase(entry.version);
                }
                values.insert(name.clone(), value);
            }
        }
        self.done.insert(place.clone(), values.clone());
        if !paths.is_empty() {
            self.paths.insert(place.clone(), paths);
        }
        broken.map_or(Ok(values), Err)
    }

    /// The value of a channel that a checkpoint stores as changes, and its path.
    fn replayed(&self, tuple: &CheckpointTuple, name: &ChannelName) -> Result<(ChannelValue, Counters)> {
        let broken = |missing: String| Error::broken(&tuple.thread, tuple.checkpoint.id, missing);
        let parent = self.lineage.parent(tuple).ok_or_else(|| {
            broken(format!("channel {name} is stored as changes, and its parent is missing"))
        })?;
        let applied = &tuple.checkpoint.applied;
        let writes = written(parent, applied, name)?;
        let mut path = self.path(parent, name);
        path.updates += u64::from(!writes.is_empty());
        path.supersteps += u64::from(!applied.is_empty());
        let value = self.next(parent, &writes, name)?;
        let value = value.ok_or_else(|| broken(format!("no write of channel {name} was found")))?;
        let counters = tuple.metadata.counters.get(name);
        if let Some(missing) = counters.and_then(|counters| counters.lacking_in(path, name)) {
            return Err(broken(missing));
        }
        Ok((value, path))
    }

    /// The path of a channel up to `parent`.
    fn path(&self, parent: &CheckpointTuple, name: &ChannelName) -> Counters {
        let place = (parent.namespace.clone(), parent.checkpoint.id);
        self.paths.get(&place).and_then(|paths| paths.get(name)).copied().unwrap_or_default()
    }

    /// The value of a channel after `parent`, with these writes applied.
    fn next(
        &self,
        parent: &CheckpointTuple,
        writes: &[&Write],
        name: &ChannelName,
    ) -> Result<Option<ChannelValue>> {
        let behaviour = self.table.behaviour(name);
        let is_held = parent.checkpoint.channels.contains_key(name);
        // What nothing was written to needs no reducer.
        if behaviour.is_none() && !(is_held && writes.is_empty()) {
            return Err(cannot_replay(&parent.thread, name));
        }
        let place = (parent.namespace.clone(), parent.checkpoint.id);
        let current = if is_held {
            let value = self.done.get(&place).and_then(|values| values.get(name).cloned());
            Some(value.ok_or_else(|| {
                let missing = format!("the value of channel {name} cannot be determined");
                Error::broken(&parent.thread, parent.checkpoint.id, missing)
            })?)
        } else {
            None
        };
        match behaviour {
            Some(behaviour) => behaviour.apply(name, current, writes),
            None => Ok(current),
        }
    }

    /// Whether replaying these tasks on `parent` gives the value.
    pub(crate) fn gives(
        &self,
        parent: &CheckpointTuple,
        applied: &[TaskId],
        name: &ChannelName,
        values: &Values,
    ) -> Result<bool> {
        let replayed = written(parent, applied, name).and_then(|writes| self.next(parent, &writes, name));
        match replayed {
            Ok(replayed) => Ok(replayed.as_ref() == values.get(name)),
            Err(Error::InvalidUpdate(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// What these tasks, which ran from `parent`, wrote to a channel.
fn written<'t>(
    parent: &'t CheckpointTuple,
    applied: &[TaskId],
    name: &ChannelName,
) -> Result<Vec<&'t Write>> {
    let mut writes = Vec::new();
    for task in applied {
        let row = parent.writes.iter().find(|row| row.task == *task).ok_or_else(|| {
            let missing = format!("the writes of task {task} are missing");
            Error::broken(&parent.thread, parent.checkpoint.id, missing)
        })?;
        writes.extend(row.writes.iter().filter(|write| write.channel == *name));
    }
    Ok(writes)
}

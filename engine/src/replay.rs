//! The values of every checkpoint of a thread, each derived from its parent's, so that a pass over a whole thread costs
//! only what its checkpoints changed.

use std::collections::{BTreeMap, HashMap};

use crate::channel::ChannelTable;
use crate::checkpoint::{CheckpointTuple, Stored, Write};
use crate::deletion::{Lineage, cannot_replay};
use crate::error::{Error, Result};
use crate::foreign::ForeignChanges;
use crate::id::{ChannelName, TaskId};
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
}

impl<'a> Replay<'a> {
    pub(crate) fn new(lineage: &'a Lineage<'a>, table: &'a ChannelTable) -> Self {
        Self { lineage, table, foreign: ForeignChanges::new(lineage), done: HashMap::new() }
    }

    /// What only LangGraph can replay.
    pub(crate) fn foreign(&self) -> &ForeignChanges {
        &self.foreign
    }

    /// The complete values at a checkpoint whose parent was already requested, but for foreign changes.
    pub(crate) fn values(&mut self, place: &LocalKey, tuple: &CheckpointTuple) -> Result<Values> {
        let mut values = Values::new();
        for (name, entry) in &tuple.checkpoint.channels {
            let value = match &entry.stored {
                Stored::Value(value) | Stored::Snapshot(value) => Some(value.clone()),
                Stored::Held => None,
                // That its writes are there is checked row by row.
                Stored::Sentinel if self.foreign.contains(place, name) => None,
                Stored::Sentinel => {
                    let parent = self.lineage.parent(tuple).ok_or_else(|| {
                        let missing =
                            format!("channel {name} is stored as changes, and its parent is missing");
                        Error::broken(&tuple.thread, tuple.checkpoint.id, missing)
                    })?;
                    self.next(parent, &tuple.checkpoint.applied, name)?
                }
            };
            if let Some(mut value) = value {
                if let ChannelValue::List(list) = &mut value {
                    list.rebase(entry.version);
                }
                values.insert(name.clone(), value);
            }
        }
        self.done.insert(place.clone(), values.clone());
        Ok(values)
    }

    /// The value of a channel after `parent`, with these tasks applied.
    fn next(
        &self,
        parent: &CheckpointTuple,
        applied: &[TaskId],
        name: &ChannelName,
    ) -> Result<Option<ChannelValue>> {
        let mut writes: Vec<&Write> = Vec::new();
        for task in applied {
            let row = parent.writes.iter().find(|row| row.task == *task).ok_or_else(|| {
                Error::broken(
                    &parent.thread,
                    parent.checkpoint.id,
                    format!("the writes of task {task} are missing"),
                )
            })?;
            writes.extend(row.writes.iter().filter(|write| write.channel == *name));
        }
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
            Some(behaviour) => behaviour.apply(name, current, &writes),
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
        match self.next(parent, applied, name) {
            Ok(replayed) => Ok(replayed.as_ref() == values.get(name)),
            Err(Error::InvalidUpdate(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

//! The values of every checkpoint of a thread, each derived from its parent's, so that a pass over a whole thread costs
//! only what its checkpoints changed, and holds the values of those only whose children are still to come.

use std::collections::{BTreeMap, HashMap};

use crate::channel::ChannelTable;
use crate::checkpoint::{CheckpointTuple, Stored, Write};
use crate::deletion::{Lineage, cannot_replay};
use crate::error::{Error, Result};
use crate::foreign::ForeignChanges;
use crate::id::{ChannelName, CheckpointId, TaskId};
use crate::metadata::Counters;
use crate::saver::LocalKey;
use crate::value::ChannelValue;

/// The values of a checkpoint.
pub(crate) type Values = BTreeMap<ChannelName, ChannelValue>;

/// What the children of a checkpoint need of it besides the checkpoint.
#[derive(Debug, Default)]
pub(crate) struct Made {
    /// Its values.
    pub(crate) values: Values,
    /// What was replayed since the nearest value of each channel that is stored as changes.
    paths: BTreeMap<ChannelName, Counters>,
}

/// A checkpoint, and what its children need of it.
pub(crate) type Parent<'a> = (&'a CheckpointTuple, &'a Made);

/// The complete values at a checkpoint, but for foreign changes. They lack a channel that cannot be replayed; the error is
/// that of the first one.
///
/// The error is as that of a read of the checkpoint: [`Error::BrokenLineage`] also where a channel was never written, or was
/// written less often than its counters say.
pub(crate) fn made(
    table: &ChannelTable,
    tuple: &CheckpointTuple,
    parent: Option<Parent<'_>>,
    is_foreign: impl Fn(&ChannelName) -> bool,
) -> (Made, Option<Error>) {
    let (mut made, mut broken) = (Made::default(), None);
    for (name, entry) in &tuple.checkpoint.channels {
        let value = match &entry.stored {
            Stored::Value(value) | Stored::Snapshot(value) => Some(value.clone()),
            Stored::Held => None,
            // That its writes are there is checked row by row.
            Stored::Sentinel if is_foreign(name) => None,
            Stored::Sentinel => match replayed(table, tuple, parent, name) {
                Ok((value, path)) => {
                    made.paths.insert(name.clone(), path);
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
            made.values.insert(name.clone(), value);
        }
    }
    (made, broken)
}

/// The value of a channel that a checkpoint stores as changes, and its path.
fn replayed(
    table: &ChannelTable,
    tuple: &CheckpointTuple,
    parent: Option<Parent<'_>>,
    name: &ChannelName,
) -> Result<(ChannelValue, Counters)> {
    let broken = |missing: String| Error::broken(&tuple.thread, tuple.checkpoint.id, missing);
    let parent = parent
        .ok_or_else(|| broken(format!("channel {name} is stored as changes, and its parent is missing")))?;
    let applied = &tuple.checkpoint.applied;
    let writes = written(parent.0, applied, name)?;
    let mut path = parent.1.paths.get(name).copied().unwrap_or_default();
    path.updates += u64::from(!writes.is_empty());
    path.supersteps += u64::from(!applied.is_empty());
    let value = next(table, parent, &writes, name)?;
    let value = value.ok_or_else(|| broken(format!("no write of channel {name} was found")))?;
    let counters = tuple.metadata.counters.get(name);
    if let Some(missing) = counters.and_then(|counters| counters.lacking_in(path, name)) {
        return Err(broken(missing));
    }
    Ok((value, path))
}

/// The value of a channel after `parent`, with these writes applied.
fn next(
    table: &ChannelTable,
    (parent, made): Parent<'_>,
    writes: &[&Write],
    name: &ChannelName,
) -> Result<Option<ChannelValue>> {
    let behaviour = table.behaviour(name);
    let is_held = parent.checkpoint.channels.contains_key(name);
    // What nothing was written to needs no reducer.
    if behaviour.is_none() && !(is_held && writes.is_empty()) {
        return Err(cannot_replay(&parent.thread, name));
    }
    let current = if is_held {
        let value = made.values.get(name).cloned();
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
    table: &ChannelTable,
    parent: Parent<'_>,
    applied: &[TaskId],
    (name, value): (&ChannelName, Option<&ChannelValue>),
) -> Result<bool> {
    let replayed = written(parent.0, applied, name).and_then(|writes| next(table, parent, &writes, name));
    match replayed {
        Ok(replayed) => Ok(replayed.as_ref() == value),
        Err(Error::InvalidUpdate(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The values of every checkpoint of a thread, each derived from its parent's. They are requested once each, those of a
/// namespace in the order of their ids.
pub(crate) struct Replay<'a> {
    lineage: &'a Lineage<'a>,
    table: &'a ChannelTable,
    /// They have no value here.
    foreign: ForeignChanges,
    /// Of the checkpoints that have children whose values were not requested yet, and of the latest one and its parent.
    done: HashMap<LocalKey, Made>,
    /// The checkpoint whose values were requested last, and its parent.
    latest: Option<(LocalKey, Option<CheckpointId>)>,
}

impl<'a> Replay<'a> {
    pub(crate) fn new(lineage: &'a Lineage<'a>, table: &'a ChannelTable) -> Self {
        let foreign = ForeignChanges::new(lineage);
        Self { lineage, table, foreign, done: HashMap::new(), latest: None }
    }

    /// What only LangGraph can replay.
    pub(crate) fn foreign(&self) -> &ForeignChanges {
        &self.foreign
    }

    /// Drops what no checkpoint after the latest one needs: its own values, if it has no children, and its parent's, if it
    /// is the last of its children.
    fn drop_unneeded(&mut self) {
        let Some((place, parent)) = self.latest.take() else { return };
        let parent = parent.map(|id| (place.0.clone(), id));
        for of in parent.iter().chain([&place]) {
            // They are sorted by id.
            let last = self.lineage.children(of).last();
            if last.is_none_or(|child| child.checkpoint.id <= place.1) {
                self.done.remove(of);
            }
        }
    }

    /// The complete values at a checkpoint whose parent was already requested, but for foreign changes.
    ///
    /// # Errors
    /// As [`made`].
    pub(crate) fn values(&mut self, place: &LocalKey, tuple: &CheckpointTuple) -> Result<Values> {
        self.drop_unneeded();
        let parent = self.lineage.parent(tuple);
        let done = parent.and_then(|parent| self.done.get(&(place.0.clone(), parent.checkpoint.id)));
        let (none, foreign) = (Made::default(), &self.foreign);
        let parent = parent.map(|parent| (parent, done.unwrap_or(&none)));
        let (made, broken) = made(self.table, tuple, parent, |name| foreign.contains(place, name));
        let values = made.values.clone();
        self.latest = Some((place.clone(), tuple.parent));
        self.done.insert(place.clone(), made);
        broken.map_or(Ok(values), Err)
    }

    /// Whether replaying these tasks on `parent`, which is the parent of the latest checkpoint, gives the value.
    pub(crate) fn gives(
        &self,
        parent: &CheckpointTuple,
        applied: &[TaskId],
        name: &ChannelName,
        values: &Values,
    ) -> Result<bool> {
        let none = Made::default();
        let done = self.done.get(&(parent.namespace.clone(), parent.checkpoint.id));
        gives(self.table, (parent, done.unwrap_or(&none)), applied, (name, values.get(name)))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::Schema;
    use crate::checkpoint::{ChannelEntry, Checkpoint};
    use crate::id::{Namespace, ThreadId, Version};
    use crate::metadata::{Metadata, Source};
    use crate::mode::ChannelMode;
    use crate::saver::ThreadImage;

    /// Checkpoints by number, each with its parent.
    fn image(parents: &[Option<u8>]) -> ThreadImage {
        let thread = ThreadId::from("t");
        let id = |number: u8| CheckpointId::from_bytes([number; 16]);
        let tuple = |(number, parent): (u8, &Option<u8>)| {
            let version = Version { counter: number.into(), random: 0 };
            let value = ChannelValue::from_json(&number.into()).unwrap();
            let entry = ChannelEntry { version, stored: Stored::Value(value) };
            let (channels, next) = ([("title".into(), entry)].into(), Vec::new());
            let tuple = CheckpointTuple {
                thread: thread.clone(),
                namespace: Namespace::root(),
                checkpoint: Checkpoint { id: id(number), channels, next, applied: Vec::new() },
                parent: parent.map(id),
                metadata: Metadata::new(Source::Loop, 1),
                writes: Vec::new(),
            };
            ((Namespace::root(), id(number)), tuple)
        };
        let checkpoints = (1..).zip(parents).map(tuple).collect();
        ThreadImage { checkpoints, ..ThreadImage::absent(&thread) }
    }

    #[test]
    fn values_are_held_as_long_as_children_need_them() {
        let table = Schema::thread_state().compile(ChannelMode::Delta, 3).unwrap();
        // A chain of five with a fork from the second, which is needed until that comes, and a root of its own.
        let image = image(&[None, Some(1), Some(2), Some(3), Some(4), Some(2), Some(6), None]);
        let lineage = Lineage::new(&image);
        let mut replay = Replay::new(&lineage, &table);
        let mut held = Vec::new();
        for (place, tuple) in &image.checkpoints {
            replay.values(place, tuple).unwrap();
            let mut numbers: Vec<u8> = replay.done.keys().map(|(_, id)| id.as_bytes()[0]).collect();
            numbers.sort_unstable();
            held.push(numbers);
        }
        let expected: [&[u8]; 8] = [&[1], &[1, 2], &[2, 3], &[2, 3, 4], &[2, 4, 5], &[2, 6], &[6, 7], &[8]];
        assert_eq!(held, expected);
    }
}

//! The contract's commit, put of writes and deletion, on what is stored when they are planned.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use threadkeep::checkpoint::{CheckpointKey, Stored, TaskWrites};
use threadkeep::id::{CheckpointId, Namespace, TaskId, ThreadId};
use threadkeep::saver::StepCommit;
use threadkeep::value::{ChannelValue, ListValue};
use threadkeep::{Error, Result};
use threadkeep_layout::Shape;

use crate::draft::{Base, Draft, shape};
use crate::keys::{self, Key, under};
use crate::memo::Memo;
use crate::overlay::Overlay;
use crate::reader::{Reader, thread};
use crate::record::{CheckpointRecord, Mark, StoredChannel};
use crate::rows;
use crate::store::{Order, Snapshot};

/// Stores a step. The caller has validated it.
pub(crate) fn commit(rows: &mut Overlay<'_>, memo: &Memo, step: &StepCommit, mark: Mark) -> Result<()> {
    let (namespace, id) = (&step.namespace, step.checkpoint.id);
    let mut draft = Draft::of_any(rows, &step.thread, memo)?;
    if draft.rows.get(&keys::checkpoint(draft.thread.number, namespace, id))?.is_some() {
        return Ok(());
    }
    let mut reader = draft.reader();
    let found = reader.head(namespace)?;
    if found != step.expected_head {
        let (thread, namespace) = (step.thread.clone(), namespace.clone());
        return Err(Error::Conflict { thread, namespace, expected: step.expected_head, found });
    }
    let parent = match step.parent {
        None => None,
        Some(parent) => {
            let record = reader.record(namespace, parent)?;
            Some(record.ok_or_else(|| not_found(&step.thread, parent))?)
        }
    };
    if let Some(CheckpointRecord { channels, counters, .. }) = &parent {
        step.check_parent(|name| {
            Ok(channels.get(name).map(|held| (held.version, counters.get(name).copied())))
        })?;
    }
    check_applied(&reader, step)?;
    let bases = bases(&draft, &mut reader, step, parent.as_ref())?;

    if let Some(parent) = step.parent {
        for task in &step.writes {
            put_task(&mut draft, (namespace, parent), task)?;
        }
    }
    let mut channels = BTreeMap::new();
    for (channel, entry) in &step.checkpoint.channels {
        let held = parent.as_ref().and_then(|parent| parent.channels.get(channel));
        let kept = match (&entry.stored, held) {
            (Stored::Held, Some(held)) => held.kept.clone(),
            (stored, _) => {
                let (kept, shape) = draft.kept(stored, bases.get(channel.as_str()))?;
                if stored.value().is_some() {
                    draft.remember((namespace.clone(), channel.clone()), entry.version, shape);
                }
                kept
            }
        };
        channels.insert(channel.clone(), StoredChannel { version: entry.version, kept });
    }
    let record = CheckpointRecord {
        parent: step.parent,
        next: step.checkpoint.next.clone(),
        applied: step.checkpoint.applied.clone(),
        channels,
        ..draft.described(&step.metadata)?
    };
    draft.put((namespace, id), &record)?;
    for task in &step.pending {
        put_task(&mut draft, (namespace, id), task)?;
    }
    draft.done(mark);
    Ok(())
}

/// The shapes of the lists that the step's lists were made from, by channel: those that the parent stores, or that are
/// remembered. The elements of other lists are looked up one by one.
fn bases<'s>(
    draft: &Draft<'_, '_>,
    reader: &mut Reader<'_>,
    step: &'s StepCommit,
    parent: Option<&CheckpointRecord>,
) -> Result<BTreeMap<&'s str, Shape>> {
    let mut bases = BTreeMap::new();
    for (channel, entry) in &step.checkpoint.channels {
        let Some(version) = entry.stored.value().and_then(ChannelValue::as_list).and_then(ListValue::base)
        else {
            continue;
        };
        let stored = match parent {
            Some(parent) => shape(reader, parent, channel, version)?,
            None => Base::Elsewhere,
        };
        let base = match stored {
            Base::List(shape) => Some(shape),
            Base::Whole => None,
            Base::Elsewhere => draft.remembered(&(step.namespace.clone(), channel.clone()), version),
        };
        bases.extend(base.map(|base| (channel.as_str(), base)));
    }
    Ok(bases)
}

/// Checks that the tasks which the checkpoint applied are known.
fn check_applied(reader: &Reader<'_>, step: &StepCommit) -> Result<()> {
    for task in &step.checkpoint.applied {
        let comes = step.writes.iter().any(|writes| writes.task == *task);
        let stored = match step.parent {
            Some(parent) if !comes => reader.task(&step.namespace, parent, *task)?.is_some(),
            _ => comes,
        };
        if !stored {
            return Err(Error::InvalidInput(format!(
                "commit of checkpoint {} to thread {}: it applies task {task}, which has no writes under its parent",
                step.checkpoint.id, step.thread
            )));
        }
    }
    Ok(())
}

pub(crate) fn put_writes(
    rows: &mut Overlay<'_>,
    memo: &Memo,
    at: &CheckpointKey,
    task: &TaskWrites,
    mark: Mark,
) -> Result<()> {
    let missing = || not_found(&at.thread, at.id);
    let mut draft = Draft::of(rows, &at.thread, memo)?.ok_or_else(missing)?;
    let key = keys::checkpoint(draft.thread.number, &at.namespace, at.id);
    draft.rows.get(&key)?.ok_or_else(missing)?;
    if put_task(&mut draft, (&at.namespace, at.id), task)? {
        draft.done(mark);
    }
    Ok(())
}

/// Puts the writes of a task under a checkpoint. Returns whether that changed anything.
fn put_task(
    draft: &mut Draft<'_, '_>,
    (namespace, id): (&Namespace, CheckpointId),
    task: &TaskWrites,
) -> Result<bool> {
    let mut reader = draft.reader();
    let place = match reader.task(namespace, id, task.task)? {
        None => None,
        Some(record) => {
            let stored = reader.writes(task.task, &record, |_| true)?;
            let mut merged = stored.clone();
            merged.merge(task);
            if merged == stored || is_applied(&mut reader, (namespace, id), task.task)? {
                return Ok(false);
            }
            draft.put_task((namespace, id), &merged, Some(record.place))?;
            return Ok(true);
        }
    };
    draft.put_task((namespace, id), task, place)?;
    Ok(true)
}

/// Whether a child of the checkpoint has applied its task. Children are newer than their parent, so this looks from the
/// head back to it; rows hardly ever change once they are stored.
fn is_applied(
    reader: &mut Reader<'_>,
    (namespace, id): (&Namespace, CheckpointId),
    task: TaskId,
) -> Result<bool> {
    let number = reader.thread();
    let mut newer = under(keys::chain(number, namespace));
    newer.start = keys::checkpoint(number, namespace, id);
    let mut applied = false;
    reader.rows().range(&newer.start..&newer.end, Order::Descending, &mut |key, value| {
        let record = reader.decode(key, rows::opened(key, value)?)?;
        applied = record.parent == Some(id) && record.applied.contains(&task);
        Ok(if applied { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    Ok(applied)
}

/// Deletes everything of a thread.
pub(crate) fn delete_thread(rows: &mut Overlay<'_>, memo: &Memo, id: &ThreadId) -> Result<()> {
    let Some(found) = thread(rows, id)? else { return Ok(()) };
    memo.forget(found.number);
    delete_under(rows, keys::all(found.number))?;
    rows.delete(keys::thread(id));
    Ok(())
}

/// Deletes the rows whose keys begin with `prefix`.
pub(crate) fn delete_under(rows: &mut Overlay<'_>, prefix: Key) -> Result<()> {
    let keys = under(prefix);
    let mut dead = Vec::new();
    rows.range(&keys.start..&keys.end, Order::Ascending, &mut |key, _| {
        dead.push(key.to_vec());
        Ok(ControlFlow::Continue(()))
    })?;
    for key in dead {
        rows.delete(key);
    }
    Ok(())
}

pub(crate) fn not_found(thread: &ThreadId, checkpoint: CheckpointId) -> Error {
    Error::NotFound { thread: thread.clone(), checkpoint }
}

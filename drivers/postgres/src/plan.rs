//! Planning a write from what is known of its thread. Pure: nothing here talks to the server.

use std::sync::Arc;

use threadkeep::checkpoint::{CheckpointKey, Stored, TaskWrites, Write};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, ThreadId};
use threadkeep::metadata::Metadata;
use threadkeep::saver::{Flush, StepCommit};
use threadkeep::value::{ChannelValue, Codec, Encoded};
use threadkeep::{Error, Result};
use threadkeep_layout::Form;

use crate::change::Change;
use crate::doubt::Request;
use crate::draft::{Draft, Drafted};
use crate::history::History;
use crate::keys;
use crate::record::{CheckpointRecord, Kept, StoredChannel, TaskRecord, WriteRecord};
use crate::rows::Node;
use crate::thread::ThreadState;

/// A write that is ready to be sent.
pub(crate) struct Planned {
    pub(crate) change: Change,
    /// Whether it commits onto the head of a namespace.
    pub(crate) goes_on: bool,
    pub(crate) after: After,
}

/// What is known once it was written.
pub(crate) struct After {
    drafted: Drafted,
    pub(crate) to: History,
    /// Whether it creates the thread.
    pub(crate) creates: bool,
    head: Option<(Namespace, Arc<Node>)>,
}

impl After {
    /// The request to the server.
    pub(crate) fn request(&self) -> Request {
        Request::Write { to: self.to.moment(), creates: self.creates }
    }

    /// Remembers that it was written.
    pub(crate) fn note(self, state: &mut ThreadState) {
        self.drafted.note(state);
        state.history = Some(self.to);
        if let Some((namespace, node)) = self.head {
            state.heads.put(namespace, Some(node));
        }
    }
}

/// A commit onto a thread: `head` is the head of its namespace, `parent` the checkpoint that it names as parent.
///
/// # Errors
/// The contract's errors for a commit that cannot be stored.
pub(crate) fn commit(
    step: &StepCommit,
    state: &ThreadState,
    head: Option<&Node>,
    parent: Option<&Node>,
) -> Result<Planned> {
    let found = head.map(|head| head.id);
    if found != step.expected_head {
        let (thread, namespace) = (step.thread.clone(), step.namespace.clone());
        return Err(Error::Conflict { thread, namespace, expected: step.expected_head, found });
    }
    let parent = match (step.parent, parent) {
        (None, _) => None,
        (Some(id), None) => return Err(not_found(&step.thread, id)),
        (Some(_), Some(parent)) => Some(parent),
    };
    if let Some(CheckpointRecord { channels, counters, .. }) = parent.map(|parent| &parent.record) {
        step.check_parent(|name| {
            Ok(channels.get(name).map(|held| (held.version, counters.get(name).copied())))
        })?;
    }
    check_applied(step, parent.map_or(&[], |parent| &parent.tasks))?;
    let mut draft = Draft::new(state);
    let under_parent = match parent {
        Some(parent) if !step.writes.is_empty() => {
            let tasks = put_tasks(&mut draft, &parent.tasks, &step.writes)?;
            (tasks != parent.tasks).then(|| parent.with(tasks))
        }
        _ => None,
    };
    let mut channels = std::collections::BTreeMap::new();
    for (channel, entry) in &step.checkpoint.channels {
        let held = parent.and_then(|parent| parent.record.channels.get(channel));
        let kept = match (&entry.stored, held) {
            (Stored::Held, Some(held)) => held.kept.clone(),
            (stored, _) => kept(&mut draft, &step.namespace, channel, entry.version, stored, parent)?,
        };
        channels.insert(channel.clone(), StoredChannel { version: entry.version, kept });
    }
    let record = CheckpointRecord {
        parent: step.parent,
        next: step.checkpoint.next.clone(),
        applied: step.checkpoint.applied.clone(),
        channels,
        ..described(&mut draft, &step.metadata)?
    };
    let tasks = put_tasks(&mut draft, &[], &step.pending)?;
    let node = Node { id: step.checkpoint.id, record, tasks };
    let names = draft.names(&node.record)?;
    let parent_names = under_parent.as_ref().map(|node| draft.names(&node.record)).transpose()?;

    let drafted = draft.done();
    let to = match &state.history {
        Some(history) => history.next(step.flush),
        None => History::first(step.flush),
    };
    let mut change = Change::new(&step.thread, state.mark(), &to, &drafted)?;
    if let (Some(node), Some(names)) = (&under_parent, parent_names) {
        change.put(&step.namespace, node, names);
    }
    change.put(&step.namespace, &node, names);
    change.head(&step.namespace, keys::uuid(node.id));
    change.check(&step.thread)?;
    let head = Some((step.namespace.clone(), Arc::new(node)));
    let after = After { drafted, to, creates: state.history.is_none(), head };
    Ok(Planned { change, goes_on: found.is_some(), after })
}

/// The writes of a task under `node`. None if nothing changes.
pub(crate) fn put_writes(
    at: &CheckpointKey,
    task: &TaskWrites,
    state: &ThreadState,
    node: Option<&Node>,
    is_head: bool,
) -> Result<Option<Planned>> {
    let (Some(node), Some(from)) = (node, &state.history) else { return Err(not_found(&at.thread, at.id)) };
    let mut draft = Draft::new(state);
    let tasks = put_tasks(&mut draft, &node.tasks, std::slice::from_ref(task))?;
    if tasks == node.tasks {
        return Ok(None);
    }
    let node = node.with(tasks);
    let names = draft.names(&node.record)?;
    let (drafted, to) = (draft.done(), from.next(Flush::Now));
    let mut change = Change::new(&at.thread, Some(from.mark), &to, &drafted)?;
    change.put(&at.namespace, &node, names);
    change.check(&at.thread)?;
    let head = is_head.then(|| (at.namespace.clone(), Arc::new(node)));
    let after = After { drafted, to, creates: false, head };
    Ok(Some(Planned { change, goes_on: false, after }))
}

/// How a checkpoint's entry for a channel is stored; not for [`Stored::Held`], which the parent knows.
pub(crate) fn kept(
    draft: &mut Draft<'_>,
    namespace: &Namespace,
    channel: &ChannelName,
    version: threadkeep::id::Version,
    stored: &Stored,
    parent: Option<&Node>,
) -> Result<Kept> {
    let key = || Some((namespace.clone(), channel.clone(), version));
    Ok(match stored {
        Stored::Value(value) => Kept::Value(draft.value(value, key())?),
        Stored::Snapshot(value) => Kept::Snapshot(draft.value(value, key())?),
        Stored::Sentinel | Stored::Held => {
            let parent = parent.ok_or_else(|| {
                Error::InvalidInput(format!(
                    "channel {channel} stores no value, and there is no parent to hold it"
                ))
            })?;
            Kept::Sentinel(seed_of(parent, channel))
        }
    })
}

/// Where the path of a sentinel on a child of `parent` begins.
pub(crate) fn seed_of(parent: &Node, channel: &ChannelName) -> CheckpointId {
    match parent.record.channels.get(channel).map(|entry| &entry.kept) {
        Some(Kept::Sentinel(seed)) => *seed,
        _ => parent.id,
    }
}

/// A record with the metadata and nothing else.
pub(crate) fn described(draft: &mut Draft<'_>, metadata: &Metadata) -> Result<CheckpointRecord> {
    Ok(CheckpointRecord {
        parent: None,
        source: metadata.source,
        step: metadata.step,
        delta_marker: metadata.delta_marker,
        next: Vec::new(),
        applied: Vec::new(),
        parents: metadata.parents.iter().map(|(namespace, id)| (namespace.to_string(), *id)).collect(),
        counters: metadata.counters.clone(),
        extra: draft.extra(&metadata.extra)?,
        channels: std::collections::BTreeMap::new(),
    })
}

/// The tasks under a checkpoint after more are put.
pub(crate) fn put_tasks(
    draft: &mut Draft<'_>,
    stored: &[TaskRecord],
    more: &[TaskWrites],
) -> Result<Vec<TaskRecord>> {
    let mut tasks = stored.to_vec();
    for task in more {
        match tasks.iter_mut().find(|record| record.task == task.task) {
            Some(record) => merge(draft, record, task)?,
            None => tasks.push(new_task(draft, task)?),
        }
    }
    Ok(tasks)
}

/// The record of a task that was not stored before.
pub(crate) fn new_task(draft: &mut Draft<'_>, task: &TaskWrites) -> Result<TaskRecord> {
    let mut writes = Vec::with_capacity(task.writes.len());
    for write in &task.writes {
        let value = draft.value(&write.value, None)?;
        writes.push(WriteRecord { channel: write.channel.clone(), overwrite: write.overwrite, value });
    }
    Ok(TaskRecord { task: task.task, node: task.node.clone(), index: task.index, writes })
}

/// Does [`TaskWrites::merge`] on a record. The values do not matter to it, so numbers stand in for them: stored values
/// need not be read, and unused ones are not stored.
fn merge(draft: &mut Draft<'_>, record: &mut TaskRecord, more: &TaskWrites) -> Result<()> {
    let write = |number: usize, channel: &ChannelName, overwrite| Write {
        channel: channel.clone(),
        value: ChannelValue::Plain(Encoded {
            codec: Codec::MessagePack,
            bytes: number.to_le_bytes().to_vec().into(),
        }),
        overwrite,
    };
    let have = record.writes.len();
    let rows =
        |writes| TaskWrites { task: record.task, node: record.node.clone(), index: record.index, writes };
    let old = record.writes.iter().enumerate();
    let mut merged = rows(old.map(|(i, old)| write(i, &old.channel, old.overwrite)).collect());
    let new = more.writes.iter().enumerate();
    merged.merge(&rows(new.map(|(i, new)| write(have + i, &new.channel, new.overwrite)).collect()));

    let mut writes = Vec::with_capacity(merged.writes.len());
    for write in &merged.writes {
        let number = match &write.value {
            ChannelValue::Plain(number) => number.bytes[..].try_into().map(usize::from_le_bytes).ok(),
            ChannelValue::List(_) => None,
        };
        let value: Option<Form> = match number {
            Some(i) if i < have => record.writes.get(i).map(|old| old.value.clone()),
            Some(i) => match more.writes.get(i - have) {
                Some(new) => Some(draft.value(&new.value, None)?),
                None => None,
            },
            None => None,
        };
        writes.extend(value.map(|value| WriteRecord {
            channel: write.channel.clone(),
            overwrite: write.overwrite,
            value,
        }));
    }
    record.writes = writes;
    Ok(())
}

/// Checks that the tasks which the checkpoint applied are known.
fn check_applied(step: &StepCommit, tasks: &[TaskRecord]) -> Result<()> {
    for task in &step.checkpoint.applied {
        let stored = tasks.iter().any(|record| record.task == *task);
        if !stored && !step.writes.iter().any(|writes| writes.task == *task) {
            return Err(Error::InvalidInput(format!(
                "commit of checkpoint {} to thread {}: no writes of its applied task {task} are stored under its parent",
                step.checkpoint.id, step.thread
            )));
        }
    }
    Ok(())
}

fn not_found(thread: &ThreadId, checkpoint: CheckpointId) -> Error {
    Error::NotFound { thread: thread.clone(), checkpoint }
}

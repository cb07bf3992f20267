//! The building blocks of cases: ids, values and steps from small numbers, and reads that compare easily.

use std::collections::BTreeSet;

use serde_json::{Value as Json, json};
use threadkeep::checkpoint::{
    ChannelEntry, Checkpoint, CheckpointKey, CheckpointTuple, Stored, TaskWrites, Write,
};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, TaskId, ThreadId, Version};
use threadkeep::metadata::{Metadata, Source};
use threadkeep::saver::{
    ChannelHistory, CheckpointSelector, DeltaHistory, Flush, ListQuery, Load, Saver, StepCommit,
};
use threadkeep::value::{ChannelValue, Element, ListValue};
use threadkeep::{Error, Result};

/// The delta channel of most cases.
pub(crate) const MESSAGES: &str = "messages";

/// The `n`-th checkpoint id: a version 7 UUID that grows with `n`.
pub(crate) fn id(n: u16) -> CheckpointId {
    let [high, low] = n.to_be_bytes();
    CheckpointId::from_bytes([0x01, 0x93, 0x5a, 0x00, high, low, 0x70, 0, 0x80, 1, 2, 3, 4, 5, 6, 7])
}

/// The version that the `n`-th step assigns to its writes.
pub(crate) fn version(n: u16) -> Version {
    Version { counter: n.into(), random: scatter(n.into()) }
}

/// The `n`-th task id. Their order differs from that of `n`, like the random ids of real tasks.
pub(crate) fn task_id(n: u16) -> TaskId {
    let half = scatter(n.into()).to_be_bytes();
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&half);
    bytes[8..].copy_from_slice(&half);
    TaskId::from_bytes(bytes)
}

/// Spreads numbers over all 64 bits without collisions.
pub(crate) fn scatter(n: u64) -> u64 {
    n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
}

/// A value that is not a list.
pub(crate) fn plain(value: impl Into<Json>) -> Result<ChannelValue> {
    ChannelValue::from_json(&value.into())
}

/// A list of strings.
pub(crate) fn list<const N: usize>(items: [&str; N]) -> Result<ChannelValue> {
    ChannelValue::from_json(&json!(items.as_slice()))
}

/// A message: an element with an id.
pub(crate) fn message(id: &str, content: &str) -> Result<Element> {
    Element::from_json(&json!({ "id": id, "content": content }))
}

/// A list of messages `m<n>` for each `n`.
pub(crate) fn messages(numbers: impl Iterator<Item = usize>) -> Result<ListValue> {
    numbers.map(|n| message(&format!("m{n}"), &format!("the text of message {n}"))).collect()
}

/// A write that goes through the reducer.
pub(crate) fn write(channel: &str, value: ChannelValue) -> Write {
    Write { channel: channel.into(), value, overwrite: false }
}

/// The `n`-th task, with these writes.
pub(crate) fn task(n: u16, writes: impl Into<Vec<Write>>) -> TaskWrites {
    TaskWrites { task: task_id(n), node: "agent".into(), index: n.into(), writes: writes.into() }
}

/// The `n`-th task, appending one text to `messages`.
pub(crate) fn says(n: u16, text: &str) -> Result<TaskWrites> {
    Ok(task(n, [write(MESSAGES, list([text])?)]))
}

/// A commit being built.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) commit: StepCommit,
    version: Version,
}

impl Step {
    /// The first checkpoint of the root namespace of a thread.
    pub(crate) fn first(thread: &str, n: u16) -> Self {
        let commit = StepCommit {
            thread: thread.into(),
            namespace: Namespace::root(),
            parent: None,
            expected_head: None,
            checkpoint: Checkpoint { id: id(n), channels: [].into(), next: vec![], applied: vec![] },
            metadata: Metadata::new(Source::Loop, n.into()),
            writes: vec![],
            pending: vec![],
            flush: Flush::Now,
        };
        Self { commit, version: version(n) }
    }

    /// The checkpoint after `parent`, which is the head.
    pub(crate) fn after(parent: &CheckpointKey, n: u16) -> Self {
        Self::fork(parent, parent, n)
    }

    /// A checkpoint made from `parent` while `head` is the head.
    pub(crate) fn fork(parent: &CheckpointKey, head: &CheckpointKey, n: u16) -> Self {
        let mut step = Self::first(parent.thread.as_str(), n).namespace(parent.namespace.as_str());
        step.commit.parent = Some(parent.id);
        step.commit.expected_head = Some(head.id);
        step
    }

    /// In another namespace.
    pub(crate) fn namespace(mut self, namespace: &str) -> Self {
        self.commit.namespace = namespace.into();
        self
    }

    /// Stores something for a channel at a version.
    pub(crate) fn store(mut self, channel: &str, version: Version, stored: Stored) -> Self {
        self.commit.checkpoint.channels.insert(channel.into(), ChannelEntry { version, stored });
        self
    }

    /// Stores a complete value, written by this step.
    pub(crate) fn value(self, channel: &str, value: ChannelValue) -> Self {
        let version = self.version;
        self.store(channel, version, Stored::Value(value))
    }

    /// Stores a snapshot of a delta channel, written by this step.
    pub(crate) fn snapshot(self, channel: &str, value: ChannelValue) -> Self {
        let version = self.version;
        self.store(channel, version, Stored::Snapshot(value))
    }

    /// Stores a sentinel for a delta channel, written by this step.
    pub(crate) fn sentinel(self, channel: &str) -> Self {
        let version = self.version;
        self.store(channel, version, Stored::Sentinel)
    }

    /// Holds a channel from the parent; it was last written by step `n`.
    pub(crate) fn held(self, channel: &str, n: u16) -> Self {
        self.store(channel, version(n), Stored::Held)
    }

    /// Applies a task whose writes are already stored.
    pub(crate) fn applies(mut self, n: u16) -> Self {
        self.commit.checkpoint.applied.push(task_id(n));
        self
    }

    /// Includes the writes of a task without applying them.
    pub(crate) fn brings(mut self, task: TaskWrites) -> Self {
        self.commit.writes.push(task);
        self
    }

    /// Includes the writes of a task and applies them.
    pub(crate) fn runs(mut self, task: TaskWrites) -> Self {
        self.commit.checkpoint.applied.push(task.task);
        self.brings(task)
    }

    /// Lets the checkpoint begin with this row.
    pub(crate) fn begins_with(mut self, row: TaskWrites) -> Self {
        self.commit.pending.push(row);
        self
    }

    /// Adds a key to the metadata.
    pub(crate) fn meta(mut self, key: &str, value: Json) -> Self {
        self.commit.metadata.extra.insert(key.into(), value);
        self
    }

    /// Commits a copy of it.
    pub(crate) async fn commit(&self, saver: &dyn Saver) -> Result<CheckpointKey> {
        saver.commit(self.commit.clone()).await
    }

    /// The checkpoint as it reads back, with these writes under it. For steps that hold nothing from their parent.
    pub(crate) fn tuple(&self, writes: impl Into<Vec<TaskWrites>>) -> CheckpointTuple {
        CheckpointTuple {
            thread: self.commit.thread.clone(),
            namespace: self.commit.namespace.clone(),
            checkpoint: self.commit.checkpoint.clone(),
            parent: self.commit.parent,
            metadata: self.commit.metadata.clone(),
            writes: writes.into(),
        }
    }
}

/// The key of a checkpoint of the root namespace.
pub(crate) fn key(thread: &str, id: CheckpointId) -> CheckpointKey {
    CheckpointKey { thread: thread.into(), namespace: Namespace::root(), id }
}

/// The error for a missing checkpoint.
pub(crate) fn not_found<T>(key: &CheckpointKey) -> Result<T> {
    Err(Error::NotFound { thread: key.thread.clone(), checkpoint: key.id })
}

/// The checkpoint, with every value.
pub(crate) async fn get(saver: &dyn Saver, key: &CheckpointKey) -> Result<Option<CheckpointTuple>> {
    saver.get(&CheckpointSelector::at(key)).await
}

/// The head of the root namespace, with every value.
pub(crate) async fn head(saver: &dyn Saver, thread: &str) -> Result<Option<CheckpointTuple>> {
    saver.get(&CheckpointSelector::head(&thread.into())).await
}

/// What the checkpoint stores for a channel.
pub(crate) async fn stored(saver: &dyn Saver, key: &CheckpointKey, channel: &str) -> Result<Option<Stored>> {
    let tuple = get(saver, key).await?;
    Ok(tuple.and_then(|tuple| tuple.checkpoint.channels.get(channel).map(|entry| entry.stored.clone())))
}

/// Everything readable of a thread.
pub(crate) async fn dump(saver: &dyn Saver, thread: &str) -> Result<Vec<CheckpointTuple>> {
    saver.list(&ListQuery { namespace: None, ..ListQuery::new(&thread.into()) }).await
}

/// The ids of the checkpoints that a query finds.
pub(crate) async fn ids(saver: &dyn Saver, query: &ListQuery) -> Result<Vec<CheckpointId>> {
    let query = ListQuery { load: Load::None, ..query.clone() };
    Ok(saver.list(&query).await?.iter().map(|tuple| tuple.checkpoint.id).collect())
}

/// All checkpoints of the root namespace.
pub(crate) fn all(thread: &str) -> ListQuery {
    ListQuery::new(&ThreadId::from(thread))
}

/// Names of channels.
pub(crate) fn channels<const N: usize>(names: [&str; N]) -> BTreeSet<ChannelName> {
    names.into_iter().map(ChannelName::from).collect()
}

/// The path of `messages` to a checkpoint.
pub(crate) async fn path(
    saver: &dyn Saver,
    at: &CheckpointKey,
    reach: Option<CheckpointId>,
) -> Result<ChannelHistory> {
    let mut paths: DeltaHistory = saver.delta_history(at, &channels([MESSAGES]), reach).await?;
    paths.remove(MESSAGES).ok_or_else(|| {
        Error::InvalidInput("the saver returned no path for a channel that was asked for".into())
    })
}

/// The list in `messages` at a checkpoint, from its path: the seed's elements, then those of each write.
pub(crate) async fn replayed(saver: &dyn Saver, at: &CheckpointKey) -> Result<Json> {
    let path = path(saver, at, None).await?;
    let mut all = match &path.seed {
        Some(seed) => seed.value.to_json()?,
        None => Json::Null,
    };
    for write in path.steps.iter().flat_map(|step| &step.writes) {
        let new = write.value.to_json()?;
        match (&mut all, new) {
            (Json::Array(all), Json::Array(mut new)) if !write.overwrite => all.append(&mut new),
            (all, new) => *all = new,
        }
    }
    Ok(all)
}

//! The goal as stored in a thread. It is read and written directly through the saver, so the mode does not matter.

use chrono::{DateTime, Utc};
use serde_json::{Map, Value as Json, json};
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, CheckpointTuple, Stored};
use threadkeep::id::{ChannelName, ThreadId};
use threadkeep::metadata::{Metadata, Source};
use threadkeep::saver::{self, CheckpointSelector, Flush, Load, StepCommit};
use threadkeep::state::StateAccessor;
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};

use crate::duration;
use crate::goal::{CHANNEL, NO_PROGRESS_MAX};
use crate::serialize::time;

/// The maximum length of an objective, in characters.
pub const OBJECTIVE_MAX: usize = 4000;
/// The error for an empty objective.
pub const EMPTY_OBJECTIVE: &str = "Goal objective must not be empty.";

/// An objective in its stored form: white space is normalised.
pub fn normalized(objective: &str) -> String {
    objective.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A new goal.
pub fn new(objective: &str, max_continuations: i64, now: DateTime<Utc>) -> Json {
    let now = time(now);
    json!({
        "objective": objective, "status": "active", "created_at": now, "updated_at": now,
        "continuation_count": 0, "max_continuations": max_continuations,
        "no_progress_count": 0, "max_no_progress_continuations": NO_PROGRESS_MAX,
    })
}

/// The goal of a thread; null if there is none.
///
/// # Errors
/// The saver's.
pub async fn read(accessor: &StateAccessor, thread: &ThreadId) -> Result<Json> {
    let head = head(accessor, thread).await?;
    Ok(head.as_ref().map(goal_of).transpose()?.unwrap_or_default())
}

/// Sets the goal. A thread without a checkpoint gets its first one, with `extra` as its metadata.
///
/// # Errors
/// [`Error::Conflict`] if the head moved meanwhile, and the saver's.
pub async fn set(
    accessor: &StateAccessor,
    thread: &ThreadId,
    extra: Map<String, Json>,
    goal: &Json,
) -> Result<()> {
    let found = if let Some(found) = head(accessor, thread).await? {
        found
    } else {
        accessor.create(thread, extra).await?;
        head(accessor, thread).await?.ok_or_else(|| Error::Stale { thread: thread.clone() })?
    };
    write(accessor, &found, goal).await
}

/// Clears the goal, if there is one.
///
/// # Errors
/// As [`set`].
pub async fn clear(accessor: &StateAccessor, thread: &ThreadId) -> Result<()> {
    match head(accessor, thread).await? {
        Some(head) if !goal_of(&head)?.is_null() => write(accessor, &head, &Json::Null).await,
        _ => Ok(()),
    }
}

/// The head, with only the goal loaded.
async fn head(accessor: &StateAccessor, thread: &ThreadId) -> Result<Option<CheckpointTuple>> {
    let load = Load::Only([CHANNEL.into()].into());
    accessor.saver().get(&CheckpointSelector::head(thread).loading(load)).await
}

fn goal_of(head: &CheckpointTuple) -> Result<Json> {
    let entry = head.checkpoint.channels.get(CHANNEL);
    let value = entry.and_then(|entry| entry.stored.value()).filter(|value| !value.is_absent());
    Ok(value.map(ChannelValue::to_json).transpose()?.unwrap_or_default())
}

/// How often the goal is written while its head is converted or pruned.
const ATTEMPTS: usize = 8;

/// Writes the goal onto a head, in the form that it has by then: a conversion or a prune does not make it fail.
async fn write(accessor: &StateAccessor, head: &CheckpointTuple, goal: &Json) -> Result<()> {
    let mut written = repeat(accessor, head, goal).await;
    for _ in 1..ATTEMPTS {
        let Err(Error::Stale { .. }) = written else { break };
        let at = CheckpointSelector::at(&head.key()).loading(Load::None);
        let Some(head) = accessor.saver().get(&at).await? else { break };
        written = repeat(accessor, &head, goal).await;
    }
    written
}

/// Repeats the head with another goal, which gets a new version. Everything else is as stored on the head, including
/// the marker and the counters; the rows of tasks that ran from the head are under the new one, too.
async fn repeat(accessor: &StateAccessor, head: &CheckpointTuple, goal: &Json) -> Result<()> {
    let (store, ids) = (accessor.saver(), accessor.ids());
    let id = ids.checkpoint_after(Some(head.checkpoint.id));
    let last = head.checkpoint.channels.values().map(|entry| entry.version).max();
    let held = head.checkpoint.channels.iter();
    let mut channels: std::collections::BTreeMap<ChannelName, ChannelEntry> = held
        .map(|(name, entry)| (name.clone(), ChannelEntry { version: entry.version, stored: Stored::Held }))
        .collect();
    let stored = Stored::Value(ChannelValue::from_json(goal)?);
    channels.insert(CHANNEL.into(), ChannelEntry { version: ids.version_after(last), stored });
    let mut extra = head.metadata.extra.clone();
    duration::newest_maps(&**store, &head.key(), &extra).await?.carry_to(&mut extra);
    extra.insert("writes".to_owned(), json!({ CHANNEL: { CHANNEL: goal } }));
    extra.insert("updated_at".to_owned(), json!(time(ids.now())));
    let commit = StepCommit {
        thread: head.thread.clone(),
        namespace: head.namespace.clone(),
        parent: Some(head.checkpoint.id),
        expected_head: Some(head.checkpoint.id),
        checkpoint: Checkpoint { id, channels, next: head.checkpoint.next.clone(), applied: Vec::new() },
        metadata: Metadata {
            source: Source::Update,
            step: head.metadata.step.saturating_add(1),
            extra,
            ..head.metadata.clone()
        },
        writes: Vec::new(),
        pending: head.writes.clone(),
        flush: Flush::Now,
    };
    saver::commit(&**store, commit).await.map(|_| ())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use threadkeep::channel::Schema;
    use threadkeep::convert::convert;
    use threadkeep::id::{IdSource, Namespace};
    use threadkeep::mode::ChannelMode;
    use threadkeep::saver::Saver;
    use threadkeep::state::Update;
    use threadkeep::verify::verify;
    use threadkeep_memory::MemorySaver;

    use super::*;

    /// As a graph of LangGraph leaves it that does not save its channel `goal`.
    #[tokio::test]
    async fn a_goal_without_a_value_is_none_and_can_be_set() {
        let saver: Arc<dyn Saver> = Arc::new(MemorySaver::new());
        let table = Arc::new(Schema::thread_state().compile(ChannelMode::Delta, 100).unwrap());
        let accessor = StateAccessor::new(saver.clone(), table, Arc::new(IdSource::default()));
        let thread = ThreadId::from("t");
        let absent = ChannelEntry {
            version: accessor.ids().version_after(None),
            stored: Stored::Value(ChannelValue::absent()),
        };
        let checkpoint = Checkpoint {
            id: accessor.ids().checkpoint_after(None),
            channels: [(CHANNEL.into(), absent)].into(),
            next: Vec::new(),
            applied: Vec::new(),
        };
        let commit = StepCommit {
            thread: thread.clone(),
            namespace: Namespace::root(),
            parent: None,
            expected_head: None,
            checkpoint,
            metadata: Metadata::new(Source::Loop, 0),
            writes: Vec::new(),
            pending: Vec::new(),
            flush: Flush::Now,
        };
        saver.commit(commit).await.unwrap();
        assert_eq!(read(&accessor, &thread).await.unwrap(), Json::Null);
        clear(&accessor, &thread).await.unwrap();
        assert_eq!(saver.read_thread(&thread).await.unwrap().checkpoints.len(), 1, "there is none to clear");
        let goal = new("reach it", 3, DateTime::UNIX_EPOCH);
        set(&accessor, &thread, Map::new(), &goal).await.unwrap();
        assert_eq!(read(&accessor, &thread).await.unwrap(), goal);
    }

    #[tokio::test]
    async fn a_goal_is_written_onto_a_head_that_was_converted_since_it_was_read() {
        let saver: Arc<dyn Saver> = Arc::new(MemorySaver::new());
        let table = |mode| Arc::new(Schema::thread_state().compile(mode, 100).unwrap());
        let delta =
            StateAccessor::new(saver.clone(), table(ChannelMode::Delta), Arc::new(IdSource::default()));
        let thread = ThreadId::from("t");
        for text in ["a", "b", "c"] {
            let message = json!([{ "type": "human", "content": text }]);
            let writes = vec![delta.write("messages", message, false).unwrap()];
            let update = Update { at: None, node: "n".into(), writes, extra: Map::new() };
            delta.update(&thread, update).await.unwrap();
        }
        let seen = head(&delta, &thread).await.unwrap().unwrap();
        assert!(!seen.metadata.counters.is_empty());
        convert(&*saver, &thread, &table(ChannelMode::Full)).await.unwrap();
        write(&delta, &seen, &new("reach it", 3, DateTime::UNIX_EPOCH)).await.unwrap();
        assert_eq!(verify(&*saver, &thread, delta.table()).await.unwrap(), []);
        let state = delta.get(&thread, None).await.unwrap().unwrap();
        assert_eq!(state.json("goal").unwrap().unwrap()["objective"], "reach it");
        assert_eq!(state.json("messages").unwrap().unwrap().as_array().unwrap().len(), 3);
    }
}

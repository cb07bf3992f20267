//! Reads threads through the checkpointer.

use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde::Serialize;
use serde_json::{Map, Value as Json};
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::ThreadId;
use threadkeep::saver::{CheckpointSelector, ListQuery, Load};
use threadkeep::state::{HistoryQuery, StateAccessor, StateSnapshot};
use threadkeep::value::ChannelValue;
use threadkeep_agent::serialize;
use threadkeep_records::CHILD_PREFIX;

use super::ClientError;

/// Thread ids per page.
const PAGE: usize = 256;
/// Heads read concurrently.
const AT_ONCE: usize = 16;
const TITLE: &str = "title";

/// The threads of a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ThreadList {
    /// The most recently written thread first.
    pub thread_list: Vec<ThreadSummary>,
}

/// A thread of a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ThreadSummary {
    /// Its id.
    pub thread_id: String,
    /// When its oldest checkpoint was created, ISO-8601 in UTC.
    pub created_at: String,
    /// When its newest checkpoint was created.
    pub updated_at: String,
    /// Its newest checkpoint.
    pub latest_checkpoint_id: String,
    /// Null if it has none.
    pub title: Option<String>,
}

/// A thread with all its checkpoints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ThreadHistory {
    /// Its id.
    pub thread_id: String,
    /// Oldest first.
    pub checkpoints: Vec<ThreadCheckpoint>,
}

/// A checkpoint with its values.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ThreadCheckpoint {
    /// Its id.
    pub checkpoint_id: String,
    /// The checkpoint's parent; null for the first.
    pub parent_checkpoint_id: Option<String>,
    /// When it was created, ISO-8601 in UTC.
    pub ts: String,
    /// Its metadata, without credentials.
    pub metadata: Map<String, Json>,
    /// Every channel.
    pub values: Map<String, Json>,
    /// The writes of tasks that ran from it.
    pub pending_writes: Vec<PendingWrite>,
}

/// A write of a task that ran from a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PendingWrite {
    /// The task.
    pub task_id: String,
    /// The channel.
    pub channel: String,
    /// The value.
    pub value: Json,
}

/// The parts of a thread's head that lists need.
pub(crate) struct Head {
    pub(crate) thread: ThreadId,
    pub(crate) tuple: CheckpointTuple,
}

impl Head {
    pub(crate) fn title(&self) -> threadkeep::Result<Option<String>> {
        let entry = self.tuple.checkpoint.channels.get(TITLE);
        let title = entry.and_then(|entry| entry.stored.value()).filter(|title| !title.is_absent());
        let title = title.map(ChannelValue::to_json).transpose()?;
        Ok(title.as_ref().and_then(Json::as_str).map(str::to_owned))
    }
}

/// The heads of all threads, newest first. Ignores the mode, like the gateway's search.
pub(crate) async fn heads(accessor: &StateAccessor) -> threadkeep::Result<Vec<Head>> {
    let saver = accessor.saver();
    let (mut heads, mut after) = (Vec::new(), None);
    loop {
        let page = saver.threads(after.as_ref(), PAGE).await?;
        let Some(last) = page.last() else { break };
        after = Some(last.clone());
        // The threads of subagents belong to those that delegated.
        let page = page.into_iter().filter(|thread| !thread.as_str().starts_with(CHILD_PREFIX));
        let found = stream::iter(page).map(async |thread| {
            let load = Load::Only([TITLE.into()].into());
            // A thread that was deleted meanwhile, or that only has nested graphs, has no head.
            let tuple = saver.get(&CheckpointSelector::head(&thread).loading(load)).await?;
            Ok::<_, threadkeep::Error>(tuple.map(|tuple| Head { thread, tuple }))
        });
        let found: Vec<Option<Head>> = found.buffered(AT_ONCE).try_collect().await?;
        heads.extend(found.into_iter().flatten());
    }
    heads.sort_by_key(|head| std::cmp::Reverse(head.tuple.checkpoint.id));
    Ok(heads)
}

pub(super) async fn list(accessor: &StateAccessor, limit: usize) -> Result<ThreadList, ClientError> {
    let mut heads = heads(accessor).await?;
    heads.truncate(limit);
    let mut thread_list = Vec::with_capacity(heads.len());
    for head in heads {
        let query = ListQuery { load: Load::None, ..ListQuery::new(&head.thread) };
        let all = accessor.saver().list(&query).await?;
        let (newest, oldest) = (head.tuple.checkpoint.id, all.last().map(|tuple| tuple.checkpoint.id));
        thread_list.push(ThreadSummary {
            created_at: oldest.unwrap_or(newest).created_at(),
            updated_at: newest.created_at(),
            latest_checkpoint_id: newest.to_string(),
            title: head.title()?,
            thread_id: head.thread.to_string(),
        });
    }
    Ok(ThreadList { thread_list })
}

pub(super) async fn get(
    accessor: &StateAccessor,
    thread: &ThreadId,
) -> Result<Option<ThreadHistory>, ClientError> {
    let states = accessor.history(thread, HistoryQuery::default()).await?;
    if states.is_empty() {
        return Ok(None);
    }
    let checkpoints = states.iter().rev().map(checkpoint).collect::<threadkeep::Result<_>>()?;
    Ok(Some(ThreadHistory { thread_id: thread.to_string(), checkpoints }))
}

fn checkpoint(state: &StateSnapshot) -> threadkeep::Result<ThreadCheckpoint> {
    let mut pending_writes = Vec::new();
    for row in &state.writes {
        for write in &row.writes {
            pending_writes.push(PendingWrite {
                task_id: row.task.to_string(),
                channel: write.channel.to_string(),
                value: write.value.to_json()?,
            });
        }
    }
    Ok(ThreadCheckpoint {
        checkpoint_id: state.key.id.to_string(),
        parent_checkpoint_id: state.parent.map(|id| id.to_string()),
        ts: state.created_at(),
        metadata: serialize::metadata(&state.metadata),
        values: serialize::values(state)?,
        pending_writes,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use threadkeep::checkpoint::{ChannelEntry, Checkpoint, Stored};
    use threadkeep::id::{CheckpointId, Namespace, Version};
    use threadkeep::metadata::{Metadata, Source};

    use super::*;

    #[test]
    fn a_title_without_a_value_is_none() {
        let title = |value: ChannelValue| {
            let version = Version { counter: 1, random: 1 };
            let entry = ChannelEntry { version, stored: Stored::Value(value) };
            let tuple = CheckpointTuple {
                thread: "t".into(),
                namespace: Namespace::root(),
                checkpoint: Checkpoint {
                    id: CheckpointId::from_bytes([1; 16]),
                    channels: [(TITLE.into(), entry)].into(),
                    next: Vec::new(),
                    applied: Vec::new(),
                },
                parent: None,
                metadata: Metadata::new(Source::Loop, 0),
                writes: Vec::new(),
            };
            Head { thread: "t".into(), tuple }.title().unwrap()
        };
        assert_eq!(title(ChannelValue::absent()), None);
        assert_eq!(title(ChannelValue::from_json(&json!("a")).unwrap()).as_deref(), Some("a"));
    }
}

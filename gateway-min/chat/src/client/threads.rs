//! Reads threads through the checkpointer.

use futures::{StreamExt as _, stream};
use serde::Serialize;
use serde_json::{Map, Value as Json};
use threadkeep::Error;
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
    /// When its oldest checkpoint was created, ISO-8601 in UTC; as `updated_at` if not all can be read.
    pub created_at: String,
    /// When its newest checkpoint was created.
    pub updated_at: String,
    /// Its newest checkpoint.
    pub latest_checkpoint_id: String,
    /// Null if it has none, or if that cannot be read.
    pub title: Option<String>,
}

/// A list of threads, and the threads that it leaves out because their heads are damaged.
pub(crate) struct Listed {
    pub(crate) list: ThreadList,
    pub(crate) damaged: Damaged,
}

/// Threads, and why they cannot be read.
type Damaged = Vec<(ThreadId, Error)>;

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
struct Head {
    thread: ThreadId,
    tuple: CheckpointTuple,
}

impl Head {
    fn title(&self) -> threadkeep::Result<Option<String>> {
        let entry = self.tuple.checkpoint.channels.get(TITLE);
        let title = entry.and_then(|entry| entry.stored.value()).filter(|title| !title.is_absent());
        let title = title.map(ChannelValue::to_json).transpose()?;
        Ok(title.as_ref().and_then(Json::as_str).map(str::to_owned))
    }
}

/// The heads of all threads, newest first, and the threads whose heads are damaged. Ignores the mode, like the
/// gateway's search.
async fn heads(accessor: &StateAccessor) -> threadkeep::Result<(Vec<Head>, Damaged)> {
    let saver = accessor.saver();
    let (mut heads, mut damaged, mut after) = (Vec::new(), Vec::new(), None);
    loop {
        let page = saver.threads(after.as_ref(), PAGE).await?;
        let Some(last) = page.last() else { break };
        after = Some(last.clone());
        // The threads of subagents belong to those that delegated.
        let page = page.into_iter().filter(|thread| !thread.as_str().starts_with(CHILD_PREFIX));
        let found = stream::iter(page).map(async |thread| {
            let load = Load::Only([TITLE.into()].into());
            let tuple = saver.get(&CheckpointSelector::head(&thread).loading(load)).await;
            (thread, tuple)
        });
        let found: Vec<(ThreadId, threadkeep::Result<Option<CheckpointTuple>>)> =
            found.buffered(AT_ONCE).collect().await;
        for (thread, tuple) in found {
            match tuple {
                // A thread that was deleted meanwhile, or that only has nested graphs, has no head.
                Ok(tuple) => heads.extend(tuple.map(|tuple| Head { thread, tuple })),
                Err(error) if is_damage(&error) => damaged.push((thread, error)),
                Err(error) => return Err(error),
            }
        }
    }
    heads.sort_by_key(|head| std::cmp::Reverse(head.tuple.checkpoint.id));
    Ok((heads, damaged))
}

/// Whether what is stored cannot be read, now and later.
fn is_damage(error: &Error) -> bool {
    matches!(error, Error::Corrupt { .. } | Error::BrokenLineage { .. })
}

/// What was read; nothing if it is damaged.
fn unless_damaged<T: Default>(read: threadkeep::Result<T>) -> threadkeep::Result<T> {
    match read {
        Err(error) if is_damage(&error) => Ok(T::default()),
        read => read,
    }
}

/// Whether a thread exists, in either mode. Reads no other one.
pub(super) async fn exists(accessor: &StateAccessor, thread: &ThreadId) -> threadkeep::Result<bool> {
    if thread.as_str().starts_with(CHILD_PREFIX) {
        return Ok(false);
    }
    let head = CheckpointSelector::head(thread).loading(Load::None);
    Ok(accessor.saver().get(&head).await?.is_some())
}

/// One damaged thread keeps no other one from being listed. If all are, it is the store that is damaged.
pub(super) async fn list(accessor: &StateAccessor, limit: usize) -> Result<Listed, ClientError> {
    let (mut heads, damaged) = heads(accessor).await?;
    if let (true, Some((_, error))) = (heads.is_empty(), damaged.first()) {
        return Err(error.clone().into());
    }
    heads.truncate(limit);
    let mut thread_list = Vec::with_capacity(heads.len());
    for head in heads {
        let query = ListQuery { load: Load::None, ..ListQuery::new(&head.thread) };
        let all = unless_damaged(accessor.saver().list(&query).await)?;
        let (newest, oldest) = (head.tuple.checkpoint.id, all.last().map(|tuple| tuple.checkpoint.id));
        thread_list.push(ThreadSummary {
            created_at: oldest.unwrap_or(newest).created_at(),
            updated_at: newest.created_at(),
            latest_checkpoint_id: newest.to_string(),
            title: unless_damaged(head.title())?,
            thread_id: head.thread.to_string(),
        });
    }
    Ok(Listed { list: ThreadList { thread_list }, damaged })
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

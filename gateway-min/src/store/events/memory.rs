//! The feed in memory. It is lost at a restart, and grows until its threads are deleted.

use std::collections::HashMap;

use tokio::sync::Mutex;

use super::{EventQuery, EventRow, MESSAGE_CATEGORY, Owner, PreparedEvent, run_owner, thread_owner};
use crate::store::db::Db;
use crate::store::error::StoreError;

/// The feeds by thread.
///
/// An append looks into the database for its run while it holds the lock, and a deletion clears the
/// feed after it has deleted the rows. So an append that still found its run is cleared with the
/// rest, and one that comes later is refused.
#[derive(Debug, Default)]
pub(super) struct MemoryFeed(Mutex<HashMap<String, Vec<EventRow>>>);

impl MemoryFeed {
    pub(super) async fn append(
        &self,
        db: &Db,
        thread_id: &str,
        run_id: &str,
        events: Vec<PreparedEvent>,
    ) -> Result<Vec<i64>, StoreError> {
        let mut feeds = self.0.lock().await;
        let user_id = owner_of_run(db, thread_id, run_id).await?;
        let feed = feeds.entry(thread_id.to_owned()).or_default();
        Ok(events.into_iter().map(|event| push(feed, thread_id, run_id, user_id.as_deref(), event)).collect())
    }

    pub(super) async fn append_if_absent(
        &self,
        db: &Db,
        thread_id: &str,
        run_id: &str,
        event: PreparedEvent,
    ) -> Result<Option<i64>, StoreError> {
        let mut feeds = self.0.lock().await;
        let user_id = owner_of_run(db, thread_id, run_id).await?;
        let feed = feeds.entry(thread_id.to_owned()).or_default();
        if feed.iter().any(|row| row.run_id == run_id && row.event_type == event.event_type) {
            return Ok(None);
        }
        Ok(Some(push(feed, thread_id, run_id, user_id.as_deref(), event)))
    }

    pub(super) async fn seed(
        &self,
        db: &Db,
        thread_id: &str,
        runs: Vec<(String, Vec<PreparedEvent>)>,
    ) -> Result<bool, StoreError> {
        let mut feeds = self.0.lock().await;
        let owner: Option<Owner> = db.fetch_optional(thread_owner(thread_id)).await?;
        let (user_id,) = owner.ok_or_else(|| StoreError::thread_not_found(thread_id))?;
        let feed = feeds.entry(thread_id.to_owned()).or_default();
        if feed.iter().any(is_message) {
            return Ok(false);
        }
        for (run_id, events) in runs {
            for event in events {
                push(feed, thread_id, &run_id, user_id.as_deref(), event);
            }
        }
        Ok(true)
    }

    pub(super) async fn list(&self, query: &EventQuery) -> Vec<EventRow> {
        let wanted = |row: &&EventRow| {
            row.run_id == query.run_id
                && query.after_seq.is_none_or(|after| row.seq > after)
                && query.event_types.as_ref().is_none_or(|types| types.contains(&row.event_type))
                && query.task_id.as_ref().is_none_or(|task| {
                    row.metadata.get("task_id").and_then(serde_json::Value::as_str) == Some(task.as_str())
                })
        };
        let feeds = self.0.lock().await;
        let feed = feeds.get(&query.thread_id).map_or(&[][..], Vec::as_slice);
        let limit = usize::try_from(query.limit).unwrap_or(usize::MAX);
        feed.iter().filter(wanted).take(limit).cloned().collect()
    }

    pub(super) async fn count_messages(&self, thread_id: &str) -> u64 {
        let feeds = self.0.lock().await;
        let messages =
            feeds.get(thread_id).map_or(0, |feed| feed.iter().filter(|row| is_message(row)).count());
        messages.try_into().unwrap_or(u64::MAX)
    }

    pub(super) async fn forget_thread(&self, thread_id: &str) -> u64 {
        let feed = self.0.lock().await.remove(thread_id);
        feed.map_or(0, |feed| feed.len().try_into().unwrap_or(u64::MAX))
    }
}

async fn owner_of_run(db: &Db, thread_id: &str, run_id: &str) -> Result<Option<String>, StoreError> {
    let owner: Option<Owner> = db.fetch_optional(run_owner(thread_id, run_id)).await?;
    owner.map(|(user_id,)| user_id).ok_or_else(|| StoreError::run_not_found(run_id))
}

fn is_message(row: &EventRow) -> bool {
    row.category == MESSAGE_CATEGORY
}

fn push(
    feed: &mut Vec<EventRow>,
    thread_id: &str,
    run_id: &str,
    user_id: Option<&str>,
    event: PreparedEvent,
) -> i64 {
    let seq = feed.last().map_or(1, |row| row.seq + 1);
    feed.push(EventRow {
        thread_id: thread_id.to_owned(),
        run_id: run_id.to_owned(),
        user_id: user_id.map(str::to_owned),
        seq,
        event_type: event.event_type,
        category: event.category,
        content: event.content,
        metadata: event.metadata,
        created_at: event.created_at,
    });
    seq
}

//! The feed in the table `run_events`. A number is assigned in the transaction that inserts its row, so every assigned
//! number has a row, and two appends cannot get the same number. In SQLite the events of a run are flushed with its
//! decided outcome.

use super::{EventQuery, EventRow, MESSAGE_CATEGORY, Owner, PreparedEvent, run_owner, thread_owner};
use crate::codec::{Cells, object_text, time_text};
use crate::db::{Db, WriteTx};
use crate::error::RecordsError;
use crate::query::{FromRow, Row, Sql, query};

impl FromRow for EventRow {
    fn from_row(row: &Row<'_>) -> sqlx::Result<Self> {
        let cells = Cells::new(row, "run_events", &["thread_id", "seq"]);
        Ok(Self {
            thread_id: cells.text("thread_id")?,
            run_id: cells.text("run_id")?,
            user_id: cells.opt_text("user_id")?,
            seq: cells.int("seq")?,
            event_type: cells.text("event_type")?,
            category: cells.text("category")?,
            content: cells.json("content")?,
            metadata: cells.json("event_metadata")?,
            created_at: cells.time("created_at")?,
        })
    }
}

pub(super) async fn append(
    db: &Db,
    thread_id: &str,
    run_id: &str,
    events: Vec<PreparedEvent>,
) -> Result<Vec<i64>, RecordsError> {
    let (thread, run) = (thread_id.to_owned(), run_id.to_owned());
    let db = db.unflushed();
    let appended = db.write(thread_id, move |tx| {
        Box::pin(async move {
            let mut feed = Feed::of_run(tx, &thread, &run).await?;
            let mut places = Vec::with_capacity(events.len());
            for event in &events {
                places.push(feed.insert(tx, &run, event).await?);
            }
            Ok(places)
        })
    });
    appended.await
}

pub(super) async fn append_if_absent(
    db: &Db,
    thread_id: &str,
    run_id: &str,
    event: PreparedEvent,
) -> Result<Option<i64>, RecordsError> {
    let (thread, run) = (thread_id.to_owned(), run_id.to_owned());
    let db = db.unflushed();
    let appended = db.write(thread_id, move |tx| {
        Box::pin(async move {
            let mut feed = Feed::of_run(tx, &thread, &run).await?;
            feed.insert_if_absent(tx, &run, &event).await
        })
    });
    appended.await
}

/// The last events of a run, and its receipt if it has none.
pub(super) async fn conclude(
    db: &Db,
    thread_id: &str,
    run_id: &str,
    events: Vec<PreparedEvent>,
    receipt: PreparedEvent,
) -> Result<(), RecordsError> {
    let (thread, run) = (thread_id.to_owned(), run_id.to_owned());
    let db = db.unflushed();
    let concluded = db.write(thread_id, move |tx| {
        Box::pin(async move {
            let mut feed = Feed::of_run(tx, &thread, &run).await?;
            for event in &events {
                feed.insert(tx, &run, event).await?;
            }
            feed.insert_if_absent(tx, &run, &receipt).await.map(drop)
        })
    });
    concluded.await
}

pub(super) async fn seed(
    db: &Db,
    thread_id: &str,
    runs: Vec<(String, Vec<PreparedEvent>)>,
) -> Result<bool, RecordsError> {
    let thread = thread_id.to_owned();
    let seeded = db.write(thread_id, move |tx| {
        Box::pin(async move {
            let owner: Option<Owner> = tx.fetch_optional(thread_owner(&thread)).await?;
            let (user_id,) = owner.ok_or_else(|| RecordsError::thread_not_found(&thread))?;
            if tx.fetch_optional::<(i64,)>(a_message_of(&thread)).await?.is_some() {
                return Ok(false);
            }
            let mut feed = Feed::of(tx, &thread, user_id).await?;
            for (run_id, events) in &runs {
                for event in events {
                    feed.insert(tx, run_id, event).await?;
                }
            }
            Ok(true)
        })
    });
    seeded.await
}

pub(super) async fn list(db: &Db, query: &EventQuery) -> Result<Vec<EventRow>, RecordsError> {
    let mut sql = db.builder("SELECT * FROM run_events WHERE thread_id = ");
    sql.push_bind(&query.thread_id).push(" AND run_id = ").push_bind(&query.run_id);
    if let Some(event_types) = &query.event_types {
        sql.push(" AND ");
        sql.push_text_in("event_type", event_types);
    }
    if let Some(task_id) = &query.task_id {
        sql.push(" AND ");
        let text = serde_json::Value::from(task_id.as_str()).to_string();
        sql.push_json_is("event_metadata", "task_id", &[text]);
    }
    if let Some(after_seq) = query.after_seq {
        sql.push(" AND seq > ").push_bind(after_seq);
    }
    sql.push(" ORDER BY seq LIMIT ").push_bind(i64::from(query.limit));
    db.fetch_all(sql.build()).await
}

pub(super) async fn has_messages(db: &Db, thread_id: &str) -> Result<bool, RecordsError> {
    Ok(db.fetch_optional::<(i64,)>(a_message_of(thread_id)).await?.is_some())
}

#[cfg(test)]
pub(super) async fn count_messages(db: &Db, thread_id: &str) -> Result<u64, RecordsError> {
    let sql = query("SELECT COUNT(*) FROM run_events WHERE thread_id = $1 AND category = $2");
    let count: Option<(i64,)> = db.fetch_optional(sql.bind(thread_id).bind(MESSAGE_CATEGORY)).await?;
    assert_eq!(has_messages(db, thread_id).await?, count.is_some_and(|(count,)| count > 0));
    Ok(count.map_or(0, |(count,)| count.unsigned_abs()))
}

/// The newest message of the thread: its place, found from the end, where a run leaves one.
fn a_message_of(thread_id: &str) -> Sql {
    query("SELECT seq FROM run_events WHERE thread_id = $1 AND category = $2 ORDER BY seq DESC LIMIT 1")
        .bind(thread_id)
        .bind(MESSAGE_CATEGORY)
}

/// The end of a thread's feed inside a write transaction.
struct Feed<'a> {
    thread_id: &'a str,
    user_id: Option<String>,
    last_seq: i64,
}

impl<'a> Feed<'a> {
    async fn of_run(tx: &mut WriteTx<'_>, thread_id: &'a str, run_id: &str) -> Result<Self, RecordsError> {
        let owner: Option<Owner> = tx.fetch_optional(run_owner(thread_id, run_id)).await?;
        let (user_id,) = owner.ok_or_else(|| RecordsError::run_not_found(run_id))?;
        Self::of(tx, thread_id, user_id).await
    }

    async fn of(
        tx: &mut WriteTx<'_>,
        thread_id: &'a str,
        user_id: Option<String>,
    ) -> Result<Self, RecordsError> {
        let sql = query("SELECT seq FROM run_events WHERE thread_id = $1 ORDER BY seq DESC LIMIT 1");
        let last: Option<(i64,)> = tx.fetch_optional(sql.bind(thread_id)).await?;
        Ok(Self { thread_id, user_id, last_seq: last.map_or(0, |(seq,)| seq) })
    }

    /// Inserts an event unless the run has one of its type.
    async fn insert_if_absent(
        &mut self,
        tx: &mut WriteTx<'_>,
        run_id: &str,
        event: &PreparedEvent,
    ) -> Result<Option<i64>, RecordsError> {
        let sql =
            "SELECT seq FROM run_events WHERE thread_id = $1 AND run_id = $2 AND event_type = $3 LIMIT 1";
        let sql = query(sql).bind(self.thread_id).bind(run_id).bind(&event.event_type);
        let present: Option<(i64,)> = tx.fetch_optional(sql).await?;
        if present.is_some() {
            return Ok(None);
        }
        self.insert(tx, run_id, event).await.map(Some)
    }

    async fn insert(
        &mut self,
        tx: &mut WriteTx<'_>,
        run_id: &str,
        event: &PreparedEvent,
    ) -> Result<i64, RecordsError> {
        let seq = self.last_seq + 1;
        tx.execute(
            query(
                "INSERT INTO run_events \
                 (thread_id, run_id, user_id, event_type, category, content, event_metadata, seq, created_at) \
                 VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
            )
            .bind(self.thread_id)
            .bind(run_id)
            .bind(&self.user_id)
            .bind(&event.event_type)
            .bind(&event.category)
            .bind(event.content.to_string())
            .bind(object_text(&event.metadata))
            .bind(seq)
            .bind(time_text(event.created_at)),
        )
        .await?;
        self.last_seq = seq;
        Ok(seq)
    }
}

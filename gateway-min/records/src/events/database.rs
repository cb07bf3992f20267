//! The feed in the table `run_events`. A number is assigned in the transaction that inserts its row, so two appends cannot
//! get the same number. The thread's row keeps the highest number of those whose rows were deleted with their run. In
//! SQLite the events of a run are flushed with its decided outcome.

use super::{EventQuery, EventRow, MESSAGE_CATEGORY, Owner, PreparedEvent, run_owner, thread_owner};
use crate::codec::{Cells, object_text, time_text};
use crate::db::Db;
use crate::error::RecordsError;
use crate::failure::DatabaseError;
use crate::query::{FromRow, Row, Sql, query};

impl FromRow for EventRow {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
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
    add(db, thread_id, run_id, &events, Unless::default()).await
}

pub(super) async fn append_once(
    db: &Db,
    (thread_id, run_id): (&str, &str),
    after: i64,
    events: Vec<PreparedEvent>,
) -> Result<Vec<i64>, RecordsError> {
    let unless = Unless { begins_after: Some(after), ..Unless::default() };
    add(db, thread_id, run_id, &events, unless).await
}

pub(super) async fn append_if_absent(
    db: &Db,
    thread_id: &str,
    run_id: &str,
    event: PreparedEvent,
) -> Result<Option<i64>, RecordsError> {
    let unless = Unless { has_type: Some(event.event_type.clone()), ..Unless::default() };
    Ok(add(db, thread_id, run_id, &[event], unless).await?.pop())
}

/// The last events of a run, and its receipt if it has none.
pub(super) async fn conclude(
    db: &Db,
    (thread_id, run_id): (&str, &str),
    after: i64,
    mut events: Vec<PreparedEvent>,
    receipt: PreparedEvent,
) -> Result<(), RecordsError> {
    let unless = Unless { has_type: Some(receipt.event_type.clone()), begins_after: Some(after) };
    events.push(receipt);
    add(db, thread_id, run_id, &events, unless).await.map(drop)
}

/// The statements that do so.
pub(super) fn conclusion(
    db: &Db,
    (thread_id, run_id): (&str, &str),
    after: i64,
    mut events: Vec<PreparedEvent>,
    receipt: PreparedEvent,
) -> Vec<Sql> {
    let unless = Unless { has_type: Some(receipt.event_type.clone()), begins_after: Some(after) };
    events.push(receipt);
    insertions(db, OWNER_OF_RUN, thread_id, run_id, &events, &unless)
}

/// Which events are not added.
#[derive(Default)]
struct Unless {
    /// The last one, if the run has one of this type.
    has_type: Option<String>,
    /// All, if the run has the first of them after this number: then another attempt has stored them. The transactions of a
    /// thread run one after the other, so of several attempts only the one that comes first adds them.
    begins_after: Option<i64>,
}

/// The statement that keeps the numbers of a thread's events from being given again, before some of them are deleted.
pub(crate) fn keep_numbers(thread_id: &str) -> Sql {
    let sql = "UPDATE threads_meta SET events_given = given.seq \
               FROM (SELECT MAX(seq) AS seq FROM run_events WHERE thread_id = $1) AS given \
               WHERE thread_id = $1 AND events_given < given.seq";
    query(sql).bind(thread_id)
}

/// Appends events of a run. Returns the numbers of those it added.
async fn add(
    db: &Db,
    thread_id: &str,
    run_id: &str,
    events: &[PreparedEvent],
    unless: Unless,
) -> Result<Vec<i64>, RecordsError> {
    let db = db.unflushed();
    let owner = run_owner(thread_id, run_id);
    let mut statements = insertions(&db, OWNER_OF_RUN, thread_id, run_id, events, &unless);
    let (run, at_the_end) = (run_id.to_owned(), statements.pop());
    let added = db.write(thread_id, move |tx| {
        Box::pin(async move {
            let (mut places, mut goes_on): (Vec<(i64,)>, bool) = (Vec::new(), true);
            for statement in statements {
                let mut added = tx.fetch_all(statement).await?;
                goes_on = !added.is_empty();
                places.append(&mut added);
                if !goes_on {
                    break;
                }
            }
            if let Some(statement) = at_the_end.filter(|_| goes_on) {
                places.append(&mut tx.fetch_all_and_commit(statement).await?);
            }
            if places.is_empty() && tx.fetch_optional::<Owner>(owner).await?.is_none() {
                return Err(RecordsError::run_not_found(&run));
            }
            Ok(places)
        })
    });
    let mut places: Vec<i64> = added.await?.into_iter().map(|(place,)| place).collect();
    places.sort_unstable();
    Ok(places)
}

pub(super) async fn seed(
    db: &Db,
    thread_id: &str,
    runs: Vec<(String, Vec<PreparedEvent>)>,
) -> Result<bool, RecordsError> {
    let thread = thread_id.to_owned();
    let all = |(run_id, events): &(String, Vec<PreparedEvent>)| {
        insertions(db, OWNER_OF_THREAD, thread_id, run_id, events, &Unless::default())
    };
    let statements: Vec<Sql> = runs.iter().flat_map(all).collect();
    let seeded = db.write(thread_id, move |tx| {
        Box::pin(async move {
            let owner: Option<Owner> = tx.fetch_optional(thread_owner(&thread)).await?;
            owner.ok_or_else(|| RecordsError::thread_not_found(&thread))?;
            if tx.fetch_optional::<(i64,)>(a_message_of(&thread)).await?.is_some() {
                return Ok(false);
            }
            for statement in statements {
                tx.queue(statement)?;
            }
            Ok(true)
        })
    });
    seeded.await
}

/// How many events one statement inserts: databases allow a limited number of parameters.
const EVENTS_A_STATEMENT: usize = 500;

/// Where the owner of the events of the thread `$1` and the run `$2` stands.
const OWNER_OF_RUN: &str = "runs WHERE thread_id = $1 AND run_id = $2 AND operation_kind = 'run'";
/// The same for events that are not of a stored run.
const OWNER_OF_THREAD: &str = "threads_meta WHERE thread_id = $1";

/// The statements that append events, with the next numbers of the thread's feed, which they return. After one that returns
/// none the others are not to be run.
fn insertions(
    db: &Db,
    owner: &str,
    thread_id: &str,
    run_id: &str,
    events: &[PreparedEvent],
    unless: &Unless,
) -> Vec<Sql> {
    let statement = |(n, events): (usize, &[PreparedEvent])| {
        let mut sql = db.builder(
            "INSERT INTO run_events \
             (thread_id, run_id, user_id, event_type, category, content, event_metadata, seq, created_at) \
             SELECT ",
        );
        sql.push_bind(thread_id).push(", ").push_bind(run_id);
        sql.push(
            ", feed.user_id, added.column1, added.column2, added.column3, added.column4, feed.last + added.column5, \
             added.column6 FROM (SELECT user_id, (SELECT COALESCE(MAX(given.seq), 0) FROM \
             (SELECT MAX(seq) AS seq FROM run_events WHERE thread_id = $1 \
             UNION ALL SELECT events_given FROM threads_meta WHERE thread_id = $1) AS given) AS last FROM ",
        );
        sql.push(owner).push(") AS feed, (VALUES ");
        for (place, event) in (1_i64..).zip(events) {
            sql.push(if place == 1 { "(" } else { ", (" });
            sql.push_bind(&event.event_type).push(", ").push_bind(&event.category).push(", ");
            sql.push_bind(event.content.to_string())
                .push(", ")
                .push_bind(object_text(&event.metadata))
                .push(", ");
            sql.push_bind(place).push(", ").push_bind(time_text(event.created_at)).push(")");
        }
        // A condition in any case, or SQLite takes what follows for one of a join.
        sql.push(") AS added WHERE TRUE");
        if let Some(event_type) = &unless.has_type {
            sql.push(" AND (added.column1 <> ").push_bind(event_type);
            sql.push(" OR NOT EXISTS (SELECT 1 FROM run_events WHERE thread_id = $1 AND run_id = $2 AND event_type = ");
            sql.push_bind(event_type).push("))");
        }
        if let (Some(after), Some(first), 0) = (unless.begins_after, events.first(), n) {
            sql.push(
                " AND NOT EXISTS (SELECT 1 FROM run_events WHERE thread_id = $1 AND run_id = $2 AND seq > ",
            );
            sql.push_bind(after).push(" AND event_type = ").push_bind(&first.event_type);
            sql.push(" AND created_at = ").push_bind(time_text(first.created_at)).push(")");
        }
        sql.push(" ORDER BY added.column5 RETURNING seq");
        sql.build()
    };
    events.chunks(EVENTS_A_STATEMENT).enumerate().map(statement).collect()
}

pub(super) async fn list(db: &Db, query: &EventQuery) -> Result<Vec<EventRow>, RecordsError> {
    let mut sql = db.builder("SELECT * FROM run_events WHERE thread_id = ");
    sql.push_bind(&query.thread_id).push(" AND run_id = ").push_bind(&query.run_id);
    if let Some(event_types) = &query.event_types {
        sql.push(" AND ");
        sql.push_text_in("event_type", &event_types.iter().cloned().collect::<Vec<_>>());
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

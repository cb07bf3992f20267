//! The rows of `threads_meta`: one conversation thread each.

use super::codec::{Cells, JsonObject, cut, name_enum, object_text, time_text};
use super::db::Db;
use super::error::RecordsError;
use super::events::Events;
use super::query::{FromRow, Row, Sql, query};
use super::runs::RunStatus;
use super::transaction::WriteTx;
use crate::failure::DatabaseError;
use chrono::{DateTime, TimeDelta, Utc};

/// The metadata key of the pin flag: a thread with `true` here comes first in every search.
pub const PINNED_KEY: &str = "svc_pinned";

/// The maximum length of a display name in characters; longer ones are truncated.
pub const DISPLAY_NAME_MAX_CHARS: usize = 256;

/// How far a stored time may be ahead of this process's clock and still count: another process's clock may be ahead,
/// and so are the frames of a run that shows many at once. A time farther ahead is from before the clock was set back.
pub const AHEAD: TimeDelta = TimeDelta::seconds(60);

/// This time, if it is ahead of the present and counts; else the present.
pub(super) fn later(time: DateTime<Utc>, now: DateTime<Utc>) -> DateTime<Utc> {
    if time > now && time < now + AHEAD { time } else { now }
}

/// [`later`] of the time of a thread that is changed and the present, the first parameter; the second one is [`AHEAD`]
/// of that. The thread's time may be that of the end of its last run, after which the next one begins: no change sets it
/// back.
macro_rules! touched {
    ($now:literal, $ahead:literal) => {
        concat!(
            "CASE WHEN updated_at > ",
            $now,
            " AND updated_at < ",
            $ahead,
            " THEN updated_at ELSE ",
            $now,
            " END"
        )
    };
}
pub(super) use touched;

name_enum! {
    /// The status in a thread's row.
    ThreadStatus ("thread status") {
        /// Nothing runs; the last run, if any, succeeded.
        Idle = "idle",
        /// A run is active.
        Running = "running",
        /// The last run was interrupted.
        Interrupted = "interrupted",
        /// The last run failed.
        Error = "error",
    }
}

impl ThreadStatus {
    /// The status after a run ended like this.
    pub(super) fn after(end: RunStatus) -> Self {
        match end {
            RunStatus::Success => Self::Idle,
            RunStatus::Interrupted => Self::Interrupted,
            RunStatus::Pending | RunStatus::Running | RunStatus::Error | RunStatus::Timeout => Self::Error,
        }
    }
}

/// A thread to create.
#[derive(Clone, Debug, Default)]
pub struct NewThread {
    /// The thread's id.
    pub thread_id: String,
    /// The agent that the thread was created for.
    pub assistant_id: Option<String>,
    /// The owner; without one all users share the thread.
    pub user_id: Option<String>,
    /// The title; see [`DISPLAY_NAME_MAX_CHARS`].
    pub display_name: Option<String>,
    /// Free-form metadata.
    pub metadata: JsonObject,
}

/// A row of `threads_meta`.
#[derive(Clone, Debug, PartialEq)]
pub struct ThreadRow {
    /// The thread's id.
    pub thread_id: String,
    /// The agent that the thread was created for.
    pub assistant_id: Option<String>,
    /// The owner; without one all users share the thread.
    pub user_id: Option<String>,
    /// The title.
    pub display_name: Option<String>,
    /// The stored status.
    pub status: ThreadStatus,
    /// Free-form metadata.
    pub metadata: JsonObject,
    /// When the row was created.
    pub created_at: DateTime<Utc>,
    /// When the row last changed, not counting pinning.
    pub updated_at: DateTime<Utc>,
}

impl ThreadRow {
    /// Whether `owner` may see the thread: rows without an owner are shared, and `None` sees all rows.
    pub fn visible_to(&self, owner: Option<&str>) -> bool {
        match (owner, self.user_id.as_deref()) {
            (Some(owner), Some(user_id)) => owner == user_id,
            (None, _) | (_, None) => true,
        }
    }
}

impl FromRow for ThreadRow {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let cells = Cells::new(row, "threads_meta", &["thread_id"]);
        Ok(Self {
            thread_id: cells.text("thread_id")?,
            assistant_id: cells.opt_text("assistant_id")?,
            user_id: cells.opt_text("user_id")?,
            display_name: cells.opt_text("display_name")?,
            status: cells.name("status")?,
            metadata: cells.json("metadata_json")?,
            created_at: cells.time("created_at")?,
            updated_at: cells.time("updated_at")?,
        })
    }
}

/// The result of [`Threads::create`].
#[derive(Clone, Debug, PartialEq)]
pub struct CreatedThread {
    /// The current row.
    pub row: ThreadRow,
    /// Whether this call created it; otherwise it existed and is unchanged.
    pub created: bool,
}

/// The repository of thread rows. Threads are deleted with everything that belongs to them, by
/// [`Records::delete_thread`](super::Records::delete_thread).
///
/// Every method is one transaction: a dropped future leaves all of it or nothing.
#[derive(Clone, Debug)]
pub struct Threads {
    pub(super) db: Db,
    pub(super) events: Events,
}

impl Threads {
    /// Creates the row with status `idle`, or returns the existing row unchanged, whatever its owner (see
    /// [`ThreadRow::visible_to`]). Before that it removes a file of events that the deletion of an earlier thread has
    /// left: its process may have died between its commit and the removal.
    ///
    /// # Errors
    /// Those of the database, and of the file.
    pub async fn create(&self, new: NewThread) -> Result<CreatedThread, RecordsError> {
        if self.events.has_file(&new.thread_id).await && self.get(&new.thread_id, None).await?.is_none() {
            Box::pin(self.remove_remains(&new.thread_id)).await?;
        }
        self.insert(new).await
    }

    /// Removes the file of a thread without a row. Not after the row is created: if the answer to that is lost, the
    /// next attempt finds the row, and nobody removes the file.
    async fn remove_remains(&self, thread_id: &str) -> Result<(), RecordsError> {
        let feed = self.events.hold_to_delete(thread_id).await?;
        // Meanwhile the thread may have been created, and a run have begun a file of it.
        if self.get(thread_id, None).await?.is_some() {
            return Ok(());
        }
        let events = feed.forget(thread_id).await?;
        if events > 0 {
            tracing::warn!(thread_id, events, "removed the events that an interrupted deletion has left");
        }
        Ok(())
    }

    async fn insert(&self, new: NewThread) -> Result<CreatedThread, RecordsError> {
        let insert = query(
            "INSERT INTO threads_meta (thread_id, assistant_id, user_id, display_name, status, metadata_json, pinned, \
             created_at, updated_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $8) ON CONFLICT DO NOTHING RETURNING *",
        )
        .bind(&new.thread_id)
        .bind(&new.assistant_id)
        .bind(&new.user_id)
        .bind(new.display_name.as_deref().map(|name| cut(name, DISPLAY_NAME_MAX_CHARS)))
        .bind(ThreadStatus::Idle.as_str())
        .bind(object_text(&new.metadata))
        .bind(is_pinned(&new.metadata))
        .bind(time_text(self.db.clock.now()));
        let thread_id = new.thread_id.clone();
        let created = self.db.write(&new.thread_id, move |tx| {
            Box::pin(async move {
                Ok(match tx.fetch_optional(insert).await? {
                    Some(row) => CreatedThread { row, created: true },
                    None => CreatedThread { row: row(tx, &thread_id).await?, created: false },
                })
            })
        });
        created.await
    }

    /// The row, if it exists and `owner` may see it (`None` sees all rows).
    pub async fn get(&self, thread_id: &str, owner: Option<&str>) -> Result<Option<ThreadRow>, RecordsError> {
        let row: Option<ThreadRow> = self
            .db
            .fetch_optional(query("SELECT * FROM threads_meta WHERE thread_id = $1").bind(thread_id))
            .await?;
        Ok(row.filter(|row| row.visible_to(owner)))
    }

    /// The thread's owner, without reading the rest of its row; `None` also if there is no such thread.
    pub async fn owner(&self, thread_id: &str) -> Result<Option<String>, RecordsError> {
        let sql = query("SELECT user_id FROM threads_meta WHERE thread_id = $1").bind(thread_id);
        let row: Option<(Option<String>,)> = self.db.fetch_optional(sql).await?;
        Ok(row.and_then(|(owner,)| owner))
    }

    /// Merges `patch` into the metadata, key by key at the top level, and returns the row. A patch of only
    /// [`PINNED_KEY`] does not change `updated_at`.
    ///
    /// # Errors
    /// [`RecordsError::NotFound`], also for a thread that `owner` may not see (`None` sees all).
    pub async fn patch_metadata(
        &self,
        thread_id: &str,
        owner: Option<&str>,
        patch: JsonObject,
    ) -> Result<ThreadRow, RecordsError> {
        let (id, owner, now) = (thread_id.to_owned(), owner.map(str::to_owned), self.db.clock.now());
        let patched = self.db.write(thread_id, move |tx| {
            Box::pin(async move {
                let mut row = row(tx, &id).await?;
                if !row.visible_to(owner.as_deref()) {
                    return Err(RecordsError::thread_not_found(&id));
                }
                if patch.len() != 1 || !patch.contains_key(PINNED_KEY) {
                    row.updated_at = later(row.updated_at, now);
                }
                row.metadata.extend(patch);
                let sql = "UPDATE threads_meta SET metadata_json = $2, pinned = $3, updated_at = $4 \
                           WHERE thread_id = $1";
                let sql = query(sql)
                    .bind(&id)
                    .bind(object_text(&row.metadata))
                    .bind(is_pinned(&row.metadata))
                    .bind(time_text(row.updated_at));
                tx.execute(sql).await?;
                Ok(row)
            })
        });
        patched.await
    }

    /// Sets the stored status, for tests.
    ///
    /// # Errors
    /// [`RecordsError::NotFound`].
    #[cfg(any(test, feature = "testing"))]
    pub async fn set_status(&self, thread_id: &str, status: ThreadStatus) -> Result<(), RecordsError> {
        Self::update(
            &self.db.unflushed(),
            thread_id,
            query("UPDATE threads_meta SET status = $2, updated_at = $3 WHERE thread_id = $1")
                .bind(thread_id)
                .bind(status.as_str())
                .bind(time_text(self.db.clock.now())),
        )
        .await?
        .then_some(())
        .ok_or_else(|| RecordsError::thread_not_found(thread_id))
    }

    /// Sets or, with `None`, clears the title, if it still is `seen`; see [`DISPLAY_NAME_MAX_CHARS`]. Returns whether it
    /// was. Read `seen` before the state that has the new title: then a newer title of another writer stays.
    ///
    /// # Errors
    /// [`RecordsError::NotFound`].
    pub async fn set_display_name(
        &self,
        thread_id: &str,
        seen: Option<&str>,
        name: Option<&str>,
    ) -> Result<bool, RecordsError> {
        let now = self.db.clock.now();
        let sql = query(concat!(
            "UPDATE threads_meta SET display_name = $2, updated_at = ",
            touched!("$3", "$5"),
            " WHERE thread_id = $1 AND display_name IS NOT DISTINCT FROM $4"
        ));
        let sql = sql.bind(thread_id).bind(name.map(|name| cut(name, DISPLAY_NAME_MAX_CHARS)));
        let sql = sql.bind(time_text(now));
        let sql = sql.bind(seen.map(|seen| cut(seen, DISPLAY_NAME_MAX_CHARS))).bind(time_text(now + AHEAD));
        Self::update(&self.db, thread_id, sql).await
    }

    /// Runs an update of an existing thread; returns whether it changed anything.
    async fn update(db: &Db, thread_id: &str, sql: Sql) -> Result<bool, RecordsError> {
        let id = thread_id.to_owned();
        let updated = db.write(thread_id, move |tx| {
            Box::pin(async move {
                match tx.execute(sql).await? {
                    0 => row(tx, &id).await.map(|_| false),
                    _ => Ok(true),
                }
            })
        });
        updated.await
    }
}

async fn row(tx: &mut WriteTx<'_>, thread_id: &str) -> Result<ThreadRow, RecordsError> {
    tx.fetch_optional(query("SELECT * FROM threads_meta WHERE thread_id = $1").bind(thread_id))
        .await?
        .ok_or_else(|| RecordsError::thread_not_found(thread_id))
}

fn is_pinned(metadata: &JsonObject) -> bool {
    metadata.get(PINNED_KEY).and_then(serde_json::Value::as_bool) == Some(true)
}

//! The event feed of threads: one append-only list per thread, numbered 1, 2, 3 ... without gaps, except where a run was
//! deleted. No number is given twice in the life of a thread.
//!
//! The setting `run_events.backend` decides where the feed is: `memory` (the default; lost on restart, and limited to
//! about 64 MiB for all threads), `db` (the table `run_events`) or `jsonl` (one file per thread). Otherwise they behave
//! alike; this file is what they share.
//!
//! Events belong to a run, and a deleted thread takes both along: an append finds its run's row, or fails. So a late
//! worker cannot bring back a part of a deleted thread, not even if a new thread has its id.

mod content;
mod database;
mod jsonl;
mod memory;
mod stripes;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use chrono::{DateTime, SubsecRound, Utc};
use serde_json::Value;

use self::content::{cut_trace, flatten};
pub(super) use self::database::keep_numbers;
use self::jsonl::{Deleting, JsonlFeed};
use self::memory::MemoryFeed;
use self::stripes::Stripe;
use super::codec::JsonObject;
use super::db::Db;
use super::error::RecordsError;
use super::query::{Sql, query};

/// The maximum content of an event of the category `trace`, in bytes, unless `run_events.max_trace_content` sets
/// another.
pub const MAX_TRACE_CONTENT: usize = 10_240;

/// The category whose content is cut at [`MAX_TRACE_CONTENT`].
pub const TRACE_CATEGORY: &str = "trace";

/// The category of the messages that a conversation shows.
pub const MESSAGE_CATEGORY: &str = "message";

/// The prefix of the ids of synthetic runs ([`SeedRun`]) that a thread gets from its own head.
pub const SEED_PREFIX: &str = "checkpoint-seed-";

/// The prefix of the ids of synthetic runs that a branch gets from its source.
pub const BRANCH_SEED_PREFIX: &str = "branch-seed-";

const EVENT_TYPE_MAX_CHARS: usize = 32;
const CATEGORY_MAX_CHARS: usize = 16;

/// Where the feed is stored: the setting `run_events.backend`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventBackend {
    /// In this process.
    #[default]
    Memory,
    /// In the gateway's database.
    Database,
    /// In files with one JSON document per line, in [`RecordsOptions::event_directory`](super::RecordsOptions).
    Jsonl,
}

/// An event to append.
#[derive(Clone, Debug, PartialEq)]
pub struct NewEvent {
    /// For example `run.start`; 1 to 32 characters.
    pub event_type: String,
    /// For example `trace`; 1 to 16 characters.
    pub category: String,
    /// The event's content.
    pub content: Value,
    /// The event's metadata.
    pub metadata: JsonObject,
    /// When it happened; `None` means now.
    pub created_at: Option<DateTime<Utc>>,
}

impl NewEvent {
    /// An event with the current time and no metadata.
    pub fn new(event_type: impl Into<String>, category: impl Into<String>, content: Value) -> Self {
        let metadata = JsonObject::new();
        Self { event_type: event_type.into(), category: category.into(), content, metadata, created_at: None }
    }
}

/// The events of a synthetic run, which has no row: used to fill a feed from checkpoints.
#[derive(Clone, Debug, PartialEq)]
pub struct SeedRun {
    /// [`SEED_PREFIX`] or [`BRANCH_SEED_PREFIX`] and more, for example `checkpoint-seed-<thread>-0`.
    pub run_id: String,
    /// In feed order.
    pub events: Vec<NewEvent>,
}

/// A stored event.
#[derive(Clone, Debug, PartialEq)]
pub struct EventRow {
    /// The thread.
    pub thread_id: String,
    /// The run, or synthetic run, that it belongs to.
    pub run_id: String,
    /// The run's user.
    pub user_id: Option<String>,
    /// Its position in the thread's feed, from 1.
    pub seq: i64,
    /// For example `run.start`.
    pub event_type: String,
    /// For example `trace`.
    pub category: String,
    /// The event's content.
    pub content: Value,
    /// The event's metadata.
    pub metadata: JsonObject,
    /// When it happened.
    pub created_at: DateTime<Utc>,
}

/// Which events of a run [`Events::list`] returns: the filters of the run events route (service reference, "Other
/// thread
/// routes").
#[derive(Clone, Debug)]
pub struct EventQuery {
    /// The thread.
    pub thread_id: String,
    /// The run.
    pub run_id: String,
    /// Only these types, matched exactly.
    pub event_types: Option<BTreeSet<String>>,
    /// Only events whose `metadata.task_id` is this string.
    pub task_id: Option<String>,
    /// Only events after this position in the feed.
    pub after_seq: Option<i64>,
    /// The maximum number of events, counted after all other conditions: 1 to [`EventQuery::MAX_LIMIT`].
    pub limit: u32,
}

impl EventQuery {
    /// The default limit.
    pub const DEFAULT_LIMIT: u32 = 500;
    /// The greatest limit.
    pub const MAX_LIMIT: u32 = 2000;

    /// All events of a run, up to the default limit.
    pub fn new(thread_id: impl Into<String>, run_id: impl Into<String>) -> Self {
        Self {
            thread_id: thread_id.into(),
            run_id: run_id.into(),
            event_types: None,
            task_id: None,
            after_seq: None,
            limit: Self::DEFAULT_LIMIT,
        }
    }
}

/// The repository of events. A dropped future leaves all of a call's events or none.
#[derive(Clone, Debug)]
pub struct Events {
    db: Db,
    max_trace_content: usize,
    feed: Feed,
}

/// Where the events are stored.
#[derive(Clone, Debug)]
enum Feed {
    Memory(Arc<MemoryFeed>),
    Database,
    Files(Arc<JsonlFeed>),
}

/// What is stored outside the database for a thread whose rows are about to be deleted: nobody appends to it meanwhile.
pub(super) struct HeldFeed(Held);

enum Held {
    Memory(Arc<MemoryFeed>, Stripe),
    Database,
    Files(Arc<JsonlFeed>, Deleting),
}

impl Events {
    pub(super) fn new(db: Db, backend: EventBackend, directory: &Path, max_trace_content: usize) -> Self {
        let feed = match backend {
            EventBackend::Memory => Feed::Memory(Arc::default()),
            EventBackend::Database => Feed::Database,
            EventBackend::Jsonl => Feed::Files(Arc::new(JsonlFeed::new(directory.to_owned()))),
        };
        Self { db, max_trace_content, feed }
    }

    /// Appends `events` of one run, all or none, and returns their positions in the feed.
    ///
    /// # Errors
    /// [`RecordsError::NotFound`] if the thread has no such run (any more); [`RecordsError::Invalid`] if a type or category
    /// is empty or too long.
    pub async fn append(
        &self,
        thread_id: &str,
        run_id: &str,
        events: Vec<NewEvent>,
    ) -> Result<Vec<i64>, RecordsError> {
        let events = self.prepare(events)?;
        match &self.feed {
            Feed::Memory(feed) => feed.append(&self.db, thread_id, run_id, events).await,
            Feed::Database => database::append(&self.db, thread_id, run_id, events).await,
            Feed::Files(feed) => feed.append(&self.db, thread_id, run_id, events).await,
        }
    }

    /// As [`Events::append`], of events that an earlier attempt may have stored. In the database they are stored once,
    /// whichever attempt comes first, and also if an earlier one is carried out only after this one: if the run has an event
    /// after the position `after` with the type and time of the first of `events`, none is added and no position returned. In
    /// memory and in files an attempt that has failed does nothing later, nor one that was dropped, after
    /// [`Self::settle`]: look there for the events before this.
    ///
    /// # Errors
    /// See [`Events::append`].
    pub async fn append_once(
        &self,
        (thread_id, run_id): (&str, &str),
        after: i64,
        events: Vec<NewEvent>,
    ) -> Result<Vec<i64>, RecordsError> {
        if let Feed::Database = &self.feed {
            return database::append_once(&self.db, (thread_id, run_id), after, self.prepare(events)?).await;
        }
        self.append(thread_id, run_id, events).await
    }

    /// Waits until no append of this process to a thread's file is under way, also if its caller was dropped.
    pub async fn settle(&self, thread_id: &str) {
        if let Feed::Files(feed) = &self.feed {
            feed.settle(thread_id).await;
        }
    }

    /// Appends `event`, or returns `None` if its run already has an event of this type. This ensures that
    /// `run.delivery` is written once.
    ///
    /// # Errors
    /// See [`Events::append`].
    pub async fn append_if_absent(
        &self,
        thread_id: &str,
        run_id: &str,
        event: NewEvent,
    ) -> Result<Option<i64>, RecordsError> {
        let event = self.prepare_one(event)?;
        match &self.feed {
            Feed::Memory(feed) => feed.append_if_absent(&self.db, thread_id, run_id, event).await,
            Feed::Database => database::append_if_absent(&self.db, thread_id, run_id, event).await,
            Feed::Files(feed) => feed.append_if_absent(&self.db, thread_id, run_id, event).await,
        }
    }

    /// Appends the last `events` of a run and its `receipt`, unless it has one; in the database all or none, and once, as
    /// [`Events::append_once`] says.
    ///
    /// # Errors
    /// See [`Events::append`].
    pub async fn conclude(
        &self,
        (thread_id, run_id): (&str, &str),
        after: i64,
        events: Vec<NewEvent>,
        receipt: NewEvent,
    ) -> Result<(), RecordsError> {
        if let Feed::Database = &self.feed {
            let (events, receipt) = (self.prepare(events)?, self.prepare_one(receipt)?);
            return database::conclude(&self.db, (thread_id, run_id), after, events, receipt).await;
        }
        if !events.is_empty() {
            self.append(thread_id, run_id, events).await?;
        }
        self.append_if_absent(thread_id, run_id, receipt).await.map(drop)
    }

    /// Whether the events are in the database, so that one transaction can write them and a run's row.
    pub fn are_in_database(&self) -> bool {
        matches!(self.feed, Feed::Database)
    }

    /// The statements of [`Events::conclude`], if the events are in the database.
    pub(super) fn conclusion(
        &self,
        run: (&str, &str),
        after: i64,
        events: Vec<NewEvent>,
        receipt: NewEvent,
    ) -> Result<Vec<Sql>, RecordsError> {
        let (events, receipt) = (self.prepare(events)?, self.prepare_one(receipt)?);
        Ok(database::conclusion(&self.db, run, after, events, receipt))
    }

    /// Fills the feed of a thread that has no messages with the events of synthetic runs, all or none; `false`, without
    /// a change, if it has messages.
    ///
    /// # Errors
    /// [`RecordsError::NotFound`] if the thread has no row; [`RecordsError::Invalid`] as in [`Events::append`].
    pub async fn seed(&self, thread_id: &str, runs: Vec<SeedRun>) -> Result<bool, RecordsError> {
        let runs = runs
            .into_iter()
            .map(|run| Ok((run.run_id, self.prepare(run.events)?)))
            .collect::<Result<Vec<_>, RecordsError>>()?;
        match &self.feed {
            Feed::Memory(feed) => feed.seed(&self.db, thread_id, runs).await,
            Feed::Database => database::seed(&self.db, thread_id, runs).await,
            Feed::Files(feed) => feed.seed(&self.db, thread_id, runs).await,
        }
    }

    /// The events of a run in feed order; empty for an unknown thread or run.
    ///
    /// # Errors
    /// [`RecordsError::Invalid`] if the limit is outside its range.
    pub async fn list(&self, query: &EventQuery) -> Result<Vec<EventRow>, RecordsError> {
        if !(1..=EventQuery::MAX_LIMIT).contains(&query.limit) {
            let problem = format!("{} is not between 1 and {}", query.limit, EventQuery::MAX_LIMIT);
            return Err(RecordsError::Invalid { field: "limit", problem });
        }
        match &self.feed {
            Feed::Memory(feed) => Ok(feed.list(query).await),
            Feed::Database => database::list(&self.db, query).await,
            Feed::Files(feed) => feed.list(query).await,
        }
    }

    /// Whether the thread has events of the category `message`; without any, its feed counts as empty. The feed is not
    /// read for that.
    pub async fn has_messages(&self, thread_id: &str) -> Result<bool, RecordsError> {
        match &self.feed {
            Feed::Memory(feed) => Ok(feed.has_messages(thread_id).await),
            Feed::Database => database::has_messages(&self.db, thread_id).await,
            Feed::Files(feed) => feed.has_messages(thread_id).await,
        }
    }

    /// How many events of the category `message` the thread has.
    #[cfg(test)]
    pub(super) async fn count_messages(&self, thread_id: &str) -> Result<u64, RecordsError> {
        let count = match &self.feed {
            Feed::Memory(feed) => feed.count_messages(thread_id).await,
            Feed::Database => return database::count_messages(&self.db, thread_id).await,
            Feed::Files(feed) => feed.count_messages(thread_id).await?,
        };
        assert_eq!(self.has_messages(thread_id).await?, count > 0);
        Ok(count)
    }

    /// Whether anything is stored outside the database for the thread. If it has no rows, a deletion that was cut off
    /// after its commit has left that; another deletion removes it.
    pub async fn has_remains(&self, thread_id: &str) -> bool {
        match &self.feed {
            Feed::Memory(feed) => feed.exists(thread_id).await,
            Feed::Database => false,
            Feed::Files(feed) => feed.exists(thread_id).await,
        }
    }

    /// Whether the thread has a file of events, or may have one.
    pub(super) async fn has_file(&self, thread_id: &str) -> bool {
        match &self.feed {
            Feed::Memory(_) | Feed::Database => false,
            Feed::Files(feed) => feed.exists(thread_id).await,
        }
    }

    /// Holds what is stored outside the database for a thread, before the commit that deletes its rows: as soon as that
    /// has happened, another client may create a thread with the same id, whose events are not to be removed.
    pub(super) async fn hold_to_delete(&self, thread_id: &str) -> Result<HeldFeed, RecordsError> {
        Ok(HeldFeed(match &self.feed {
            Feed::Memory(feed) => Held::Memory(Arc::clone(feed), feed.hold_to_delete(thread_id).await),
            Feed::Database => Held::Database,
            Feed::Files(feed) => Held::Files(Arc::clone(feed), feed.hold_to_delete(thread_id).await?),
        }))
    }

    /// Removes what is stored outside the database for a run that has no row any more. Synthetic runs never had one, and
    /// keep theirs.
    pub(super) async fn forget_run(&self, thread_id: &str, run_id: &str) -> Result<(), RecordsError> {
        if [SEED_PREFIX, BRANCH_SEED_PREFIX].iter().any(|prefix| run_id.starts_with(prefix)) {
            return Ok(());
        }
        match &self.feed {
            Feed::Memory(feed) => feed.forget_run(thread_id, run_id).await,
            Feed::Database => {}
            Feed::Files(feed) => feed.forget_run(thread_id, run_id).await?,
        }
        Ok(())
    }

    fn prepare(&self, events: Vec<NewEvent>) -> Result<Vec<PreparedEvent>, RecordsError> {
        events.into_iter().map(|event| self.prepare_one(event)).collect()
    }

    fn prepare_one(&self, mut event: NewEvent) -> Result<PreparedEvent, RecordsError> {
        check_name("event_type", &event.event_type, EVENT_TYPE_MAX_CHARS)?;
        check_name("category", &event.category, CATEGORY_MAX_CHARS)?;
        if event.category == TRACE_CATEGORY {
            cut_trace(&mut event, self.max_trace_content);
        }
        flatten(&mut event);
        Ok(PreparedEvent {
            event_type: event.event_type,
            category: event.category,
            content: event.content,
            metadata: event.metadata,
            created_at: event.created_at.map_or_else(|| self.db.clock.now(), |time| time.trunc_subsecs(6)),
        })
    }
}

impl HeldFeed {
    /// Removes it, now that the thread's rows are deleted; returns how many events it had.
    ///
    /// # Errors
    /// That of the removal of a file.
    pub(super) async fn forget(self, thread_id: &str) -> Result<u64, RecordsError> {
        match self.0 {
            Held::Memory(feed, held) => Ok(feed.forget_thread(thread_id, held).await),
            Held::Database => Ok(0),
            Held::Files(feed, held) => feed.forget_thread(thread_id, held).await,
        }
    }
}

/// An event that has been validated, truncated and given a time.
struct PreparedEvent {
    event_type: String,
    category: String,
    content: Value,
    metadata: JsonObject,
    created_at: DateTime<Utc>,
}

/// The user who owns the events.
type Owner = (Option<String>,);

/// The query for the owner of a run, which also shows whether the run exists.
fn run_owner(thread_id: &str, run_id: &str) -> Sql {
    query("SELECT user_id FROM runs WHERE thread_id = $1 AND run_id = $2 AND operation_kind = 'run'")
        .bind(thread_id)
        .bind(run_id)
}

/// The query for the owner of a thread, which also shows whether the thread exists.
fn thread_owner(thread_id: &str) -> Sql {
    query("SELECT user_id FROM threads_meta WHERE thread_id = $1").bind(thread_id)
}

fn check_name(field: &'static str, name: &str, max: usize) -> Result<(), RecordsError> {
    let chars = name.chars().count();
    if (1..=max).contains(&chars) {
        return Ok(());
    }
    Err(RecordsError::Invalid {
        field,
        problem: format!("'{name}' has {chars} characters, but must have 1 to {max}"),
    })
}

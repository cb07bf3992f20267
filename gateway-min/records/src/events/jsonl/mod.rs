//! The feed as files: one per thread, with one JSON document per line.
//!
//! An append writes its events with one flush. Every line but the last says that more follow, so an append that was
//! interrupted by a crash or a full disk is recognised: the next append removes it, and readers skip it. A number is
//! assigned under the file's lock, from the last line, so several processes of one machine may share the directory.

mod file;

use std::collections::HashMap;
use std::fs::File;
use std::io::{Seek as _, SeekFrom};
use std::path::PathBuf;
use std::sync::{MutexGuard, PoisonError};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::file::{Appended, FeedFile};
use super::stripes::{Stripe, Stripes};
use super::{EventQuery, EventRow, MESSAGE_CATEGORY, Owner, PreparedEvent, run_owner, thread_owner};
use crate::codec::JsonObject;
use crate::db::Db;
use crate::error::RecordsError;
use crate::failure::DatabaseError;
use threadkeep_files as files;

/// The type of the event with which a run begins.
const RUN_START: &str = "run.start";
/// More than a process works on at the same time.
const MAX_STARTS: usize = 10_000;
/// What follows the name of a thread in that of its file.
const EXTENSION: &str = ".jsonl";

/// A line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    Event(Event),
    /// Numbers up to this one were assigned; their events are deleted.
    Given {
        given: i64,
    },
}

/// The line of an event.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(clippy::struct_field_names, reason = "the names are those of the other feeds")]
struct Event {
    thread_id: String,
    run_id: String,
    user_id: Option<String>,
    seq: i64,
    event_type: String,
    category: String,
    content: Value,
    metadata: JsonObject,
    created_at: DateTime<Utc>,
    /// Whether the next line belongs to the same append.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    more: bool,
}

impl Line {
    fn seq(&self) -> i64 {
        match self {
            Self::Event(event) => event.seq,
            Self::Given { given } => *given,
        }
    }

    fn has_more(&self) -> bool {
        matches!(self, Self::Event(Event { more: true, .. }))
    }
}

impl From<Event> for EventRow {
    fn from(event: Event) -> Self {
        Self {
            thread_id: event.thread_id,
            run_id: event.run_id,
            user_id: event.user_id,
            seq: event.seq,
            event_type: event.event_type,
            category: event.category,
            content: event.content,
            metadata: event.metadata,
            created_at: event.created_at,
        }
    }
}

/// The feeds by thread.
///
/// As in memory: an append checks in the database that its run exists while it holds the file, and a deletion holds the
/// file from before the commit that deletes the rows until it is removed. So an append that still found its run is
/// removed with the rest, and a later one is refused, or is of a newer thread with the same id and begins a new file.
#[derive(Debug)]
pub(super) struct JsonlFeed {
    directory: PathBuf,
    /// The appends of this process to one thread wait for each other here, without blocking a runtime thread on the
    /// file's lock.
    stripes: Stripes,
    /// Where the runs begin that this process works on, so that the end of a run does not read its whole thread.
    starts: std::sync::Mutex<HashMap<String, Start>>,
}

/// The append with the first event of a run.
#[derive(Debug, Clone)]
struct Start {
    thread_id: String,
    at: u64,
    seq: i64,
}

/// A thread's file, held for writing.
struct Held {
    file: FeedFile,
    /// Dropped after the file's own lock.
    _stripe: Stripe,
}

/// A thread whose rows are about to be deleted, held for writing.
pub(super) struct Deleting {
    /// `None` if it has no file.
    file: Option<FeedFile>,
    /// Dropped after the file's own lock.
    _stripe: Stripe,
}

impl JsonlFeed {
    pub(super) fn new(directory: PathBuf) -> Self {
        if let Err(error) = files::adopt_thread_names(&directory, EXTENSION) {
            tracing::warn!(%error, directory = %directory.display(), "files of events keep their old names and are not read");
        }
        Self { directory, stripes: Stripes::default(), starts: std::sync::Mutex::default() }
    }

    pub(super) async fn append(
        &self,
        db: &Db,
        thread_id: &str,
        run_id: &str,
        events: Vec<PreparedEvent>,
    ) -> Result<Vec<i64>, RecordsError> {
        let held = self.hold(thread_id).await?;
        let user_id = match owner_of_run(db, thread_id, run_id).await {
            Ok(user_id) => user_id,
            Err(error) => return Err(held.let_go(error).await),
        };
        let begins = events.iter().any(|event| event.event_type == RUN_START);
        let Appended { at, numbers } = held.append(vec![(run_id.to_owned(), events)], user_id).await?;
        if begins && let Some(seq) = numbers.first().copied() {
            let mut starts = self.starts();
            if starts.len() >= MAX_STARTS {
                starts.clear();
            }
            starts.insert(run_id.to_owned(), Start { thread_id: thread_id.to_owned(), at, seq });
        }
        Ok(numbers)
    }

    pub(super) async fn append_if_absent(
        &self,
        db: &Db,
        thread_id: &str,
        run_id: &str,
        event: PreparedEvent,
    ) -> Result<Option<i64>, RecordsError> {
        let held = self.hold(thread_id).await?;
        let user_id = match owner_of_run(db, thread_id, run_id).await {
            Ok(user_id) => user_id,
            Err(error) => return Err(held.let_go(error).await),
        };
        let appended = if self.has(thread_id, run_id, &event.event_type).await? {
            None
        } else {
            let appended = held.append(vec![(run_id.to_owned(), vec![event])], user_id).await?;
            appended.numbers.first().copied()
        };
        self.starts().remove(run_id);
        Ok(appended)
    }

    /// Whether a run has an event of this type.
    async fn has(&self, thread_id: &str, run_id: &str, event_type: &str) -> Result<bool, RecordsError> {
        let start = self.starts().get(run_id).cloned();
        if let Some(Start { at, seq, .. }) = start {
            let (of, wanted) = (run_id.to_owned(), event_type.to_owned());
            let is_it =
                move |event: &Event| event.run_id == of && (event.seq == seq || event.event_type == wanted);
            // Another process may have removed what was before it; then it is not found there, or no line begins there.
            if let Ok(found) = self.select_from(thread_id, at, usize::MAX, is_it).await
                && found.first().is_some_and(|first| first.seq == seq)
            {
                return Ok(found.iter().any(|event| event.event_type == event_type));
            }
        }
        let (of, wanted) = (run_id.to_owned(), event_type.to_owned());
        let is_it = move |event: &Event| event.run_id == of && event.event_type == wanted;
        Ok(!self.select(thread_id, 1, is_it).await?.is_empty())
    }

    fn starts(&self) -> MutexGuard<'_, HashMap<String, Start>> {
        self.starts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets where the runs of a thread begin, whose file is removed or written again.
    fn forget_starts(&self, thread_id: &str) {
        self.starts().retain(|_, start| start.thread_id != thread_id);
    }

    pub(super) async fn seed(
        &self,
        db: &Db,
        thread_id: &str,
        runs: Vec<(String, Vec<PreparedEvent>)>,
    ) -> Result<bool, RecordsError> {
        let held = self.hold(thread_id).await?;
        let owner: Result<Option<Owner>, _> = db.fetch_optional(thread_owner(thread_id)).await;
        let user_id =
            match owner.and_then(|owner| owner.ok_or_else(|| RecordsError::thread_not_found(thread_id))) {
                Ok((user_id,)) => user_id,
                Err(error) => return Err(held.let_go(error).await),
            };
        if !self.select(thread_id, 1, is_message).await?.is_empty() {
            return Ok(false);
        }
        held.append(runs, user_id).await.map(|_| true)
    }

    pub(super) async fn list(&self, query: &EventQuery) -> Result<Vec<EventRow>, RecordsError> {
        let EventQuery { run_id, event_types, task_id, after_seq, limit, thread_id } = query.clone();
        let wanted = move |event: &Event| {
            event.run_id == run_id
                && after_seq.is_none_or(|after| event.seq > after)
                && event_types.as_ref().is_none_or(|types| types.contains(&event.event_type))
                && task_id.as_ref().is_none_or(|task| {
                    event.metadata.get("task_id").and_then(Value::as_str) == Some(task.as_str())
                })
        };
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let events = self.select(&thread_id, limit, wanted).await?;
        Ok(events.into_iter().map(EventRow::from).collect())
    }

    pub(super) async fn has_messages(&self, thread_id: &str) -> Result<bool, RecordsError> {
        Ok(!self.select(thread_id, 1, is_message).await?.is_empty())
    }

    #[cfg(test)]
    pub(super) async fn count_messages(&self, thread_id: &str) -> Result<u64, RecordsError> {
        let messages = self.select(thread_id, usize::MAX, is_message).await?.len();
        Ok(messages.try_into().unwrap_or(u64::MAX))
    }

    /// Holds a thread whose rows are about to be deleted: nobody appends to it until it is forgotten or dropped.
    pub(super) async fn hold_to_delete(&self, thread_id: &str) -> Result<Deleting, RecordsError> {
        let path = self.path(thread_id);
        let stripe = self.stripes.hold(thread_id).await;
        let thread_id = thread_id.to_owned();
        blocking(move || Ok(Deleting { file: FeedFile::hold_existing(path, thread_id)?, _stripe: stripe }))
            .await
    }

    /// Removes the file of a thread that was held before its rows were deleted; returns how many events it had.
    pub(super) async fn forget_thread(&self, thread_id: &str, held: Deleting) -> Result<u64, RecordsError> {
        let Deleting { file, _stripe } = held;
        self.forget_starts(thread_id);
        let Some(file) = file else { return Ok(0) };
        let events = self.select(thread_id, usize::MAX, |_| true).await;
        blocking(move || file.remove()).await?;
        // A damaged file is removed as well.
        Ok(events.map_or(0, |events| events.len().try_into().unwrap_or(u64::MAX)))
    }

    /// Removes the events of one run. The others keep their numbers, and no number is assigned again.
    pub(super) async fn forget_run(&self, thread_id: &str, run_id: &str) -> Result<(), RecordsError> {
        // The thread may be deleted meanwhile: no file is created for it.
        let held = self.hold_to_delete(thread_id).await?;
        self.forget_starts(thread_id);
        let run_id = run_id.to_owned();
        blocking(move || {
            let Deleting { file, _stripe } = held;
            file.map_or(Ok(()), |file| file.retain(|event| event.run_id != run_id))
        })
        .await
    }

    /// Waits for the appends of this process that are under way, also for those whose callers are gone.
    pub(super) async fn settle(&self, thread_id: &str) {
        drop(self.stripes.hold(thread_id).await);
    }

    async fn hold(&self, thread_id: &str) -> Result<Held, RecordsError> {
        let path = self.path(thread_id);
        let stripe = self.stripes.hold(thread_id).await;
        let thread_id = thread_id.to_owned();
        blocking(move || Ok(Held { file: FeedFile::hold(path, thread_id)?, _stripe: stripe })).await
    }

    /// Whether the thread has a file, or may have one.
    pub(super) async fn exists(&self, thread_id: &str) -> bool {
        tokio::fs::try_exists(self.path(thread_id)).await.unwrap_or(true)
    }

    /// The first `limit` events for which `wanted` returns true, in feed order.
    async fn select(
        &self,
        thread_id: &str,
        limit: usize,
        wanted: impl Fn(&Event) -> bool + Send + 'static,
    ) -> Result<Vec<Event>, RecordsError> {
        self.select_from(thread_id, 0, limit, wanted).await
    }

    /// As [`Self::select`], of the appends from this byte of the file on.
    async fn select_from(
        &self,
        thread_id: &str,
        at: u64,
        limit: usize,
        wanted: impl Fn(&Event) -> bool + Send + 'static,
    ) -> Result<Vec<Event>, RecordsError> {
        let (path, thread_id) = (self.path(thread_id), thread_id.to_owned());
        blocking(move || {
            let mut file = match File::open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
                Err(error) => return Err(file::unavailable(error)),
            };
            file.seek(SeekFrom::Start(at)).map_err(file::unavailable)?;
            file::select(file, &path, &thread_id, limit, wanted)
        })
        .await
    }

    /// The file of a thread.
    fn path(&self, thread_id: &str) -> PathBuf {
        self.directory.join(format!("{}{EXTENSION}", files::thread_name(thread_id)))
    }
}

impl Held {
    /// Appends the events of runs, all or none.
    async fn append(
        self,
        runs: Vec<(String, Vec<PreparedEvent>)>,
        user_id: Option<String>,
    ) -> Result<Appended, RecordsError> {
        blocking(move || {
            // All of it, so that the stripe is held until this has ended, also if nobody waits for it.
            let Self { file, _stripe } = self;
            file.append(runs, user_id)
        })
        .await
    }

    /// Releases the file after `error`; one that was created for nothing is removed.
    async fn let_go(self, error: RecordsError) -> RecordsError {
        match blocking(move || self.file.remove_if_empty()).await {
            Ok(()) => error,
            Err(other) => {
                tracing::warn!(error = %other, "an empty event file remains");
                error
            }
        }
    }
}

async fn owner_of_run(db: &Db, thread_id: &str, run_id: &str) -> Result<Option<String>, RecordsError> {
    let owner: Option<Owner> = db.fetch_optional(run_owner(thread_id, run_id)).await?;
    owner.map(|(user_id,)| user_id).ok_or_else(|| RecordsError::run_not_found(run_id))
}

fn is_message(event: &Event) -> bool {
    event.category == MESSAGE_CATEGORY
}

/// Runs blocking work off the reactor, to completion even if the caller's future is dropped.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RecordsError> + Send + 'static,
) -> Result<T, RecordsError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(RecordsError::InDoubt { cause: DatabaseError::Io(error.into()) }),
    }
}

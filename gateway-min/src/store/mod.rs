//! The gateway's relational records: threads, runs, events. (Checkpoints are a saver's; they are not
//! here.)
//!
//! | Table | Key | Holds | Written by |
//! |---|---|---|---|
//! | `threads_meta` | `thread_id` | title, owner, status and metadata of each thread | [`Threads`]; [`Runs::recover_orphans`] sets the status; [`Store::delete_thread`] |
//! | `runs` | `run_id`; unique: one *active* row a thread, `idempotency_key` | every run for good, and a row for each other writer as long as it works | [`Runs`]; [`Store::delete_thread`] |
//! | `run_events` | (`thread_id`, `seq`) | the event feed, if `run_events.backend` is `db` | [`Events`]; [`Store::delete_thread`] |
//!
//! # Who may write to a thread
//!
//! Whoever has its active row in `runs`, which a unique index makes one: a run
//! ([`Runs::admit`]) or another writer ([`Runs::reserve`]): a state update, a goal, a compaction,
//! the deletion of the thread. So a run and a deletion exclude each other by the same rule as two
//! runs do, also between processes and after a crash. Nothing in a process's memory decides it.
//!
//! # Transactions
//!
//! Every operation is one transaction; write transactions run one after the other. An error, a
//! dropped future or a crash leaves all of an operation or nothing. [`StoreError`] says which of the
//! two, save where a commit itself fails ([`StoreError::InDoubt`]). A caller whose future is dropped
//! does not learn which; the methods for which that matters say what to do.

mod codec;
mod db;
mod deletion;
mod error;
mod events;
mod runs;
mod schema;
mod sqlite;
#[cfg(test)]
mod tests;
mod thread_search;
mod threads;

use std::path::Path;

pub use codec::{Clock, JsonObject, UnknownName};
pub use deletion::DeletedThread;
pub use error::{Entity, StoreError};
pub use events::{
    EventBackend, EventQuery, EventRow, Events, MAX_TRACE_CONTENT, MESSAGE_CATEGORY, NewEvent, SeedRun,
    TRACE_CATEGORY,
};
pub use runs::{
    Admission, CancelAction, CancelOutcome, FinishOutcome, MESSAGE_PREVIEW_MAX_CHARS, MultitaskStrategy,
    NewRun, OperationKind, QUEUE_MAX, RECOVERY_ERROR, RECOVERY_STOP_REASON, Recovered, Reservation, RunEnd,
    RunQuery, RunRow, RunStatus, RunTotals, Runs, StartOutcome, WriterKind,
};
pub use thread_search::{FILTER_MAX_KEYS, FilterProblem, FilterRejection, MetadataFilter, ThreadQuery};
pub use threads::{
    CreatedThread, DISPLAY_NAME_MAX_CHARS, NewThread, PINNED_KEY, ThreadRow, ThreadStatus, Threads,
};

use self::db::Db;

/// The name of the database file inside `database.sqlite_dir`.
pub const DATABASE_FILE: &str = "gateway.db";

/// How to open a [`Store`].
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Where the times in the rows come from.
    pub clock: Clock,
    /// The setting `run_events.backend`.
    pub event_backend: EventBackend,
    /// The setting `run_events.max_trace_content`, in bytes.
    pub max_trace_content: usize,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            clock: Clock::system(),
            event_backend: EventBackend::default(),
            max_trace_content: MAX_TRACE_CONTENT,
        }
    }
}

/// The gateway's records. Clones share one database.
#[derive(Clone, Debug)]
pub struct Store {
    db: Db,
    threads: Threads,
    runs: Runs,
    events: Events,
}

impl Store {
    /// Opens the database file, creates it and its directory where they are missing, and brings it to
    /// this build's schema.
    ///
    /// # Errors
    /// [`StoreError::Open`], [`StoreError::NewerSchema`], [`StoreError::OldLibrary`],
    /// [`StoreError::Corrupt`]. A database of a newer schema is left as it is.
    pub async fn open(path: &Path, options: StoreOptions) -> Result<Self, StoreError> {
        Ok(Self::new(Db::open(path, options.clock.clone()).await?, &options))
    }

    /// Opens a database that exists in memory only and ends with the store, for
    /// `database.backend: memory`.
    pub async fn open_memory(options: StoreOptions) -> Result<Self, StoreError> {
        Ok(Self::new(Db::open_memory(options.clock.clone()).await?, &options))
    }

    fn new(db: Db, options: &StoreOptions) -> Self {
        Self {
            threads: Threads { db: db.clone() },
            runs: Runs { db: db.clone() },
            events: Events::new(db.clone(), options.event_backend, options.max_trace_content),
            db,
        }
    }

    /// The threads.
    pub fn threads(&self) -> &Threads {
        &self.threads
    }

    /// The runs and reservations.
    pub fn runs(&self) -> &Runs {
        &self.runs
    }

    /// The event feed.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// The `k`-th statement of a write from now, from 1, fails; 0 disarms. Returns whether a fault was left.
    #[cfg(test)]
    pub(crate) fn fail_statement(&self, k: usize) -> bool {
        let left = self.db.fault.disarm();
        self.db.fault.arm(k);
        left
    }

    /// Waits for the transactions under way and closes the file. Every later call, on any clone, is
    /// [`StoreError::Unavailable`].
    pub async fn close(&self) {
        self.db.close().await;
    }
}

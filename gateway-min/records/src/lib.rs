#![doc = include_str!("../README.md")]
//!
//! # Tables
//!
//! | Table | Key | Holds | Written by |
//! |---|---|---|---|
//! | `threads_meta` | `thread_id` | title, owner, status and metadata of each thread, and which numbers of events are not free although their rows are deleted | [`Threads`]; [`Records::delete_run`]; [`Runs::recover_orphans`] sets the status; [`Records::delete_thread`] |
//! | `runs` | `run_id`; unique: one *active* row per thread, `idempotency_key` | every run, permanently, and a row for each other writer while it works | [`Runs`]; [`Records::delete_thread`] |
//! | `run_frames` | (`run_id`, `next_seq`, `first_seq`) | the last frames of runs that another process follows, until some time after their end | [`Runs`]; [`Records::delete_thread`] |
//! | `executions` | (`execution_id`, `attempt`) | every attempt of a subagent at delegated work | [`Executions`]; [`Records::delete_thread`] |
//! | `store_settings` | `name` | the form in which checkpoints are written | [`Records::agree_on_form`], [`Records::remember_form`] |
//! | `subagent_batches` | `id`; unique: `user_id` and `submission_key` | durable batches of delegations | [`Batches`]; [`Records::delete_thread`] |
//! | `subagent_batch_items` | `id`; unique: `batch_id` and `item_key`, `batch_id` and `position` | their items | [`Batches`]; [`Records::delete_thread`] |
//! | `subagent_batch_remains` | `child_thread` | threads of deleted items that may have been at work, until a worker has looked at them | [`Batches`]; [`Records::delete_thread`] |
//! | `token_budgets` | `id` | what runs with batches have used of their limits of tokens | [`Batches::budget`]; [`Records::delete_thread`] |
//! | `subagents` | `name` | the definitions of managed subagents, if `agent_storage.backend` is `db` | [`Subagents`] |
//! | `run_events` | (`thread_id`, `seq`) | the event feed, if `run_events.backend` is `db` | [`Events`]; [`Records::delete_thread`] |
//!
//! # Who may write to a thread
//!
//! Only the holder of its active row in `runs`, of which a unique index allows one: a run ([`Runs::admit`]) or another
//! writer ([`Runs::reserve`]) such as a state update, a goal, a compaction, or the deletion of the thread. So a run and
//! a deletion exclude each other by the same rule as two runs, also between processes and after a crash. Nothing in a
//! process's memory decides it.
//!
//! # Several processes
//!
//! Any number of gateways may use the tables in Postgres at the same time, if each has a [`Lease`]: its rows in
//! `runs` then say until when it is known to be alive. It renews the rows that it works on ([`Runs::renew`]); any
//! other gateway, also one without leases, ends rows that it has [seen](SeenLeases) not to be renewed
//! ([`Runs::recover_expired`]), whatever its wall clock says. A program beside gateways always has a lease, which its
//! reservations renew; it takes a thread from a reservation that is not renewed, because there may be no gateway. An
//! ended row never changes, so a process that resumes after a stall cannot end anything. Nor does it delegate anything:
//! executions and batches are stored only for a run whose row is active and its own. It deletes nothing of a thread
//! without the row of its reservation. Cancellations are marks in the rows, which the owner polls ([`Runs::noticed`]).
//!
//! # Transactions
//!
//! Every operation is one transaction; write transactions of one thread run one after the other, in SQLite all of them. After an error, a
//! dropped future or a crash, an operation has either happened completely or not at all. [`RecordsError`] says which,
//! except when a commit itself fails ([`RecordsError::InDoubt`]). A caller whose future is dropped does not learn which;
//! the methods for which that matters say what to do.

mod batches;
mod codec;
mod commits;
mod db;
mod deletion;
mod error;
mod events;
mod execution_rows;
mod executions;
mod failure;
#[cfg(any(test, feature = "testing"))]
mod fault;
mod form;
mod opening;
mod own_thread;
mod persist;
mod postgres;
mod query;
mod runs;
mod schema;
mod sqlite;
mod subagents;
#[cfg(test)]
mod tests;
mod thread_search;
mod threads;
mod threads_of_runs;
mod transaction;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use chrono::{DateTime, TimeDelta, Utc};

pub use batches::{
    BatchItemRow, BatchItemStatus, BatchRow, BatchStatus, Batches, BudgetTokens, Claim, Claimed, ClaimedItem,
    Ended, ITEM_CANCELLED, ItemCounts, ItemEnd, ItemResult, LEASE_EXPIRED, LEASE_EXPIRED_LAST, Launch,
    NewBatch, NewBatchItem, RetryOutcome, SubmittedBatch, UncountedItem, UsedSoFar, worker_name,
};
pub use codec::{Clock, JsonObject, UnknownName};
pub use commits::Commits;
pub use deletion::DeletedThread;
pub use error::{Entity, RecordsError};
pub use events::{
    BRANCH_SEED_PREFIX, EventBackend, EventQuery, EventRow, Events, MAX_TRACE_CONTENT, MESSAGE_CATEGORY,
    NewEvent, SEED_PREFIX, SeedRun, TRACE_CATEGORY,
};
pub use executions::{
    CHILD_PREFIX, ExecutionEnd, ExecutionKind, ExecutionRow, ExecutionStatus, ExecutionTokens, Executions,
    NewExecution, Opened,
};
pub use failure::{DatabaseError, SqliteFailure};
pub use form::CheckpointForm;
pub use opening::Delegating;
pub use own_thread::on_its_own_thread;
pub use persist::{persistently, until_available};
pub use postgres::{Changes, Connected, Opener, PostgresTarget};
pub use runs::{
    Admission, CancelAction, CancelOutcome, DecideOutcome, FinishOutcome, FrameBatch, LEASE_EXPIRED_ERROR,
    Lease, MESSAGE_PREVIEW_MAX_CHARS, MultitaskStrategy, NewRun, Noticed, OperationKind, QUEUE_MAX,
    RECOVERY_ERROR, RECOVERY_STOP_REASON, Recovered, Reservation, RunBrief, RunEnd, RunQuery, RunRow,
    RunStatus, RunTotals, RunUsage, Runs, SeenLeases, StartOutcome, WriterKind,
};
pub use subagents::{ReplaceOutcome, Subagents};
pub use thread_search::{
    FILTER_MAX_KEYS, FilterProblem, FilterRejection, METADATA_OMITTED_KEY, MetadataFilter, ThreadOrder,
    ThreadQuery, ThreadSort,
};
pub use threads::{
    AHEAD, CreatedThread, DISPLAY_NAME_MAX_CHARS, NewThread, PINNED_KEY, ThreadRow, ThreadStatus, Threads,
};

use db::Db;

/// The name of the database file inside `database.sqlite_dir`.
pub const DATABASE_FILE: &str = "gateway.db";

/// How to open a [`Records`].
#[derive(Clone, Debug)]
pub struct RecordsOptions {
    /// The source of the times in the rows.
    pub clock: Clock,
    /// The setting `run_events.backend`.
    pub event_backend: EventBackend,
    /// Where the files of [`EventBackend::Jsonl`] are.
    pub event_directory: PathBuf,
    /// The setting `run_events.max_trace_content`, in bytes.
    pub max_trace_content: usize,
    /// The lease terms of this process; `None` for a gateway that is the only one.
    pub lease: Option<Lease>,
}

impl Default for RecordsOptions {
    fn default() -> Self {
        Self {
            clock: Clock::system(),
            event_backend: EventBackend::default(),
            event_directory: PathBuf::from("run_events"),
            max_trace_content: MAX_TRACE_CONTENT,
            lease: None,
        }
    }
}

/// The gateway's records. Clones share one database.
#[derive(Clone, Debug)]
pub struct Records {
    db: Db,
    threads: Threads,
    runs: Runs,
    events: Events,
    executions: Executions,
    batches: Batches,
}

impl Records {
    /// Opens the database file, creating it and its directory if missing, and upgrades it to this build's schema.
    ///
    /// # Errors
    /// [`RecordsError::Open`], [`RecordsError::ReadOnly`], [`RecordsError::NewerSchema`], [`RecordsError::OldLibrary`],
    /// [`RecordsError::Corrupt`]. A database with a newer schema is unchanged.
    pub async fn open(path: &Path, options: RecordsOptions) -> Result<Self, RecordsError> {
        Ok(Self::new(Db::open(path, options.clock.clone()).await?, &options))
    }

    /// Opens a database file that exists, for a program that must not upgrade it: a gateway of an older build may be using
    /// it, and refuses a newer schema.
    ///
    /// # Errors
    /// As for [`Records::open`]; [`RecordsError::OlderSchema`] if the database is of an older build. It is unchanged.
    pub async fn open_existing(path: &Path, options: RecordsOptions) -> Result<Self, RecordsError> {
        Ok(Self::new(Db::open_existing(path, options.clock.clone()).await?, &options))
    }

    /// Opens a database file that cannot be written, as of a backup on read-only media, to read it. Each write is
    /// [`RecordsError::ReadOnly`].
    ///
    /// # Errors
    /// As for [`Records::open`]; [`RecordsError::ReadOnly`] if the database is of an older build, and must be upgraded before
    /// it can be read.
    pub async fn open_read_only(path: &Path, options: RecordsOptions) -> Result<Self, RecordsError> {
        Ok(Self::new(Db::open_read_only(path, options.clock.clone()).await?, &options))
    }

    /// Opens a database in memory that ends with the store, for `database.backend: memory`.
    pub async fn open_memory(options: RecordsOptions) -> Result<Self, RecordsError> {
        Ok(Self::new(Db::open_memory(options.clock.clone()).await?, &options))
    }

    /// Opens the tables in a Postgres database, whose schema must exist, and upgrades them to this build's version.
    ///
    /// # Errors
    /// [`RecordsError::Open`], [`RecordsError::NewerSchema`], [`RecordsError::Corrupt`].
    pub async fn open_postgres(
        target: &PostgresTarget,
        options: RecordsOptions,
    ) -> Result<Self, RecordsError> {
        Ok(Self::new(Db::open_postgres(target, options.clock.clone()).await?, &options))
    }

    /// Like [`Records::open_existing`], for the tables in a Postgres database, if a gateway has created them.
    ///
    /// # Errors
    /// See [`Records::open_postgres`]; [`RecordsError::OlderSchema`].
    pub async fn open_existing_postgres(
        target: &PostgresTarget,
        options: RecordsOptions,
    ) -> Result<Option<Self>, RecordsError> {
        if !Db::is_in_postgres(target).await? {
            return Ok(None);
        }
        let db = Db::open_existing_postgres(target, options.clock.clone()).await?;
        Ok(Some(Self::new(db, &options)))
    }

    fn new(db: Db, options: &RecordsOptions) -> Self {
        let owner = || options.lease.as_ref().map(|lease| lease.owner.clone());
        let (backend, directory) = (options.event_backend, &options.event_directory);
        let events = Events::new(db.clone(), backend, directory, options.max_trace_content);
        Self {
            threads: Threads { db: db.clone(), events: events.clone() },
            executions: Executions { db: db.clone(), owner: owner() },
            batches: Batches { db: db.clone(), owner: owner() },
            runs: Runs {
                db: db.clone(),
                lease: options.lease.clone().map(Arc::new),
                reserved: Arc::default(),
            },
            events,
            db,
        }
    }

    /// The current time of the clock that the rows' times come from.
    pub fn now(&self) -> DateTime<Utc> {
        self.db.clock.now()
    }

    /// How far the database's clock is ahead of this process's, at least: the time for which the answer was awaited is no
    /// difference. Leases need clocks that agree.
    ///
    /// # Errors
    /// [`RecordsError::Unavailable`].
    pub async fn clock_skew(&self) -> Result<TimeDelta, RecordsError> {
        self.db.clock_skew().await
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

    /// The executions of subagents.
    pub fn executions(&self) -> &Executions {
        &self.executions
    }

    /// The durable batches of delegations.
    pub fn batches(&self) -> &Batches {
        &self.batches
    }

    /// [Decides](Runs::decide) how a run will end, and appends its last `events` and its `receipt`, unless it has one, in
    /// the same transaction; they are appended whatever is decided, and once, as [`Events::append_once`] says of events after a
    /// position.
    ///
    /// # Errors
    /// See [`Runs::decide`] and [`Events::append`]. [`RecordsError::Invalid`] if the [events are not in the
    /// database](Events::are_in_database).
    pub async fn conclude_and_decide(
        &self,
        run: (&str, &str),
        (after, events): (i64, Vec<NewEvent>),
        receipt: NewEvent,
        end: &RunEnd,
    ) -> Result<DecideOutcome, RecordsError> {
        if !self.events.are_in_database() {
            let problem = "the events are not in the database".to_owned();
            return Err(RecordsError::Invalid { field: "events", problem });
        }
        let statements = self.events.conclusion(run, after, events, receipt)?;
        self.runs.decide_after(run.1, end, statements).await
    }

    /// What other processes do with runs, from now on.
    pub fn changes(&self) -> Changes {
        self.db.changes()
    }

    /// Makes the `k`-th statement of a write from now, from 1, fail; 0 disarms. Returns whether an unused fault was
    /// armed before.
    #[cfg(any(test, feature = "testing"))]
    pub fn fail_statement(&self, k: usize) -> bool {
        let left = self.db.fault.disarm();
        self.db.fault.arm(k);
        left
    }

    /// Makes the `k`-th statement of a write from now, from 1, and all later ones fail, until [`Self::fail_statement`] is
    /// called. What [`Self::doubt_commit`] armed stays.
    #[cfg(any(test, feature = "testing"))]
    pub fn fail_from(&self, k: usize) {
        self.db.fault.arm_lasting(k);
    }

    /// How many statements have failed because of [`Self::fail_from`].
    #[cfg(any(test, feature = "testing"))]
    pub fn failed(&self) -> usize {
        self.db.fault.failed()
    }

    /// Makes the `k`-th commit of a write from now, from 1, happen but return that it is in doubt. Otherwise as
    /// [`Self::fail_statement`].
    #[cfg(any(test, feature = "testing"))]
    pub fn doubt_commit(&self, k: usize) -> bool {
        let left = self.db.fault.disarm();
        self.db.fault.arm_doubt(k);
        left
    }

    /// Makes the `k`-th commit of a write from now, from 1, not happen, and return that it is in doubt. Otherwise as
    /// [`Self::fail_statement`].
    #[cfg(any(test, feature = "testing"))]
    pub fn lose_commit(&self, k: usize) -> bool {
        let left = self.db.fault.disarm();
        self.db.fault.arm_loss(k);
        left
    }

    /// Makes the next `reads` reads outside of write transactions fail, until [`Self::fail_statement`] is called. What else
    /// is armed stays.
    #[cfg(any(test, feature = "testing"))]
    pub fn fail_reads(&self, reads: usize) {
        self.db.fault.arm_reads(reads);
    }

    /// How many reads are still to fail because of [`Self::fail_reads`].
    #[cfg(any(test, feature = "testing"))]
    pub fn reads_to_fail(&self) -> usize {
        self.db.fault.reads_left()
    }

    /// Makes the next `times` reads and last statements of writes fail whose text contains this. What else is armed stays.
    #[cfg(any(test, feature = "testing"))]
    pub fn fail_with(&self, text: &'static str, times: usize) {
        self.db.fault.arm_text(text, times);
    }

    /// How many are still to fail because of [`Self::fail_with`].
    #[cfg(any(test, feature = "testing"))]
    pub fn left_to_fail(&self) -> usize {
        self.db.fault.texts_left()
    }

    /// How many write transactions this process has committed.
    pub fn commits(&self) -> Arc<Commits> {
        Arc::clone(&self.db.commits)
    }

    /// Waits for running transactions and closes the file. Every later call, on any clone, is
    /// [`RecordsError::Unavailable`].
    pub async fn close(&self) {
        self.db.close().await;
    }
}

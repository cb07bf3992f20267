//! Errors of the store, sorted by what the caller should do.

use std::fmt;

use super::failure::DatabaseError;
use super::runs::OperationKind;

/// The kind of record that a [`RecordsError::NotFound`] names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entity {
    /// A row of `threads_meta`.
    Thread,
    /// A row of `runs` that is a run.
    Run,
    /// A row of `runs` with which another writer holds a thread.
    Reservation,
    /// A row of `executions`.
    Execution,
    /// A row of `subagent_batches`.
    Batch,
}

impl fmt::Display for Entity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Thread => "Thread",
            Self::Run => "Run",
            Self::Reservation => "Reservation",
            Self::Execution => "Execution",
            Self::Batch => "Batch",
        })
    }
}

/// An error of the store. After every variant but [`RecordsError::InDoubt`] nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordsError {
    /// The record does not exist (HTTP 404 with this text).
    #[error("{entity} {id} not found")]
    NotFound {
        /// The kind of record.
        entity: Entity,
        /// Its id.
        id: String,
    },

    /// Another operation holds the thread (HTTP 409 with this text). The service defines two texts: one for a run, one
    /// for every other writer.
    #[error("Thread {thread_id} already has an active {}", holder_name(*.holder))]
    Conflict {
        /// The thread.
        thread_id: String,
        /// What holds it.
        holder: OperationKind,
    },

    /// The maximum number of runs already waits for the thread (HTTP 409).
    #[error(
        "Thread {thread_id} has {waiting} waiting runs, which is the maximum; try again when some have ended"
    )]
    QueueFull {
        /// The thread.
        thread_id: String,
        /// How many runs wait for it.
        waiting: u32,
    },

    /// The run was ended, perhaps by another process, was taken over by one that ends it, or was deleted: it delegates
    /// nothing more here.
    #[error("Run {run_id} has ended or was deleted, so nothing was stored for it; start another run")]
    RunEnded {
        /// The run.
        run_id: String,
    },

    /// The run id is already used.
    #[error("Run {run_id} already exists; use a new run id")]
    DuplicateRun {
        /// The duplicate id.
        run_id: String,
    },

    /// An argument is invalid (HTTP 422 if a client sent it).
    #[error("invalid {field}: {problem}")]
    Invalid {
        /// The argument.
        field: &'static str,
        /// What is wrong with it, and what is allowed.
        problem: String,
    },

    /// The database did not answer (busy, disk full, I/O error, closed). Nothing was changed; the same call may succeed
    /// later.
    #[error("the gateway's database is unavailable; nothing was changed: {cause}")]
    Unavailable {
        /// The database's error.
        cause: DatabaseError,
    },

    /// The database cannot be written. Nothing was changed; what is there can be read.
    #[error(
        "the gateway's database {place} cannot be written, so nothing was changed: {cause}; let this user write to the file and \
         its directory (chmod, chown), mount their file system for writing, or copy the files to a directory that can be \
         written and name it in database.sqlite_dir"
    )]
    ReadOnly {
        /// The file.
        place: String,
        /// The database's error.
        cause: DatabaseError,
    },

    /// A commit failed, and whether it happened is unknown. Read the record before retrying.
    #[error("a commit to the gateway's database failed and may or may not have happened: {cause}")]
    InDoubt {
        /// The database's error.
        cause: DatabaseError,
    },

    /// Stored data cannot be read. Restore the database from a backup.
    #[error(
        "the gateway's database is damaged at {place}: {detail}; restore it from a backup (`threadkeep backup --out FILE` \
         makes one)"
    )]
    Corrupt {
        /// Table, row and column, as far as known.
        place: String,
        /// What is wrong; never the stored content.
        detail: String,
    },

    /// The database cannot be opened or created.
    #[error("cannot open the gateway's database {place}: {cause}; check its location and permissions")]
    Open {
        /// The file, or the database and its server.
        place: String,
        /// The operating system's or the server's error.
        cause: DatabaseError,
    },

    /// A newer build wrote this database.
    #[error(
        "the database {place} has schema version {found}, but this build of Threadkeep knows only \
         versions up to {supported}; start the build that wrote it, or a newer one"
    )]
    NewerSchema {
        /// The file, or the database and its server.
        place: String,
        /// The first unknown schema version found there.
        found: i64,
        /// The newest schema version that this build knows.
        supported: i64,
    },

    /// An older build wrote this database, and what opened it does not upgrade it. Nothing was changed.
    #[error(
        "the gateway's database {place} is of an older build: it lacks {missing} of the migrations; `threadkeep setup` \
         applies them to the configured stores, as a gateway of this build does when it starts, and an older gateway \
         refuses them from then on; to read a backup, set up a copy of it, as checkpoints.db and gateway.db in a \
         database.sqlite_dir"
    )]
    OlderSchema {
        /// The file, or the database and its server.
        place: String,
        /// How many migrations are missing.
        missing: usize,
    },

    /// The SQLite library has a known defect that can damage the database.
    #[error(
        "SQLite {found} is too old: versions before {required} can damage a database in WAL mode; \
         rebuild Threadkeep with a newer SQLite library"
    )]
    OldLibrary {
        /// The version of the linked library.
        found: String,
        /// The oldest safe version.
        required: String,
    },
}

impl RecordsError {
    /// Whether this is a [`RecordsError::NotFound`].
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }

    /// Whether this is a [`RecordsError::Conflict`].
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Conflict { .. })
    }

    /// Whether it says that a [reservation](crate::Reservation) was lost to another process.
    pub fn is_lost_reservation(&self) -> bool {
        matches!(self, Self::NotFound { entity: Entity::Reservation, .. })
    }

    /// Whether the database is unavailable, or cannot be written now, so that the same call may succeed later.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::ReadOnly { .. } | Self::InDoubt { .. })
    }

    /// Whether the same call may succeed later, in this process.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Unavailable { cause } | Self::ReadOnly { cause, .. } | Self::InDoubt { cause } => {
                !cause.lasts()
            }
            _ => false,
        }
    }

    /// The same error of a write to the database in this file, which may be one that cannot be written.
    pub(super) fn of_write_to(self, place: &str) -> Self {
        match self {
            Self::Unavailable { cause } if cause.is_read_only() => {
                Self::ReadOnly { place: place.to_owned(), cause }
            }
            other => other,
        }
    }

    pub(super) fn thread_not_found(thread_id: &str) -> Self {
        Self::NotFound { entity: Entity::Thread, id: thread_id.to_owned() }
    }

    pub(super) fn run_ended(run_id: &str) -> Self {
        Self::RunEnded { run_id: run_id.to_owned() }
    }

    pub(super) fn run_not_found(run_id: &str) -> Self {
        Self::NotFound { entity: Entity::Run, id: run_id.to_owned() }
    }
}

fn holder_name(holder: OperationKind) -> &'static str {
    match holder {
        OperationKind::Run => "run",
        OperationKind::CheckpointWrite
        | OperationKind::ArtifactWrite
        | OperationKind::Branch
        | OperationKind::Delete => "checkpoint write",
    }
}

impl From<DatabaseError> for RecordsError {
    fn from(cause: DatabaseError) -> Self {
        match cause.damage() {
            Some((place, detail)) => Self::Corrupt { place, detail },
            None => Self::Unavailable { cause },
        }
    }
}

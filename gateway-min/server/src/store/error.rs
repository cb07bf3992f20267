//! What can go wrong in the store, sorted by what the caller should do about it.

use std::fmt;

use super::codec::BadCell;
use super::runs::OperationKind;
use super::{postgres, sqlite};

/// The kind of record that a [`StoreError::NotFound`] names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entity {
    /// A row of `threads_meta`.
    Thread,
    /// A row of `runs` that is a run.
    Run,
    /// A row of `runs` by which another writer holds a thread.
    Reservation,
}

impl fmt::Display for Entity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Thread => "Thread",
            Self::Run => "Run",
            Self::Reservation => "Reservation",
        })
    }
}

/// An error of the store. After every variant but [`StoreError::InDoubt`] nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The record does not exist (HTTP 404; the text is the one clients see).
    #[error("{entity} {id} not found")]
    NotFound {
        /// What was looked for.
        entity: Entity,
        /// Its id.
        id: String,
    },

    /// Another operation holds the thread (HTTP 409; the text is the one clients see). The service
    /// knows two texts: one for a run, one for every other writer.
    #[error("Thread {thread_id} already has an active {}", holder_name(*.holder))]
    Conflict {
        /// The thread.
        thread_id: String,
        /// What holds it.
        holder: OperationKind,
    },

    /// As many runs as may wait for the thread already do (HTTP 409).
    #[error(
        "Thread {thread_id} has {waiting} waiting runs, the most that it may have; try again when some have ended"
    )]
    QueueFull {
        /// The thread.
        thread_id: String,
        /// How many runs wait for it.
        waiting: u32,
    },

    /// The run id is taken.
    #[error("Run {run_id} exists already; use a new run id")]
    DuplicateRun {
        /// The id that is taken.
        run_id: String,
    },

    /// An argument is outside its range (HTTP 422 where a client sent it).
    #[error("invalid {field}: {problem}")]
    Invalid {
        /// The argument.
        field: &'static str,
        /// What is wrong with it, and what would be right.
        problem: String,
    },

    /// The database did not answer (busy, disk full, input or output error, closed). Nothing was
    /// changed; the same call may succeed later.
    #[error("the gateway's database is unavailable, nothing was changed: {cause}")]
    Unavailable {
        /// What the database said.
        cause: sqlx::Error,
    },

    /// A commit failed in a way that leaves open whether it happened. Read the record before
    /// trying again.
    #[error("a commit to the gateway's database failed and may or may not have happened: {cause}")]
    InDoubt {
        /// What the database said.
        cause: sqlx::Error,
    },

    /// Something stored cannot be read back. Restore the database from a backup.
    #[error("the gateway's database is damaged at {place}: {detail}; restore it from a backup")]
    Corrupt {
        /// Table, row and column, as far as they are known.
        place: String,
        /// What is wrong there; never the stored content.
        detail: String,
    },

    /// The database cannot be opened or created.
    #[error("cannot open the gateway's database {place}: {cause}; check where it is and its permissions")]
    Open {
        /// The file, or the database and its server.
        place: String,
        /// What the system said.
        cause: sqlx::Error,
    },

    /// A newer build has written this database.
    #[error(
        "the database {place} has schema version {found}, but this build of Threadkeep knows only \
         versions up to {supported}; start the build that wrote it, or a newer one"
    )]
    NewerSchema {
        /// The file, or the database and its server.
        place: String,
        /// The first schema version found there that this build does not know.
        found: i64,
        /// The newest schema version of this build.
        supported: i64,
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

impl StoreError {
    /// Whether this is a [`StoreError::NotFound`].
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }

    /// Whether this is a [`StoreError::Conflict`].
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Conflict { .. })
    }

    /// Whether the database is away, so that the same call may succeed later.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::InDoubt { .. })
    }

    pub(super) fn thread_not_found(thread_id: &str) -> Self {
        Self::NotFound { entity: Entity::Thread, id: thread_id.to_owned() }
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

impl From<sqlx::Error> for StoreError {
    fn from(cause: sqlx::Error) -> Self {
        let (place, detail) = match &cause {
            sqlx::Error::Decode(source) => match source.downcast_ref::<BadCell>() {
                Some(cell) => {
                    (format!("{}.{} of row {}", cell.table, cell.column, cell.row), cell.detail.clone())
                }
                None => ("an unknown row".to_owned(), cause.to_string()),
            },
            sqlx::Error::ColumnDecode { .. } => ("an unknown row".to_owned(), cause.to_string()),
            sqlx::Error::Database(error)
                if sqlite::is_corruption(error.as_ref()) || postgres::is_corruption(error.as_ref()) =>
            {
                ("an unknown page".to_owned(), cause.to_string())
            }
            _ => return Self::Unavailable { cause },
        };
        Self::Corrupt { place, detail }
    }
}

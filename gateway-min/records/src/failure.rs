//! Why a database did not do what it was asked.

use std::error::Error;
use std::io::ErrorKind;
use std::path::Path;

use super::codec::BadCell;
use super::{postgres, sqlite};

/// The cause of a [`RecordsError`](crate::RecordsError), as the database or what is between reported it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatabaseError {
    /// SQLite failed.
    #[error("{0}")]
    Sqlite(SqliteFailure),
    /// The Postgres server refused something, or the connection to it failed.
    #[error("{}", postgres::text_of(.0))]
    Postgres(#[source] tokio_postgres::Error),
    /// A file, or the network.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The records were closed.
    #[error("the gateway's records are closed")]
    Closed,
    /// The others kept the connections, or the thread, for too long.
    #[error("no connection became free in time")]
    Busy,
    /// A cell does not have the type that is expected, or not the content.
    #[error("{0}")]
    Cell(Box<dyn Error + Send + Sync>),
    /// A defect of this program.
    #[error("{0}")]
    Internal(String),
}

/// An error of SQLite: what it said, and its extended code.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct SqliteFailure {
    message: String,
    code: Option<i32>,
    /// Whether every later write fails as well, until the database is opened again.
    lasts: bool,
}

impl From<rusqlite::Error> for SqliteFailure {
    fn from(error: rusqlite::Error) -> Self {
        let code = error.sqlite_error().map(|error| error.extended_code);
        let message = match code {
            Some(code) if code & 0xff == rusqlite::ffi::SQLITE_FULL => {
                format!("(code: {code}) {error}; free some space, then retry")
            }
            Some(code) => format!("(code: {code}) {error}"),
            None => error.to_string(),
        };
        Self { message, code, lasts: false }
    }
}

impl SqliteFailure {
    /// A failure that the library did not notice.
    pub(super) fn new(message: String) -> Self {
        Self { message, code: None, lasts: false }
    }

    /// A commit or a rollback failed before: what reached the disk is unknown until the database is opened again.
    pub(super) fn poisoned() -> Self {
        let message = "an earlier commit failed, so nothing more is written; restart the gateway".to_owned();
        Self { message, code: None, lasts: true }
    }

    /// The file, its log or the log's index is no longer where it was opened. That may pass: it can be put back.
    pub(super) fn gone(file: &Path) -> Self {
        Self::new(format!(
            "{}: the file of the database, its -wal or its -shm was removed, renamed or replaced while it was open, so nothing \
             was written; put it back where it was, or restore a backup (`threadkeep backup --out FILE` makes one), then \
             restart the gateway",
            file.display()
        ))
    }

    /// The database was opened to be read only.
    pub(super) fn read_only() -> Self {
        let message = "it is only read".to_owned();
        Self { message, code: Some(rusqlite::ffi::SQLITE_READONLY), lasts: true }
    }

    /// The extended result code, if the library returned one.
    pub(super) fn code(&self) -> Option<i32> {
        self.code
    }
}

impl From<SqliteFailure> for DatabaseError {
    fn from(failure: SqliteFailure) -> Self {
        Self::Sqlite(failure)
    }
}

impl From<rusqlite::Error> for DatabaseError {
    fn from(error: rusqlite::Error) -> Self {
        SqliteFailure::from(error).into()
    }
}

impl From<tokio_postgres::Error> for DatabaseError {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Postgres(error)
    }
}

impl DatabaseError {
    /// Whether every later write fails as well, until the database is opened again.
    pub(super) fn lasts(&self) -> bool {
        match self {
            Self::Closed => true,
            Self::Sqlite(failure) => failure.lasts,
            _ => false,
        }
    }

    /// Whether the cause is that the file or its directory cannot be written.
    pub(super) fn is_read_only(&self) -> bool {
        match self {
            Self::Sqlite(failure) => sqlite::is_read_only(failure),
            Self::Io(error) => {
                matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem)
            }
            _ => false,
        }
    }

    /// Where the stored data is damaged, and how, if that is the cause.
    pub(super) fn damage(&self) -> Option<(String, String)> {
        match self {
            Self::Cell(cause) => Some(match cause.downcast_ref::<BadCell>() {
                Some(cell) => {
                    (format!("{}.{} of row {}", cell.table, cell.column, cell.row), cell.detail.clone())
                }
                None => ("an unknown row".to_owned(), cause.to_string()),
            }),
            Self::Sqlite(failure) if sqlite::is_corruption(failure) => {
                Some(("an unknown page".to_owned(), self.to_string()))
            }
            Self::Postgres(error) if postgres::is_corruption(error) => {
                Some(("an unknown page".to_owned(), self.to_string()))
            }
            _ => None,
        }
    }
}

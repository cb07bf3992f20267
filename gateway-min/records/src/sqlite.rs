//! What is specific to SQLite: opening connections, beginning write transactions, and SQL expressions that differ
//! between databases.

use std::path::Path;
use std::time::Duration;

use sqlx::error::DatabaseError;
use sqlx::sqlite::{
    SqliteArguments, SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Sqlite, SqlitePool};

use super::db::Flush;
use super::error::RecordsError;
use super::query::{Builder, Sql, Value};

pub(super) type Pool = SqlitePool;

/// The statements that begin a write transaction. It takes the write lock at once: a transaction that begins as a
/// reader and becomes a writer later can fail half-way with "busy", this one only waits at its beginning.
pub(super) fn begin(flush: Flush) -> &'static str {
    match flush {
        Flush::Now => "PRAGMA synchronous = FULL; BEGIN IMMEDIATE",
        // In WAL mode the log is flushed before a checkpoint, so nothing is ever damaged.
        Flush::WithNext => "PRAGMA synchronous = NORMAL; BEGIN IMMEDIATE",
    }
}

/// The oldest library whose WAL mode is safe: earlier ones can lose commits when a WAL file is reset while another
/// connection checkpoints it.
const OLDEST_LIBRARY: (u32, u32, u32) = (3, 51, 3);

/// How long a statement waits for another *process* that holds the file. Within the process writers queue for the one
/// writing connection instead.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

const READERS: u32 = 4;

/// The one connection that writes to the file, which is created with its directory if missing.
pub(super) async fn open_writer(path: &Path) -> Result<Pool, sqlx::Error> {
    if let Some(directory) = path.parent() {
        // Brief, and once per start.
        threadkeep_files::create_private_dir(directory)?;
    }
    pool(1).connect_with(file_options(path).create_if_missing(true)).await
}

/// Read-only connections to the file.
pub(super) async fn open_readers(path: &Path) -> Result<Pool, sqlx::Error> {
    pool(READERS).connect_with(file_options(path).pragma("query_only", "ON")).await
}

/// A private database in memory, with a single connection.
pub(super) async fn open_memory() -> Result<Pool, sqlx::Error> {
    pool(1).connect_with(common_options().in_memory(true)).await
}

fn pool(connections: u32) -> SqlitePoolOptions {
    // Connections live as long as the pool: there is no server that could drop them, and closing the only connection of
    // a memory database would lose it. For the same reason they are not tested before use: the pool closes a connection
    // if the future that tests it is dropped.
    SqlitePoolOptions::new()
        .max_connections(connections)
        .min_connections(1)
        .idle_timeout(None)
        .max_lifetime(None)
        .test_before_acquire(false)
}

fn file_options(path: &Path) -> SqliteConnectOptions {
    common_options().filename(path).journal_mode(SqliteJournalMode::Wal).synchronous(SqliteSynchronous::Full)
}

fn common_options() -> SqliteConnectOptions {
    SqliteConnectOptions::new().foreign_keys(true).busy_timeout(BUSY_TIMEOUT).disable_statement_logging()
}

/// Refuses a library with the WAL defect.
pub(super) async fn check_library(pool: &Pool) -> Result<(), RecordsError> {
    let found: String = sqlx::query_scalar("SELECT sqlite_version()").fetch_one(pool).await?;
    check_version(&found)
}

fn check_version(found: &str) -> Result<(), RecordsError> {
    let mut numbers = found.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    if (next(), next(), next()) >= OLDEST_LIBRARY {
        return Ok(());
    }
    let (major, minor, patch) = OLDEST_LIBRARY;
    Err(RecordsError::OldLibrary { found: found.to_owned(), required: format!("{major}.{minor}.{patch}") })
}

/// Whether SQLite reports that the file is damaged or not a database.
pub(super) fn is_corruption(error: &dyn DatabaseError) -> bool {
    const CORRUPT: u32 = 11;
    const NOT_A_DATABASE: u32 = 26;
    // The low byte is the kind of error, the rest its details.
    let kind = error.code().and_then(|code| code.parse::<u32>().ok()).map(|code| code & 0xff);
    matches!(kind, Some(CORRUPT | NOT_A_DATABASE))
}

/// A statement in SQLite form.
pub(super) fn prepared(sql: Sql) -> sqlx::query::Query<'static, Sqlite, SqliteArguments> {
    let mut query = sqlx::query(AssertSqlSafe(sql.text));
    for value in sql.values {
        query = match value {
            Value::Text(text) => query.bind(text),
            Value::Int(number) => query.bind(number),
            Value::Flag(flag) => query.bind(flag),
            Value::Texts(texts) => query.bind(serde_json::Value::from(texts).to_string()),
        };
    }
    query
}

/// The SQL around the list in "column is one of these texts".
pub(super) const TEXT_IN: (&str, &str) = (" IN (SELECT value FROM json_each(", "))");

/// Appends the text of the value at `key` of the JSON object in `column`.
pub(super) fn push_json_at(query: &mut Builder, column: &str, key: &str) {
    query.push("(").push(column).push(" -> ").push_bind(format!("$.\"{key}\"")).push(")");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_with_the_wal_defect_are_refused() {
        for safe in ["3.51.3", "3.51.10", "3.52.0", "4.0.0", "3.51.3.1"] {
            assert!(check_version(safe).is_ok(), "{safe}");
        }
        for old in ["3.51.2", "3.50.9", "2.99.99", "", "nonsense"] {
            let error = check_version(old).unwrap_err().to_string();
            assert!(error.contains("3.51.3") && error.contains(old), "{error}");
        }
    }
}

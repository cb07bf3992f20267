//! What is specific to SQLite: opening connections, running statements, and SQL expressions that differ between
//! databases.
//!
//! One thread writes ([`writer`]); reads use a few other connections ([`readers`]). In WAL mode readers and the writer do
//! not block each other.

mod files;
mod readers;
mod writer;

use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::types::{ToSqlOutput, Value as Stored};
use rusqlite::{Connection, MAIN_DB, OpenFlags, ToSql};

pub(super) use self::files::Files;
pub(super) use self::readers::Readers;
#[cfg(test)]
pub(super) use self::writer::QUEUE;
pub(super) use self::writer::{Answer, Committed, Writer};
use super::error::RecordsError;
use super::failure::{DatabaseError, SqliteFailure};
use super::query::{Builder, FromRow, Row, Sql, Value};

/// The oldest library whose WAL mode is safe: earlier ones can lose commits when a WAL file is reset while another
/// connection checkpoints it.
const OLDEST_LIBRARY: (u32, u32, u32) = (3, 51, 3);

/// How long a statement waits for another *process* that holds the file. Within the process writers queue for the one
/// writing thread instead.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// More than there are different statements.
const STATEMENTS: usize = 128;

/// Pages in the log from which on a commit moves them into the database file. Each move flushes twice, and pages that
/// changed often are moved once.
const LOG_PAGES: u32 = 4_000;

/// The connection that writes to the file, which is created with its directory if missing. Blocks.
pub(super) fn open_writer(path: &Path) -> Result<Connection, DatabaseError> {
    if let Some(directory) = path.parent() {
        threadkeep_files::create_private_dir(directory)?;
    }
    let connection = open(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE)?;
    // SQLite opens what cannot be written to read it.
    if connection.is_readonly(MAIN_DB)? {
        return Err(SqliteFailure::read_only().into());
    }
    let settings = format!("PRAGMA journal_mode = WAL; PRAGMA wal_autocheckpoint = {LOG_PAGES}");
    connection.execute_batch(&settings)?;
    Ok(connection)
}

/// A read-only connection to a file that exists, and is a database. It has read, and so has opened the log: later
/// another one may have that name.
pub(super) fn open_existing(path: &Path) -> Result<Connection, DatabaseError> {
    let connection = open(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    connection.pragma_update(None, "query_only", true)?;
    readable(connection)
}

/// The connection, if its file can be read, which opening it does not show.
fn readable(connection: Connection) -> Result<Connection, DatabaseError> {
    connection.query_row("SELECT COUNT(*) FROM sqlite_master", (), |_| Ok(()))?;
    Ok(connection)
}

/// A connection to a file that cannot be written. In a directory where no log and no index of one can be made it is read as
/// it is, unless it has a log: then what is in there would be missing.
fn open_alone(path: &Path) -> Result<Connection, DatabaseError> {
    let opened = open(path, OpenFlags::SQLITE_OPEN_READ_ONLY).and_then(readable);
    // SQLite names the log after the file that a link leads to.
    let file = if cfg!(unix) { path.canonicalize().ok() } else { None };
    let file = file.as_deref().unwrap_or(path);
    let mut log = file.as_os_str().to_owned();
    log.push("-wal");
    let has_log = std::fs::metadata(log).is_ok_and(|log| log.len() > 0);
    match opened {
        Err(DatabaseError::Sqlite(failure)) if !has_log && !is_corruption(&failure) => {
            let name = file.to_string_lossy().replace('%', "%25").replace('?', "%3f").replace('#', "%23");
            let address = PathBuf::from(format!("file:{name}?immutable=1"));
            let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI;
            open(&address, flags).and_then(readable)
        }
        opened => opened,
    }
}

fn open(path: &Path, flags: OpenFlags) -> Result<Connection, DatabaseError> {
    let connection = Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX);
    prepare(connection?)
}

/// A private database in memory.
pub(super) fn open_memory() -> Result<Connection, DatabaseError> {
    prepare(Connection::open_in_memory()?)
}

fn prepare(connection: Connection) -> Result<Connection, DatabaseError> {
    connection.set_prepared_statement_cache_capacity(STATEMENTS);
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.pragma_update(None, "foreign_keys", true)?;
    // Else SQLite prepares a statement with a bound limit again at every use.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
    Ok(connection)
}

/// Refuses a library with the WAL defect.
pub(super) fn check_library() -> Result<(), RecordsError> {
    check_version(rusqlite::version())
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

/// Runs a statement; returns the number of changed rows.
pub(super) fn execute(connection: &Connection, sql: &Sql) -> Result<u64, DatabaseError> {
    let before = connection.total_changes();
    each(connection, sql, |_| Ok(false))?;
    Ok(connection.total_changes() - before)
}

/// The first row of a query.
pub(super) fn fetch_optional<T: FromRow>(
    connection: &Connection,
    sql: &Sql,
) -> Result<Option<T>, DatabaseError> {
    let mut found = None;
    each(connection, sql, |row| {
        found = Some(T::from_row(row)?);
        Ok(false)
    })?;
    Ok(found)
}

/// All rows of a query.
pub(super) fn fetch_all<T: FromRow>(connection: &Connection, sql: &Sql) -> Result<Vec<T>, DatabaseError> {
    let mut found = Vec::new();
    each(connection, sql, |row| {
        found.push(T::from_row(row)?);
        Ok(true)
    })?;
    Ok(found)
}

/// Runs a statement; returns its rows, and how many it returned or changed.
pub(super) fn run<T: FromRow>(connection: &Connection, sql: &Sql) -> Result<(Vec<T>, u64), DatabaseError> {
    let before = connection.total_changes();
    let rows = fetch_all(connection, sql)?;
    let changed = connection.total_changes() - before;
    let count = if rows.is_empty() { changed } else { u64::try_from(rows.len()).unwrap_or(u64::MAX) };
    Ok((rows, count))
}

/// Passes each row to `read`, until that returns false.
fn each(
    connection: &Connection,
    sql: &Sql,
    mut read: impl FnMut(&Row<'_>) -> Result<bool, DatabaseError>,
) -> Result<(), DatabaseError> {
    let mut statement = connection.prepare_cached(&sql.text)?;
    // `$2` is a name to SQLite, which numbers names by their first use.
    for place in 1..=statement.parameter_count() {
        let number = statement.parameter_name(place).and_then(|name| name.strip_prefix('$')?.parse().ok());
        let value = number.and_then(|number: usize| sql.values.get(number.checked_sub(1)?));
        let value =
            value.ok_or_else(|| DatabaseError::Internal(format!("parameter {place} has no value")))?;
        statement.raw_bind_parameter(place, value)?;
    }
    let mut rows = statement.raw_query();
    while let Some(row) = rows.next()? {
        if !read(&Row::Sqlite(row))? {
            // A statement that changes rows has changed all of them when it returns the first one.
            break;
        }
    }
    Ok(())
}

impl ToSql for Value {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        match self {
            Self::Text(text) => text.to_sql(),
            Self::Int(number) => number.to_sql(),
            Self::Flag(flag) => flag.to_sql(),
            Self::Texts(texts) => {
                Ok(ToSqlOutput::Owned(Stored::Text(serde_json::Value::from(texts.clone()).to_string())))
            }
        }
    }
}

/// Whether SQLite reports that the file is damaged or not a database.
pub(super) fn is_corruption(failure: &SqliteFailure) -> bool {
    const CORRUPT: i32 = 11;
    const NOT_A_DATABASE: i32 = 26;
    // The low byte is the kind of error, the rest its details.
    matches!(failure.code().map(|code| code & 0xff), Some(CORRUPT | NOT_A_DATABASE))
}

/// Whether SQLite reports that the file cannot be written.
pub(super) fn is_read_only(failure: &SqliteFailure) -> bool {
    failure.code().map(|code| code & 0xff) == Some(rusqlite::ffi::SQLITE_READONLY)
}

/// Whether SQLite reports that the disk is full.
fn is_full(failure: &SqliteFailure) -> bool {
    const FULL: i32 = 13;
    failure.code().map(|code| code & 0xff) == Some(FULL)
}

/// The SQL around the list in "column is one of these texts".
pub(super) const TEXT_IN: (&str, &str) = (" IN (SELECT value FROM json_each(", "))");

/// Appends the text of the value at `key` of the JSON object in `column`.
pub(super) fn push_json_at(query: &mut Builder, column: &str, key: &str) {
    query.push("(").push(column).push(" -> ").push_bind(format!("$.\"{key}\"")).push(")");
}

#[cfg(test)]
mod tests {
    use rusqlite::StatementStatus;

    use super::*;
    use crate::query::query;

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

    #[test]
    fn statements_with_a_bound_limit_are_prepared_once() {
        let connection = open_memory().unwrap();
        let sql = |limit: i64| query("SELECT name FROM sqlite_master LIMIT $1").bind(limit);
        for limit in 1..4 {
            execute(&connection, &sql(limit)).unwrap();
        }
        let statement = connection.prepare_cached(&sql(1).text).unwrap();
        assert_eq!(statement.get_status(StatementStatus::Run), 3);
        assert_eq!(statement.get_status(StatementStatus::RePrepare), 0);
    }

    #[test]
    fn parameters_are_bound_by_their_number() {
        let connection = open_memory().unwrap();
        let sql = query("SELECT $2 || $1 || $2 || $10").bind("a").bind("b");
        let sql = (3..=10).fold(sql, |sql, number: i64| sql.bind(number));
        let found: Option<(String,)> = fetch_optional(&connection, &sql).unwrap();
        assert_eq!(found.unwrap().0, "bab10");
        let short = fetch_optional::<(String,)>(&connection, &query("SELECT $2").bind("a"));
        assert!(short.unwrap_err().to_string().contains("parameter 1"), "{sql:?}");
    }
}

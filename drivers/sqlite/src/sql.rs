//! A connection: every statement that reads or writes rows goes through here.

#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rusqlite::config::DbConfig;
use rusqlite::types::ValueRef;
use rusqlite::{ErrorCode, OpenFlags, Params, Row};
use threadkeep::{Error, Result};
use threadkeep_pages::{Bound, Kept};

use crate::config::{Options, Synchronous, bounded};
use crate::error::{GONE, from_sqlite, in_doubt, io_failed, unavailable};
use crate::rows::pack::{Packer, Slab};
use crate::rows::seal::RowKey;
use crate::schema::APPLICATION_ID;

/// Page cache of a connection, in KiB.
const CACHE_KIB: i64 = 16_384;
/// A WAL that grew beyond this many bytes is truncated when it is reset.
const WAL_LIMIT: i64 = 64 << 20;
/// Pages in the log from which on a commit moves them into the database file.
const LOG_PAGES: i64 = 1_000;
/// More than there are different statements.
const STATEMENTS: usize = 64;

/// How long to wait before asking for a lock again.
const ASK_AGAIN: Duration = Duration::from_millis(1);

/// How long SQLite waits for the reads that use the log before it looks again which they are. It waits for the lock of a
/// place in the log, also when the read that it waits for has ended, and later ones, which read all of the log and are not
/// in the way, hold that lock one after the other.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

const COMMIT: &str = "COMMIT";
const VACUUM: &str = "VACUUM";
const EMPTY_LOG: &str = "PRAGMA wal_checkpoint(TRUNCATE)";

/// Why a transaction could not be committed. What reached the disk is unknown.
#[derive(Debug)]
pub(crate) struct FailedCommit {
    /// There was no space for it: nothing is wrong with what was written before.
    pub(crate) disk_full: bool,
    pub(crate) reason: String,
}

/// A connection to the database.
pub(crate) struct Db {
    conn: Kept,
    store: Arc<str>,
    busy_timeout: Duration,
    /// The log and its index, by their names.
    beside: Vec<(PathBuf, FileId)>,
    packer: RefCell<Packer>,
    /// Rows that queries returned.
    rows_read: Cell<u64>,
    #[cfg(test)]
    faults: Option<Arc<crate::tests::faults::Faults>>,
    /// How many statements were run.
    #[cfg(test)]
    pub(crate) statements: Cell<usize>,
}

/// The address of a database that nobody can write now, to be read as it is: no log can be made beside it. None if it has
/// a log, what is in which would be missing, or does not exist.
pub(crate) fn resting_file(path: &Path) -> Option<PathBuf> {
    // SQLite names the log after the file that a link leads to.
    let path = if cfg!(unix) { path.canonicalize().ok()? } else { path.to_owned() };
    let mut log = path.clone().into_os_string();
    log.push("-wal");
    if std::fs::metadata(log).is_ok_and(|log| log.len() > 0) {
        return None;
    }
    let name = path.to_string_lossy().replace('%', "%25").replace('?', "%3f").replace('#', "%23");
    Some(PathBuf::from(format!("file:{name}?immutable=1")))
}

/// Attempts something while `again` says so and the patience lasts, and once more when that is over: a process that
/// stood still meanwhile has hardly tried. Without patience it is attempted once. An attempt gets what is left of the
/// patience, which is how long it may wait itself: nothing in the last one.
pub(crate) fn patiently<T>(
    (patience, pause): (Duration, Duration),
    mut attempt: impl FnMut(Duration) -> T,
    again: impl Fn(&T) -> bool,
) -> T {
    let began = Instant::now();
    let mut left = patience;
    loop {
        let done = attempt(left);
        if left.is_zero() || !again(&done) {
            return done;
        }
        left = patience.saturating_sub(began.elapsed());
        std::thread::sleep(pause);
    }
}

impl Db {
    /// The writing connection; creates the database if it does not exist.
    pub(crate) fn writer(path: &Path, options: &Options) -> Result<Self> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE;
        let mut db = Self::open(path, options, flags)?;
        crate::schema::prepare(&db.conn, &db.store, db.busy_timeout)?;
        db.pragma("journal_size_limit", WAL_LIMIT)?;
        db.beside = db.files_beside()?;
        #[cfg(test)]
        {
            options.faults.apply(&db.conn);
            db.faults = Some(options.faults.clone());
        }
        Ok(db)
    }

    /// A connection that only reads.
    pub(crate) fn reader(path: &Path, options: &Options) -> Result<Self> {
        Self::open(path, options, OpenFlags::SQLITE_OPEN_READ_ONLY)
    }

    /// A connection to a [`resting_file`].
    pub(crate) fn of_resting_file(file: &Path, options: &Options) -> Result<Self> {
        Self::open(file, options, OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI)
    }

    /// Checks that the database is one that this connection can read.
    pub(crate) fn check_format(&self) -> Result<()> {
        crate::schema::check(&self.conn, &self.store)
    }

    fn open(path: &Path, options: &Options, flags: OpenFlags) -> Result<Self> {
        let store: Arc<str> = path.display().to_string().into();
        let conn = threadkeep_pages::open(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)
            .map_err(|error| from_sqlite(&store, &error))?;
        let db = Self {
            conn: Kept::new(conn),
            store,
            busy_timeout: bounded(options.busy_timeout),
            beside: Vec::new(),
            packer: RefCell::new(Packer::new(options.compression)),
            rows_read: Cell::new(0),
            #[cfg(test)]
            faults: None,
            #[cfg(test)]
            statements: Cell::new(0),
        };
        db.conn.set_prepared_statement_cache_capacity(STATEMENTS);
        db.conn.busy_timeout(db.busy_timeout).map_err(|error| db.error(&error))?;
        // Else SQLite prepares a statement with a bound limit again at every use.
        db.conn
            .set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)
            .map_err(|error| db.error(&error))?;
        db.pragma("cache_size", -CACHE_KIB)?;
        db.pragma("cell_size_check", true)?;
        db.pragma("trusted_schema", false)?;
        Ok(db)
    }

    /// The bytes of an element as they are stored.
    pub(crate) fn pack(&self, bytes: &[u8]) -> Result<Vec<u8>> {
        self.packer.borrow_mut().pack(self, bytes)
    }

    /// The bytes of a stored element, in `slab` if there is one.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if they cannot be unpacked.
    pub(crate) fn unpack(&self, place: RowKey, body: &[u8], slab: Option<&mut Slab>) -> Result<Bytes> {
        self.packer.borrow_mut().unpack(self, place, body, slab)
    }

    /// Reads dictionaries again when they are needed next.
    pub(crate) fn forget_dictionary(&self) {
        self.packer.borrow_mut().forget();
    }

    /// Uses the newest dictionary, though another connection may have stored it.
    pub(crate) fn others_wrote(&self) {
        self.packer.borrow_mut().others_wrote();
    }

    fn pragma(&self, name: &str, value: impl rusqlite::ToSql) -> Result<()> {
        // Some of them return a row, some do not.
        let read = |_: &Row<'_>| Ok(());
        match self.conn.pragma_update_and_check(None, name, value, read) {
            Ok(()) | Err(rusqlite::Error::QueryReturnedNoRows) => Ok(()),
            Err(error) => Err(self.error(&error)),
        }
    }

    /// Runs a statement that returns no rows; returns how many it changed.
    pub(crate) fn execute(&self, sql: &str, params: impl Params) -> Result<usize> {
        self.attempt(sql, || self.conn.prepare_cached(sql)?.execute(params))
    }

    /// [`Self::execute`] of a statement that most transactions run: it stays prepared.
    pub(crate) fn often(&self, sql: &'static str, values: &[Bound<'_>]) -> Result<()> {
        self.attempt(sql, || self.conn.run(sql, values))
    }

    /// Runs a query and passes each row to `read`.
    pub(crate) fn each(
        &self,
        sql: &str,
        params: impl Params,
        mut read: impl FnMut(&Row<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut stopped = Ok(());
        self.attempt(sql, || {
            let mut statement = self.conn.prepare_cached(sql)?;
            let mut rows = statement.query(params)?;
            while let Some(row) = rows.next()? {
                self.rows_read.set(self.rows_read.get() + 1);
                stopped = read(row);
                if stopped.is_err() {
                    break;
                }
            }
            Ok(())
        })?;
        stopped
    }

    /// Runs a query for at most one row.
    pub(crate) fn one<T>(
        &self,
        sql: &str,
        params: impl Params,
        mut read: impl FnMut(&Row<'_>) -> Result<T>,
    ) -> Result<Option<T>> {
        let mut found = None;
        self.each(sql, params, |row| {
            found = Some(read(row)?);
            Ok(())
        })?;
        Ok(found)
    }

    /// Runs a statement unless another connection holds the lock that it needs; returns whether it was run.
    pub(crate) fn at_once(&self, sql: &'static str) -> Result<bool> {
        let impatient = |pause| self.conn.busy_timeout(pause).map_err(|error| self.error(&error));
        impatient(Duration::ZERO)?;
        let done = self.run(sql, || self.conn.run(sql, &[]));
        impatient(self.busy_timeout)?;
        match done {
            Ok(()) => Ok(true),
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => Ok(false),
            Err(error) => Err(self.error(&error)),
        }
    }

    /// Runs a statement as soon as no other connection holds the lock that it needs, for up to the busy timeout. SQLite's
    /// own waiting asks less and less often, down to every 100 ms, and rarely meets the moment between two short
    /// transactions of another process.
    pub(crate) fn when_free(&self, sql: &'static str) -> Result<()> {
        let times = (self.busy_timeout, ASK_AGAIN);
        if patiently(times, |_| self.at_once(sql), |done| matches!(done, Ok(false)))? {
            return Ok(());
        }
        let busy = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_BUSY);
        Err(self.error(&rusqlite::Error::SqliteFailure(busy, None)))
    }

    /// Sets what later transactions wait for, and whether they may move the log into the file: a failure to flush the
    /// log there is not reported to anyone. SQLite accepts this only between two transactions, and when the statement
    /// is prepared, so these are not cached.
    pub(crate) fn wait_for(&self, level: Synchronous, moves_the_log: bool) -> Result<()> {
        let level = match level {
            Synchronous::Full => "FULL",
            Synchronous::Normal => "NORMAL",
        };
        let pages = if moves_the_log { LOG_PAGES } else { 0 };
        let sql = format!("PRAGMA synchronous = {level}; PRAGMA wal_autocheckpoint = {pages}");
        self.attempt(&sql, || self.conn.execute_batch(&sql))
    }

    /// Makes the open transaction write something although nothing changes: a commit without a page flushes nothing.
    pub(crate) fn touch(&self) -> Result<()> {
        let same = format!("PRAGMA application_id = {APPLICATION_ID}");
        self.execute(&same, []).map(|_| ())
    }

    /// The log and its index. They exist as long as a connection that has read from the database is open.
    fn files_beside(&self) -> Result<Vec<(PathBuf, FileId)>> {
        self.one("PRAGMA schema_version", [], |_| Ok(()))?;
        // With links resolved, as SQLite names these files.
        let Some(path) = self.conn.path() else { return Ok(Vec::new()) };
        let files = ["-wal", "-shm"].map(|end| {
            let file = PathBuf::from(format!("{path}{end}"));
            let id = file_id(&file).ok_or_else(|| unavailable(format!("{}: {GONE}", self.store)))?;
            Ok((file, id))
        });
        files.into_iter().collect()
    }

    /// Checks that the database, its log and the log's index still have their names: commits to unlinked files are
    /// lost. Asks the file system only, because opening a file would drop the locks of the process.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if one of them was removed, renamed or replaced.
    pub(crate) fn in_place(&self) -> Result<()> {
        let moved = threadkeep_pages::has_moved(&self.conn).map_err(|error| self.error(&error))?;
        if moved || self.beside.iter().any(|(file, known)| file_id(file) != Some(*known)) {
            return Err(unavailable(format!("{}: {GONE}", self.store)));
        }
        Ok(())
    }

    /// The number of rows written, including those of transactions that were rolled back.
    pub(crate) fn rows_written(&self) -> u64 {
        self.conn.total_changes()
    }

    /// The number of rows that were read or written since the connection was opened.
    pub(crate) fn rows(&self) -> u64 {
        self.rows_read.get() + self.rows_written()
    }

    /// Commits the open transaction.
    pub(crate) fn commit(&self) -> Result<(), FailedCommit> {
        let committed = self.run(COMMIT, || self.conn.run(COMMIT, &[]));
        committed.map_err(|error| FailedCommit {
            disk_full: error.sqlite_error_code() == Some(ErrorCode::DiskFull),
            reason: format!("{}: the commit failed: {error}", self.store),
        })
    }

    /// The bytes of the log's file.
    pub(crate) fn log_bytes(&self) -> u64 {
        let log = self.beside.first().and_then(|(log, _)| std::fs::metadata(log).ok());
        log.map_or(0, |log| log.len())
    }

    /// Moves the log into the database and empties it, if the reads that use it end within `patience`. Returns whether it
    /// did. Others can read meanwhile, but not write.
    ///
    /// # Errors
    /// [`Error::InDoubt`] if what reached the disk is unknown.
    pub(crate) fn empty_log(&self, patience: Duration) -> Result<bool> {
        let waits = |pause| self.conn.busy_timeout(pause).map_err(|error| self.error(&error));
        waits(LOOK_AGAIN)?;
        let empty = |_| {
            self.run(EMPTY_LOG, || {
                self.conn.prepare_cached(EMPTY_LOG)?.query_row([], |row| Ok(row.get::<_, i64>(0)? == 0))
            })
        };
        // It is SQLite that pauses.
        let emptied = patiently((patience, Duration::ZERO), empty, |emptied| matches!(emptied, Ok(false)));
        waits(self.busy_timeout)?;
        emptied.map_err(|error| self.flushing(&error, "emptying the log failed"))
    }

    /// The error of a statement that flushes: in doubt if the disk failed.
    fn flushing(&self, error: &rusqlite::Error, what: &str) -> Error {
        if io_failed(error) {
            return in_doubt(format!("{}: {what}: {error}; reopen the store", self.store));
        }
        self.error(error)
    }

    /// Writes the whole database again, in a transaction that this statement commits itself.
    ///
    /// # Errors
    /// [`Error::InDoubt`] if what reached the disk is unknown.
    pub(crate) fn vacuum(&self) -> Result<()> {
        let written = self.run(VACUUM, || self.conn.prepare_cached(VACUUM)?.execute([]));
        written.map(|_| ()).map_err(|error| self.flushing(&error, "the vacuum failed"))
    }

    /// The key of the last insert.
    pub(crate) fn last_key(&self) -> i64 {
        self.conn.last_insert_rowid()
    }

    /// Whether no transaction is open; an error may have rolled it back.
    pub(crate) fn is_autocommit(&self) -> bool {
        self.conn.is_autocommit()
    }

    /// A number that changes with every commit here, and when a transaction begins after another connection has written
    /// to the database.
    pub(crate) fn data_version(&self) -> Result<u32> {
        threadkeep_pages::data_version(&self.conn).map_err(|error| self.error(&error))
    }

    /// Moves the WAL into the database file and empties it, as far as other readers allow.
    pub(crate) fn checkpoint_wal(&self) -> Result<()> {
        self.each(EMPTY_LOG, [], |_| Ok(()))
    }

    fn attempt<T>(&self, sql: &str, statement: impl FnOnce() -> rusqlite::Result<T>) -> Result<T> {
        self.run(sql, statement).map_err(|error| self.error(&error))
    }

    #[cfg(not(test))]
    #[expect(clippy::unused_self, reason = "tests let statements fail here")]
    fn run<T>(&self, _sql: &str, statement: impl FnOnce() -> rusqlite::Result<T>) -> rusqlite::Result<T> {
        statement()
    }

    #[cfg(test)]
    fn run<T>(&self, sql: &str, statement: impl FnOnce() -> rusqlite::Result<T>) -> rusqlite::Result<T> {
        self.statements.set(self.statements.get() + 1);
        match &self.faults {
            Some(faults) => faults.strike(&self.conn, sql, statement),
            None => statement(),
        }
    }

    fn error(&self, error: &rusqlite::Error) -> Error {
        from_sqlite(&self.store, error)
    }
}

/// The device and the inode of a file: each device numbers its files by itself.
pub(crate) type FileId = (u64, u64);

/// Which file has this name. The same for all files where the system has no inodes; there an open file can be neither
/// removed nor replaced.
pub(crate) fn file_id(path: &Path) -> Option<FileId> {
    let metadata = std::fs::metadata(path).ok()?;
    #[cfg(unix)]
    return Some((
        std::os::unix::fs::MetadataExt::dev(&metadata),
        std::os::unix::fs::MetadataExt::ino(&metadata),
    ));
    #[cfg(not(unix))]
    return Some((0, u64::from(metadata.is_file())));
}

/// The integer in a column.
pub(crate) fn integer(row: &Row<'_>, column: usize) -> Result<i64> {
    match row.get_ref(column) {
        Ok(ValueRef::Integer(number)) => Ok(number),
        _ => Err(wrong_type(column)),
    }
}

/// The bytes in a column.
pub(crate) fn blob<'r>(row: &'r Row<'_>, column: usize) -> Result<&'r [u8]> {
    match row.get_ref(column) {
        Ok(ValueRef::Blob(bytes)) => Ok(bytes),
        _ => Err(wrong_type(column)),
    }
}

/// The bytes in a column that may be empty.
pub(crate) fn optional_blob<'r>(row: &'r Row<'_>, column: usize) -> Result<Option<&'r [u8]>> {
    match row.get_ref(column) {
        Ok(ValueRef::Null) => Ok(None),
        _ => blob(row, column).map(Some),
    }
}

/// The text in a column.
pub(crate) fn text<'r>(row: &'r Row<'_>, column: usize) -> Result<&'r str> {
    match row.get_ref(column) {
        Ok(ValueRef::Text(bytes)) => std::str::from_utf8(bytes).map_err(|_| wrong_type(column)),
        _ => Err(wrong_type(column)),
    }
}

fn wrong_type(column: usize) -> Error {
    Error::corrupt("the database", format!("column {column} of a row has the wrong type"))
}

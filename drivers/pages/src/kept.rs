//! Statements that stay prepared, for a writer whose every transaction runs the same few.
//!
//! The statement cache of `rusqlite` is a map by text: each use allocates and hashes the text again, moves the statement out
//! of the map and back, and copies what is bound. For a short statement that is as much work as the statement itself.

use std::cell::RefCell;
use std::ffi::{CStr, c_int};
use std::ops::Deref;
use std::ptr::{NonNull, null_mut};

use rusqlite::{Connection, Error, ffi};

/// A connection, and statements that stay prepared until it is closed.
pub struct Kept {
    statements: RefCell<Vec<Statement>>,
    conn: Connection,
}

// SAFETY: SQLite does not bind a statement to a thread. The statements are used only together with their connection, which
// is `Send` and not `Sync`.
unsafe impl Send for Kept {}

/// A value to be bound. NULL is not needed.
#[derive(Debug, Clone, Copy)]
pub enum Bound<'a> {
    /// An integer.
    Integer(i64),
    /// Bytes.
    Blob(&'a [u8]),
}

#[derive(Clone, Copy)]
struct Statement {
    /// By its address: texts are constants.
    sql: &'static str,
    raw: NonNull<ffi::sqlite3_stmt>,
    parameters: usize,
}

impl Deref for Kept {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.conn
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        for statement in self.statements.get_mut().drain(..) {
            // SAFETY: it was prepared here and is used by nobody any more; the connection is closed after this.
            unsafe { ffi::sqlite3_finalize(statement.raw.as_ptr()) };
        }
    }
}

impl Kept {
    /// A connection without such statements yet.
    pub fn new(conn: Connection) -> Self {
        Self { statements: RefCell::default(), conn }
    }

    /// Runs a statement that returns no rows, with these values for `?1`, `?2` and so on. It is prepared the first time.
    ///
    /// # Errors
    /// SQLite's own, as `rusqlite` returns them; [`Error::InvalidParameterCount`]; [`Error::ExecuteReturnedResults`].
    pub fn run(&self, sql: &'static str, values: &[Bound<'_>]) -> rusqlite::Result<()> {
        let statement = self.statement(sql)?;
        if values.len() != statement.parameters {
            return Err(Error::InvalidParameterCount(values.len(), statement.parameters));
        }
        let ran = self.bind(statement.raw, values).and_then(|()| {
            // SAFETY: the statement is prepared, and the bound values live until this function returns.
            match unsafe { ffi::sqlite3_step(statement.raw.as_ptr()) } {
                ffi::SQLITE_DONE => Ok(()),
                ffi::SQLITE_ROW => Err(Error::ExecuteReturnedResults),
                code => Err(self.failure(code)),
            }
        });
        // SAFETY: the statement is prepared.
        let reset = unsafe { ffi::sqlite3_reset(statement.raw.as_ptr()) };
        if !values.is_empty() {
            // SAFETY: as above. From here on SQLite knows nothing of the values.
            unsafe { ffi::sqlite3_clear_bindings(statement.raw.as_ptr()) };
        }
        match (&ran, reset) {
            (Ok(()), ffi::SQLITE_OK) | (Err(_), _) => ran,
            (Ok(()), code) => Err(self.failure(code)),
        }
    }

    fn statement(&self, sql: &'static str) -> rusqlite::Result<Statement> {
        let mut statements = self.statements.borrow_mut();
        if let Some(known) = statements.iter().find(|known| std::ptr::eq(known.sql, sql)) {
            return Ok(*known);
        }
        let statement = self.prepare(sql)?;
        statements.push(statement);
        Ok(statement)
    }

    fn prepare(&self, sql: &'static str) -> rusqlite::Result<Statement> {
        let len = c_int::try_from(sql.len()).map_err(|_| self.failure(ffi::SQLITE_TOOBIG))?;
        let (mut raw, flags) = (null_mut(), ffi::SQLITE_PREPARE_PERSISTENT);
        // SAFETY: the handle is used during this call only, while the connection is borrowed.
        let handle = unsafe { self.conn.handle() };
        // SAFETY: the handle is open, and the text has this many bytes.
        let code = unsafe {
            ffi::sqlite3_prepare_v3(handle, sql.as_ptr().cast(), len, flags, &raw mut raw, null_mut())
        };
        if code != ffi::SQLITE_OK {
            return Err(self.failure(code));
        }
        // Null for a text without a statement.
        let raw = NonNull::new(raw).ok_or_else(|| self.failure(ffi::SQLITE_MISUSE))?;
        // SAFETY: it was just prepared.
        let parameters = unsafe { ffi::sqlite3_bind_parameter_count(raw.as_ptr()) };
        Ok(Statement { sql, raw, parameters: usize::try_from(parameters).unwrap_or_default() })
    }

    /// Binds values without copying them.
    fn bind(&self, raw: NonNull<ffi::sqlite3_stmt>, values: &[Bound<'_>]) -> rusqlite::Result<()> {
        for (place, value) in (1..).zip(values) {
            let code = match *value {
                // SAFETY: the statement is prepared.
                Bound::Integer(number) => unsafe { ffi::sqlite3_bind_int64(raw.as_ptr(), place, number) },
                // A slice without bytes may point anywhere.
                // SAFETY: as above.
                Bound::Blob([]) => unsafe { ffi::sqlite3_bind_zeroblob(raw.as_ptr(), place, 0) },
                // SAFETY: as above; the caller clears the binding before the bytes may change.
                Bound::Blob(bytes) => unsafe {
                    ffi::sqlite3_bind_blob64(
                        raw.as_ptr(),
                        place,
                        bytes.as_ptr().cast(),
                        bytes.len() as u64,
                        ffi::SQLITE_STATIC(),
                    )
                },
            };
            if code != ffi::SQLITE_OK {
                return Err(self.failure(code));
            }
        }
        Ok(())
    }

    /// The error of the last call of SQLite, which returned this code.
    fn failure(&self, code: c_int) -> Error {
        // SAFETY: the handle is used during this function only, while the connection is borrowed.
        let handle = unsafe { self.conn.handle() };
        // SAFETY: the handle is open.
        let message = unsafe { ffi::sqlite3_errmsg(handle) };
        let message = (!message.is_null()).then(|| {
            // SAFETY: SQLite returned a C string, which it keeps until its next call.
            unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned()
        });
        Error::SqliteFailure(ffi::Error::new(code), message)
    }
}

#[cfg(test)]
mod tests {
    use rusqlite::ErrorCode;
    use tempfile::TempDir;

    use super::*;

    const INSERT: &str = "INSERT INTO t VALUES (?1, ?2)";
    const BEGIN: &str = "BEGIN IMMEDIATE";
    const COMMIT: &str = "COMMIT";

    fn kept(dir: &TempDir) -> Kept {
        Kept::new(crate::open(dir.path().join("db"), rusqlite::OpenFlags::default()).unwrap())
    }

    fn created() -> (TempDir, Kept) {
        let dir = tempfile::tempdir().unwrap();
        let kept = kept(&dir);
        let sql = "PRAGMA page_size = 4096";
        kept.execute_batch(sql).unwrap();
        crate::seal(&kept).unwrap();
        let sql = "PRAGMA journal_mode = WAL; CREATE TABLE t (key INTEGER PRIMARY KEY, body BLOB NOT NULL)";
        kept.execute_batch(sql).unwrap();
        (dir, kept)
    }

    fn bodies(kept: &Kept) -> Vec<Vec<u8>> {
        let mut query = kept.prepare_cached("SELECT body FROM t ORDER BY key").unwrap();
        query.query_map([], |row| row.get(0)).unwrap().collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn what_was_bound_is_stored_also_when_its_memory_is_used_again() {
        let (dir, first) = created();
        let mut body = vec![0; 5_000];
        for number in 0..20_u8 {
            first.run(BEGIN, &[]).unwrap();
            body.fill(number);
            let bytes = &body[..usize::from(number) * 250];
            first.run(INSERT, &[Bound::Integer(number.into()), Bound::Blob(bytes)]).unwrap();
            body.fill(255);
            first.run(COMMIT, &[]).unwrap();
        }
        assert_eq!(first.statements.borrow().len(), 3, "each is prepared once");
        let expected: Vec<_> = (0..20_u8).map(|number| vec![number; usize::from(number) * 250]).collect();
        assert_eq!(bodies(&first), expected);
        drop(first);
        assert!(!dir.path().join("db-wal").exists(), "the connection was closed");
        assert_eq!(bodies(&kept(&dir)), expected);
    }

    #[test]
    fn a_statement_that_failed_runs_again_and_says_what_rusqlite_says() {
        let (_dir, kept) = created();
        let one = [Bound::Integer(1), Bound::Blob(b"one")];
        kept.run(INSERT, &one).unwrap();
        for _ in 0..2 {
            let error = kept.run(INSERT, &one).unwrap_err();
            let expected = kept.execute(INSERT, (1, b"one")).unwrap_err();
            assert_eq!(
                (error.sqlite_error(), error.to_string()),
                (expected.sqlite_error(), expected.to_string())
            );
        }
        kept.run(INSERT, &[Bound::Integer(2), Bound::Blob(b"two")]).unwrap();
        assert_eq!(bodies(&kept), [b"one", b"two"]);
        let error = kept.run(INSERT, &one[..1]).unwrap_err();
        assert_eq!(error, Error::InvalidParameterCount(1, 2));
        assert_eq!(kept.run("SELECT * FROM t", &[]), Err(Error::ExecuteReturnedResults));
        for wrong in ["SELECT * FROM absent", "", "SELECT '"] {
            kept.run(wrong, &[]).unwrap_err();
        }
        assert_eq!(bodies(&kept).len(), 2);
    }

    #[test]
    fn a_statement_stays_prepared_when_the_schema_changes_or_another_connection_writes() {
        let (dir, first) = created();
        let other = kept(&dir);
        for (number, kept) in [&first, &other, &first].into_iter().enumerate() {
            let number = i64::try_from(number).unwrap();
            kept.run(INSERT, &[Bound::Integer(number), Bound::Blob(b"")]).unwrap();
            kept.execute_batch(&format!("CREATE TABLE t{number} (n)")).unwrap();
        }
        assert_eq!(bodies(&other), [b"", b"", b""]);
        first.run(BEGIN, &[]).unwrap();
        let busy = other.run(BEGIN, &[]).unwrap_err();
        assert_eq!(busy.sqlite_error_code(), Some(ErrorCode::DatabaseBusy));
        first.run(COMMIT, &[]).unwrap();
        other.run(BEGIN, &[]).unwrap();
        other.run(COMMIT, &[]).unwrap();
    }
}

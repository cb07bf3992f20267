//! The bound of the log. SQLite writes to its beginning again once all of it is in the database and nobody reads from it. Where
//! reads always overlap, that never happens: then the writer waits for those that are under way. What begins meanwhile reads
//! from the database alone, and is not waited for.

use std::time::Duration;

use threadkeep::Result;

use crate::sql::Db;

/// The size from which on reads are waited for, and how long. A longer read, such as a backup, is waited for again when the
/// log is twice as large.
pub(crate) const LIMIT: (u64, Duration) = (128 << 20, Duration::from_millis(200));

/// When the log is emptied.
pub(crate) struct LogBound {
    least: u64,
    next: u64,
    patience: Duration,
}

impl LogBound {
    pub(crate) fn of((least, patience): (u64, Duration)) -> Self {
        Self { least, next: least, patience }
    }

    /// Empties the log if it is too large, after a commit.
    ///
    /// # Errors
    /// [`threadkeep::Error::InDoubt`] if what reached the disk is unknown.
    pub(crate) fn keep(&mut self, db: &Db) -> Result<()> {
        let bytes = db.log_bytes();
        if bytes > self.next {
            self.next = if db.empty_log(self.patience)? { self.least } else { bytes.saturating_mul(2) };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, Synchronous};

    /// A read that does not end is given up, and waited for again when the log is twice as large.
    #[test]
    fn the_bound_doubles_beside_a_long_read_and_is_the_least_again_after_it() {
        const LEAST: u64 = 1 << 20;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        let db = Db::writer(&path, &Options::default()).unwrap();
        // The log is moved by nobody else.
        db.wait_for(Synchronous::Normal, false).unwrap();
        let write = |beyond: u64| {
            while db.log_bytes() <= beyond {
                let sql = "INSERT INTO element (hash, body) VALUES (x'', zeroblob(100000))";
                db.execute(sql, []).unwrap();
            }
        };
        let mut bound = LogBound::of((LEAST, Duration::ZERO));
        let reader = Db::reader(&path, &Options::default()).unwrap();
        write(0);
        bound.keep(&db).unwrap();
        assert_eq!(bound.next, LEAST);
        assert!(db.log_bytes() > 0, "it is small enough");

        reader.execute("BEGIN", []).unwrap();
        reader.each("SELECT count(*) FROM element", [], |_| Ok(())).unwrap();
        write(LEAST);
        bound.keep(&db).unwrap();
        let doubled = 2 * db.log_bytes();
        assert!(bound.next == doubled && doubled > 2 * LEAST, "{} bytes", bound.next);
        write(doubled / 2 + LEAST / 2);
        bound.keep(&db).unwrap();
        assert_eq!(bound.next, doubled, "it is not waited for before");

        drop(reader);
        write(doubled);
        bound.keep(&db).unwrap();
        assert_eq!((bound.next, db.log_bytes()), (LEAST, 0));
    }
}

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

//! The bound of the log. SQLite writes to its beginning again once all of it is in the database and nobody reads from it. Where
//! reads always overlap, that never happens: then the writer waits for those that are under way. What begins meanwhile reads
//! from the database alone, and is not waited for.

use std::time::Duration;

use threadkeep::Result;

use crate::sql::Db;

/// The size from which on reads are waited for.
pub(crate) const BYTES: u64 = 128 << 20;
/// How long. A longer read, such as a backup, is waited for again when the log is twice as large.
const PATIENCE: Duration = Duration::from_millis(200);

/// When the log is emptied.
pub(crate) struct LogBound {
    least: u64,
    next: u64,
}

impl LogBound {
    pub(crate) fn of(least: u64) -> Self {
        Self { least, next: least }
    }

    /// Empties the log if it is too large, after a commit.
    ///
    /// # Errors
    /// [`threadkeep::Error::InDoubt`] if what reached the disk is unknown.
    pub(crate) fn keep(&mut self, db: &Db) -> Result<()> {
        let bytes = db.log_bytes();
        if bytes > self.next {
            self.next = if db.empty_log(PATIENCE)? { self.least } else { bytes.saturating_mul(2) };
        }
        Ok(())
    }
}

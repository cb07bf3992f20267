//! How a database is opened.

use std::time::Duration;

use crate::write::log::LIMIT;

/// What a commit waits for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Synchronous {
    /// Every commit is flushed to disk before it is acknowledged, so it survives a power loss.
    #[default]
    Full,
    /// Commits survive the end of the process; a power loss may lose the last ones. The file stays consistent.
    Normal,
}

/// Checkpoints of a long thread that are written in one transaction, while commits wait: two or three milliseconds. With 128
/// of them, the slowest hundredth of the turns beside a copy took 1.5 to 1.8 times as long as without, with 32 1.3 to 1.4.
const PIECE: usize = 32;

/// A new thread of at most this many checkpoints, with few elements, is written in one transaction: pieces would take
/// longer on the whole.
#[cfg(not(test))]
const SHORT: usize = 128;

/// A thread with more checkpoints is rewritten in pieces. Each of them gives a run on the thread more time to write to it, so
/// that the rewrite is refused; a thread of this many is rewritten in one transaction.
#[cfg(not(test))]
const LONG: usize = 1024;

/// The settings of a [`crate::SqliteSaver`].
#[derive(Debug, Clone)]
pub struct Options {
    /// What a commit waits for. Default: [`Synchronous::Full`].
    pub synchronous: Synchronous,
    /// The number of concurrent reads, each on its own connection. At least 1; default 4.
    pub readers: usize,
    /// How long an operation waits for a lock that another process holds before it is
    /// [`threadkeep::Error::Unavailable`]. It asks once more when that is over; with zero it asks once. More than 24 days
    /// count as 24 days. Default: 5 seconds.
    pub busy_timeout: Duration,
    /// Whether new elements are compressed where that saves space, with dictionaries that are trained as the database
    /// grows. Existing data is readable either way. Default: true.
    pub compression: bool,
    /// See [`Options::piece`].
    #[cfg(test)]
    pub(crate) piece: usize,
    /// See [`Options::log_bound`].
    #[cfg(test)]
    pub(crate) log_bound: (u64, Duration),
    /// Failures that a test injects.
    #[cfg(test)]
    pub(crate) faults: std::sync::Arc<crate::tests::faults::Faults>,
}

/// A patience as SQLite takes it: its milliseconds are an `i32`.
pub(crate) fn bounded(patience: Duration) -> Duration {
    patience.min(Duration::from_millis(u64::from(i32::MAX.unsigned_abs())))
}

impl Default for Options {
    fn default() -> Self {
        Self {
            synchronous: Synchronous::default(),
            readers: 4,
            busy_timeout: Duration::from_secs(5),
            compression: true,
            #[cfg(test)]
            piece: PIECE,
            #[cfg(test)]
            log_bound: LIMIT,
            #[cfg(test)]
            faults: std::sync::Arc::default(),
        }
    }
}

impl Options {
    /// How many checkpoints of a long thread are written in one transaction.
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "tests choose another number"))]
    pub(crate) fn piece(&self) -> usize {
        #[cfg(test)]
        return self.piece;
        #[cfg(not(test))]
        PIECE
    }

    /// The size from which on the log is emptied, and how long reads are waited for.
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "tests choose another number"))]
    pub(crate) fn log_bound(&self) -> (u64, Duration) {
        #[cfg(test)]
        return self.log_bound;
        #[cfg(not(test))]
        LIMIT
    }

    /// How many checkpoints of a new thread are written in one transaction, if they are all.
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "tests choose another number"))]
    pub(crate) fn short(&self) -> usize {
        #[cfg(test)]
        return self.piece;
        #[cfg(not(test))]
        SHORT
    }

    /// How many checkpoints of a thread are rewritten in one transaction.
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "tests choose another number"))]
    pub(crate) fn long(&self) -> usize {
        #[cfg(test)]
        return self.piece;
        #[cfg(not(test))]
        LONG
    }
}

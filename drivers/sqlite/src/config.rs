//! How a database is opened.

use std::time::Duration;

/// What a commit waits for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Synchronous {
    /// Every commit is flushed to disk before it is acknowledged, so it survives a power loss.
    #[default]
    Full,
    /// Commits survive the end of the process; a power loss may lose the last ones. The file stays consistent.
    Normal,
}

/// The settings of a [`crate::SqliteSaver`].
#[derive(Debug, Clone)]
pub struct Options {
    /// What a commit waits for. Default: [`Synchronous::Full`].
    pub synchronous: Synchronous,
    /// The number of concurrent reads, each on its own connection. At least 1; default 4.
    pub readers: usize,
    /// How long an operation waits for a lock that another process holds before it is
    /// [`threadkeep::Error::Unavailable`]. Default: 5 seconds.
    pub busy_timeout: Duration,
    /// Whether new elements are compressed where that saves space, with a dictionary that is trained once the database
    /// has enough data. Existing data is readable either way. Default: true.
    pub compression: bool,
    /// Failures that a test injects.
    #[cfg(test)]
    pub(crate) faults: std::sync::Arc<crate::tests::faults::Faults>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            synchronous: Synchronous::default(),
            readers: 4,
            busy_timeout: Duration::from_secs(5),
            compression: true,
            #[cfg(test)]
            faults: std::sync::Arc::default(),
        }
    }
}

//! How a database is opened.

use std::time::Duration;

/// What a commit waits for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Synchronous {
    /// Every commit is flushed to the disk before it is acknowledged: it survives a loss of power.
    #[default]
    Full,
    /// Commits survive the end of the process; the last ones may be lost with the power. The file stays consistent.
    Normal,
}

/// The settings of a [`crate::SqliteSaver`].
#[derive(Debug, Clone)]
pub struct Options {
    /// What a commit waits for. Default: [`Synchronous::Full`].
    pub synchronous: Synchronous,
    /// How many reads may run at the same time, each on its own connection. At least 1; default 4.
    pub readers: usize,
    /// How long an operation waits for a lock that another process holds before it is
    /// [`threadkeep::Error::Unavailable`]. Default: 5 seconds.
    pub busy_timeout: Duration,
    /// Whether new elements are compressed where that pays: with a dictionary that is trained on the database once there
    /// is enough in it. What is stored already is read either way. Default: true.
    pub compression: bool,
    /// Failures that a test wants.
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

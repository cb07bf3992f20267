//! The errors of opening a store.

use std::path::PathBuf;

use threadkeep_records::RecordsError;
use threadkeep_redis::InvalidUrl;

/// An error of opening a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The checkpoint store.
    #[error("cannot open the checkpoint store: {0}")]
    Checkpoints(#[from] threadkeep::Error),
    /// The gateway's own records.
    #[error("cannot open the gateway's records: {0}")]
    Records(#[from] RecordsError),
    /// The history cache's Redis.
    #[error("database.checkpoint_cache.redis_url: {0}")]
    HistoryCache(#[from] InvalidUrl),
    /// There is no database where one must exist.
    #[error("there is no database at {}", .0.display())]
    Missing(PathBuf),
    /// The file holds the gateway's records instead.
    #[error(
        "{} holds the gateway's records (threads, runs, events); its checkpoints are in {}", path.display(),
        instead.display()
    )]
    RecordsFile {
        /// The file.
        path: PathBuf,
        /// Where the checkpoints are.
        instead: PathBuf,
    },
    /// What may be the gateway's records of these checkpoints is at another place.
    #[error("the store was not backed up, because its records would be left out: {0}")]
    RecordsElsewhere(String),
    /// The configured backend has no store that another process could open.
    #[error(
        "database.backend 'memory' keeps checkpoints in the gateway's process only; there is no store to open"
    )]
    InMemory,
}

//! The errors of commands, and the exit codes.

use std::path::PathBuf;

use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep_storage::OpenError;

use super::advice::SameStore;
use super::archive::ArchiveError;
use threadkeep_config::{ConfigError, KeyError, UpgradeError};
use threadkeep_records::RecordsError;

/// The exit code of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Success; what was checked is clean.
    Done = 0,
    /// An error. What was done before it stays done; each change happens completely or not at all.
    Error = 1,
    /// An invalid command line.
    Usage = 2,
    /// `verify` found violations, `delegations verify` records that differ; or a watched batch did not complete.
    Found = 3,
    /// Nothing was changed, because the change was not confirmed.
    Refused = 4,
    /// Ctrl-C, SIGTERM or SIGHUP ended it early. What was done stays done.
    Interrupted = 130,
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// An error of a command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpsError {
    /// The checkpoint store.
    #[error(transparent)]
    Checkpoints(threadkeep::Error),
    /// It is not known whether the last change was stored.
    #[error(
        "the last change may or may not be stored, as a whole: {0}. The same command can be repeated: it does what is missing"
    )]
    InDoubt(String),
    /// The gateway's own records.
    #[error(transparent)]
    Records(#[from] RecordsError),
    /// The gateway's own records are there, and could not be opened.
    #[error("the gateway's records cannot be read: {0}")]
    UnreadableRecords(String),
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The file of API keys.
    #[error(transparent)]
    Keys(#[from] KeyError),
    /// The upgrade of the configuration.
    #[error(transparent)]
    Upgrade(#[from] UpgradeError),
    /// The store could not be opened.
    #[error(transparent)]
    Open(OpenError),
    /// An exported file.
    #[error("{file}: {error}")]
    Archive {
        /// The file.
        file: String,
        /// What is wrong with it.
        error: ArchiveError,
    },
    /// The results could not be printed.
    #[error("cannot write the output: {0}")]
    Output(#[from] std::io::Error),
    /// A file could not be read or written.
    #[error("{path}: {cause}")]
    File {
        /// The file.
        path: String,
        /// The operating system's error.
        cause: std::io::Error,
    },
    /// The database does not exist.
    #[error(
        "there is no database at {path}; name a checkpoint database with --sqlite FILE, or the gateway's configuration \
         with --config FILE; {setup} creates the configured one"
    )]
    NoDatabase {
        /// Where it would be.
        path: PathBuf,
        /// The command that creates the configured one.
        setup: String,
    },
    /// The thread is not in the store.
    #[error("there is no thread {thread} in {store}{near}")]
    NoThread {
        /// The thread.
        thread: ThreadId,
        /// The store.
        store: String,
        /// The remedy: similar ids.
        near: String,
    },
    /// The checkpoint is not in the thread.
    #[error("thread {thread} has no checkpoint {checkpoint}{near}")]
    NoCheckpoint {
        /// The thread.
        thread: ThreadId,
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The remedy: similar ids.
        near: String,
    },
    /// The command does not support this.
    #[error("{0}")]
    Unsupported(String),
    /// Ctrl-C, SIGTERM or SIGHUP ended a pass early.
    #[error("interrupted: {done} of {total} {what}{rest}")]
    Interrupted {
        /// What is counted.
        what: &'static str,
        /// How many are done.
        done: String,
        /// How many there are.
        total: String,
        /// What is with the rest.
        rest: &'static str,
    },
    /// The change was not confirmed.
    #[error("nothing was changed: {0}")]
    Refused(&'static str),
}

impl From<threadkeep::Error> for OpsError {
    fn from(error: threadkeep::Error) -> Self {
        match error {
            threadkeep::Error::InDoubt { saver, reason } => Self::InDoubt(format!("{saver}: {reason}")),
            error => Self::Checkpoints(error),
        }
    }
}

impl From<OpenError> for OpsError {
    /// Errors of the stores are said as those of a command, and a database that is missing with the remedy.
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Checkpoints(error) => error.into(),
            OpenError::Records(error) => Self::Records(error),
            OpenError::Missing(path) => Self::NoDatabase { path, setup: SameStore::default().setup() },
            other => Self::Open(other),
        }
    }
}

impl OpsError {
    /// Whether it says something of one thread only, so that a pass goes on with the others.
    pub(crate) fn is_of_one_thread(&self) -> bool {
        use threadkeep::Error;
        match self {
            Self::Archive { .. } | Self::Records(RecordsError::Corrupt { .. }) => true,
            Self::Checkpoints(error) => matches!(
                error,
                Error::Stale { .. }
                    | Error::Corrupt { .. }
                    | Error::BrokenLineage { .. }
                    | Error::HistoryLost { .. }
                    | Error::ForeignChanges { .. }
                    // A replay's: another program's channels, or rows that the reducer refuses.
                    | Error::InvalidInput(_)
                    | Error::InvalidUpdate(_)
            ),
            _ => false,
        }
    }

    /// The exit code.
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Refused(_) => Exit::Refused,
            Self::Interrupted { .. } => Exit::Interrupted,
            _ => Exit::Error,
        }
    }
}

/// The result of an operator command.
pub(crate) type Result<T, E = OpsError> = std::result::Result<T, E>;

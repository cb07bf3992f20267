//! Errors, grouped by what the caller should do.

use crate::id::{ChannelName, CheckpointId, Namespace, ThreadId};

/// The result of an engine or saver operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Text of the mismatch error (service reference, "Messages").
pub const MODE_MISMATCH: &str =
    "Thread requires delta mode; materialize and convert its checkpoints before using full mode.";
/// Text of the mode reconfiguration error (service reference, "Messages").
pub const MODE_RECONFIGURATION: &str =
    "checkpoint_channel_mode is restart-required and cannot change in a running process";
/// Text of the cadence reconfiguration error (service reference, "Messages").
pub const CADENCE_RECONFIGURATION: &str =
    "checkpoint_delta.snapshot_frequency is restart-required and cannot change in a running process";
/// Text of the error for a cadence below one (service reference, "Messages").
pub const FREQUENCY_NOT_POSITIVE: &str = "snapshot frequency must be positive";
/// Text of the error for a second replace-style write in one superstep (service reference, "Other rules" 1).
pub const SECOND_OVERWRITE: &str = "Can receive only one Overwrite value per super-step.";

/// What [`Error::HistoryLost`] adds after an attempt in doubt.
const AFTER_DOUBT: &str = "; an earlier attempt of this call was in doubt and may have been carried out";

/// An error of the engine or of a saver. The kind says what to do; the text contains the ids needed for it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The requested id does not exist. Nothing else is ever returned in its place.
    #[error("thread {thread} has no checkpoint {checkpoint}")]
    NotFound {
        /// The requested thread.
        thread: ThreadId,
        /// The missing checkpoint.
        checkpoint: CheckpointId,
    },
    /// Another writer moved the head. Read the head again and decide again.
    #[error(
        "thread {thread}{}: the head is {}, the commit expected {}; read the head again and retry",
        in_namespace(namespace),
        or_none(found),
        or_none(expected)
    )]
    Conflict {
        /// The thread.
        thread: ThreadId,
        /// The namespace in it.
        namespace: Namespace,
        /// The head that the commit named.
        expected: Option<CheckpointId>,
        /// The head that the store has.
        found: Option<CheckpointId>,
    },
    /// The thread was changed since it was read. Read it again and decide again.
    #[error("thread {thread} was changed since it was read; read it again and retry")]
    Stale {
        /// The thread.
        thread: ThreadId,
    },
    /// The store no longer holds changes of the thread that it had acknowledged: it failed over to a replica that had not
    /// received them, was restored from a backup, or lost them in a crash. The attempt that found this wrote nothing; if an
    /// earlier attempt of the same call was in doubt, that one may have been carried out, and the text says so. The saver
    /// has forgotten what it knew of the thread, so the next call works on what the store holds now. Read the thread
    /// again; what is missing has to be done again.
    #[error(
        "thread {thread}: the store lost changes that it had acknowledged: {seen}; after a failover or a restored backup, \
         read the thread again and repeat what is missing"
    )]
    HistoryLost {
        /// The thread.
        thread: ThreadId,
        /// What this process knew and what it found instead.
        seen: String,
    },
    /// A row that the lineage needs is missing, so the state cannot be determined; restore a backup, or delete the
    /// damaged part, which `threadkeep verify` names.
    #[error(
        "thread {thread}, checkpoint {checkpoint}: broken lineage: {missing}; restore a backup (`threadkeep backup --out \
         FILE` makes one), or delete the damaged part (`threadkeep verify` names it)"
    )]
    BrokenLineage {
        /// The thread.
        thread: ThreadId,
        /// The requested checkpoint, or the one at which the gap was found.
        checkpoint: CheckpointId,
        /// What is missing.
        missing: String,
    },
    /// Stored bytes do not decode or do not match their checksum.
    #[error("corrupt data: {place}: {reason}")]
    Corrupt {
        /// Where: table and key, or the kind of value.
        place: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The saver does not offer this operation.
    #[error("the {saver} saver does not support {operation}")]
    Unsupported {
        /// The operation.
        operation: &'static str,
        /// The saver.
        saver: &'static str,
    },
    /// The store did not execute the operation, and nothing was written. Retry later.
    #[error("the {saver} store is unavailable, nothing was written: {reason}")]
    Unavailable {
        /// The saver.
        saver: &'static str,
        /// Why, and the remedy where there is one.
        reason: String,
    },
    /// The operation may or may not have been executed. Read the head, or repeat the operation: a repeated commit is
    /// idempotent.
    #[error("the outcome is in doubt in the {saver} store: {reason}; repeat the operation or read the head")]
    InDoubt {
        /// The saver.
        saver: &'static str,
        /// What happened.
        reason: String,
    },
    /// A newer version of this program wrote the database.
    #[error(
        "{store} has format version {found}, this program reads up to version {supported}; upgrade threadkeep"
    )]
    NewerFormat {
        /// The database.
        store: String,
        /// Its format version.
        found: u32,
        /// The newest version this program knows.
        supported: u32,
    },
    /// A process in `full` mode meets a delta checkpoint (`CheckpointModeMismatchError` of the reference).
    #[error("{}", MODE_MISMATCH)]
    ModeMismatch,
    /// The process tries to change a frozen setting (`CheckpointModeReconfigurationError` of the reference).
    #[error("{0}")]
    Reconfiguration(&'static str),
    /// LangGraph stored a channel as changes, and its reducers are not known here. Nothing was computed or written.
    #[error(
        "thread {thread}, checkpoint {checkpoint}: LangGraph stored channel {channel} as changes, and only the graph that \
         wrote them can replay them; read and continue the thread with that graph"
    )]
    ForeignChanges {
        /// The thread.
        thread: ThreadId,
        /// The requested checkpoint.
        checkpoint: CheckpointId,
        /// The channel.
        channel: ChannelName,
    },
    /// The writes of one superstep cannot be applied together.
    #[error("{0}")]
    InvalidUpdate(String),
    /// A caller's argument is invalid; nothing was changed.
    #[error("{0}")]
    InvalidInput(String),
}

impl Error {
    /// A [`Error::Corrupt`] at `place`.
    pub fn corrupt(place: impl Into<String>, reason: impl std::fmt::Display) -> Self {
        Self::Corrupt { place: place.into(), reason: format!("{reason}") }
    }

    /// A [`Error::BrokenLineage`] at `checkpoint`.
    pub fn broken(thread: &ThreadId, checkpoint: CheckpointId, missing: impl Into<String>) -> Self {
        Self::BrokenLineage { thread: thread.clone(), checkpoint, missing: missing.into() }
    }

    /// This error as the result of a call whose earlier attempt was in doubt. Only [`Error::HistoryLost`] changes, which
    /// otherwise says nothing of that attempt.
    #[must_use]
    pub fn after_doubt(self) -> Self {
        match self {
            Self::HistoryLost { thread, seen } if !seen.ends_with(AFTER_DOUBT) => {
                Self::HistoryLost { thread, seen: format!("{seen}{AFTER_DOUBT}") }
            }
            other => other,
        }
    }

    /// Whether the store is unavailable, or nothing says what has become of the operation: the same call may succeed
    /// later.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::InDoubt { .. })
    }

    /// Whether the operation may have happened.
    pub fn is_in_doubt(&self) -> bool {
        matches!(self, Self::InDoubt { .. })
    }

    /// The class name that clients of the service know, used in `error` frames (service reference, "Exceptions").
    pub fn class_name(&self) -> &'static str {
        match self {
            Self::ModeMismatch => "CheckpointModeMismatchError",
            Self::Reconfiguration(_) => "CheckpointModeReconfigurationError",
            Self::InvalidUpdate(_) => "InvalidUpdateError",
            Self::InvalidInput(_) => "ValueError",
            Self::NotFound { .. } => "CheckpointNotFoundError",
            Self::ForeignChanges { .. } => "ForeignChangesError",
            Self::Conflict { .. } | Self::Stale { .. } => "CheckpointConflictError",
            Self::HistoryLost { .. } => "CheckpointHistoryLostError",
            Self::BrokenLineage { .. } => "BrokenLineageError",
            Self::Corrupt { .. } | Self::NewerFormat { .. } => "CorruptCheckpointError",
            Self::Unsupported { .. } => "NotImplementedError",
            Self::Unavailable { .. } | Self::InDoubt { .. } => "CheckpointStoreError",
        }
    }
}

#[allow(clippy::ref_option)] // thiserror hands fields over by reference.
fn or_none(id: &Option<CheckpointId>) -> String {
    id.map_or_else(|| "empty".to_owned(), |id| id.to_string())
}

fn in_namespace(namespace: &Namespace) -> String {
    if namespace.as_str().is_empty() { String::new() } else { format!(", namespace {namespace}") }
}

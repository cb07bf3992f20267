//! Errors of runs.

use threadkeep::id::CheckpointId;
use threadkeep_agent::AgentError;

use super::resume::ResumeError;
use threadkeep_records::RecordsError;
use threadkeep_subagents::CatchUpError;

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum RunError {
    /// The agent failed, or the state could not be read or written.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// The state at the checkpoint to resume from cannot be read.
    #[error("Run {run} could not materialize resume checkpoint {checkpoint}")]
    NotMaterialized {
        /// The run.
        run: String,
        /// The checkpoint.
        checkpoint: CheckpointId,
    },
    /// Another process took the run for lost, and ended it or took it over.
    #[error("another process has ended the run, or taken it over")]
    TakenOver,
    /// The run's row could not be read.
    #[error(transparent)]
    Records(#[from] RecordsError),
    /// The subagents that administrators defined could not be read.
    #[error("the managed subagents cannot be read: {0}")]
    Subagents(#[from] threadkeep_subagents::managed::StoreError),
    /// The thread does not wait for the value that the run resumes with.
    #[error(transparent)]
    Resume(ResumeError),
}

impl RunError {
    /// Whether the same attempt may succeed later: a store is unavailable, or another writer was in the way.
    pub(super) fn may_pass(&self) -> bool {
        use threadkeep::Error as Engine;
        match self {
            Self::Agent(AgentError::Engine(error)) => matches!(
                error,
                Engine::Unavailable { .. }
                    | Engine::InDoubt { .. }
                    | Engine::Conflict { .. }
                    | Engine::Stale { .. }
                    | Engine::HistoryLost { .. }
            ),
            Self::Records(error) => error.is_unavailable(),
            _ => false,
        }
    }

    /// The engine's error, if it is one.
    pub(super) fn of_engine(&self) -> Option<&threadkeep::Error> {
        match self {
            Self::Agent(AgentError::Engine(error)) => Some(error),
            _ => None,
        }
    }

    /// Whether the store lost what it had acknowledged. It is found once: another attempt works on what is there.
    pub(super) fn is_history_lost(&self) -> bool {
        matches!(self.of_engine(), Some(threadkeep::Error::HistoryLost { .. }))
    }

    /// Whether the head that was read is gone and an older one is there: an operator's pass removed it, and the run has
    /// written nothing since.
    pub(super) fn is_head_removed(&self, read: Option<CheckpointId>) -> bool {
        let Self::Agent(AgentError::Engine(threadkeep::Error::Conflict { expected, found, .. })) = self
        else {
            return false;
        };
        read.is_some() && *expected == read && found.is_some() && found < expected
    }
}

impl From<threadkeep::Error> for RunError {
    fn from(error: threadkeep::Error) -> Self {
        Self::Agent(AgentError::Engine(error))
    }
}

impl From<CatchUpError> for RunError {
    fn from(error: CatchUpError) -> Self {
        match error {
            CatchUpError::Engine(error) => error.into(),
            CatchUpError::Records(error) => error.into(),
        }
    }
}

impl From<ResumeError> for RunError {
    fn from(error: ResumeError) -> Self {
        match error {
            ResumeError::State(error) => error.into(),
            refused => Self::Resume(refused),
        }
    }
}

impl RunError {
    /// The class name that clients see in an `error` frame.
    pub(super) fn class_name(&self) -> &'static str {
        match self {
            Self::Agent(error) => error.class_name(),
            Self::NotMaterialized { .. } | Self::TakenOver | Self::Subagents(_) => "RuntimeError",
            Self::Records(_) => "RunStoreError",
            Self::Resume(_) => "ValueError",
        }
    }
}

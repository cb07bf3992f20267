//! The lead agent: a loop of model call and parallel tool calls, one superstep each. Everything else that it does
//! (titles, loop detection, repair of dangling tool calls) happens inside those supersteps and costs no checkpoint.

mod build;
pub(crate) mod goal;
pub(crate) mod goal_state;
mod lead;
mod prompt;
pub(crate) mod summary;
pub(crate) mod title;
mod usage;

pub(crate) use build::{AgentBuilder, AgentSpec};
pub(crate) use lead::{Breakpoints, Ended, LeadAgent, MODEL as MODEL_NODE, Session};
pub(crate) use usage::UsageLedger;

use threadkeep::id::CheckpointId;

use crate::runs::resume::ResumeError;

/// Why an agent's run failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AgentError {
    /// The state could not be read or written.
    #[error(transparent)]
    Engine(#[from] threadkeep::Error),
    /// The state at the checkpoint to resume from cannot be read.
    #[error("Run {run} could not materialize resume checkpoint {checkpoint}")]
    NotMaterialized {
        /// The run.
        run: String,
        /// The checkpoint.
        checkpoint: CheckpointId,
    },
    /// The run took more supersteps than it may.
    #[error("Recursion limit of {0} reached without hitting a stop condition.")]
    RecursionLimit(u64),
    /// The checkpoint to continue from names a node that this agent does not have.
    #[error("the thread is to continue with node '{0}', which this agent does not have")]
    UnknownNode(String),
    /// The run names a model that the configuration does not have (any more).
    #[error("Model '{0}' is not in the configured model allowlist")]
    UnknownModel(String),
    /// The model cannot be built from its settings.
    #[error(transparent)]
    Model(#[from] crate::model::ModelError),
    /// The thread does not wait for the value that the run resumes with.
    #[error(transparent)]
    Resume(ResumeError),
    /// The gateway is stopping.
    #[error("the gateway is stopping")]
    Stopping,
    /// The events of the run could not be stored.
    #[error(transparent)]
    Store(#[from] crate::store::StoreError),
}

impl From<ResumeError> for AgentError {
    fn from(error: ResumeError) -> Self {
        match error {
            ResumeError::State(error) => Self::Engine(error),
            refused => Self::Resume(refused),
        }
    }
}

impl AgentError {
    /// The class name that clients see in an `error` frame.
    pub(crate) fn class_name(&self) -> &'static str {
        match self {
            Self::Engine(error) => error.class_name(),
            Self::RecursionLimit(_) => "GraphRecursionError",
            Self::UnknownNode(_) | Self::UnknownModel(_) | Self::Model(_) | Self::Resume(_) => "ValueError",
            Self::NotMaterialized { .. } | Self::Stopping => "RuntimeError",
            Self::Store(_) => "RunStoreError",
        }
    }
}

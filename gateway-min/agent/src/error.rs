//! Errors of an agent's run.

use crate::ObserverError;
use crate::model::ModelError;

/// An error of an agent's run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The state could not be read or written.
    #[error(transparent)]
    Engine(#[from] threadkeep::Error),
    /// The run exceeded its maximum number of supersteps.
    #[error("Recursion limit of {0} reached without hitting a stop condition.")]
    RecursionLimit(u64),
    /// The checkpoint to continue from names an unknown node.
    #[error("the thread continues with node '{0}', which this agent does not have")]
    UnknownNode(String),
    /// The configuration does not have the run's model (any more).
    #[error("Model '{0}' is not in the configured model allowlist")]
    UnknownModel(String),
    /// The model's settings are unusable.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The process is stopping.
    #[error("the gateway is stopping")]
    Stopping,
    /// The observer failed to store what was reported.
    #[error(transparent)]
    Observer(ObserverError),
    /// A tool may not give a result to this run.
    #[error("no result of a tool call was stored: {0}; the next run of the thread makes the call again")]
    Undelivered(String),
    /// A tool could not read a result that is or may be stored.
    #[error("no result of a tool call was stored: {0}; the next run of the thread makes the call again")]
    Unread(String),
}

impl AgentError {
    /// The class name in responses to clients.
    pub fn class_name(&self) -> &'static str {
        match self {
            Self::Engine(error) => error.class_name(),
            Self::RecursionLimit(_) => "GraphRecursionError",
            Self::UnknownNode(_) | Self::UnknownModel(_) | Self::Model(_) => "ValueError",
            Self::Stopping => "RuntimeError",
            // An observer's failures are failures to store.
            Self::Observer(_) | Self::Undelivered(_) | Self::Unread(_) => "RunStoreError",
        }
    }
}

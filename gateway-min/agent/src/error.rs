//! Why an agent's run failed.

use crate::ObserverError;
use crate::model::ModelError;

/// Why an agent's run failed.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The state could not be read or written.
    #[error(transparent)]
    Engine(#[from] threadkeep::Error),
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
    Model(#[from] ModelError),
    /// The process is stopping.
    #[error("the gateway is stopping")]
    Stopping,
    /// The observer could not keep what it was shown.
    #[error(transparent)]
    Observer(ObserverError),
}

impl AgentError {
    /// The class name that clients see.
    pub fn class_name(&self) -> &'static str {
        match self {
            Self::Engine(error) => error.class_name(),
            Self::RecursionLimit(_) => "GraphRecursionError",
            Self::UnknownNode(_) | Self::UnknownModel(_) | Self::Model(_) => "ValueError",
            Self::Stopping => "RuntimeError",
            // What an observer fails to do is to store.
            Self::Observer(_) => "RunStoreError",
        }
    }
}

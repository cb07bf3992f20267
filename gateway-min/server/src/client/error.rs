//! Why an embedded client could not do what it was asked to.

use threadkeep_agent::AgentError;

use crate::app::StartError;
use crate::config::ConfigError;

/// Text of the rejection by the factory for agents (service reference, "Other rules" 3).
pub(super) const DELTA_WITH_CHECKPOINTER: &str = "checkpoint_channel_mode 'delta' cannot be combined with a persistent checkpointer here, because such an \
     agent bypasses marker injection and the compatibility gate; use the embedded client for a persistent delta \
     agent, or leave the checkpointer out";

/// Why an embedded client could not do what it was asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The store cannot be opened.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The engine or the saver refused. Among others: [`ModeMismatch`](threadkeep::Error::ModeMismatch) for a thread that
    /// needs delta mode, [`Reconfiguration`](threadkeep::Error::Reconfiguration) for an edited cadence,
    /// [`Conflict`](threadkeep::Error::Conflict) if somebody else wrote to the thread meanwhile.
    #[error(transparent)]
    Engine(#[from] threadkeep::Error),
    /// An argument is wrong; nothing was changed.
    #[error("{0}")]
    Invalid(String),
    /// The client has no checkpointer, so there are no threads.
    #[error("this client keeps no threads: it was made without a checkpointer")]
    Stateless,
    /// An agent with a persistent checkpointer was to be built in delta mode, past the client.
    #[error("{DELTA_WITH_CHECKPOINTER}")]
    DeltaWithCheckpointer,
    /// The agent failed; what it had committed stays.
    #[error("{message}")]
    Agent {
        /// The class of the error, as clients of the gateway see it.
        name: &'static str,
        /// What went wrong.
        message: String,
    },
    /// The task of the turn died.
    #[error("the agent's task ended without saying why")]
    Died,
}

impl ClientError {
    /// The class name of the service's clients.
    pub fn class_name(&self) -> &'static str {
        match self {
            Self::Engine(error) | Self::Start(StartError::Checkpoints(error)) => error.class_name(),
            Self::Config(_) | Self::Invalid(_) | Self::DeltaWithCheckpointer => "ValueError",
            Self::Agent { name, .. } => name,
            Self::Start(_) | Self::Stateless | Self::Died => "RuntimeError",
        }
    }
}

impl From<AgentError> for ClientError {
    fn from(error: AgentError) -> Self {
        match error {
            AgentError::Engine(error) => Self::Engine(error),
            other => Self::Agent { name: other.class_name(), message: other.to_string() },
        }
    }
}

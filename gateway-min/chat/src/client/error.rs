//! The errors of an embedded client.

use std::path::PathBuf;

use threadkeep_agent::AgentError;
use threadkeep_records::RecordsError;
use threadkeep_storage::OpenError;
use threadkeep_subagents::CatchUpError;
use threadkeep_subagents::managed::StoreError;

use threadkeep_config::ConfigError;

/// The error of the factory for agents (service reference, "Other rules" 3).
pub(super) const DELTA_WITH_CHECKPOINTER: &str = "checkpoint_channel_mode 'delta' cannot be combined with a persistent checkpointer here, because such an \
     agent bypasses marker injection and the compatibility gate; use the embedded client for a persistent delta \
     agent, or omit the checkpointer";

/// An error of an embedded client.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The store cannot be opened.
    #[error(transparent)]
    Start(#[from] OpenError),
    /// An error of the engine or the saver. Among others: [`ModeMismatch`](threadkeep::Error::ModeMismatch) for a
    /// thread that needs delta mode, [`Reconfiguration`](threadkeep::Error::Reconfiguration) for an edited cadence,
    /// [`Conflict`](threadkeep::Error::Conflict) if another process wrote to the thread meanwhile.
    #[error(transparent)]
    Engine(#[from] threadkeep::Error),
    /// The records of threads and subagents. Among others [`RecordsError::Conflict`] for a thread that a run holds.
    #[error(transparent)]
    Records(#[from] RecordsError),
    /// A run of a gateway is at work on the thread, and this turn would delegate on it or go on with its subagents; nothing
    /// was changed.
    #[error(
        "run {run_id} of a gateway is at work on thread '{thread_id}'; wait for its end or cancel it, and start the turn again"
    )]
    RunAtWork {
        /// The thread.
        thread_id: String,
        /// The run.
        run_id: String,
    },
    /// The subagents that administrators defined could not be read.
    #[error("the managed subagents cannot be read: {0}")]
    Subagents(#[from] StoreError),
    /// A thread's directory could not be removed.
    #[error("cannot remove {}: {source}", directory.display())]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// An argument is invalid; nothing was changed.
    #[error("{0}")]
    Invalid(String),
    /// The client has no checkpointer, so there are no threads.
    #[error("this client stores no threads: it was created without a checkpointer")]
    Stateless,
    /// An agent with a persistent checkpointer was requested in delta mode without a client.
    #[error("{DELTA_WITH_CHECKPOINTER}")]
    DeltaWithCheckpointer,
    /// The agent failed; what it had committed stays.
    #[error("{message}")]
    Agent {
        /// The class of the error, as in the gateway's responses.
        name: &'static str,
        /// The error message.
        message: String,
    },
    /// The turn's task panicked.
    #[error("the agent's task ended unexpectedly")]
    Died,
}

impl ClientError {
    /// The class name in the service's client library.
    pub fn class_name(&self) -> &'static str {
        match self {
            Self::Engine(error) | Self::Start(OpenError::Checkpoints(error)) => error.class_name(),
            Self::Config(_) | Self::Invalid(_) | Self::DeltaWithCheckpointer => "ValueError",
            Self::Agent { name, .. } => name,
            Self::Records(_) | Self::RunAtWork { .. } => "RunStoreError",
            Self::Directory { .. } => "OSError",
            Self::Start(_) | Self::Subagents(_) | Self::Stateless | Self::Died => "RuntimeError",
        }
    }
}

impl From<CatchUpError> for ClientError {
    fn from(error: CatchUpError) -> Self {
        match error {
            CatchUpError::Engine(error) => error.into(),
            CatchUpError::Records(error) => error.into(),
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

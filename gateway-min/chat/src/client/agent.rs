//! What all embedded agents share, and the factory for agents without a client.

use std::fmt;
use std::sync::Arc;

use threadkeep::channel::{ChannelTable, Schema};
use threadkeep::id::{IdSource, ThreadId};
use threadkeep::mode::{ChannelMode, ModeRegister};
use threadkeep::saver::Saver;
use threadkeep::state::StateAccessor;
use threadkeep_agent::AgentBuilder;
use threadkeep_storage::channel_mode;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::delegation::{Delegation, RecordsSource};
use super::options::open_config;
use super::{ClientError, Configuration, Turn, TurnOptions, turn};
use threadkeep_agent::Pattern;
use threadkeep_config::{Config, ConfigHandle};
use threadkeep_mcp::McpServers;

/// What turns run with.
pub(super) struct Core {
    pub(super) config: ConfigHandle,
    pub(super) agents: Arc<AgentBuilder>,
    pub(super) delegation: Delegation,
    pub(super) table: Arc<ChannelTable>,
    pub(super) ids: Arc<IdSource>,
    /// `None` if nothing is stored between turns.
    pub(super) accessor: Option<StateAccessor>,
    pub(super) defaults: TurnOptions,
    pub(super) turns: TaskTracker,
    /// Cancelled when the client is closed: turns then wait for no reader.
    pub(super) closing: CancellationToken,
    /// `None` for an agent built without a client.
    pub(super) guard: Option<Guard>,
}

impl Core {
    pub(super) fn new(
        config: ConfigHandle,
        current: Arc<Config>,
        source: RecordsSource,
        (table, ids): (Arc<ChannelTable>, Arc<IdSource>),
        accessor: Option<StateAccessor>,
        defaults: TurnOptions,
        guard: Option<Guard>,
    ) -> Self {
        let servers = Arc::new(McpServers::new(threadkeep_processes::Guard::this_program()));
        servers.connect(&current.mcp_servers);
        let agents = Arc::new(AgentBuilder::new(config.clone(), &current).with_source(servers));
        Self {
            delegation: Delegation::new(config.clone(), current, Arc::clone(&agents), source),
            config,
            agents,
            table,
            ids,
            accessor,
            defaults,
            turns: TaskTracker::new(),
            closing: CancellationToken::new(),
            guard,
        }
    }
}

/// The frozen mode and cadence of the process.
#[derive(Debug, Clone, Copy)]
pub(super) struct Guard(pub(super) &'static ModeRegister);

impl Guard {
    /// Freezes the mode and cadence of a new client.
    pub(super) fn freeze(self, config: &Config) -> threadkeep::Result<()> {
        self.0.freeze_mode(channel_mode(config))?;
        self.check_cadence(config)
    }

    /// Refuses a cadence that was edited since. An edited mode is ignored.
    pub(super) fn check_cadence(self, config: &Config) -> threadkeep::Result<()> {
        self.0.freeze_frequency(i64::try_from(config.snapshot_frequency()).unwrap_or(i64::MAX))
    }
}

/// A validated thread id, which also names a directory.
pub(super) fn thread_id(text: &str) -> Result<ThreadId, ClientError> {
    if !Pattern::THREAD_ID.matches(text) {
        let rule = Pattern::THREAD_ID.text;
        return Err(ClientError::Invalid(format!("'{text}' is not a valid thread id: it must match {rule}")));
    }
    Ok(ThreadId::from(text))
}

/// An agent that is built directly: nothing is frozen, and its only store is the one it is given.
///
/// For tests, and for agents that share their threads with no one. Programs should use [`Client`](super::Client).
pub struct Agent {
    core: Arc<Core>,
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent").field("config", &self.core.config).finish_non_exhaustive()
    }
}

impl Agent {
    /// Builds an agent. Without a checkpointer each turn starts empty.
    ///
    /// # Errors
    /// [`ClientError::DeltaWithCheckpointer`] in delta mode with a checkpointer (service reference, "Other rules" 3);
    /// [`ClientError::Config`].
    pub async fn build(
        config: Configuration,
        checkpointer: Option<Arc<dyn Saver>>,
        defaults: TurnOptions,
    ) -> Result<Self, ClientError> {
        let config = open_config(config).await?;
        let current = config.current_async().await;
        let mode = channel_mode(&current);
        if mode == ChannelMode::Delta && checkpointer.is_some() {
            return Err(ClientError::DeltaWithCheckpointer);
        }
        let table = Arc::new(Schema::thread_state().compile(mode, current.snapshot_frequency())?);
        let ids = Arc::new(IdSource::default());
        let accessor =
            checkpointer.map(|saver| StateAccessor::new(saver, Arc::clone(&table), Arc::clone(&ids)));
        Ok(Self {
            core: Arc::new(Core::new(
                config,
                current,
                RecordsSource::Client,
                (table, ids),
                accessor,
                defaults,
                None,
            )),
        })
    }

    /// As [`Client::stream`](super::Client::stream).
    pub fn stream(&self, message: &str, thread_id: Option<&str>, options: TurnOptions) -> Turn {
        turn::start(Arc::clone(&self.core), Some(message), thread_id, options)
    }
}

//! Options of a client and of its turns.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use threadkeep::mode::ModeRegister;
use threadkeep::saver::Saver;

use super::ClientError;
use threadkeep_config::{ConfigHandle, LoadOptions};
use threadkeep_storage::Stores;

/// Options of a [`Client`](super::Client). The defaults match a gateway in this directory.
#[derive(Debug, Default)]
pub struct ClientOptions {
    /// Where the configuration comes from.
    pub config: Configuration,
    /// Where threads are stored.
    pub checkpointer: Checkpointer,
    /// Defaults for its turns.
    pub turn: TurnOptions,
    /// Where mode and cadence are frozen; `None` for the whole process, which is what programs want. Two registers
    /// simulate two processes, for example to test both modes.
    pub frozen_in: Option<&'static ModeRegister>,
}

/// Where a configuration comes from.
#[derive(Debug, Clone, Default)]
pub enum Configuration {
    /// Found as by the gateway: `SVC_CONFIG_PATH`, else `config.yaml` in the project root, else the defaults.
    #[default]
    Found,
    /// In this file.
    File(PathBuf),
    /// This configuration.
    Given(ConfigHandle),
}

/// Where a client's threads are stored.
#[derive(Clone)]
pub enum Checkpointer {
    /// In the program's stores, which all clients of the process share. By default those that the configuration names. The
    /// history cache is in memory.
    ProcessWide(Stores),
    /// In this saver.
    Own(Arc<dyn Saver>),
    /// Nowhere: each turn starts empty.
    Stateless,
}

impl Default for Checkpointer {
    fn default() -> Self {
        Self::ProcessWide(Stores::default())
    }
}

impl fmt::Debug for Checkpointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ProcessWide(stores) => f.debug_tuple("ProcessWide").field(stores).finish(),
            Self::Own(saver) => f.debug_tuple("Own").field(&saver.capabilities().name).finish(),
            Self::Stateless => f.write_str("Stateless"),
        }
    }
}

/// Options of a turn. Unset options take the client's, then the defaults below.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TurnOptions {
    /// The model; default the first configured one.
    pub model_name: Option<String>,
    /// Whether the model thinks before it answers, if it can; default true.
    pub thinking_enabled: Option<bool>,
    /// The reasoning effort; default the model's own.
    pub reasoning_effort: Option<String>,
    /// The custom agent to which the thread's checkpoints are bound (letters, digits, `-`); default the default agent.
    pub agent_name: Option<String>,
    /// The maximum number of supersteps, up to the configured `max_recursion_limit`; default 100.
    pub recursion_limit: Option<u64>,
    /// Whether the agent may delegate to subagents with the tool `task`; default false, except that a turn which goes on
    /// with unfinished delegations ([`Client::resume`](super::Client::resume)) delegates.
    pub subagent_enabled: Option<bool>,
    /// How many delegations one answer of the model may start; default 3, brought into 1 to 64 and to at most
    /// `subagent_runtime.max_running`.
    pub max_concurrent_subagents: Option<i64>,
    /// How many delegations the turn may start, brought into 1 to 50; default `subagents.max_total_per_run`.
    pub max_total_subagents: Option<i64>,
}

impl TurnOptions {
    /// These options, with unset ones taken from `defaults`.
    pub(super) fn or(self, defaults: &Self) -> Self {
        Self {
            model_name: self.model_name.or_else(|| defaults.model_name.clone()),
            thinking_enabled: self.thinking_enabled.or(defaults.thinking_enabled),
            reasoning_effort: self.reasoning_effort.or_else(|| defaults.reasoning_effort.clone()),
            agent_name: self.agent_name.or_else(|| defaults.agent_name.clone()),
            recursion_limit: self.recursion_limit.or(defaults.recursion_limit),
            subagent_enabled: self.subagent_enabled.or(defaults.subagent_enabled),
            max_concurrent_subagents: self.max_concurrent_subagents.or(defaults.max_concurrent_subagents),
            max_total_subagents: self.max_total_subagents.or(defaults.max_total_subagents),
        }
    }
}

/// Loads the configuration and starts to follow it.
pub(super) async fn open_config(source: Configuration) -> Result<ConfigHandle, ClientError> {
    let path = match source {
        Configuration::Given(handle) => return Ok(handle),
        Configuration::Found => None,
        Configuration::File(path) => Some(path),
    };
    let options = LoadOptions::from_process(path)?;
    let opened = tokio::task::spawn_blocking(move || ConfigHandle::open(&options)).await;
    Ok(opened.map_err(|_| ClientError::Died)??)
}

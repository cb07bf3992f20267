//! What a client and each of its turns can be told.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use threadkeep::mode::ModeRegister;
use threadkeep::saver::Saver;

use super::ClientError;
use crate::config::{ConfigHandle, LoadOptions};

/// How a [`Client`](super::Client) is made. The default is what the gateway of this directory would use.
#[derive(Debug, Default)]
pub struct ClientOptions {
    /// Where the configuration comes from.
    pub config: Configuration,
    /// What keeps the threads.
    pub checkpointer: Checkpointer,
    /// What its turns are told, unless they say otherwise.
    pub turn: TurnOptions,
    /// Where mode and cadence are frozen; none means for the whole process, which is what a program wants. Two registers
    /// stand for two processes, for example in a test of both modes.
    pub frozen_in: Option<&'static ModeRegister>,
}

/// Where a configuration comes from.
#[derive(Debug, Clone, Default)]
pub enum Configuration {
    /// It is found as the gateway finds it: `SVC_CONFIG_PATH`, else `config.yaml` in the project root, else the defaults.
    #[default]
    Found,
    /// This file.
    File(PathBuf),
    /// This one.
    Given(ConfigHandle),
}

/// What keeps a client's threads.
#[derive(Clone, Default)]
pub enum Checkpointer {
    /// The store that the configuration names, which all clients of the process share. Its history cache is in memory.
    #[default]
    ProcessWide,
    /// This one, as it is.
    Own(Arc<dyn Saver>),
    /// Nothing: each turn begins anew.
    Stateless,
}

impl fmt::Debug for Checkpointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ProcessWide => f.write_str("ProcessWide"),
            Self::Own(saver) => f.debug_tuple("Own").field(&saver.capabilities().name).finish(),
            Self::Stateless => f.write_str("Stateless"),
        }
    }
}

/// How a turn is to go. What is none is as the client was told, and else as said here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TurnOptions {
    /// The model; else the first one of the configuration.
    pub model_name: Option<String>,
    /// Whether the model thinks before it answers, if it can; else it does.
    pub thinking_enabled: Option<bool>,
    /// How much; else as the model likes.
    pub reasoning_effort: Option<String>,
    /// The custom agent that the thread's checkpoints are bound to (letters, digits, `-`); else the default agent.
    pub agent_name: Option<String>,
    /// The most supersteps, up to `max_recursion_limit` of the configuration; else 100.
    pub recursion_limit: Option<u64>,
}

impl TurnOptions {
    /// These, completed by `defaults`.
    pub(super) fn or(self, defaults: &Self) -> Self {
        Self {
            model_name: self.model_name.or_else(|| defaults.model_name.clone()),
            thinking_enabled: self.thinking_enabled.or(defaults.thinking_enabled),
            reasoning_effort: self.reasoning_effort.or_else(|| defaults.reasoning_effort.clone()),
            agent_name: self.agent_name.or_else(|| defaults.agent_name.clone()),
            recursion_limit: self.recursion_limit.or(defaults.recursion_limit),
        }
    }
}

/// Reads the configuration and starts to follow it.
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

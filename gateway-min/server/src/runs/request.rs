//! What a run is asked to do, complete and checked. The HTTP routes make it from a request's body.

use std::fmt;

use serde_json::{Map, Value};
use threadkeep::checkpoint::CheckpointKey;
use threadkeep_agent::Interrupts;

use crate::store::MultitaskStrategy;

/// A run to start, complete and checked.
#[derive(Clone)]
pub struct RunRequest {
    /// As sent, for the run's record.
    pub assistant_id: Option<String>,
    /// The custom agent that runs, under its normalised name; none for the default one.
    pub agent: Option<String>,
    /// What the run starts from.
    pub input: RunInput,
    /// The request's metadata, for the run's record.
    pub metadata: Map<String, Value>,
    /// What the agent is configured with.
    pub config: RunConfig,
    /// Credentials for tools: the entries of `config.context.secrets`, and `github_token`.
    pub secrets: Secrets,
    /// The checkpoint to resume from; none for the head.
    pub checkpoint: Option<CheckpointKey>,
    /// How the run streams, stops and meets other runs.
    pub options: RunOptions,
    /// `{input, config}` as sent, with secrets redacted, for the run's record.
    pub kwargs: Value,
}

impl fmt::Debug for RunRequest {
    /// Without the contents, which are a conversation.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { assistant_id, checkpoint, options, .. } = self;
        let mut debug = f.debug_struct("RunRequest");
        debug.field("assistant_id", assistant_id).field("checkpoint", checkpoint).field("options", options);
        debug.finish_non_exhaustive()
    }
}

/// What a run starts from.
#[derive(Debug, Clone, PartialEq)]
pub enum RunInput {
    /// Writes to the channels of the thread. The messages among them are normalised and have ids.
    Values(Map<String, Value>),
    /// The value of `command.resume`: the answer to what the thread waits for, and what that is decides what becomes of
    /// it. At a question to the user it is the next human message; at a breakpoint it is kept as a pending write and the
    /// run goes on; where nothing waits the run is refused.
    Resume(Resume),
    /// Nothing: the run goes on from the checkpoint.
    Continue,
}

/// A value to resume with; never null.
#[derive(Debug, Clone, PartialEq)]
pub struct Resume {
    /// As sent.
    pub value: Value,
    /// The messages that it stands for, normalised and with ids, if it is a text or an object with nothing but
    /// `messages`.
    pub messages: Option<Vec<Value>>,
}

/// What a run is configured with, beside its input. No credential is in here.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunConfig {
    /// Entries that parts of the agent look up, and that become checkpoint metadata where they are scalars.
    pub configurable: Map<String, Value>,
    /// What the agent may read of the request's context.
    pub context: Map<String, Value>,
    /// Entries for checkpoint metadata.
    pub metadata: Map<String, Value>,
    /// The greatest number of supersteps, at least 1.
    pub recursion_limit: u64,
}

/// What a client wants to see of a run (`stream_mode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StreamMode {
    /// The whole state after each superstep.
    Values,
    /// Messages, and chunks of messages, as they are made.
    MessagesTuple,
    /// What each node wrote.
    Updates,
    /// Checkpoints and tasks with details for people who look for a fault.
    Debug,
    /// The start and the end of each task.
    Tasks,
    /// Each checkpoint.
    Checkpoints,
    /// What tools and nodes say of their own accord.
    Custom,
}

impl StreamMode {
    pub(crate) fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "values" => Self::Values,
            // The second is what newer clients call it.
            "messages-tuple" | "messages" => Self::MessagesTuple,
            "updates" => Self::Updates,
            "debug" => Self::Debug,
            "tasks" => Self::Tasks,
            "checkpoints" => Self::Checkpoints,
            "custom" => Self::Custom,
            _ => return None,
        })
    }

    /// The name of the frames of this mode.
    pub const fn event(self) -> &'static str {
        match self {
            Self::Values => "values",
            Self::MessagesTuple => "messages",
            Self::Updates => "updates",
            Self::Debug => "debug",
            Self::Tasks => "tasks",
            Self::Checkpoints => "checkpoints",
            Self::Custom => "custom",
        }
    }
}

/// What becomes of a run when the client that it belongs to disconnects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnDisconnect {
    /// It is interrupted.
    #[default]
    Cancel,
    /// It goes on.
    Continue,
}

/// The options of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunOptions {
    /// Nodes to stop before.
    pub interrupt_before: Interrupts,
    /// Nodes to stop after.
    pub interrupt_after: Interrupts,
    /// What is streamed, each mode once; at least one.
    pub stream_modes: Vec<StreamMode>,
    /// Whether frames of nested graphs are streamed as well.
    pub stream_subgraphs: bool,
    /// What follows from the disconnection of the client.
    pub on_disconnect: OnDisconnect,
    /// What follows from another active run.
    pub multitask_strategy: MultitaskStrategy,
}

/// The credentials that came with one request. They live as long as its run and are never stored.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secrets(Map<String, Value>);

impl Secrets {
    pub(crate) fn new(secrets: Map<String, Value>) -> Self {
        Self(secrets)
    }

    /// The secret of this name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name)?.as_str()
    }
}

impl fmt::Debug for Secrets {
    /// The names only.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn secrets_are_given_by_name_and_never_printed() {
        let Value::Object(map) = json!({"TOKEN": "hunter2", "number": 3}) else { panic!() };
        let secrets = Secrets::new(map);
        assert_eq!(
            (secrets.get("TOKEN"), secrets.get("number"), secrets.get("x")),
            (Some("hunter2"), None, None)
        );
        assert_eq!(format!("{secrets:?}"), r#"{"TOKEN", "number"}"#);
    }
}

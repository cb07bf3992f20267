//! A request for a run, complete and validated. The HTTP routes build it from a request's body.

use std::fmt;

use serde_json::{Map, Value};
use threadkeep::id::CheckpointId;
use threadkeep::id::NodeName;
use threadkeep_agent::{Durability, Interrupts};

use threadkeep_records::MultitaskStrategy;

/// A run to start, complete and validated.
#[derive(Clone)]
pub struct RunRequest {
    /// As sent, for the run's record.
    pub assistant_id: Option<String>,
    /// The custom agent that runs, under its normalised name; `None` for the default agent.
    pub agent: Option<String>,
    /// What the run starts from.
    pub input: RunInput,
    /// The request's metadata, for the run's record.
    pub metadata: Map<String, Value>,
    /// The agent's configuration.
    pub config: RunConfig,
    /// What the run may delegate to subagents.
    pub delegation: Delegation,
    /// The checkpoint to resume from; `None` for the head.
    pub checkpoint: Option<CheckpointId>,
    /// How the run streams, stops and handles other runs.
    pub options: RunOptions,
    /// `{input, config}` as sent, with secrets redacted, for the run's record.
    pub kwargs: Value,
}

impl fmt::Debug for RunRequest {
    /// Omits the contents, which are a conversation.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { assistant_id, checkpoint, options, .. } = self;
        let mut debug = f.debug_struct("RunRequest");
        debug.field("assistant_id", assistant_id).field("checkpoint", checkpoint).field("options", options);
        debug.finish_non_exhaustive()
    }
}

/// What a run starts with.
#[derive(Debug, Clone, PartialEq)]
pub enum RunInput {
    /// Writes to the channels of the thread. The messages among them are normalised and have ids.
    Values(Map<String, Value>),
    /// The value of `command.resume`: the answer to what the thread waits for, which decides how it is used. At a
    /// question to the user it becomes the next human message; at a breakpoint it is stored as a pending write and the
    /// run continues; if nothing waits, the run is refused.
    Resume(Resume),
    /// `command.update` and `command.goto`: a change of the state, before the run continues. If that is with the tool
    /// calls at which the thread stopped, what has finished of them is not made again.
    Change(Change),
    /// Nothing: the run continues from the checkpoint.
    Continue,
}

impl RunInput {
    /// The answer in it.
    pub(crate) fn resume(&self) -> Option<&Resume> {
        match self {
            Self::Resume(resume) => Some(resume),
            Self::Change(change) => change.resume.as_ref(),
            Self::Values(_) | Self::Continue => None,
        }
    }
}

/// A change of the state, and where the run continues.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// Writes to the channels of the thread. The messages among them are normalised and have ids.
    pub update: Map<String, Value>,
    /// The node to continue with: `None` for those that the thread has next, `Some(None)` to end.
    pub goto: Option<Option<NodeName>>,
    /// The answer, if the command has one too.
    pub resume: Option<Resume>,
}

/// A resume value; never null.
#[derive(Debug, Clone, PartialEq)]
pub struct Resume {
    /// As sent.
    pub value: Value,
    /// The messages it represents, normalised and with ids, if it is a string or an object with only `messages`.
    pub messages: Option<Vec<Value>>,
}

/// The key of a context that keeps the agent from asking the user.
pub(crate) const DISABLE_CLARIFICATION: &str = "disable_clarification";
/// The same, as internal callers say it: nobody is there to answer.
pub(crate) const NON_INTERACTIVE: &str = "non_interactive";

/// The configuration of a run, without its input. Contains no credentials.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunConfig {
    /// Entries for parts of the agent; scalars also become checkpoint metadata.
    pub configurable: Map<String, Value>,
    /// What the agent may read of the request's context.
    pub context: Map<String, Value>,
    /// Entries for checkpoint metadata.
    pub metadata: Map<String, Value>,
    /// Words for those who follow the run: part of the metadata of its message frames.
    pub tags: Vec<String>,
    /// The maximum number of supersteps, at least 1.
    pub recursion_limit: u64,
}

impl RunConfig {
    /// Whether the agent must not ask the user.
    pub fn forbids_questions(&self) -> bool {
        let is_set = |key: &str| self.context.get(key).and_then(Value::as_bool) == Some(true);
        is_set(DISABLE_CLARIFICATION) || is_set(NON_INTERACTIVE)
    }
}

/// What a run may delegate to subagents; by default nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Delegation {
    /// Whether it may delegate at all.
    pub enabled: bool,
    /// How many delegations one response of the model may start, within the limits of this process.
    pub max_concurrent: u32,
    /// How many delegations the run may start.
    pub max_total: u32,
}

/// What a client wants to see of a run (`stream_mode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StreamMode {
    /// The whole state after each superstep.
    Values,
    /// Messages, and chunks of messages, as they are produced.
    MessagesTuple,
    /// What each node wrote.
    Updates,
    /// Checkpoints and tasks with details for debugging.
    Debug,
    /// The start and the end of each task.
    Tasks,
    /// Each checkpoint.
    Checkpoints,
    /// Custom output of tools and nodes.
    Custom,
}

impl StreamMode {
    pub(crate) fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "values" => Self::Values,
            // Newer clients use the second name.
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

/// What happens to a run when its client disconnects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnDisconnect {
    /// It is interrupted.
    #[default]
    Cancel,
    /// It continues.
    Continue,
}

/// The options of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunOptions {
    /// Nodes to stop before.
    pub interrupt_before: Interrupts,
    /// Nodes to stop after.
    pub interrupt_after: Interrupts,
    /// The stream modes, each once; at least one.
    pub stream_modes: Vec<StreamMode>,
    /// Whether frames of nested graphs are also streamed.
    pub stream_subgraphs: bool,
    /// What happens when the client disconnects.
    pub on_disconnect: OnDisconnect,
    /// What happens if another run is active.
    pub multitask_strategy: MultitaskStrategy,
    /// When the run's supersteps are on disk.
    pub durability: Durability,
}

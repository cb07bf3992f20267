//! The tools the lead agent works with, and the guards around their use.
//!
//! A [`Tool`] has a [`ToolSpec`] for the model and a call. A [`Toolbox`] holds the tools of a run and runs the model's
//! calls: a failure becomes a tool message for the model, not an error of the run. The built-in tools work on files
//! in the thread's own directory and cannot leave it; `bash` can, and exists only if the configuration allows it.
//!
//! [`loop_detection`] and [`dangling`] are pure functions of the conversation: they detect that the model is going
//! round in circles, and calls that an interruption left without a result.

mod bash;
mod clarification;
pub mod dangling;
pub mod deferred;
mod files;
mod glob;
pub mod loop_detection;
mod output;
mod pool;
mod reports;
mod schema;
mod search;
mod toolbox;
mod workspace;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use threadkeep::id::IdSource;
use threadkeep::state::StateSnapshot;
use threadkeep_config::{Config, Secret, ToolRouting};
use tokio_util::sync::CancellationToken;

pub(crate) use self::clarification::{ASK_CLARIFICATION, is_question};
pub use self::clarification::{asks, question_args, questions};
use self::pool::blocking;
pub use crate::model::ToolSpec;
pub use crate::model::message::ToolStatus;
pub use output::HeadAndTail;
pub use reports::{Nested, NestedEvent, Report, Reports, WorkUsage};
pub use toolbox::{ToolAnswer, Toolbox};
pub use workspace::copy::copy as copy_workspace;
pub use workspace::snapshot::{Changes, Snapshot};

/// The default maximum of a tool's output in the conversation, in characters.
pub const DEFAULT_OUTPUT_MAX_CHARS: usize = 12_000;

/// Something the model can call.
#[async_trait]
pub trait Tool: Send + Sync {
    /// The tool's description for the model.
    fn spec(&self) -> ToolSpec;

    /// The maximum number of output characters in the conversation; the rest is cut off.
    fn output_max_chars(&self) -> usize {
        DEFAULT_OUTPUT_MAX_CHARS
    }

    /// How long the call may go on after [`ToolContext::cancel`]: a tool with something to settle stops by itself within
    /// this time, and only then is dropped. `None` drops it at once.
    fn stops_within(&self) -> Option<Duration> {
        None
    }

    /// Whether the model may have to load it before it can call it; see [`deferred`].
    fn is_deferrable(&self) -> bool {
        false
    }

    /// Its group, if the configuration names one.
    fn group(&self) -> Option<&str> {
        None
    }

    /// Which questions it is for, if the configuration says so.
    fn routing(&self) -> Option<&ToolRouting> {
        None
    }

    /// The results of a superstep are stored, this call's among them; `context` is that of the call.
    async fn stored(&self, context: &ToolContext) {
        let _ = context;
    }

    /// Executes the call. `args` contains the required arguments, with types as in the schema.
    ///
    /// Must not block, and must leave nothing running when its future is dropped: that is how a run is cancelled, unless
    /// the tool [says how fast it stops](Self::stops_within).
    async fn call(&self, context: &ToolContext, args: Value) -> Result<ToolOutput, ToolError>;
}

/// Where further tools come from, besides the built-in ones.
#[async_trait]
pub trait ToolSource: Send + Sync {
    /// The tools that are available now. An agent waits for this before its run.
    async fn tools(&self, config: &Config) -> Vec<Arc<dyn Tool>>;
}

/// The origin of a call, its working directory, and its connection to the run.
#[derive(Debug, Clone)]
pub struct ToolContext {
    /// The thread of the run.
    pub thread_id: String,
    /// The run.
    pub run_id: String,
    /// The call's id; set by [`Toolbox::run`].
    pub tool_call_id: String,
    /// The id of the message that its result becomes; set by [`Toolbox::run`].
    pub message_id: String,
    /// The thread's own directory; created when a tool first needs it.
    pub root: PathBuf,
    /// The call's index among the calls of its answer.
    pub index: u32,
    /// The task of the call, as streams name the place of what works inside of it: the node and the task's id. Empty
    /// outside of a run.
    pub namespace: String,
    /// The source of the call's ids and times, which no other call draws from.
    pub ids: Arc<IdSource>,
    /// The state from which the call runs; `None` outside of a run.
    pub state: Option<Arc<StateSnapshot>>,
    /// Cancelled with the run.
    pub cancel: CancellationToken,
    /// Where the tool reports while it works.
    pub reports: Reports,
    /// Whether results get a [receipt](crate::receipts).
    pub receipts: bool,
}

impl ToolContext {
    /// The context of a run's calls in this directory; the loop adds what belongs to one call.
    pub fn new(thread_id: impl Into<String>, run_id: impl Into<String>, root: impl Into<PathBuf>) -> Self {
        Self {
            thread_id: thread_id.into(),
            run_id: run_id.into(),
            tool_call_id: String::new(),
            message_id: String::new(),
            root: root.into(),
            index: 0,
            namespace: String::new(),
            ids: Arc::default(),
            state: None,
            cancel: CancellationToken::new(),
            reports: Reports::unread(),
            receipts: false,
        }
    }
}

/// The result of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolOutput {
    /// The text for the model.
    pub content: String,
    /// Whether the tool succeeded.
    pub status: ToolStatus,
    /// Data for the program, which the model does not see: the message's `artifact`.
    pub artifact: Value,
    /// More data for the program: the message's `additional_kwargs`.
    pub additional_kwargs: Map<String, Value>,
    /// The files that the call wrote, relative to the thread's directory.
    pub written: Vec<String>,
    /// Values that are written to the state with the result, by channel.
    pub writes: Map<String, Value>,
    /// Whether the run ends with this call because it waits for the user.
    pub ends_run: bool,
}

impl ToolOutput {
    /// A success with this text and nothing else.
    pub fn text(content: impl Into<String>) -> Self {
        Self {
            content: content.into(),
            status: ToolStatus::Success,
            artifact: Value::Null,
            additional_kwargs: Map::new(),
            written: Vec::new(),
            writes: Map::new(),
            ends_run: false,
        }
    }
}

/// Why a call failed. The model reads the text and can try something else, so it says what to do and names paths as the
/// model gave them.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// The arguments are invalid.
    #[error("{0}")]
    Arguments(String),
    /// The path leads outside the thread's directory, or might.
    #[error("`{path}` is not allowed: {reason}. Use a path relative to the working directory, inside it")]
    Path {
        /// The path as given.
        path: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A file operation failed.
    #[error("cannot {action} `{path}`: {source}")]
    File {
        /// The action that failed.
        action: &'static str,
        /// The path as given.
        path: String,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// Any other failure.
    #[error("{0}")]
    Failed(String),
    /// The run has ended elsewhere, and another one may go on with the call. The model reads nothing of this: the run
    /// fails at once, and the next run makes the call again.
    #[error("{0}")]
    Undelivered(String),
    /// The call has or may have a result, and its store did not give it back. As after [`Self::Undelivered`], but the
    /// other calls of the superstep go on to their ends first, and their results are kept for the next run.
    #[error("{0}")]
    Unread(String),
}

/// The settings of the built-in tools, from the configuration's `sandbox` section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolSettings {
    /// Whether there is a `bash` tool. Its commands run as the gateway's user and can do whatever that user can.
    pub allow_host_bash: bool,
    /// The limit of `bash`'s output, in characters.
    pub bash_output_max_chars: usize,
    /// The limit of `read_file`'s output, in characters.
    pub read_file_output_max_chars: usize,
    /// The limit of `ls`'s output, in characters.
    pub ls_output_max_chars: usize,
    /// How long a command may run.
    pub bash_command_timeout: Duration,
    /// Environment variables of commands, besides `PATH`, `HOME` and `LANG`, which they can replace.
    pub environment: Arc<BTreeMap<String, Secret>>,
}

/// The defaults of the service reference, "Subagent settings", `sandbox.allow_host_bash`, and of the `sandbox`
/// section.
impl Default for ToolSettings {
    fn default() -> Self {
        Self {
            allow_host_bash: false,
            bash_output_max_chars: 20_000,
            read_file_output_max_chars: 50_000,
            ls_output_max_chars: 20_000,
            bash_command_timeout: Duration::from_mins(10),
            environment: Arc::default(),
        }
    }
}

/// Reads arguments into a tool's own type.
fn parse<T: DeserializeOwned>(args: Value) -> Result<T, ToolError> {
    serde_json::from_value(args).map_err(|error| ToolError::Arguments(format!("invalid arguments: {error}")))
}

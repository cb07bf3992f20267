//! What a row of `executions` says, and what is asked of the repository.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::codec::{Cells, JsonObject, name_enum};
use super::opening::Delegating;
use super::query::{FromRow, Row};
use crate::failure::DatabaseError;

name_enum! {
    /// What was delegated.
    ExecutionKind ("kind of execution") {
        /// A call of the tool `task`.
        Task = "task",
        /// An item of a batch.
        BatchItem = "batch_item",
        /// A call of the tool `invoke_acp_agent`. It has no checkpoints.
        Acp = "acp",
    }
}

name_enum! {
    /// The status of an execution.
    ExecutionStatus ("status of an execution") {
        /// It has no slot yet.
        Pending = "pending",
        /// It works.
        Running = "running",
        /// It has a result.
        Completed = "completed",
        /// It failed.
        Failed = "failed",
        /// It was cancelled.
        Cancelled = "cancelled",
        /// It took longer than it may.
        TimedOut = "timed_out",
    }
}

impl ExecutionStatus {
    /// Whether nothing follows it.
    pub fn is_terminal(self) -> bool {
        !matches!(self, Self::Pending | Self::Running)
    }
}

/// Tokens of model calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecutionTokens {
    /// Tokens that the models read.
    pub input_tokens: u64,
    /// Tokens that the models wrote.
    pub output_tokens: u64,
    /// Their sum, as the providers count it.
    pub total_tokens: u64,
}

impl std::ops::AddAssign for ExecutionTokens {
    fn add_assign(&mut self, other: Self) {
        self.input_tokens += other.input_tokens;
        self.output_tokens += other.output_tokens;
        self.total_tokens += other.total_tokens;
    }
}

/// An execution to open.
#[derive(Clone, Debug)]
pub struct NewExecution {
    /// Its id, the same for every attempt.
    pub execution_id: String,
    /// The thread that delegates.
    pub thread_id: String,
    /// The run that delegates.
    pub run_id: String,
    /// What must hold for it to delegate.
    pub delegating: Delegating,
    /// The execution that delegates; `None` for the run itself.
    pub parent_execution: Option<String>,
    /// What is delegated.
    pub kind: ExecutionKind,
    /// The model's id of the call, which may repeat.
    pub tool_call_id: String,
    /// The subagent's name.
    pub agent_name: String,
    /// The subagent's definition, as it is now.
    pub definition: JsonObject,
    /// A digest of the definition.
    pub definition_digest: String,
    /// What the work is about.
    pub description: String,
    /// When it must have ended.
    pub deadline: DateTime<Utc>,
}

/// A row of `executions`.
#[derive(Clone, Debug, PartialEq)]
pub struct ExecutionRow {
    /// The execution.
    pub execution_id: String,
    /// Which attempt this is; 1 for the first.
    pub attempt: i64,
    /// The thread that delegated.
    pub thread_id: String,
    /// The run that delegated, or the one that goes on with it.
    pub run_id: String,
    /// The execution that delegated; `None` for the run itself.
    pub parent_execution: Option<String>,
    /// What was delegated.
    pub kind: ExecutionKind,
    /// The model's id of the call.
    pub tool_call_id: String,
    /// The hidden thread with the subagent's checkpoints.
    pub child_thread: String,
    /// The subagent's name.
    pub agent_name: String,
    /// The subagent's definition at dispatch; `None` where it was not read. It is long, and most readers print the rest.
    pub definition: Option<JsonObject>,
    /// A digest of the definition.
    pub definition_digest: String,
    /// What the work is about.
    pub description: String,
    /// The status.
    pub status: ExecutionStatus,
    /// Why it has no result.
    pub error: Option<String>,
    /// Why it stopped early.
    pub stop_reason: Option<String>,
    /// The model that did the work.
    pub model_name: Option<String>,
    /// Tokens by model; empty if no provider reported any.
    pub usage: BTreeMap<String, ExecutionTokens>,
    /// How long it waited for a slot, in milliseconds.
    pub waited_ms: Option<i64>,
    /// Whether the parent has stored its result.
    pub delivered: bool,
    /// Whether the sums of a run contain its tokens; of an item of a batch, whether those of the batch contain all of them.
    pub counted: bool,
    /// When it must have ended.
    pub deadline: DateTime<Utc>,
    /// When it was dispatched.
    pub created_at: DateTime<Utc>,
    /// When it got a slot.
    pub started_at: Option<DateTime<Utc>>,
    /// When it ended.
    pub completed_at: Option<DateTime<Utc>>,
}

/// The attempt to work on.
#[derive(Clone, Debug, PartialEq)]
pub struct Opened {
    /// Its row.
    pub row: ExecutionRow,
    /// Whether its tokens are counted: the sums of a run contain them, or this run has taken it over to count them.
    pub counted: bool,
}

/// How an execution ends.
#[derive(Clone, Debug, PartialEq)]
pub struct ExecutionEnd {
    /// The final status.
    pub status: ExecutionStatus,
    /// Why it has no result.
    pub error: Option<String>,
    /// Why it stopped early.
    pub stop_reason: Option<String>,
    /// Tokens by model.
    pub usage: BTreeMap<String, ExecutionTokens>,
}

impl FromRow for ExecutionRow {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let cells = Cells::new(row, "executions", &["execution_id", "attempt"]);
        Ok(Self {
            execution_id: cells.text("execution_id")?,
            attempt: cells.int("attempt")?,
            thread_id: cells.text("thread_id")?,
            run_id: cells.text("run_id")?,
            parent_execution: cells.opt_text("parent_execution")?,
            kind: cells.name("kind")?,
            tool_call_id: cells.text("tool_call_id")?,
            child_thread: cells.text("child_thread")?,
            agent_name: cells.text("agent_name")?,
            definition: cells.opt_json("definition_json")?,
            definition_digest: cells.text("definition_digest")?,
            description: cells.text("description")?,
            status: cells.name("status")?,
            error: cells.opt_text("error")?,
            stop_reason: cells.opt_text("stop_reason")?,
            model_name: cells.opt_text("model_name")?,
            usage: cells.json("usage_json")?,
            waited_ms: cells.opt_int("waited_ms")?,
            delivered: cells.flag("delivered")?,
            counted: cells.flag("counted")?,
            deadline: cells.time("deadline")?,
            created_at: cells.time("created_at")?,
            started_at: cells.opt_time("started_at")?,
            completed_at: cells.opt_time("completed_at")?,
        })
    }
}

/// The tokens of all models.
pub(super) fn sum(usage: &BTreeMap<String, ExecutionTokens>) -> ExecutionTokens {
    usage.values().fold(ExecutionTokens::default(), |mut sum, tokens| {
        sum += *tokens;
        sum
    })
}

impl ExecutionRow {
    /// The tokens of all models; `None` if no provider reported any.
    pub fn tokens(&self) -> Option<ExecutionTokens> {
        (!self.usage.is_empty()).then(|| sum(&self.usage))
    }
}

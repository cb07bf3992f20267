//! The rows of `runs`: runs, and the reservations with which other writers hold a thread.
//!
//! The table alone decides who may write to a thread, across tasks and processes: a unique index allows one *active*
//! row (`pending` or `running`) per thread. [`admission`] is how a run becomes that row, [`reservation`] how another
//! writer does, [`lifecycle`] how a run moves on, [`lease`] how a process shows that it is alive, [`frames`] how other
//! processes see the streams of its runs, [`recovery`] how abandoned rows are ended, [`seen`] how they are known,
//! [`listed`] what reads many rows, and [`brief`] what reads few columns.

mod admission;
mod brief;
mod finished;
mod frames;
mod lease;
mod lifecycle;
mod listed;
mod outcome;
mod recovery;
mod reservation;
mod seen;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

pub use admission::{Admission, QUEUE_MAX};
pub use brief::{RunBrief, RunUsage};
use chrono::{DateTime, Utc};
pub use frames::FrameBatch;
pub use lease::{Lease, Noticed};
pub use listed::RunQuery;
pub use outcome::{CancelOutcome, DecideOutcome, FinishOutcome, RunEnd, StartOutcome};
pub use recovery::{LEASE_EXPIRED_ERROR, RECOVERY_ERROR, RECOVERY_STOP_REASON, Recovered};
pub use reservation::{Reservation, WriterKind};
pub(crate) use reservation::{ensure_held, lost};
pub use seen::SeenLeases;
use serde_json::Value;

use super::codec::{Cells, JsonObject, name_enum};
use super::db::Db;
use super::error::RecordsError;
use super::query::{Builder, FromRow, Row, query};
use crate::failure::DatabaseError;

/// The maximum length of [`RunTotals::first_human_message`] and [`RunTotals::last_ai_message`] in characters; longer
/// texts are truncated.
pub const MESSAGE_PREVIEW_MAX_CHARS: usize = 2000;

name_enum! {
    /// The states of a run: `pending`, `running`, then one of the other four, for good.
    RunStatus ("run status") {
        /// Admitted, not started.
        Pending = "pending",
        /// Running.
        Running = "running",
        /// Ended normally.
        Success = "success",
        /// Failed, or rolled back.
        Error = "error",
        /// Ran out of time.
        Timeout = "timeout",
        /// Cancelled.
        Interrupted = "interrupted",
    }
}

impl RunStatus {
    /// Whether a run in this state holds its thread or waits for it.
    pub const fn is_active(self) -> bool {
        matches!(self, Self::Pending | Self::Running)
    }
}

name_enum! {
    /// The kind of work that a row of `runs` represents.
    OperationKind ("operation kind") {
        /// A run of an agent.
        Run = "run",
        /// A write to the thread's checkpoints that is not part of a run.
        CheckpointWrite = "checkpoint_write",
        /// A write to the thread's files.
        ArtifactWrite = "artifact_write",
        /// The creation of a branch of the thread.
        Branch = "branch",
        /// The deletion of the thread.
        Delete = "delete",
    }
}

name_enum! {
    /// What happens to the work of a cancelled run.
    CancelAction ("cancel action") {
        /// Completed steps stay.
        Interrupt = "interrupt",
        /// The state from before the run is restored.
        Rollback = "rollback",
    }
}

name_enum! {
    /// What a new run does if another run holds its thread.
    MultitaskStrategy ("multitask strategy") {
        /// It is refused.
        Reject = "reject",
        /// It cancels that run, whose completed steps stay, and runs after it.
        Interrupt = "interrupt",
        /// It cancels that run, restores the state from before it, and runs after that.
        Rollback = "rollback",
        /// It runs after that run and all waiting runs.
        Enqueue = "enqueue",
    }
}

impl Default for MultitaskStrategy {
    /// The default of a request without a strategy.
    fn default() -> Self {
        Self::Reject
    }
}

/// A run to admit.
#[derive(Clone, Debug, Default)]
pub struct NewRun {
    /// The run's id, new and unique.
    pub run_id: String,
    /// The thread to run on; its row must exist.
    pub thread_id: String,
    /// The user to whom the thread must be [visible](crate::ThreadRow::visible_to), if not to all: what that user may
    /// not see counts as missing.
    pub visible_to: Option<String>,
    /// The agent.
    pub assistant_id: Option<String>,
    /// The user who started it.
    pub user_id: Option<String>,
    /// A hash that identifies this request of this user on this thread: a second admission with it returns the first
    /// one's run.
    pub idempotency_key: Option<String>,
    /// The model.
    pub model_name: Option<String>,
    /// The request's metadata, without secrets.
    pub metadata: JsonObject,
    /// The request's input and configuration, without secrets.
    pub kwargs: Value,
    /// The text of the first human message; see [`MESSAGE_PREVIEW_MAX_CHARS`].
    pub first_human_message: Option<String>,
    /// The run that this one continues.
    pub follow_up_to_run_id: Option<String>,
    /// Whether it repeats a turn with an edited question: unless it succeeds, the state from before it is restored.
    pub edits: bool,
    /// Whether its admission is acknowledged to someone who does not follow the run, or may be asked for again: then it
    /// survives a power loss. Otherwise it does once the run has ended.
    pub acknowledged: bool,
}

/// A run's usage and messages so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunTotals {
    /// Messages produced.
    pub message_count: i64,
    /// The text of the first human message; writing `None` keeps the stored one.
    pub first_human_message: Option<String>,
    /// The text of the last answer; writing `None` keeps the stored one.
    pub last_ai_message: Option<String>,
    /// Input tokens.
    pub total_input_tokens: i64,
    /// Output tokens.
    pub total_output_tokens: i64,
    /// Input and output tokens.
    pub total_tokens: i64,
    /// Model calls.
    pub llm_call_count: i64,
    /// Tokens of the lead agent.
    pub lead_agent_tokens: i64,
    /// Tokens of its subagents.
    pub subagent_tokens: i64,
    /// Tokens for everything else, such as titles and summaries.
    pub middleware_tokens: i64,
    /// Token counts by model name.
    pub token_usage_by_model: JsonObject,
    /// The executions of subagents whose tokens are among these, each with its attempt. Writing the sums marks their rows
    /// as counted, in the same transaction; sums that are read name none.
    pub executions: Vec<(String, i64)>,
}

/// A row of `runs`, without the request's input and configuration, which may be large ([`Runs::kwargs`]). Its other request
/// fields hold what [`NewRun`] contained.
#[derive(Clone, Debug, PartialEq)]
pub struct RunRow {
    /// The run's id.
    pub run_id: String,
    /// Its thread.
    pub thread_id: String,
    /// The agent.
    pub assistant_id: Option<String>,
    /// The user who started it.
    pub user_id: Option<String>,
    /// The stored state; clients are shown [`RunRow::reported_status`].
    pub status: RunStatus,
    /// The kind of work.
    pub operation_kind: OperationKind,
    /// Whether this pending run waits for earlier ones to end.
    pub waiting: bool,
    /// See [`NewRun::idempotency_key`].
    pub idempotency_key: Option<String>,
    /// The model.
    pub model_name: Option<String>,
    /// The strategy it was admitted with.
    pub multitask_strategy: MultitaskStrategy,
    /// The request's metadata.
    pub metadata: JsonObject,
    /// Why it failed, for example the mismatch text (service reference, "Thread, checkpoint and run records").
    pub error: Option<String>,
    /// Why it stopped early.
    pub stop_reason: Option<String>,
    /// Its usage and messages.
    pub totals: RunTotals,
    /// The run that this one continues.
    pub follow_up_to_run_id: Option<String>,
    /// See [`NewRun::edits`].
    pub edits: bool,
    /// The process that works on it, if there may be several.
    pub owner_worker_id: Option<String>,
    /// Until when that process is known to be alive; `None` without leases.
    pub lease_expires_at: Option<DateTime<Utc>>,
    /// How it was requested to cancel.
    pub cancel_action: Option<CancelAction>,
    /// When the cancellation was requested.
    pub cancel_requested_at: Option<DateTime<Utc>>,
    /// How the run will end once everything that belongs to it is written; a cancellation no longer changes it.
    pub decided_status: Option<RunStatus>,
    /// The newest checkpoint of its thread when it ended; empty if there was none, `None` while that is unknown.
    pub left_checkpoint: Option<String>,
    /// What its store lost of what it had acknowledged, if that was [noted](Runs::note_history_lost): the run ends in this
    /// error.
    pub history_lost: Option<String>,
    /// When it was admitted.
    pub created_at: DateTime<Utc>,
    /// When the row last changed.
    pub updated_at: DateTime<Utc>,
}

/// The columns of a [`RunRow`] but its metadata.
macro_rules! run_columns_but_metadata {
    () => {
        "run_id, thread_id, assistant_id, user_id, status, operation_kind, waiting, idempotency_key, model_name, \
         multitask_strategy, error, stop_reason, message_count, first_human_message, \
         last_ai_message, total_input_tokens, total_output_tokens, total_tokens, llm_call_count, \
         lead_agent_tokens, subagent_tokens, middleware_tokens, token_usage_by_model, follow_up_to_run_id, edits, \
         owner_worker_id, lease_expires_at, cancel_action, cancel_requested_at, decided_status, left_checkpoint, \
         history_lost, created_at, updated_at"
    };
}
pub(crate) use run_columns_but_metadata;

/// The columns of a [`RunRow`].
macro_rules! run_columns {
    () => {
        concat!(crate::runs::run_columns_but_metadata!(), ", metadata_json")
    };
}
pub(crate) use run_columns;

/// The statement `SELECT` of a [`RunRow`], with this condition and what follows it.
macro_rules! select_run {
    ($rest:literal) => {
        concat!("SELECT ", crate::runs::run_columns!(), " FROM runs WHERE ", $rest)
    };
}
pub(crate) use select_run;

/// Unless it succeeds, the active run ends only once the state from before it is restored: its rollback was accepted,
/// or it works on an edit. What has not started has written nothing.
macro_rules! restores {
    () => {
        "(COALESCE(cancel_action, '') = 'rollback' OR (edits AND status = 'running'))"
    };
}
pub(crate) use restores;

/// The active run owes a restore, which the process that has the run carries out before it ends ([`RunRow::owes_restore`]).
macro_rules! owes_restore {
    () => {
        concat!("(NOT waiting AND decided_status IS NULL AND ", crate::runs::restores!(), ")")
    };
}
pub(crate) use owes_restore;

impl RunRow {
    /// Whether the state from before this run has to be restored if it cannot go on: its process or its task is gone.
    /// What is decided is settled, and a decided success keeps what the run has written.
    pub fn owes_restore(&self) -> bool {
        let asked = self.cancel_action == Some(CancelAction::Rollback);
        let restores = asked || (self.edits && self.status == RunStatus::Running);
        self.status.is_active() && !self.waiting && self.decided_status.is_none() && restores
    }

    /// The status shown to clients: a run is `interrupted` as soon as its cancellation was accepted, while the stored
    /// status keeps the thread until the run has ended.
    pub fn reported_status(&self) -> RunStatus {
        if self.status.is_active() && self.cancel_action.is_some() {
            RunStatus::Interrupted
        } else {
            self.status
        }
    }
}

impl FromRow for RunRow {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let cells = Cells::new(row, "runs", &["run_id"]);
        Ok(Self {
            run_id: cells.text("run_id")?,
            thread_id: cells.text("thread_id")?,
            assistant_id: cells.opt_text("assistant_id")?,
            user_id: cells.opt_text("user_id")?,
            status: cells.name("status")?,
            operation_kind: cells.name("operation_kind")?,
            waiting: cells.flag("waiting")?,
            idempotency_key: cells.opt_text("idempotency_key")?,
            model_name: cells.opt_text("model_name")?,
            multitask_strategy: cells.name("multitask_strategy")?,
            metadata: cells.json("metadata_json")?,
            error: cells.opt_text("error")?,
            stop_reason: cells.opt_text("stop_reason")?,
            totals: RunTotals {
                message_count: cells.int("message_count")?,
                first_human_message: cells.opt_text("first_human_message")?,
                last_ai_message: cells.opt_text("last_ai_message")?,
                total_input_tokens: cells.int("total_input_tokens")?,
                total_output_tokens: cells.int("total_output_tokens")?,
                total_tokens: cells.int("total_tokens")?,
                llm_call_count: cells.int("llm_call_count")?,
                lead_agent_tokens: cells.int("lead_agent_tokens")?,
                subagent_tokens: cells.int("subagent_tokens")?,
                middleware_tokens: cells.int("middleware_tokens")?,
                token_usage_by_model: cells.json("token_usage_by_model")?,
                executions: Vec::new(),
            },
            follow_up_to_run_id: cells.opt_text("follow_up_to_run_id")?,
            edits: cells.flag("edits")?,
            owner_worker_id: cells.opt_text("owner_worker_id")?,
            lease_expires_at: cells.opt_time("lease_expires_at")?,
            cancel_action: cells.opt_name("cancel_action")?,
            cancel_requested_at: cells.opt_time("cancel_requested_at")?,
            decided_status: cells.opt_name("decided_status")?,
            left_checkpoint: cells.opt_text("left_checkpoint")?,
            history_lost: cells.opt_text("history_lost")?,
            created_at: cells.time("created_at")?,
            updated_at: cells.time("updated_at")?,
        })
    }
}

/// The repository of runs and reservations.
///
/// Unless it says otherwise, a method is one transaction: a dropped future leaves all of it or
/// nothing.
#[derive(Clone, Debug)]
pub struct Runs {
    pub(super) db: Db,
    /// The lease terms of this process; `None` for a gateway that is the only one.
    pub(super) lease: Option<Arc<Lease>>,
    /// The rows of the reservations that this process holds.
    pub(super) reserved: Arc<Mutex<BTreeSet<String>>>,
}

/// Appends: this run of this thread is active, and the process with this name has it; none is the one without leases.
/// In a transaction of the thread it stays so until that ends: nobody ends the run, takes it over or deletes the thread
/// meanwhile.
pub(crate) fn push_active_run(sql: &mut Builder, thread_id: &str, run_id: &str, owner: Option<&str>) {
    sql.push("EXISTS (SELECT 1 FROM runs WHERE run_id = ").push_bind(run_id);
    sql.push(" AND thread_id = ").push_bind(thread_id);
    sql.push(" AND operation_kind = 'run' AND status IN ('pending', 'running')");
    sql.push(" AND owner_worker_id IS NOT DISTINCT FROM ").push_bind(owner).push(")");
}

impl Runs {
    /// The run with this id; reservations are not found.
    pub async fn get(&self, run_id: &str) -> Result<Option<RunRow>, RecordsError> {
        let sql = query(select_run!("run_id = $1 AND operation_kind = 'run'"));
        self.db.fetch_optional(sql.bind(run_id)).await
    }

    /// The run admitted with this key; see [`NewRun::idempotency_key`].
    pub async fn get_by_idempotency_key(&self, key: &str) -> Result<Option<RunRow>, RecordsError> {
        self.db.fetch_optional(query(select_run!("idempotency_key = $1")).bind(key)).await
    }

    /// Whether a run waits for the thread.
    pub async fn is_waited_for(&self, thread_id: &str) -> Result<bool, RecordsError> {
        let sql = query("SELECT run_id FROM runs WHERE thread_id = $1 AND waiting LIMIT 1").bind(thread_id);
        Ok(self.db.fetch_optional::<(String,)>(sql).await?.is_some())
    }

    /// The run or reservation that holds the thread; a waiting run does not count.
    pub async fn active_for_thread(&self, thread_id: &str) -> Result<Option<RunRow>, RecordsError> {
        self.db.fetch_optional(query(SELECT_HOLDER).bind(thread_id)).await
    }
}

/// The row that holds the thread `$1`: the condition of the index `runs_one_active_per_thread`.
const SELECT_HOLDER: &str =
    select_run!("thread_id = $1 AND status IN ('pending', 'running') AND NOT waiting");

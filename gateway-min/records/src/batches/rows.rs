//! The rows of batches and their items.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde_json::Value as Json;

use crate::ExecutionTokens;
use crate::codec::{Cells, JsonObject, name_enum};
use crate::failure::DatabaseError;
use crate::query::{FromRow, Row};

name_enum! {
    /// The status of a batch.
    BatchStatus ("batch status") {
        /// No item was claimed yet, or none since it was resumed.
        Queued = "queued",
        /// Workers have claimed items.
        Running = "running",
        /// Nothing new is claimed.
        Paused = "paused",
        /// All items have ended, and not all of them failed.
        Completed = "completed",
        /// All items have ended, at least one failed and none succeeded.
        Failed = "failed",
        /// It was cancelled.
        Cancelled = "cancelled",
    }
}

impl BatchStatus {
    /// Whether nothing follows it, except that an item is tried again.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }
}

name_enum! {
    /// The status of an item.
    BatchItemStatus ("batch item status") {
        /// It waits for a place among the live items.
        Pending = "pending",
        /// It waits for a worker.
        Queued = "queued",
        /// A worker has claimed it.
        Leased = "leased",
        /// A subagent works on it.
        Running = "running",
        /// It has a result.
        Succeeded = "succeeded",
        /// It failed as often as it may.
        Failed = "failed",
        /// It was cancelled with its batch.
        Cancelled = "cancelled",
    }
}

impl BatchItemStatus {
    /// All of them, in the order of an item's life.
    pub const ALL: [Self; 7] = [
        Self::Pending,
        Self::Queued,
        Self::Leased,
        Self::Running,
        Self::Succeeded,
        Self::Failed,
        Self::Cancelled,
    ];

    /// Whether nothing follows it, except a retry of a failed item.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }
}

/// How many items of a batch have each status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ItemCounts(pub(super) BTreeMap<&'static str, u64>);

impl ItemCounts {
    /// The items with this status.
    pub fn of(&self, status: BatchItemStatus) -> u64 {
        self.0.get(status.as_str()).copied().unwrap_or_default()
    }

    /// All statuses with their numbers, zeros included.
    pub fn iter(&self) -> impl Iterator<Item = (BatchItemStatus, u64)> {
        BatchItemStatus::ALL.into_iter().map(|status| (status, self.of(status)))
    }

    /// The items that have not ended.
    pub fn unfinished(&self) -> u64 {
        self.iter().filter(|(status, _)| !status.is_terminal()).map(|(_, number)| number).sum()
    }
}

/// A row of `subagent_batches`.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchRow {
    /// Its id.
    pub id: String,
    /// The owner of its thread when it was submitted.
    pub user_id: Option<String>,
    /// The thread that delegated.
    pub thread_id: String,
    /// The run that delegated.
    pub run_id: String,
    /// The model's id of the call, which may repeat.
    pub tool_call_id: String,
    /// What people call it.
    pub title: String,
    /// The subagent.
    pub subagent_type: String,
    /// The status.
    pub status: BatchStatus,
    /// How many items it has.
    pub total_items: i64,
    /// How many items may be queued or at work.
    pub max_live_items: i64,
    /// How many items may be at work.
    pub max_running_items: i64,
    /// How often an item is tried.
    pub max_attempts: i64,
    /// What a worker needs to know. It is for workers alone.
    pub execution_spec: JsonObject,
    /// When it was submitted.
    pub created_at: DateTime<Utc>,
    /// When its status last changed, or was to be changed.
    pub updated_at: DateTime<Utc>,
    /// When it ended.
    pub completed_at: Option<DateTime<Utc>>,
}

impl FromRow for BatchRow {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let cells = Cells::new(row, "subagent_batches", &["id"]);
        Ok(Self {
            id: cells.text("id")?,
            user_id: cells.opt_text("user_id")?,
            thread_id: cells.text("thread_id")?,
            run_id: cells.text("run_id")?,
            tool_call_id: cells.text("tool_call_id")?,
            title: cells.text("title")?,
            subagent_type: cells.text("subagent_type")?,
            status: cells.name("status")?,
            total_items: cells.int("total_items")?,
            max_live_items: cells.int("max_live_items")?,
            max_running_items: cells.int("max_running_items")?,
            max_attempts: cells.int("max_attempts")?,
            execution_spec: cells.json("execution_spec")?,
            created_at: cells.time("created_at")?,
            updated_at: cells.time("updated_at")?,
            completed_at: cells.opt_time("completed_at")?,
        })
    }
}

/// What owners see of a row of `subagent_batch_items`.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchItemRow {
    /// Its id.
    pub id: String,
    /// Its batch.
    pub batch_id: String,
    /// What the submission calls it.
    pub item_key: String,
    /// Its place in the submission, from 0.
    pub position: i64,
    /// The status.
    pub status: BatchItemStatus,
    /// Which attempt this is, or was; 0 before the first.
    pub attempt: i64,
    /// The model of the last attempt.
    pub model_name: Option<String>,
    /// The beginning of its result.
    pub result_preview: Option<String>,
    /// Whether the stored result is cut.
    pub result_truncated: bool,
    /// Why it has no result, or why an earlier attempt had none.
    pub error: Option<String>,
    /// Why the last attempt stopped early.
    pub stop_reason: Option<String>,
    /// The tokens of the last attempt, if a provider reported any.
    pub token_usage: Option<ExecutionTokens>,
    /// What its result is checked against.
    pub acceptance_criteria: Option<Vec<String>>,
    /// What the check found.
    pub acceptance_verdict: Option<Json>,
    /// When the current or the last attempt started.
    pub started_at: Option<DateTime<Utc>>,
    /// When it ended.
    pub completed_at: Option<DateTime<Utc>>,
    /// When it was submitted.
    pub created_at: DateTime<Utc>,
    /// When it last changed.
    pub updated_at: DateTime<Utc>,
}

/// The columns of a [`BatchItemRow`]: neither the prompt nor the result, which may be long.
pub(super) const ITEM_COLUMNS: &str = "id, batch_id, item_key, position, status, attempt, model_name, result_preview, \
    result_truncated, error, stop_reason, token_usage, acceptance_criteria, acceptance_verdict, started_at, completed_at, \
    created_at, updated_at";

impl FromRow for BatchItemRow {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let cells = Cells::new(row, "subagent_batch_items", &["id"]);
        Ok(Self {
            id: cells.text("id")?,
            batch_id: cells.text("batch_id")?,
            item_key: cells.text("item_key")?,
            position: cells.int("position")?,
            status: cells.name("status")?,
            attempt: cells.int("attempt")?,
            model_name: cells.opt_text("model_name")?,
            result_preview: cells.opt_text("result_preview")?,
            result_truncated: cells.flag("result_truncated")?,
            error: cells.opt_text("error")?,
            stop_reason: cells.opt_text("stop_reason")?,
            token_usage: cells.opt_json("token_usage")?,
            acceptance_criteria: cells.opt_json("acceptance_criteria")?,
            acceptance_verdict: cells.opt_json("acceptance_verdict")?,
            started_at: cells.opt_time("started_at")?,
            completed_at: cells.opt_time("completed_at")?,
            created_at: cells.time("created_at")?,
            updated_at: cells.time("updated_at")?,
        })
    }
}

/// An item with its result.
pub(super) struct WithResult(pub(super) BatchItemRow, pub(super) Option<String>);

impl FromRow for WithResult {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let cells = Cells::new(row, "subagent_batch_items", &["id"]);
        Ok(Self(BatchItemRow::from_row(row)?, cells.opt_text("result")?))
    }
}

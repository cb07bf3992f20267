//! Reads of runs that need few of their columns, or the one that is large.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde_json::Value;

use super::{RunStatus, Runs};
use crate::codec::{Cells, JsonObject};
use crate::error::RecordsError;
use crate::failure::DatabaseError;
use crate::query::{FromRow, Row, query};

/// Which runs a thread has, and when they were at work.
#[derive(Clone, Debug, PartialEq)]
pub struct RunBrief {
    /// The run's id.
    pub run_id: String,
    /// The stored state.
    pub status: RunStatus,
    /// When it was admitted.
    pub created_at: DateTime<Utc>,
    /// When the row last changed: of a run that has ended, when it did.
    pub updated_at: DateTime<Utc>,
}

impl FromRow for RunBrief {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let cells = Cells::new(row, "runs", &["run_id"]);
        Ok(Self {
            run_id: cells.text("run_id")?,
            status: cells.name("status")?,
            created_at: cells.time("created_at")?,
            updated_at: cells.time("updated_at")?,
        })
    }
}

/// What a run used.
#[derive(Clone, Debug, PartialEq)]
pub struct RunUsage {
    /// The stored state.
    pub status: RunStatus,
    /// The model.
    pub model_name: Option<String>,
    /// Input tokens.
    pub total_input_tokens: i64,
    /// Output tokens.
    pub total_output_tokens: i64,
    /// Input and output tokens.
    pub total_tokens: i64,
    /// Tokens of the lead agent.
    pub lead_agent_tokens: i64,
    /// Tokens of its subagents.
    pub subagent_tokens: i64,
    /// Tokens for everything else.
    pub middleware_tokens: i64,
    /// Token counts by model name.
    pub token_usage_by_model: JsonObject,
}

impl FromRow for RunUsage {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let cells = Cells::new(row, "runs", &["run_id"]);
        Ok(Self {
            status: cells.name("status")?,
            model_name: cells.opt_text("model_name")?,
            total_input_tokens: cells.int("total_input_tokens")?,
            total_output_tokens: cells.int("total_output_tokens")?,
            total_tokens: cells.int("total_tokens")?,
            lead_agent_tokens: cells.int("lead_agent_tokens")?,
            subagent_tokens: cells.int("subagent_tokens")?,
            middleware_tokens: cells.int("middleware_tokens")?,
            token_usage_by_model: cells.json("token_usage_by_model")?,
        })
    }
}

/// The request of a run.
struct Asked {
    run_id: String,
    kwargs: Value,
}

impl FromRow for Asked {
    fn from_row(row: &Row<'_>) -> Result<Self, DatabaseError> {
        let cells = Cells::new(row, "runs", &["run_id"]);
        Ok(Self { run_id: cells.text("run_id")?, kwargs: cells.json("kwargs_json")? })
    }
}

impl Runs {
    /// The newest `limit` runs of the thread, last admitted first, without reservations.
    pub async fn briefs(&self, thread_id: &str, limit: u32) -> Result<Vec<RunBrief>, RecordsError> {
        let sql = "SELECT run_id, status, created_at, updated_at FROM runs \
                   WHERE operation_kind = 'run' AND thread_id = $1 ORDER BY admission_seq DESC LIMIT $2";
        self.db.fetch_all(query(sql).bind(thread_id).bind(i64::from(limit))).await
    }

    /// What each run of the thread used, last admitted first.
    pub async fn usage(&self, thread_id: &str) -> Result<Vec<RunUsage>, RecordsError> {
        let sql = "SELECT run_id, status, model_name, total_input_tokens, total_output_tokens, total_tokens, \
                   lead_agent_tokens, subagent_tokens, middleware_tokens, token_usage_by_model FROM runs \
                   WHERE operation_kind = 'run' AND thread_id = $1 ORDER BY admission_seq DESC";
        self.db.fetch_all(query(sql).bind(thread_id)).await
    }

    /// The input and the configuration of the requests of these runs, as [`NewRun::kwargs`](super::NewRun::kwargs) had them:
    /// of the first one, and of those after it until their JSON would take more than `max_bytes`.
    pub async fn kwargs(
        &self,
        run_ids: &[String],
        max_bytes: usize,
    ) -> Result<BTreeMap<String, Value>, RecordsError> {
        let run_ids = &self.fitting(run_ids, max_bytes).await?;
        if run_ids.is_empty() {
            return Ok(BTreeMap::new());
        }
        let mut sql =
            self.db.builder("SELECT run_id, kwargs_json FROM runs WHERE operation_kind = 'run' AND ");
        sql.push_text_in("run_id", run_ids);
        let found: Vec<Asked> = self.db.fetch_all(sql.build()).await?;
        Ok(found.into_iter().map(|asked| (asked.run_id, asked.kwargs)).collect())
    }

    /// The runs whose requests are read: see [`Self::kwargs`].
    async fn fitting(&self, run_ids: &[String], max_bytes: usize) -> Result<Vec<String>, RecordsError> {
        if run_ids.len() < 2 {
            return Ok(run_ids.to_vec());
        }
        let mut sql = self.db.builder(
            "SELECT run_id, CAST(OCTET_LENGTH(kwargs_json) AS BIGINT) FROM runs WHERE operation_kind = 'run' AND ",
        );
        sql.push_text_in("run_id", run_ids);
        let sizes: Vec<(String, i64)> = self.db.fetch_all(sql.build()).await?;
        let sizes: BTreeMap<String, i64> = sizes.into_iter().collect();
        let mut left = i64::try_from(max_bytes).unwrap_or(i64::MAX);
        let fitting = run_ids.iter().enumerate().take_while(|&(index, run_id)| {
            left = left.saturating_sub(sizes.get(run_id).copied().unwrap_or_default());
            index == 0 || left >= 0
        });
        Ok(fitting.map(|(_, run_id)| run_id.clone()).collect())
    }
}

//! The executions of a thread's subagents.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use threadkeep_agent::serialize::time;
use threadkeep_records::{ExecutionRow, ExecutionTokens};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::error::{ApiError, OrApiError as _};
use super::extract::{ApiPath, ThreadPath};
use super::schema::ErrorBody;
use crate::app::App;

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(list_executions))
}

/// Tokens of model calls.
#[derive(Debug, Serialize, ToSchema)]
#[allow(clippy::struct_field_names, reason = "the names of the API")]
pub(super) struct Usage {
    /// Tokens that the models read.
    input_tokens: u64,
    /// Tokens that the models wrote.
    output_tokens: u64,
    /// Their sum, as the providers count it.
    total_tokens: u64,
}

impl From<ExecutionTokens> for Usage {
    fn from(tokens: ExecutionTokens) -> Self {
        let ExecutionTokens { input_tokens, output_tokens, total_tokens } = tokens;
        Self { input_tokens, output_tokens, total_tokens }
    }
}

/// One attempt of a subagent at delegated work, with what it delegated itself.
#[derive(Debug, Serialize, ToSchema)]
#[allow(clippy::struct_field_names, reason = "the names of the API")]
struct Execution {
    /// The execution; all its attempts have this id.
    execution_id: String,
    /// Which attempt this is, from 1.
    attempt: i64,
    /// The run that delegated, or the one that went on with it.
    run_id: String,
    /// What was delegated: `task`, `batch_item` or `acp`.
    kind: String,
    /// The model's id of the call, which may repeat.
    tool_call_id: String,
    /// The subagent.
    agent_name: String,
    /// The SHA-256 of the subagent's definition at dispatch.
    definition_digest: String,
    /// What the work is about.
    description: String,
    /// `pending`, `running`, `completed`, `failed`, `cancelled` or `timed_out`.
    status: String,
    /// Why it has no result.
    error: Option<String>,
    /// Why it stopped early.
    stop_reason: Option<String>,
    /// The model that did the work.
    model_name: Option<String>,
    /// The tokens of all its model calls; null if no provider reported any.
    usage: Option<Usage>,
    /// The same by model.
    usage_by_model: BTreeMap<String, Usage>,
    /// How long it waited for a slot, in milliseconds.
    waited_ms: Option<i64>,
    /// Whether its result is in the conversation.
    delivered: bool,
    /// When it must have ended, ISO-8601 in UTC.
    deadline: String,
    /// When it was dispatched.
    created_at: String,
    /// When it got a slot.
    started_at: Option<String>,
    /// When it ended.
    completed_at: Option<String>,
    /// What it delegated.
    #[schema(no_recursion)]
    children: Vec<Execution>,
}

/// The executions of a thread.
#[derive(Debug, Serialize, ToSchema)]
struct Executions {
    /// The thread.
    thread_id: String,
    /// What its runs delegated, oldest first.
    executions: Vec<Execution>,
}

/// The rows below `parent`, each with those below it.
fn tree(rows: &[ExecutionRow], parent: Option<&str>) -> Vec<Execution> {
    let below = rows.iter().filter(|row| row.parent_execution.as_deref() == parent);
    below.map(|row| execution(row, tree(rows, Some(&row.execution_id)))).collect()
}

fn execution(row: &ExecutionRow, children: Vec<Execution>) -> Execution {
    Execution {
        execution_id: row.execution_id.clone(),
        attempt: row.attempt,
        run_id: row.run_id.clone(),
        kind: row.kind.as_str().to_owned(),
        tool_call_id: row.tool_call_id.clone(),
        agent_name: row.agent_name.clone(),
        definition_digest: row.definition_digest.clone(),
        description: row.description.clone(),
        status: row.status.as_str().to_owned(),
        error: row.error.clone(),
        stop_reason: row.stop_reason.clone(),
        model_name: row.model_name.clone(),
        usage: row.tokens().map(Usage::from),
        usage_by_model: row.usage.iter().map(|(model, tokens)| (model.clone(), (*tokens).into())).collect(),
        waited_ms: row.waited_ms,
        delivered: row.delivered,
        deadline: time(row.deadline),
        created_at: time(row.created_at),
        started_at: row.started_at.map(time),
        completed_at: row.completed_at.map(time),
        children,
    }
}

/// The executions of a thread's subagents, as a tree.
///
/// A subagent that was asked again from an older checkpoint has an entry for each attempt.
#[utoipa::path(get, path = "/api/threads/{thread_id}/executions", tag = "threads",
    params(("thread_id" = String, Path)),
    responses((status = 200, description = "The executions", body = Executions),
        (status = 404, description = "No such thread", body = ErrorBody)))]
async fn list_executions(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
) -> Result<Json<Executions>, ApiError> {
    let rows = app.records.executions().of_thread(thread_id.as_str()).await;
    let rows = rows.or_internal("Failed to list executions")?;
    Ok(Json(Executions { thread_id: thread_id.to_string(), executions: tree(&rows, None) }))
}

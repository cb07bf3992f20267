//! The executions of a thread's subagents.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use serde_json::{Map, Value, json};
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::ThreadId;
use threadkeep::saver::Load;
use threadkeep_agent::model::message::kind;
use threadkeep_agent::serialize::time;
use threadkeep_records::{ExecutionRow, ExecutionTokens};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::error::{ApiError, OrApiError as _};
use super::extract::{ApiPath, ThreadPath};
use super::fields::{Fields, FromFields};
use super::schema::ErrorBody;
use crate::app::App;
use crate::runs::subagent_events;

const STEPS_FAILED: &str = "Failed to read the steps of the execution";

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(list_executions)).routes(routes!(list_steps))
}

/// The path of an execution.
pub(super) struct ExecutionPath {
    pub(super) thread_id: ThreadId,
    pub(super) execution_id: String,
}

impl FromFields for ExecutionPath {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let ThreadPath { thread_id } = ThreadPath::from_fields(fields);
        Self { thread_id, execution_id: fields.field("execution_id").required().text().unwrap_or_default() }
    }
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

/// The rows by what delegated them.
type Below<'a> = HashMap<Option<&'a str>, Vec<&'a ExecutionRow>>;

/// The rows as a tree. A thread may have thousands, so that none is looked for among all others.
fn tree(rows: &[ExecutionRow]) -> Vec<Execution> {
    let mut below = Below::new();
    for row in rows {
        below.entry(row.parent_execution.as_deref()).or_default().push(row);
    }
    branch(&below, None)
}

/// The rows below `parent`, each with those below it.
fn branch(below: &Below<'_>, parent: Option<&str>) -> Vec<Execution> {
    let rows = below.get(&parent).into_iter().flatten();
    rows.map(|row| execution(row, branch(below, Some(&row.execution_id)))).collect()
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
    Ok(Json(Executions { thread_id: thread_id.to_string(), executions: tree(&rows) }))
}

/// What a subagent said or did.
#[derive(ToSchema)]
#[allow(dead_code, reason = "described, never built")]
struct Step {
    /// Its place among them, from 1.
    message_index: u64,
    /// `ai`, or `tool` for the result of a call.
    kind: String,
    /// What it says, at most 8,192 characters.
    text: String,
    /// Whether that is not all.
    truncated: bool,
    /// The calls of an answer: `name` and `args`, which are a text if they are long (`args_truncated`).
    #[schema(value_type = Option<Vec<Object>>)]
    tool_calls: Option<Vec<Value>>,
    /// The tool that the result is of.
    tool_name: Option<String>,
}

/// The steps of an execution.
#[derive(Debug, Serialize, ToSchema)]
#[allow(clippy::struct_field_names, reason = "the names of the API")]
struct Steps {
    /// The execution.
    execution_id: String,
    /// Its newest attempt, of which these are.
    attempt: i64,
    /// `pending`, `running`, `completed`, `failed`, `cancelled` or `timed_out`.
    status: String,
    /// What its subagent has said and done so far, oldest first.
    #[schema(value_type = Vec<Step>)]
    steps: Vec<Map<String, Value>>,
}

/// The newest attempt of an execution of this thread. An item of a batch is not found: the batch may be another user's.
///
/// # Errors
/// 404 if the thread has no such execution.
pub(super) async fn found(app: &App, path: &ExecutionPath) -> Result<ExecutionRow, ApiError> {
    let newest = app.records.executions().newest(path.thread_id.as_str(), &path.execution_id).await;
    newest
        .or_internal(STEPS_FAILED)?
        .ok_or_else(|| ApiError::not_found(format!("Execution {} not found", path.execution_id)))
}

/// What the subagent of an attempt has said and done by its last superstep.
///
/// # Errors
/// Those of reading its checkpoints.
pub(super) async fn steps(app: &App, row: &ExecutionRow) -> Result<Vec<Map<String, Value>>, ApiError> {
    let child = ThreadId::from(row.child_thread.as_str());
    let load = Load::Only([MESSAGES_CHANNEL.into()].into());
    let of_thread = || ThreadId::from(row.thread_id.as_str());
    let state = app.threads.accessor().get_loading(&child, None, load).await;
    let Some(state) = state.or_engine(&of_thread(), STEPS_FAILED)? else { return Ok(Vec::new()) };
    let messages = state.json(MESSAGES_CHANNEL).or_engine(&of_thread(), STEPS_FAILED)?.unwrap_or_default();
    let said =
        messages.as_array().into_iter().flatten().filter(|message| ["ai", "tool"].contains(&kind(message)));
    let numbered = (1_u64..).zip(said).map(|(index, message)| {
        let mut step = subagent_events::said(message);
        step.insert("message_index".to_owned(), json!(index));
        step
    });
    Ok(numbered.collect())
}

/// What the subagent of an execution has said and done so far.
///
/// They are those of the newest attempt, as far as its conversation has them: the beginning of a long one may be summarized. The
/// calls of external agents have none, and those of the items of batches are not shown.
#[utoipa::path(get, path = "/api/threads/{thread_id}/executions/{execution_id}/steps", tag = "threads",
    params(("thread_id" = String, Path), ("execution_id" = String, Path)),
    responses((status = 200, description = "The steps", body = Steps),
        (status = 404, description = "No such thread or execution", body = ErrorBody)))]
async fn list_steps(
    State(app): State<Arc<App>>,
    ApiPath(path): ApiPath<ExecutionPath>,
) -> Result<Json<Steps>, ApiError> {
    let row = found(&app, &path).await?;
    let steps = steps(&app, &row).await?;
    let status = row.status.as_str().to_owned();
    Ok(Json(Steps { execution_id: row.execution_id, attempt: row.attempt, status, steps }))
}

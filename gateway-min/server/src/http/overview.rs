//! What goes on beyond one thread: the runs of all threads, and the errors of this process.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use threadkeep_agent::serialize::time;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::auth::{Caller, require_admin};
use super::described::{RUN_STATUSES, RunStatusName};
use super::error::{ApiError, OrApiError as _};
use super::extract::ApiQuery;
use super::fields::{Fields, FromFields};
use super::schema::ErrorBody;
use crate::app::App;
use crate::telemetry::recent::{ERRORS, Logged};
use threadkeep_records::{RunQuery, RunRow};

const FAILED: &str = "Failed to list runs";
const ADMINS_ONLY: &str = "Admin privileges are required to read errors.";
/// The maximum number of runs in a list.
const LIST_MAX: i64 = 100;
/// The maximum characters of a question in a list.
const QUESTION_CHARS: usize = 120;

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(list_runs)).routes(routes!(list_errors))
}

/// Which runs to list.
struct ListParams(RunQuery);

impl FromFields for ListParams {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let limit = fields.field("limit").integer(&(1..=LIST_MAX)).unwrap_or(LIST_MAX);
        let offset = fields.field("offset").integer(&(0..=i64::MAX)).unwrap_or(0);
        Self(RunQuery {
            status: fields.field("status").one_of(&RUN_STATUSES).and_then(|name| name.parse().ok()),
            limit: u32::try_from(limit).unwrap_or(u32::MAX),
            offset: u64::try_from(offset).unwrap_or(0),
        })
    }
}

/// A run among those of all threads.
#[derive(Debug, Serialize, ToSchema)]
struct RunOverview {
    /// The run.
    run_id: String,
    /// Its thread.
    thread_id: String,
    /// The agent.
    #[schema(required = true)]
    assistant_id: Option<String>,
    /// `pending`, `running`, `success`, `error`, `timeout` or `interrupted`.
    status: &'static str,
    /// Whether it waits for earlier runs of its thread.
    waiting: bool,
    /// The process that works on it; null if there can be only one.
    #[schema(required = true)]
    process: Option<String>,
    /// The model.
    #[schema(required = true)]
    model_name: Option<String>,
    /// The beginning of what was asked.
    #[schema(required = true)]
    question: Option<String>,
    /// The tokens of all its models.
    total_tokens: i64,
    /// Its model calls.
    llm_call_count: i64,
    /// Why it stopped early.
    #[schema(required = true)]
    stop_reason: Option<String>,
    /// Why it failed.
    #[schema(required = true)]
    error: Option<String>,
    /// When it was admitted, ISO-8601 in UTC.
    created_at: String,
    /// When its record last changed.
    updated_at: String,
}

impl From<RunRow> for RunOverview {
    fn from(run: RunRow) -> Self {
        let status = run.reported_status().as_str();
        Self {
            run_id: run.run_id,
            thread_id: run.thread_id,
            assistant_id: run.assistant_id,
            status,
            waiting: run.waiting,
            process: run.owner_worker_id,
            model_name: run.model_name,
            question: run.totals.first_human_message.map(|text| text.chars().take(QUESTION_CHARS).collect()),
            total_tokens: run.totals.total_tokens,
            llm_call_count: run.totals.llm_call_count,
            stop_reason: run.stop_reason,
            error: run.error,
            created_at: time(run.created_at),
            updated_at: time(run.updated_at),
        }
    }
}

/// An error in the log of this process.
#[derive(Debug, Serialize, ToSchema)]
struct LoggedError {
    /// When it was logged, ISO-8601 in UTC.
    logged_at: String,
    /// The module that logged it.
    target: &'static str,
    /// What it says.
    text: String,
}

impl From<Logged> for LoggedError {
    fn from(logged: Logged) -> Self {
        Self { logged_at: time(logged.at), target: logged.target, text: logged.text }
    }
}

/// List the runs of all threads that the caller may see, newest first.
///
/// Runs that have ended are those among the newest 10,000.
#[utoipa::path(get, path = "/api/runs", tag = "runs",
    params(("limit" = Option<u32>, Query, minimum = 1, maximum = 100), ("offset" = Option<u64>, Query), ("status" = inline(Option<RunStatusName>), Query)),
    responses((status = 200, description = "The runs", body = Vec<RunOverview>),
        (status = 422, description = "A parameter is out of its range", body = ErrorBody)))]
async fn list_runs(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiQuery(ListParams(query)): ApiQuery<ListParams>,
) -> Result<Json<Vec<RunOverview>>, ApiError> {
    let runs = app.records.runs().of_all_threads(caller.sees(), &query).await.or_internal(FAILED)?;
    Ok(Json(runs.into_iter().map(RunOverview::from).collect()))
}

/// List the errors that this process has logged in the last hour, newest first, at most 200. For administrators only.
#[utoipa::path(get, path = "/api/errors", tag = "service",
    responses((status = 200, description = "The errors", body = Vec<LoggedError>),
        (status = 403, description = "The caller is not an administrator", body = ErrorBody)))]
async fn list_errors(Caller(caller): Caller) -> Result<Json<Vec<LoggedError>>, ApiError> {
    require_admin(&caller, ADMINS_ONLY)?;
    Ok(Json(ERRORS.of_last_hour().into_iter().map(LoggedError::from).collect()))
}

//! Cancels several runs at once, and deletes the record of one.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use threadkeep::id::ThreadId;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::auth::{Caller, check_thread};
use super::described::CancelActionName;
use super::error::{ApiError, OrApiError as _};
use super::extract::{ApiJson, ApiPath, ApiQuery, RunPath};
use super::fields::{Fields, Flaw, FromFields, Pattern};
use super::runs::run_of;
use super::schema::ErrorBody;
use crate::app::App;
use threadkeep_records::{CancelAction, RecordsError, RunRow, RunStatus};

const CANCEL_FAILED: &str = "Failed to cancel runs";
const DELETE_FAILED: &str = "Failed to delete run";
/// The maximum number of runs in a request: they are cancelled to the end, whether or not the client waits, and a body
/// has room for millions of ids.
const MAX_RUNS: usize = 1000;

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(cancel_many)).routes(routes!(delete_run))
}

/// Which runs to cancel: some of a thread by id, or all of the caller's runs with a status.
#[derive(Debug)]
struct CancelMany {
    /// Only runs of this thread.
    thread_id: Option<ThreadId>,
    /// These runs, at most 1,000; those that have ended are unchanged. Needs `thread_id`.
    run_ids: Option<Vec<String>>,
    /// `pending`, `running` or `all`; instead of `run_ids`.
    status: Option<&'static str>,
}

impl FromFields for CancelMany {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let thread_id = fields.field("thread_id").nullable().text_matching(&Pattern::THREAD_ID);
        // Also a list that is refused.
        let names_runs = fields.peek("run_ids").is_some_and(|ids| !ids.is_null());
        let run_ids = fields.field("run_ids").nullable().at_most(MAX_RUNS).texts();
        let status = fields.field("status").nullable().one_of(&["pending", "running", "all"]);
        let problem = match (thread_id.is_some(), names_runs, status) {
            (true, true, None) | (_, false, Some(_)) => None,
            (false, true, None) => Some("thread_id is required with run_ids"),
            _ => Some("either run_ids or status is required"),
        };
        if let Some(problem) = problem {
            fields.refuse("run_ids", Flaw::new("value_error", problem), serde_json::Value::Null);
        }
        Self { thread_id: thread_id.map(ThreadId::from), run_ids, status }
    }
}

/// How to cancel.
struct CancelManyParams {
    action: CancelAction,
}

impl FromFields for CancelManyParams {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let action = fields.field("action").one_of(&["interrupt", "rollback"]);
        Self { action: action.and_then(|name| name.parse().ok()).unwrap_or(CancelAction::Interrupt) }
    }
}

/// Cancel runs: 204 as soon as they are marked for cancellation.
#[utoipa::path(post, path = "/api/runs/cancel", tag = "runs", params(("action" = inline(Option<CancelActionName>), Query)),
    request_body = ref("#/components/schemas/CancelMany"),
    responses((status = 204, description = "Marked"),
        (status = 404, description = "No such run of the thread; none was cancelled", body = ErrorBody),
        (status = 422, description = "The request is not valid", body = ErrorBody)))]
async fn cancel_many(
    State(app): State<Arc<App>>,
    ApiQuery(CancelManyParams { action }): ApiQuery<CancelManyParams>,
    Caller(caller): Caller,
    ApiJson(body): ApiJson<CancelMany>,
) -> Result<StatusCode, ApiError> {
    let failed = |error: RecordsError| ApiError::internal(CANCEL_FAILED, &error);
    if let Some(thread_id) = &body.thread_id {
        check_thread(&app, &caller, thread_id).await?;
    }
    let run_ids = match (body.run_ids, body.thread_id) {
        (Some(run_ids), Some(thread_id)) => {
            for run_id in &run_ids {
                run_of(&app, &RunPath { thread_id: thread_id.clone(), run_id: run_id.clone() }).await?;
            }
            run_ids
        }
        (_, thread_id) => {
            let active = app.records.runs().list_active(thread_id.as_ref().map(ThreadId::as_str)).await;
            let wanted = |status: RunStatus| body.status.is_some_and(|s| s == "all" || s == status.as_str());
            let own = |run: &RunRow| {
                caller.sees().is_none_or(|user| run.user_id.as_deref().is_none_or(|of| of == user))
            };
            let active = active.map_err(failed)?.into_iter();
            active.filter(|run| wanted(run.status) && own(run)).map(|run| run.run_id).collect()
        }
    };
    // A separate task, so that a client that disconnects leaves no recorded cancellation that the run does not know of.
    let runs = Arc::clone(&app.runs);
    let task = app.threads.spawn(async move {
        for run_id in run_ids {
            // A run that has ended by now needs no cancelling.
            runs.cancel(&run_id, action).await?;
        }
        Ok::<_, RecordsError>(())
    });
    task.await.or_internal(CANCEL_FAILED)?.map_err(failed)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Delete the record and the events of a run that has ended. What the run wrote to the thread stays.
#[utoipa::path(delete, path = "/api/threads/{thread_id}/runs/{run_id}", tag = "runs",
    params(("thread_id" = String, Path), ("run_id" = String, Path)),
    responses((status = 204, description = "Deleted"),
        (status = 404, description = "No such run of the thread", body = ErrorBody),
        (status = 409, description = "The run is active", body = ErrorBody)))]
async fn delete_run(
    State(app): State<Arc<App>>,
    ApiPath(path): ApiPath<RunPath>,
) -> Result<StatusCode, ApiError> {
    let thread_id = path.thread_id.as_str();
    let run = app.records.runs().get(&path.run_id).await.or_internal(DELETE_FAILED)?;
    if run.is_some_and(|run| run.thread_id == thread_id && !run.status.is_active()) {
        // Its record has ended, but it may still be writing.
        app.runs.ended(&path.run_id).await.or_internal(DELETE_FAILED)?;
    }
    // Also without a record: an attempt that was cut off may have left its events.
    match app.records.delete_run(thread_id, &path.run_id).await {
        Ok(()) => Ok(StatusCode::NO_CONTENT),
        Err(RecordsError::Conflict { .. }) => {
            Err(ApiError::conflict(format!("Run {} is active. Cancel it first.", path.run_id)))
        }
        Err(error) if error.is_not_found() => {
            Err(ApiError::not_found(format!("Run {} not found", path.run_id)))
        }
        Err(error) => Err(ApiError::internal(DELETE_FAILED, &error)),
    }
}

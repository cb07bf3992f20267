//! A run that exists: waiting for its end, following its stream, and cancelling it.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep::saver::Load;
use threadkeep_agent::serialize;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::auth::{Caller, check_thread};
use super::awaited::awaited;
use super::described::{CancelActionName, StreamModeName};
use super::error::{ApiError, OrApiError as _};
use super::extract::{ApiPath, ApiQuery, RunPath};
use super::fields::{Fields, FromFields};
use super::run_body::stream_modes;
use super::runs::{READ_FAILED, existing, run_of};
use super::sse;
use crate::app::App;
use crate::runs::request::StreamMode;
use crate::streams::bridge::{HEARTBEAT, Subscription};
use crate::streams::verdict::DELETED;
use threadkeep_records::{CancelAction, CancelOutcome, RunRow, RunStatus};

const CANCEL_FAILED: &str = "Failed to cancel run";

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(cancel))
        .routes(routes!(join))
        .routes(routes!(join_stream, stop_stream))
        .routes(routes!(join_stream_of_run))
}

/// Waits for the run and responds with its result. An error response, too, says which run it is, so that the client can
/// join it.
pub(super) async fn finished(app: &App, thread: &ThreadId, run_id: &str, stream: Subscription) -> Response {
    stream.ended().await;
    let headers = sse::result_headers(thread, run_id);
    match ended(app, run_id).await {
        Ok(run) => {
            let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
            (json, headers, outcome(app, thread, run).await).into_response()
        }
        Err(error) => (headers, error).into_response(),
    }
}

/// Waits for the end of the run. Returns its row, `None` if it was deleted.
///
/// # Errors
/// 503 if nothing works on it any more and its row is active all the same.
async fn ended(app: &App, run_id: &str) -> Result<Option<RunRow>, ApiError> {
    let run = app.runs.ended(run_id).await.or_internal(READ_FAILED)?;
    match run {
        Some(run) if run.status.is_active() => Err(ApiError::unavailable(format!(
            "Run {run_id} has not ended: its end could not be stored yet. Join it again shortly."
        ))),
        run => Ok(run),
    }
}

/// The channel values of the state in which the run ended, as JSON text. For a run that did not finish, or whose state
/// cannot be read, also its status and error as the contract defines; for a failed run, in the form in which SDK clients
/// raise it. A run that was deleted meanwhile left no state, and fails as its stream does. So does one of which the store
/// lost what it acknowledged: the thread's next turn would not hear of it.
async fn outcome(app: &App, thread: &ThreadId, run: Option<RunRow>) -> Vec<u8> {
    let left = match &run {
        Some(run) => app.threads.left_by(run, &Load::All).await,
        None => Ok(None),
    };
    let (mut status, mut error) = match run {
        Some(run) => (run.reported_status(), run.error),
        None => (RunStatus::Error, Some(DELETED.to_owned())),
    };
    let values = match left {
        // The frames of the run had the same messages.
        Ok(Some(left)) if status == RunStatus::Success => match app.streams.rendered().values(&left, &[]) {
            Ok(text) => return text,
            Err(error) => Err(error),
        },
        left => left.and_then(|left| left.as_ref().map(serialize::values).transpose()),
    };
    let mut body = match values {
        Ok(values) => values.unwrap_or_default(),
        Err(unreadable) => {
            tracing::warn!(%thread, error = %unreadable, "cannot read the state that a run left");
            if matches!(unreadable, Error::HistoryLost { .. }) {
                (status, error) = (RunStatus::Error, Some(unreadable.to_string()));
            }
            Map::new()
        }
    };
    body.insert("status".to_owned(), json!(status.as_str()));
    body.insert("error".to_owned(), json!(error));
    if status == RunStatus::Error {
        let message = error.unwrap_or_default();
        body.insert("__error__".to_owned(), json!({ "error": "RunError", "message": message }));
    }
    Value::Object(body).to_string().into_bytes()
}

/// How to cancel.
#[derive(Debug)]
struct CancelParams {
    wait: bool,
    action: Option<CancelAction>,
}

impl FromFields for CancelParams {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let wait = fields.field("wait").flag().unwrap_or(false);
        let action = fields.field("action").one_of(&["interrupt", "rollback"]);
        Self { wait, action: action.and_then(|name| name.parse().ok()) }
    }
}

/// Cancel a run: 202 as soon as it is marked for cancellation; with `wait`, 204 when it has stopped.
#[utoipa::path(post, path = "/api/threads/{thread_id}/runs/{run_id}/cancel", tag = "runs",
    params(("thread_id" = String, Path), ("run_id" = String, Path), ("wait" = Option<bool>, Query), ("action" = inline(Option<CancelActionName>), Query)),
    responses((status = 202, description = "Marked"), (status = 204, description = "Stopped"),
        (status = 404, description = "No such run of the thread"), (status = 409, description = "The run has ended")))]
async fn cancel(
    State(app): State<Arc<App>>,
    ApiPath(path): ApiPath<RunPath>,
    ApiQuery(params): ApiQuery<CancelParams>,
) -> Result<StatusCode, ApiError> {
    existing(&app, &path.thread_id).await?;
    run_of(&app, &path).await?;
    cancel_now(&app, &path.run_id, params.action.unwrap_or(CancelAction::Interrupt)).await?;
    if !params.wait {
        return Ok(StatusCode::ACCEPTED);
    }
    ended(&app, &path.run_id).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn cancel_now(app: &App, run_id: &str, action: CancelAction) -> Result<(), ApiError> {
    // A separate task, so that a client that disconnects leaves no recorded cancellation that the run does not know of.
    let (runs, id) = (Arc::clone(&app.runs), run_id.to_owned());
    let task = app.threads.spawn(async move { runs.cancel(&id, action).await });
    let outcome = task.await.or_internal(CANCEL_FAILED)?;
    match outcome.or_internal(CANCEL_FAILED)? {
        CancelOutcome::Accepted | CancelOutcome::AlreadyInterrupted => Ok(()),
        CancelOutcome::AlreadyTerminal(status) => {
            Err(ApiError::conflict(format!("Run {run_id} is not cancellable (status: {})", status.as_str())))
        }
        CancelOutcome::NotFound => Err(ApiError::not_found(format!("Run {run_id} not found"))),
    }
}

/// How to wait for a run.
#[derive(Debug)]
struct JoinParams {
    cancel_on_disconnect: bool,
}

impl FromFields for JoinParams {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self { cancel_on_disconnect: fields.field("cancel_on_disconnect").flag().unwrap_or(false) }
    }
}

/// Wait for a run: its stream if the client accepts `text/event-stream`, otherwise the resulting state.
#[utoipa::path(get, path = "/api/threads/{thread_id}/runs/{run_id}/join", tag = "runs",
    params(("thread_id" = String, Path), ("run_id" = String, Path), ("cancel_on_disconnect" = Option<bool>, Query)),
    responses((status = 200, description = "Channel values, or server-sent events", body = Value),
        (status = 404, description = "No such run of the thread")))]
async fn join(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiPath(path): ApiPath<RunPath>,
    ApiQuery(JoinParams { cancel_on_disconnect }): ApiQuery<JoinParams>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let run = run_of(&app, &path).await?;
    let accepts = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let streams = accepts.contains("text/event-stream");
    let stream = if streams || cancel_on_disconnect {
        app.streams.follow(&run, sse::last_event_id(&headers))
    } else {
        // A run of another process has no stream here, and needs none.
        app.streams.subscribe(&path.run_id)
    };
    let stream = if cancel_on_disconnect { stream.owning() } else { stream };
    if streams {
        return Ok(sse::response(stream, &path.thread_id, &path.run_id));
    }
    Ok(awaited(&app, &caller, &path.thread_id, &path.run_id, stream, HEARTBEAT).await)
}

/// How to follow a run.
#[derive(Debug)]
struct FollowParams {
    cancel_on_disconnect: bool,
    cancel: CancelParams,
    /// Only frames of these modes, if the run has them; empty for all.
    modes: Vec<StreamMode>,
}

impl FromFields for FollowParams {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let cancel_on_disconnect = fields.field("cancel_on_disconnect").flag().unwrap_or(false);
        Self { cancel_on_disconnect, cancel: CancelParams::from_fields(fields), modes: stream_modes(fields) }
    }
}

/// Follow a run from where the client left off; with `action`, cancel it first.
#[utoipa::path(get, path = "/api/threads/{thread_id}/runs/{run_id}/stream", tag = "runs",
    params(("thread_id" = String, Path), ("run_id" = String, Path), ("action" = inline(Option<CancelActionName>), Query),
        ("wait" = Option<bool>, Query), ("cancel_on_disconnect" = Option<bool>, Query),
        ("stream_mode" = inline(Option<Vec<StreamModeName>>), Query)),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream", body = ref("#/components/schemas/StreamEvent")),
        (status = 204, description = "Cancelled and stopped"), (status = 404, description = "No such run of the thread"),
        (status = 409, description = "The run to cancel has ended")))]
async fn join_stream(
    State(app): State<Arc<App>>,
    ApiPath(path): ApiPath<RunPath>,
    ApiQuery(params): ApiQuery<FollowParams>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let run = run_of(&app, &path).await?;
    let stream = app.streams.follow(&run, sse::last_event_id(&headers));
    let stream = if params.cancel_on_disconnect { stream.owning() } else { stream };
    if let Some(action) = params.cancel.action {
        cancel_now(&app, &path.run_id, action).await?;
        if params.cancel.wait {
            ended(&app, &path.run_id).await?;
            return Ok(StatusCode::NO_CONTENT.into_response());
        }
    }
    Ok(if params.modes.is_empty() {
        sse::response(stream, &path.thread_id, &path.run_id)
    } else {
        sse::response_in(params.modes, stream, &path.thread_id, &path.run_id)
    })
}

/// Same as GET: the form in which clients stop a run.
#[utoipa::path(post, path = "/api/threads/{thread_id}/runs/{run_id}/stream", tag = "runs",
    params(("thread_id" = String, Path), ("run_id" = String, Path), ("action" = inline(Option<CancelActionName>), Query),
        ("wait" = Option<bool>, Query), ("cancel_on_disconnect" = Option<bool>, Query),
        ("stream_mode" = inline(Option<Vec<StreamModeName>>), Query)),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream", body = ref("#/components/schemas/StreamEvent")),
        (status = 204, description = "Cancelled and stopped"), (status = 404, description = "No such run of the thread"),
        (status = 409, description = "The run to cancel has ended")))]
async fn stop_stream(
    state: State<Arc<App>>,
    path: ApiPath<RunPath>,
    params: ApiQuery<FollowParams>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    join_stream(state, path, params, headers).await
}

/// The path of a run whose thread is not named.
struct LoneRunPath {
    run_id: String,
}

impl FromFields for LoneRunPath {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self { run_id: fields.field("run_id").required().text().unwrap_or_default() }
    }
}

/// Follow a run whose thread the client does not name, as of a stateless one; with `action`, cancel it first.
#[utoipa::path(get, path = "/api/runs/{run_id}/stream", tag = "runs",
    params(("run_id" = String, Path), ("action" = inline(Option<CancelActionName>), Query),
        ("wait" = Option<bool>, Query), ("cancel_on_disconnect" = Option<bool>, Query),
        ("stream_mode" = inline(Option<Vec<StreamModeName>>), Query)),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream", body = ref("#/components/schemas/StreamEvent")),
        (status = 204, description = "Cancelled and stopped"), (status = 404, description = "No such run"),
        (status = 409, description = "The run to cancel has ended")))]
async fn join_stream_of_run(
    State(app): State<Arc<App>>,
    ApiPath(LoneRunPath { run_id }): ApiPath<LoneRunPath>,
    Caller(caller): Caller,
    params: ApiQuery<FollowParams>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let absent = || ApiError::not_found(format!("Run {run_id} not found"));
    let run = app.records.runs().get(&run_id).await.or_internal(READ_FAILED)?.ok_or_else(absent)?;
    let thread_id = ThreadId::from(run.thread_id);
    if let Err(error) = check_thread(&app, &caller, &thread_id).await {
        // Its text names the thread, which is another user's.
        return Err(if error.status() == StatusCode::NOT_FOUND { absent() } else { error });
    }
    // Reads the run again: if its thread was deleted before the check, that found no owner, and the run is gone.
    join_stream(State(app), ApiPath(RunPath { thread_id, run_id }), params, headers).await
}

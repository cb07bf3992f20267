//! Runs: creating them in three forms, on a thread or without one; reading and listing them. Following and cancelling
//! them is in [`run_follow`](super::run_follow).

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use threadkeep::Error;
use threadkeep::id::ThreadId;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::auth::{Caller, check_thread};
use super::awaited::awaited;
use super::described::{RUN_STATUSES, RunField, RunStatusName};
use super::error::{ApiError, OrApiError as _};
use super::extract::{ApiJson, ApiPath, ApiQuery, RunPath, ThreadPath};
use super::fields::{Fields, FromFields};
use super::run_body::{RunBody, RunLimits};
use super::schema::RunRefused;
use super::select::Select;
use super::sse;
use crate::app::App;
use crate::auth::Principal;
use crate::runs::admission::{CreateError, Created, OnThread};
use crate::runs::request::OnDisconnect;
use crate::runs::resume::ResumeError;
use crate::streams::bridge::HEARTBEAT;
use threadkeep_config::Config;
use threadkeep_records::{RecordsError, RunQuery, RunRow, RunStatus, ThreadRow};

/// The maximum number of runs in a list.
const LIST_MAX: i64 = 100;
pub(super) const READ_FAILED: &str = "Failed to read run";
const LIST_FAILED: &str = "Failed to list runs";
/// The header that lets a client repeat a request and get the run of the first attempt.
const IDEMPOTENCY_KEY: &str = "Idempotency-Key";
/// The maximum length of the key, in characters.
const IDEMPOTENCY_KEY_MAX: usize = 255;

/// The fields of a run's record that can be selected: all.
const RUN_FIELDS: [&str; 19] = [
    "run_id",
    "thread_id",
    "assistant_id",
    "status",
    "metadata",
    "kwargs",
    "multitask_strategy",
    "created_at",
    "updated_at",
    "total_input_tokens",
    "total_output_tokens",
    "total_tokens",
    "llm_call_count",
    "lead_agent_tokens",
    "subagent_tokens",
    "middleware_tokens",
    "message_count",
    "stop_reason",
    "error",
];

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(stream))
        .routes(routes!(wait))
        .routes(routes!(create_stateless))
        .routes(routes!(stream_stateless))
        .routes(routes!(wait_stateless))
        .routes(routes!(read))
}

/// The records of runs, as sent to clients. The requests of those after the first one are null beyond
/// `gateway.history_max_bytes`.
///
/// # Errors
/// 500 with `failed` if the records cannot be read.
pub(super) async fn records(
    app: &App,
    runs: &[RunRow],
    failed: &'static str,
) -> Result<Vec<Value>, ApiError> {
    let ids: Vec<String> = runs.iter().map(|run| run.run_id.clone()).collect();
    let mut kwargs = app.records.runs().kwargs(&ids, app.history_max_bytes).await.or_internal(failed)?;
    Ok(runs.iter().map(|run| record(run, kwargs.remove(&run.run_id).unwrap_or_default())).collect())
}

/// The record of a run whose request was this.
pub(super) fn record(run: &RunRow, kwargs: Value) -> Value {
    let time =
        |time: &chrono::DateTime<chrono::Utc>| time.to_rfc3339_opts(chrono::SecondsFormat::Micros, false);
    let totals = &run.totals;
    json!({
        "run_id": run.run_id,
        "thread_id": run.thread_id,
        "assistant_id": run.assistant_id,
        "status": run.reported_status().as_str(),
        "metadata": run.metadata,
        "kwargs": kwargs,
        "multitask_strategy": run.multitask_strategy.as_str(),
        "created_at": time(&run.created_at),
        "updated_at": time(&run.updated_at),
        "total_input_tokens": totals.total_input_tokens,
        "total_output_tokens": totals.total_output_tokens,
        "total_tokens": totals.total_tokens,
        "llm_call_count": totals.llm_call_count,
        "lead_agent_tokens": totals.lead_agent_tokens,
        "subagent_tokens": totals.subagent_tokens,
        "middleware_tokens": totals.middleware_tokens,
        "message_count": totals.message_count,
        "stop_reason": run.stop_reason,
        "error": run.error,
    })
}

/// The thread of a request, which must exist.
pub(super) async fn existing(app: &App, thread: &ThreadId) -> Result<ThreadRow, ApiError> {
    let row = app.records.threads().get(thread.as_str(), None).await.or_internal("Failed to read thread")?;
    row.ok_or_else(|| ApiError::not_found(format!("Thread {thread} not found")))
}

/// The run of a request, if it belongs to the thread.
pub(super) async fn run_of(app: &App, path: &RunPath) -> Result<RunRow, ApiError> {
    let row = app.records.runs().get(&path.run_id).await.or_internal(READ_FAILED)?;
    row.filter(|row| row.thread_id == path.thread_id.as_str())
        .ok_or_else(|| ApiError::not_found(format!("Run {} not found", path.run_id)))
}

/// Whether the request that creates a run also follows it; `on_disconnect` only applies if it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Follow {
    Yes,
    No,
}

/// A request that was checked against this configuration.
pub(super) struct Checked {
    body: RunBody,
    config: Arc<Config>,
}

/// Checks the request against the gateway's configuration.
///
/// # Errors
/// Those of [`RunBody::check`].
pub(super) async fn checked(app: &App, body: RunBody) -> Result<Checked, ApiError> {
    let config = app.config.current_async().await;
    body.check(|name| config.model(name).is_some())?;
    Ok(Checked { body, config })
}

/// Creates the run.
pub(super) async fn start(
    app: &Arc<App>,
    caller: &Principal,
    thread: &ThreadId,
    place: OnThread<'_>,
    Checked { body, config }: Checked,
    follow: Follow,
    idempotency_key: Option<String>,
) -> Result<Created, ApiError> {
    let limits = RunLimits {
        max_recursion_limit: config.max_recursion_limit.into(),
        max_running: u32::try_from(app.admission.capacity()).unwrap_or(u32::MAX),
        max_total_per_run: config.subagents.max_total_per_run,
        internal_caller: false,
    };
    let mut request = body.into_request(thread, limits, &app.ids)?;
    if follow == Follow::No {
        request.options.on_disconnect = OnDisconnect::Continue;
    }
    app.runs
        .create(thread.as_str(), place, request, Some(caller.user()), idempotency_key)
        .await
        .map_err(refused)
}

/// The idempotency key of this request, if the client sent one: it is scoped to this user and this thread.
pub(super) fn idempotency_key(
    headers: &HeaderMap,
    caller: &Principal,
    thread: &ThreadId,
) -> Result<Option<String>, ApiError> {
    let refuse = |why: &str| {
        Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, format!("Header {IDEMPOTENCY_KEY} {why}")))
    };
    let Some(sent) = headers.get(IDEMPOTENCY_KEY) else { return Ok(None) };
    let Ok(key) = std::str::from_utf8(sent.as_bytes()) else { return refuse("must be UTF-8 text") };
    let key = key.trim();
    if key.chars().count() > IDEMPOTENCY_KEY_MAX {
        return refuse(&format!("must have at most {IDEMPOTENCY_KEY_MAX} characters"));
    }
    if key.is_empty() {
        return Ok(None);
    }
    let mut hasher = blake3::Hasher::new();
    // Neither a user nor a thread id contains a zero byte, so the hashed bytes are unambiguous.
    hasher.update(caller.user().as_bytes()).update(&[0]);
    hasher.update(thread.as_str().as_bytes()).update(&[0]).update(key.as_bytes());
    Ok(Some(hasher.finalize().to_hex().to_string()))
}

fn refused(error: CreateError) -> ApiError {
    let text = error.to_string();
    match error {
        CreateError::CheckpointNotFound(_) | CreateError::Records(RecordsError::NotFound { .. }) => {
            ApiError::not_found(text)
        }
        CreateError::Resume(ResumeError::NoAnswer(_)) => ApiError::bad_request(text),
        CreateError::HeadUnreadable(cause @ Error::ForeignChanges { .. })
        | CreateError::CheckpointUnreadable(cause @ Error::ForeignChanges { .. })
        | CreateError::Resume(ResumeError::State(cause @ Error::ForeignChanges { .. })) => {
            ApiError::conflict(cause.to_string())
        }
        CreateError::CheckpointUnreadable(cause) | CreateError::Resume(ResumeError::State(cause)) => {
            ApiError::internal("Failed to validate checkpoint", &cause)
        }
        // These two errors help the operator and contain no secrets; others may quote a store.
        CreateError::HeadUnreadable(Error::ModeMismatch | Error::Reconfiguration(_)) => {
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, text)
        }
        CreateError::HeadUnreadable(cause) => ApiError::internal("Failed to read the thread's head", &cause),
        CreateError::Stopping => ApiError::new(StatusCode::SERVICE_UNAVAILABLE, text),
        CreateError::Records(RecordsError::Conflict { .. } | RecordsError::QueueFull { .. })
        | CreateError::Resume(ResumeError::NothingWaits(_)) => ApiError::conflict(text),
        CreateError::Records(cause) => ApiError::internal("Failed to create run", &cause),
    }
}

/// The thread of a stateless run: the one that its configuration names, or a new one.
///
/// # Errors
/// 404 for another user's thread, which comes after the errors of [`checked`] by the contract.
pub(super) async fn stateless_thread(
    app: &App,
    caller: &Principal,
    request: &Checked,
) -> Result<ThreadId, ApiError> {
    let Some(named) = request.body.thread_id() else { return Ok(Uuid::new_v4().to_string().into()) };
    let thread = ThreadId::from(named);
    check_thread(app, caller, &thread).await?;
    Ok(thread)
}

fn created_record(thread: &ThreadId, Created { run, kwargs, .. }: Created) -> Response {
    (sse::run_headers(thread, &run.run_id), Json(record(&run, kwargs))).into_response()
}

/// Creates a run on a thread that must exist.
async fn begin(
    app: &Arc<App>,
    caller: &Principal,
    thread: &ThreadId,
    headers: &HeaderMap,
    body: RunBody,
    follow: Follow,
) -> Result<Created, ApiError> {
    let begun = async {
        let key = idempotency_key(headers, caller, thread)?;
        let request = checked(app, body).await?;
        start(app, caller, thread, OnThread::Existing(caller), request, follow, key).await
    };
    let begun = begun.await;
    // Admission itself needs the thread. Only a refusal is worth a read: that the thread is missing is said first.
    if begun.is_err() {
        existing(app, thread).await?;
    }
    begun
}

/// Create a run in the background.
#[utoipa::path(post, path = "/api/threads/{thread_id}/runs", tag = "runs", params(("thread_id" = String, Path)),
    request_body = ref("#/components/schemas/RunCreate"), responses((status = 200, description = "The run's record", body = ref("#/components/schemas/RunRecord")), RunRefused))]
async fn create(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    Caller(caller): Caller,
    headers: HeaderMap,
    ApiJson(body): ApiJson<RunBody>,
) -> Result<Response, ApiError> {
    let created = begin(&app, &caller, &thread_id, &headers, body, Follow::No).await?;
    Ok(created_record(&thread_id, created))
}

/// Create a run and follow its stream.
#[utoipa::path(post, path = "/api/threads/{thread_id}/runs/stream", tag = "runs", params(("thread_id" = String, Path)),
    request_body = ref("#/components/schemas/RunCreate"),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream", body = ref("#/components/schemas/StreamEvent")), RunRefused))]
async fn stream(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    Caller(caller): Caller,
    headers: HeaderMap,
    ApiJson(body): ApiJson<RunBody>,
) -> Result<Response, ApiError> {
    let created = begin(&app, &caller, &thread_id, &headers, body, Follow::Yes).await?;
    Ok(sse::response(created.stream, &thread_id, &created.run.run_id))
}

/// Create a run and wait for the resulting state.
#[utoipa::path(post, path = "/api/threads/{thread_id}/runs/wait", tag = "runs", params(("thread_id" = String, Path)),
    request_body = ref("#/components/schemas/RunCreate"), responses((status = 200, description = "Channel values, or status and error", body = Value), RunRefused))]
async fn wait(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    Caller(caller): Caller,
    headers: HeaderMap,
    ApiJson(body): ApiJson<RunBody>,
) -> Result<Response, ApiError> {
    let created = begin(&app, &caller, &thread_id, &headers, body, Follow::Yes).await?;
    let run_id = &created.run.run_id;
    Ok(awaited(&app, &caller, &thread_id, run_id, created.stream, HEARTBEAT).await)
}

/// Create a run on a new thread, in the background.
#[utoipa::path(post, path = "/api/runs", tag = "runs", request_body = ref("#/components/schemas/RunCreate"),
    responses((status = 200, description = "The run's record", body = ref("#/components/schemas/RunRecord")), RunRefused))]
async fn create_stateless(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiJson(body): ApiJson<RunBody>,
) -> Result<Response, ApiError> {
    let request = checked(&app, body).await?;
    let thread = stateless_thread(&app, &caller, &request).await?;
    let created =
        start(&app, &caller, &thread, OnThread::Visible(&caller), request, Follow::No, None).await?;
    Ok(created_record(&thread, created))
}

/// Create a run on a new thread and follow its stream.
#[utoipa::path(post, path = "/api/runs/stream", tag = "runs", request_body = ref("#/components/schemas/RunCreate"),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream", body = ref("#/components/schemas/StreamEvent")), RunRefused))]
async fn stream_stateless(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiJson(body): ApiJson<RunBody>,
) -> Result<Response, ApiError> {
    let request = checked(&app, body).await?;
    let thread = stateless_thread(&app, &caller, &request).await?;
    let created =
        start(&app, &caller, &thread, OnThread::Visible(&caller), request, Follow::Yes, None).await?;
    Ok(sse::response(created.stream, &thread, &created.run.run_id))
}

/// Create a run on a new thread and wait for the resulting state.
#[utoipa::path(post, path = "/api/runs/wait", tag = "runs", request_body = ref("#/components/schemas/RunCreate"),
    responses((status = 200, description = "Channel values, or status and error", body = Value), RunRefused))]
async fn wait_stateless(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiJson(body): ApiJson<RunBody>,
) -> Result<Response, ApiError> {
    let request = checked(&app, body).await?;
    let thread = stateless_thread(&app, &caller, &request).await?;
    let created =
        start(&app, &caller, &thread, OnThread::Visible(&caller), request, Follow::Yes, None).await?;
    Ok(awaited(&app, &caller, &thread, &created.run.run_id, created.stream, HEARTBEAT).await)
}

/// Which runs to list.
#[derive(Debug)]
struct ListParams {
    limit: u32,
    offset: u64,
    status: Option<RunStatus>,
    select: Select,
}

impl FromFields for ListParams {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let limit = fields.field("limit").clamped(&(1..=LIST_MAX)).unwrap_or(LIST_MAX);
        let offset = fields.field("offset").integer(&(0..=i64::MAX)).unwrap_or(0);
        let status = fields.field("status").one_of(&RUN_STATUSES).and_then(|name| name.parse().ok());
        Self {
            limit: u32::try_from(limit).unwrap_or(u32::MAX),
            offset: u64::try_from(offset).unwrap_or(0),
            status,
            select: Select::from_fields(fields, &RUN_FIELDS),
        }
    }
}

/// List the runs of a thread, newest first.
///
/// Requests (`kwargs`) of runs after the first one are null beyond `gateway.history_max_bytes`. Metadata of more than
/// 64 KiB is left out and has only `svc_metadata_omitted`. Read such a run alone.
#[utoipa::path(get, path = "/api/threads/{thread_id}/runs", tag = "runs",
    params(("thread_id" = String, Path), ("limit" = Option<u32>, Query), ("offset" = Option<u64>, Query), ("status" = inline(Option<RunStatusName>), Query),
        ("select" = inline(Option<Vec<RunField>>), Query)),
    responses((status = 200, description = "Run records, or the selected fields of them", body = Vec<Value>)))]
async fn list(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    ApiQuery(ListParams { limit, offset, status, select }): ApiQuery<ListParams>,
) -> Result<Json<Vec<Value>>, ApiError> {
    let query = RunQuery { status, limit, offset };
    let runs =
        app.records.runs().list_by_thread(thread_id.as_str(), &query).await.or_internal(LIST_FAILED)?;
    let shown = if select.wants("kwargs") {
        records(&app, &runs, LIST_FAILED).await?
    } else {
        runs.iter().map(|run| record(run, Value::Null)).collect()
    };
    select.of_each(shown, LIST_FAILED).map(Json)
}

/// Read a run.
#[utoipa::path(get, path = "/api/threads/{thread_id}/runs/{run_id}", tag = "runs",
    params(("thread_id" = String, Path), ("run_id" = String, Path)),
    responses((status = 200, description = "The run's record", body = ref("#/components/schemas/RunRecord")), (status = 404, description = "No such run of the thread")))]
async fn read(State(app): State<Arc<App>>, ApiPath(path): ApiPath<RunPath>) -> Result<Json<Value>, ApiError> {
    let run = run_of(&app, &path).await?;
    let record = records(&app, &[run], READ_FAILED).await?.pop();
    Ok(Json(record.unwrap_or_default()))
}

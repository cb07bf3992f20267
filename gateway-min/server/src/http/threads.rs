//! Threads: creating, reading, changing. Searching is in [`search`](super::search), deleting in
//! [`delete`](super::delete).

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;
use serde_json::{Map, Value, json};
use threadkeep::Error;
use threadkeep::checkpoint::ERROR_CHANNEL;
use threadkeep::id::ThreadId;
use threadkeep::metadata::COUNTERS_KEY;
use threadkeep::mode::CHECKPOINT_MODE_METADATA_KEY;
use threadkeep::saver::{CheckpointSelector, Load};
use threadkeep::state::StateSnapshot;
use threadkeep_agent::AGENT_BINDING;
use threadkeep_agent::duration::{RUN_DURATIONS, RUN_MESSAGE_IDS};
use threadkeep_agent::serialize::{self, time};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::assistants;
use super::auth::Caller;
use super::branches::{PARENTAGE_KEYS, SIDECAR_KEY};
use super::described::{self, AssistantName};
use super::error::{ApiError, OrApiError as _};
use super::exclusive::exclusively;
use super::extract::{ApiJson, ApiPath, ThreadPath};
use super::fields::{Fields, FromFields, Pattern};
use super::schema::{ErrorBody, Gated};
use super::supersteps::{self, PlannedStep, Superstep, SuperstepBody};
use crate::app::App;
use crate::auth::Principal;
use threadkeep_records::{
    NewThread, OperationKind, PINNED_KEY, RecordsError, ThreadRow, ThreadStatus, WriterKind,
};

const CREATE_FAILED: &str = "Failed to create thread";
const GET_FAILED: &str = "Failed to get thread";
const UPDATE_FAILED: &str = "Failed to update thread";
const NO_TTL: &str =
    "'ttl' is not supported: threads do not expire; delete them when they are no longer needed";
/// The header, and its value, with which a client wants no body.
const PREFER: &str = "prefer";
const MINIMAL: &str = "return=minimal";

/// The prefix of the gateway's own metadata keys.
pub(super) const OWN_PREFIX: &str = "svc_";
/// Keys of thread metadata that name the owner, which only the gateway sets.
const OWNER_KEYS: [&str; 2] = ["owner_id", "user_id"];
/// Keys of checkpoint metadata that mean something to the gateway or the engine, so that clients must not set them.
const RESERVED_KEYS: [&str; 11] = [
    "source",
    "step",
    "parents",
    "writes",
    "created_at",
    "updated_at",
    CHECKPOINT_MODE_METADATA_KEY,
    COUNTERS_KEY,
    RUN_DURATIONS,
    RUN_MESSAGE_IDS,
    AGENT_BINDING,
];
/// Keys of checkpoint metadata omitted when a thread without a row is shown.
const INTERNAL_KEYS: [&str; 6] = ["created_at", "updated_at", "step", "source", "writes", "parents"];

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(create_thread)).routes(routes!(get_thread, patch_thread))
}

/// A thread.
#[derive(Debug, Serialize, ToSchema)]
#[allow(clippy::struct_field_names, reason = "the names are those of the service")]
pub(crate) struct Thread {
    /// Its id.
    pub(super) thread_id: String,
    /// `busy` while a run works on it (stored as `running`); else `idle`, `interrupted` or `error`.
    pub(super) status: &'static str,
    /// When it was created, ISO-8601 in UTC.
    pub(super) created_at: String,
    /// When its record last changed, not counting pinning.
    pub(super) updated_at: String,
    /// Metadata set by clients.
    #[schema(value_type = Object)]
    pub(super) metadata: Map<String, Value>,
    /// When reading one thread: every channel. When searching: the title. Otherwise empty.
    #[schema(value_type = Object)]
    pub(super) values: Map<String, Value>,
    /// When reading one thread: the questions of its interrupted tasks, by task id. Otherwise empty.
    #[schema(value_type = Object)]
    pub(super) interrupts: Map<String, Value>,
}

impl From<ThreadRow> for Thread {
    /// Without values.
    fn from(row: ThreadRow) -> Self {
        Self {
            thread_id: row.thread_id,
            status: status_text(row.status),
            created_at: time(row.created_at),
            updated_at: time(row.updated_at),
            metadata: row.metadata,
            values: Map::new(),
            interrupts: Map::new(),
        }
    }
}

/// The status for SDK clients, which do not know `running`.
pub(super) fn status_text(status: ThreadStatus) -> &'static str {
    match status {
        ThreadStatus::Running => "busy",
        other => other.as_str(),
    }
}

/// The row of a thread, which must exist.
///
/// # Errors
/// 404 if there is none, 500 with `failed` if reading fails.
pub(super) async fn existing(
    app: &App,
    thread: &ThreadId,
    failed: &'static str,
) -> Result<ThreadRow, ApiError> {
    let row = app.records.threads().get(thread.as_str(), None).await.or_internal(failed)?;
    row.ok_or_else(|| absent(thread))
}

/// The 404 of a thread.
pub(super) fn absent(thread: &ThreadId) -> ApiError {
    ApiError::not_found(format!("Thread {thread} not found"))
}

/// A thread to create.
#[derive(Debug, ToSchema)]
struct CreateThread {
    /// Its id [default: a new UUID].
    #[schema(pattern = "^[A-Za-z0-9_-]{1,64}$")]
    thread_id: Option<String>,
    /// Its agent.
    #[schema(value_type = Option<AssistantName>)]
    assistant_id: Option<String>,
    /// Its metadata.
    #[schema(required = false, schema_with = described::object_or_null)]
    metadata: Map<String, Value>,
    /// `raise` refuses an existing thread; otherwise that thread is returned.
    #[schema(value_type = Option<IfExists>)]
    if_exists: Option<&'static str>,
    /// The supersteps that make its state, oldest first: each is a checkpoint. At most 10,000; only for a new thread.
    #[schema(value_type = Option<Vec<SuperstepBody>>)]
    supersteps: Vec<Superstep>,
}

/// What to do if a thread exists.
#[derive(Debug, ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "described, never built")]
enum IfExists {
    Raise,
    DoNothing,
}

impl FromFields for CreateThread {
    const BODY_OPTIONAL: bool = true;

    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self {
            thread_id: fields.field("thread_id").nullable().text_matching(&Pattern::THREAD_ID),
            assistant_id: assistants::named(fields, "assistant_id"),
            metadata: thread_metadata(fields, &[PINNED_KEY, SIDECAR_KEY]),
            if_exists: fields.field("if_exists").nullable().one_of(&["raise", "do_nothing"]),
            supersteps: {
                fields.field("ttl").unsupported(NO_TTL);
                let supersteps = fields.field("supersteps").nullable().at_most(supersteps::MAX_STEPS);
                supersteps.items(Superstep::from_fields).unwrap_or_default()
            },
        }
    }
}

/// The `metadata` of a body without what only the gateway may set: the owner, the branch source, and the gateway's own
/// keys except those in `flags`.
fn thread_metadata(fields: &mut Fields<'_>, flags: &[&str]) -> Map<String, Value> {
    let mut metadata = fields.field("metadata").nullable().object().unwrap_or_default();
    metadata.retain(|key, _| {
        let key = key.as_str();
        flags.contains(&key)
            || !(key.starts_with(OWN_PREFIX) || OWNER_KEYS.contains(&key) || PARENTAGE_KEYS.contains(&key))
    });
    metadata
}

/// Create a thread with an empty state.
///
/// An existing thread is left unchanged.
#[utoipa::path(post, path = "/api/threads", tag = "threads", request_body = Option<CreateThread>,
    responses((status = 200, description = "The thread, new or existing", body = Thread), Gated))]
async fn create_thread(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiJson(body): ApiJson<CreateThread>,
) -> Result<Json<Thread>, ApiError> {
    let raise = body.if_exists == Some("raise");
    let thread = ThreadId::from(body.thread_id.unwrap_or_else(|| Uuid::new_v4().to_string()));
    let known = app.records.threads().get(thread.as_str(), None).await;
    if let Some(row) = known.or_internal(CREATE_FAILED)? {
        if !row.visible_to(caller.sees()) {
            return Err(absent(&thread));
        }
        // Its state is not made of these supersteps.
        if raise || (!body.supersteps.is_empty() && body.if_exists.is_none()) {
            return Err(exists(&thread));
        }
        if has_checkpoint(&app, &thread, CREATE_FAILED).await? {
            return Ok(Json(row.into()));
        }
    }
    let steps = supersteps::planned(app.threads.accessor(), body.supersteps).await?;
    let new = NewThread {
        thread_id: thread.to_string(),
        assistant_id: body.assistant_id,
        user_id: Some(caller.user().to_owned()),
        metadata: body.metadata,
        ..NewThread::default()
    };
    let busy =
        RecordsError::Conflict { thread_id: thread.to_string(), holder: OperationKind::CheckpointWrite };
    let if_exists = if steps.is_empty() { body.if_exists } else { body.if_exists.or(Some("raise")) };
    let raise = if_exists == Some("raise");
    let work = create(Arc::clone(&app), thread.clone(), new, raise, steps, caller.clone());
    let created = exclusively(
        (&app, &caller),
        &thread,
        WriterKind::CheckpointWrite,
        busy.to_string(),
        CREATE_FAILED,
        work,
    )
    .await;
    match created {
        // The current writer will leave a checkpoint or delete the thread; either way there is nothing to write here.
        Err(error) if error.status() == StatusCode::CONFLICT && !raise => {
            let row = app.records.threads().get(thread.as_str(), caller.sees()).await.ok().flatten();
            row.map(|row| Json(row.into())).ok_or(error)
        }
        created => created.map(|row| Json(row.into())),
    }
}

/// Creates a thread of the caller with an empty state; returns its id.
pub(super) async fn new_thread(app: Arc<App>, caller: Principal) -> Result<String, ApiError> {
    let body = CreateThread {
        thread_id: None,
        assistant_id: None,
        metadata: Map::new(),
        if_exists: None,
        supersteps: Vec::new(),
    };
    let Json(thread) = create_thread(State(app), Caller(caller), ApiJson(body)).await?;
    Ok(thread.thread_id)
}

/// Ensures that the thread has a row and a checkpoint.
async fn create(
    app: Arc<App>,
    thread: ThreadId,
    new: NewThread,
    raise: bool,
    steps: Vec<PlannedStep>,
    caller: Principal,
) -> Result<ThreadRow, ApiError> {
    if !steps.is_empty() {
        return create_with(&app, &thread, new, raise, steps, &caller).await;
    }
    let has_checkpoint = has_checkpoint(&app, &thread, CREATE_FAILED).await?;
    if raise
        && has_checkpoint
        && app.records.threads().get(thread.as_str(), None).await.or_internal(CREATE_FAILED)?.is_none()
    {
        // Another program on the store has made it, without a record.
        return Err(exists(&thread));
    }
    let created = app.records.threads().create(new).await.or_internal(CREATE_FAILED)?;
    if !created.row.visible_to(caller.sees()) {
        return Err(absent(&thread));
    }
    if raise && !created.created {
        return Err(exists(&thread));
    }
    if !has_checkpoint {
        let mut extra = created.row.metadata.clone();
        extra.retain(|key, _| !RESERVED_KEYS.contains(&key.as_str()));
        extra.insert("writes".to_owned(), Value::Null);
        extra.insert("created_at".to_owned(), json!(time(created.row.created_at)));
        match app.threads.accessor().create(&thread, extra).await {
            // Another process was faster.
            Ok(_) | Err(Error::Conflict { .. }) => {}
            Err(error) => return Err(ApiError::from_engine(&thread, CREATE_FAILED, &error)),
        }
    }
    Ok(created.row)
}

/// Creates the thread with the state that the supersteps make. The record is last: a creation that stopped half-way left a
/// thread without one, and repeating it is refused instead of taking that state for the whole.
async fn create_with(
    app: &App,
    thread: &ThreadId,
    mut new: NewThread,
    raise: bool,
    steps: Vec<PlannedStep>,
    caller: &Principal,
) -> Result<ThreadRow, ApiError> {
    let row = app.records.threads().get(thread.as_str(), None).await.or_internal(CREATE_FAILED)?;
    match row {
        Some(row) if !row.visible_to(caller.sees()) => return Err(absent(thread)),
        Some(row) if !raise => return Ok(row),
        None if !has_checkpoint(app, thread, CREATE_FAILED).await? => {}
        _ => return Err(exists(thread)),
    }
    new.display_name = supersteps::write(app.threads.accessor(), thread, steps).await?;
    let created = app.records.threads().create(new).await.or_internal(CREATE_FAILED)?;
    Ok(created.row)
}

fn exists(thread: &ThreadId) -> ApiError {
    ApiError::conflict(format!("Thread {thread} already exists"))
}

/// Whether the thread has a checkpoint, in either mode.
///
/// # Errors
/// 500 with `failed` if reading fails.
pub(super) async fn has_checkpoint(
    app: &App,
    thread: &ThreadId,
    failed: &'static str,
) -> Result<bool, ApiError> {
    let head =
        app.threads.accessor().saver().get(&CheckpointSelector::head(thread).loading(Load::None)).await;
    head.map(|head| head.is_some()).or_internal(failed)
}

/// Read a thread with its state.
///
/// `status` is `busy` while a run is active. Otherwise the head decides: `idle` if no task is left to run, `error` if a
/// task or the last run failed, else `interrupted`. A thread without a checkpoint has the status of its last run.
#[utoipa::path(get, path = "/api/threads/{thread_id}", tag = "threads", params(("thread_id" = String, Path)),
    responses((status = 200, description = "The thread", body = Thread),
        (status = 404, description = "No such thread", body = ErrorBody), Gated))]
async fn get_thread(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
) -> Result<Json<Thread>, ApiError> {
    let engine = |error: Error| ApiError::from_engine(&thread_id, GET_FAILED, &error);
    let before = is_busy(&app, &thread_id).await?;
    let head = app.threads.accessor().get(&thread_id, None).await.map_err(engine)?;
    let row = app.records.threads().get(thread_id.as_str(), None).await.or_internal(GET_FAILED)?;
    let stored = row.as_ref().map(|row| row.status);
    let mut thread = match (row, &head) {
        (Some(row), _) => Thread::from(row),
        (None, Some(head)) => without_row(head),
        (None, None) => return Err(absent(&thread_id)),
    };
    let Some(head) = head else { return Ok(Json(thread)) };
    // A head with tasks left may only be a passing state of a run that started meanwhile.
    let derived = derived_status(&head, stored);
    let busy = before || (derived != ThreadStatus::Idle && is_busy(&app, &thread_id).await?);
    thread.status = status_text(if busy { ThreadStatus::Running } else { derived });
    thread.values = serialize::values(&head).map_err(engine)?;
    let waiting = head.tasks().into_iter().filter(|task| !task.interrupts.is_empty());
    thread.interrupts = waiting.map(|task| (task.id.to_string(), json!(task.interrupts))).collect();
    Ok(Json(thread))
}

/// Whether a run is active on the thread, from its admission to its last write.
async fn is_busy(app: &App, thread: &ThreadId) -> Result<bool, ApiError> {
    let failed = |error: RecordsError| ApiError::internal(GET_FAILED, &error);
    let holder = app.records.runs().active_for_thread(thread.as_str()).await.map_err(failed)?;
    if holder.is_some_and(|holder| holder.operation_kind == OperationKind::Run) {
        return Ok(true);
    }
    let row = app.records.threads().get(thread.as_str(), None).await.map_err(failed)?;
    Ok(row.is_some_and(|row| row.status == ThreadStatus::Running))
}

/// The status that the head implies for an idle thread: whether a task failed, whether tasks are left. If a run failed
/// outside its tasks, only the stored status says so.
pub(super) fn derived_status(head: &StateSnapshot, stored: Option<ThreadStatus>) -> ThreadStatus {
    let mut writes = head.writes.iter().flat_map(|row| &row.writes);
    if writes.any(|write| write.channel.as_str() == ERROR_CHANNEL) {
        return ThreadStatus::Error;
    }
    match (head.next.is_empty(), stored) {
        (true, _) => ThreadStatus::Idle,
        (false, Some(ThreadStatus::Error)) => ThreadStatus::Error,
        (false, _) => ThreadStatus::Interrupted,
    }
}

/// The record of a thread that only has checkpoints.
fn without_row(head: &StateSnapshot) -> Thread {
    let mut metadata = serialize::metadata(&head.metadata);
    let created_at = metadata.get("created_at").and_then(stored_time);
    metadata.retain(|key, _| !INTERNAL_KEYS.contains(&key.as_str()));
    Thread {
        thread_id: head.key.thread.to_string(),
        status: ThreadStatus::Idle.as_str(),
        created_at: created_at.unwrap_or_else(|| head.created_at()),
        updated_at: head.created_at(),
        metadata,
        values: Map::new(),
        interrupts: Map::new(),
    }
}

/// A time in metadata: a string, or in old data seconds since the Unix epoch.
fn stored_time(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        // Whole microseconds of any representable date.
        #[allow(clippy::cast_possible_truncation)]
        Value::Number(seconds) => {
            chrono::DateTime::from_timestamp_micros((seconds.as_f64()? * 1e6).round() as i64).map(time)
        }
        _ => None,
    }
}

/// What to change of a thread.
#[derive(Debug, ToSchema)]
struct PatchThread {
    /// Merged into the existing metadata, key by key.
    #[schema(required = false, schema_with = described::object_or_null)]
    metadata: Map<String, Value>,
}

impl FromFields for PatchThread {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        fields.field("ttl").unsupported(NO_TTL);
        Self { metadata: thread_metadata(fields, &[PINNED_KEY]) }
    }
}

/// Change the metadata of a thread.
#[utoipa::path(patch, path = "/api/threads/{thread_id}", tag = "threads", params(("thread_id" = String, Path)),
    request_body = PatchThread,
    responses((status = 200, description = "The thread", body = Thread),
        (status = 204, description = "Changed; the client wanted no body (`Prefer: return=minimal`)"),
        (status = 404, description = "No such thread", body = ErrorBody)))]
async fn patch_thread(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    headers: HeaderMap,
    ApiJson(body): ApiJson<PatchThread>,
) -> Result<Response, ApiError> {
    let row = app.records.threads().patch_metadata(thread_id.as_str(), caller.sees(), body.metadata).await;
    let row = row.map_err(|error| {
        if error.is_not_found() { absent(&thread_id) } else { ApiError::internal(UPDATE_FAILED, &error) }
    })?;
    let minimal = headers.get_all(PREFER).iter().any(|value| value.as_bytes() == MINIMAL.as_bytes());
    let thread = || Json(Thread::from(row)).into_response();
    Ok(if minimal { StatusCode::NO_CONTENT.into_response() } else { thread() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_numeric_times_become_texts() {
        assert_eq!(
            stored_time(&json!(1_700_000_000.000_005_f64)).unwrap(),
            "2023-11-14T22:13:20.000005+00:00"
        );
        assert_eq!(stored_time(&json!(1_700_000_000)).unwrap(), "2023-11-14T22:13:20.000000+00:00");
        assert_eq!(stored_time(&json!("2026-01-01T00:00:00+00:00")).unwrap(), "2026-01-01T00:00:00+00:00");
        assert_eq!(stored_time(&json!(null)), None);
    }
}

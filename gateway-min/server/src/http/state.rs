//! The state of a thread: reading the head or a checkpoint, and writing.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use serde::Serialize;
use serde_json::{Map, Value};
use threadkeep::Error;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::checkpoint::{CheckpointKey, Write};
use threadkeep::id::{CheckpointId, Namespace, NodeName, ThreadId};
use threadkeep::saver::Load;
use threadkeep::state::{StateAccessor, StateSnapshot, TaskView, Update};
use threadkeep_agent::binding;
use threadkeep_agent::serialize;
use threadkeep_subagents::owned;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::auth::Caller;
use super::described;
use super::error::{ApiError, OrApiError as _};
use super::exclusive::exclusively;
use super::extract::{ApiJson, ApiPath, ApiQuery, ThreadPath, drained};
use super::fields::{Fields, FromFields, shortened};
use super::run_body::{Selected, selector};
use super::schema::{ErrorBody, Gated};
use super::select::{Select, StateField};
use super::stamps::remove_forged_stamps;
use super::threads::{absent, existing};
use crate::app::App;
use threadkeep_records::WriterKind;

const GET_FAILED: &str = "Failed to get thread state";
const UPDATE_FAILED: &str = "Failed to update thread state";
const BUSY: &str = "Thread has a run in flight. Update state after the run finishes.";
/// The node recorded for an update that names none.
const DEFAULT_NODE: &str = "manual_state_update";

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(get_state, update_state, patch_state))
        .routes(routes!(get_state_at))
        .routes(routes!(get_state_by_selector))
}

/// The state of a thread at a checkpoint.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ThreadState {
    /// Channel values.
    #[schema(value_type = Object)]
    pub(super) values: Map<String, Value>,
    /// The nodes to run next; empty if the graph has finished.
    next: Vec<String>,
    /// The checkpoint's metadata.
    #[schema(value_type = Object)]
    pub(super) metadata: Map<String, Value>,
    /// The checkpoint.
    checkpoint: CheckpointRef,
    /// The checkpoint's id.
    checkpoint_id: String,
    /// The checkpoint's parent.
    #[schema(required = true)]
    parent_checkpoint: Option<CheckpointRef>,
    /// The parent's id.
    #[schema(required = true)]
    parent_checkpoint_id: Option<String>,
    /// When it was created, ISO-8601 in UTC.
    created_at: String,
    /// The tasks to run next.
    tasks: Vec<TaskState>,
    /// The questions of interrupted tasks.
    interrupts: Vec<Value>,
}

/// Names a checkpoint.
#[derive(Debug, Serialize, ToSchema)]
struct CheckpointRef {
    /// The checkpoint.
    id: String,
    /// When it was created, ISO-8601 in UTC.
    ts: String,
    /// The thread.
    thread_id: String,
    /// The namespace; empty for the thread's own graph.
    checkpoint_ns: String,
    /// The checkpoint's id again.
    checkpoint_id: String,
    /// Always null.
    #[schema(value_type = Option<Object>, required = true)]
    checkpoint_map: Option<Value>,
}

impl CheckpointRef {
    fn new(key: &CheckpointKey, id: CheckpointId) -> Self {
        Self {
            id: id.to_string(),
            ts: id.created_at(),
            thread_id: key.thread.to_string(),
            checkpoint_ns: key.namespace.to_string(),
            checkpoint_id: id.to_string(),
            checkpoint_map: None,
        }
    }
}

/// A task to run next.
#[derive(Debug, Serialize, ToSchema)]
struct TaskState {
    id: String,
    /// Its node.
    name: String,
    /// Why its last attempt failed.
    #[schema(required = true)]
    error: Option<String>,
    /// Its questions.
    interrupts: Vec<Value>,
    /// Always null: nested graphs have no checkpoints here.
    #[schema(value_type = Option<Object>, required = true)]
    checkpoint: Option<Value>,
    /// Always null, like `checkpoint`.
    #[schema(value_type = Option<Object>, required = true)]
    state: Option<Value>,
    /// Always null: a task with a result does not run again.
    #[schema(value_type = Option<Object>, required = true)]
    result: Option<Value>,
}

impl From<TaskView> for TaskState {
    fn from(task: TaskView) -> Self {
        Self {
            id: task.id.to_string(),
            name: task.name.to_string(),
            error: task.error,
            interrupts: task.interrupts,
            checkpoint: None,
            state: None,
            result: None,
        }
    }
}

impl ThreadState {
    /// The state with every loaded channel.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if stored bytes do not decode.
    pub(super) fn of(state: &StateSnapshot) -> threadkeep::Result<Self> {
        Ok(Self::with(state, serialize::values(state)?))
    }

    /// The state with these values.
    pub(super) fn with(state: &StateSnapshot, values: Map<String, Value>) -> Self {
        let tasks: Vec<TaskState> = state.tasks().into_iter().map(TaskState::from).collect();
        Self {
            values,
            next: state.next.iter().map(NodeName::to_string).collect(),
            metadata: serialize::metadata(&state.metadata),
            checkpoint: CheckpointRef::new(&state.key, state.key.id),
            checkpoint_id: state.key.id.to_string(),
            parent_checkpoint: state.parent.map(|parent| CheckpointRef::new(&state.key, parent)),
            parent_checkpoint_id: state.parent.map(|parent| parent.to_string()),
            created_at: state.created_at(),
            interrupts: tasks.iter().flat_map(|task| task.interrupts.clone()).collect(),
            tasks,
        }
    }

    /// The fields that a client selects. The values, which are a whole conversation, are moved, not copied.
    ///
    /// # Errors
    /// 500 with `failed` if the state has no JSON form.
    pub(super) fn selected(mut self, select: &Select, failed: &'static str) -> Result<Value, ApiError> {
        let values = std::mem::take(&mut self.values);
        let mut state = serde_json::to_value(self).map_err(|error| ApiError::internal(failed, &error))?;
        state["values"] = Value::Object(values);
        Ok(select.fields_of(state))
    }
}

/// How to show a state.
struct View {
    select: Select,
}

impl FromFields for View {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        // Both are so: no graph here has a nested one with checkpoints of its own.
        fields.field("subgraphs").nullable().flag();
        Self { select: Select::of_state(fields) }
    }
}

/// Read the state of a thread.
#[utoipa::path(get, path = "/api/threads/{thread_id}/state", tag = "state",
    params(("thread_id" = String, Path), ("subgraphs" = Option<bool>, Query), ("select" = inline(Option<Vec<StateField>>), Query)),
    responses((status = 200, description = "The state at the head", body = ThreadState),
        (status = 404, description = "The thread has no checkpoint", body = ErrorBody), Gated))]
async fn get_state(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    ApiQuery(View { select }): ApiQuery<View>,
) -> Result<Json<Value>, ApiError> {
    let state = read(&app, &thread_id, None, &select).await?;
    state.selected(&select, GET_FAILED).map(Json)
}

/// The path of a checkpoint.
struct CheckpointPath {
    thread_id: ThreadId,
    checkpoint_id: String,
}

impl FromFields for CheckpointPath {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let ThreadPath { thread_id } = ThreadPath::from_fields(fields);
        Self { thread_id, checkpoint_id: fields.field("checkpoint_id").required().text().unwrap_or_default() }
    }
}

/// Read the state at a checkpoint.
#[utoipa::path(get, path = "/api/threads/{thread_id}/state/{checkpoint_id}", tag = "state",
    params(("thread_id" = String, Path), ("checkpoint_id" = String, Path),
        ("subgraphs" = Option<bool>, Query), ("select" = inline(Option<Vec<StateField>>), Query)),
    responses((status = 200, description = "The state", body = ThreadState),
        (status = 404, description = "No such thread or checkpoint", body = ErrorBody), Gated))]
async fn get_state_at(
    State(app): State<Arc<App>>,
    ApiPath(CheckpointPath { thread_id, checkpoint_id }): ApiPath<CheckpointPath>,
    ApiQuery(View { select }): ApiQuery<View>,
) -> Result<Json<Value>, ApiError> {
    let selected = Sent { checkpoint: None, id: Some(checkpoint_id) };
    let state = read(&app, &thread_id, Some(selected), &select).await?;
    state.selected(&select, GET_FAILED).map(Json)
}

/// Which checkpoint to read.
#[derive(Debug, ToSchema)]
struct ReadState {
    /// `{thread_id?, checkpoint_ns?, checkpoint_id?}`; without an id, the head.
    #[schema(schema_with = described::checkpoint_or_null)]
    checkpoint: Option<Value>,
    /// Either is so: no graph here has a nested one with checkpoints of its own.
    #[allow(dead_code, reason = "described and checked only")]
    subgraphs: Option<bool>,
    /// The fields to return [default: all].
    #[schema(value_type = Option<Vec<StateField>>)]
    select: Select,
}

impl FromFields for ReadState {
    const BODY_OPTIONAL: bool = true;

    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self {
            checkpoint: fields.field("checkpoint").nullable().any(),
            subgraphs: fields.field("subgraphs").nullable().flag(),
            select: Select::of_state(fields),
        }
    }
}

/// Read the state at the checkpoint named in the body.
#[utoipa::path(post, path = "/api/threads/{thread_id}/state/checkpoint", tag = "state",
    params(("thread_id" = String, Path)), request_body = Option<ReadState>,
    responses((status = 200, description = "The state", body = ThreadState),
        (status = 400, description = "The selector is malformed, or of another thread", body = ErrorBody),
        (status = 404, description = "No such thread or checkpoint", body = ErrorBody), Gated))]
async fn get_state_by_selector(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    ApiJson(ReadState { checkpoint, select, .. }): ApiJson<ReadState>,
) -> Result<Json<Value>, ApiError> {
    let state = read(&app, &thread_id, Some(Sent { checkpoint, id: None }), &select).await?;
    state.selected(&select, GET_FAILED).map(Json)
}

/// How a request selects a checkpoint: an object, whose id takes precedence, or an id.
struct Sent {
    checkpoint: Option<Value>,
    id: Option<String>,
}

/// The state at a checkpoint or the head, with the values that are to be shown.
async fn read(
    app: &App,
    thread: &ThreadId,
    selected: Option<Sent>,
    shown: &Select,
) -> Result<ThreadState, ApiError> {
    let engine = |error: Error| ApiError::from_engine(thread, GET_FAILED, &error);
    let accessor = app.threads.accessor();
    let load = shown.load(accessor.table().names());
    let (state, missing) = match selected {
        None => (accessor.get_loading(thread, None, load).await, absent(thread)),
        Some(Sent { checkpoint, id }) => {
            // The gate checks the head: report a mode mismatch before a missing checkpoint.
            if !accessor.check(thread, None).await.map_err(engine)? {
                return Err(absent(thread));
            }
            let Selected { namespace, id } = selector(thread, checkpoint, id)?;
            let missing = match id {
                Some(id) => checkpoint_absent(id),
                None if namespace == Namespace::root() => absent(thread),
                None => {
                    let namespace = shortened(namespace.to_string());
                    ApiError::not_found(format!("Thread {thread} has no checkpoint in {namespace}"))
                }
            };
            let accessor = accessor.clone().in_namespace(namespace);
            (accessor.get_loading(thread, id, load).await, missing)
        }
    };
    ThreadState::of(&state.map_err(engine)?.ok_or(missing)?).map_err(engine)
}

pub(super) fn checkpoint_absent(id: CheckpointId) -> ApiError {
    ApiError::not_found(format!("Checkpoint {id} not found"))
}

/// What to write.
#[derive(Debug, ToSchema)]
struct UpdateState {
    /// Channel values, which replace the current ones.
    #[schema(schema_with = described::state_values_or_null)]
    values: Option<Map<String, Value>>,
    /// The checkpoint to write on [default: the head]. An older one creates a fork, which becomes the head.
    checkpoint_id: Option<String>,
    /// The same as an object, `{thread_id?, checkpoint_ns?, checkpoint_id?}`, whose id takes precedence.
    #[schema(schema_with = described::root_checkpoint_or_null)]
    checkpoint: Option<Value>,
    /// The node to record as the writer.
    as_node: Option<String>,
}

impl FromFields for UpdateState {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self {
            values: fields.field("values").nullable().object(),
            checkpoint_id: fields.field("checkpoint_id").nullable().text(),
            checkpoint: fields.field("checkpoint").nullable().any(),
            as_node: fields.field("as_node").nullable().text(),
        }
    }
}

/// Write to the state of a thread.
#[utoipa::path(post, path = "/api/threads/{thread_id}/state", tag = "state", params(("thread_id" = String, Path)),
    request_body = UpdateState,
    responses((status = 200, description = "The state at the new checkpoint", body = ThreadState),
        (status = 400, description = "The selector is malformed, or of another thread", body = ErrorBody),
        (status = 404, description = "No such thread or checkpoint", body = ErrorBody), Gated))]
async fn update_state(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    Caller(caller): Caller,
    ApiJson(body): ApiJson<UpdateState>,
) -> Result<Json<ThreadState>, ApiError> {
    app.threads.accessor().check(&thread_id, None).await.or_engine(&thread_id, UPDATE_FAILED)?;
    existing(&app, &thread_id, UPDATE_FAILED).await?;
    let selected = selector(&thread_id, body.checkpoint, body.checkpoint_id)?;
    let at = selected.of_root("only the thread's own state is written")?;
    let mut values = body.values.unwrap_or_default();
    values.remove(owned::CHANNEL);
    if let Some(messages) = values.get_mut(MESSAGES_CHANNEL) {
        let removed = remove_forged_stamps(app.threads.accessor(), &thread_id, at, messages).await;
        removed.or_engine(&thread_id, UPDATE_FAILED)?;
    }
    let writes = writes(app.threads.accessor(), values)?;
    let node = NodeName::from(body.as_node.as_deref().unwrap_or(DEFAULT_NODE));
    let work = update(Arc::clone(&app), thread_id.clone(), at, node, writes);
    let (of, kind) = ((&app, &caller), WriterKind::CheckpointWrite);
    exclusively(of, &thread_id, kind, BUSY.to_owned(), UPDATE_FAILED, work).await.map(Json)
}

/// Not supported: the metadata of a checkpoint never changes.
#[utoipa::path(patch, path = "/api/threads/{thread_id}/state", tag = "state", params(("thread_id" = String, Path)),
    responses((status = 501, description = "Not supported", body = ErrorBody)))]
async fn patch_state(request: Request) -> ApiError {
    drained(request.into_body()).await;
    ApiError::new(
        StatusCode::NOT_IMPLEMENTED,
        "The metadata of a checkpoint cannot be changed; change the metadata of the thread instead",
    )
}

/// The writes of an update: each replaces the channel's value, whatever its reducer.
fn writes(accessor: &StateAccessor, values: Map<String, Value>) -> Result<Vec<Write>, ApiError> {
    known_channels(accessor, &values)?;
    let write = |(name, value): (String, Value)| {
        replacement(accessor, &name, value)
            .map_err(|error| unprocessable(format!("Invalid value for thread-state field '{name}': {error}")))
    };
    values.into_iter().map(write).collect()
}

/// Checks that the state has all of these channels.
///
/// # Errors
/// 422 with the names of the others.
pub(super) fn known_channels(accessor: &StateAccessor, values: &Map<String, Value>) -> Result<(), ApiError> {
    let is_unknown = |name: &&String| accessor.table().behaviour(&name.as_str().into()).is_none();
    let mut unknown: Vec<&str> = values.keys().filter(is_unknown).map(String::as_str).collect();
    if unknown.is_empty() {
        return Ok(());
    }
    unknown.sort_unstable();
    Err(unprocessable(format!("Unknown thread-state field(s): {}", shortened(unknown.join(", ")))))
}

pub(super) fn unprocessable(text: String) -> ApiError {
    ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, text)
}

/// The write that replaces the value of a channel. A channel with a reducer gets the value reduced alone: messages with
/// unique ids.
fn replacement(accessor: &StateAccessor, channel: &str, value: Value) -> threadkeep::Result<Write> {
    let write = accessor.write(channel, value, false)?;
    let reducer = accessor.table().behaviour(&write.channel).and_then(|behaviour| behaviour.reducer());
    let Some(reducer) = reducer else { return Ok(write) };
    let value = match reducer.empty() {
        Some(empty) => reducer.reduce(empty, &write.value)?,
        None => write.value,
    };
    Ok(Write { value, overwrite: true, ..write })
}

/// The title of the state that a fork leaves; none if that is damaged, which a fork may be the remedy for.
async fn title_at(
    accessor: &StateAccessor,
    thread: &ThreadId,
    left: CheckpointId,
) -> threadkeep::Result<Option<Value>> {
    let load = Load::Only(["title".into()].into());
    let title = accessor.get_loading(thread, Some(left), load).await;
    match title.and_then(|left| left.map_or(Ok(None), |left| left.json("title"))) {
        Err(error @ (Error::Corrupt { .. } | Error::BrokenLineage { .. })) => {
            tracing::warn!(%thread, %error, "cannot read the title of the state that a fork leaves");
            Ok(None)
        }
        title => title,
    }
}

/// Writes the update, and copies the title to the thread's record.
async fn update(
    app: Arc<App>,
    thread: ThreadId,
    at: Option<CheckpointId>,
    node: NodeName,
    writes: Vec<Write>,
) -> Result<ThreadState, ApiError> {
    let engine = |error: Error| match (&error, at) {
        (Error::NotFound { .. }, Some(id)) => checkpoint_absent(id),
        // A writer of another process without a reservation.
        (Error::Conflict { .. } | Error::Stale { .. }, _) => ApiError::conflict(BUSY),
        _ => ApiError::from_engine(&thread, UPDATE_FAILED, &error),
    };
    let accessor = app.threads.accessor();
    let named = existing(&app, &thread, UPDATE_FAILED).await?.display_name;
    let mut head = accessor.known_head(&thread).await.map_err(engine)?;
    let base = accessor.get_loading(&thread, at.or(head.id()), Load::None).await.map_err(engine)?;
    let extra = base.as_ref().map(|base| binding(&base.metadata.extra)).unwrap_or_default();
    // Read before the write: a client whose request fails after it would repeat the write.
    let left = match head.id().filter(|head| at.is_some_and(|at| at != *head)) {
        Some(left) => title_at(accessor, &thread, left).await.map_err(engine)?,
        None => None,
    };
    let update = Update { at, node, writes, extra };
    let state = accessor.update_known(&mut head, update).await.map_err(engine)?;
    // A fork from before the title. A name that the state which it left did not have stays.
    let none_now = || left.filter(Value::is_string).map(|_| Value::Null);
    let title = state.json("title").map_err(engine)?.or_else(none_now);
    if let Some(title @ (Value::String(_) | Value::Null)) = title {
        app.records
            .threads()
            .set_display_name(thread.as_str(), named.as_deref(), title.as_str())
            .await
            .or_internal(UPDATE_FAILED)?;
    }
    ThreadState::of(&state).map_err(engine)
}

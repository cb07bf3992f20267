//! The history of a thread: its checkpoints, newest first.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Map, Value};
use threadkeep::Error;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::Load;
use threadkeep::state::{HistoryQuery, StateSnapshot};
use threadkeep_agent::duration::{RUN_DURATIONS, RUN_MESSAGE_IDS};
use threadkeep_agent::serialize;
use tokio::task::JoinHandle;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::error::ApiError;
use super::extract::{ApiJson, ApiPath, ThreadPath};
use super::fields::{Fields, Flaw, FromFields};
use super::schema::Gated;
use super::state::ThreadState;
use super::turns;
use crate::app::App;

pub(super) const HISTORY_FAILED: &str = "Failed to get thread history";
/// The maximum number of entries in a response (service reference, "Limits").
const LIMIT_MAX: usize = 100;
const LIMIT_DEFAULT: usize = 10;

/// The channels shown in an entry; the first entry also has the messages.
const SHOWN_CHANNELS: [&str; 2] = ["title", "thread_data"];
/// Metadata not shown in an entry.
const INTERNAL_KEYS: [&str; 7] =
    ["created_at", "updated_at", "source", "writes", "parents", RUN_DURATIONS, RUN_MESSAGE_IDS];

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(get_history))
}

/// Which part of the history to read. Other fields are ignored.
#[derive(Debug, ToSchema)]
pub(super) struct ReadHistory {
    /// Maximum number of entries; values above 100 count as 100.
    #[schema(minimum = 1, default = 10, required = false)]
    pub(super) limit: usize,
    /// The newest checkpoint to return, inclusive: its id, or an object with its `checkpoint_id`.
    #[schema(value_type = Value, required = false)]
    pub(super) before: Option<CheckpointId>,
    /// Only checkpoints whose metadata has these values.
    #[schema(value_type = Object, required = false)]
    pub(super) metadata: Map<String, Value>,
}

impl FromFields for ReadHistory {
    const BODY_OPTIONAL: bool = true;

    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let limit = fields.field("limit").integer(&(1..=i64::MAX));
        let limit = limit.map_or(LIMIT_DEFAULT, |limit| usize::try_from(limit).unwrap_or(LIMIT_MAX));
        Self {
            limit: limit.min(LIMIT_MAX),
            before: fields.field("before").nullable().read(checkpoint_id).flatten(),
            metadata: fields.field("metadata").nullable().object().unwrap_or_default(),
        }
    }
}

/// A checkpoint id in the forms that clients send: `"<id>"`, `{"checkpoint_id": "<id>"}`, `{"configurable":
/// {"checkpoint_id": "<id>"}}`. An object without an id sets no bound.
fn checkpoint_id(value: Value) -> Result<Option<CheckpointId>, (Flaw, Value)> {
    let id = match &value {
        Value::Object(checkpoint) => {
            let id = |of: &Map<String, Value>| of.get("checkpoint_id").filter(|id| !id.is_null()).cloned();
            id(checkpoint).or_else(|| checkpoint.get("configurable").and_then(Value::as_object).and_then(id))
        }
        other => Some(other.clone()),
    };
    match id {
        None => Ok(None),
        Some(Value::String(id)) => match id.parse() {
            Ok(id) => Ok(Some(id)),
            Err(_) => Err((Flaw::new("checkpoint_id", "Input should be the id of a checkpoint"), value)),
        },
        Some(_) => Err((Flaw::new("string_type", "Input should be a valid string"), value)),
    }
}

/// Read the history of a thread, newest checkpoint first.
///
/// Entries show only the title; the first one also has the messages, each with the run that created it, and the last
/// answer of each run with the run's duration in seconds.
#[utoipa::path(post, path = "/api/threads/{thread_id}/history", tag = "state", params(("thread_id" = String, Path)),
    request_body = Option<ReadHistory>,
    responses((status = 200, description = "The entries; none for a thread without checkpoints", body = Vec<ThreadState>), Gated))]
async fn get_history(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    ApiJson(body): ApiJson<ReadHistory>,
) -> Result<Json<Vec<ThreadState>>, ApiError> {
    // The response need not wait for the note.
    let Page { entries, note: _running } = page(&app, &thread_id, body).await?;
    Ok(Json(entries))
}

/// A page of history, and the note that reading it caused, being written.
pub(super) struct Page {
    pub(super) entries: Vec<ThreadState>,
    pub(super) note: Option<JoinHandle<()>>,
}

pub(super) async fn page(app: &Arc<App>, thread: &ThreadId, body: ReadHistory) -> Result<Page, ApiError> {
    let engine = |error: Error| ApiError::from_engine(thread, HISTORY_FAILED, &error);
    let accessor = app.threads.accessor();
    // The gate checks the head even if the page starts at an older checkpoint.
    let head = accessor.get_loading(thread, None, Load::None).await.map_err(engine)?;
    let Some(head) = head else { return Ok(Page { entries: Vec::new(), note: None }) };
    let query = HistoryQuery {
        before: body.before.map(successor),
        limit: Some(body.limit),
        filter: body.metadata,
        load: Load::Only(SHOWN_CHANNELS.map(ChannelName::from).into()),
    };
    let states = accessor.history(thread, query).await.map_err(engine)?;
    let mut entries = states.iter().map(entry).collect::<threadkeep::Result<Vec<_>>>().map_err(engine)?;
    let (Some(first), Some(newest)) = (entries.first_mut(), states.first()) else {
        return Ok(Page { entries, note: None });
    };
    let load = Load::Only([ChannelName::from(MESSAGES_CHANNEL)].into());
    let messages = accessor.get_loading(thread, Some(newest.key.id), load).await.map_err(engine)?;
    let messages = messages.map(|state| serialize::values(&state)).transpose().map_err(engine)?;
    let Some(Value::Array(mut messages)) = messages.and_then(|mut values| values.remove(MESSAGES_CHANNEL))
    else {
        return Ok(Page { entries, note: None });
    };
    let missing = turns::attribute(app, thread, &head, &mut messages).await?;
    first.values.insert(MESSAGES_CHANNEL.to_owned(), Value::Array(messages));
    // A later reader can write the note; a stopping gateway cannot wait for it.
    let missing = missing.filter(|_| !app.runs.is_stopping());
    let note =
        missing.map(|missing| app.threads.spawn(turns::note(Arc::clone(app), thread.clone(), missing)));
    Ok(Page { entries, note })
}

/// The next greater id: the savers' bound is exclusive, the clients' is inclusive.
fn successor(id: CheckpointId) -> CheckpointId {
    CheckpointId::from_bytes(u128::from_be_bytes(*id.as_bytes()).saturating_add(1).to_be_bytes())
}

fn entry(state: &StateSnapshot) -> threadkeep::Result<ThreadState> {
    let mut entry = ThreadState::of(state)?;
    entry.metadata.retain(|key, _| !INTERNAL_KEYS.contains(&key.as_str()));
    Ok(entry)
}

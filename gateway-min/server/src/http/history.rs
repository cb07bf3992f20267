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
use threadkeep::value::ChannelValue;
use threadkeep_agent::duration::{RUN_DURATIONS, RUN_MESSAGE_IDS};
use threadkeep_agent::serialize;
use tokio::task::JoinHandle;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::described;
use super::error::ApiError;
use super::extract::{ApiJson, ApiPath, ThreadPath};
use super::fields::{Fields, Flaw, FromFields};
use super::run_body::{Selected, selector};
use super::schema::{ErrorBody, Gated};
use super::select::{Select, StateField};
use super::state::{ThreadState, checkpoint_absent};
use super::turns;
use crate::app::App;

pub(super) const HISTORY_FAILED: &str = "Failed to get thread history";
/// The maximum number of entries in a response (service reference, "Limits").
const LIMIT_MAX: i64 = 100;
const LIMIT_DEFAULT: usize = 10;

/// The channels shown in an entry.
const SHOWN_CHANNELS: [&str; 3] = ["title", "thread_data", MESSAGES_CHANNEL];
/// In the metadata of an entry without its messages: there would be too many bytes in one response.
const MESSAGES_OMITTED: &str = "messages_omitted";
/// Metadata not shown in an entry.
const INTERNAL_KEYS: [&str; 7] =
    ["created_at", "updated_at", "source", "writes", "parents", RUN_DURATIONS, RUN_MESSAGE_IDS];

/// What the objects have that name a checkpoint.
const CHECKPOINT_KEYS: [&str; 6] =
    ["checkpoint_id", "thread_id", "checkpoint_ns", "checkpoint_map", "id", "ts"];
const NO_MAP: &str =
    "checkpoint_map should be empty: nested graphs have no checkpoints of their own to begin at";

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(get_history))
}

/// Which part of the history to read.
#[derive(Debug, ToSchema)]
pub(super) struct ReadHistory {
    /// Maximum number of entries; values above 100 count as 100.
    #[schema(minimum = 1, default = 10, required = false)]
    pub(super) limit: usize,
    /// The newest checkpoint to return, inclusive: its id, or an object with its `checkpoint_id`, which is of the same
    /// thread and namespace.
    #[schema(schema_with = described::bound_or_null, required = false)]
    pub(super) before: Bound,
    /// The same as an object, `{thread_id?, checkpoint_ns?, checkpoint_id?}`: the history begins there, in its namespace.
    #[schema(schema_with = described::checkpoint_or_null)]
    pub(super) checkpoint: Option<Value>,
    /// The fields to return of each entry [default: all].
    #[schema(value_type = Option<Vec<StateField>>)]
    pub(super) select: Select,
    /// Only checkpoints whose metadata has these values.
    #[schema(required = false, schema_with = described::object_or_null)]
    pub(super) metadata: Map<String, Value>,
}

/// The newest checkpoint to return, as a client names it.
#[derive(Debug, Default)]
pub(super) struct Bound {
    /// The checkpoint; `None` sets no bound.
    id: Option<CheckpointId>,
    /// The threads that the object says it is of.
    threads: Vec<String>,
    /// The namespaces that the object says it is in.
    namespaces: Vec<String>,
}

#[cfg(test)]
impl ReadHistory {
    /// The newest entries.
    pub(super) fn newest(limit: usize) -> Self {
        let (metadata, select) = (Map::new(), Select::default());
        Self { limit, before: Bound::default(), checkpoint: None, select, metadata }
    }
}

impl FromFields for ReadHistory {
    const BODY_OPTIONAL: bool = true;

    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let limit = fields.field("limit").clamped(&(1..=LIMIT_MAX));
        Self {
            limit: limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(LIMIT_DEFAULT),
            before: fields.field("before").nullable().read(bound).unwrap_or_default(),
            checkpoint: fields.field("checkpoint").nullable().any(),
            select: Select::of_state(fields),
            metadata: fields.field("metadata").nullable().object().unwrap_or_default(),
        }
    }
}

/// A bound in the forms that clients send: `"<id>"`, `{"checkpoint_id": "<id>"}`, `{"configurable": {"checkpoint_id":
/// "<id>"}}`. An object without an id sets none.
fn bound(value: Value) -> Result<Bound, (Flaw, Value)> {
    match bound_of(&value) {
        Ok(bound) => Ok(bound),
        Err(flaw) => Err((flaw, value)),
    }
}

fn bound_of(value: &Value) -> Result<Bound, Flaw> {
    let mut bound = Bound::default();
    let Value::Object(checkpoint) = value else {
        bound.id = Some(one_id(value)?);
        return Ok(bound);
    };
    for (name, value) in checkpoint {
        match (name.as_str(), value) {
            ("configurable", Value::Null) => {}
            ("configurable", Value::Object(configurable)) => {
                for (name, value) in configurable {
                    bound.take(name, value)?;
                }
            }
            ("configurable", _) => {
                return Err(Flaw::new("dict_type", "configurable should be a valid dictionary"));
            }
            (name, value) => bound.take(name, value)?,
        }
    }
    Ok(bound)
}

impl Bound {
    /// Takes what an object says of the checkpoint; null says nothing.
    fn take(&mut self, name: &str, value: &Value) -> Result<(), Flaw> {
        if !CHECKPOINT_KEYS.contains(&name) {
            return Err(Flaw::new("extra_forbidden", format!("A checkpoint has no '{name}'")));
        }
        if value.is_null() {
            return Ok(());
        }
        match name {
            "checkpoint_id" | "id" => {
                let id = one_id(value)?;
                if self.id.replace(id).is_some_and(|other| other != id) {
                    return Err(Flaw::new("checkpoint_id", "Input should have one checkpoint_id"));
                }
            }
            "thread_id" => self.threads.push(one_text(value)?),
            "checkpoint_ns" => self.namespaces.push(one_text(value)?),
            "checkpoint_map" if value.as_object().is_none_or(|map| !map.is_empty()) => {
                return Err(Flaw::unsupported(NO_MAP));
            }
            "ts" if !value.is_string() => return Err(no_text()),
            // A time is that of the id.
            _ => {}
        }
        Ok(())
    }
}

fn one_text(value: &Value) -> Result<String, Flaw> {
    value.as_str().map(str::to_owned).ok_or_else(no_text)
}

fn no_text() -> Flaw {
    Flaw::new("string_type", "Input should be a valid string")
}

fn one_id(value: &Value) -> Result<CheckpointId, Flaw> {
    one_text(value)?.parse().map_err(|_| Flaw::new("checkpoint_id", "Input should be the id of a checkpoint"))
}

/// Read the history of a thread, newest checkpoint first.
///
/// Entries show the title and the messages. In the first one each message names the run that created it, and the last
/// answer of each run has the run's duration in seconds. Messages of further entries are left out beyond
/// `gateway.history_max_bytes`; the metadata of such an entry has `messages_omitted`.
#[utoipa::path(post, path = "/api/threads/{thread_id}/history", tag = "state", params(("thread_id" = String, Path)),
    request_body = Option<ReadHistory>,
    responses((status = 200, description = "The entries; none for a thread without checkpoints", body = Vec<ThreadState>),
        (status = 400, description = "A checkpoint is malformed, or of another thread or namespace", body = ErrorBody),
        (status = 404, description = "No such checkpoint", body = ErrorBody), Gated))]
async fn get_history(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    ApiJson(body): ApiJson<ReadHistory>,
) -> Result<Json<Vec<Value>>, ApiError> {
    let select = body.select.clone();
    // The response need not wait for the note.
    let Page { entries, note: _running } = page(&app, &thread_id, body).await?;
    let entries = entries.into_iter().map(|entry| entry.selected(&select, HISTORY_FAILED));
    entries.collect::<Result<_, _>>().map(Json)
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
    let Selected { namespace, id } = selector(thread, body.checkpoint, None)?;
    if body.before.threads.iter().any(|of| of != thread.as_str()) {
        // Ids are times, so that of another thread would give a page that begins anywhere.
        return Err(ApiError::bad_request("before thread_id does not match request thread_id"));
    }
    if body.before.namespaces.iter().any(|of| of.as_str() != namespace.as_str()) {
        return Err(ApiError::bad_request("before checkpoint_ns does not match that of the history"));
    }
    let Some(head) = head else {
        return match id {
            Some(id) => Err(checkpoint_absent(id)),
            None => Ok(Page { entries: Vec::new(), note: None }),
        };
    };
    let accessor = accessor.clone().in_namespace(namespace);
    if let Some(id) = id {
        let found = accessor.get_loading(thread, Some(id), Load::None).await.map_err(engine)?;
        found.ok_or_else(|| checkpoint_absent(id))?;
    }
    let shown = SHOWN_CHANNELS.map(ChannelName::from);
    let load = match body.select.load(&shown) {
        Load::All => Load::Only(shown.into()),
        load => load,
    };
    let query = HistoryQuery {
        // The older of the two.
        before: body.before.id.into_iter().chain(id).min().map(successor),
        limit: Some(body.limit),
        filter: body.metadata,
        load,
    };
    let states = accessor.history(thread, query).await.map_err(engine)?;
    let mut room = Room { left: app.history_max_bytes, is_first: true };
    let entries = states.iter().map(|state| entry(state, &mut room)).collect::<threadkeep::Result<Vec<_>>>();
    let mut entries = entries.map_err(engine)?;
    let first = entries.first_mut().and_then(|first| first.values.get_mut(MESSAGES_CHANNEL));
    let Some(Value::Array(messages)) = first else { return Ok(Page { entries, note: None }) };
    let missing = turns::attribute(app, thread, &head, messages).await?;
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

/// What a response has room for.
struct Room {
    /// Bytes of messages.
    left: usize,
    /// The first entry has its messages anyway.
    is_first: bool,
}

impl Room {
    /// Whether an entry with this many bytes of messages has its messages. After one without, none has.
    fn takes(&mut self, bytes: usize) -> bool {
        let left = self.left.checked_sub(bytes);
        self.left = left.unwrap_or(0);
        std::mem::take(&mut self.is_first) || left.is_some()
    }
}

fn entry(state: &StateSnapshot, room: &mut Room) -> threadkeep::Result<ThreadState> {
    let bytes = state.value(MESSAGES_CHANNEL).map_or(0, ChannelValue::encoded_len);
    let has_messages = room.takes(bytes);
    let values = serialize::values_of(state, |channel| has_messages || channel != MESSAGES_CHANNEL)?;
    let mut entry = ThreadState::with(state, values);
    if !has_messages {
        entry.metadata.insert(MESSAGES_OMITTED.to_owned(), true.into());
    }
    entry.metadata.retain(|key, _| !INTERNAL_KEYS.contains(&key.as_str()));
    Ok(entry)
}

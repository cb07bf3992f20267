//! Prepares to run a turn again, unchanged or with an edited question. Writes nothing; the client creates a run from
//! the response.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use serde_json::{Map, Value, json};
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::saver::Load;
use threadkeep::state::StateSnapshot;
use threadkeep_agent::duration;
use threadkeep_agent::model::message::{invalid_tool_calls, is_from_user, is_hidden, kind, text, tool_calls};
use threadkeep_agent::serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::error::{ApiError, OrApiError as _};
use super::extract::{ApiJson, ApiPath, ThreadPath};
use super::fields::{Fields, FromFields, shortened};
use super::schema::ErrorBody;
use super::threads::existing;
use super::turns;
use crate::app::App;
use crate::runs::admission::{EDIT, REPLAY_KIND};
use crate::threads::lineage::{self, Base, LineageError};
use threadkeep_records::{RunRow, RunStatus};

const READ_FAILED: &str = "Failed to read latest checkpoint";
const INSPECT_FAILED: &str = "Failed to inspect checkpoint history";
const NOT_RESOLVED: &str = "Could not safely resolve the checkpoint before the target user message";
const NOTHING_BEFORE: &str = "Could not find an addressable checkpoint before the target user message";
const NOT_LOCATED: &str = "Could not locate target user message in recent checkpoint history (limit=200)";
const NOT_VISIBLE: &str = "Only visible assistant messages can be regenerated";
const NOT_LATEST: &str = "Only the latest assistant message can be regenerated";
const NO_QUESTION: &str = "Could not find the user message for this assistant response";
const NO_RUN: &str = "Could not find source run for assistant message";
const QUESTION_WITHOUT_ID: &str = "The source user message is missing an id";
const ANSWER_WITHOUT_ID: &str = "The source assistant message is missing an id";
const EMPTY: &str = "Edited message cannot be empty";
const GOAL_ACTIVE: &str = "Cannot edit while a goal is active";
const TURN_NOT_LATEST: &str = "Only the latest completed user turn can be edited";
const TURN_NOT_TEXT: &str = "Only completed assistant text turns can be edited";
const UNCHANGED: &str = "Edited message is unchanged";
const RUN_NOT_SUCCESSFUL: &str = "Only successful assistant runs can be edited and rerun";

/// What other writers append to a user message's id when they rewrite it within its run.
const SWAPPED_ID_SUFFIX: &str = "__user";
/// The key of run metadata that links the versions of an edited message.
const EDIT_GROUP: &str = "edit_version_group_id";

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(prepare_regenerate)).routes(routes!(prepare_edit))
}

/// Which answer to regenerate.
#[derive(Debug, ToSchema)]
struct Regenerate {
    /// The answer; must be the last one of the conversation.
    #[schema(min_length = 1)]
    message_id: String,
}

impl FromFields for Regenerate {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let message_id = fields.field("message_id").required().text_sized(&(1..=usize::MAX));
        Self { message_id: message_id.unwrap_or_default() }
    }
}

/// Which message to replace.
#[derive(Debug, ToSchema)]
struct Edit {
    /// The user's message; must be the last one of the conversation.
    #[schema(min_length = 1)]
    human_message_id: String,
    /// The new text.
    replacement_text: String,
}

impl FromFields for Edit {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let id = fields.field("human_message_id").required().text_sized(&(1..=usize::MAX));
        Self {
            human_message_id: id.unwrap_or_default(),
            replacement_text: fields.field("replacement_text").required().text().unwrap_or_default(),
        }
    }
}

/// The parts of a run that repeats the turn.
#[derive(Debug, Serialize, ToSchema)]
struct Prepared {
    /// Its input.
    #[schema(value_type = Object)]
    input: Map<String, Value>,
    /// Its checkpoint: the one before the turn.
    checkpoint: Selector,
    /// Its metadata.
    #[schema(value_type = Object)]
    metadata: Map<String, Value>,
    /// The run that created the turn.
    target_run_id: String,
}

/// Selects a checkpoint.
#[derive(Debug, Serialize, ToSchema)]
#[allow(clippy::struct_field_names, reason = "the names are those of the service")]
struct Selector {
    /// Always empty: the thread's own graph.
    checkpoint_ns: String,
    checkpoint_id: String,
    /// Always null.
    #[schema(value_type = Option<Object>, required = true)]
    checkpoint_map: Option<Value>,
}

/// Prepare to regenerate the last answer.
#[utoipa::path(post, path = "/api/threads/{thread_id}/runs/regenerate/prepare", tag = "runs",
    params(("thread_id" = String, Path)), request_body = Regenerate,
    responses((status = 200, description = "What to create the run with", body = Prepared),
        (status = 404, description = "No such thread or message", body = ErrorBody),
        (status = 409, description = "The answer cannot be regenerated", body = ErrorBody),
        (status = 500, description = "The state cannot be read, for example because of its mode", body = ErrorBody)))]
async fn prepare_regenerate(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    ApiJson(Regenerate { message_id }): ApiJson<Regenerate>,
) -> Result<Json<Prepared>, ApiError> {
    let head = Conversation::read(&app, &thread_id).await?;
    let messages = &head.messages;
    let (question, run_id) = match messages.iter().position(|message| message["id"] == *message_id) {
        Some(at) => {
            let answer = &messages[at];
            if kind(answer) != "ai" || is_hidden(answer) {
                return Err(ApiError::conflict(NOT_VISIBLE));
            }
            if messages[at + 1..].iter().any(|m| is_from_user(m) || kind(m) == "ai" && !is_hidden(m)) {
                return Err(ApiError::conflict(NOT_LATEST));
            }
            let question = messages[..at].iter().rposition(is_from_user);
            let question = question.ok_or_else(|| ApiError::conflict(NO_QUESTION))?;
            (question, head.run_of(&app, at).await?)
        }
        // An interrupted run may have streamed an answer that is in no checkpoint.
        None => head.interrupted(&app).await?.ok_or_else(|| {
            ApiError::not_found(format!("Message {} not found", shortened(message_id.as_str())))
        })?,
    };
    let question = &messages[question];
    let id = id_of(question).ok_or_else(|| ApiError::conflict(QUESTION_WITHOUT_ID))?;
    let run_id = run_id.ok_or_else(|| ApiError::conflict(NO_RUN))?;
    let base = head.base_before(&app, id).await?;
    let mut input = replayed(question);
    input["id"] = json!(id.strip_suffix(SWAPPED_ID_SUFFIX).unwrap_or(id));
    let input = with_title(input, head.state.json("title").map_err(read_failed)?);
    let metadata = json!({
        "regenerate_from_message_id": message_id,
        "regenerate_from_run_id": run_id,
        "regenerate_checkpoint_id": base.to_string(),
    });
    Ok(Json(Prepared::new(input, base, metadata, run_id)))
}

/// Prepare to repeat the last turn with an edited question.
#[utoipa::path(post, path = "/api/threads/{thread_id}/runs/edit-regenerate/prepare", tag = "runs",
    params(("thread_id" = String, Path)), request_body = Edit,
    responses((status = 200, description = "What to create the run with", body = Prepared),
        (status = 404, description = "No such thread or message", body = ErrorBody),
        (status = 409, description = "The turn cannot be edited", body = ErrorBody),
        (status = 500, description = "The state cannot be read, for example because of its mode", body = ErrorBody)))]
async fn prepare_edit(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    ApiJson(Edit { human_message_id, replacement_text }): ApiJson<Edit>,
) -> Result<Json<Prepared>, ApiError> {
    let replacement = replacement_text.trim();
    if replacement.is_empty() {
        return Err(ApiError::conflict(EMPTY));
    }
    let head = Conversation::read(&app, &thread_id).await?;
    let messages = &head.messages;
    if head.state.json("goal").map_err(read_failed)?.is_some_and(|goal| goal["status"] == "active") {
        return Err(ApiError::conflict(GOAL_ACTIVE));
    }
    let at = messages.iter().position(|message| message["id"] == *human_message_id);
    let at = at.ok_or_else(|| {
        ApiError::not_found(format!("Message {} not found", shortened(human_message_id.as_str())))
    })?;
    let (question, turn) = (&messages[at], &messages[at + 1..]);
    let answer = turn.iter().rposition(|message| kind(message) == "ai" && !is_hidden(message));
    let Some(answer) = answer.filter(|_| head.state.next.is_empty()) else {
        return Err(ApiError::conflict(TURN_NOT_LATEST));
    };
    if !is_from_user(question) || turn.iter().any(is_from_user) {
        return Err(ApiError::conflict(TURN_NOT_LATEST));
    }
    let calls = tool_calls(&turn[answer]).len() + invalid_tool_calls(&turn[answer]).len();
    if calls > 0 || text(&turn[answer]).trim().is_empty() {
        return Err(ApiError::conflict(TURN_NOT_TEXT));
    }
    if text(question).trim() == replacement {
        return Err(ApiError::conflict(UNCHANGED));
    }
    let run_id = head.run_of(&app, at + 1 + answer).await?.ok_or_else(|| ApiError::conflict(NO_RUN))?;
    let run = run(&app, &run_id).await?;
    // A branch contains turns of runs that belong to its source.
    if run.as_ref().is_some_and(|run| run.reported_status() != RunStatus::Success) {
        return Err(ApiError::conflict(RUN_NOT_SUCCESSFUL));
    }
    let id = id_of(question).ok_or_else(|| ApiError::conflict(QUESTION_WITHOUT_ID))?;
    let answer_id = id_of(&turn[answer]).ok_or_else(|| ApiError::conflict(ANSWER_WITHOUT_ID))?;
    let base = head.base_before(&app, id).await?;
    let load = Load::Only(["title".into()].into());
    let before =
        app.threads.accessor().get_loading(&thread_id, Some(base), load).await.map_err(inspect_failed)?;
    let title = before.map(|before| before.json("title")).transpose().map_err(inspect_failed)?.flatten();
    let group = run.and_then(|run| run.metadata.get(EDIT_GROUP).cloned()).unwrap_or_else(|| json!(id));
    let new_id = app.ids.text();
    let mut input = replayed(question);
    input["id"] = json!(new_id);
    input["content"] = json!(replacement);
    let mut metadata = json!({
        "regenerate_from_message_id": answer_id,
        "regenerate_from_run_id": run_id,
        "regenerate_checkpoint_id": base.to_string(),
        "replacement_human_message_id": new_id,
        "source_message_ids": messages[at..].iter().filter_map(id_of).collect::<Vec<_>>(),
        REPLAY_KIND: EDIT,
        "edit_from_message_id": id,
        "edit_message_id": new_id,
    });
    metadata[EDIT_GROUP] = group;
    Ok(Json(Prepared::new(with_title(input, title), base, metadata, run_id)))
}

impl Prepared {
    fn new(input: Map<String, Value>, base: CheckpointId, metadata: Value, run_id: String) -> Self {
        let metadata = match metadata {
            Value::Object(metadata) => metadata,
            _ => Map::new(),
        };
        let checkpoint =
            Selector { checkpoint_ns: String::new(), checkpoint_id: base.to_string(), checkpoint_map: None };
        Self { input, checkpoint, metadata, target_run_id: run_id }
    }
}

/// The head of a thread, and its messages.
struct Conversation {
    state: StateSnapshot,
    messages: Vec<Value>,
}

impl Conversation {
    async fn read(app: &App, thread: &ThreadId) -> Result<Self, ApiError> {
        existing(app, thread, READ_FAILED).await?;
        let load = Load::Only([MESSAGES_CHANNEL.into(), "title".into(), "goal".into()].into());
        let state = app.threads.accessor().get_loading(thread, None, load).await.map_err(read_failed)?;
        let state = state.ok_or_else(|| ApiError::not_found(format!("Thread {thread} has no checkpoint")))?;
        let messages = match state.json(MESSAGES_CHANNEL).map_err(read_failed)? {
            Some(Value::Array(messages)) => messages,
            _ => Vec::new(),
        };
        Ok(Self { state, messages })
    }

    /// The run that created the message at this index.
    async fn run_of(&self, app: &App, at: usize) -> Result<Option<String>, ApiError> {
        let notes = duration::newest_notes(
            &**app.threads.accessor().saver(),
            &self.state.key,
            &self.state.metadata.extra,
        )
        .await;
        let noted = notes.map_err(read_failed)?.messages;
        Ok(turns::runs_of(&self.messages, &noted).into_iter().nth(at).flatten())
    }

    /// The index of the user's last message, and its run if that run belongs to this thread and was interrupted.
    async fn interrupted(&self, app: &App) -> Result<Option<(usize, Option<String>)>, ApiError> {
        let Some(at) = self.messages.iter().rposition(is_from_user) else { return Ok(None) };
        let Some(run_id) = self.messages[at]["additional_kwargs"]["run_id"].as_str() else { return Ok(None) };
        let run = run(app, run_id).await?;
        let interrupted = run.is_some_and(|run| {
            run.thread_id == self.state.key.thread.as_str() && run.reported_status() == RunStatus::Interrupted
        });
        Ok(interrupted.then(|| (at, Some(run_id.to_owned()))))
    }

    /// The checkpoint before the user's message with this id.
    async fn base_before(&self, app: &App, message: &str) -> Result<CheckpointId, ApiError> {
        let thread = &self.state.key.thread;
        match lineage::base_before(app.threads.accessor(), thread, &self.state, message).await {
            Ok(Base::At(base)) => Ok(base),
            Ok(Base::Nothing) => Err(ApiError::conflict(NOTHING_BEFORE)),
            Ok(Base::Unknown) => Err(ApiError::conflict(NOT_LOCATED)),
            Ok(Base::Pruned) => Err(ApiError::conflict(NOT_RESOLVED)),
            Err(error) if error.is_integrity() => {
                tracing::warn!(%thread, %error, "cannot repeat a turn");
                Err(ApiError::conflict(NOT_RESOLVED))
            }
            Err(LineageError::Read(error)) => Err(inspect_failed(error)),
            Err(error) => Err(ApiError::internal(INSPECT_FAILED, &error)),
        }
    }
}

/// These routes do not map engine errors (service reference, "Run routes").
#[allow(clippy::needless_pass_by_value, reason = "handed to `map_err`")]
fn read_failed(error: threadkeep::Error) -> ApiError {
    ApiError::internal(READ_FAILED, &error)
}

#[allow(clippy::needless_pass_by_value, reason = "handed to `map_err`")]
fn inspect_failed(error: threadkeep::Error) -> ApiError {
    ApiError::internal(INSPECT_FAILED, &error)
}

async fn run(app: &App, run_id: &str) -> Result<Option<RunRow>, ApiError> {
    app.records.runs().get(run_id).await.or_internal(READ_FAILED)
}

fn id_of(message: &Value) -> Option<&str> {
    message["id"].as_str().filter(|id| !id.is_empty())
}

/// The user's message as the input of a new run, without data of the original run.
fn replayed(question: &Value) -> Value {
    let mut question = question.clone();
    serialize::complete_message(&mut question);
    if let Some(kwargs) = question["additional_kwargs"].as_object_mut() {
        kwargs.remove("run_id");
        kwargs.remove("svc_seq");
    }
    question
}

fn with_title(question: Value, title: Option<Value>) -> Map<String, Value> {
    let title = title.filter(Value::is_string).map(|title| ("title".to_owned(), title));
    [(MESSAGES_CHANNEL.to_owned(), json!([question]))].into_iter().chain(title).collect()
}

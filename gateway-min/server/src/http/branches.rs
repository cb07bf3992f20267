//! Branching a thread, and copying it.

use std::io;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use chrono::Utc;
use serde::Serialize;
use serde_json::{Map, Value, json};
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::ThreadId;
use threadkeep::state::StateSnapshot;
use threadkeep::{Error, deletion};
use threadkeep_agent::serialize::time;
use threadkeep_agent::tools;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::auth::Caller;
use super::error::{ApiError, OrApiError as _};
use super::exclusive::exclusively;
use super::extract::{ApiJson, ApiPath, ThreadPath};
use super::fields::{Fields, FromFields};
use super::schema::{ErrorBody, Gated};
use super::threads::{Thread, absent, existing};
use crate::app::App;
use crate::runs::admission::seed_runs;
use crate::threads::branch::{self, TurnEnd};
use crate::threads::lineage::{self, Base, LineageError};
use threadkeep_records::{
    BRANCH_SEED_PREFIX, DISPLAY_NAME_MAX_CHARS, NewThread, RecordsError, ThreadRow, WriterKind, persistently,
};

const FIND_FAILED: &str = "Failed to find branch checkpoint";
const INSPECT_FAILED: &str = "Failed to inspect checkpoint history";
const CREATE_FAILED: &str = "Failed to create branch";
const COPY_FAILED: &str = "Failed to copy thread";
const BUSY: &str = "Thread has work in flight. Branch it after the work finishes.";
const COPY_BUSY: &str = "Thread has work in flight. Copy it after the work finishes.";
const TURN_GONE: &str = "This turn can no longer be branched from.";
const SIDECAR_ONLY: &str = "Branching is only available in the main conversation.";

/// Metadata of a thread that accompanies another one and has no turns of its own to branch from. Only the client that
/// creates the thread can set it.
pub(super) const SIDECAR_KEY: &str = "svc_sidecar";
/// Metadata of a branch, and of its first two checkpoints.
const BRANCH_KEY: &str = "svc_branch";
/// Metadata of a branch that names its source.
pub(super) const PARENTAGE_KEYS: [&str; 4] = [PARENT_THREAD, PARENT_CHECKPOINT, PARENT_MESSAGE, BRANCHED_AT];
const PARENT_THREAD: &str = "branch_parent_thread_id";
const PARENT_CHECKPOINT: &str = "branch_parent_checkpoint_id";
const PARENT_MESSAGE: &str = "branch_parent_message_id";
const BRANCHED_AT: &str = "branch_created_at";

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(branch_thread)).routes(routes!(copy_thread))
}

/// Where to branch.
#[derive(Debug, ToSchema)]
struct BranchThread {
    /// The last answer of the turn.
    #[schema(min_length = 1)]
    message_id: String,
    /// All answers of that turn.
    #[schema(required = false)]
    message_ids: Vec<String>,
    /// The title of the branch [default: the turn's title].
    #[schema(max_length = 256)]
    title: Option<String>,
}

impl FromFields for BranchThread {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let message_id = fields.field("message_id").required().text_sized(&(1..=usize::MAX));
        Self {
            message_id: message_id.unwrap_or_default(),
            message_ids: fields.field("message_ids").texts().unwrap_or_default(),
            title: fields.field("title").nullable().text_sized(&(0..=DISPLAY_NAME_MAX_CHARS)),
        }
    }
}

/// A branch.
#[derive(Debug, Serialize, ToSchema)]
struct Branch {
    /// The new thread.
    thread_id: String,
    /// Its source.
    parent_thread_id: String,
    /// The checkpoint of the source whose state the branch starts with.
    parent_checkpoint_id: String,
    /// The requested answer.
    branched_from_message_id: String,
    /// `current_thread_best_effort` if the thread's files were copied, `not_found` if it has none, `failed`, or
    /// `skipped_historical_turn`, because only the current files are stored.
    workspace_clone_mode: &'static str,
    /// Whether the branch's events contain the conversation so far: `seeded`, `skipped_empty` or `failed`.
    history_seed_mode: &'static str,
}

/// Branch a thread at the end of a turn.
///
/// The branch is a separate thread: later changes to the source do not affect it. The source is not changed.
#[utoipa::path(post, path = "/api/threads/{thread_id}/branches", tag = "threads", params(("thread_id" = String, Path)),
    request_body = BranchThread,
    responses((status = 200, description = "The branch", body = Branch),
        (status = 404, description = "No such thread", body = ErrorBody), Gated))]
async fn branch_thread(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    Caller(caller): Caller,
    ApiJson(body): ApiJson<BranchThread>,
) -> Result<Json<Branch>, ApiError> {
    app.threads.accessor().check(&thread_id, None).await.or_engine(&thread_id, FIND_FAILED)?;
    let row = existing(&app, &thread_id, FIND_FAILED).await?;
    if row.metadata.get(SIDECAR_KEY).is_some_and(|flag| flag == true) {
        return Err(ApiError::conflict(SIDECAR_ONLY));
    }
    let work = make(Arc::clone(&app), thread_id.clone(), row, body);
    let (of, kind) = ((&app, &caller), WriterKind::Branch);
    exclusively(of, &thread_id, kind, BUSY.to_owned(), CREATE_FAILED, work).await.map(Json)
}

/// The states that a branch starts with: before the turn, if the source has that, and after it.
struct Found {
    base: Option<StateSnapshot>,
    end: StateSnapshot,
    latest: bool,
}

async fn make(
    app: Arc<App>,
    source: ThreadId,
    row: ThreadRow,
    body: BranchThread,
) -> Result<Branch, ApiError> {
    let found = find(&app, &source, &body).await?;
    let branch = ThreadId::from(Uuid::new_v4().to_string());
    let now = time(Utc::now());
    let parentage = Map::from_iter([
        (BRANCH_KEY.to_owned(), json!(true)),
        (PARENT_THREAD.to_owned(), json!(source.as_str())),
        (PARENT_CHECKPOINT.to_owned(), json!(found.end.key.id.to_string())),
        (PARENT_MESSAGE.to_owned(), json!(body.message_id)),
        (BRANCHED_AT.to_owned(), json!(now)),
    ]);
    let mut extra = parentage.clone();
    extra.extend(["created_at", "updated_at"].map(|key| (key.to_owned(), json!(now))));
    let title = body.title.as_deref();
    let head =
        branch::write(app.threads.accessor(), &branch, found.base.as_ref(), &found.end, title, &extra).await;
    let named = head.or_engine(&branch, CREATE_FAILED).and_then(|head| {
        let title = head.json("title").or_internal(CREATE_FAILED)?;
        Ok((title.and_then(|title| title.as_str().map(str::to_owned)), head))
    });
    let (display_name, head) = match named {
        Ok(named) => named,
        Err(error) => return Err(undone(&app, &branch, error).await),
    };
    let workspace_clone_mode =
        if found.latest { branch_files(&app, &source, &branch).await } else { "skipped_historical_turn" };
    // Last, so that no client finds an incomplete branch.
    let new = NewThread {
        thread_id: branch.to_string(),
        assistant_id: row.assistant_id,
        user_id: row.user_id,
        display_name,
        metadata: parentage,
    };
    record(&app, &branch, new, CREATE_FAILED).await?;
    Ok(Branch {
        history_seed_mode: seed(&app, &branch, &head).await,
        thread_id: branch.to_string(),
        parent_thread_id: source.to_string(),
        parent_checkpoint_id: found.end.key.id.to_string(),
        branched_from_message_id: body.message_id,
        workspace_clone_mode,
    })
}

/// Finds the states in the source as it is now.
async fn find(app: &App, source: &ThreadId, body: &BranchThread) -> Result<Found, ApiError> {
    let accessor = app.threads.accessor();
    let mut answers = body.message_ids.clone();
    answers.push(body.message_id.clone());
    let turn = branch::turn_end(accessor, source, &answers).await.or_engine(source, FIND_FAILED)?;
    let Some(TurnEnd { state, question, latest }) = turn else {
        return Err(ApiError::conflict(TURN_GONE));
    };
    let base = match lineage::base_before(accessor, source, &state, &question).await {
        Ok(Base::At(base)) => Some(base),
        Ok(Base::Nothing | Base::Unknown | Base::Pruned) => None,
        Err(error) if error.is_integrity() => {
            tracing::warn!(thread = %source, %error, "cannot branch from a turn");
            return Err(ApiError::conflict(TURN_GONE));
        }
        Err(LineageError::Read(error)) => return Err(ApiError::from_engine(source, INSPECT_FAILED, &error)),
        Err(error) => return Err(ApiError::internal(INSPECT_FAILED, &error)),
    };
    let whole = async |id| {
        let state = accessor.get(source, Some(id)).await.or_engine(source, INSPECT_FAILED)?;
        state.ok_or_else(|| ApiError::conflict(TURN_GONE))
    };
    let base = match base {
        Some(base) => Some(whole(base).await?),
        None => None,
    };
    Ok(Found { base, end: whole(state.key.id).await?, latest })
}

/// Creates the row of a thread whose checkpoints are written. If the row is refused, nothing of the thread remains; if
/// it may be stored, all of it does.
async fn record(
    app: &App,
    thread: &ThreadId,
    new: NewThread,
    failed: &'static str,
) -> Result<ThreadRow, ApiError> {
    match persistently(|| app.records.threads().create(new.clone())).await {
        Ok(created) => Ok(created.row),
        Err(error @ RecordsError::InDoubt { .. }) => Err(ApiError::internal(failed, &error)),
        Err(error) => Err(undone(app, thread, ApiError::internal(failed, &error)).await),
    }
}

/// Removes what was created of a failed branch; returns the original error.
async fn undone(app: &App, branch: &ThreadId, error: ApiError) -> ApiError {
    // Whatever it contains: its id is random, and nobody has got it, so nobody else writes to it or creates it again.
    if let Err(error) = app.threads.accessor().saver().delete_thread(branch).await {
        tracing::warn!(thread = %branch, %error, "checkpoints of a failed branch remain");
    }
    if let Err(error) = tokio::fs::remove_dir_all(app.agents.thread_dir(branch.as_str())).await
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(thread = %branch, %error, "files of a failed branch remain");
    }
    error
}

/// Copies the thread's files; `false` if it has none.
async fn copy_files(app: &App, from: &ThreadId, to: &ThreadId) -> io::Result<bool> {
    let (source, target) = (app.agents.thread_dir(from.as_str()), app.agents.thread_dir(to.as_str()));
    tokio::task::spawn_blocking(move || tools::copy_workspace(&source, &target)).await?
}

/// Copies the thread's files for a branch and returns the outcome: a branch may be without them, and says so.
async fn branch_files(app: &App, from: &ThreadId, to: &ThreadId) -> &'static str {
    match copy_files(app, from, to).await {
        Ok(true) => "current_thread_best_effort",
        Ok(false) => "not_found",
        Err(error) => {
            tracing::warn!(thread = %to, %error, "could not copy the files of a thread");
            "failed"
        }
    }
}

/// Fills the event feed with the conversation before the branch, and returns the outcome.
async fn seed(app: &App, branch: &ThreadId, head: &StateSnapshot) -> &'static str {
    let runs = match head.json(MESSAGES_CHANNEL) {
        Ok(Some(Value::Array(messages))) => seed_runs(&format!("{BRANCH_SEED_PREFIX}{branch}"), messages),
        _ => Vec::new(),
    };
    if runs.is_empty() {
        return "skipped_empty";
    }
    match app.records.events().seed(branch.as_str(), runs).await {
        Ok(_) => "seeded",
        Err(error) => {
            tracing::warn!(thread = %branch, %error, "could not fill the event feed of a branch");
            "failed"
        }
    }
}

/// Copy a thread, with its whole history.
///
/// The copy is a separate thread with the same checkpoints, and with the current files. Runs and their events stay with
/// the source.
#[utoipa::path(post, path = "/api/threads/{thread_id}/copy", tag = "threads", params(("thread_id" = String, Path)),
    responses((status = 200, description = "The copy", body = Thread),
        (status = 404, description = "No such thread", body = ErrorBody), Gated))]
async fn copy_thread(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    Caller(caller): Caller,
) -> Result<Json<Thread>, ApiError> {
    let has_state =
        app.threads.accessor().check(&thread_id, None).await.or_engine(&thread_id, COPY_FAILED)?;
    let row = existing(&app, &thread_id, COPY_FAILED).await?;
    if !has_state {
        return Err(absent(&thread_id));
    }
    let work = copy(Arc::clone(&app), thread_id.clone(), row);
    let (of, kind) = ((&app, &caller), WriterKind::Branch);
    let copied = exclusively(of, &thread_id, kind, COPY_BUSY.to_owned(), COPY_FAILED, work).await?;
    Ok(Json(copied.into()))
}

async fn copy(app: Arc<App>, source: ThreadId, row: ThreadRow) -> Result<ThreadRow, ApiError> {
    let target = ThreadId::from(Uuid::new_v4().to_string());
    let copied = deletion::copy_thread(&**app.threads.accessor().saver(), &source, &target).await;
    if let Err(error) = copied {
        let error: Error = error;
        return Err(undone(&app, &target, ApiError::from_engine(&source, COPY_FAILED, &error)).await);
    }
    // A copy has all that the thread has; its answer has no place to say that the files are missing.
    if let Err(error) = copy_files(&app, &source, &target).await {
        return Err(undone(&app, &target, ApiError::internal(COPY_FAILED, &error)).await);
    }
    let new = NewThread {
        thread_id: target.to_string(),
        assistant_id: row.assistant_id,
        user_id: row.user_id,
        display_name: row.display_name,
        metadata: row.metadata,
    };
    record(&app, &target, new, COPY_FAILED).await
}

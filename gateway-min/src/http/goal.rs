//! The goal of a thread. It is read and written directly through the saver, so mode does not matter.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use chrono::Utc;
use serde::Serialize;
use serde_json::{Value, json};
use threadkeep::Error;
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, CheckpointTuple, Stored};
use threadkeep::id::{ChannelName, ThreadId};
use threadkeep::metadata::{Metadata, Source};
use threadkeep::saver::{CheckpointSelector, Flush, Load, StepCommit};
use threadkeep::value::ChannelValue;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::auth::Caller;
use super::error::ApiError;
use super::exclusive::exclusively;
use super::extract::{ApiJson, ApiPath, ThreadPath};
use super::fields::{Fields, Flaw, FromFields};
use super::schema::ErrorBody;
use crate::agent::goal::{CHANNEL, CONTINUATIONS_MAX, NO_PROGRESS_MAX};
use crate::app::App;
use crate::runs::duration;
use crate::serialize::time;
use crate::store::{NewThread, WriterKind};

const READ_FAILED: &str = "Failed to read the goal";
const WRITE_FAILED: &str = "Failed to write the goal";
const SET_BUSY: &str = "Thread has a run in flight. Set the goal after the run finishes.";
const CLEAR_BUSY: &str = "Thread has a run in flight. Clear the goal after the run finishes.";
const EMPTY: &str = "Goal objective must not be empty.";
/// The longest objective, in characters.
const OBJECTIVE_MAX: usize = 4000;

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(get_goal, put_goal, delete_goal))
}

/// The goal of a thread.
#[derive(Debug, Serialize, ToSchema)]
struct Goal {
    /// Null if there is none.
    #[schema(value_type = Option<Object>, required = true)]
    goal: Value,
}

/// A goal to set. Other fields are ignored.
#[derive(Debug, ToSchema)]
struct SetGoal {
    /// What is to be reached; runs of white space count as one space.
    #[schema(min_length = 1, max_length = 4000)]
    objective: String,
    /// How often the agent may go on by itself.
    #[schema(minimum = 0, maximum = 8, default = 8, required = false)]
    max_continuations: i64,
}

impl FromFields for SetGoal {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let objective = fields.field("objective").required().text_sized(&(1..=OBJECTIVE_MAX));
        let limit = fields.field("max_continuations").integer(&(0..=CONTINUATIONS_MAX));
        let sent = objective.unwrap_or_default();
        let objective = sent.split_whitespace().collect::<Vec<_>>().join(" ");
        if objective.is_empty() && !sent.is_empty() {
            fields.refuse("objective", Flaw::new("value_error", EMPTY), sent.into());
        }
        Self { objective, max_continuations: limit.unwrap_or(CONTINUATIONS_MAX) }
    }
}

/// Read the goal of a thread.
#[utoipa::path(get, path = "/api/threads/{thread_id}/goal", tag = "threads", params(("thread_id" = String, Path)),
    responses((status = 200, description = "The goal", body = Goal)))]
async fn get_goal(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
) -> Result<Json<Goal>, ApiError> {
    let head = head(&app, &thread_id).await.map_err(|error| ApiError::internal(READ_FAILED, &error))?;
    let goal = head.as_ref().map(goal_of).transpose();
    let goal = goal.map_err(|error| ApiError::internal(READ_FAILED, &error))?;
    Ok(Json(Goal { goal: goal.unwrap_or_default() }))
}

/// Set the goal of a thread, which is created if it does not exist.
#[utoipa::path(put, path = "/api/threads/{thread_id}/goal", tag = "threads", params(("thread_id" = String, Path)),
    request_body = SetGoal,
    responses((status = 200, description = "The goal", body = Goal),
        (status = 409, description = "A run or another writer works on the thread", body = ErrorBody),
        (status = 422, description = "The request is not valid", body = ErrorBody)))]
async fn put_goal(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    Caller(caller): Caller,
    ApiJson(body): ApiJson<SetGoal>,
) -> Result<Json<Goal>, ApiError> {
    let now = time(Utc::now());
    let goal = json!({
        "objective": body.objective, "status": "active", "created_at": now, "updated_at": now,
        "continuation_count": 0, "max_continuations": body.max_continuations,
        "no_progress_count": 0, "max_no_progress_continuations": NO_PROGRESS_MAX,
    });
    let new = NewThread {
        thread_id: thread_id.to_string(),
        user_id: Some(caller.user().to_owned()),
        ..NewThread::default()
    };
    let work = set(Arc::clone(&app), thread_id.clone(), new, goal);
    let kind = WriterKind::CheckpointWrite;
    let goal = exclusively(&app, &thread_id, kind, SET_BUSY.to_owned(), WRITE_FAILED, work).await?;
    Ok(Json(Goal { goal }))
}

/// Clear the goal of a thread.
#[utoipa::path(delete, path = "/api/threads/{thread_id}/goal", tag = "threads", params(("thread_id" = String, Path)),
    responses((status = 200, description = "There is no goal", body = Goal),
        (status = 409, description = "A run or another writer works on the thread", body = ErrorBody)))]
async fn delete_goal(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
) -> Result<Json<Goal>, ApiError> {
    let work = clear(Arc::clone(&app), thread_id.clone());
    let kind = WriterKind::CheckpointWrite;
    exclusively(&app, &thread_id, kind, CLEAR_BUSY.to_owned(), WRITE_FAILED, work).await?;
    Ok(Json(Goal { goal: Value::Null }))
}

async fn set(app: Arc<App>, thread: ThreadId, new: NewThread, goal: Value) -> Result<Value, ApiError> {
    let failed = |error: Error| ApiError::internal(WRITE_FAILED, &error);
    let row = app.store.threads().create(new).await;
    let row = row.map_err(|error| ApiError::internal(WRITE_FAILED, &error))?.row;
    let found = if let Some(found) = head(&app, &thread).await.map_err(failed)? {
        found
    } else {
        let extra = json!({"writes": null, "created_at": time(row.created_at)});
        let extra = extra.as_object().cloned().unwrap_or_default();
        app.accessor().create(&thread, extra).await.map_err(failed)?;
        let created = head(&app, &thread).await.map_err(failed)?;
        created.ok_or_else(|| {
            ApiError::internal(WRITE_FAILED, &std::io::Error::other("the first checkpoint is gone"))
        })?
    };
    write(&app, &found, &goal).await.map_err(failed)?;
    Ok(goal)
}

async fn clear(app: Arc<App>, thread: ThreadId) -> Result<(), ApiError> {
    let failed = |error: Error| ApiError::internal(WRITE_FAILED, &error);
    let Some(head) = head(&app, &thread).await.map_err(failed)? else { return Ok(()) };
    if goal_of(&head).map_err(failed)?.is_null() {
        return Ok(());
    }
    write(&app, &head, &Value::Null).await.map_err(failed)
}

/// The head, with the goal only.
async fn head(app: &App, thread: &ThreadId) -> threadkeep::Result<Option<CheckpointTuple>> {
    let load = Load::Only([CHANNEL.into()].into());
    app.accessor().saver().get(&CheckpointSelector::head(thread).loading(load)).await
}

fn goal_of(head: &CheckpointTuple) -> threadkeep::Result<Value> {
    let entry = head.checkpoint.channels.get(CHANNEL);
    let value = entry.and_then(|entry| entry.stored.value()).map(ChannelValue::to_json);
    Ok(value.transpose()?.unwrap_or_default())
}

/// Repeats the head with another goal. All else is as the head stores it, the marker and the counters included; the goal
/// has a version of its own. Rows of tasks that ran from the head go along.
async fn write(app: &App, head: &CheckpointTuple, goal: &Value) -> threadkeep::Result<()> {
    let (saver, ids) = (app.accessor().saver(), app.accessor().ids());
    let id = ids.checkpoint_after(Some(head.checkpoint.id));
    let last = head.checkpoint.channels.values().map(|entry| entry.version).max();
    let held = head.checkpoint.channels.iter();
    let mut channels: std::collections::BTreeMap<ChannelName, ChannelEntry> = held
        .map(|(name, entry)| (name.clone(), ChannelEntry { version: entry.version, stored: Stored::Held }))
        .collect();
    let stored = Stored::Value(ChannelValue::from_json(goal)?);
    channels.insert(CHANNEL.into(), ChannelEntry { version: ids.version_after(last), stored });
    let mut extra = head.metadata.extra.clone();
    extra.extend(duration::newest_notes(&**saver, &head.key(), &head.metadata.extra).await?.entries());
    extra.insert("writes".to_owned(), json!({ CHANNEL: { CHANNEL: goal } }));
    extra.insert("updated_at".to_owned(), json!(time(Utc::now())));
    let commit = StepCommit {
        thread: head.thread.clone(),
        namespace: head.namespace.clone(),
        parent: Some(head.checkpoint.id),
        expected_head: Some(head.checkpoint.id),
        checkpoint: Checkpoint { id, channels, next: head.checkpoint.next.clone(), applied: Vec::new() },
        metadata: Metadata {
            source: Source::Update,
            step: head.metadata.step + 1,
            extra,
            ..head.metadata.clone()
        },
        writes: Vec::new(),
        flush: Flush::Now,
    };
    let key = match saver.commit(commit.clone()).await {
        // Repeating a commit is idempotent, which settles it.
        Err(Error::InDoubt { .. }) => saver.commit(commit).await?,
        other => other?,
    };
    for row in &head.writes {
        saver.put_writes(&key, row).await?;
    }
    Ok(())
}

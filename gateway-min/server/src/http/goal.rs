//! The goal of a thread (see [`goal_state`] for how it is stored).

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use serde_json::{Value, json};
use threadkeep::id::ThreadId;
use threadkeep_agent::goal::CONTINUATIONS_MAX;
use threadkeep_agent::goal_state::{self, EMPTY_OBJECTIVE, OBJECTIVE_MAX};
use threadkeep_agent::serialize::time;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::auth::Caller;
use super::error::{ApiError, OrApiError as _};
use super::exclusive::exclusively;
use super::extract::{ApiJson, ApiPath, ThreadPath};
use super::fields::{Fields, Flaw, FromFields};
use super::schema::ErrorBody;
use super::threads::absent;
use crate::app::App;
use crate::auth::Principal;
use threadkeep_records::{NewThread, WriterKind};

const READ_FAILED: &str = "Failed to read the goal";
const WRITE_FAILED: &str = "Failed to write the goal";
const SET_BUSY: &str = "Thread has a run in flight. Set the goal after the run finishes.";
const CLEAR_BUSY: &str = "Thread has a run in flight. Clear the goal after the run finishes.";

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

/// A goal to set.
#[derive(Debug, ToSchema)]
struct SetGoal {
    /// What to reach; white space is normalised.
    #[schema(min_length = 1, max_length = 4000)]
    objective: String,
    /// How often the agent may continue by itself.
    #[schema(minimum = 0, maximum = 8, default = 8, required = false)]
    max_continuations: i64,
}

impl FromFields for SetGoal {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let objective = fields.field("objective").required().text_sized(&(1..=OBJECTIVE_MAX));
        let limit = fields.field("max_continuations").integer(&(0..=CONTINUATIONS_MAX));
        let sent = objective.unwrap_or_default();
        let objective = goal_state::normalized(&sent);
        if objective.is_empty() && !sent.is_empty() {
            fields.refuse("objective", Flaw::new("value_error", EMPTY_OBJECTIVE), sent.into());
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
    let goal = goal_state::read(app.threads.accessor(), &thread_id).await;
    goal.map(|goal| Json(Goal { goal })).or_internal(READ_FAILED)
}

/// Set the goal of a thread; creates the thread if it does not exist.
#[utoipa::path(put, path = "/api/threads/{thread_id}/goal", tag = "threads", params(("thread_id" = String, Path)),
    request_body = SetGoal,
    responses((status = 200, description = "The goal", body = Goal),
        (status = 409, description = "A run or another writer is active on the thread", body = ErrorBody),
        (status = 422, description = "The request is not valid", body = ErrorBody)))]
async fn put_goal(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    Caller(caller): Caller,
    ApiJson(body): ApiJson<SetGoal>,
) -> Result<Json<Goal>, ApiError> {
    let goal = goal_state::new(&body.objective, body.max_continuations, app.ids.now());
    let new = NewThread {
        thread_id: thread_id.to_string(),
        user_id: Some(caller.user().to_owned()),
        ..NewThread::default()
    };
    let work = set(Arc::clone(&app), caller.clone(), thread_id.clone(), new, goal);
    let kind = WriterKind::CheckpointWrite;
    let goal =
        exclusively((&app, &caller), &thread_id, kind, SET_BUSY.to_owned(), WRITE_FAILED, work).await?;
    Ok(Json(Goal { goal }))
}

/// Clear the goal of a thread.
#[utoipa::path(delete, path = "/api/threads/{thread_id}/goal", tag = "threads", params(("thread_id" = String, Path)),
    responses((status = 200, description = "The goal is cleared", body = Goal),
        (status = 409, description = "A run or another writer is active on the thread", body = ErrorBody)))]
async fn delete_goal(
    State(app): State<Arc<App>>,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
    Caller(caller): Caller,
) -> Result<Json<Goal>, ApiError> {
    let work = clear(Arc::clone(&app), thread_id.clone());
    let kind = WriterKind::CheckpointWrite;
    exclusively((&app, &caller), &thread_id, kind, CLEAR_BUSY.to_owned(), WRITE_FAILED, work).await?;
    Ok(Json(Goal { goal: Value::Null }))
}

async fn set(
    app: Arc<App>,
    caller: Principal,
    thread: ThreadId,
    new: NewThread,
    goal: Value,
) -> Result<Value, ApiError> {
    let row = app.records.threads().create(new).await;
    let row = row.or_internal(WRITE_FAILED)?.row;
    // A run that another user is about to begin creates the record before it has the thread.
    if !row.visible_to(caller.sees()) {
        return Err(absent(&thread));
    }
    let extra = json!({"writes": null, "created_at": time(row.created_at)});
    let extra = extra.as_object().cloned().unwrap_or_default();
    goal_state::set(app.threads.accessor(), &thread, extra, &goal).await.or_internal(WRITE_FAILED)?;
    Ok(goal)
}

async fn clear(app: Arc<App>, thread: ThreadId) -> Result<(), ApiError> {
    let cleared = goal_state::clear(app.threads.accessor(), &thread).await;
    cleared.or_internal(WRITE_FAILED)
}

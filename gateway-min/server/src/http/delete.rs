//! Deletes a thread and everything that belongs to it.

use std::io;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep::state::SeenThread;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::auth::{Caller, check_thread};
use super::error::{ApiError, OrApiError as _};
use super::exclusive::refused;
use super::extract::ApiPath;
use super::fields::{Fields, FromFields, Pattern};
use super::schema::ErrorBody;
use super::threads::{absent, has_checkpoint};
use crate::app::App;
use crate::auth::Principal;
use threadkeep_records::{CHILD_PREFIX, Reservation, WriterKind};
use threadkeep_subagents::{CatchUpError, delete_checkpoints};

pub(super) const BUSY: &str = "Thread has work in flight. Delete it after the work finishes.";
const DELETE_FAILED: &str = "Failed to delete thread";

/// The routes of this file.
pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(delete_thread))
}

/// The result of a deletion.
#[derive(Debug, Serialize, ToSchema)]
struct Deleted {
    /// Always true.
    success: bool,
    /// What happened to the thread's working directory.
    message: String,
}

/// The path of a thread, including ids that this gateway would not accept for a new one.
struct AnyThreadPath {
    thread_id: ThreadId,
}

impl FromFields for AnyThreadPath {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self { thread_id: fields.field("thread_id").required().text().unwrap_or_default().into() }
    }
}

/// Delete a thread.
///
/// Deletes its checkpoints, its working directory, its runs with their events, and its record, in either mode. If
/// another process has written to the thread meanwhile, that is a 409 and nothing is deleted; a damaged thread, which
/// cannot be compared, is deleted as it is.
#[utoipa::path(delete, path = "/api/threads/{thread_id}", tag = "threads", params(("thread_id" = String, Path)),
    responses((status = 200, description = "Deleted", body = Deleted),
        (status = 404, description = "No such thread", body = ErrorBody),
        (status = 409, description = "A run or another writer is active on it", body = ErrorBody)))]
async fn delete_thread(
    State(app): State<Arc<App>>,
    Caller(caller): Caller,
    ApiPath(AnyThreadPath { thread_id }): ApiPath<AnyThreadPath>,
) -> Result<Json<Deleted>, ApiError> {
    // A separate task, so that a client that disconnects does not stop it half-way.
    let threads = Arc::clone(&app.threads);
    let task = threads.spawn(async move { delete(&app, &caller, &thread_id).await });
    let message = task.await.or_internal(DELETE_FAILED)??;
    Ok(Json(Deleted { success: true, message }))
}

/// Deletes the thread. Returns what happened to its working directory.
///
/// # Errors
/// 404 if there is none, 409 with [`BUSY`], 500.
pub(super) async fn delete(app: &App, caller: &Principal, thread: &ThreadId) -> Result<String, ApiError> {
    if thread.as_str().starts_with(CHILD_PREFIX) {
        // A subagent's checkpoints belong to the thread that delegated.
        return Err(absent(thread));
    }
    let row = app.records.threads().get(thread.as_str(), None).await.or_internal(DELETE_FAILED)?;
    if row.is_none()
        && !has_checkpoint(app, thread, DELETE_FAILED).await?
        // What an earlier attempt, which was cut off, has left.
        && app.records.executions().number(thread.as_str()).await.or_internal(DELETE_FAILED)? == 0
    {
        return Err(absent(thread));
    }
    let reserved = app.threads.reserve(thread.as_str(), WriterKind::Delete).await;
    let reservation = reserved.map_err(|error| refused(&error, BUSY, DELETE_FAILED))?;
    // Wait for the last write of a run that has just ended.
    let _lock = app.threads.lock(thread.as_str()).await;
    let deleted = async {
        // Under the reservation, no other user can become its owner.
        check_thread(app, caller, thread).await?;
        let seen = app.threads.accessor().look(thread).await.or_internal(DELETE_FAILED)?;
        // A process that stood still may have lost its reservation; then it saw what somebody else has made since.
        if !reservation.is_held().await.or_internal(DELETE_FAILED)? {
            return Err(ApiError::conflict(BUSY));
        }
        delete_contents(app, thread, seen).await
    };
    match deleted.await {
        Ok(message) => delete_records(app, reservation).await.map(|()| message),
        Err(error) => {
            if let Err(error) = reservation.release().await {
                tracing::warn!(%thread, %error, "releasing the thread's reservation in the background");
            }
            Err(error)
        }
    }
}

/// Deletes the checkpoints that were seen, those of the subagents, then the working directory. The records go last, so that a deletion that failed
/// here can be repeated.
pub(super) async fn delete_contents(
    app: &App,
    thread: &ThreadId,
    seen: SeenThread,
) -> Result<String, ApiError> {
    match delete_checkpoints(&app.records, app.threads.accessor(), thread, seen).await {
        Err(CatchUpError::Engine(Error::Stale { .. })) => return Err(ApiError::conflict(BUSY)),
        done => done.or_internal(DELETE_FAILED)?,
    }
    if !Pattern::THREAD_ID.matches(thread.as_str()) {
        // Such an id could name a directory outside the state directory.
        return Ok("Skipped local data cleanup for legacy thread ID".to_owned());
    }
    match tokio::fs::remove_dir_all(app.agents.thread_dir(thread.as_str())).await {
        Ok(()) => Ok(format!("Deleted local thread data for {thread}")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(format!("No local data for {thread}")),
        Err(error) => Err(ApiError::internal(DELETE_FAILED, &error)),
    }
}

async fn delete_records(app: &App, reservation: Reservation) -> Result<(), ApiError> {
    let deleted = app.records.delete_thread(reservation).await;
    deleted.map(|_| ()).or_internal(DELETE_FAILED)
}

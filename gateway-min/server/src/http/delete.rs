//! Deletes a thread and everything that belongs to it.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
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
use threadkeep_subagents::{DeletionError, delete_checkpoints, remove_directory};

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
    if row.as_ref().is_some_and(|row| !row.visible_to(caller.sees())) {
        // Before the reservation, which would keep its owner's runs off, and show whether one is at work.
        return Err(absent(thread));
    }
    if row.is_none()
        && !has_checkpoint(app, thread, DELETE_FAILED).await?
        // What an earlier attempt, which was cut off, has left.
        && app.records.executions().number(thread.as_str()).await.or_internal(DELETE_FAILED)? == 0
        && !app.records.events().has_remains(thread.as_str()).await
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
        reservation.ensure_held().await.map_err(|error| failed(&error.into()))?;
        delete_contents(app, &reservation, seen).await
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

/// Deletes the checkpoints of the reserved thread that were seen, those of the subagents, then the working
/// directory. The records go last, so that a deletion that failed here can be repeated.
pub(super) async fn delete_contents(
    app: &App,
    reservation: &Reservation,
    seen: SeenThread,
) -> Result<String, ApiError> {
    let deleted = delete_checkpoints(&app.records, app.threads.accessor(), reservation, seen).await;
    deleted.map_err(|error| failed(&error))?;
    let thread = reservation.thread_id();
    if !Pattern::THREAD_ID.matches(thread) {
        // Such an id could name a directory outside the state directory.
        return Ok("Skipped local data cleanup for legacy thread ID".to_owned());
    }
    let removed = remove_directory(reservation, &app.agents.thread_dir(thread)).await;
    Ok(if removed.map_err(|error| failed(&error))? {
        format!("Deleted local thread data for {thread}")
    } else {
        format!("No local data for {thread}")
    })
}

async fn delete_records(app: &App, reservation: Reservation) -> Result<(), ApiError> {
    let deleted = app.records.delete_thread(reservation).await;
    deleted.map(|_| ()).map_err(|error| failed(&error.into()))
}

/// The response to a deletion that failed, or that another process has overtaken.
fn failed(error: &DeletionError) -> ApiError {
    match error {
        overtaken if overtaken.is_overtaken() => ApiError::conflict(BUSY),
        DeletionError::Engine(error) => ApiError::internal(DELETE_FAILED, error),
        DeletionError::Records(error) => ApiError::internal(DELETE_FAILED, error),
        DeletionError::Directory { .. } => ApiError::internal(DELETE_FAILED, error),
    }
}

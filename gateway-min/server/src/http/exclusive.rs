//! Writing to a thread's checkpoints from a route.

use std::sync::Arc;

use threadkeep::id::ThreadId;

use super::error::ApiError;
use crate::app::App;
use crate::store::{StoreError, WriterKind};

/// Runs `work` while nothing else writes to the thread, in this process or another: under a reservation in the
/// database, and behind the last write of a run that has just ended.
///
/// The work is a task of its own, so that a client that leaves does not stop it half-way. The thread is free again
/// when this returns.
///
/// # Errors
/// 409 with `busy` if a run or another writer holds the thread, 500 with `failed` if that cannot be told, and what
/// `work` returns.
pub(crate) async fn exclusively<T: Send + 'static>(
    app: &Arc<App>,
    thread: &ThreadId,
    kind: WriterKind,
    busy: String,
    failed: &'static str,
    work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    let (background, app, thread) = (&app.background, Arc::clone(app), thread.clone());
    let task = background.spawn(async move {
        let reserved = app.store.runs().reserve(thread.as_str(), kind).await;
        let reservation = reserved.map_err(|error| refused(&error, busy, failed))?;
        let result = {
            let _lock = app.locks.lock(thread.as_str()).await;
            work.await
        };
        if let Err(error) = reservation.release().await {
            tracing::warn!(%thread, %error, "the thread is given back in the background");
        }
        result
    });
    task.await.map_err(|error| ApiError::internal(failed, &error))?
}

/// What a failed reservation is answered with.
pub(crate) fn refused(error: &StoreError, busy: impl Into<String>, failed: &'static str) -> ApiError {
    if error.is_conflict() { ApiError::conflict(busy) } else { ApiError::internal(failed, error) }
}

//! Exclusive access to a thread's checkpoints for routes that write.

use std::sync::Arc;

use threadkeep::id::ThreadId;

use super::auth::check_thread;
use super::error::ApiError;
use crate::app::App;
use crate::auth::Principal;
use crate::threads::Refused;
use threadkeep_records::{RecordsError, WriterKind};

/// Runs `work` while no other writer, in this process or another, writes to the thread: under a reservation in the
/// database, after the note that a read has caused, and after the last write of a run that has just ended. The thread
/// may have got another owner since the request was admitted, so that is checked first.
///
/// The work is a separate task, so that a client that disconnects does not stop it half-way. The thread is released
/// when this returns.
///
/// # Errors
/// 404 if the thread is another user's by then, 409 with `busy` if a run or another writer holds it, 500 with `failed`
/// if the reservation fails, and errors of `work`.
pub(crate) async fn exclusively<T: Send + 'static>(
    (app, caller): (&Arc<App>, &Principal),
    thread: &ThreadId,
    kind: WriterKind,
    busy: String,
    failed: &'static str,
    work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    let (of, caller, target) = (Arc::clone(app), caller.clone(), thread.clone());
    // In a box, because the futures around it would each have a copy of it.
    let work = Box::pin(work);
    let work = async move {
        check_thread(&of, &caller, &target).await?;
        work.await
    };
    written(app.threads.exclusively(thread, kind, work).await, busy, failed)
}

/// The response to what a writer did, or to its refusal.
///
/// # Errors
/// As [`exclusively`].
pub(super) fn written<T>(
    done: Result<Result<T, ApiError>, Refused>,
    busy: String,
    failed: &'static str,
) -> Result<T, ApiError> {
    match done {
        Ok(result) => result,
        Err(Refused::Reservation(error)) => Err(refused(&error, busy, failed)),
        Err(Refused::Died(error)) => Err(ApiError::internal(failed, &error)),
    }
}

/// The response to a failed reservation.
pub(crate) fn refused(error: &RecordsError, busy: impl Into<String>, failed: &'static str) -> ApiError {
    if error.is_conflict() { ApiError::conflict(busy) } else { ApiError::internal(failed, error) }
}

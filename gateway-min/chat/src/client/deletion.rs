//! Deletes a thread with everything that belongs to it.

use std::io::ErrorKind;

use threadkeep::id::ThreadId;
use threadkeep::state::StateAccessor;
use threadkeep_records::{OperationKind, RecordsError, Reservation, WriterKind};
use threadkeep_subagents::delete_checkpoints;

use super::ClientError;
use super::agent::Core;

/// Deletes the thread's checkpoints, those of its subagents and its directory, then its records: a deletion that failed can be
/// repeated.
pub(super) async fn delete(
    core: &Core,
    accessor: &StateAccessor,
    thread: &ThreadId,
) -> Result<(), ClientError> {
    let records = core.delegation.records().await?;
    let reservation = records.runs().reserve(thread.as_str(), WriterKind::Delete).await?;
    match contents(core, accessor, &reservation, thread).await {
        Ok(()) => {
            records.delete_thread(reservation).await?;
            Ok(())
        }
        Err(error) => {
            if let Err(error) = reservation.release().await {
                tracing::warn!(%thread, %error, "releasing the thread's reservation in the background");
            }
            Err(error)
        }
    }
}

async fn contents(
    core: &Core,
    accessor: &StateAccessor,
    reservation: &Reservation,
    thread: &ThreadId,
) -> Result<(), ClientError> {
    let records = core.delegation.records().await?;
    let seen = accessor.look(thread).await?;
    // A process that stood still may have lost its reservation; then it saw what somebody else has made since.
    if !reservation.is_held().await? {
        let (thread_id, holder) = (thread.to_string(), OperationKind::CheckpointWrite);
        return Err(RecordsError::Conflict { thread_id, holder }.into());
    }
    delete_checkpoints(records, accessor, thread, seen).await?;
    let directory = core.agents.thread_dir(thread.as_str());
    match tokio::fs::remove_dir_all(&directory).await {
        Err(source) if source.kind() != ErrorKind::NotFound => {
            Err(ClientError::Directory { directory, source })
        }
        _ => Ok(()),
    }
}

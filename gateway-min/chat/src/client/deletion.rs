//! Deletes a thread with everything that belongs to it.

use threadkeep::id::ThreadId;
use threadkeep::state::StateAccessor;
use threadkeep_records::{OperationKind, Records, RecordsError, Reservation, WriterKind};
use threadkeep_subagents::{DeletionError, delete_checkpoints, remove_directory};

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
    let deleted = match contents(core, records, accessor, &reservation, thread).await {
        Ok(()) => records.delete_thread(reservation).await.map(|_| ()).map_err(DeletionError::from),
        Err(error) => {
            if let Err(error) = reservation.release().await {
                tracing::warn!(%thread, %error, "releasing the thread's reservation in the background");
            }
            Err(error)
        }
    };
    deleted.map_err(|error| match error {
        DeletionError::Records(error) if error.is_lost_reservation() => {
            let (thread_id, holder) = (thread.to_string(), OperationKind::CheckpointWrite);
            RecordsError::Conflict { thread_id, holder }.into()
        }
        DeletionError::Engine(error) => error.into(),
        DeletionError::Records(error) => error.into(),
        DeletionError::Directory { directory, source } => ClientError::Directory { directory, source },
    })
}

async fn contents(
    core: &Core,
    records: &Records,
    accessor: &StateAccessor,
    reservation: &Reservation,
    thread: &ThreadId,
) -> Result<(), DeletionError> {
    let seen = accessor.look(thread).await?;
    // A process that stood still may have lost its reservation; then it saw what somebody else has made since.
    reservation.ensure_held().await?;
    delete_checkpoints(records, accessor, reservation, seen).await?;
    remove_directory(reservation, &core.agents.thread_dir(thread.as_str())).await.map(|_| ())
}

//! Deletes a conversation with those of its subagents.

use threadkeep::id::ThreadId;
use threadkeep::state::{SeenThread, StateAccessor};
use threadkeep_records::Records;

use crate::delegator::CatchUpError;

/// Deletes the checkpoints of `thread`, which were seen, then those of its subagents. Not the records: they come after
/// everything else, so that a deletion that failed can be repeated.
///
/// # Errors
/// [`threadkeep::Error::Stale`] if somebody else has written to the thread since: it stays whole, with its subagents. What
/// the stores return.
pub async fn delete_checkpoints(
    records: &Records,
    accessor: &StateAccessor,
    thread: &ThreadId,
    seen: SeenThread,
) -> Result<(), CatchUpError> {
    accessor.delete_seen(seen).await?;
    // From now on no worker begins another item of the thread.
    records.batches().cancel_of_thread(thread.as_str()).await?;
    for child in records.executions().child_threads(thread.as_str()).await? {
        accessor.delete_thread(&ThreadId::from(child.as_str())).await?;
    }
    Ok(())
}

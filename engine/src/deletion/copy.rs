//! Copies a thread.

use crate::error::{Error, Result};
use crate::id::ThreadId;
use crate::saver::Saver;

/// Copies a whole thread, with every branch, namespace and pending write, to a new thread. The copy is independent:
/// later changes to the source do not affect it. Ids stay the same. Returns the number of checkpoints.
///
/// # Errors
/// [`Error::InvalidInput`] if the source does not exist or the target does; those of the saver. Then nothing was
/// changed, unless it is [`Error::InDoubt`].
pub async fn copy_thread(saver: &dyn Saver, from: &ThreadId, to: &ThreadId) -> Result<usize> {
    match saver.copy_thread(from, to).await {
        Ok(0) => Err(Error::InvalidInput(format!("thread {from} cannot be copied: it does not exist"))),
        Err(Error::Stale { .. }) => Err(Error::InvalidInput(format!(
            "thread {from} cannot be copied to thread {to}, which already exists; choose another id or delete it first"
        ))),
        copied => copied,
    }
}

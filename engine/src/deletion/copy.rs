//! Copying a thread.

use crate::error::{Error, Result};
use crate::id::ThreadId;
use crate::saver::{Revision, Rewrite, Saver};

/// Copies everything of a thread, with every branch, namespace and pending write, to a thread that is not there. The copy
/// is its own: what becomes of the source later does not touch it. Ids stay the same. Answers the number of checkpoints.
///
/// # Errors
/// [`Error::InvalidInput`] if the source is not there, or the target is; those of the saver. Then nothing was changed,
/// unless it is [`Error::InDoubt`].
pub async fn copy_thread(saver: &dyn Saver, from: &ThreadId, to: &ThreadId) -> Result<usize> {
    let source = saver.read_thread(from).await?;
    if source.checkpoints.is_empty() {
        return Err(Error::InvalidInput(format!("thread {from} cannot be copied: it is not there")));
    }
    let mut put: Vec<_> = source.checkpoints.into_values().collect();
    for tuple in &mut put {
        tuple.thread = to.clone();
    }
    let count = put.len();
    let rewrite = Rewrite { put, ..Rewrite::default() };
    match saver.rewrite_thread(to, &Revision::absent(), rewrite).await {
        Err(Error::Stale { .. }) => Err(Error::InvalidInput(format!(
            "thread {from} cannot be copied to thread {to}, which is there already; choose another id or delete it first"
        ))),
        done => done.map(|()| count),
    }
}

//! Settling a commit whose outcome is in doubt.

use super::{CheckpointSelector, Load, Saver, StepCommit};
use crate::checkpoint::CheckpointKey;
use crate::error::{Error, Result};

/// Commits a superstep, and tries once to settle an outcome in doubt. What cannot be settled stays in doubt, whatever
/// the second call answers: that one failing says nothing about the first.
///
/// The second call repeats the commit, unless that is the first of its namespace. Nothing would hold a repeated first
/// commit back from bringing a thread back that somebody has deleted meanwhile, so for that one the store is only read.
///
/// # Errors
/// As [`Saver::commit`].
pub async fn commit(saver: &dyn Saver, step: StepCommit) -> Result<CheckpointKey> {
    let key = step.key();
    let doubt = match saver.commit(step.clone()).await {
        Err(doubt @ Error::InDoubt { .. }) => doubt,
        settled => return settled,
    };
    if step.parent.is_none() {
        let read = saver.get(&CheckpointSelector::at(&key).loading(Load::None)).await;
        return if matches!(read, Ok(Some(_))) { Ok(key) } else { Err(doubt) };
    }
    match saver.commit(step).await {
        Ok(key) => Ok(key),
        // The checkpoint is not there, and what it was to follow is no longer the head.
        Err(absent @ (Error::Conflict { .. } | Error::NotFound { .. })) => Err(absent),
        // Reported once only, and worse than a commit in doubt.
        Err(lost @ Error::HistoryLost { .. }) => Err(lost),
        Err(_) => Err(doubt),
    }
}

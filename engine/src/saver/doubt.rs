//! Resolves a commit whose outcome is in doubt.

use super::{CheckpointSelector, Load, Saver, StepCommit};
use crate::checkpoint::CheckpointKey;
use crate::error::{Error, Result};
use crate::id::CheckpointId;

/// Commits a superstep, and tries once to resolve an outcome in doubt. If that fails, the outcome stays in doubt,
/// whatever the second call returned: its failure says nothing about the first.
///
/// The second call repeats the commit, unless it is the first of its namespace: a repeated first commit could bring
/// back a thread that was deleted meanwhile, so in that case the store is only read.
///
/// # Errors
/// As [`Saver::commit`]. [`Error::Conflict`] also after a doubt, if the head is another writer's and the checkpoint is
/// not there.
pub async fn commit(saver: &dyn Saver, step: StepCommit) -> Result<CheckpointKey> {
    let key = step.key();
    let doubt = match saver.commit(step.clone()).await {
        Err(doubt @ Error::InDoubt { .. }) => doubt,
        settled => return settled,
    };
    if step.parent.is_none() {
        return look_for(saver, key, step.expected_head, doubt).await;
    }
    match saver.commit(step).await {
        Ok(key) => Ok(key),
        // The checkpoint does not exist, and its predecessor is no longer the head.
        Err(absent @ (Error::Conflict { .. } | Error::NotFound { .. })) => Err(absent),
        // Reported only once, and more serious than a commit in doubt.
        Err(lost @ Error::HistoryLost { .. }) => Err(lost.after_doubt()),
        Err(_) => Err(doubt),
    }
}

/// Reads what came of a first commit in doubt.
async fn look_for(
    saver: &dyn Saver,
    key: CheckpointKey,
    expected: Option<CheckpointId>,
    doubt: Error,
) -> Result<CheckpointKey> {
    let at = CheckpointSelector::at(&key).loading(Load::None);
    let head = CheckpointSelector { id: None, ..at.clone() };
    // The head first: a commit that arrives after this read finds the head of another writer, and is refused.
    let head = match saver.get(&head).await {
        Ok(head) => head.map(|tuple| tuple.checkpoint.id),
        Err(error) => return Err(doubt_or(Some(doubt), error)),
    };
    match saver.get(&at).await {
        Ok(Some(_)) => Ok(key),
        Ok(None) if head == expected || head == Some(key.id) => Err(doubt),
        Ok(None) => {
            let CheckpointKey { thread, namespace, .. } = key;
            Err(Error::Conflict { thread, namespace, expected, found: head })
        }
        Err(error) => Err(doubt_or(Some(doubt), error)),
    }
}

/// The error of a call that failed with `error` after an earlier attempt of it was in doubt, if one was: that attempt may be
/// stored, whatever came after it.
pub(crate) fn doubt_or(doubt: Option<Error>, error: Error) -> Error {
    match (doubt, error) {
        (None, error) => error,
        (Some(_), lost @ Error::HistoryLost { .. }) => lost.after_doubt(),
        (Some(doubt), _) => doubt,
    }
}

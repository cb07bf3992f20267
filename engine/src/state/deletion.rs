//! Deleting a thread as the caller saw it.

use std::collections::BTreeSet;

use super::StateAccessor;
use crate::checkpoint::CheckpointTuple;
use crate::error::{Error, Result};
use crate::id::{CheckpointId, ThreadId};
use crate::saver::{ListQuery, Load, LocalKey, Revision, doubt_or};

/// A thread as it was when its deletion was decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenThread {
    thread: ThreadId,
    /// `None` if it could not be read.
    contents: Option<Contents>,
}

/// Checkpoints by which a thread is known again. Those of a thread that is begun later have other ids, and greater ones than
/// most of these, even if a clock is late.
const KNOWN: usize = 100;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Contents {
    revision: Revision,
    /// Its newest checkpoints.
    newest: BTreeSet<LocalKey>,
    /// The smallest id among them, if it has more.
    oldest: Option<CheckpointId>,
}

impl Contents {
    /// Whether none of its checkpoints is among these.
    fn are_gone_from(&self, found: &[LocalKey]) -> bool {
        found.iter().all(|place| !self.newest.contains(place) && Some(place.1) > self.oldest)
    }
}

impl StateAccessor {
    /// Looks at a thread that is to be deleted: at its newest checkpoint, not at its values. A damaged thread, which has no
    /// revision, can be deleted too.
    ///
    /// # Errors
    /// The saver's, except those that say that the thread is damaged.
    pub async fn look(&self, thread: &ThreadId) -> Result<SeenThread> {
        let contents = async {
            // In this order: if the thread changes in between, it has another revision by the time of the deletion.
            let revision = self.saver.revision(thread).await?;
            let newest = self.places(thread, Some(KNOWN)).await?;
            let oldest = newest.last().filter(|_| newest.len() == KNOWN).map(|place| place.1);
            Ok(Contents { revision, newest: newest.into_iter().collect(), oldest })
        };
        let contents = match contents.await {
            Ok(contents) => Some(contents),
            Err(Error::Corrupt { .. } | Error::BrokenLineage { .. } | Error::InvalidInput(_)) => None,
            Err(error) => return Err(error),
        };
        Ok(SeenThread { thread: thread.clone(), contents })
    }

    /// Deletes a thread, in every namespace, unless it has changed since `seen`. A damaged thread has no revision to
    /// compare, so it is deleted if it is still damaged.
    ///
    /// # Errors
    /// [`Error::Stale`] if the thread has changed: nothing is deleted. The saver's.
    pub async fn delete_seen(&self, seen: SeenThread) -> Result<()> {
        let SeenThread { thread, contents } = seen;
        let deleted = match contents {
            Some(contents) => match self.saver.delete_seen(&thread, &contents.revision).await {
                Err(doubt @ Error::InDoubt { .. }) => match self.places(&thread, None).await {
                    // What is there by now was begun by another writer.
                    Ok(found) if contents.are_gone_from(&found) => Ok(()),
                    Ok(_) => Err(doubt),
                    Err(error) => Err(doubt_or(Some(doubt), error)),
                },
                done => done,
            },
            None if self.look(&thread).await?.contents.is_some() => {
                Err(Error::Stale { thread: thread.clone() })
            }
            None => self.saver.delete_thread(&thread).await,
        };
        self.warm.forget(&thread);
        deleted
    }

    /// The newest checkpoints of a thread, in all its namespaces.
    async fn places(&self, thread: &ThreadId, limit: Option<usize>) -> Result<Vec<LocalKey>> {
        let query = ListQuery { namespace: None, limit, load: Load::None, ..ListQuery::new(thread) };
        let place = |tuple: CheckpointTuple| (tuple.namespace, tuple.checkpoint.id);
        Ok(self.saver.list(&query).await?.into_iter().map(place).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Namespace;

    #[test]
    fn a_thread_is_gone_if_only_newer_checkpoints_are_there_that_it_did_not_have() {
        let place = |n: u8| (Namespace::root(), CheckpointId::from_bytes([n; 16]));
        let seen = |oldest: Option<u8>| Contents {
            revision: Revision::absent(),
            newest: [place(7), place(9)].into(),
            oldest: oldest.map(|n| place(n).1),
        };
        for (found, of_all, of_some) in [
            (vec![], true, true),
            (vec![place(10)], true, true),
            (vec![place(8)], true, true),
            (vec![place(6)], true, false),
            (vec![place(10), place(9)], false, false),
            (vec![("nested".into(), place(9).1)], true, true),
        ] {
            assert_eq!(seen(None).are_gone_from(&found), of_all, "{found:?}");
            assert_eq!(seen(Some(7)).are_gone_from(&found), of_some, "{found:?}");
        }
    }
}

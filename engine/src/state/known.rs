//! What a writer knows about the head of a thread.

use std::collections::BTreeSet;

use super::{Plan, StateAccessor, StateSnapshot};
use crate::error::{Error, Result};
use crate::id::{CheckpointId, Namespace, ThreadId};
use crate::saver::Load;

/// The head of a thread as one writer knows it: the one it read, and from then on the one it wrote last.
///
/// Every write of a run is checked against it, so that a writer that stalled while another writer took over its thread
/// gets [`Error::Conflict`] and changes nothing. Never read the head again just to pass that check.
///
/// After a commit in doubt there are two: the head before that commit, and the one it may have created. It may also
/// arrive later, until another commit has moved the head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownHead {
    thread: ThreadId,
    namespace: Namespace,
    id: Option<CheckpointId>,
    /// Commits onto this head whose outcome is unknown. At most one of them is ever stored.
    in_doubt: BTreeSet<CheckpointId>,
}

impl KnownHead {
    /// The thread.
    pub fn thread(&self) -> &ThreadId {
        &self.thread
    }

    /// The head, ignoring a commit in doubt; `None` if the thread had no checkpoint.
    pub fn id(&self) -> Option<CheckpointId> {
        self.id
    }

    /// Whether the outcome of a commit onto this head is unknown.
    pub fn is_in_doubt(&self) -> bool {
        !self.in_doubt.is_empty()
    }

    /// Whether another writer moved the head, if this one was found: it is neither the known one nor one in doubt. A
    /// commit in doubt is refused from then on, so there is nothing to wait for.
    pub fn is_moved_to(&self, found: Option<CheckpointId>) -> bool {
        found != self.id && found.is_none_or(|found| !self.in_doubt.contains(&found))
    }

    /// Takes the head that was found. A commit in doubt that was not found stays in doubt: nothing keeps it out yet.
    ///
    /// # Errors
    /// [`Error::Conflict`] if that is neither the known head nor one in doubt: another writer moved it.
    pub(crate) fn settle(&mut self, found: Option<CheckpointId>) -> Result<()> {
        if self.is_moved_to(found) {
            let (thread, namespace) = (self.thread.clone(), self.namespace.clone());
            return Err(Error::Conflict { thread, namespace, expected: self.id, found });
        }
        if found != self.id {
            self.id = found;
            self.in_doubt.clear();
        }
        Ok(())
    }

    /// Nothing remains of the thread.
    pub(super) fn cleared(&mut self) {
        self.id = None;
        self.in_doubt.clear();
    }
}

impl StateAccessor {
    /// The head of a thread, for a writer to keep: after the gate, without values.
    ///
    /// # Errors
    /// [`Error::ModeMismatch`] from the gate, and the saver's.
    pub async fn known_head(&self, thread: &ThreadId) -> Result<KnownHead> {
        let head = self.tuple(thread, None, Load::None).await?;
        Ok(self.known(thread, head.map(|tuple| tuple.checkpoint.id)))
    }

    pub(crate) fn known(&self, thread: &ThreadId, id: Option<CheckpointId>) -> KnownHead {
        let namespace = self.namespace.clone();
        KnownHead { thread: thread.clone(), namespace, id, in_doubt: BTreeSet::new() }
    }

    /// The state at the known head; `None` if the thread has no checkpoint.
    ///
    /// # Errors
    /// [`Error::Conflict`] if another writer moved the head, and as [`Self::get`].
    pub(crate) async fn get_known(&self, head: &mut KnownHead) -> Result<Option<StateSnapshot>> {
        let found = self.get(&head.thread, None).await?;
        head.settle(found.as_ref().map(|state| state.key.id))?;
        Ok(found)
    }

    /// Commits a step that was planned on the known head, which then becomes the new checkpoint.
    pub(crate) async fn commit_known(&self, head: &mut KnownHead, plan: Plan) -> Result<StateSnapshot> {
        let id = plan.commit.checkpoint.id;
        // Also in doubt if this future is dropped.
        head.in_doubt.insert(id);
        let committed = self.commit(plan).await;
        match &committed {
            Ok(_) => {
                head.id = Some(id);
                head.in_doubt.clear();
            }
            Err(Error::InDoubt { .. }) => {}
            // Only this one is not stored.
            Err(_) => {
                head.in_doubt.remove(&id);
            }
        }
        committed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_in_doubt_may_arrive_until_another_one_has_moved_the_head() {
        let id = |n: u8| CheckpointId::from_bytes([n; 16]);
        let mut head = KnownHead {
            thread: "t".into(),
            namespace: Namespace::root(),
            id: Some(id(1)),
            in_doubt: [id(2), id(3)].into(),
        };
        head.settle(Some(id(1))).unwrap();
        assert!(head.is_in_doubt(), "it may still arrive");
        for found in [1, 2, 3].map(|n| Some(id(n))) {
            assert!(!head.is_moved_to(found), "{found:?}");
        }
        for other in [None, Some(id(4))] {
            assert!(head.is_moved_to(other), "{other:?}");
            assert!(matches!(head.settle(other), Err(Error::Conflict { .. })), "{other:?}");
        }
        head.settle(Some(id(3))).unwrap();
        assert_eq!((head.id(), head.is_in_doubt()), (Some(id(3)), false));
        assert!(matches!(head.settle(Some(id(2))), Err(Error::Conflict { .. })), "it can no longer arrive");
    }
}

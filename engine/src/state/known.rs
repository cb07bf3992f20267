//! What a writer knows about the head of a thread.

use super::{Plan, StateAccessor, StateSnapshot};
use crate::error::{Error, Result};
use crate::id::{CheckpointId, Namespace, ThreadId};
use crate::saver::Load;

/// The head of a thread as one writer knows it: the one it read, and from then on the one it wrote last.
///
/// Every write of a run is checked against it, so that a writer that stalled while another writer took over its thread
/// gets [`Error::Conflict`] and changes nothing. Never read the head again just to pass that check.
///
/// After a commit in doubt there are two: the head before that commit, and the one it may have created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownHead {
    thread: ThreadId,
    namespace: Namespace,
    id: Option<CheckpointId>,
    in_doubt: Option<CheckpointId>,
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

    /// Whether the outcome of the last commit is unknown.
    pub fn is_in_doubt(&self) -> bool {
        self.in_doubt.is_some()
    }

    /// Resolves a commit in doubt with the head that was found.
    ///
    /// # Errors
    /// [`Error::Conflict`] if that is neither the known head nor the one in doubt: another writer moved it.
    pub(crate) fn settle(&mut self, found: Option<CheckpointId>) -> Result<()> {
        if found != self.id && (found.is_none() || found != self.in_doubt) {
            let (thread, namespace) = (self.thread.clone(), self.namespace.clone());
            return Err(Error::Conflict { thread, namespace, expected: self.id, found });
        }
        self.id = found;
        self.in_doubt = None;
        Ok(())
    }

    /// Nothing remains of the thread.
    pub(super) fn cleared(&mut self) {
        self.id = None;
        self.in_doubt = None;
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
        KnownHead { thread: thread.clone(), namespace: self.namespace.clone(), id, in_doubt: None }
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
        // Also in doubt if this future is dropped.
        head.in_doubt = Some(plan.commit.checkpoint.id);
        let committed = self.commit(plan).await;
        match &committed {
            Ok(state) => {
                head.id = Some(state.key.id);
                head.in_doubt = None;
            }
            Err(Error::InDoubt { .. }) => {}
            Err(_) => head.in_doubt = None,
        }
        committed
    }
}

//! Rows that a child has applied. They are final, so a put that would change a stored row looks at the children first.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use threadkeep::id::{CheckpointId, TaskId};

use crate::record::TaskRecord;
use crate::rows::Snapshot;

/// What a write to the rows under a checkpoint does about the children of that. A head has none, and a stored row of another
/// checkpoint hardly ever changes: mostly they need not be read.
pub(crate) enum Children {
    /// They are not read. A write that needs them says so, and writes nothing.
    Unread(AtomicBool),
    /// They are read, while the thread is locked.
    Read,
}

impl Children {
    pub(crate) fn unread() -> Self {
        Self::Unread(AtomicBool::new(false))
    }

    /// The checkpoint whose children are read with the others that are wanted.
    pub(crate) fn of(&self, parent: CheckpointId) -> Option<CheckpointId> {
        matches!(self, Self::Read).then_some(parent)
    }

    /// The tasks that the children of a checkpoint have applied. None if they are not read: then nothing may be written.
    pub(crate) fn applied(
        &self,
        snapshot: &Snapshot,
        ns: &[u8],
        parent: CheckpointId,
    ) -> Option<BTreeSet<TaskId>> {
        if let Self::Unread(are_wanted) = self {
            are_wanted.store(true, Ordering::SeqCst);
            return None;
        }
        let nodes = snapshot.nodes.get(ns).into_iter().flat_map(|nodes| nodes.values());
        let children = nodes.filter(|child| child.record.parent == Some(parent));
        Some(children.flat_map(|child| child.record.applied.iter().copied()).collect())
    }

    /// Whether a write needed them, and wrote nothing.
    pub(crate) fn are_wanted(&self) -> bool {
        matches!(self, Self::Unread(are_wanted) if are_wanted.load(Ordering::SeqCst))
    }
}

/// Whether a task has a row among these.
pub(crate) fn is_stored(rows: &[TaskRecord], task: TaskId) -> bool {
    rows.iter().any(|row| row.task == task)
}

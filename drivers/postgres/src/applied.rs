//! Rows that a child has applied. They are final, so a put that would change a stored row asks first.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use threadkeep::checkpoint::CheckpointKey;
use threadkeep::id::TaskId;
use threadkeep::saver::{Revision, ThreadImage};

use crate::read::revision;
use crate::record::TaskRecord;
use crate::thread::ThreadState;

/// How often the thread is read again because somebody wrote to it between the look at it and the write.
pub(crate) const ROUNDS: usize = 8;

/// The tasks that children of a checkpoint have applied, at one revision of the thread. Unknown until it is asked for:
/// a head has no children, and a stored row of another checkpoint hardly ever changes.
#[derive(Default)]
pub(crate) struct Applied {
    known: Option<(Revision, BTreeSet<TaskId>)>,
    asked: AtomicBool,
}

impl Applied {
    /// What an image shows of the children of `at`.
    pub(crate) fn of(image: &ThreadImage, at: &CheckpointKey) -> Self {
        let tuples = image.checkpoints.values();
        let children = tuples.filter(|child| child.namespace == at.namespace && child.parent == Some(at.id));
        let tasks = children.flat_map(|child| child.checkpoint.applied.iter().copied()).collect();
        Self { known: Some((image.revision.clone(), tasks)), asked: AtomicBool::new(false) }
    }

    /// The tasks, if they are known of the thread as it is now. Otherwise nothing may be written: read the thread.
    pub(crate) fn now(&self, state: &ThreadState) -> Option<&BTreeSet<TaskId>> {
        let now = state.history.as_ref().map(|history| revision(history.mark));
        let known = self.known.as_ref().filter(|(then, _)| now.as_ref() == Some(then));
        if known.is_none() {
            self.asked.store(true, Ordering::SeqCst);
        }
        known.map(|(_, tasks)| tasks)
    }

    /// Whether somebody asked for what was not known.
    pub(crate) fn is_wanted(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }
}

/// Whether a task has a row among these.
pub(crate) fn is_stored(rows: &[TaskRecord], task: TaskId) -> bool {
    rows.iter().any(|row| row.task == task)
}

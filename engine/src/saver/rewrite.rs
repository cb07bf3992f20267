//! Changing what is already stored of a thread: the primitive behind every deletion, copy, conversion and import.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::checkpoint::{CheckpointTuple, Stored};
use crate::error::{Error, Result};
use crate::id::{CheckpointId, Namespace, TaskId, ThreadId};

/// Identifies the current contents of a thread. Opaque: each saver chooses its form, for example a random number drawn
/// by every write to the thread, or a digest of its rows. Two revisions of a thread are equal only if it was not
/// written in between, including deletion followed by creation.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Revision(Vec<u8>);

impl Revision {
    /// The revision with these bytes.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    /// The revision of a thread that does not exist: no bytes.
    pub fn absent() -> Self {
        Self::default()
    }
}

impl fmt::Debug for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Revision(")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str(")")
    }
}

/// The position of a checkpoint in its thread.
pub type LocalKey = (Namespace, CheckpointId);

/// A whole thread at one point in time.
#[derive(Debug, Clone, PartialEq)]
pub struct ThreadImage {
    /// The thread.
    pub thread: ThreadId,
    /// Passed to [`super::Saver::rewrite_thread`] so that it does not overwrite later changes.
    pub revision: Revision,
    /// Every checkpoint with every value and every row under it.
    pub checkpoints: BTreeMap<LocalKey, CheckpointTuple>,
}

impl ThreadImage {
    /// The image of a thread that does not exist.
    pub fn absent(thread: &ThreadId) -> Self {
        Self { thread: thread.clone(), revision: Revision::absent(), checkpoints: BTreeMap::new() }
    }

    /// The thread after a change. The revision is the one before the change.
    pub fn after(mut self, rewrite: &Rewrite) -> Self {
        self.checkpoints.retain(|place, _| !rewrite.remove.contains(place));
        let put = rewrite.put.iter();
        self.checkpoints
            .extend(put.map(|tuple| ((tuple.namespace.clone(), tuple.checkpoint.id), tuple.clone())));
        self
    }
}

/// A change of what is stored of a thread.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rewrite {
    /// Checkpoints to remove, with the rows under them.
    pub remove: BTreeSet<LocalKey>,
    /// Checkpoints to store exactly like this, with all rows under them. An existing one is replaced; a new one must be
    /// newer than every checkpoint of its namespace.
    pub put: Vec<CheckpointTuple>,
}

/// What the check of a rewrite needs to know about a stored checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outline {
    /// The checkpoint's parent.
    pub parent: Option<CheckpointId>,
    /// The tasks that it applied.
    pub applied: Vec<TaskId>,
    /// The tasks with rows under it.
    pub tasks: Vec<TaskId>,
}

impl Outline {
    /// The outline of a checkpoint.
    pub fn of(tuple: &CheckpointTuple) -> Self {
        Self {
            parent: tuple.parent,
            applied: tuple.checkpoint.applied.clone(),
            tasks: tuple.writes.iter().map(|row| row.task).collect(),
        }
    }
}

impl Rewrite {
    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        self.remove.is_empty() && self.put.is_empty()
    }

    /// Refuses a rewrite that would break a lineage. Every saver must call this with what it has stored of the thread,
    /// before it changes anything. A lineage that is already broken, and is not put again, does not prevent a rewrite.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] saying which checkpoint prevents the rewrite and why.
    pub fn check(&self, thread: &ThreadId, mut stored: BTreeMap<LocalKey, Outline>) -> Result<()> {
        let mut newest: BTreeMap<Namespace, CheckpointId> = BTreeMap::new();
        for (namespace, id) in stored.keys() {
            newest.entry(namespace.clone()).and_modify(|newest| *newest = (*newest).max(*id)).or_insert(*id);
        }
        let refuse = |id: CheckpointId, why: &str| {
            Err(Error::InvalidInput(format!("rewrite of thread {thread}, checkpoint {id}: {why}")))
        };
        let broken = stored.iter().filter(|(place, outline)| gap(&stored, place, outline).is_some());
        let broken: BTreeSet<LocalKey> = broken.map(|(place, _)| place.clone()).collect();
        for place in &self.remove {
            if stored.remove(place).is_none() {
                return refuse(place.1, "it is to be removed, but does not exist");
            }
        }
        let mut seen = BTreeSet::new();
        for tuple in &self.put {
            let id = tuple.checkpoint.id;
            let place = (tuple.namespace.clone(), id);
            if tuple.thread != *thread {
                return refuse(id, ANOTHERS);
            }
            if self.remove.contains(&place) || !seen.insert(place.clone()) {
                return refuse(id, "it is listed twice");
            }
            if !stored.contains_key(&place) && newest.get(&place.0).is_some_and(|newest| id <= *newest) {
                return refuse(id, "it is new, but the namespace has a newer one");
            }
            if let Some(why) = wrong_values(tuple) {
                return refuse(id, why);
            }
            let outline = Outline::of(tuple);
            // What is damaged so already may be put again, so that the rest of its thread can be pruned.
            let is_new = || stored.get(&place).is_none_or(|stored| repeated(&stored.tasks).is_none());
            if let Some(task) = repeated(&outline.tasks).filter(|_| is_new()) {
                return refuse(id, &two_rows(task));
            }
            stored.insert(place, outline);
        }
        for (place, outline) in &stored {
            match gap(&stored, place, outline) {
                Some(why) if !broken.contains(place) || seen.contains(place) => return refuse(place.1, &why),
                _ => {}
            }
        }
        Ok(())
    }
}

/// A task that is there twice.
fn repeated(tasks: &[TaskId]) -> Option<TaskId> {
    let mut seen = BTreeSet::new();
    tasks.iter().copied().find(|task| !seen.insert(*task))
}

const ANOTHERS: &str = "it belongs to another thread";

fn two_rows(task: TaskId) -> String {
    format!("task {task} has two rows of writes under it")
}

/// Why the values of a checkpoint cannot be stored, if so.
fn wrong_values(tuple: &CheckpointTuple) -> Option<&'static str> {
    let channels = &tuple.checkpoint.channels;
    if channels.values().any(|entry| matches!(entry.stored, Stored::Held)) {
        return Some("a channel comes without its value");
    }
    let is_root = tuple.parent.is_none();
    (is_root && channels.values().any(|entry| matches!(entry.stored, Stored::Sentinel)))
        .then_some("a channel stores no value, and there is no parent to replay from")
}

/// Why a checkpoint of a new thread cannot be stored, whatever its parent is.
pub(super) fn wrong_by_itself(thread: &ThreadId, tuple: &CheckpointTuple) -> Option<String> {
    if tuple.thread != *thread {
        return Some(ANOTHERS.to_owned());
    }
    let tasks: Vec<TaskId> = tuple.writes.iter().map(|row| row.task).collect();
    wrong_values(tuple).map(str::to_owned).or_else(|| repeated(&tasks).map(two_rows))
}

/// What is missing between a checkpoint and its parent, which has these tasks if it is there.
pub(super) fn gap_of(tuple: &CheckpointTuple, parent: Option<&[TaskId]>) -> Option<String> {
    between((tuple.checkpoint.id, tuple.parent, &tuple.checkpoint.applied), parent)
}

/// What is missing between a checkpoint and its parent, if anything.
fn gap(
    stored: &BTreeMap<LocalKey, Outline>,
    (namespace, id): &LocalKey,
    outline: &Outline,
) -> Option<String> {
    let parent = outline.parent.and_then(|parent| stored.get(&(namespace.clone(), parent)));
    between((*id, outline.parent, &outline.applied), parent.map(|parent| &parent.tasks[..]))
}

fn between(
    (id, parent, applied): (CheckpointId, Option<CheckpointId>, &[TaskId]),
    tasks: Option<&[TaskId]>,
) -> Option<String> {
    let Some(parent) = parent else {
        return (!applied.is_empty()).then(|| "it has no parent, and applied tasks".to_owned());
    };
    let Some(tasks) = tasks else {
        return Some(format!("its parent {parent} would be missing"));
    };
    if parent >= id {
        return Some(format!("its parent {parent} is not older"));
    }
    let lost = applied.iter().find(|task| !tasks.contains(task))?;
    Some(format!("the writes of its task {lost} would be missing"))
}

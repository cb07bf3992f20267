//! Which rows of its parent a checkpoint applies.
//!
//! LangGraph makes a task's id of its checkpoint, so two runs that go on from one checkpoint have tasks of the same
//! ids, and may write different things for them. Each list of writes is a row of its own. A run's child applies the
//! rows of that run. A task that the run did not write for has finished before: of the rows that were there when the
//! run read the checkpoint, the child applies what a reader is shown.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use threadkeep::checkpoint::CheckpointKey;
use threadkeep::id::{TaskId, ThreadId};

use crate::known::KnownTask;
use crate::task::Kind;

/// Checkpoints under which the rows of runs are remembered. A run puts its child soon after its last row.
const CHECKPOINTS: usize = 4096;

/// The ordinary rows that readers are shown, one list a task: the longest, because LangGraph puts the writes of a task
/// again with more at the end, and of equally long ones the first. For a task of which one of `own` is there, that one
/// instead.
pub(crate) fn shown<'t>(
    tasks: impl Iterator<Item = &'t KnownTask>,
    own: &BTreeSet<TaskId>,
) -> Vec<&'t KnownTask> {
    // Older versions of this program had several rows for one list: each begins where the one before it ends.
    let mut lists: BTreeMap<&str, Vec<Vec<&KnownTask>>> = BTreeMap::new();
    for row in tasks.filter(|row| row.kind != Kind::Special) {
        let of_task = lists.entry(&row.author.task).or_default();
        match of_task.iter_mut().find(|list| is_part(row) && list.iter().copied().all(is_part)) {
            Some(list) => list.push(row),
            None => of_task.push(vec![row]),
        }
    }
    let mut shown = Vec::new();
    for mut of_task in lists.into_values() {
        let is_own = |list: &Vec<&KnownTask>| list.iter().any(|row| own.contains(&row.id));
        let at = of_task.iter().position(is_own).unwrap_or_else(|| {
            (1..of_task.len())
                .fold(0, |best, at| if len(&of_task[at]) > len(&of_task[best]) { at } else { best })
        });
        shown.append(&mut of_task.swap_remove(at));
    }
    shown
}

fn is_part(row: &KnownTask) -> bool {
    matches!(row.kind, Kind::Ordinary(_))
}

fn len(list: &[&KnownTask]) -> usize {
    list.iter().map(|row| row.len).sum()
}

/// The rows that a child of a run applies, in the order in which LangGraph applies them.
pub(crate) fn applied<'t>(tasks: &'t [KnownTask], of: &Rows) -> Vec<&'t KnownTask> {
    let is_known = |row: &&KnownTask| {
        of.read.as_ref().is_none_or(|read| read.contains(&row.id)) || of.own.contains(&row.id)
    };
    let mut rows = shown(tasks.iter().filter(is_known), &of.own);
    rows.sort_by(|one, other| (&one.author, one.kind).cmp(&(&other.author, other.kind)));
    rows
}

/// The rows of a run under a checkpoint.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Rows {
    /// Those that it put.
    pub(crate) own: BTreeSet<TaskId>,
    /// Those that it read; `None` if it did not read the checkpoint, as where it has put it.
    pub(crate) read: Option<BTreeSet<TaskId>>,
}

/// The rows that the runs of this process have put, and that they have read.
pub(crate) struct Runs(Mutex<LruCache<At, Written>>);

/// A checkpoint that a run goes on from, and the run.
type At = (CheckpointKey, Option<u64>);

#[derive(Default)]
struct Written {
    /// By task: the row and its length.
    rows: BTreeMap<String, (TaskId, usize)>,
    read: Option<BTreeSet<TaskId>>,
    /// Whether a child has applied them. Rows that come after that are of another child.
    applied: bool,
}

impl Default for Runs {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(NonZeroUsize::new(CHECKPOINTS).unwrap_or(NonZeroUsize::MIN))))
    }
}

impl Runs {
    fn lock(&self) -> MutexGuard<'_, LruCache<At, Written>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A run has put an ordinary row. LangGraph may reorder puts of one task: the longest has all writes.
    pub(crate) fn wrote(&self, key: &CheckpointKey, run: Option<u64>, row: &KnownTask) {
        let mut this = self.lock();
        let put = this.get_or_insert_mut((key.clone(), run), Written::default);
        if put.applied {
            *put = Written::default();
        }
        let new = (row.id, row.len);
        let last = put.rows.entry(row.author.task.clone()).or_insert(new);
        if last.1 <= new.1 {
            *last = new;
        }
    }

    /// A run has read a checkpoint with these rows. Calls of unknown runs are of any.
    pub(crate) fn read(&self, key: &CheckpointKey, run: Option<u64>, rows: impl Iterator<Item = TaskId>) {
        if run.is_some() {
            let rows = rows.collect();
            self.lock().get_or_insert_mut((key.clone(), run), Written::default).read = Some(rows);
        }
    }

    /// The rows that the child of a run may apply.
    pub(crate) fn of(&self, key: &CheckpointKey, run: Option<u64>) -> Rows {
        let mut this = self.lock();
        let Some(put) = this.get_mut(&(key.clone(), run)) else { return Rows::default() };
        put.applied = true;
        Rows { own: put.rows.values().map(|(row, _)| *row).collect(), read: put.read.clone() }
    }

    /// Forgets a thread.
    pub(crate) fn forget(&self, thread: &ThreadId) {
        let mut this = self.lock();
        let gone: Vec<At> =
            this.iter().map(|(place, _)| place).filter(|(key, _)| key.thread == *thread).cloned().collect();
        for place in gone {
            this.pop(&place);
        }
    }
}

#[cfg(test)]
mod tests {
    use threadkeep::id::CheckpointId;

    use super::*;
    use crate::task::Author;
    use crate::types::Place;

    fn row(n: u8, task: &str, path: &str, kind: Kind, len: usize) -> KnownTask {
        let author = Author { path: path.to_owned(), task: task.to_owned() };
        let (id, special, channels) = (TaskId::from_bytes([n; 16]), BTreeSet::new(), BTreeSet::new());
        KnownTask { id, author, kind, len, special, channels }
    }

    fn ids<'t>(rows: impl IntoIterator<Item = &'t TaskId>) -> Vec<u8> {
        rows.into_iter().map(|id| id.as_bytes()[0]).collect()
    }

    /// What a child applies.
    fn applied_to(rows: &[KnownTask], of: &Rows) -> Vec<u8> {
        ids(applied(rows, of).into_iter().map(|row| &row.id))
    }

    #[test]
    fn a_child_applies_the_rows_of_its_run_and_of_other_tasks_those_that_are_shown() {
        let rows = [
            row(1, "a", "p2", Kind::Own(1), 1),
            row(2, "b", "p1", Kind::Own(2), 2),
            row(3, "a", "p2", Kind::Own(3), 1),
            row(4, "b", "p1", Kind::Own(4), 3),
            row(5, "a", "p2", Kind::Special, 9),
        ];
        let set = |ids: &[u8]| ids.iter().map(|n| TaskId::from_bytes([*n; 16])).collect();
        let of = |own: &[u8], read: Option<&[u8]>| Rows { own: set(own), read: read.map(set) };
        assert_eq!(applied_to(&rows, &of(&[], None)), [4, 1], "by path; the longest, or the first");
        assert_eq!(applied_to(&rows, &of(&[3], None)), [4, 3]);
        assert_eq!(applied_to(&rows, &of(&[2, 3], None)), [2, 3]);
        assert_eq!(applied_to(&rows, &of(&[7], None)), [4, 1], "a row that is gone");
        assert_eq!(applied_to(&rows, &of(&[3], Some(&[]))), [3], "another run has put the rows of b");
        assert_eq!(applied_to(&rows, &of(&[3], Some(&[1, 2]))), [2, 3]);
    }

    #[test]
    fn rows_of_an_older_version_are_one_list() {
        let mut rows = vec![
            row(1, "a", "p", Kind::Ordinary(0), 2),
            row(2, "b", "p", Kind::Ordinary(0), 1),
            row(3, "a", "p", Kind::Ordinary(2), 1),
            row(4, "a", "p", Kind::Own(4), 3),
        ];
        assert_eq!(applied_to(&rows, &Rows::default()), [1, 3, 2]);
        let own = Rows { own: BTreeSet::from([rows[3].id]), read: None };
        assert_eq!(applied_to(&rows, &own), [4, 2]);
        rows[3].len = 4;
        assert_eq!(applied_to(&rows, &Rows::default()), [4, 2]);
    }

    #[test]
    fn the_rows_of_a_run_are_the_longest_of_each_task_since_its_last_child() {
        let runs = Runs::default();
        let key = |thread: &str| Place::new(thread, "").key(CheckpointId::from_bytes([7; 16]));
        let of = |run| ids(&runs.of(&key("t"), run).own);
        let wrote = |run, n, task, len| runs.wrote(&key("t"), run, &row(n, task, "", Kind::Own(0), len));
        for (n, len) in [(1, 1), (2, 3), (3, 2)] {
            wrote(Some(1), n, "a", len);
        }
        wrote(Some(1), 4, "b", 1);
        wrote(Some(2), 5, "a", 1);
        wrote(Some(2), 6, "a", 1);
        assert_eq!((of(Some(1)), of(Some(2)), of(None)), (vec![2, 4], vec![6], vec![]));
        assert_eq!(of(Some(1)), [2, 4], "a put may be repeated");
        wrote(Some(1), 7, "b", 1);
        assert_eq!((of(Some(1)), of(Some(2))), (vec![7], vec![6]));
        let read = || runs.of(&key("t"), Some(2)).read.map(|read| ids(&read));
        assert_eq!(read(), None);
        runs.read(&key("t"), Some(2), [TaskId::from_bytes([8; 16])].into_iter());
        runs.read(&key("t"), None, [TaskId::from_bytes([9; 16])].into_iter());
        assert_eq!((read(), runs.of(&key("t"), None)), (Some(vec![8]), Rows::default()));
        runs.forget(&key("other").thread);
        assert_eq!(of(Some(2)), [6]);
        runs.forget(&key("t").thread);
        assert_eq!((of(Some(1)), of(Some(2))), (vec![], vec![]));
    }
}

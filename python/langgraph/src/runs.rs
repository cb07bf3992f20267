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
use threadkeep::id::{CheckpointId, TaskId, ThreadId};

use crate::known::KnownTask;
use crate::task::Kind;
use crate::types::Place;

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

/// What the runs of this process have put, and what they have read. A run goes on from one checkpoint at a time.
///
/// A run is known by a number that another one may have once it has ended. Each begins with a read, so what an ended
/// one has left counts no more.
pub(crate) struct Runs {
    rows: Mutex<LruCache<At, Written>>,
    /// The places where a run found no checkpoint, and has not put one yet.
    empty: Mutex<LruCache<(Place, u64), ()>>,
}

/// A checkpoint that a run goes on from, and the run.
type At = (CheckpointKey, Option<u64>);

#[derive(Default)]
struct Written {
    /// By task: the row, and a hash of each of its writes.
    rows: BTreeMap<String, (TaskId, Vec<u64>)>,
    read: Option<BTreeSet<TaskId>>,
}

impl Default for Runs {
    fn default() -> Self {
        let size = NonZeroUsize::new(CHECKPOINTS).unwrap_or(NonZeroUsize::MIN);
        Self { rows: Mutex::new(LruCache::new(size)), empty: Mutex::new(LruCache::new(size)) }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Runs {
    /// A run has put an ordinary row; `list` has a hash of each of its writes. LangGraph puts the writes of a task again
    /// with more at the end, and may reorder these puts: one that is the beginning of another comes late. Any other list
    /// takes the place of the last one, as where an update is given again after it failed.
    pub(crate) fn wrote(&self, key: &CheckpointKey, run: Option<u64>, row: &KnownTask, list: &[u64]) {
        let mut rows = locked(&self.rows);
        let put = rows.get_or_insert_mut((key.clone(), run), Written::default);
        let is_late = put.rows.get(&row.author.task).is_some_and(|(_, last)| last.starts_with(list));
        if !is_late {
            put.rows.insert(row.author.task.clone(), (row.id, list.to_vec()));
        }
    }

    /// A run has read a checkpoint with these rows, and goes on from there. Calls of unknown runs are of any.
    pub(crate) fn read(&self, key: &CheckpointKey, run: Option<u64>, rows: impl Iterator<Item = TaskId>) {
        if let Some(run) = run {
            let read = Written { rows: BTreeMap::new(), read: Some(rows.collect()) };
            locked(&self.rows).put((key.clone(), Some(run)), read);
            self.is_not_empty(&Place { thread: key.thread.clone(), namespace: key.namespace.clone() }, run);
        }
    }

    /// A run has found no checkpoint.
    pub(crate) fn found_none(&self, place: &Place, run: Option<u64>) {
        if let Some(run) = run {
            locked(&self.empty).put((place.clone(), run), ());
        }
    }

    /// Whether a run has found no checkpoint, and has not put one yet.
    pub(crate) fn has_found_none(&self, place: &Place, run: Option<u64>) -> bool {
        run.is_some_and(|run| locked(&self.empty).contains(&(place.clone(), run)))
    }

    fn is_not_empty(&self, place: &Place, run: u64) {
        locked(&self.empty).pop(&(place.clone(), run));
    }

    /// The rows that the child of a run may apply.
    pub(crate) fn of(&self, key: &CheckpointKey, run: Option<u64>) -> Rows {
        let mut rows = locked(&self.rows);
        let Some(put) = rows.get(&(key.clone(), run)) else { return Rows::default() };
        Rows { own: put.rows.values().map(|(row, _)| *row).collect(), read: put.read.clone() }
    }

    /// A run has put a child of `parent`, or failed to put it. Rows that come after a child are of another one.
    pub(crate) fn put(&self, place: &Place, parent: Option<CheckpointId>, run: Option<u64>, is_stored: bool) {
        if let (Some(parent), true) = (parent, is_stored) {
            locked(&self.rows).pop(&(place.key(parent), run));
        }
        if let Some(run) = run {
            self.is_not_empty(place, run);
        }
    }

    /// Forgets a thread.
    pub(crate) fn forget(&self, thread: &ThreadId) {
        let mut rows = locked(&self.rows);
        let gone: Vec<At> =
            rows.iter().map(|(at, _)| at).filter(|(key, _)| key.thread == *thread).cloned().collect();
        for at in gone {
            rows.pop(&at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Author;

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

    fn place(thread: &str) -> Place {
        Place::new(thread, "")
    }

    fn key(thread: &str) -> CheckpointKey {
        place(thread).key(parent())
    }

    fn parent() -> CheckpointId {
        CheckpointId::from_bytes([7; 16])
    }

    fn wrote(runs: &Runs, run: u64, n: u8, task: &str, list: &[u64]) {
        runs.wrote(&key("t"), Some(run), &row(n, task, "", Kind::Own(0), list.len()), list);
    }

    fn own(runs: &Runs, run: u64) -> Vec<u8> {
        ids(&runs.of(&key("t"), Some(run)).own)
    }

    #[test]
    fn the_rows_of_a_run_are_the_last_list_of_each_task_since_its_last_child() {
        let runs = Runs::default();
        for (n, list) in [(1, &[1][..]), (2, &[1, 2, 3][..]), (3, &[1, 2][..])] {
            wrote(&runs, 1, n, "a", list);
        }
        wrote(&runs, 1, 4, "b", &[1]);
        wrote(&runs, 2, 5, "a", &[1]);
        wrote(&runs, 2, 6, "a", &[2]);
        assert_eq!((own(&runs, 1), own(&runs, 2)), (vec![2, 4], vec![6]), "a beginning of a list came late");
        wrote(&runs, 1, 7, "a", &[4, 5]);
        assert_eq!(own(&runs, 1), [4, 7], "a shorter list that is no beginning");
        // A put that is not stored is tried again, and rows may come in between.
        runs.put(&place("t"), Some(parent()), Some(1), false);
        wrote(&runs, 1, 8, "c", &[1]);
        assert_eq!(own(&runs, 1), [4, 7, 8]);
        runs.put(&place("t"), Some(parent()), Some(1), true);
        assert_eq!((own(&runs, 1), own(&runs, 2)), (vec![], vec![6]));
        wrote(&runs, 1, 9, "b", &[1]);
        assert_eq!((own(&runs, 1), own(&runs, 2)), (vec![9], vec![6]));
        runs.forget(&key("other").thread);
        assert_eq!(own(&runs, 2), [6]);
        runs.forget(&key("t").thread);
        assert_eq!((own(&runs, 1), own(&runs, 2)), (vec![], vec![]));
    }

    #[test]
    fn a_run_begins_with_what_it_read() {
        let runs = Runs::default();
        let read = |run| runs.of(&key("t"), run).read.map(|read| ids(&read));
        let reads = |run, n| runs.read(&key("t"), run, [TaskId::from_bytes([n; 16])].into_iter());
        wrote(&runs, 2, 6, "a", &[1]);
        assert_eq!(read(Some(2)), None);
        // What is there is of a run that has ended: its number came to another one.
        reads(Some(2), 8);
        reads(None, 9);
        assert_eq!((read(Some(2)), own(&runs, 2)), (Some(vec![8]), vec![]));
        assert_eq!(runs.of(&key("t"), None), Rows::default());
    }

    #[test]
    fn a_run_has_found_no_checkpoint_until_it_puts_or_reads_one() {
        let runs = Runs::default();
        let has = |run| runs.has_found_none(&place("t"), run);
        runs.found_none(&place("t"), None);
        assert!(!has(None) && !has(Some(1)));
        for is_stored in [true, false] {
            runs.found_none(&place("t"), Some(1));
            assert!(has(Some(1)) && !has(Some(2)) && !runs.has_found_none(&place("other"), Some(1)));
            runs.put(&place("t"), None, Some(1), is_stored);
            assert!(!has(Some(1)));
        }
        runs.found_none(&place("t"), Some(1));
        runs.read(&key("t"), Some(1), std::iter::empty());
        assert!(!has(Some(1)));
    }
}

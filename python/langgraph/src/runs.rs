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
/// again with more at the end, and of equally long ones the first. For a task of which some of `own` are there, those
/// instead.
pub(crate) fn shown<'t>(
    tasks: impl Iterator<Item = &'t KnownTask>,
    own: &BTreeMap<TaskId, usize>,
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
    for of_task in lists.into_values() {
        let is_own = |list: &Vec<&KnownTask>| list.iter().any(|row| own.contains_key(&row.id));
        let (of_run, mut others): (Vec<_>, Vec<_>) = of_task.into_iter().partition(is_own);
        if of_run.is_empty() {
            let longest = (1..others.len())
                .fold(0, |best, at| if len(&others[at]) > len(&others[best]) { at } else { best });
            shown.append(&mut others.swap_remove(longest));
        } else {
            shown.extend(of_run.into_iter().flatten());
        }
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
        of.read.as_ref().is_none_or(|read| read.contains(&row.id)) || of.own.contains_key(&row.id)
    };
    let mut rows = shown(tasks.iter().filter(is_known), &of.own);
    let place = |row: &KnownTask| (of.own.get(&row.id).copied(), row.kind);
    rows.sort_by(|one, other| (&one.author, place(one)).cmp(&(&other.author, place(other))));
    rows
}

/// The rows of a run under a checkpoint.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Rows {
    /// Those that it put, and their order.
    pub(crate) own: BTreeMap<TaskId, usize>,
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
    by_task: BTreeMap<String, Lists>,
    read: Option<BTreeSet<TaskId>>,
}

/// The lists of a task that no child has applied yet.
#[derive(Default)]
struct Lists {
    /// The row of each, and a hash of each of its writes.
    rows: Vec<(TaskId, Vec<u64>)>,
    /// Whether the checkpoint was read since: the next list is of another update.
    is_ended: bool,
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
    /// A run has put an ordinary row; `list` has a hash of each of its writes. LangGraph puts the writes of a task
    /// again with more at the end, and may reorder these puts: of two lists of which one is the beginning of the other,
    /// the longer one has all writes. Others are of several updates in one step, to which it may give one task.
    pub(crate) fn wrote(&self, key: &CheckpointKey, run: Option<u64>, row: &KnownTask, list: &[u64]) {
        let mut rows = locked(&self.rows);
        let put = rows.get_or_insert_mut((key.clone(), run), Written::default);
        let lists = put.by_task.entry(row.author.task.clone()).or_default();
        if lists.is_ended {
            *lists = Lists::default();
        }
        if lists.rows.iter().any(|(_, known)| known.starts_with(list)) {
            return;
        }
        match lists.rows.iter_mut().find(|(_, known)| list.starts_with(known)) {
            Some(shorter) => *shorter = (row.id, list.to_vec()),
            None => lists.rows.push((row.id, list.to_vec())),
        }
    }

    /// A run has read a checkpoint with these rows, and goes on from there. Calls of unknown runs are of any: an update
    /// of the state reads, too, before it writes. If the one before it failed, its lists count no more.
    pub(crate) fn read(&self, key: &CheckpointKey, run: Option<u64>, rows: impl Iterator<Item = TaskId>) {
        let at = (key.clone(), run);
        if let Some(run) = run {
            let read = Written { by_task: BTreeMap::new(), read: Some(rows.collect()) };
            locked(&self.rows).put(at, read);
            self.is_not_empty(&Place { thread: key.thread.clone(), namespace: key.namespace.clone() }, run);
        } else if let Some(put) = locked(&self.rows).peek_mut(&at) {
            for lists in put.by_task.values_mut() {
                lists.is_ended = true;
            }
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
        let own = put.by_task.values().flat_map(|lists| &lists.rows);
        let own = own.enumerate().map(|(place, (row, _))| (*row, place));
        Rows { own: own.collect(), read: put.read.clone() }
    }

    /// A run has put a child of `parent`, or failed to put it. Rows that come after a child are of another one.
    pub(crate) fn put(&self, place: &Place, parent: Option<CheckpointId>, run: Option<u64>, is_stored: bool) {
        if is_stored && let Some(parent) = parent {
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
        let id = |n: &u8| TaskId::from_bytes([*n; 16]);
        let of = |own: &[u8], read: Option<&[u8]>| Rows {
            own: own.iter().enumerate().map(|(place, n)| (id(n), place)).collect(),
            read: read.map(|read| read.iter().map(id).collect()),
        };
        assert_eq!(applied_to(&rows, &of(&[], None)), [4, 1], "by path; the longest, or the first");
        assert_eq!(applied_to(&rows, &of(&[3], None)), [4, 3]);
        assert_eq!(applied_to(&rows, &of(&[2, 3], None)), [2, 3]);
        assert_eq!(applied_to(&rows, &of(&[3, 1], None)), [4, 3, 1], "two lists, as they were put");
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
        let own = Rows { own: BTreeMap::from([(rows[3].id, 0)]), read: None };
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

    fn wrote(runs: &Runs, run: Option<u64>, n: u8, task: &str, list: &[u64]) {
        runs.wrote(&key("t"), run, &row(n, task, "", Kind::Own(0), list.len()), list);
    }

    /// The rows of a run, as they were put.
    fn own(runs: &Runs, run: Option<u64>) -> Vec<u8> {
        let own = runs.of(&key("t"), run).own;
        let mut rows: Vec<(&usize, &TaskId)> = own.iter().map(|(row, place)| (place, row)).collect();
        rows.sort();
        ids(rows.into_iter().map(|(_, row)| row))
    }

    #[test]
    fn the_rows_of_a_run_are_the_longest_of_each_list_since_its_last_child() {
        let runs = Runs::default();
        let (one, two) = (Some(1), Some(2));
        for (n, list) in [(1, &[1][..]), (2, &[1, 2, 3][..]), (3, &[1, 2][..])] {
            wrote(&runs, one, n, "a", list);
        }
        wrote(&runs, one, 4, "b", &[1]);
        wrote(&runs, two, 6, "a", &[2]);
        wrote(&runs, two, 5, "a", &[1]);
        assert_eq!((own(&runs, one), own(&runs, two)), (vec![2, 4], vec![6, 5]));
        // A put that is not stored is tried again, and rows may come in between.
        runs.put(&place("t"), Some(parent()), one, false);
        wrote(&runs, one, 8, "c", &[1]);
        assert_eq!(own(&runs, one), [2, 4, 8]);
        runs.put(&place("t"), Some(parent()), one, true);
        assert_eq!((own(&runs, one), own(&runs, two)), (vec![], vec![6, 5]));
        wrote(&runs, one, 9, "b", &[1]);
        assert_eq!((own(&runs, one), own(&runs, two)), (vec![9], vec![6, 5]));
        runs.forget(&key("other").thread);
        assert_eq!(own(&runs, two), [6, 5]);
        runs.forget(&key("t").thread);
        assert_eq!((own(&runs, one), own(&runs, two)), (vec![], vec![]));
    }

    #[test]
    fn a_run_begins_with_what_it_read() {
        let runs = Runs::default();
        let read = |run| runs.of(&key("t"), run).read.map(|read| ids(&read));
        let reads = |run, n| runs.read(&key("t"), run, [TaskId::from_bytes([n; 16])].into_iter());
        wrote(&runs, Some(2), 6, "a", &[1]);
        assert_eq!(read(Some(2)), None);
        // What is there is of a run that has ended: its number came to another one.
        reads(Some(2), 8);
        assert_eq!((read(Some(2)), own(&runs, Some(2))), (Some(vec![8]), vec![]));
        reads(None, 9);
        assert_eq!(runs.of(&key("t"), None), Rows::default());
        // What somebody reads between the puts of an update takes nothing from it.
        wrote(&runs, None, 1, "a", &[1]);
        wrote(&runs, None, 2, "a", &[2]);
        wrote(&runs, None, 3, "b", &[1, 2]);
        reads(None, 9);
        assert_eq!(own(&runs, None), [1, 2, 3]);
        wrote(&runs, None, 4, "b", &[3]);
        assert_eq!((own(&runs, None), read(None)), (vec![1, 2, 4], None), "of another update");
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

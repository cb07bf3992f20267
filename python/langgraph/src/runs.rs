//! Which rows of its parent a checkpoint applies.
//!
//! LangGraph makes a task's id of its checkpoint, so two runs that go on from one checkpoint have tasks of the same
//! ids, and may write different things for them. Each list of writes is a row of its own.
//!
//! A caller, run or not, begins with a read of a checkpoint, which forgets what the caller had there. Its child applies
//! what it wrote since, and of other tasks what it read. A caller that is no run and wrote nothing applies what a
//! reader is shown: others write for it.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hash;
use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use threadkeep::checkpoint::CheckpointKey;
use threadkeep::id::{CheckpointId, TaskId, ThreadId};

use crate::known::KnownTask;
use crate::task::Kind;
use crate::types::{Caller, Place};

/// Checkpoints that runs go on from, as they are remembered. A run puts its child soon after its last row.
const RUNS: usize = 4096;
/// Those of others. They are by themselves, because a caller that only reads must take nothing from a run. An update
/// puts its child soon after its read.
const OTHERS: usize = 1024;

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

/// The rows of a caller under a checkpoint.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Rows {
    /// Those that it put, and their order.
    pub(crate) own: BTreeMap<TaskId, usize>,
    /// Those that it read; `None` if it did not read the checkpoint, as where it has put it, or if others write for it.
    pub(crate) read: Option<BTreeSet<TaskId>>,
}

impl Rows {
    /// These, and no others.
    pub(crate) fn only(rows: &[TaskId]) -> Self {
        let own = rows.iter().enumerate().map(|(place, row)| (*row, place)).collect();
        Self { own, read: Some(BTreeSet::new()) }
    }

    /// Whether those that it put are all among these.
    pub(crate) fn are_among(&self, tasks: &[KnownTask]) -> bool {
        self.own.keys().all(|id| tasks.iter().any(|task| task.id == *id))
    }
}

/// What the callers of this process have put, and what they have read. A caller goes on from one checkpoint at a time.
///
/// A caller is known by a number that another one may have once it has ended. Each begins with a read, so what an ended
/// one has left counts no more.
pub(crate) struct Runs {
    /// Those of runs, and those of others.
    by_run: Mutex<LruCache<At, Written>>,
    by_other: Mutex<LruCache<At, Written>>,
    /// The places where a run found no checkpoint, and has not put one yet.
    empty: Mutex<LruCache<(Place, u64), ()>>,
}

/// A checkpoint that a caller goes on from.
type At = (CheckpointKey, Caller);

/// What a caller wrote under a checkpoint, and what it had read there.
#[derive(Default)]
struct Written {
    /// The rows of each task, with a hash of each of their writes.
    by_task: BTreeMap<String, Vec<(TaskId, Vec<u64>)>>,
    /// The rows that it read; `None` if it did not read the checkpoint.
    read: Option<BTreeSet<TaskId>>,
    /// Whether a run has read it by its id, and has not asked yet whether it is the head.
    asks_for_head: bool,
}

impl Default for Runs {
    fn default() -> Self {
        Self { by_run: bounded(RUNS), by_other: bounded(OTHERS), empty: bounded(RUNS) }
    }
}

fn bounded<K: Eq + Hash, V>(size: usize) -> Mutex<LruCache<K, V>> {
    Mutex::new(LruCache::new(NonZeroUsize::new(size).unwrap_or(NonZeroUsize::MIN)))
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Runs {
    /// What is remembered of callers of this kind.
    fn of_kind(&self, by: Caller) -> MutexGuard<'_, LruCache<At, Written>> {
        match by {
            Caller::Run(_) => locked(&self.by_run),
            Caller::Other(_) => locked(&self.by_other),
        }
    }

    /// An ordinary row was put; `list` has a hash of each of its writes. LangGraph puts the writes of a task again with
    /// more at the end, and may reorder these puts: of two lists of which one is the beginning of the other, the longer
    /// one has all writes. Others are of several updates in one step, to which it may give one task.
    pub(crate) fn wrote(&self, key: &CheckpointKey, by: Caller, row: &KnownTask, list: &[u64]) {
        let mut all = self.of_kind(by);
        let written = all.get_or_insert_mut((key.clone(), by), Written::default);
        let lists = written.by_task.entry(row.author.task.clone()).or_default();
        if lists.iter().any(|(_, known)| known.starts_with(list)) {
            return;
        }
        match lists.iter_mut().find(|(_, known)| list.starts_with(known)) {
            Some(shorter) => *shorter = (row.id, list.to_vec()),
            None => lists.push((row.id, list.to_vec())),
        }
    }

    /// A checkpoint with these rows was read: the caller goes on from there. Where LangGraph was given an id, a run
    /// reads that checkpoint, then the head, to see whether they are one: it goes on from what it read first.
    pub(crate) fn read(
        &self,
        key: &CheckpointKey,
        by: Caller,
        is_head: bool,
        rows: impl Iterator<Item = TaskId>,
    ) {
        let mut all = self.of_kind(by);
        let at = (key.clone(), by);
        let begun = all.peek_mut(&at).filter(|written| is_head && written.by_task.is_empty());
        if begun.is_some_and(|written| std::mem::take(&mut written.asks_for_head)) {
            return;
        }
        let asks_for_head = by.run().is_some() && !is_head;
        all.put(at, Written { by_task: BTreeMap::new(), read: Some(rows.collect()), asks_for_head });
        drop(all);
        if let Some(run) = by.run() {
            self.is_not_empty(&Place { thread: key.thread.clone(), namespace: key.namespace.clone() }, run);
        }
    }

    /// A run has found no checkpoint.
    pub(crate) fn found_none(&self, place: &Place, by: Caller) {
        if let Some(run) = by.run() {
            locked(&self.empty).put((place.clone(), run), ());
        }
    }

    /// Whether a run has found no checkpoint, and has not put one yet.
    pub(crate) fn has_found_none(&self, place: &Place, by: Caller) -> bool {
        by.run().is_some_and(|run| locked(&self.empty).contains(&(place.clone(), run)))
    }

    /// A run looks for what was there at a time, so it has not looked for the head. One that did, and failed, may have
    /// had its number.
    pub(crate) fn goes_back(&self, place: &Place, by: Caller) {
        if let Some(run) = by.run() {
            self.is_not_empty(place, run);
        }
    }

    fn is_not_empty(&self, place: &Place, run: u64) {
        locked(&self.empty).pop(&(place.clone(), run));
    }

    /// The rows that a caller's child may apply.
    pub(crate) fn of(&self, key: &CheckpointKey, by: Caller) -> Rows {
        let mut all = self.of_kind(by);
        let Some(written) = all.get(&(key.clone(), by)) else { return Rows::default() };
        let rows = written.by_task.values().flatten();
        let own: BTreeMap<TaskId, usize> = rows.enumerate().map(|(place, (row, _))| (*row, place)).collect();
        let others_write = own.is_empty() && by.run().is_none();
        Rows { own, read: if others_write { None } else { written.read.clone() } }
    }

    /// A caller has put a child of `parent`, or failed to put it. Rows that come after a child are of another one.
    pub(crate) fn put(&self, place: &Place, parent: Option<CheckpointId>, by: Caller, is_stored: bool) {
        if is_stored && let Some(parent) = parent {
            self.of_kind(by).pop(&(place.key(parent), by));
        }
        if let Some(run) = by.run() {
            self.is_not_empty(place, run);
        }
    }

    /// Forgets a thread. That a run found no checkpoint in it stays true.
    pub(crate) fn forget(&self, thread: &ThreadId) {
        for all in [&self.by_run, &self.by_other] {
            let mut all = locked(all);
            let keys = all.iter().map(|(at, _)| at);
            let gone: Vec<At> = keys.filter(|(key, _)| key.thread == *thread).cloned().collect();
            for at in gone {
                all.pop(&at);
            }
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

    fn wrote(runs: &Runs, by: Caller, n: u8, task: &str, list: &[u64]) {
        runs.wrote(&key("t"), by, &row(n, task, "", Kind::Own(0), list.len()), list);
    }

    /// The rows of a run, as they were put.
    fn own(runs: &Runs, by: Caller) -> Vec<u8> {
        let own = runs.of(&key("t"), by).own;
        let mut rows: Vec<(&usize, &TaskId)> = own.iter().map(|(row, place)| (place, row)).collect();
        rows.sort();
        ids(rows.into_iter().map(|(_, row)| row))
    }

    #[test]
    fn the_rows_of_a_run_are_the_longest_of_each_list_since_its_last_child() {
        let runs = Runs::default();
        let (one, two) = (Caller::Run(1), Caller::Run(2));
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
        let other = Caller::Other(1);
        let read = |by| runs.of(&key("t"), by).read.map(|read| ids(&read));
        let reads = |by, n| runs.read(&key("t"), by, true, [TaskId::from_bytes([n; 16])].into_iter());
        wrote(&runs, Caller::Run(2), 6, "a", &[1]);
        assert_eq!(read(Caller::Run(2)), None);
        // What is there is of a run that has ended: its number came to another one.
        reads(Caller::Run(2), 8);
        assert_eq!((read(Caller::Run(2)), own(&runs, Caller::Run(2))), (Some(vec![8]), vec![]));
        reads(other, 9);
        assert_eq!(runs.of(&key("t"), other), Rows::default(), "others write for it");
        wrote(&runs, other, 1, "a", &[1]);
        wrote(&runs, other, 2, "a", &[2]);
        wrote(&runs, other, 3, "b", &[1, 2]);
        // What somebody else reads takes nothing from an update.
        reads(Caller::Other(2), 7);
        reads(Caller::Run(1), 7);
        assert_eq!((own(&runs, other), read(other)), (vec![1, 2, 3], Some(vec![9])));
        // The same caller begins again, as with an update that is given again after it failed.
        reads(other, 8);
        wrote(&runs, other, 4, "b", &[3]);
        assert_eq!((own(&runs, other), read(other)), (vec![4], Some(vec![8])));
        runs.put(&place("t"), Some(parent()), other, true);
        wrote(&runs, other, 5, "b", &[1]);
        assert_eq!((own(&runs, other), read(other)), (vec![5], None), "its child has applied what it read");
    }

    #[test]
    fn a_run_that_is_given_an_id_goes_on_from_what_it_read_by_it() {
        let runs = Runs::default();
        let (run, other) = (Caller::Run(1), Caller::Other(1));
        let reads = |by, is_head, n| {
            runs.read(&key("t"), by, is_head, [TaskId::from_bytes([n; 16])].into_iter());
            runs.of(&key("t"), by).read.map(|read| ids(&read))
        };
        assert_eq!(reads(run, false, 1), Some(vec![1]));
        assert_eq!(reads(run, true, 2), Some(vec![1]), "whether it is the head");
        assert_eq!(reads(run, true, 3), Some(vec![3]), "another run with its number");
        assert_eq!(reads(run, false, 4), Some(vec![4]));
        assert_eq!(reads(run, false, 5), Some(vec![5]));
        wrote(&runs, run, 9, "a", &[1]);
        assert_eq!((reads(run, true, 6), own(&runs, run)), (Some(vec![6]), vec![]), "it had gone on");
        // Nobody knows whether the next read of an update is of the same update.
        assert_eq!(reads(other, false, 7), None);
        assert_eq!(reads(other, true, 8), None);
        wrote(&runs, other, 9, "a", &[1]);
        assert_eq!(runs.of(&key("t"), other).read.map(|read| ids(&read)), Some(vec![8]));
    }

    #[test]
    fn readers_take_nothing_from_runs() {
        let runs = Runs::default();
        wrote(&runs, Caller::Run(1), 1, "a", &[1]);
        for reader in 0..2 * RUNS as u64 {
            runs.read(&key("t"), Caller::Other(reader), true, std::iter::empty());
        }
        assert_eq!(own(&runs, Caller::Run(1)), [1]);
    }

    #[test]
    fn a_run_has_found_no_checkpoint_until_it_puts_or_reads_one() {
        let runs = Runs::default();
        let has = |run| runs.has_found_none(&place("t"), run);
        runs.found_none(&place("t"), Caller::Other(1));
        assert!(!has(Caller::Other(1)) && !has(Caller::Run(1)));
        for is_stored in [true, false] {
            runs.found_none(&place("t"), Caller::Run(1));
            assert!(
                has(Caller::Run(1))
                    && !has(Caller::Run(2))
                    && !runs.has_found_none(&place("other"), Caller::Run(1))
            );
            runs.put(&place("t"), None, Caller::Run(1), is_stored);
            assert!(!has(Caller::Run(1)));
        }
        runs.found_none(&place("t"), Caller::Run(1));
        runs.read(&key("t"), Caller::Run(1), true, std::iter::empty());
        assert!(!has(Caller::Run(1)));
        // One that goes back in time has the number of one that failed after it had looked.
        runs.found_none(&place("t"), Caller::Run(1));
        runs.goes_back(&place("other"), Caller::Run(1));
        runs.goes_back(&place("t"), Caller::Other(1));
        assert!(has(Caller::Run(1)));
        runs.goes_back(&place("t"), Caller::Run(1));
        assert!(!has(Caller::Run(1)));
    }
}

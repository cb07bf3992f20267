//! Which rows of its parent a checkpoint applies.
//!
//! LangGraph makes a task's id of its checkpoint, so two runs that go on from one checkpoint have tasks of the same
//! ids, and may write different things for them. Each list of writes is a row of its own. A run's child applies the
//! rows of that run. A task that the run did not write for has finished before: of the rows that were there when the
//! run read the checkpoint, the child applies what a reader is shown. An update of the state belongs to no run, and its
//! child applies rows in the same way.

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

/// Checkpoints under which the rows of runs are remembered. A run puts its child soon after its last row.
const CHECKPOINTS: usize = 4096;
/// From this many lists of a task on, the oldest of another caller makes room: it may be of an update that failed.
const LISTS: usize = 256;
/// Reads of others than runs that are remembered. An update puts its child soon after its read.
const READS: usize = 1024;

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
    /// Those that it read; `None` if it did not read the checkpoint, as where it has put it, or if others write for it.
    pub(crate) read: Option<BTreeSet<TaskId>>,
}

/// What the runs of this process have put, and what they have read. A run goes on from one checkpoint at a time.
///
/// A run is known by a number that another one may have once it has ended. Each begins with a read, so what an ended
/// one has left counts no more.
pub(crate) struct Runs {
    rows: Mutex<LruCache<At, Written>>,
    /// What others than runs have read.
    reads: Mutex<LruCache<(CheckpointKey, Caller), BTreeSet<TaskId>>>,
    /// The places where a run found no checkpoint, and has not put one yet.
    empty: Mutex<LruCache<(Place, u64), ()>>,
}

/// A checkpoint that a run goes on from, and the run. What belongs to no run is in one place.
type At = (CheckpointKey, Option<u64>);

#[derive(Default)]
struct Written {
    by_task: BTreeMap<String, Vec<List>>,
    read: Option<BTreeSet<TaskId>>,
}

/// A list of writes that no child has applied yet.
struct List {
    by: Caller,
    row: TaskId,
    /// A hash of each of them.
    writes: Vec<u64>,
    /// Whether its caller has read the checkpoint since: the next list is of another update.
    is_ended: bool,
}

impl Written {
    fn has(&self, by: Caller) -> bool {
        self.by_task.values().flatten().any(|list| list.by == by)
    }

    /// What a caller's child applies: its own lists. If it has none, others wrote for it: all.
    fn of(&self, by: Caller) -> impl Iterator<Item = &List> {
        let has_own = self.has(by);
        self.by_task.values().flatten().filter(move |list| !has_own || list.by == by)
    }

    /// A caller's child has applied these. Returns whether lists of others are left.
    fn leave(&mut self, by: Caller) -> bool {
        let has_own = self.has(by);
        self.by_task.retain(|_, lists| {
            lists.retain(|list| has_own && list.by != by);
            !lists.is_empty()
        });
        !self.by_task.is_empty()
    }
}

impl Default for Runs {
    fn default() -> Self {
        Self { rows: bounded(CHECKPOINTS), reads: bounded(READS), empty: bounded(CHECKPOINTS) }
    }
}

fn bounded<K: Eq + Hash, V>(size: usize) -> Mutex<LruCache<K, V>> {
    Mutex::new(LruCache::new(NonZeroUsize::new(size).unwrap_or(NonZeroUsize::MIN)))
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops what is of a thread.
fn drop_of<C: Clone + Eq + Hash, V>(all: &Mutex<LruCache<(CheckpointKey, C), V>>, thread: &ThreadId) {
    let mut all = locked(all);
    let gone: Vec<(CheckpointKey, C)> =
        all.iter().map(|(at, _)| at).filter(|(key, _)| key.thread == *thread).cloned().collect();
    for at in gone {
        all.pop(&at);
    }
}

impl Runs {
    /// An ordinary row was put; `list` has a hash of each of its writes. LangGraph puts the writes of a task again with
    /// more at the end, and may reorder these puts: of two lists of which one is the beginning of the other, the longer
    /// one has all writes. Others are of several updates in one step, to which it may give one task.
    pub(crate) fn wrote(&self, key: &CheckpointKey, by: Caller, row: &KnownTask, list: &[u64]) {
        let mut rows = locked(&self.rows);
        let put = rows.get_or_insert_mut((key.clone(), by.run()), Written::default);
        let lists = put.by_task.entry(row.author.task.clone()).or_default();
        lists.retain(|known| known.by != by || !known.is_ended);
        if lists.iter().any(|known| known.by == by && known.writes.starts_with(list)) {
            return;
        }
        let shorter = lists.iter_mut().find(|known| known.by == by && list.starts_with(&known.writes));
        if let Some(shorter) = shorter {
            shorter.row = row.id;
            shorter.writes = list.to_vec();
            return;
        }
        if lists.len() >= LISTS
            && let Some(oldest) = lists.iter().position(|known| known.by != by)
        {
            lists.remove(oldest);
        }
        lists.push(List { by, row: row.id, writes: list.to_vec(), is_ended: false });
    }

    /// A checkpoint with these rows was read. A run goes on from there. An update of the state reads, too, before it
    /// writes: if the one before it by the same caller failed, its lists count no more.
    pub(crate) fn read(&self, key: &CheckpointKey, by: Caller, rows: impl Iterator<Item = TaskId>) {
        let at = (key.clone(), by.run());
        let read: BTreeSet<TaskId> = rows.collect();
        if let Some(run) = by.run() {
            locked(&self.rows).put(at, Written { by_task: BTreeMap::new(), read: Some(read) });
            self.is_not_empty(&Place { thread: key.thread.clone(), namespace: key.namespace.clone() }, run);
            return;
        }
        locked(&self.reads).put((key.clone(), by), read);
        if let Some(put) = locked(&self.rows).peek_mut(&at) {
            for list in put.by_task.values_mut().flatten().filter(|list| list.by == by) {
                list.is_ended = true;
            }
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

    fn is_not_empty(&self, place: &Place, run: u64) {
        locked(&self.empty).pop(&(place.clone(), run));
    }

    /// The rows that a caller's child may apply.
    pub(crate) fn of(&self, key: &CheckpointKey, by: Caller) -> Rows {
        let mut rows = locked(&self.rows);
        let Some(put) = rows.get(&(key.clone(), by.run())) else { return Rows::default() };
        let own = put.of(by).enumerate().map(|(place, list)| (list.row, place));
        let read = match by {
            Caller::Run(_) => put.read.clone(),
            // An update writes for itself, so what came after its read is another one's.
            Caller::Other(_) if put.has(by) => locked(&self.reads).peek(&(key.clone(), by)).cloned(),
            Caller::Other(_) => None,
        };
        Rows { own: own.collect(), read }
    }

    /// A caller has put a child of `parent`, or failed to put it. Rows that come after a child are of another one.
    pub(crate) fn put(&self, place: &Place, parent: Option<CheckpointId>, by: Caller, is_stored: bool) {
        if is_stored && let Some(parent) = parent {
            let at = (place.key(parent), by.run());
            locked(&self.reads).pop(&(at.0.clone(), by));
            let mut rows = locked(&self.rows);
            if rows.peek_mut(&at).is_some_and(|put| !put.leave(by)) {
                rows.pop(&at);
            }
        }
        if let Some(run) = by.run() {
            self.is_not_empty(place, run);
        }
    }

    /// Forgets a thread.
    pub(crate) fn forget(&self, thread: &ThreadId) {
        drop_of(&self.rows, thread);
        drop_of(&self.reads, thread);
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
        let read = |run| runs.of(&key("t"), run).read.map(|read| ids(&read));
        let reads = |run, n| runs.read(&key("t"), run, [TaskId::from_bytes([n; 16])].into_iter());
        wrote(&runs, Caller::Run(2), 6, "a", &[1]);
        assert_eq!(read(Caller::Run(2)), None);
        // What is there is of a run that has ended: its number came to another one.
        reads(Caller::Run(2), 8);
        assert_eq!((read(Caller::Run(2)), own(&runs, Caller::Run(2))), (Some(vec![8]), vec![]));
        reads(other, 9);
        assert_eq!(runs.of(&key("t"), other), Rows::default());
        // What somebody reads between the puts of an update takes nothing from it.
        wrote(&runs, other, 1, "a", &[1]);
        wrote(&runs, other, 2, "a", &[2]);
        wrote(&runs, other, 3, "b", &[1, 2]);
        reads(other, 9);
        assert_eq!(own(&runs, other), [1, 2, 3]);
        wrote(&runs, other, 4, "b", &[3]);
        assert_eq!((own(&runs, other), read(other)), (vec![1, 2, 4], Some(vec![9])), "of another update");
        reads(Caller::Other(2), 9);
        assert_eq!(read(Caller::Other(2)), None, "others write for it");
        runs.put(&place("t"), Some(parent()), other, true);
        wrote(&runs, other, 5, "b", &[1]);
        assert_eq!((own(&runs, other), read(other)), (vec![5], None), "its child has applied what it read");
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
        runs.read(&key("t"), Caller::Run(1), std::iter::empty());
        assert!(!has(Caller::Run(1)));
    }
}

//! What the saver remembers of the threads that it wrote to last, so that a step costs one round trip and only what it
//! changes.
//!
//! All of it can be read again, and it is valid as long as the thread's mark is unchanged: the fence of every write
//! checks that. A process also remembers the last moment of the thread that it knows to be flushed, which the server
//! must never lose.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use lru::LruCache;
use threadkeep::id::{ChannelName, Namespace, ThreadId, Version};
use threadkeep::metadata::Entries;
use threadkeep_layout::{HASH, Run, Shapes, entries_bytes};
use tokio::sync::{Mutex as AsyncMutex, MutexGuard};

use crate::element::Index;
use crate::history::{History, Mark, Moment, Since};
use crate::rows::{Node, Snapshot};

/// Remembered heads of a thread.
const HEADS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(63);
/// Remembered large metadata objects of a thread.
const OBJECTS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(7);
/// The number of remembered threads.
const THREADS: usize = 1024;
/// The number of further threads of which only what a flush must know is remembered: some tens of megabytes.
const WAITING: usize = 1 << 16;
/// The most bytes of all that is remembered and can be read again, over all threads.
const BYTES: usize = 48 << 20;

/// Identifies a stored list of a thread.
pub(crate) type ListKey = (Namespace, ChannelName, Version);

/// A thread.
#[derive(Debug, Clone)]
pub(crate) struct ThreadState {
    /// None if the thread does not exist.
    pub(crate) history: Option<History>,
    pub(crate) index: Index,
    /// Known heads, including that a namespace has none.
    pub(crate) heads: LruCache<Namespace, Option<Arc<Node>>>,
    pub(crate) shapes: Shapes<ListKey>,
    /// The most recently stored large metadata objects, by key.
    pub(crate) objects: LruCache<String, StoredObject>,
}

/// What is remembered of a stored large object: its entries, and the numbers of their elements.
#[derive(Debug, Clone)]
pub(crate) struct StoredObject {
    pub(crate) entries: Entries,
    /// The bytes of the entries as they are stored.
    pub(crate) bytes: usize,
    pub(crate) runs: Vec<Run>,
}

impl ThreadState {
    /// A thread that does not exist.
    pub(crate) fn absent() -> Self {
        Self {
            history: None,
            index: Index::default(),
            heads: LruCache::new(HEADS),
            shapes: Shapes::default(),
            objects: LruCache::new(OBJECTS),
        }
    }

    pub(crate) fn mark(&self) -> Option<Mark> {
        self.history.as_ref().map(|history| history.mark)
    }

    /// What the history just found proves about the known one. None if they have nothing in common: the thread did not
    /// exist, does not exist, or was rewritten.
    pub(crate) fn since(&self, found: &Snapshot) -> Option<Since> {
        let (known, found) = (self.history.as_ref()?, &found.thread.as_ref()?.history);
        (known.mark.epoch == found.mark.epoch).then(|| found.since(&known.moment()))
    }

    /// What was found, with what is still valid of what was known before.
    pub(crate) fn found(known: Self, snapshot: &Snapshot) -> Self {
        let Some(row) = &snapshot.thread else { return Self::absent() };
        let mut state = match known.since(snapshot) {
            Some(Since::Contained) => known,
            _ => Self::absent(),
        };
        if state.mark() != Some(row.history.mark) {
            // Another process may have moved heads and added tasks; stored lists and elements never change.
            state.heads.clear();
        }
        state.history = Some(row.history.clone());
        for (space, n, hash) in &snapshot.hashes {
            state.index.note(*space, *n, *hash);
        }
        state.index.next = row.next;
        state
    }

    /// Its bytes in memory.
    fn weight(&self) -> usize {
        let weight = |known: &StoredObject| {
            entries_bytes(&known.entries, known.bytes) + known.runs.len() * size_of::<Run>()
        };
        let objects = self.objects.iter().map(|(_, known)| weight(known)).sum::<usize>();
        let heads = self.heads.iter().filter_map(|(_, head)| head.as_ref());
        let heads = heads.map(|head| head.weight()).sum::<usize>();
        self.index.len() * HASH + objects + heads + self.shapes.bytes()
    }
}

/// How long a deletion can be distinguished from a loss: somewhat less than the server keeps graves.
const GRAVES: Duration = Duration::from_hours(5);

/// When something was learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Learned {
    at: Instant,
    /// The other one may not count the time that the machine sleeps.
    clock: SystemTime,
}

impl Learned {
    fn now() -> Self {
        Self { at: Instant::now(), clock: SystemTime::now() }
    }

    /// Whether a grave of that time may be gone.
    fn is_older_than_graves(&self) -> bool {
        self.at.elapsed() > GRAVES || self.clock.elapsed().is_ok_and(|age| age > GRAVES)
    }
}

/// What this process knows to be flushed of a thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Known {
    /// The last moment, and when it was learned.
    flushed: Option<(Moment, Learned)>,
    /// The last moment that was acknowledged without a flush, if it may not be flushed: no flushed history that was
    /// found since contains it, and no later write was flushed. If the server lost it, a flush reports that.
    unflushed: Option<Moment>,
    /// The most recently deleted life of the thread.
    ended: Option<i64>,
}

/// Whether what was found agrees with what is known.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Agreement {
    Agrees,
    /// It lacks this, which was flushed.
    Lacks(Mark),
    /// It agrees if the thread has a grave of this life.
    IfBuried(Moment),
}

impl Known {
    /// Compares what is known with the row of the thread that a later statement found.
    pub(crate) fn compare(&self, found: Option<&History>) -> Agreement {
        let missing = |then: Moment| match found.map(|found| found.since(&then)) {
            Some(Since::Contained | Since::TooLongAgo) => Agreement::Agrees,
            Some(Since::Missing) => Agreement::Lacks(then.mark),
            None | Some(Since::AnotherLife) => Agreement::IfBuried(then),
        };
        if let Some(found) = found.filter(|found| Some(found.life) == self.ended) {
            return Agreement::Lacks(found.mark);
        }
        match self.flushed {
            None => Agreement::Agrees,
            Some((then, learned)) => match missing(then) {
                Agreement::IfBuried(_) if learned.is_older_than_graves() => Agreement::Agrees,
                agreement => agreement,
            },
        }
    }

    /// Whether the last moment may not be flushed.
    pub(crate) fn is_unflushed(&self) -> bool {
        self.unflushed.is_some()
    }

    /// Learns that a history of the thread is flushed. What it does not contain remains unflushed.
    fn learn_flushed(&mut self, history: &History) {
        self.flushed = Some((history.moment(), Learned::now()));
        let contains = |then: &Moment| matches!(history.since(then), Since::Contained | Since::TooLongAgo);
        self.unflushed = self.unflushed.filter(|then| !contains(then));
    }

    /// The last moment that a flush has to reach.
    pub(crate) fn newest(&self) -> Option<Moment> {
        self.unflushed.or(self.flushed.map(|(moment, _)| moment))
    }
}

/// A thread's place in the memory. This process writes to a thread sequentially: concurrent writes would only conflict
/// at the fence.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    state: AsyncMutex<Option<ThreadState>>,
    known: Mutex<Known>,
}

/// A thread while it is being written to. What is not put back is forgotten, and so is what is put back into a place
/// that was given to others.
pub(crate) struct Held<'a> {
    threads: &'a Threads,
    thread: &'a ThreadId,
    slot: &'a Slot,
    guard: MutexGuard<'a, Option<ThreadState>>,
}

impl Slot {
    pub(crate) async fn hold<'a>(&'a self, threads: &'a Threads, thread: &'a ThreadId) -> Held<'a> {
        Held { threads, thread, slot: self, guard: self.state.lock().await }
    }

    /// What is known now, to compare with the result of a statement that is sent after this.
    pub(crate) fn known(&self) -> Known {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn learn(&self, learn: impl FnOnce(&mut Known)) {
        learn(&mut self.known.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Records an acknowledged write. Its author named what it builds on, so it goes on from what the server had, whatever
    /// was lost before.
    pub(crate) fn acknowledged(&self, moment: Moment) {
        self.learn(|known| {
            if moment.mark.is_flushed() {
                (known.flushed, known.unflushed) = (Some((moment, Learned::now())), None);
            } else {
                known.unflushed = Some(moment);
            }
        });
    }

    /// Records an acknowledged rewrite. It is not by those who write to the thread: they may still flush what was lost.
    pub(crate) fn rewritten(&self, to: &History) {
        self.learn(|known| known.learn_flushed(to));
    }

    /// Records that everything up to a moment was flushed.
    pub(crate) fn flushed(&self, moment: Moment) {
        self.learn(|known| {
            if known.unflushed != Some(moment) {
                return;
            }
            known.unflushed = None;
            // What is known of another life, or of a later moment, is worth more.
            let before = |then: Moment| then.life == moment.life && then.mark.revision < moment.mark.revision;
            if known.flushed.is_none_or(|(then, _)| before(then)) {
                known.flushed = Some((moment, Learned::now()));
            }
        });
    }

    /// Records the result of a statement that was sent when `before` was known, and that agrees with it. What was
    /// learned since then is newer.
    pub(crate) fn found(&self, before: &Known, found: Option<&History>) {
        self.learn(|known| {
            if known != before {
                return;
            }
            let life = found.map(|found| found.life);
            if let Some((old, _)) = known.flushed.filter(|(old, _)| Some(old.life) != life) {
                let unflushed = known.unflushed.filter(|then| then.life != old.life);
                *known = Known { flushed: None, unflushed, ended: Some(old.life) };
            }
            if let Some(found) = found.filter(|found| found.mark.is_flushed()) {
                known.learn_flushed(found);
            }
        });
    }

    /// Records that a life of the thread was deleted.
    pub(crate) fn deleted(&self, life: i64) {
        self.learn(|known| *known = Known { ended: Some(life), ..Known::default() });
    }
}

impl Held<'_> {
    /// Takes what is known.
    pub(crate) fn take(&mut self) -> Option<ThreadState> {
        self.guard.take()
    }

    /// Puts back what is valid.
    pub(crate) fn put(&mut self, state: ThreadState) {
        let has_place = self.threads.weigh(self.thread, self.slot, state.weight());
        *self.guard = has_place.then_some(state);
    }
}

/// The threads that were written to last.
#[derive(Debug)]
pub(crate) struct Threads(Mutex<Places>);

#[derive(Debug)]
struct Places {
    slots: LruCache<ThreadId, Place>,
    /// Evicted ones that wait for a flush, or were in use: their calls may learn something that a flush must know.
    waiting: LruCache<ThreadId, Arc<Slot>>,
    weight: usize,
    /// The greatest weight.
    most: usize,
}

#[derive(Debug, Default)]
struct Place {
    slot: Arc<Slot>,
    weight: usize,
}

impl Places {
    /// Evicts those used longest ago, if they are too many. If they are too large, only what can be read again is
    /// forgotten of them: what is known to be flushed, or not to be, cannot. A call that uses an evicted one goes on
    /// with it.
    fn trim(&mut self) {
        while self.slots.len() > THREADS
            && let Some((thread, old)) = self.slots.pop_lru()
        {
            self.weight = self.weight.saturating_sub(old.weight);
            if Arc::strong_count(&old.slot) > 1 || old.slot.known().is_unflushed() {
                if let Ok(mut state) = old.slot.state.try_lock() {
                    *state = None;
                }
                self.waiting.put(thread, old.slot);
            }
        }
        while self.waiting.len() > WAITING {
            self.waiting.pop_lru();
        }
        let others = self.slots.len().saturating_sub(1);
        for (_, place) in self.slots.iter_mut().rev().take(others) {
            if self.weight <= self.most {
                return;
            }
            // One that is in use is about to be used again.
            if let Ok(mut state) = place.slot.state.try_lock() {
                *state = None;
                self.weight = self.weight.saturating_sub(std::mem::take(&mut place.weight));
            }
        }
    }
}

impl Default for Threads {
    fn default() -> Self {
        Self::of(BYTES)
    }
}

impl Threads {
    fn of(most: usize) -> Self {
        let (slots, waiting) = (LruCache::unbounded(), LruCache::unbounded());
        Self(Mutex::new(Places { slots, waiting, weight: 0, most }))
    }

    /// The place of a thread.
    pub(crate) fn slot(&self, thread: &ThreadId) -> Arc<Slot> {
        let mut places = self.places();
        let Places { slots, waiting, .. } = &mut *places;
        let place = || Place { slot: waiting.pop(thread).unwrap_or_default(), weight: 0 };
        let slot = slots.get_or_insert(thread.clone(), place).slot.clone();
        places.trim();
        slot
    }

    /// The place of a thread, if anything is remembered of it.
    pub(crate) fn existing(&self, thread: &ThreadId) -> Option<Arc<Slot>> {
        let places = self.places();
        let slot = places.slots.peek(thread).map(|place| &place.slot);
        slot.or_else(|| places.waiting.peek(thread)).cloned()
    }

    /// Forgets everything about a thread.
    pub(crate) fn forget(&self, thread: &ThreadId) {
        let mut places = self.places();
        places.waiting.pop(thread);
        if let Some(place) = places.slots.pop(thread) {
            places.weight = places.weight.saturating_sub(place.weight);
        }
    }

    /// Records the size of a place, unless it was evicted, and forgets others if the total is too large. Returns whether
    /// it was recorded.
    fn weigh(&self, thread: &ThreadId, slot: &Slot, weight: usize) -> bool {
        let mut places = self.places();
        let place =
            places.slots.peek_mut(thread).filter(|place| std::ptr::eq(Arc::as_ptr(&place.slot), slot));
        let Some(place) = place else { return false };
        let before = std::mem::replace(&mut place.weight, weight);
        places.weight = (places.weight + weight).saturating_sub(before);
        places.trim();
        true
    }

    fn places(&self) -> std::sync::MutexGuard<'_, Places> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::convert::Infallible;

    use threadkeep::id::{CheckpointId, TaskId};
    use threadkeep::metadata::Source;
    use threadkeep::saver::Flush;
    use threadkeep_layout::{Form, Manifest, Shape};

    use super::*;
    use crate::element::Space;
    use crate::record::{CheckpointRecord, Extra, TaskRecord, WriteRecord};

    #[test]
    fn the_memory_is_bounded_whatever_is_done_with_its_threads() {
        let threads = Threads::default();
        for n in 0..3000 {
            threads.slot(&ThreadId::from(n.to_string()));
        }
        assert!(threads.0.lock().unwrap().slots.len() <= THREADS);
        assert!(threads.existing(&"2999".into()).is_some() && threads.existing(&"0".into()).is_none());
    }

    #[test]
    fn a_thread_weighs_what_the_values_of_its_objects_take() {
        let mut state = ThreadState::absent();
        for (key, bytes) in [("a", 1_000), ("b", 500)] {
            let object = StoredObject { entries: Entries::default(), bytes, runs: Vec::new() };
            state.objects.put(key.to_owned(), object);
        }
        assert_eq!(state.weight(), 1_500);
        let mut object = state.objects.pop("b").unwrap();
        object.runs = vec![Run { start: 1, len: 1 }; 100];
        state.objects.put("b".to_owned(), object);
        assert_eq!(state.weight(), 1_500 + 100 * size_of::<Run>());
    }

    /// A list that was edited much has thousands of runs, and each of its last versions has them.
    #[tokio::test]
    async fn a_thread_weighs_what_the_shapes_of_its_lists_take() {
        let runs = (0..10_000).map(|n| Run { start: 2 * n, len: 1 }).collect();
        let manifest = Manifest { chunks: Vec::new(), tail: runs };
        let Ok(shape) = Shape::stored(&manifest, |_| Ok::<_, Infallible>(Vec::new()));
        let threads = Threads::of(3 * shape.bytes());
        let names = ["0", "1", "2", "3"].map(ThreadId::from);
        for thread in &names {
            let mut state = ThreadState::absent();
            let version = Version { counter: 1, random: 1 };
            state.shapes.put((Namespace::root(), "messages".into(), version), shape.clone());
            assert!(state.weight() > shape.bytes());
            threads.slot(thread).hold(&threads, thread).await.put(state);
        }
        let mut whole = Vec::new();
        for thread in &names {
            let slot = threads.existing(thread).unwrap();
            whole.push(slot.hold(&threads, thread).await.take().is_some());
        }
        assert_eq!(whole, [false, false, true, true]);
    }

    /// A graph that sends to thousands of tasks writes all of them onto one head.
    #[test]
    fn a_head_weighs_what_its_tasks_take() {
        let write = WriteRecord { channel: "messages".into(), overwrite: false, value: Form::Shared(1) };
        let task = TaskRecord {
            task: TaskId::from_bytes([1; 16]),
            node: "model".into(),
            index: 0,
            writes: vec![write; 1_000],
        };
        let maps = vec![("runs".to_owned(), vec![Run { start: 1, len: 1 }; 1_000])];
        let record = CheckpointRecord {
            parent: None,
            source: Source::Loop,
            step: 1,
            delta_marker: false,
            next: Vec::new(),
            applied: vec![TaskId::from_bytes([2; 16]); 1_000],
            parents: Vec::new(),
            counters: BTreeMap::new(),
            extra: Extra { maps, ..Extra::default() },
            channels: BTreeMap::new(),
        };
        let node = Node { id: CheckpointId::from_bytes([1; 16]), record, tasks: vec![task; 10] };
        let mut state = ThreadState::absent();
        state.heads.put("inner".into(), None);
        state.heads.put(Namespace::root(), Some(Arc::new(node)));
        let least = 10_000 * size_of::<WriteRecord>() + 1_000 * (size_of::<TaskId>() + size_of::<Run>());
        assert!(state.weight() >= least, "{} of {least} bytes", state.weight());
    }

    /// The time in which the machine sleeps is missing in one of them.
    #[test]
    fn a_deletion_is_not_called_a_loss_once_its_grave_may_be_gone_by_either_time() {
        let moment = History::first(Flush::Now).moment();
        let after =
            |learned: Learned| Known { flushed: Some((moment, learned)), ..Known::default() }.compare(None);
        let now = Learned::now();
        assert_eq!(after(now), Agreement::IfBuried(moment));
        let clock = now.clock.checked_sub(2 * GRAVES).unwrap();
        assert_eq!(after(Learned { clock, ..now }), Agreement::Agrees);
        // A clock that was set back says nothing.
        let clock = now.clock.checked_add(2 * GRAVES).unwrap();
        assert_eq!(after(Learned { clock, ..now }), Agreement::IfBuried(moment));
    }

    /// Without what is known to be flushed, or not to be, a flush would acknowledge what the server has lost.
    #[tokio::test]
    async fn what_cannot_be_read_again_is_kept_whatever_else_is_too_much() {
        let heavy = || {
            let mut state = ThreadState::absent();
            (0..9_u8).for_each(|n| state.index.note(Space::Values, n.into(), [n; 16]));
            state
        };
        let threads = Threads::of(20 * HASH);
        let moment = History::first(Flush::WithNext).moment();
        let names = ["0", "1", "2", "3", "4"].map(ThreadId::from);
        for thread in &names {
            let slot = threads.slot(thread);
            slot.acknowledged(moment);
            slot.hold(&threads, thread).await.put(heavy());
        }
        assert_eq!(threads.0.lock().unwrap().weight, 18 * HASH);
        let mut whole = Vec::new();
        for thread in &names {
            let slot = threads.existing(thread).unwrap();
            assert_eq!(slot.known().newest(), Some(moment));
            whole.push(slot.hold(&threads, thread).await.take().is_some());
        }
        assert_eq!(whole, [false, false, false, true, true]);
    }

    /// A flush that does not know what it has to reach would acknowledge what the server has lost.
    #[tokio::test]
    async fn a_thread_that_waits_for_a_flush_is_remembered_whatever_else_is_written_to() {
        let threads = Threads::default();
        let many = |n: usize| {
            for n in 0..n {
                threads.slot(&ThreadId::from(n.to_string()));
            }
        };
        let moment = History::first(Flush::WithNext).moment();
        let (waiting, used) = (ThreadId::from("waiting"), ThreadId::from("used"));
        threads.slot(&waiting).acknowledged(moment);
        let slot = threads.slot(&used);
        let mut held = slot.hold(&threads, &used).await;
        many(3000);
        // What it put back could be read again, and nobody would ever forget it.
        held.put(ThreadState::absent());
        assert!(held.take().is_none());
        drop(held);
        slot.acknowledged(moment);
        drop(slot);
        for thread in [&waiting, &used] {
            assert_eq!(threads.existing(thread).unwrap().known().newest(), Some(moment));
            assert_eq!(threads.slot(thread).known().newest(), Some(moment));
        }
        assert_eq!(threads.0.lock().unwrap().waiting.len(), 0, "both have places again");
        many(3000);
        threads.forget(&waiting);
        assert!(
            threads.existing(&waiting).is_none(),
            "what the server lost is forgotten once it was reported"
        );
        assert_eq!(threads.existing(&used).unwrap().known().newest(), Some(moment));

        for n in 0..WAITING + 2 * THREADS {
            threads.slot(&ThreadId::from(n.to_string())).acknowledged(moment);
        }
        let places = threads.0.lock().unwrap();
        assert_eq!((places.slots.len(), places.waiting.len()), (THREADS, WAITING), "there is an end to it");
    }

    /// What is put back into a place that was given to others is not counted.
    #[tokio::test]
    async fn what_is_forgotten_while_it_is_in_use_weighs_nothing() {
        let threads = Threads::default();
        let heavy = || {
            let mut state = ThreadState::absent();
            (0..9).for_each(|n| state.index.note(Space::Values, n, [1; 16]));
            state
        };
        let thread = ThreadId::from("t");
        let slot = threads.slot(&thread);
        let mut held = slot.hold(&threads, &thread).await;
        threads.forget(&thread);
        held.put(heavy());
        assert_eq!(threads.0.lock().unwrap().weight, 0);
        // Another place by then.
        let again = threads.slot(&thread);
        again.hold(&threads, &thread).await.put(heavy());
        let weight = threads.0.lock().unwrap().weight;
        assert!(weight > 0);
        held.put(heavy());
        assert_eq!(threads.0.lock().unwrap().weight, weight);
        threads.forget(&thread);
        assert_eq!(threads.0.lock().unwrap().weight, 0);
    }
}

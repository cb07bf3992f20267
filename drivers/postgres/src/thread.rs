//! What the saver remembers of the threads it wrote to last, so that a step costs one round trip and what it changes.
//!
//! All of it can be read again, and it is valid as long as the thread has the mark that it had: the fence of every write
//! checks that. Beside it a process remembers the last moment of the thread that it knows to be flushed, which the server
//! must never lose.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lru::LruCache;
use threadkeep::id::{ChannelName, Namespace, ThreadId, Version};
use threadkeep::metadata::Entries;
use threadkeep_layout::{Run, Shape};
use tokio::sync::{Mutex as AsyncMutex, MutexGuard};

use crate::element::Index;
use crate::history::{History, Mark, Moment, Since};
use crate::rows::{Node, Snapshot};

/// Heads of a thread that are remembered.
const HEADS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(63);
/// Stored lists of a thread whose shapes are remembered.
const SHAPES: NonZeroUsize = NonZeroUsize::MIN.saturating_add(63);
/// Large objects of metadata of a thread that are remembered.
const OBJECTS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(7);
/// Threads that are remembered.
const THREADS: usize = 1024;
/// Hashes that are remembered over all threads: about fifty megabytes.
const HASHES: usize = 1 << 20;

/// Names a stored list of a thread.
pub(crate) type ListKey = (Namespace, ChannelName, Version);

/// A thread.
#[derive(Debug, Clone)]
pub(crate) struct ThreadState {
    /// None if the thread does not exist.
    pub(crate) history: Option<History>,
    pub(crate) index: Index,
    /// Heads that are known, also that a namespace has none.
    pub(crate) heads: LruCache<Namespace, Option<Arc<Node>>>,
    pub(crate) shapes: LruCache<ListKey, Shape>,
    /// The large objects of metadata that were stored last, by their keys.
    pub(crate) objects: LruCache<String, StoredObject>,
}

/// What is remembered of a large object that was stored: its entries, and the numbers of their elements.
#[derive(Debug, Clone)]
pub(crate) struct StoredObject {
    pub(crate) entries: Entries,
    pub(crate) runs: Vec<Run>,
}

impl ThreadState {
    /// A thread that does not exist.
    pub(crate) fn absent() -> Self {
        Self {
            history: None,
            index: Index::default(),
            heads: LruCache::new(HEADS),
            shapes: LruCache::new(SHAPES),
            objects: LruCache::new(OBJECTS),
        }
    }

    pub(crate) fn mark(&self) -> Option<Mark> {
        self.history.as_ref().map(|history| history.mark)
    }

    /// What the history that was found proves about the one that is known. None if they have nothing in common: the
    /// thread did not exist, does not exist, or was rewritten.
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
            // Another process may have moved heads and added tasks; what is stored of lists and elements never changes.
            state.heads.clear();
        }
        state.history = Some(row.history.clone());
        for (space, n, hash) in &snapshot.hashes {
            state.index.note(*space, *n, *hash);
        }
        state.index.next = row.next;
        state
    }

    /// What it takes in memory, in hashes.
    fn weight(&self) -> usize {
        // An entry is a key, a value, their counts, and a place in a tree.
        let objects = self.objects.iter().map(|(_, known)| 4 * known.entries.len()).sum::<usize>();
        self.index.len() + objects
    }
}

/// For how long a deletion can be told from a loss: somewhat less than the server keeps graves.
const GRAVES: Duration = Duration::from_hours(5);

/// What this process knows to be flushed of a thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Known {
    /// The last moment, and when it was learned.
    flushed: Option<(Moment, Instant)>,
    /// The last moment that was acknowledged without a flush, if that is later.
    unflushed: Option<Moment>,
    /// The life of the thread that was deleted last.
    ended: Option<i64>,
}

/// Whether what was found agrees with what is known.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Agreement {
    Agrees,
    /// It lacks this, which was flushed.
    Lacks(Mark),
    /// It does, if the thread has a grave of this life.
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
                Agreement::IfBuried(_) if learned.elapsed() > GRAVES => Agreement::Agrees,
                agreement => agreement,
            },
        }
    }

    /// Whether the last moment may not be flushed.
    pub(crate) fn is_unflushed(&self) -> bool {
        self.unflushed.is_some()
    }

    /// The last moment that a flush has to reach.
    pub(crate) fn newest(&self) -> Option<Moment> {
        self.unflushed.or(self.flushed.map(|(moment, _)| moment))
    }
}

/// A thread's place in the memory. Writes of this process to the thread go one after the other: they would only meet at the
/// fence.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    state: AsyncMutex<Option<ThreadState>>,
    known: Mutex<Known>,
    weight: AtomicUsize,
}

/// A thread while it is written to. What is not put back is forgotten.
pub(crate) struct Held<'a> {
    threads: &'a Threads,
    slot: &'a Slot,
    guard: MutexGuard<'a, Option<ThreadState>>,
}

impl Slot {
    pub(crate) async fn hold<'a>(&'a self, threads: &'a Threads) -> Held<'a> {
        Held { threads, slot: self, guard: self.state.lock().await }
    }

    /// What is known now: to be compared with what a statement finds that is sent after this.
    pub(crate) fn known(&self) -> Known {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn learn(&self, learn: impl FnOnce(&mut Known)) {
        learn(&mut self.known.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Notes a write that was acknowledged.
    pub(crate) fn acknowledged(&self, moment: Moment) {
        self.learn(|known| match moment.mark.is_flushed() {
            true => (known.flushed, known.unflushed) = (Some((moment, Instant::now())), None),
            false => known.unflushed = Some(moment),
        });
    }

    /// Notes that everything up to a moment was flushed.
    pub(crate) fn flushed(&self, moment: Moment) {
        self.learn(|known| {
            if known.unflushed == Some(moment) {
                (known.flushed, known.unflushed) = (Some((moment, Instant::now())), None);
            }
        });
    }

    /// Notes what was found by a statement that was sent when `before` was known, and agrees with it. What was learned
    /// since then is newer.
    pub(crate) fn found(&self, before: &Known, found: Option<&History>) {
        self.learn(|known| {
            if known != before {
                return;
            }
            let life = found.map(|found| found.life);
            if let Some((old, _)) = known.flushed.filter(|(old, _)| Some(old.life) != life) {
                *known = Known { ended: Some(old.life), ..Known::default() };
            }
            if let Some(found) = found.filter(|found| found.mark.is_flushed()) {
                known.flushed = Some((found.moment(), Instant::now()));
                known.unflushed = None;
            }
        });
    }

    /// Notes that a life of the thread was deleted.
    pub(crate) fn deleted(&self, life: i64) {
        self.learn(|known| *known = Known { ended: Some(life), ..Known::default() });
    }
}

impl Held<'_> {
    /// Takes what is known.
    pub(crate) fn take(&mut self) -> Option<ThreadState> {
        self.guard.take()
    }

    /// Remembers what is right.
    pub(crate) fn put(&mut self, state: ThreadState) {
        let weight = state.weight();
        *self.guard = Some(state);
        self.threads.weigh(self.slot, weight);
    }
}

/// The threads that were written to last.
#[derive(Debug)]
pub(crate) struct Threads(Mutex<Places>);

#[derive(Debug)]
struct Places {
    slots: LruCache<ThreadId, Arc<Slot>>,
    weight: usize,
}

impl Default for Threads {
    fn default() -> Self {
        Self(Mutex::new(Places { slots: LruCache::unbounded(), weight: 0 }))
    }
}

impl Threads {
    /// The place of a thread.
    pub(crate) fn slot(&self, thread: &ThreadId) -> Arc<Slot> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.slots.get_or_insert(thread.clone(), Arc::default).clone()
    }

    /// The place of a thread, if something is remembered of it.
    pub(crate) fn existing(&self, thread: &ThreadId) -> Option<Arc<Slot>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).slots.peek(thread).cloned()
    }

    /// Forgets everything about a thread.
    pub(crate) fn forget(&self, thread: &ThreadId) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = known.slots.pop(thread) {
            known.weight = known.weight.saturating_sub(slot.weight.swap(0, Ordering::Relaxed));
        }
    }

    /// Notes how much is remembered in a place, and forgets others as far as it is too much.
    fn weigh(&self, slot: &Slot, weight: usize) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = slot.weight.swap(weight, Ordering::Relaxed);
        known.weight = (known.weight + weight).saturating_sub(before);
        while known.slots.len() > 1 && (known.weight > HASHES || known.slots.len() > THREADS) {
            if let Some((_, old)) = known.slots.pop_lru() {
                known.weight = known.weight.saturating_sub(old.weight.swap(0, Ordering::Relaxed));
            }
        }
    }
}

//! What the saver remembers of the threads it wrote to last, so that a step costs one round trip and what it changes.
//!
//! All of it can be read again. It is right as long as the thread has the mark that it had; the fence of every write
//! tells.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use lru::LruCache;
use threadkeep::id::{ChannelName, Namespace, ThreadId, Version};
use threadkeep::metadata::Entries;
use threadkeep_layout::{Run, Shape};
use tokio::sync::{Mutex as AsyncMutex, MutexGuard};

use crate::element::Index;
use crate::rows::{Mark, Node, Snapshot};

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
    /// None if the thread is not there.
    pub(crate) mark: Option<Mark>,
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
    /// A thread that is not there.
    pub(crate) fn absent() -> Self {
        Self {
            mark: None,
            index: Index::default(),
            heads: LruCache::new(HEADS),
            shapes: LruCache::new(SHAPES),
            objects: LruCache::new(OBJECTS),
        }
    }

    /// What was found, with what is still right of what was known before.
    pub(crate) fn found(known: Option<Self>, snapshot: &Snapshot) -> Self {
        let Some(row) = &snapshot.thread else { return Self::absent() };
        let same_life =
            |known: &Self| known.mark.is_some_and(|mark| mark.epoch == row.mark.epoch && mark.is_flushed());
        let mut state = known.filter(same_life).unwrap_or_else(Self::absent);
        if state.mark != Some(row.mark) {
            // Somebody else may have moved heads and added tasks; what is stored of lists and elements never changes.
            state.heads.clear();
        }
        state.mark = Some(row.mark);
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

/// A thread's place in the memory. Writes of this process to the thread go one after the other: they would only meet at the
/// fence.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    state: AsyncMutex<Option<ThreadState>>,
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
pub(crate) struct Threads(Mutex<Known>);

#[derive(Debug)]
struct Known {
    slots: LruCache<ThreadId, Arc<Slot>>,
    weight: usize,
}

impl Default for Threads {
    fn default() -> Self {
        Self(Mutex::new(Known { slots: LruCache::unbounded(), weight: 0 }))
    }
}

impl Threads {
    /// The place of a thread.
    pub(crate) fn slot(&self, thread: &ThreadId) -> Arc<Slot> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.slots.get_or_insert(thread.clone(), Arc::default).clone()
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

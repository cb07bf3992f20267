//! The places of the threads that were written to last: how many are remembered, and how much of each.

use std::sync::{Arc, Mutex, PoisonError};

use lru::LruCache;
use threadkeep::id::ThreadId;
use tokio::sync::{Mutex as AsyncMutex, MutexGuard};

use super::{Known, ThreadState};
use crate::history::{History, Moment};

/// The number of remembered threads.
const THREADS: usize = 1024;
/// The number of further threads of which only what a flush must know is remembered: some tens of megabytes.
const WAITING: usize = 1 << 16;
/// The most bytes of all that is remembered and can be read again, over all threads.
const BYTES: usize = 48 << 20;

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
        self.learn(|known| known.acknowledged(moment));
    }

    /// Records an acknowledged rewrite. It is not by those who write to the thread: they may still flush what was lost.
    pub(crate) fn rewritten(&self, to: &History) {
        self.learn(|known| known.learn_flushed(to));
    }

    /// Records that everything up to a moment was flushed.
    pub(crate) fn flushed(&self, moment: Moment) {
        self.learn(|known| known.flushed(moment));
    }

    /// Records the result of a statement that was sent when `before` was known, and that agrees with it. What was
    /// learned since then is newer.
    pub(crate) fn found(&self, before: &Known, found: Option<&History>) {
        self.learn(|known| {
            if known == before {
                known.found(found);
            }
        });
    }

    /// Records that a life of the thread was deleted.
    pub(crate) fn deleted(&self, life: i64) {
        self.learn(|known| *known = Known::buried(life));
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
mod tests;

//! The bytes of all buffers, and which to give up first.
//!
//! A frame has the size of a conversation, so counting frames bounds nothing. Each buffer has a limit of its own; this is
//! the limit of all together. When it is reached, the buffers of ended runs are emptied, the longest ended first, and
//! then the publishing run keeps only its newest event. A subscriber that still needed them gets a gap; why a run failed is
//! kept.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::run::Run;
use super::{Event, lock};

/// What an event takes besides its data: the entry, the id, the name, the allocation.
const ENTRY_BYTES: usize = 128;

/// The bytes that an event takes in a buffer.
pub(super) fn size(event: &Event) -> usize {
    event.data.len() + ENTRY_BYTES
}

/// All buffers of a bridge.
pub(super) struct Memory {
    limit: usize,
    used: AtomicUsize,
    ended: Mutex<Ended>,
}

/// Ended runs whose buffers exist, in the order of their ends.
#[derive(Default)]
struct Ended {
    next: u64,
    runs: BTreeMap<u64, Weak<Run>>,
}

impl Memory {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, used: AtomicUsize::new(0), ended: Mutex::default() }
    }

    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    pub(super) fn is_exceeded(&self) -> bool {
        self.used() > self.limit
    }

    pub(super) fn add(&self, bytes: usize) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn free(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Remembers that `run` has ended; its key for [`Self::gone`].
    pub(super) fn ended(&self, run: &Arc<Run>) -> u64 {
        let mut ended = lock(&self.ended);
        let key = ended.next;
        ended.next += 1;
        ended.runs.insert(key, Arc::downgrade(run));
        key
    }

    /// Forgets an ended run whose buffer is gone.
    pub(super) fn gone(&self, key: u64) {
        lock(&self.ended).runs.remove(&key);
    }

    /// Empties buffers of ended runs while the limit is exceeded.
    pub(super) fn relieve(&self) {
        while self.is_exceeded() {
            // The run may be dropped here, and its drop takes the lock.
            let Some((_, run)) = lock(&self.ended).runs.pop_first() else { return };
            if let Some(run) = run.upgrade() {
                run.empty();
            }
        }
    }
}

//! What the readers remember: names, and the most recent large metadata objects, so that a read of a thread's next
//! checkpoint loads only what was added to them.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use threadkeep_layout::{Object, Run, entries_bytes};

use crate::rows::directory::ChainKey;
use crate::rows::names::Names;
use crate::rows::record::Ordinal;
use crate::stats::Counters;

/// The most bytes of all remembered objects, over all threads. The last one is remembered whatever its size.
const BYTES: usize = 48 << 20;
/// The number of remembered objects.
const OBJECTS: NonZeroUsize = NonZeroUsize::MIN.saturating_add((1 << 12) - 1);
/// Smaller objects are read as fast as they are looked up.
const SMALLEST: usize = 64;

/// The memory of the readers.
pub(crate) struct Memory {
    pub(crate) names: Names,
    pub(crate) counters: Arc<Counters>,
    objects: Mutex<Objects>,
}

struct Objects {
    known: LruCache<(ChainKey, String), Known>,
    bytes: usize,
}

/// A large object of a checkpoint. Until its thread is rewritten, it has these entries for every read that sees the
/// checkpoint.
#[derive(Clone)]
pub(crate) struct Known {
    pub(crate) ordinal: Ordinal,
    /// The thread's rewrite count at that time.
    pub(crate) rewrites: u32,
    pub(crate) object: Object,
}

impl Known {
    /// Its bytes in memory.
    fn weight(&self) -> usize {
        let Object { manifest, entries, bytes } = &self.object;
        let runs = manifest.chunks.len() + manifest.tail.len();
        entries_bytes(entries, *bytes) + runs * size_of::<Run>()
    }
}

impl Memory {
    pub(crate) fn new(counters: Arc<Counters>) -> Self {
        let objects = Mutex::new(Objects { known: LruCache::new(OBJECTS), bytes: 0 });
        Self { names: Names::default(), counters, objects }
    }

    // Each change is whole before anything can fail, so a poisoned lock guards nothing half done.
    fn lock(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The remembered object of a chain, if its thread has exactly this rewrite count.
    pub(crate) fn object(&self, chain: ChainKey, key: &str, rewrites: u32) -> Option<Known> {
        self.lock().known.get(&(chain, key.to_owned())).filter(|known| known.rewrites == rewrites).cloned()
    }

    /// Remembers an object, unless it is small or that of a later checkpoint is known.
    pub(crate) fn remember(&self, chain: ChainKey, key: &str, known: Known) {
        if known.object.entries.len() < SMALLEST {
            return;
        }
        let place = (chain, key.to_owned());
        // Dropped after the lock is released: dropping a long one takes a while.
        let mut old = Vec::new();
        let mut objects = self.lock();
        let newer = |have: &Known| have.rewrites == known.rewrites && have.ordinal >= known.ordinal;
        if objects.known.peek(&place).is_some_and(newer) {
            return;
        }
        objects.bytes += known.weight();
        old.extend(objects.known.push(place, known));
        objects.bytes -= old.iter().map(|(_, old)| old.weight()).sum::<usize>();
        while objects.bytes > BYTES && objects.known.len() > 1 {
            let Some(least) = objects.known.pop_lru() else { break };
            objects.bytes -= least.1.weight();
            old.push(least);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn known(ordinal: Ordinal, entries: usize) -> Known {
        let entries = (0..entries).map(|n| (n.to_string().into(), Arc::new(json!(n)))).collect();
        let object = Object { entries, ..Object::default() };
        Known { ordinal, rewrites: 3, object }
    }

    #[test]
    fn the_newest_object_of_a_chain_is_remembered() {
        let memory = Memory::new(Arc::default());
        let ordinal = |chain| memory.object(chain, "k", 3).map(|known| known.ordinal);
        memory.remember(1, "k", known(1, SMALLEST - 1));
        assert_eq!(ordinal(1), None, "a small one is read again");
        for (given, expected) in [(5, 5), (3, 5), (7, 7)] {
            memory.remember(1, "k", known(given, 100));
            assert_eq!(ordinal(1), Some(expected));
        }
        let weight = known(7, 100).weight();
        assert_eq!(memory.lock().bytes, weight, "one takes the place of the one before");
        assert!(memory.object(1, "k", 4).is_none(), "its numbers may mean something else");
        memory.remember(1, "k", Known { rewrites: 4, ..known(2, 80) });
        assert_eq!((ordinal(1), memory.object(1, "k", 4).map(|known| known.ordinal)), (None, Some(2)));
        assert_eq!(memory.lock().bytes, known(2, 80).weight());
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let memory = Memory::new(Arc::default());
        let ordinal = |chain| memory.object(chain, "k", 3).map(|known| known.ordinal);
        // Few entries with long values.
        let mut large = known(1, 100);
        large.object.bytes = BYTES / 4;
        for chain in 1..=5 {
            memory.remember(chain, "k", large.clone());
        }
        assert_eq!([1, 2, 3, 4, 5].map(ordinal), [None, None, Some(1), Some(1), Some(1)]);
        assert_eq!(memory.lock().bytes, 3 * large.weight());
        large.object.bytes = 2 * BYTES;
        memory.remember(6, "k", large);
        assert_eq!([3, 4, 5, 6].map(ordinal), [None, None, None, Some(1)], "the last one, whatever its size");
    }
}

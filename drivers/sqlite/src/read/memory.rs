//! What the readers remember: names, and the most recent large metadata objects, so that a read of a thread's next
//! checkpoint loads only what was added to them.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use threadkeep::metadata::Entries;
use threadkeep_layout::Manifest;

use crate::rows::directory::ChainKey;
use crate::rows::names::Names;
use crate::rows::record::Ordinal;
use crate::stats::Counters;

/// Entries remembered over all threads: about fifty megabytes.
const ENTRIES: usize = 1 << 18;
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
    entries: usize,
}

/// A large object of a checkpoint. Until its thread is rewritten, its manifest has these entries, for every read that sees
/// the checkpoint.
#[derive(Clone)]
pub(crate) struct Known {
    pub(crate) ordinal: Ordinal,
    /// The thread's rewrite count at that time.
    pub(crate) rewrites: u32,
    pub(crate) manifest: Manifest,
    pub(crate) entries: Entries,
}

impl Memory {
    pub(crate) fn new(counters: Arc<Counters>) -> Self {
        let objects = Mutex::new(Objects { known: LruCache::new(OBJECTS), entries: 0 });
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
        if known.entries.len() < SMALLEST {
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
        objects.entries += known.entries.len();
        old.extend(objects.known.push(place, known));
        objects.entries -= old.iter().map(|(_, old)| old.entries.len()).sum::<usize>();
        while objects.entries > ENTRIES && objects.known.len() > 1 {
            let Some(least) = objects.known.pop_lru() else { break };
            objects.entries -= least.1.entries.len();
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
        Known { ordinal, rewrites: 3, manifest: Manifest::default(), entries }
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
        assert_eq!(memory.lock().entries, 100, "one takes the place of the one before");
        assert!(memory.object(1, "k", 4).is_none(), "its numbers may mean something else");
        memory.remember(1, "k", Known { rewrites: 4, ..known(2, 80) });
        assert_eq!((ordinal(1), memory.object(1, "k", 4).map(|known| known.ordinal)), (None, Some(2)));
        assert_eq!(memory.lock().entries, 80);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let memory = Memory::new(Arc::default());
        let ordinal = |chain| memory.object(chain, "k", 3).map(|known| known.ordinal);
        let large = known(1, ENTRIES / 4 + 1);
        for chain in 1..=5 {
            memory.remember(chain, "k", large.clone());
        }
        assert_eq!([1, 2, 3, 4, 5].map(ordinal), [None, None, Some(1), Some(1), Some(1)]);
        assert_eq!(memory.lock().entries, 3 * large.entries.len());
    }
}

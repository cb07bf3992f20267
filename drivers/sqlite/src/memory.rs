//! What the readers remember: names, and the large objects of metadata that they made last, so that going on with a thread
//! reads what was added to them.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use threadkeep::id::CheckpointId;
use threadkeep::metadata::Entries;
use threadkeep_layout::Manifest;

use crate::directory::ChainKey;
use crate::names::Names;
use crate::record::{CheckpointRecord, Ordinal};
use crate::stats::Counters;

/// Entries that are remembered over all threads: about fifty megabytes.
const ENTRIES: usize = 1 << 18;
/// Objects that are remembered.
const OBJECTS: NonZeroUsize = NonZeroUsize::MIN.saturating_add((1 << 12) - 1);
/// Smaller ones are read as fast as they are found.
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

/// A large object, and the checkpoint that has it. What a checkpoint says of itself never changes: as long as it is stored
/// with this manifest, the elements of the manifest are these entries.
#[derive(Clone)]
pub(crate) struct Known {
    pub(crate) ordinal: Ordinal,
    pub(crate) id: CheckpointId,
    pub(crate) manifest: Manifest,
    pub(crate) entries: Entries,
}

impl Known {
    /// Whether the checkpoint is the one that had the object under `key`, and still has it.
    pub(crate) fn is_of(&self, key: &str, id: CheckpointId, record: &CheckpointRecord) -> bool {
        self.id == id
            && record.extra.maps.iter().any(|(name, manifest)| name == key && *manifest == self.manifest)
    }
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

    /// The object that is remembered of a chain.
    pub(crate) fn object(&self, chain: ChainKey, key: &str) -> Option<Known> {
        self.lock().known.get(&(chain, key.to_owned())).cloned()
    }

    /// Forgets the object that is remembered of a chain.
    pub(crate) fn forget(&self, chain: ChainKey, key: &str) {
        let mut objects = self.lock();
        if let Some(old) = objects.known.pop(&(chain, key.to_owned())) {
            objects.entries -= old.entries.len();
        }
    }

    /// Remembers an object, unless that of a later checkpoint is known or it is small.
    pub(crate) fn remember(&self, chain: ChainKey, key: &str, known: Known) {
        if known.entries.len() < SMALLEST {
            return;
        }
        let place = (chain, key.to_owned());
        // Dropped behind the lock: a long one takes a while.
        let mut old = Vec::new();
        let mut objects = self.lock();
        if objects.known.peek(&place).is_some_and(|have| have.ordinal >= known.ordinal) {
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
        Known { ordinal, id: CheckpointId::from_bytes([1; 16]), manifest: Manifest::default(), entries }
    }

    #[test]
    fn the_newest_object_of_a_chain_is_remembered_and_all_are_bounded() {
        let memory = Memory::new(Arc::default());
        let ordinal = |chain| memory.object(chain, "k").map(|known| known.ordinal);
        memory.remember(1, "k", known(1, SMALLEST - 1));
        assert_eq!(ordinal(1), None, "a small one is read again");
        for (given, expected) in [(5, 5), (3, 5), (7, 7)] {
            memory.remember(1, "k", known(given, 100));
            assert_eq!(ordinal(1), Some(expected));
        }
        assert_eq!(memory.lock().entries, 100, "one takes the place of the one before");
        memory.forget(1, "k");
        memory.forget(1, "k");
        assert_eq!((ordinal(1), memory.lock().entries), (None, 0));

        let large = known(1, ENTRIES / 4 + 1);
        for chain in 1..=5 {
            memory.remember(chain, "k", large.clone());
        }
        assert_eq!([1, 2, 3, 4, 5].map(ordinal), [None, None, Some(1), Some(1), Some(1)]);
        assert_eq!(memory.lock().entries, 3 * large.entries.len());
    }
}

//! The conformance suite on the memory saver behind a history cache.

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use async_trait::async_trait;
use threadkeep::cache::{CachedSaver, MemoryCache};
use threadkeep::saver::Saver;
use threadkeep_conformance::{BoxError, Claim, Damage, Factory};
use threadkeep_memory::MemorySaver;

/// The number of paths in the cache. The suite has more channels and threads, so paths are evicted, too.
const ENTRIES: usize = 4;

struct Cached;

/// A store, and the cache of the process that has it open: its handles share it, and it is dropped with the last of
/// them.
struct Storage {
    saver: MemorySaver,
    cache: Mutex<Weak<MemoryCache>>,
}

#[async_trait]
impl Factory for Cached {
    type Storage = Storage;

    fn name(&self) -> &'static str {
        "cached-memory"
    }

    fn claims(&self) -> &'static [Claim] {
        &[Claim::LoseCheckpoint, Claim::LoseWrites, Claim::LoseParentLink]
    }

    async fn create(&self) -> Result<Storage, BoxError> {
        Ok(Storage { saver: MemorySaver::new(), cache: Mutex::default() })
    }

    async fn open(&self, place: &Storage) -> Result<Arc<dyn Saver>, BoxError> {
        let mut known = place.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let entries = ENTRIES.try_into()?;
        let cache = known.upgrade().unwrap_or_else(|| Arc::new(MemoryCache::new(entries)));
        *known = Arc::downgrade(&cache);
        Ok(Arc::new(CachedSaver::new(Arc::new(place.saver.clone()), cache)))
    }

    async fn damage(&self, place: &Storage, damage: &Damage) -> Result<(), BoxError> {
        let done = match damage {
            Damage::LoseCheckpoint(key) => place.saver.lose_checkpoint(key),
            Damage::LoseWrites(at, task) => place.saver.lose_writes(at, *task),
            Damage::LoseParentLink(key) => place.saver.lose_parent_link(key),
            Damage::ChangeByte(_) => false,
        };
        if done { Ok(()) } else { Err(format!("there is nothing to lose: {damage:?}").into()) }
    }
}

fn main() -> ExitCode {
    threadkeep_conformance::main(Cached)
}

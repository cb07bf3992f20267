//! The conformance suite on the SQLite saver behind a history cache.

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tempfile::TempDir;
use threadkeep::cache::{CachedSaver, MemoryCache};
use threadkeep::saver::Saver;
use threadkeep_conformance::{BoxError, Claim, Factory};
use threadkeep_sqlite::{Options, SqliteSaver, Synchronous};

/// The number of paths in the cache. The suite has more channels and threads, so paths are evicted, too.
const ENTRIES: usize = 4;

struct Cached;

/// A store, and the cache of the process that has it open: its handles share it, and it is dropped with the last of
/// them.
struct Storage {
    dir: TempDir,
    cache: Mutex<Weak<MemoryCache>>,
}

#[async_trait]
impl Factory for Cached {
    type Storage = Storage;

    fn name(&self) -> &'static str {
        "cached-sqlite"
    }

    fn claims(&self) -> &'static [Claim] {
        &[Claim::Durable]
    }

    async fn create(&self) -> Result<Storage, BoxError> {
        Ok(Storage { dir: tempfile::tempdir()?, cache: Mutex::default() })
    }

    async fn open(&self, place: &Storage) -> Result<Arc<dyn Saver>, BoxError> {
        // The suite crashes no machine, so a flush per commit would only take time. Handles wait for each other's
        // locks, however busy the machine is.
        let options = Options {
            synchronous: Synchronous::Normal,
            busy_timeout: Duration::from_mins(10),
            ..Options::default()
        };
        let saver = SqliteSaver::open_async(place.dir.path().join("checkpoints.db"), options).await?;
        let mut known = place.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let entries = ENTRIES.try_into()?;
        let cache = known.upgrade().unwrap_or_else(|| Arc::new(MemoryCache::new(entries)));
        *known = Arc::downgrade(&cache);
        Ok(Arc::new(CachedSaver::new(Arc::new(saver), cache)))
    }
}

fn main() -> ExitCode {
    threadkeep_conformance::main(Cached)
}

//! The conformance suite on a saver with a history cache in Redis.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use threadkeep::cache::CachedSaver;
use threadkeep::saver::Saver;
use threadkeep_conformance::{BoxError, Factory};
use threadkeep_memory::MemorySaver;
use threadkeep_redis::{RedisCache, Settings};

/// How long a call waits for the server: less than a case may take. A purge that is given up leaves its entries, and
/// cases write other values under the ids and versions of a thread that was deleted.
const PATIENCE: Duration = Duration::from_mins(5);

struct Cached;

struct Storage {
    saver: MemorySaver,
    settings: Settings,
}

// Claims nothing about damage: rows older than a cached path are not read again, and this cache outlives the process
// that filled it.
#[async_trait]
impl Factory for Cached {
    type Storage = Storage;

    fn name(&self) -> &'static str {
        "cached-redis"
    }

    async fn create(&self) -> Result<Storage, BoxError> {
        let key_prefix = format!("conformance:{}:", uuid::Uuid::new_v4());
        let settings = Settings { key_prefix, ttl_seconds: 600.try_into().ok() };
        Ok(Storage { saver: MemorySaver::new(), settings })
    }

    async fn open(&self, place: &Storage) -> Result<Arc<dyn Saver>, BoxError> {
        let cache = RedisCache::open(threadkeep_testing::redis()?.url(), place.settings.clone())?;
        let cache = Arc::new(cache.with_patience(PATIENCE));
        Ok(Arc::new(CachedSaver::new(Arc::new(place.saver.clone()), cache)))
    }
}

fn main() -> ExitCode {
    threadkeep_conformance::main(Cached)
}

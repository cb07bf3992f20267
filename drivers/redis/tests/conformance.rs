//! The conformance suite on a saver with a history cache in Redis.

use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use threadkeep::cache::CachedSaver;
use threadkeep::saver::Saver;
use threadkeep_conformance::{BoxError, Factory};
use threadkeep_memory::MemorySaver;
use threadkeep_redis::{RedisCache, Settings};

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
        Ok(Arc::new(CachedSaver::new(Arc::new(place.saver.clone()), Arc::new(cache))))
    }
}

fn main() -> ExitCode {
    threadkeep_conformance::main(Cached)
}

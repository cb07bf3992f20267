use std::num::NonZeroUsize;
use std::sync::Arc;

use async_trait::async_trait;
use threadkeep::cache::{CachedSaver, MemoryCache};
use threadkeep::saver::Saver;

use crate::{BoxError, Claim, Damage, Factory};

/// Another saver behind an in-memory history cache, one per handle.
#[derive(Debug, Clone, Copy)]
pub struct Cached<F>(pub F);

/// Small enough that entries are evicted.
const ENTRIES: NonZeroUsize = NonZeroUsize::MIN.saturating_add(40);

fn cached(saver: Arc<dyn Saver>) -> Arc<dyn Saver> {
    Arc::new(CachedSaver::new(saver, Arc::new(MemoryCache::new(ENTRIES))))
}

#[async_trait]
impl<F: Factory> Factory for Cached<F> {
    type Storage = F::Storage;

    fn name(&self) -> &'static str {
        "cached"
    }

    fn claims(&self) -> &'static [Claim] {
        self.0.claims()
    }

    async fn create(&self) -> Result<F::Storage, BoxError> {
        self.0.create().await
    }

    async fn open(&self, place: &F::Storage) -> Result<Arc<dyn Saver>, BoxError> {
        Ok(cached(self.0.open(place).await?))
    }

    async fn damage(&self, place: &F::Storage, damage: &Damage) -> Result<(), BoxError> {
        self.0.damage(place, damage).await
    }

    async fn stored_bytes(&self, place: &F::Storage) -> Result<u64, BoxError> {
        self.0.stored_bytes(place).await
    }

    fn address(&self, place: &F::Storage) -> Result<String, BoxError> {
        self.0.address(place)
    }

    async fn open_at(&self, address: &str) -> Result<Arc<dyn Saver>, BoxError> {
        Ok(cached(self.0.open_at(address).await?))
    }
}

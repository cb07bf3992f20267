//! The history cache in memory.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use lru::LruCache;

use super::{CachedHistory, HistoryCache, HistoryKey};
use crate::id::ThreadId;

/// A bounded number of paths; evicts the least recently used. Values are shared with their readers, not copied.
pub struct MemoryCache {
    // Unbounded, because a bound would reserve all of its memory up front.
    paths: Mutex<LruCache<HistoryKey, CachedHistory>>,
    max_entries: NonZeroUsize,
}

impl MemoryCache {
    /// A cache of at most `max_entries` paths.
    pub fn new(max_entries: NonZeroUsize) -> Self {
        Self { paths: Mutex::new(LruCache::unbounded()), max_entries }
    }

    // No change can fail half-way, so a poisoned lock still guards consistent data.
    fn lock(&self) -> MutexGuard<'_, LruCache<HistoryKey, CachedHistory>> {
        self.paths.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for MemoryCache {
    /// Shows no content, which is conversations.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryCache({} of {} paths)", self.lock().len(), self.max_entries)
    }
}

#[async_trait]
impl HistoryCache for MemoryCache {
    async fn get(&self, key: &HistoryKey) -> Option<CachedHistory> {
        self.lock().get(key).cloned()
    }

    async fn put(&self, key: &HistoryKey, path: &CachedHistory) {
        let mut paths = self.lock();
        // Drop evicted paths after releasing the lock: a long one takes a while.
        let old = paths.put(key.clone(), path.clone());
        let gone = if paths.len() > self.max_entries.get() { paths.pop_lru() } else { None };
        drop(paths);
        drop((old, gone));
    }

    async fn purge(&self, thread: &ThreadId) {
        let mut paths = self.lock();
        let keys: Vec<HistoryKey> =
            paths.iter().map(|(key, _)| key).filter(|key| key.thread == *thread).cloned().collect();
        let gone: Vec<_> = keys.iter().map(|key| paths.pop(key)).collect();
        drop(paths);
        drop(gone);
    }
}

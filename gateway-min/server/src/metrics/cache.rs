//! Counts the hits and misses of the history cache.

use std::sync::Arc;

use async_trait::async_trait;
use threadkeep::cache::{CachedHistory, HistoryCache, HistoryKey};
use threadkeep::id::ThreadId;

use super::Metrics;

/// A cache whose lookups are counted.
pub(crate) struct MeteredCache {
    inner: Arc<dyn HistoryCache>,
    metrics: Metrics,
}

impl MeteredCache {
    pub(crate) fn new(inner: Arc<dyn HistoryCache>, metrics: Metrics) -> Self {
        Self { inner, metrics }
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl HistoryCache for MeteredCache {
    async fn get(&self, key: &HistoryKey) -> Option<CachedHistory> {
        let found = self.inner.get(key).await;
        self.metrics.looked_up(found.is_some());
        found
    }

    async fn put(&self, key: &HistoryKey, path: &CachedHistory) {
        self.inner.put(key, path).await;
    }

    async fn purge(&self, thread: &ThreadId) {
        self.inner.purge(thread).await;
    }
}

//! A history cache as a command uses it: what a command changes is purged, and nothing that it reads comes from there.

use async_trait::async_trait;
use threadkeep::cache::{CachedHistory, HistoryCache, HistoryKey};
use threadkeep::id::ThreadId;

/// Purges the cache inside, and nothing else: an operator looks at what the store has.
pub(crate) struct PurgeOnly<C>(pub(crate) C);

#[async_trait]
impl<C: HistoryCache> HistoryCache for PurgeOnly<C> {
    async fn get(&self, _: &HistoryKey) -> Option<CachedHistory> {
        None
    }

    async fn put(&self, _: &HistoryKey, _: &CachedHistory) {}

    async fn purge(&self, thread: &ThreadId) {
        self.0.purge(thread).await;
    }
}

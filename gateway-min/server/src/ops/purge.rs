//! The history cache for commands: what a command changes is purged from it, and nothing is read from it.

use async_trait::async_trait;
use threadkeep::cache::{CachedHistory, HistoryCache, HistoryKey};
use threadkeep::id::ThreadId;

/// Only purges the inner cache: an operator must see what is in the store.
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

//! One lock per thread, in this process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::OwnedMutexGuard;

/// One lock per thread, held while checkpoints are written: by a run from its start until its last write, by a state
/// update, by a duration note. The reservation in the database excludes other processes.
#[derive(Debug, Clone, Default)]
pub(super) struct ThreadLocks(Arc<Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>>);

impl ThreadLocks {
    /// Waits for the thread's lock.
    pub(super) async fn lock(&self, thread_id: &str) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            // An unused lock is only held by the map.
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(locks.entry(thread_id.to_owned()).or_default())
        };
        lock.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn thread_locks_exclude_each_other_per_thread_and_leave_nothing_behind() {
        let locks = ThreadLocks::default();
        let held = locks.lock("a").await;
        let _other = locks.lock("b").await;
        assert!(tokio::time::timeout(std::time::Duration::ZERO, locks.lock("a")).await.is_err());
        drop(held);
        drop(locks.lock("a").await);
        let _c = locks.lock("c").await;
        assert_eq!(locks.0.lock().unwrap().len(), 2, "only b and c are in use");
    }
}

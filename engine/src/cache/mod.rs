//! The history cache: the most recently resolved paths of delta channels, so that the next checkpoint of a run is
//! resolved from the previous one (service reference, "Database checkpoint settings").
//!
//! [`CachedSaver`] puts a [`HistoryCache`] in front of any saver. A cache only affects performance: every answer is
//! what the saver alone would return, whatever the cache contains, has lost or has mixed up.

mod memory;
mod owed;
mod saver;

use async_trait::async_trait;

pub use memory::MemoryCache;
pub use saver::CachedSaver;

use crate::id::{ChannelName, CheckpointId, Namespace, ThreadId, Version};
use crate::saver::ChannelHistory;

/// A channel of a namespace of a thread. A cache keeps one path for each: the most recently resolved one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HistoryKey {
    /// The thread.
    pub thread: ThreadId,
    /// The namespace in it.
    pub namespace: Namespace,
    /// The channel in that.
    pub channel: ChannelName,
}

/// The path of a channel up to a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct CachedHistory {
    /// The checkpoint at which the path ends.
    pub checkpoint: CheckpointId,
    /// The version that the channel has there. It is drawn randomly for each write, so it distinguishes a checkpoint of
    /// a deleted thread from a later one with the same id.
    pub version: Version,
    /// The path from the nearest complete value.
    pub history: ChannelHistory,
}

impl CachedHistory {
    /// Whether it ends at this checkpoint, where the channel has this version.
    fn ends_at(&self, checkpoint: CheckpointId, version: Version) -> bool {
        self.checkpoint == checkpoint && self.version == version
    }
}

/// Where resolved paths are kept. None of this can fail: a cache that does not work is empty, and logs that once.
///
/// So a put or a purge may be lost, as when the server of a cache does not answer. The caller does not learn of it, and
/// nobody repeats it. That changes no answer: [`CachedSaver`] uses a path only if the saver still has the checkpoint at
/// which it ends, with the same version of the channel. Versions are drawn at random, and no rewrite of the engine
/// changes the value that a channel has at a version, so such a path gives the value that the saver has. A path whose
/// purge was lost stays, unused, with what was said in a deleted thread: a cache that outlives its process should bound
/// for how long.
#[async_trait]
pub trait HistoryCache: Send + Sync {
    /// The path that was put last for `key`, if it is still there and intact. It may be of any age.
    async fn get(&self, key: &HistoryKey) -> Option<CachedHistory>;

    /// Stores a path in place of the previous one.
    async fn put(&self, key: &HistoryKey, path: &CachedHistory);

    /// Removes a thread in every namespace, if the cache works now. A promise to repeat it later could not be kept: the
    /// process may end before.
    async fn purge(&self, thread: &ThreadId);
}

//! Caches the heads that were read or written last, so that a run that continues a thread need not read its values
//! again.
//!
//! A checkpoint's contents never change, so a cached state equals one from a read as long as the saver still has that
//! checkpoint: every use begins with a read of it without values, which also returns what does change (the rows of
//! tasks that ran from it) and the metadata that the gate checks.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;

use super::{Channel, StateSnapshot};
use crate::channel::ChannelTable;
use crate::checkpoint::CheckpointTuple;
use crate::id::{ChannelName, CheckpointId, Namespace, ThreadId};
use crate::metadata::Counters;
use crate::saver::Load;
use crate::value::ChannelValue;

/// Cached heads, by default.
const HEADS: usize = 64;
/// The bytes of all their values together. The last head is cached whatever its size; otherwise every turn of a larger
/// thread would read all of it.
const BYTES: usize = 64 << 20;
/// The memory of a list element besides its bytes.
const ELEMENT: usize = 192;

/// The values of a head.
#[derive(Clone)]
pub(super) struct Warm {
    id: CheckpointId,
    delta_marker: bool,
    counters: BTreeMap<ChannelName, Counters>,
    channels: Arc<BTreeMap<ChannelName, Channel>>,
}

impl Warm {
    /// The values of a state, if it has all of them.
    fn of(state: &StateSnapshot, table: &ChannelTable) -> Option<Self> {
        let complete = |(name, channel): (&ChannelName, &Channel)| {
            channel.value.is_some() || table.behaviour(name).is_none()
        };
        state.channels.iter().all(complete).then(|| Self {
            id: state.key.id,
            delta_marker: state.metadata.delta_marker,
            counters: state.metadata.counters.clone(),
            channels: state.channels.clone(),
        })
    }

    /// Whether these are the values of the checkpoint that the saver has now. The id alone does not prove it: a thread
    /// may have been deleted and created again, or converted.
    pub(super) fn is_of(&self, tuple: &CheckpointTuple) -> bool {
        let stored = tuple.checkpoint.channels.iter().map(|(name, entry)| (name, entry.version));
        self.id == tuple.checkpoint.id
            && self.delta_marker == tuple.metadata.delta_marker
            && self.counters == tuple.metadata.counters
            && self.channels.iter().map(|(name, channel)| (name, channel.version)).eq(stored)
    }

    /// The state that a read with `load` would return.
    pub(super) fn complete(self, tuple: CheckpointTuple, load: &Load) -> StateSnapshot {
        let mut channels = self.channels;
        if *load != Load::All {
            for (name, channel) in Arc::make_mut(&mut channels) {
                if !load.wants(name) {
                    *channel = Channel { version: channel.version, value: None, complete: true };
                }
            }
        }
        StateSnapshot {
            key: tuple.key(),
            parent: tuple.parent,
            metadata: tuple.metadata,
            next: tuple.checkpoint.next,
            applied: tuple.checkpoint.applied,
            writes: tuple.writes,
            channels,
        }
    }

    fn bytes(&self) -> usize {
        let bytes = |value: &ChannelValue| match value {
            ChannelValue::Plain(encoded) => encoded.bytes.len(),
            ChannelValue::List(list) => list.bytes_len() + list.len() * ELEMENT,
        };
        self.channels.values().filter_map(|channel| channel.value.as_ref()).map(bytes).sum()
    }
}

type HeadKey = (ThreadId, Namespace);

/// The current maximum number of cached heads.
pub(super) type HeadLimit = Arc<dyn Fn() -> usize + Send + Sync>;

/// The heads of the most recently used threads. Cloning creates another handle on the same cache.
#[derive(Clone)]
pub(super) struct WarmHeads {
    heads: Arc<Mutex<Heads>>,
    limit: HeadLimit,
}

struct Heads {
    states: LruCache<HeadKey, Warm>,
    bytes: usize,
}

impl Default for WarmHeads {
    fn default() -> Self {
        Self::new(Arc::new(|| HEADS))
    }
}

impl fmt::Debug for WarmHeads {
    /// Shows no content, which is conversations.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heads = self.lock();
        write!(f, "WarmHeads({} heads, {} bytes)", heads.states.len(), heads.bytes)
    }
}

impl WarmHeads {
    /// An empty cache. The limit is read whenever a head is added.
    pub(super) fn new(limit: HeadLimit) -> Self {
        Self { heads: Arc::new(Mutex::new(Heads { states: LruCache::unbounded(), bytes: 0 })), limit }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.lock().states.len()
    }

    // No change can fail half-way, so a poisoned lock still guards consistent data.
    fn lock(&self) -> MutexGuard<'_, Heads> {
        self.heads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cached values of a checkpoint; of the head, without an id.
    pub(super) fn find(
        &self,
        thread: &ThreadId,
        namespace: &Namespace,
        id: Option<CheckpointId>,
    ) -> Option<Warm> {
        let mut heads = self.lock();
        let warm = heads.states.get(&(thread.clone(), namespace.clone()))?;
        id.is_none_or(|id| id == warm.id).then(|| warm.clone())
    }

    /// Caches a head in place of the previous one.
    pub(super) fn keep(&self, head: &StateSnapshot, table: &ChannelTable) {
        let Some(warm) = Warm::of(head, table) else { return };
        let place = (head.key.thread.clone(), head.key.namespace.clone());
        let limit = (self.limit)();
        // Dropped after releasing the lock: a long thread takes a while.
        let _old = self.lock().keep(place, warm, limit, BYTES);
    }

    /// Removes a thread in every namespace.
    pub(super) fn forget(&self, thread: &ThreadId) {
        let _old = self.lock().forget(thread);
    }
}

impl Heads {
    fn keep(&mut self, place: HeadKey, warm: Warm, heads: usize, limit: usize) -> Vec<Warm> {
        self.bytes += warm.bytes();
        let mut old: Vec<Warm> = self.states.put(place, warm).into_iter().collect();
        let mut bytes = self.bytes - old.iter().map(Warm::bytes).sum::<usize>();
        while (bytes > limit && self.states.len() > 1) || self.states.len() > heads {
            let Some((_, warm)) = self.states.pop_lru() else { break };
            bytes -= warm.bytes();
            old.push(warm);
        }
        self.bytes = bytes;
        old
    }

    fn forget(&mut self, thread: &ThreadId) -> Vec<Warm> {
        let gone: Vec<HeadKey> =
            self.states.iter().map(|(place, _)| place).filter(|(of, _)| of == thread).cloned().collect();
        let old: Vec<Warm> = gone.iter().filter_map(|place| self.states.pop(place)).collect();
        self.bytes -= old.iter().map(Warm::bytes).sum::<usize>();
        old
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::id::Version;

    fn warm(bytes: usize) -> Warm {
        let value = ChannelValue::from_json(&json!("x".repeat(bytes))).unwrap();
        let channel =
            Channel { version: Version { counter: 1, random: 1 }, value: Some(value), complete: true };
        Warm {
            id: CheckpointId::from_bytes([1; 16]),
            delta_marker: false,
            counters: BTreeMap::new(),
            channels: Arc::new([("c".into(), channel)].into()),
        }
    }

    fn place(n: usize) -> HeadKey {
        (format!("t{n}").as_str().into(), Namespace::root())
    }

    #[test]
    fn the_memory_is_bounded_by_heads_and_by_bytes_and_counts_what_it_holds() {
        let heads = WarmHeads::default();
        let mut heads = heads.lock();
        let one = warm(100).bytes();
        for n in 0..HEADS + 3 {
            heads.keep(place(n), warm(100), HEADS, usize::MAX);
        }
        assert_eq!((heads.states.len(), heads.bytes), (HEADS, HEADS * one));
        assert!(heads.states.peek(&place(2)).is_none() && heads.states.peek(&place(3)).is_some());

        heads.keep(place(5), warm(100), HEADS, usize::MAX);
        assert_eq!(heads.bytes, HEADS * one, "a head replaces the previous one");
        heads.keep(place(200), warm(100), HEADS, 3 * one);
        assert_eq!((heads.states.len(), heads.bytes), (3, 3 * one));
        assert!(heads.states.peek(&place(200)).is_some() && heads.states.peek(&place(5)).is_some());
        assert_eq!(heads.forget(&place(5).0).len(), 1);
        assert_eq!((heads.states.len(), heads.bytes), (2, 2 * one));
        heads.keep(place(0), warm(4000), HEADS, 3 * one);
        let long = warm(4000).bytes();
        assert_eq!((heads.states.len(), heads.bytes), (1, long), "a head above the bound is kept alone");
        heads.keep(place(1), warm(100), HEADS, 3 * one);
        assert_eq!((heads.states.len(), heads.bytes), (1, one), "until another thread is used");
        heads.forget(&place(1).0);
        for n in 0..5 {
            heads.keep(place(n), warm(100), 5, usize::MAX);
        }
        heads.keep(place(5), warm(100), 2, usize::MAX);
        assert_eq!((heads.states.len(), heads.bytes), (2, 2 * one), "the current limit applies");
    }
}

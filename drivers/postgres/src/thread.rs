//! What the saver remembers of the threads that it wrote to last, so that a step costs one round trip and only what it
//! changes.
//!
//! All of it can be read again, and it is valid as long as the thread's mark is unchanged: the fence of every write
//! checks that. A process also remembers the last moment of the thread that it knows to be flushed, which the server
//! must never lose.

use std::num::NonZeroUsize;
use std::sync::Arc;

use lru::LruCache;
use threadkeep::id::{ChannelName, Namespace, Version};
use threadkeep::metadata::Entries;
use threadkeep_layout::{HASH, Run, Shapes, entries_bytes};

use crate::element::Index;
use crate::history::{History, Mark, Since};
use crate::rows::{Node, Snapshot};

pub(crate) use self::known::{Agreement, Known};
pub(crate) use self::places::{Slot, Threads};

mod known;
mod places;
#[cfg(test)]
mod tests;

/// Remembered heads of a thread.
const HEADS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(63);
/// Remembered large metadata objects of a thread.
const OBJECTS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(7);

/// Identifies a stored list of a thread.
pub(crate) type ListKey = (Namespace, ChannelName, Version);

/// A thread.
#[derive(Debug, Clone)]
pub(crate) struct ThreadState {
    /// None if the thread does not exist.
    pub(crate) history: Option<History>,
    pub(crate) index: Index,
    /// Known heads, including that a namespace has none.
    pub(crate) heads: LruCache<Namespace, Option<Arc<Node>>>,
    pub(crate) shapes: Shapes<ListKey>,
    /// The most recently stored large metadata objects, by key.
    pub(crate) objects: LruCache<String, StoredObject>,
}

/// What is remembered of a stored large object: its entries, and the numbers of their elements.
#[derive(Debug, Clone)]
pub(crate) struct StoredObject {
    pub(crate) entries: Entries,
    /// The bytes of the entries as they are stored.
    pub(crate) bytes: usize,
    pub(crate) runs: Vec<Run>,
}

impl ThreadState {
    /// A thread that does not exist.
    pub(crate) fn absent() -> Self {
        Self {
            history: None,
            index: Index::default(),
            heads: LruCache::new(HEADS),
            shapes: Shapes::default(),
            objects: LruCache::new(OBJECTS),
        }
    }

    pub(crate) fn mark(&self) -> Option<Mark> {
        self.history.as_ref().map(|history| history.mark)
    }

    /// What the history just found proves about the known one. None if they have nothing in common: the thread did not
    /// exist, does not exist, or was rewritten.
    pub(crate) fn since(&self, found: &Snapshot) -> Option<Since> {
        let (known, found) = (self.history.as_ref()?, &found.thread.as_ref()?.history);
        (known.mark.epoch == found.mark.epoch).then(|| found.since(&known.moment()))
    }

    /// What was found, with what is still valid of what was known before.
    pub(crate) fn found(known: Self, snapshot: &Snapshot) -> Self {
        let Some(row) = &snapshot.thread else { return Self::absent() };
        let mut state = match known.since(snapshot) {
            Some(Since::Contained) => known,
            _ => Self::absent(),
        };
        if state.mark() != Some(row.history.mark) {
            // Another process may have moved heads and added tasks; stored lists and elements never change.
            state.heads.clear();
        }
        state.history = Some(row.history.clone());
        for (space, n, hash) in &snapshot.hashes {
            state.index.note(*space, *n, *hash);
        }
        state.index.next = row.next;
        state
    }

    /// Its bytes in memory.
    fn weight(&self) -> usize {
        let weight = |known: &StoredObject| {
            entries_bytes(&known.entries, known.bytes) + known.runs.len() * size_of::<Run>()
        };
        let objects = self.objects.iter().map(|(_, known)| weight(known)).sum::<usize>();
        let heads = self.heads.iter().filter_map(|(_, head)| head.as_ref());
        let heads = heads.map(|head| head.weight()).sum::<usize>();
        self.index.len() * HASH + objects + heads + self.shapes.bytes()
    }
}

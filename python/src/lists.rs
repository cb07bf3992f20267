//! The lists that were serialized or deserialized last.
//!
//! The next list of a channel mostly has the same elements and some more, so it is compared with the last one, element by
//! element: that takes less time than to look each of them up, and what is the same shares the memory of the last value.

use std::sync::{Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use pyo3::prelude::*;
use pyo3::types::PyList;
use threadkeep::value::{Element, ListValue};
use threadkeep_langgraph::Place;

use crate::known::{Entry, Kept};
use crate::shape::Shapes;

/// The bytes of all lists, with what is known of their elements.
const BYTES: usize = 64 << 20;
/// What is known of an element takes about this many, besides its bytes.
const ELEMENT: usize = 4096;
/// A list without elements takes about this many.
const LIST: usize = 512;

/// Up to this many elements are removed one by one.
const FEW: usize = 64;

/// A channel of a thread.
pub(crate) type Channel = (Place, String);

/// A list, and what is known of each element.
#[derive(Default)]
pub(crate) struct List {
    value: ListValue,
    entries: Vec<Kept>,
}

impl List {
    /// A stored list. No saver is asked what it holds of it: it may belong to another checkpoint when it is used.
    pub(crate) fn new(mut value: ListValue, entries: Vec<Kept>) -> Self {
        value.detach();
        Self { value, entries }
    }

    pub(crate) fn entries(&self) -> &[Kept] {
        &self.entries
    }

    /// How many of the first objects are the elements at their places, unchanged.
    pub(crate) fn same(&self, shapes: &Shapes, objects: &Bound<'_, PyList>) -> PyResult<usize> {
        let known = self.entries.iter().map_while(|entry| entry.as_deref().filter(|e| e.is_serialized()));
        let parts: Vec<_> = known.take(objects.len()).map(Entry::parts).collect();
        shapes.same(objects, &parts)
    }

    /// Keeps the first elements.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.entries.truncate(len);
        if self.value.len() > len + FEW {
            self.value = self.value.iter().take(len).cloned().collect();
        }
        while self.value.len() > len {
            self.value.remove(self.value.len() - 1);
        }
    }

    pub(crate) fn push(&mut self, element: Element, entry: Kept) {
        self.value.push(element);
        self.entries.push(entry);
    }

    /// The value, which shares its elements.
    pub(crate) fn value(&self) -> ListValue {
        self.value.clone()
    }

    fn bytes(&self) -> usize {
        LIST + self.value.bytes_len() + ELEMENT * self.entries.len()
    }
}

/// The last list of each channel, as long as there is room.
pub(crate) struct Lists(Mutex<Room>);

struct Room {
    lists: LruCache<Channel, List>,
    bytes: usize,
}

impl Default for Lists {
    fn default() -> Self {
        Self(Mutex::new(Room { lists: LruCache::unbounded(), bytes: 0 }))
    }
}

impl Lists {
    /// Takes the last list of a channel out.
    pub(crate) fn take(&self, at: &Channel) -> List {
        let mut kept = self.lock();
        let Some(list) = kept.lists.pop(at) else { return List::default() };
        kept.bytes -= list.bytes();
        list
    }

    /// Remembers the last list of a channel.
    pub(crate) fn put(&self, at: Channel, list: List) {
        let mut kept = self.lock();
        kept.bytes += list.bytes();
        let mut old = Vec::new();
        if let Some((_, replaced)) = kept.lists.push(at, list) {
            kept.bytes -= replaced.bytes();
            old.push(replaced);
        }
        while kept.bytes > BYTES
            && let Some((_, oldest)) = kept.lists.pop_lru()
        {
            kept.bytes -= oldest.bytes();
            old.push(oldest);
        }
        drop(kept);
        // Dropping objects may run Python, which must not happen under the lock.
        drop(old);
    }

    fn lock(&self) -> MutexGuard<'_, Room> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

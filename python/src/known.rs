//! The elements that were serialized or deserialized lately.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use threadkeep::value::{Element, ElementHash};

/// The bytes of a generation, with what surrounds them. There are two.
const BYTES: usize = 32 << 20;

/// Elements by the objects that they are the bytes of. An object is known by the identities of its immutable parts
/// ([`crate::shape`]), so a changed object is another one.
#[derive(Default)]
pub(crate) struct Known {
    generations: Mutex<[Generation; 2]>,
}

/// What is not asked for during a whole generation is forgotten.
#[derive(Default)]
struct Generation {
    by_object: HashMap<u64, Arc<Entry>, BuildHasherDefault<Hashed>>,
    by_bytes: HashMap<ElementHash, Arc<Entry>>,
    bytes: usize,
}

struct Entry {
    key: Box<[usize]>,
    /// A private copy: it keeps the parts alive, so that their addresses mean them, and nobody changes it.
    object: Py<PyAny>,
    element: Element,
    /// Whether the copy is of an object that was deserialized, and not of one that somebody made.
    read: bool,
}

/// Mixes addresses. They come from the allocator, not from a stranger, and a collision only costs a miss.
fn hash(key: &[usize]) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    key.iter().fold(0, |hash: u64, word| (hash.rotate_left(26) ^ *word as u64).wrapping_mul(FACTOR))
}

/// Takes a [`hash`] as it is.
#[derive(Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

impl Known {
    fn lock(&self) -> MutexGuard<'_, [Generation; 2]> {
        self.generations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The element of an object.
    pub(crate) fn element(&self, key: &[usize]) -> Option<Element> {
        let hash = hash(key);
        let mut generations = self.lock();
        let found = generations.iter().enumerate().find_map(|(age, generation)| {
            let entry = generation.by_object.get(&hash).filter(|entry| *entry.key == *key)?;
            Some((age, entry.clone()))
        });
        let (age, entry) = found?;
        let element = entry.element.clone();
        let old = if age > 0 { add(&mut generations, hash, entry) } else { None };
        drop(generations);
        drop(old);
        Some(element)
    }

    /// The object of an element; to be copied.
    pub(crate) fn object(&self, py: Python<'_>, element: &Element) -> Option<Py<PyAny>> {
        let mut generations = self.lock();
        let found = generations
            .iter()
            .enumerate()
            .find_map(|(age, generation)| Some((age, generation.by_bytes.get(element.hash())?.clone())));
        let (age, entry) = found?;
        let object = entry.object.clone_ref(py);
        let hash = hash(&entry.key);
        let old = if age > 0 { add(&mut generations, hash, entry) } else { None };
        drop(generations);
        drop(old);
        Some(object)
    }

    /// An object was serialized.
    pub(crate) fn serialized(&self, key: &[usize], copy: Py<PyAny>, element: Element) {
        self.insert(Entry { key: key.into(), object: copy, element, read: false });
    }

    /// An element was deserialized.
    pub(crate) fn deserialized(&self, key: &[usize], copy: Py<PyAny>, element: Element) {
        self.insert(Entry { key: key.into(), object: copy, element, read: true });
    }

    fn insert(&self, entry: Entry) {
        let hash = hash(&entry.key);
        let old = add(&mut self.lock(), hash, Arc::new(entry));
        // Dropping objects may run Python, which must not happen under the lock.
        drop(old);
    }
}

/// Adds an entry to the young generation. Returns what is forgotten for it.
#[must_use]
fn add(generations: &mut [Generation; 2], hash: u64, entry: Arc<Entry>) -> Option<Generation> {
    let old = if generations[0].bytes > BYTES {
        generations.swap(0, 1);
        Some(std::mem::take(&mut generations[0]))
    } else {
        None
    };
    let young = &mut generations[0];
    young.bytes += entry.element.bytes().len() + 16 * std::mem::size_of::<usize>() * entry.key.len();
    if entry.read {
        young.by_bytes.insert(*entry.element.hash(), entry.clone());
    }
    young.by_object.insert(hash, entry);
    old
}

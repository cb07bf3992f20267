//! The elements that were serialized or deserialized lately.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use threadkeep::value::Element;

use crate::shape::{AT_ONCE, Parts, Shapes, is_same, is_same_and_unheld};

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
    by_bytes: HashMap<u64, Arc<Entry>, BuildHasherDefault<Hashed>>,
    bytes: usize,
}

/// A serialized object.
pub(crate) struct Entry {
    parts: Parts,
    element: Element,
    /// What the element was deserialized to, and a copy: each belongs to who read it until nobody holds it any more. Two,
    /// because a caller often holds the result of one run until it has that of the next. None if the element was never
    /// deserialized.
    loans: Option<Mutex<Loans>>,
    /// Whether the object is serialized to the element. One that was deserialized may not be: its class may have fields that
    /// the element lacks, and fills them in.
    serialized: AtomicBool,
}

impl Entry {
    /// The bytes.
    pub(crate) fn element(&self) -> &Element {
        &self.element
    }

    /// What its object is made of.
    pub(crate) fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Whether it is known that its object is serialized to the element.
    pub(crate) fn is_serialized(&self) -> bool {
        self.serialized.load(Ordering::Relaxed)
    }

    /// Whether its object has this key.
    pub(crate) fn has_key(&self, key: &[usize]) -> bool {
        self.parts.key == key
    }

    /// Its object was serialized. Returns whether to this element.
    pub(crate) fn is_serialized_to(&self, element: &Element) -> bool {
        let same = self.element.hash() == element.hash();
        if same {
            self.serialized.store(true, Ordering::Relaxed);
        }
        same
    }

    /// Whether it was deserialized from this element.
    pub(crate) fn is_from(&self, element: &Element) -> bool {
        self.loans.is_some() && self.element == *element
    }

    /// Takes one of the objects that readers were given out.
    fn take<'py>(&self, py: Python<'py>, which: usize) -> Option<Bound<'py, PyAny>> {
        lock(self.loans.as_ref()?)[which].take().map(|loan| loan.into_bound(py))
    }

    /// Puts it back.
    fn put_back(&self, which: usize, loan: Bound<'_, PyAny>) {
        // What another reader put there meanwhile is dropped without the lock.
        let _other = self.loans.as_ref().and_then(|loans| lock(loans)[which].replace(loan.unbind()));
    }

    /// The object, for a reader alone. Objects that readers were given before are checked: one that nobody holds is given
    /// again, one that was not changed is copied. `None` if there is none.
    fn lend<'py>(&self, py: Python<'py>, shapes: &Shapes) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(loans) = &self.loans else { return Ok(None) };
        // Taken out: a reader that looks meanwhile finds none, and nothing is held under the lock.
        let taken = std::mem::take(&mut *lock(loans)).map(|loan| loan.map(|loan| loan.into_bound(py)));
        let mut copy = None;
        for loan in taken.iter().flatten() {
            if is_same_and_unheld(loan, &self.parts.key)? {
                let lent = loan.clone();
                let _others = replace(loans, taken.map(|loan| loan.map(Bound::unbind)));
                return Ok(Some(lent));
            }
            if copy.is_none() && is_same(loan, &self.parts.key)? {
                copy = shapes.copy(loan)?;
                // Without the lock of the interpreter, who holds the loan may have changed it after the look.
                if cfg!(Py_GIL_DISABLED)
                    && let Some(made) = &copy
                    && !is_same(made, &self.parts.key)?
                {
                    copy = None;
                }
            }
        }
        let Some(copy) = copy else { return Ok(None) };
        // A free place is filled first. Otherwise a reader that holds one result at a time would be given a third object.
        let [older, newer] = taken.map(|loan| loan.map(Bound::unbind));
        let _others = replace(loans, [newer.or(older), Some(copy.clone().unbind())]);
        Ok(Some(copy))
    }
}

/// Objects of elements, for a reader alone, as [`Entry::lend`] gives them; `None` where there is none. Most are found in a few
/// calls.
pub(crate) fn lend<'py>(
    py: Python<'py>,
    shapes: &Shapes,
    entries: &[Kept],
) -> PyResult<Vec<Option<Bound<'py, PyAny>>>> {
    let mut lent = Vec::with_capacity(entries.len());
    for entries in entries.chunks(AT_ONCE) {
        let from = lent.len();
        lent.resize_with(from + entries.len(), || None);
        let lent = &mut lent[from..];
        for which in 0..LOANS {
            let places = entries.iter().enumerate().filter(|(place, _)| lent[*place].is_none());
            let taken = places.filter_map(|(place, entry)| {
                let entry = entry.as_deref()?;
                Some((place, entry, entry.take(py, which)?))
            });
            let taken: Vec<_> = taken.collect();
            if taken.is_empty() {
                break;
            }
            let parts: Vec<_> = taken.iter().map(|(_, entry, _)| entry.parts()).collect();
            let objects = PyTuple::new(py, taken.iter().map(|(.., loan)| loan))?;
            let unheld = shapes.unheld(&objects, &parts)?;
            for ((place, entry, loan), unheld) in taken.into_iter().zip(unheld) {
                if unheld {
                    lent[place] = Some(loan.clone());
                }
                entry.put_back(which, loan);
            }
        }
        for (lent, entry) in lent.iter_mut().zip(entries) {
            if let (None, Some(entry)) = (&lent, entry) {
                *lent = entry.lend(py, shapes)?;
            }
        }
    }
    Ok(lent)
}

/// What is known of an element, if anything.
pub(crate) type Kept = Option<Arc<Entry>>;

type Loans = [Option<Py<PyAny>>; LOANS];

/// The objects that readers may have of an element.
const LOANS: usize = 2;

/// Returns what another reader put there meanwhile. Dropping objects may run Python, which must not happen under the lock.
#[must_use]
fn replace(loans: &Mutex<Loans>, new: Loans) -> Loans {
    std::mem::replace(&mut *lock(loans), new)
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
    /// What is known of an object with this key.
    pub(crate) fn object(&self, key: &[usize]) -> Option<Arc<Entry>> {
        let hash = hash(key);
        self.find(|generation| generation.by_object.get(&hash).filter(|entry| entry.parts.key == key))
    }

    /// What is known of an element that was deserialized.
    pub(crate) fn deserialized_from(&self, element: &Element) -> Option<Arc<Entry>> {
        let of = short(element);
        self.find(|generation| generation.by_bytes.get(&of).filter(|entry| entry.is_from(element)))
    }

    fn find(&self, find: impl Fn(&Generation) -> Option<&Arc<Entry>>) -> Option<Arc<Entry>> {
        let mut generations = lock(&self.generations);
        let mut found = generations.iter().enumerate();
        let (age, entry) = found.find_map(|(age, generation)| Some((age, find(generation)?.clone())))?;
        let old = (age > 0).then(|| add(&mut generations, entry.clone()));
        drop(generations);
        drop(old);
        Some(entry)
    }

    /// An object was serialized.
    pub(crate) fn serialized(&self, parts: Parts, element: Element) -> Arc<Entry> {
        self.insert(Entry { parts, element, loans: None, serialized: true.into() })
    }

    /// An element was deserialized to this object.
    pub(crate) fn deserialized(&self, parts: Parts, element: Element, object: Py<PyAny>) -> Arc<Entry> {
        // Without a model it is made of what MessagePack has, and nothing is filled in.
        let serialized = AtomicBool::new(parts.classes.is_empty() && !may_have_extensions(&element));
        self.insert(Entry { parts, element, loans: Some(Mutex::new([Some(object), None])), serialized })
    }

    fn insert(&self, entry: Entry) -> Arc<Entry> {
        let entry = Arc::new(entry);
        let old = add(&mut lock(&self.generations), entry.clone());
        // Dropping objects may run Python, which must not happen under the lock.
        drop(old);
        entry
    }
}

/// Adds an entry to the young generation. Returns what is forgotten for it.
#[must_use]
fn add(generations: &mut [Generation; 2], entry: Arc<Entry>) -> Forgotten {
    let old = (generations[0].bytes > BYTES).then(|| {
        generations.swap(0, 1);
        std::mem::take(&mut generations[0])
    });
    let young = &mut generations[0];
    // An object takes about as much as its key has parts; there may be two.
    young.bytes += entry.element.bytes().len() + 16 * std::mem::size_of::<usize>() * entry.parts.key.len();
    let replaced = match &entry.loans {
        Some(_) => young.by_bytes.insert(short(&entry.element), entry.clone()),
        None => None,
    };
    (old, replaced, young.by_object.insert(hash(&entry.parts.key), entry))
}

/// Whether some of its bytes may be an extension type of MessagePack. One whose class could not be made was
/// deserialized to the dictionary of its fields, and that is serialized as a dictionary. Bytes of other things may look
/// like one: then the object is serialized once to learn it.
fn may_have_extensions(element: &Element) -> bool {
    element.bytes().iter().any(|byte| begins_extension(*byte))
}

/// Whether an element is one extension type, as objects are.
pub(crate) fn is_extension(element: &Element) -> bool {
    element.bytes().first().is_some_and(|byte| begins_extension(*byte))
}

fn begins_extension(byte: u8) -> bool {
    matches!(byte, 0xc7..=0xc9 | 0xd4..=0xd8)
}

type Forgotten = (Option<Generation>, Option<Arc<Entry>>, Option<Arc<Entry>>);

fn short(element: &Element) -> u64 {
    element.hash().first_chunk().map_or(0, |first| u64::from_le_bytes(*first))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

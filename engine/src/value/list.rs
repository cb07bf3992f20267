//! List values: elements that carry their bytes and hash, in a persistent vector.
//!
//! A [`ListValue`] also tracks how it was made from a value that a saver already holds (its *base*): which ranges of it
//! are the base's and which elements are new. So a saver that shares elements can write a list of thousands of elements
//! by looking only at the few that changed.

use std::fmt;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use imbl::Vector;
use serde_json::Value as Json;

use super::origin::Origin;
use super::places::Places;
use super::{msgpack, visited};
use crate::error::Result;
use crate::id::Version;

/// The first sixteen bytes of the BLAKE3 hash of an element's bytes: its checksum, and its identity within a thread.
pub type ElementHash = [u8; 16];

/// One element of a list: its bytes, its hash, and its `id` if it is an object that has one. Cloning shares all of it.
#[derive(Clone)]
pub struct Element(Arc<Inner>);

struct Inner {
    bytes: Bytes,
    hash: OnceLock<ElementHash>,
    id: OnceLock<Option<Arc<str>>>,
}

impl Element {
    /// Encodes a JSON value.
    ///
    /// # Errors
    /// As [`super::ChannelValue::from_json`].
    pub fn from_json(value: &Json) -> Result<Self> {
        msgpack::encode(value).map(Self::from_bytes)
    }

    /// Takes the MessagePack bytes of one value. They are not parsed until the element is decoded.
    pub fn from_bytes(bytes: Bytes) -> Self {
        Self(Arc::new(Inner { bytes, hash: OnceLock::new(), id: OnceLock::new() }))
    }

    /// Takes bytes whose hash was just checked, to avoid computing it again.
    pub fn from_checked(bytes: Bytes, hash: ElementHash) -> Self {
        Self(Arc::new(Inner { bytes, hash: OnceLock::from(hash), id: OnceLock::new() }))
    }

    /// The MessagePack bytes.
    pub fn bytes(&self) -> &Bytes {
        &self.0.bytes
    }

    /// The hash of the bytes, computed once.
    pub fn hash(&self) -> &ElementHash {
        self.0.hash.get_or_init(|| Self::hash_of(&self.0.bytes))
    }

    /// The hash of an element with these bytes.
    pub fn hash_of(bytes: &[u8]) -> ElementHash {
        let mut short = [0; 16];
        short.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
        short
    }

    /// The string under `id`, if the element is an object with one. Found once, without decoding the element.
    pub fn id(&self) -> Option<&Arc<str>> {
        self.0.id.get_or_init(|| msgpack::text_field(&self.0.bytes, "id").map(Arc::from)).as_ref()
    }

    /// The string under `key`, if the element is an object with one.
    pub fn text(&self, key: &str) -> Option<&str> {
        msgpack::text_field(&self.0.bytes, key)
    }

    /// Decodes into JSON.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`] if the bytes are not MessagePack that JSON can express.
    pub fn to_json(&self) -> Result<Json> {
        msgpack::decode(&self.0.bytes)
    }
}

impl PartialEq for Element {
    fn eq(&self, other: &Self) -> bool {
        #[cfg(test)]
        super::COMPARED.set(super::COMPARED.get() + 1);
        Arc::ptr_eq(&self.0, &other.0) || self.0.bytes == other.0.bytes
    }
}

impl fmt::Debug for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.to_json() {
            Ok(json) => write!(f, "{json}"),
            Err(_) => write!(f, "{} undecodable bytes", self.0.bytes.len()),
        }
    }
}

/// A run of adjacent elements of a [`ListValue`], relative to its base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The base's elements `start .. start + len`.
    Base {
        /// Index in the base.
        start: usize,
        /// How many.
        len: usize,
    },
    /// Elements that the base does not have at this position.
    New {
        /// How many.
        len: usize,
    },
}

/// A list whose clones share their elements: appending to a list of thousands costs as much as to a list of ten.
#[derive(Clone, Default)]
pub struct ListValue {
    shared: Arc<Shared>,
    origin: Origin,
}

/// What clones of a list share until one of them is changed.
#[derive(Clone, Default)]
struct Shared {
    elements: Vector<Element>,
    /// `None` until the first lookup by id, and again when it is no longer worth keeping.
    places: Option<Places>,
    /// The bytes of all elements.
    bytes: usize,
}

/// Removing an element from the middle of a vector moves up to about this many others; copying one costs about as much
/// as moving one.
const MOVED: usize = 4096;

impl ListValue {
    /// The number of elements.
    pub fn len(&self) -> usize {
        self.shared.elements.len()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.shared.elements.is_empty()
    }

    /// The total bytes of all elements. Known without visiting them.
    pub fn bytes_len(&self) -> usize {
        self.shared.bytes
    }

    /// The elements in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Element> + ExactSizeIterator + Clone {
        self.shared.elements.iter()
    }

    /// The elements from `start` on.
    pub fn iter_from(&self, start: usize) -> impl Iterator<Item = &Element> {
        let start = start.min(self.shared.elements.len());
        self.shared.elements.focus().narrow(start..).into_iter()
    }

    /// The element at `index`.
    pub fn get(&self, index: usize) -> Option<&Element> {
        self.shared.elements.get(index)
    }

    /// The last element.
    pub fn last(&self) -> Option<&Element> {
        self.shared.elements.last()
    }

    /// Whether the list begins with all elements of `base`. Compares only what the two do not share.
    pub fn starts_with(&self, base: &Self) -> bool {
        base.len() <= self.len() && self.common(base) == base.len()
    }

    /// How many of the first elements the two have in common. Compares only what the two do not share.
    pub fn common(&self, other: &Self) -> usize {
        let end = self.len().min(other.len());
        let (mut ours, mut theirs) = (self.shared.elements.focus(), other.shared.elements.focus());
        let mut at = 0;
        while at < end {
            let ((place, own), (other_place, others)) = (ours.chunk_at(at), theirs.chunk_at(at));
            let (own, others) = (&own[at - place.start..], &others[at - other_place.start..]);
            let len = own.len().min(others.len());
            if !std::ptr::eq(own.as_ptr(), others.as_ptr())
                && let Some(same) = own.iter().zip(others).position(|(own, other)| own != other)
            {
                return at + same;
            }
            at += len;
        }
        at
    }

    /// Appends an element.
    pub fn push(&mut self, element: Element) {
        let Shared { elements, places, bytes } = Arc::make_mut(&mut self.shared);
        *bytes += element.bytes().len();
        elements.push_back(element);
        // Without places, no lookup has happened yet.
        if let Some(places) = places {
            places.grown(elements);
        }
    }

    /// Replaces the element at `index`, which must have the same id, by `element`. Equal bytes change nothing.
    pub fn replace(&mut self, index: usize, element: Element) {
        if self.shared.elements.get(index).is_none_or(|old| *old == element) {
            return;
        }
        let Shared { elements, places, bytes } = Arc::make_mut(&mut self.shared);
        let (len, id) = (element.bytes().len(), element.id().cloned());
        let old = elements.set(index, element);
        *bytes = *bytes - old.bytes().len() + len;
        if places.is_some() && old.id() != id.as_ref() {
            *places = None; // Never leave a wrong place.
        }
        self.origin.replaced(index);
    }

    /// Removes the element at `index`.
    pub fn remove(&mut self, index: usize) {
        if index < self.len() {
            self.forget(index);
            self.remove_forgotten(&[index]);
        }
    }

    /// The index of the first element with this id. The first call after loading visits every element, and so does one
    /// after many removals.
    pub fn position(&mut self, id: &str) -> Option<usize> {
        if self.shared.places.is_none() {
            let Shared { elements, places, .. } = Arc::make_mut(&mut self.shared);
            *places = Some(Places::of(elements));
        }
        self.shared.places.as_ref().and_then(|places| places.position(id, &self.shared.elements))
    }

    /// Forgets the id of the element at `index`: [`Self::position`] finds the next element with that id, or none.
    pub(super) fn forget(&mut self, index: usize) {
        let Shared { elements, places, .. } = Arc::make_mut(&mut self.shared);
        if let Some(places) = places {
            places.forget(index, elements);
        }
    }

    /// Removes the elements at these indices, in ascending order and each once, whose ids are forgotten.
    pub(super) fn remove_forgotten(&mut self, indices: &[usize]) {
        let Shared { elements, places, bytes } = Arc::make_mut(&mut self.shared);
        let removed = indices.iter().filter_map(|&index| elements.get(index));
        *bytes -= removed.map(|element| element.bytes().len()).sum::<usize>();
        self.origin.removed(indices);
        if indices.len() > 1 && indices.len().saturating_mul(MOVED) > elements.len() {
            visited(elements.len());
            let mut next = indices.iter().copied().peekable();
            let kept = elements.iter().enumerate().filter(|(index, _)| next.next_if_eq(index).is_none());
            *elements = kept.map(|(_, element)| element.clone()).collect();
        } else {
            for &index in indices.iter().rev() {
                elements.remove(index);
            }
        }
        let left = elements.len();
        *places = places.take().and_then(|places| places.without(indices, left));
    }

    /// The stored value from which this list was made, if a saver holds one. A saver looks that version up in the channel that
    /// the list is written to, and compares only the borders of what they share. So a writer that gives one version to
    /// lists of several channels must [`Self::detach`] a list that it moves from one of them to another.
    pub fn base(&self) -> Option<Version> {
        self.origin.version()
    }

    /// The list as runs of its base's elements and of new ones, in order. Without a base everything is new. The time that
    /// it takes depends on the number of runs, not on the length of the list.
    pub fn parts(&self) -> Vec<Part> {
        self.origin.parts(self.len())
    }

    /// Declares that a saver now holds this list under `version`: from here on changes are relative to it.
    pub fn rebase(&mut self, version: Version) {
        self.origin = Origin::base(version, self.len());
    }

    /// Declares that no saver is known to hold any of this list: everything is new.
    pub fn detach(&mut self) {
        self.origin = Origin::default();
    }
}

impl FromIterator<Element> for ListValue {
    fn from_iter<I: IntoIterator<Item = Element>>(elements: I) -> Self {
        let elements: Vector<Element> = elements.into_iter().collect();
        let bytes = elements.iter().map(|element| element.bytes().len()).sum();
        Self { shared: Arc::new(Shared { elements, places: None, bytes }), origin: Origin::default() }
    }
}

impl PartialEq for ListValue {
    fn eq(&self, other: &Self) -> bool {
        let (own, others) = (&self.shared, &other.shared);
        Arc::ptr_eq(own, others) || own.elements.ptr_eq(&others.elements) || own.elements == others.elements
    }
}

impl fmt::Debug for ListValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Clone)]
    enum Op {
        Push(u8),
        Replace(usize, u8),
        Remove(usize),
        Rebase,
        Detach,
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            4 => any::<u8>().prop_map(Op::Push),
            2 => (any::<usize>(), any::<u8>()).prop_map(|(i, v)| Op::Replace(i, v)),
            1 => any::<usize>().prop_map(Op::Remove),
            1 => Just(Op::Rebase),
            1 => Just(Op::Detach),
        ];
        prop::collection::vec(op, 0..60)
    }

    fn element(id: usize, value: u8) -> Element {
        Element::from_json(&json!({ "id": format!("m{id}"), "v": value })).unwrap()
    }

    proptest! {
        /// The list equals a plain Vec, its parts rebuild it from its base, and ids are found at their positions.
        #[test]
        fn a_list_is_its_base_and_its_changes(ops in ops()) {
            let mut list = ListValue::default();
            let (mut model, mut base): (Vec<Element>, Vec<Element>) = Default::default();
            let mut next = 0;
            for op in ops {
                match op {
                    Op::Push(v) => {
                        list.push(element(next, v));
                        model.push(element(next, v));
                        next += 1;
                    }
                    Op::Replace(i, v) if !model.is_empty() => {
                        let i = i % model.len();
                        let id: usize = model[i].id().unwrap()[1..].parse().unwrap();
                        list.replace(i, element(id, v));
                        model[i] = element(id, v);
                    }
                    Op::Remove(i) if !model.is_empty() => {
                        let i = i % model.len();
                        list.remove(i);
                        model.remove(i);
                    }
                    Op::Detach => {
                        list.detach();
                        base.clear();
                        prop_assert_eq!(list.base(), None);
                    }
                    Op::Rebase => {
                        list.rebase(Version { counter: 1, random: 1 });
                        base = model.clone();
                    }
                    Op::Replace(..) | Op::Remove(_) => {}
                }
                prop_assert_eq!(list.iter().cloned().collect::<Vec<_>>(), model.clone());
                let mut rebuilt = Vec::new();
                for part in list.parts() {
                    match part {
                        Part::Base { start, len } => rebuilt.extend_from_slice(&base[start..start + len]),
                        Part::New { len } => rebuilt.extend_from_slice(&model[rebuilt.len()..rebuilt.len() + len]),
                    }
                }
                prop_assert_eq!(rebuilt, model.clone());
                let at_base: ListValue = base.iter().cloned().collect();
                prop_assert_eq!(list.starts_with(&at_base), model.starts_with(&base));
                let common = model.iter().zip(&base).take_while(|(own, other)| own == other).count();
                prop_assert_eq!((list.common(&at_base), at_base.common(&list)), (common, common));
                prop_assert!(list.starts_with(&list.clone()) && list.starts_with(&ListValue::default()));
                for (i, e) in model.iter().enumerate() {
                    prop_assert_eq!(list.position(e.id().unwrap()), Some(i));
                }
                prop_assert_eq!(list.position("absent"), None);
                prop_assert_eq!(list.bytes_len(), model.iter().map(|e| e.bytes().len()).sum::<usize>());
            }
        }
    }

    #[test]
    fn a_list_starts_with_those_that_it_grew_from() {
        let mut list: ListValue = (0..700).map(|i| element(i, 0)).collect();
        let mut older = vec![list.clone()];
        for i in 700..1000 {
            list.push(element(i, 0));
            older.push(list.clone());
        }
        assert!(older.iter().all(|base| list.starts_with(base)));
        assert!(!older[0].starts_with(&list), "it is longer");
        for changed in [0, 63, 64, 699] {
            let mut other = older[0].clone();
            other.replace(changed, element(changed, 1));
            assert!(!list.starts_with(&other), "{changed}");
            assert_eq!((list.common(&other), other.common(&list)), (changed, changed));
        }
    }

    #[test]
    fn appending_to_a_stored_list_leaves_one_base_part_and_one_new_part() {
        let mut list: ListValue = (0..1000).map(|i| element(i, 0)).collect();
        list.rebase(Version { counter: 7, random: 7 });
        list.push(element(1000, 0));
        list.push(element(1001, 0));
        assert_eq!(list.parts(), [Part::Base { start: 0, len: 1000 }, Part::New { len: 2 }]);
        list.replace(3, element(3, 0));
        assert_eq!(list.parts().len(), 2, "an equal element is not a change");
    }
}

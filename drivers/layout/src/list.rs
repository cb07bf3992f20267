//! Stores lists: elements already stored are referred to, new ones are added.

use bytes::Bytes;
use threadkeep::Result;
use threadkeep::id::Version;
use threadkeep::value::{ChannelValue, Codec, Element, ElementHash, Encoded, ListValue, Part};

use crate::form::Form;
use crate::shape::{Builder, Shape};

/// Values up to this many bytes are stored inline; a row of their own would cost more.
pub const INLINE: usize = 32;

/// The numbered elements of one thread. Equal elements have one number.
///
/// # Errors
/// Whatever prevents looking up or storing an element.
pub trait ListStore {
    /// The number of the element with this hash, if the thread has it.
    fn find(&mut self, hash: &ElementHash) -> Result<Option<u32>>;
    /// The number of an element; adds it if the thread does not have it.
    fn add(&mut self, element: &Element) -> Result<u32>;
    /// The number of a manifest chunk; adds it if missing. Chunks are numbered separately.
    fn add_chunk(&mut self, chunk: Bytes) -> Result<u32>;
}

/// What a value is stored as.
#[derive(Debug)]
pub struct Stored {
    /// What the record contains.
    pub form: Form,
    /// For a list that was cut into elements: what to cache, so that its next version costs only what it changes.
    pub shape: Option<Shape>,
}

/// Stores a value. `base` returns the cached shape of the list it was made from; if that turns out not to match, every
/// element is looked up.
///
/// # Errors
/// Those of the store.
pub fn draft<'s, S: ListStore>(
    store: &mut S,
    value: &ChannelValue,
    base: impl FnOnce(Version) -> Option<&'s Shape>,
) -> Result<Stored> {
    let list = match value {
        ChannelValue::Plain(Encoded { codec: Codec::MessagePack, bytes }) if bytes.len() <= INLINE => {
            return Ok(Stored { form: Form::Plain(bytes.clone()), shape: None });
        }
        ChannelValue::Plain(Encoded { codec: Codec::MessagePack, bytes }) => {
            let number = store.add(&Element::from_bytes(bytes.clone()))?;
            return Ok(Stored { form: Form::Shared(number), shape: None });
        }
        ChannelValue::List(list) => list,
    };
    if let Some(elements) = tiny(list) {
        return Ok(Stored { form: Form::Tiny(elements), shape: None });
    }
    let shape = shape(store, list, list.base().and_then(base))?;
    Ok(Stored { form: Form::List(shape.manifest()), shape: Some(shape) })
}

/// Stores the elements of a list.
///
/// # Errors
/// Those of the store.
fn shape<S: ListStore>(store: &mut S, list: &ListValue, base: Option<&Shape>) -> Result<Shape> {
    let mut builder = Builder::default();
    let base = match base.map(|base| (base, list.parts())) {
        Some((base, parts)) if is_base(store, list, &parts, base)? => Some((base, parts)),
        _ => None,
    };
    if let Some((base, parts)) = base {
        let mut at = 0;
        for part in parts {
            match part {
                Part::Base { start, len } => {
                    builder.take(base, start, len);
                    at += len;
                }
                Part::New { len } => {
                    for element in list.iter_from(at).take(len) {
                        builder.push(store.add(element)?);
                    }
                    at += len;
                }
            }
        }
    } else {
        for element in list.iter() {
            builder.push(store.add(element)?);
        }
    }
    builder.finish(|chunk| store.add_chunk(Bytes::copy_from_slice(chunk)))
}

/// Whether `list`, which has these `parts`, was made from the list that `base` describes: they fit, and the elements at
/// their borders are the same. A version alone does not prove it: a list can be moved to another channel.
fn is_base<S: ListStore>(store: &mut S, list: &ListValue, parts: &[Part], base: &Shape) -> Result<bool> {
    if !parts_fit(parts, base.len()) {
        return Ok(false);
    }
    let mut same = |place: usize, number: Option<u32>| -> Result<bool> {
        let (Some(element), Some(number)) = (list.get(place), number) else { return Ok(false) };
        Ok(store.find(element.hash())? == Some(number))
    };
    let mut at = 0;
    for part in parts {
        let (Part::Base { len, .. } | Part::New { len }) = *part;
        if let Part::Base { start, len } = *part {
            let first = same(at, base.number_at(start))?;
            if !first || !same(at + len - 1, base.number_at(start + len - 1))? {
                return Ok(false);
            }
        }
        at += len;
    }
    Ok(at == list.len())
}

/// Checks that `parts` can be cut out of a list of `len` elements, and that none of the cuts is empty.
fn parts_fit(parts: &[Part], len: usize) -> bool {
    parts.iter().all(|part| match *part {
        Part::Base { start, len: count } => {
            count > 0 && start.checked_add(count).is_some_and(|end| end <= len)
        }
        Part::New { .. } => true,
    })
}

/// The elements of a list that is smaller than its manifest and rows would be.
fn tiny(list: &ListValue) -> Option<Vec<Bytes>> {
    if list.len() > INLINE {
        return None;
    }
    let mut size = 0;
    list.iter()
        .map(|element| {
            size += element.bytes().len() + 1;
            (size <= INLINE).then(|| element.bytes().clone())
        })
        .collect()
}

/// A value that is not cut into elements.
pub fn plain(bytes: Bytes) -> ChannelValue {
    ChannelValue::Plain(Encoded { codec: Codec::MessagePack, bytes })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::manifest::{Run, chunk_runs};

    /// Elements in memory; counts lookups.
    #[derive(Default)]
    struct Numbered {
        elements: Vec<Element>,
        chunks: Vec<Bytes>,
        asked: usize,
    }

    impl ListStore for Numbered {
        fn find(&mut self, hash: &ElementHash) -> Result<Option<u32>> {
            self.asked += 1;
            let at = self.elements.iter().position(|element| element.hash() == hash);
            Ok(at.map(|at| u32::try_from(at).unwrap()))
        }

        fn add(&mut self, element: &Element) -> Result<u32> {
            if let Some(number) = self.find(element.hash())? {
                return Ok(number);
            }
            self.elements.push(element.clone());
            Ok(u32::try_from(self.elements.len() - 1).unwrap())
        }

        fn add_chunk(&mut self, chunk: Bytes) -> Result<u32> {
            self.chunks.push(chunk);
            Ok(u32::try_from(self.chunks.len() - 1).unwrap())
        }
    }

    impl Numbered {
        fn read(&self, form: &Form) -> ListValue {
            let Form::List(manifest) = form else { panic!("not cut into elements: {form:?}") };
            let chunks = manifest.chunks.iter().copied().flat_map(Run::numbers);
            let packed = chunks.flat_map(|chunk| chunk_runs(&self.chunks[chunk as usize]).unwrap());
            let runs = packed.chain(manifest.tail.iter().copied());
            runs.flat_map(Run::numbers).map(|number| self.elements[number as usize].clone()).collect()
        }
    }

    fn version(n: u64) -> Version {
        Version { counter: n, random: n }
    }

    fn element(n: usize) -> Element {
        Element::from_json(&json!({"id": format!("m{n}"), "content": "x".repeat(40)})).unwrap()
    }

    proptest! {
        /// Versions of a list, each made from an earlier one, from the same list in another channel, or from an unknown
        /// one.
        #[test]
        fn every_version_of_a_list_reads_back(edits in prop::collection::vec((any::<usize>(), 0..4_u8, any::<bool>()), 1..40)) {
            let mut store = Numbered::default();
            let mut list: ListValue = (0..3).map(element).collect();
            let mut shape: Option<Shape> = None;
            for (n, (at, kind, known)) in edits.into_iter().enumerate() {
                let place = at % list.len().max(1);
                match kind {
                    0 if list.len() > 2 => list.remove(place),
                    1 if !list.is_empty() => list.replace(place, element(100 + n)),
                    _ => list.push(element(100 + n)),
                }
                let stored = draft(&mut store, &list.clone().into(), |_| shape.as_ref().filter(|_| known)).unwrap();
                prop_assert_eq!(store.read(&stored.form), list.clone());
                shape = stored.shape;
                list.rebase(version(n as u64));
            }
        }
    }

    #[test]
    fn an_append_looks_at_what_is_new_and_at_the_borders() {
        let mut store = Numbered::default();
        let mut list: ListValue = (0..500).map(element).collect();
        let stored = draft(&mut store, &list.clone().into(), |_| None).unwrap();
        list.rebase(version(1));
        list.push(element(500));
        store.asked = 0;
        let appended = draft(&mut store, &list.clone().into(), |base| {
            assert_eq!(base, version(1));
            stored.shape.as_ref()
        });
        assert_eq!((store.asked, store.elements.len()), (3, 501));
        assert_eq!(store.read(&appended.unwrap().form), list);
    }

    #[test]
    fn a_base_that_is_another_list_is_noticed() {
        let mut store = Numbered::default();
        let other: ListValue = (1000..1500).map(element).collect();
        let other = draft(&mut store, &other.into(), |_| None).unwrap();
        let mut list: ListValue = (0..500).map(element).collect();
        list.rebase(version(1));
        list.push(element(500));
        let stored = draft(&mut store, &list.clone().into(), |_| other.shape.as_ref()).unwrap();
        assert_eq!(store.read(&stored.form), list);
    }

    #[test]
    fn small_values_stand_where_they_are_used() {
        let mut store = Numbered::default();
        let form = |store: &mut Numbered, json| {
            draft(store, &ChannelValue::from_json(&json).unwrap(), |_| None).unwrap().form
        };
        assert_eq!(form(&mut store, json!("short")), Form::Plain(Bytes::from_static(b"\xa5short")));
        assert!(matches!(form(&mut store, json!(["a", "b"])), Form::Tiny(elements) if elements.len() == 2));
        assert_eq!(form(&mut store, json!("x".repeat(INLINE))), Form::Shared(0));
        assert_eq!(form(&mut store, json!("x".repeat(INLINE))), Form::Shared(0), "and is stored once");
    }

    #[test]
    fn parts_beyond_the_base_do_not_fit() {
        assert!(parts_fit(&[Part::Base { start: 2, len: 3 }, Part::New { len: 9 }], 5));
        assert!(!parts_fit(&[Part::Base { start: 2, len: 4 }], 5));
        assert!(!parts_fit(&[Part::Base { start: usize::MAX, len: 2 }], 5));
        assert!(!parts_fit(&[Part::Base { start: 0, len: 0 }], 5));
    }
}

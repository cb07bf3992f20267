//! `extra` metadata. It is mostly the same for all checkpoints of a run, so it is stored once and referred to; large
//! objects, to which notes add an entry per run, are stored by entry.

use bytes::Bytes;
use serde_json::{Map, Value as Json};
use threadkeep::metadata::{self, Entries};
use threadkeep::value::Element;
use threadkeep::{Error, Result};
use threadkeep_layout::{Builder, INLINE, Numbers, Shape, draft_entries};

use crate::rows::element::{Elements, Space};
use crate::rows::record::{Extra, Rest};

/// What is remembered of a stored large object: its entries, and where they are.
pub(crate) struct StoredObject {
    entries: Entries,
    shape: Shape,
}

impl StoredObject {
    /// Its size in memory, in hashes.
    pub(crate) fn weight(&self) -> usize {
        // A key, a value, their reference counts, and a place in a tree.
        4 * self.entries.len()
    }
}

/// Stores `extra`. `known` returns the remembered object under a key, for update; `store` stores an element in a space
/// and returns its sequence number.
pub(crate) fn store(
    extra: &metadata::Extra,
    mut known: impl FnMut(&str) -> Option<StoredObject>,
    mut store: impl FnMut(Space, &Element) -> Result<u32>,
) -> Result<(Extra, Vec<(String, StoredObject)>)> {
    let (rest, large) = extra.split();
    let mut maps = Vec::with_capacity(large.len());
    let mut stored = Vec::with_capacity(large.len());
    for (key, entries) in large {
        let shape = store_entries(&entries, known(&key), &mut store)?;
        maps.push((key.clone(), shape.manifest()));
        stored.push((key, StoredObject { entries, shape }));
    }
    if rest.is_empty() {
        return Ok((Extra { rest: Rest::Empty, maps }, stored));
    }
    let element = Element::from_json(&Json::Object(rest))?;
    let rest = if element.bytes().len() <= INLINE {
        Rest::Inline(element.bytes().clone())
    } else {
        Rest::Shared(store(Space::Metadata, &element)?)
    };
    Ok((Extra { rest, maps }, stored))
}

fn store_entries(
    entries: &Entries,
    known: Option<StoredObject>,
    store: &mut impl FnMut(Space, &Element) -> Result<u32>,
) -> Result<Shape> {
    let last = known.as_ref().and_then(|known| Some((&known.entries, known.shape.last()?)));
    let numbers = draft_entries(entries, last, |element| store(Space::Metadata, element))?;
    let mut builder = Builder::default();
    let numbers = match (numbers, known) {
        (Numbers::Behind(more), Some(known)) => {
            builder.take(&known.shape, 0, known.shape.len());
            more
        }
        (Numbers::Behind(all) | Numbers::All(all), _) => all,
    };
    for seq in numbers {
        builder.push(seq);
    }
    builder.finish(|chunk| store(Space::Chunks, &Element::from_bytes(Bytes::copy_from_slice(chunk))))
}

/// Reads what [`store`] stored.
pub(crate) fn load(extra: &Extra, elements: &mut Elements<'_>) -> Result<metadata::Extra> {
    let rest = match &extra.rest {
        Rest::Empty => Map::new(),
        Rest::Inline(bytes) => object(&Element::from_bytes(bytes.clone()))?,
        Rest::Shared(seq) => object(&elements.get(Space::Metadata, *seq)?)?,
    };
    let mut maps = Vec::with_capacity(extra.maps.len());
    for (key, manifest) in &extra.maps {
        maps.push((key.clone(), elements.object(key, manifest)?));
    }
    Ok(metadata::Extra::sharing(rest, maps))
}

fn object(element: &Element) -> Result<Map<String, Json>> {
    match element.to_json()? {
        Json::Object(map) => Ok(map),
        _ => Err(Error::corrupt("checkpoint metadata", "it is not an object")),
    }
}

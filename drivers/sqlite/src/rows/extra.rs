//! `extra` metadata. It is mostly the same for all checkpoints of a run, so it is stored once and referred to; large
//! objects, to which notes add an entry per run, are stored by entry.

use bytes::Bytes;
use serde_json::{Map, Value as Json};
use threadkeep::metadata::{self, Entries};
use threadkeep::value::Element;
use threadkeep::{Error, Result};
use threadkeep_layout::{Builder, INLINE, Numbers, Shape, draft_entries, entries_bytes};

use crate::rows::element::{Elements, Space};
use crate::rows::record::{Extra, Rest};

/// What is remembered of a stored large object: its entries, and where they are.
pub(crate) struct StoredObject {
    entries: Entries,
    /// The bytes of the entries as they are stored.
    bytes: usize,
    shape: Shape,
}

impl StoredObject {
    /// Its bytes in memory.
    pub(crate) fn weight(&self) -> usize {
        entries_bytes(&self.entries, self.bytes) + self.shape.bytes()
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
        let object = store_object(entries, known(&key), &mut store)?;
        maps.push((key.clone(), object.shape.manifest()));
        stored.push((key, object));
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

fn store_object(
    entries: Entries,
    known: Option<StoredObject>,
    store: &mut impl FnMut(Space, &Element) -> Result<u32>,
) -> Result<StoredObject> {
    let last = known.as_ref().and_then(|known| Some((&known.entries, known.shape.last()?)));
    let (numbers, mut bytes) = draft_entries(&entries, last, |element| store(Space::Metadata, element))?;
    let mut builder = Builder::default();
    let numbers = match (numbers, known) {
        (Numbers::Behind(more), Some(known)) => {
            builder.take(&known.shape, 0, known.shape.len());
            bytes += known.bytes;
            more
        }
        (Numbers::Behind(all) | Numbers::All(all), _) => all,
    };
    for seq in numbers {
        builder.push(seq);
    }
    let shape =
        builder.finish(|chunk| store(Space::Chunks, &Element::from_bytes(Bytes::copy_from_slice(chunk))))?;
    Ok(StoredObject { entries, bytes, shape })
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use threadkeep::metadata::Entry;

    use super::*;

    /// Without the values, a few threads with long ones would fill the memory.
    #[test]
    fn an_object_weighs_what_its_values_take() {
        let long = |name: String| -> Entry { (name.into(), Arc::new(Json::from("x".repeat(1_000)))) };
        let mut entries: Entries = (0..8).map(|n| long(n.to_string())).collect();
        let (mut known, mut next) = (None, 0);
        for count in [9, 10] {
            entries.insert(long(format!("number {count}")));
            let extra = metadata::Extra::sharing(Map::new(), vec![("notes".to_owned(), entries.clone())]);
            let number = |_: Space, _: &Element| {
                next += 1;
                Ok(next)
            };
            let (_, mut stored) = super::store(&extra, |_| known.take(), number).unwrap();
            let (_, object) = stored.pop().unwrap();
            let sizes = count * 1_000..count * 1_050;
            assert!(sizes.contains(&object.bytes), "{} bytes", object.bytes);
            let weight = entries_bytes(&entries, object.bytes) + object.shape.bytes();
            assert_eq!(object.weight(), weight);
            known = Some(object);
        }
    }
}

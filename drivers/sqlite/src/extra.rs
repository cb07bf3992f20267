//! `extra` metadata. It is mostly the same for the checkpoints of a run, so it is stored once and referred to; large
//! maps, which are rewritten whole when an entry is added, are stored by entry.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Map, Value as Json};
use threadkeep::metadata::{self, Entry};
use threadkeep::value::Element;
use threadkeep::{Error, Result};
use threadkeep_layout::{Builder, INLINE, Manifest};

use crate::element::{Elements, Space};
use crate::record::{Extra, Rest};

/// An object with at least so many entries is stored by entry. Smaller ones go with the rest.
const LARGE_MAP: usize = 8;

/// Stores `extra`. `store` stores an element in a space and answers its sequence number.
pub(crate) fn store(
    extra: &Map<String, Json>,
    mut store: impl FnMut(Space, &Element) -> Result<u32>,
) -> Result<Extra> {
    let mut rest = Map::new();
    let mut maps = Vec::new();
    for (key, value) in extra {
        match value {
            Json::Object(entries) if entries.len() >= LARGE_MAP => {
                maps.push((key.clone(), store_entries(entries, &mut store)?));
            }
            _ => {
                rest.insert(key.clone(), value.clone());
            }
        }
    }
    if rest.is_empty() {
        return Ok(Extra { rest: Rest::Empty, maps });
    }
    let element = Element::from_json(&Json::Object(rest))?;
    let rest = if element.bytes().len() <= INLINE {
        Rest::Inline(element.bytes().clone())
    } else {
        Rest::Shared(store(Space::Metadata, &element)?)
    };
    Ok(Extra { rest, maps })
}

/// Stores the entries of an object. Their order does not matter, so they are told in the order in which they were
/// first stored: a map that only grows is few runs, whatever its keys are.
fn store_entries(
    entries: &Map<String, Json>,
    store: &mut impl FnMut(Space, &Element) -> Result<u32>,
) -> Result<Manifest> {
    let mut seqs = Vec::with_capacity(entries.len());
    for (key, value) in entries {
        let entry = Map::from_iter([(key.clone(), value.clone())]);
        seqs.push(store(Space::Metadata, &Element::from_json(&Json::Object(entry))?)?);
    }
    seqs.sort_unstable();
    let mut builder = Builder::default();
    for seq in seqs {
        builder.push(seq);
    }
    let shape =
        builder.finish(|chunk| store(Space::Chunks, &Element::from_bytes(Bytes::copy_from_slice(chunk))))?;
    Ok(shape.manifest())
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
        let runs = elements.runs(manifest)?;
        maps.push((key.clone(), elements.entries(&runs)?));
    }
    Ok(metadata::Extra::sharing(rest, maps))
}

/// The entry that an element holds.
pub(crate) fn entry(element: &Element) -> Result<Entry> {
    let mut entries = object(element)?.into_iter();
    match (entries.next(), entries.next()) {
        (Some(entry), None) => Ok(Arc::new(entry)),
        _ => Err(Error::corrupt("checkpoint metadata", "an entry of a map is not one")),
    }
}

fn object(element: &Element) -> Result<Map<String, Json>> {
    match element.to_json()? {
        Json::Object(map) => Ok(map),
        _ => Err(Error::corrupt("checkpoint metadata", "it is not an object")),
    }
}

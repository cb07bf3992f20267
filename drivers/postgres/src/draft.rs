//! Values on their way into the database: what a thread has already is referred to, what is new is collected.

use std::collections::HashMap;

use bytes::Bytes;
use serde_json::{Map, Value as Json};
use threadkeep::id::Version;
use threadkeep::value::{ChannelValue, Element, ElementHash};
use threadkeep::{Error, Result};
use threadkeep_layout::{Form, INLINE, ListStore, NUMBER_LIMIT, Run, Shape, Stored, draft, push_run};

use crate::element::Space;
use crate::record::{CheckpointRecord, Extra, Rest, encode_names};
use crate::thread::{ListKey, ThreadState};

/// A metadata object with at least so many entries is stored by entry. Smaller ones go with the rest.
const LARGE_MAP: usize = 8;

/// What a write adds to the elements of a thread. Nothing is known to be stored until [`Draft::done`].
pub(crate) struct Draft<'s> {
    state: &'s ThreadState,
    added: [HashMap<ElementHash, u32>; 3],
    next: [u32; 3],
    elements: Vec<(i64, Element)>,
    shapes: Vec<(ListKey, Shape)>,
}

/// What a [`Draft`] came to.
pub(crate) struct Drafted {
    pub(crate) next: [u32; 3],
    /// The new elements, by sequence number.
    pub(crate) elements: Vec<(i64, Element)>,
    shapes: Vec<(ListKey, Shape)>,
}

impl Drafted {
    /// Remembers what is stored now.
    pub(crate) fn note(self, state: &mut ThreadState) {
        for (seq, element) in &self.elements {
            if let Some((space, n)) = Space::split(*seq) {
                state.index.note(space, n, *element.hash());
            }
        }
        state.index.next = self.next;
        for (key, shape) in self.shapes {
            state.shapes.put(key, shape);
        }
    }
}

impl<'s> Draft<'s> {
    pub(crate) fn new(state: &'s ThreadState) -> Self {
        Self {
            state,
            added: Default::default(),
            next: state.index.next,
            elements: Vec::new(),
            shapes: Vec::new(),
        }
    }

    pub(crate) fn done(self) -> Drafted {
        Drafted { next: self.next, elements: self.elements, shapes: self.shapes }
    }

    fn number(&self, space: Space, hash: &ElementHash) -> Option<u32> {
        self.state.index.find(space, hash).or_else(|| self.added[space as usize].get(hash).copied())
    }

    /// The number of an element, which is added if the thread does not have it.
    fn element(&mut self, space: Space, element: &Element) -> Result<u32> {
        if let Some(n) = self.number(space, element.hash()) {
            return Ok(n);
        }
        let next = &mut self.next[space as usize];
        let n = *next;
        if n >= NUMBER_LIMIT {
            return Err(Error::InvalidInput("the thread cannot hold more elements".to_owned()));
        }
        *next += 1;
        self.added[space as usize].insert(*element.hash(), n);
        self.elements.push((space.seq(n), element.clone()));
        Ok(n)
    }

    fn structure(&mut self, bytes: impl Into<Bytes>) -> Result<u32> {
        self.element(Space::Structure, &Element::from_bytes(bytes.into()))
    }

    /// The element that lists the names of a record.
    pub(crate) fn names(&mut self, record: &CheckpointRecord) -> Result<u32> {
        let names: Vec<_> = record.names().into_iter().collect();
        self.structure(encode_names(names.into_iter()))
    }

    /// A value of a channel. A list that is stored under a key can be a base of later ones.
    pub(crate) fn value(&mut self, value: &ChannelValue, key: Option<ListKey>) -> Result<Form> {
        let state = self.state;
        let base = |version: Version| {
            let (namespace, channel, _) = key.as_ref()?;
            state.shapes.peek(&(namespace.clone(), channel.clone(), version))
        };
        let Stored { form, shape } = draft(self, value, base)?;
        self.shapes.extend(key.zip(shape));
        Ok(form)
    }

    /// `extra` metadata. It is mostly the same for the checkpoints of a run, so it is stored once and referred to;
    /// large maps, which are rewritten whole when an entry is added, are stored by entry.
    pub(crate) fn extra(&mut self, extra: &Map<String, Json>) -> Result<Extra> {
        let mut rest = Map::new();
        let mut maps = Vec::new();
        for (key, value) in extra {
            match value {
                Json::Object(entries) if entries.len() >= LARGE_MAP => {
                    maps.push((key.clone(), self.entries(entries)?));
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
            Rest::Shared(self.element(Space::Structure, &element)?)
        };
        Ok(Extra { rest, maps })
    }

    /// The entries of an object. Their order does not matter, so they are told in the order in which they were first
    /// stored: a map that only grows is few runs, whatever its keys are.
    fn entries(&mut self, entries: &Map<String, Json>) -> Result<Vec<Run>> {
        let mut numbers = Vec::with_capacity(entries.len());
        for (key, value) in entries {
            let entry = Map::from_iter([(key.clone(), value.clone())]);
            numbers.push(self.element(Space::Entries, &Element::from_json(&Json::Object(entry))?)?);
        }
        numbers.sort_unstable();
        let mut runs = Vec::new();
        for n in numbers {
            push_run(&mut runs, Run { start: n, len: 1 });
        }
        Ok(runs)
    }
}

impl ListStore for Draft<'_> {
    fn find(&mut self, hash: &ElementHash) -> Result<Option<u32>> {
        Ok(self.number(Space::Values, hash))
    }

    fn add(&mut self, element: &Element) -> Result<u32> {
        self.element(Space::Values, element)
    }

    fn add_chunk(&mut self, chunk: Bytes) -> Result<u32> {
        self.structure(chunk)
    }
}

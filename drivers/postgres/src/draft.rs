//! Values on their way into the database: existing elements are referred to, new ones are collected.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use serde_json::Value as Json;
use threadkeep::id::Version;
use threadkeep::metadata::{self, Entries};
use threadkeep::value::{ChannelValue, Element, ElementHash};
use threadkeep::{Error, Result};
use threadkeep_layout::{
    Form, INLINE, ListStore, NUMBER_LIMIT, Numbers, Shapes, Stored, draft, draft_entries, encode_names,
    runs_of,
};

use crate::element::Space;
use crate::record::{CheckpointRecord, Extra, Rest};
use crate::thread::{ListKey, StoredObject, ThreadState};

/// What a write adds to the elements of a thread. Nothing counts as stored until [`Draft::done`].
pub(crate) struct Draft<'s> {
    state: &'s ThreadState,
    added: [HashMap<ElementHash, u32>; 3],
    next: [u32; 3],
    elements: Vec<(i64, Element)>,
    /// The last ones: what is rewritten may have any number of lists.
    shapes: Shapes<ListKey>,
    /// The lists that the state remembers and in whose place something else is stored now.
    replaced: HashSet<ListKey>,
    objects: HashMap<String, StoredObject>,
}

#[cfg(test)]
thread_local! {
    /// How many elements a test looked up.
    pub(crate) static LOOKED_UP: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// The result of a [`Draft`].
pub(crate) struct Drafted {
    pub(crate) next: [u32; 3],
    /// The new elements, by sequence number.
    pub(crate) elements: Vec<(i64, Element)>,
    shapes: Shapes<ListKey>,
    replaced: HashSet<ListKey>,
    objects: HashMap<String, StoredObject>,
}

impl Drafted {
    /// No element.
    pub(crate) fn nothing(next: [u32; 3]) -> Self {
        Self {
            next,
            elements: Vec::new(),
            shapes: Shapes::default(),
            replaced: HashSet::new(),
            objects: HashMap::new(),
        }
    }

    /// Remembers what is now stored.
    pub(crate) fn note(self, state: &mut ThreadState) {
        for (seq, element) in &self.elements {
            if let Some((space, n)) = Space::split(*seq) {
                state.index.note(space, n, *element.hash());
            }
        }
        state.index.next = self.next;
        for key in &self.replaced {
            state.shapes.remove(key);
        }
        state.shapes.append(self.shapes);
        for (key, known) in self.objects {
            state.objects.put(key, known);
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
            shapes: Shapes::default(),
            replaced: HashSet::new(),
            objects: HashMap::new(),
        }
    }

    pub(crate) fn done(self) -> Drafted {
        let Self { next, elements, shapes, replaced, objects, .. } = self;
        Drafted { next, elements, shapes, replaced, objects }
    }

    fn number(&self, space: Space, hash: &ElementHash) -> Option<u32> {
        #[cfg(test)]
        LOOKED_UP.set(LOOKED_UP.get() + 1);
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
        let (shapes, replaced) = (std::mem::take(&mut self.shapes), std::mem::take(&mut self.replaced));
        let state = self.state;
        let base = |version: Version| {
            let (namespace, channel, _) = key.as_ref()?;
            let wanted = (namespace.clone(), channel.clone(), version);
            let known = || state.shapes.peek(&wanted).filter(|_| !replaced.contains(&wanted));
            shapes.peek(&wanted).or_else(known)
        };
        let stored = draft(self, value, base);
        (self.shapes, self.replaced) = (shapes, replaced);
        let Stored { form, shape } = stored?;
        if let Some(key) = key {
            // What was stored under the version is not what it names from now on, also if nothing is remembered in its place.
            if state.shapes.contains(&key) {
                self.replaced.insert(key.clone());
            }
            match shape {
                Some(shape) => self.shapes.put(key, shape),
                None => self.shapes.remove(&key),
            }
        }
        Ok(form)
    }

    /// `extra` metadata. It is mostly the same for all checkpoints of a run, so it is stored once and referred to;
    /// large objects, to which notes add an entry per run, are stored by entry.
    pub(crate) fn extra(&mut self, extra: &metadata::Extra) -> Result<Extra> {
        let (rest, mut large) = extra.split();
        // Of two objects that grow together each would have every second number. The one that has the last number gets the
        // next one, too, so that their runs are half as many.
        large.sort_by_cached_key(|(key, _)| Reverse(self.end(key)));
        let mut maps = Vec::with_capacity(large.len());
        for (key, entries) in large {
            let object = self.object(&key, entries)?;
            maps.push((key.clone(), object.runs.clone()));
            self.objects.insert(key, object);
        }
        maps.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
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

    /// The number after the last one of the object that was stored or read last under this key.
    fn end(&self, key: &str) -> Option<u32> {
        let known = self.objects.get(key).or_else(|| self.state.objects.peek(key))?;
        known.runs.last().map(|run| run.end())
    }

    fn object(&mut self, key: &str, entries: Entries) -> Result<StoredObject> {
        let known = self.objects.remove(key).or_else(|| self.state.objects.peek(key).cloned());
        let last = known.as_ref().and_then(|known| Some((&known.entries, known.runs.last()?.end() - 1)));
        let (numbers, mut bytes) =
            draft_entries(&entries, last, |element| self.element(Space::Entries, element))?;
        let runs = match (numbers, known) {
            (Numbers::Behind(more), Some(known)) => {
                bytes += known.bytes;
                runs_of(&more, known.runs)
            }
            (Numbers::Behind(all) | Numbers::All(all), _) => runs_of(&all, Vec::new()),
        };
        Ok(StoredObject { entries, bytes, runs })
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Map, json};
    use threadkeep::id::Namespace;
    use threadkeep::metadata::Entry;
    use threadkeep::value::ListValue;
    use threadkeep_layout::{Run, SHAPES};

    use super::*;

    fn version(counter: u64) -> Version {
        Version { counter, random: 0 }
    }

    /// A list of these elements that says it was made from the one under version `base`.
    fn list(base: u64, elements: &[Json]) -> ListValue {
        let (same, new) = elements.split_at(elements.len().min(3));
        let mut list: ListValue = same.iter().map(|element| Element::from_json(element).unwrap()).collect();
        list.rebase(version(base));
        for element in new {
            list.push(Element::from_json(element).unwrap());
        }
        list
    }

    /// A note of a gateway adds an entry to two objects.
    #[test]
    fn two_objects_that_grow_together_have_a_run_for_two_entries_each() {
        let (mut state, mut extra) = (ThreadState::absent(), metadata::Extra::default());
        let mut maps = Vec::new();
        for turn in 0..100 {
            for key in ["durations", "messages"] {
                let mut entries = extra.object(key).unwrap_or_default();
                entries.insert((format!("{key} {turn}").into(), Arc::new(json!(turn))));
                extra.insert_object(key, entries);
            }
            let mut draft = Draft::new(&state);
            maps = draft.extra(&extra).unwrap().maps;
            draft.done().note(&mut state);
        }
        let runs =
            |(key, runs): (String, Vec<Run>)| (key, runs.len(), runs.iter().map(|run| run.len).sum::<u32>());
        let found: Vec<_> = maps.into_iter().map(runs).collect();
        assert_eq!(found, [("durations".to_owned(), 47, 100), ("messages".to_owned(), 47, 100)]);
    }

    /// Stores lists of one channel under these versions, each group of them with one draft, and reads the last one.
    fn last_of(groups: &[Vec<(u64, ListValue)>]) -> ListValue {
        let (mut state, mut elements) = (ThreadState::absent(), HashMap::new());
        let mut last = None;
        for group in groups {
            let mut draft = Draft::new(&state);
            for (counter, list) in group {
                let key = (Namespace::root(), "messages".into(), version(*counter));
                last = Some(draft.value(&list.clone().into(), Some(key)).unwrap());
            }
            let drafted = draft.done();
            elements.extend(drafted.elements.iter().cloned());
            drafted.note(&mut state);
        }
        let Some(Form::List(manifest)) = last else { panic!("not cut into elements: {last:?}") };
        assert!(manifest.chunks.is_empty(), "a short list");
        let numbers = manifest.tail.iter().flat_map(|run| run.numbers());
        numbers.map(|n| elements[&Space::Values.seq(n)].clone()).collect()
    }

    /// Another list was stored before under the version of the short one, with the same first and last element; that is all
    /// that is checked of a list that names its base.
    #[test]
    fn a_list_that_goes_on_from_a_short_one_has_its_elements() {
        let text = |n: u32| json!(format!("a message that is too long to be kept in its record {n}"));
        let long = (9, list(1, &[json!(0), json!(9), json!(2), text(1)]));
        let short = (9, list(1, &[json!(0), json!(1), json!(2)]));
        let next = (10, list(9, &[json!(0), json!(1), json!(2), text(2)]));
        let steps = [long.clone(), short.clone(), next.clone()];
        for groups in [
            vec![steps.to_vec()],
            vec![vec![long.clone()], vec![short.clone(), next.clone()]],
            vec![vec![long.clone(), short.clone()], vec![next.clone()]],
            vec![vec![long.clone()], vec![short], vec![next.clone()]],
        ] {
            assert_eq!(last_of(&groups), next.1, "{groups:?}");
        }

        // Neither are its elements those of an earlier list if a later one under the version is not remembered any more.
        let replaced = (9, list(1, &[json!(0), json!(1), json!(2), text(3)]));
        let others = (100..).zip(0..).map(|(version, n)| (version, list(1, &[text(n)])));
        let others = others.take(SHAPES).collect::<Vec<_>>();
        let forgotten = [vec![replaced], others].concat();
        let then = vec![next.clone()];
        for groups in [
            vec![vec![long.clone()], [forgotten.clone(), then.clone()].concat()],
            vec![vec![long], forgotten, then],
        ] {
            assert_eq!(last_of(&groups), next.1);
        }
    }

    /// A map that grows by an entry per note, with keys in random order: the remembered previous map gives the same
    /// record as looking up every entry, and stores what is new.
    #[test]
    fn a_map_that_goes_on_is_stored_as_if_all_of_it_were_looked_up() {
        let mut state = ThreadState::absent();
        let mut runs = Entries::default();
        for number in 0..300_u32 {
            runs.insert((format!("run {}", number * 7919 % 307).into(), Arc::new(json!(number))));
            let mut extra = metadata::Extra::default();
            extra.insert_object("runs", runs.clone());
            extra.insert(
                "note".to_owned(),
                json!(format!("a text that is too long to stand in place {number}")),
            );

            let mut forgetful = state.clone();
            forgetful.objects.clear();
            let mut draft = Draft::new(&forgetful);
            let expected = draft.extra(&extra).unwrap();
            let elements = draft.done().elements;

            let mut draft = Draft::new(&state);
            assert_eq!(draft.extra(&extra).unwrap(), expected);
            let drafted = draft.done();
            assert_eq!(drafted.elements, elements);
            assert!(number <= 7 || elements.len() == 2, "the entry and the note");
            drafted.note(&mut state);
        }
    }

    /// Without the values, a few threads with long ones would fill the memory.
    #[test]
    fn an_object_is_remembered_with_the_size_of_its_values() {
        let mut state = ThreadState::absent();
        let long = |name: String| -> Entry { (name.into(), Arc::new(json!("x".repeat(1_000)))) };
        let mut entries: Entries = (0..8).map(|n| long(n.to_string())).collect();
        for sizes in [9_000..9_500, 10_000..10_500] {
            entries.insert(long(format!("{sizes:?}")));
            let extra = metadata::Extra::sharing(Map::new(), vec![("notes".to_owned(), entries.clone())]);
            let mut draft = Draft::new(&state);
            draft.extra(&extra).unwrap();
            draft.done().note(&mut state);
            let bytes = state.objects.peek("notes").unwrap().bytes;
            assert!(sizes.contains(&bytes), "{bytes} bytes");
        }
    }
}

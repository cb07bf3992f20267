//! Stores and loads large metadata objects entry by entry.
//!
//! Objects that notes carry along grow by an entry per run. The entries of the object that was stored or read last are
//! cached, so that the next version costs only what it adds.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Map, Value as Json};
use threadkeep::metadata::{Entries, Entry};
use threadkeep::value::Element;
use threadkeep::{Error, Result};

use crate::manifest::{Manifest, Run, continuation, push_run};

/// The numbers of an object's entries, ascending. Their order has no meaning, so they keep the order in which they were
/// first stored: an object that only grows is a few runs, whatever its keys are.
#[derive(Debug, PartialEq, Eq)]
pub enum Numbers {
    /// Those that follow the numbers of the known object.
    Behind(Vec<u32>),
    /// All of them.
    All(Vec<u32>),
}

/// Stores the entries of an object. `known` is an object stored before, with its greatest number; `add` stores an
/// element if it is missing and returns its number. Returns the numbers, and the bytes of their entries as they are
/// stored.
///
/// # Errors
/// Those of `add`.
pub fn draft_entries(
    entries: &Entries,
    known: Option<(&Entries, u32)>,
    mut add: impl FnMut(&Element) -> Result<u32>,
) -> Result<(Numbers, usize)> {
    if let Some((known, last)) = known
        && let Some(added) = entries.added_to(known)
    {
        let (numbers, bytes) = numbers(added, &mut add)?;
        if numbers.first().is_none_or(|first| *first > last) {
            return Ok((Numbers::Behind(numbers), bytes));
        }
    }
    let (numbers, bytes) = numbers(entries.iter(), &mut add)?;
    Ok((Numbers::All(numbers), bytes))
}

fn numbers<'e>(
    entries: impl IntoIterator<Item = (&'e Arc<str>, &'e Arc<Json>)>,
    add: &mut impl FnMut(&Element) -> Result<u32>,
) -> Result<(Vec<u32>, usize)> {
    let mut bytes = 0;
    let number = |(key, value): (&Arc<str>, &Arc<Json>)| {
        let entry = Map::from_iter([(key.to_string(), Json::clone(value))]);
        let element = Element::from_json(&Json::Object(entry))?;
        bytes += element.bytes().len();
        add(&element)
    };
    let mut numbers = entries.into_iter().map(number).collect::<Result<Vec<_>>>()?;
    numbers.sort_unstable();
    Ok((numbers, bytes))
}

/// An entry, and its bytes as it is stored.
pub type StoredEntry = (Entry, usize);

/// Decodes the entry that an element holds.
///
/// # Errors
/// [`Error::Corrupt`] if it holds none.
pub fn entry(element: &Element) -> Result<StoredEntry> {
    let none = || Error::corrupt("checkpoint metadata", "an entry of a map is not one");
    let Json::Object(object) = element.to_json()? else { return Err(none()) };
    let mut entries = object.into_iter();
    match (entries.next(), entries.next()) {
        (Some((key, value)), None) => Ok(((key.into(), Arc::new(value)), element.bytes().len())),
        _ => Err(none()),
    }
}

/// Reads stored entries.
///
/// # Errors
/// Whatever prevents reading them.
pub trait EntrySource {
    /// The runs in these chunks, concatenated.
    fn unpacked(&mut self, chunks: Vec<Run>) -> Result<Vec<Run>>;
    /// The entries with these numbers.
    fn load(&mut self, runs: &[Run]) -> Result<Vec<StoredEntry>>;
}

/// An object that was read.
#[derive(Debug, Clone, Default)]
pub struct Object {
    /// Where its entries are.
    pub manifest: Manifest,
    /// The entries.
    pub entries: Entries,
    /// Their bytes as they are stored: added up as entries are loaded, because to look at all of them in every read
    /// would take longer the longer the object is.
    pub bytes: usize,
}

/// The objects built during a read of a thread, the latest for each key: an object that extends it, or that it extends,
/// shares its entries.
#[derive(Debug, Default)]
pub struct Objects(HashMap<String, Object>);

impl Objects {
    /// The object under a key.
    pub fn get(&self, key: &str) -> Option<&Object> {
        self.0.get(key)
    }

    /// Adds an object that was built before.
    pub fn put(&mut self, key: &str, object: Object) {
        self.0.insert(key.to_owned(), object);
    }

    /// The object under `key` with the entries of `manifest`.
    ///
    /// # Errors
    /// Those of the source.
    pub fn made(&mut self, key: &str, manifest: &Manifest, source: &mut impl EntrySource) -> Result<Entries> {
        let Object { manifest: have, mut entries, mut bytes } = self.0.remove(key).unwrap_or_default();
        if let Some(more) = beyond(&have, manifest, source)? {
            for (entry, size) in source.load(&more)? {
                entries.insert(entry);
                bytes += size;
            }
        } else {
            let less = beyond(manifest, &have, source)?;
            // If less than half remains, loading it is cheaper than dropping the rest.
            if let Some(less) = less.filter(|less| 2 * count(less) <= entries.len()) {
                for ((name, _), size) in source.load(&less)? {
                    entries.remove(&name);
                    bytes = bytes.saturating_sub(size);
                }
            } else {
                let mut runs = source.unpacked(manifest.chunks.clone())?;
                manifest.tail.iter().for_each(|run| push_run(&mut runs, *run));
                let loaded = source.load(&runs)?;
                bytes = loaded.iter().map(|(_, size)| size).sum();
                entries = loaded.into_iter().map(|(entry, _)| entry).collect();
            }
        }
        self.put(key, Object { manifest: manifest.clone(), entries: entries.clone(), bytes });
        Ok(entries)
    }
}

/// The runs of `manifest` that follow those of `have`, if it starts with them. Shared chunks are not read.
fn beyond(have: &Manifest, manifest: &Manifest, source: &mut impl EntrySource) -> Result<Option<Vec<Run>>> {
    let Some(chunks) = continuation(&have.chunks, &manifest.chunks) else { return Ok(None) };
    let mut runs = if chunks.is_empty() { Vec::new() } else { source.unpacked(chunks)? };
    manifest.tail.iter().for_each(|run| push_run(&mut runs, *run));
    Ok(continuation(&have.tail, &runs))
}

fn count(runs: &[Run]) -> usize {
    runs.iter().map(|run| run.len as usize).sum()
}

/// Runs of ascending numbers.
pub fn runs_of(numbers: &[u32], mut runs: Vec<Run>) -> Vec<Run> {
    for number in numbers {
        push_run(&mut runs, Run { start: *number, len: 1 });
    }
    runs
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::manifest::chunk_runs;
    use crate::shape::Builder;

    /// Elements and chunks in memory; counts lookups.
    #[derive(Default)]
    struct Numbered {
        elements: Vec<Element>,
        chunks: Vec<Vec<u8>>,
        asked: usize,
    }

    impl EntrySource for Numbered {
        fn unpacked(&mut self, chunks: Vec<Run>) -> Result<Vec<Run>> {
            let mut runs = Vec::new();
            for number in chunks.into_iter().flat_map(Run::numbers) {
                self.asked += 1;
                chunk_runs(&self.chunks[number as usize])
                    .unwrap()
                    .into_iter()
                    .for_each(|run| push_run(&mut runs, run));
            }
            Ok(runs)
        }

        fn load(&mut self, runs: &[Run]) -> Result<Vec<StoredEntry>> {
            self.asked += count(runs);
            runs.iter().flat_map(|run| run.numbers()).map(|n| entry(&self.elements[n as usize])).collect()
        }
    }

    impl Numbered {
        fn add(&mut self, element: &Element) -> u32 {
            self.asked += 1;
            let at = self.elements.iter().position(|have| have == element).unwrap_or_else(|| {
                self.elements.push(element.clone());
                self.elements.len() - 1
            });
            u32::try_from(at).unwrap()
        }

        fn packed(&mut self, numbers: impl IntoIterator<Item = u32>) -> Manifest {
            let mut builder = Builder::default();
            numbers.into_iter().for_each(|number| builder.push(number));
            let shape = builder.finish(|chunk| {
                let at = self.chunks.iter().position(|have| have == chunk).unwrap_or(self.chunks.len());
                if at == self.chunks.len() {
                    self.chunks.push(chunk.to_vec());
                }
                Ok::<_, Error>(u32::try_from(at).unwrap())
            });
            shape.unwrap().manifest()
        }
    }

    fn number(n: usize) -> Entry {
        (format!("run {n}").into(), Arc::new(json!(n)))
    }

    /// The bytes of the elements of these entries.
    fn stored_bytes(entries: &Entries) -> usize {
        let element = |(key, value): (&Arc<str>, &Arc<Json>)| {
            let entry = Map::from_iter([(key.to_string(), Json::clone(value))]);
            Element::from_json(&Json::Object(entry)).unwrap().bytes().len()
        };
        entries.iter().map(element).sum()
    }

    #[test]
    fn an_object_of_thousands_asks_about_what_it_adds() {
        let mut store = Numbered::default();
        let mut entries: Entries = (0..5000).map(number).collect();
        let all = draft_entries(&entries, None, |element| Ok(store.add(element))).unwrap();
        let (Numbers::All(all), bytes) = all else { panic!("nothing was known: {all:?}") };
        assert_eq!(runs_of(&all, Vec::new()), [Run { start: 0, len: 5000 }]);
        assert_eq!(bytes, stored_bytes(&entries));
        let before = entries.clone();
        for n in 5000..5003 {
            entries.insert(number(n));
        }
        let added = stored_bytes(&entries) - bytes;
        store.asked = 0;
        let more = draft_entries(&entries, Some((&before, 4999)), |element| Ok(store.add(element))).unwrap();
        assert_eq!((more, store.asked), ((Numbers::Behind(vec![5000, 5001, 5002]), added), 3));
        let same = draft_entries(&before, Some((&before, 4999)), |element| Ok(store.add(element))).unwrap();
        assert_eq!((same, store.asked), ((Numbers::Behind(Vec::new()), 0), 3));
    }

    /// What is added was stored before the known object was, as by another process: all entries are looked up then,
    /// those that were added a second time.
    #[test]
    fn bytes_are_counted_once_where_an_entry_has_an_older_number() {
        let mut store = Numbered::default();
        let later = number(0);
        store.add(&Element::from_json(&json!({ "run 0": 0 })).unwrap());
        let known: Entries = (1..10).map(number).collect();
        draft_entries(&known, None, |element| Ok(store.add(element))).unwrap();
        let mut entries = known.clone();
        entries.insert(later);
        let drafted = draft_entries(&entries, Some((&known, 9)), |element| Ok(store.add(element))).unwrap();
        assert_eq!(drafted, (Numbers::All((0..10).collect()), stored_bytes(&entries)));
    }

    #[test]
    fn an_object_that_went_on_loads_what_is_between() {
        let mut store = Numbered::default();
        for n in 0..1030 {
            store.add(&Element::from_json(&json!({ n.to_string(): n })).unwrap());
        }
        // Every second number, so that each is its own run.
        let versions = [500, 510, 480, 40].map(|len| store.packed((0..len).map(|n| 2 * n)));
        assert!(versions[0].chunks.len() == 1 && versions[0].chunks[0].len > 50);
        let mut objects = Objects::default();
        let mut asked = Vec::new();
        for (version, len) in versions.iter().zip([500, 510, 480, 40]) {
            store.asked = 0;
            let made = objects.made("k", version, &mut store).unwrap();
            asked.push(store.asked);
            assert!(
                made.len() == len && made.get("0").is_some() && made.get(&(2 * len).to_string()).is_none()
            );
        }
        // First the whole object with its 61 chunks, then the difference with one and with four chunks, finally a full
        // load.
        assert_eq!(asked[..3], [561, 11, 34], "{asked:?}");
        assert!(asked[3] < 110, "{asked:?}");
    }

    proptest! {
        /// Objects that grow, change and lose entries, each stored knowing an earlier one or none: the numbers are
        /// those of their entries, ascending, and reading them in order returns them unchanged.
        #[test]
        fn every_version_of_an_object_reads_back(
            edits in prop::collection::vec((prop::collection::vec((any::<bool>(), 0..40_u8, 0..3_u8), 0..6), any::<bool>()), 1..20),
            order in prop::collection::vec(any::<prop::sample::Index>(), 1..30),
        ) {
            let mut store = Numbered::default();
            let (mut entries, mut model) = (Entries::default(), BTreeMap::new());
            let mut known: Option<(Entries, Vec<Run>)> = None;
            let mut versions = Vec::new();
            for (edit, knows) in edits {
                for (add, key, value) in edit {
                    let text = key.to_string();
                    if add {
                        entries.insert((text.as_str().into(), Arc::new(json!(value))));
                        model.insert(text, value);
                    } else {
                        entries.remove(&text);
                        model.remove(&text);
                    }
                }
                let known_now = known.as_ref().filter(|_| knows);
                let last = known_now.and_then(|(known, runs)| Some((known, runs.last()?.end() - 1)));
                let (numbers, _) = draft_entries(&entries, last, |element| Ok(store.add(element))).unwrap();
                let runs = match (numbers, known_now) {
                    (Numbers::Behind(more), Some((_, runs))) => runs_of(&more, runs.clone()),
                    (Numbers::Behind(more), None) => panic!("behind nothing: {more:?}"),
                    (Numbers::All(all), _) => runs_of(&all, Vec::new()),
                };
                let found: BTreeSet<u32> = runs.iter().flat_map(|run| run.numbers()).collect();
                let told = runs.iter().map(|run| run.len as usize).sum::<usize>();
                prop_assert_eq!((found.len(), told), (model.len(), model.len()));
                prop_assert!(runs.is_sorted_by_key(|run| run.start));
                versions.push((runs.clone(), entries.clone()));
                known = Some((entries.clone(), runs));
            }
            let mut objects = Objects::default();
            for at in order {
                let (runs, expected) = at.get(&versions);
                let manifest = store.packed(runs.iter().flat_map(|run| run.numbers()));
                let made = objects.made("k", &manifest, &mut store).unwrap();
                prop_assert_eq!(&made, expected);
                prop_assert_eq!(objects.get("k").unwrap().bytes, stored_bytes(expected));
            }
        }
    }

    #[test]
    fn what_is_no_entry_is_damage() {
        for json in [json!({}), json!({"a": 1, "b": 2}), json!([1])] {
            assert!(matches!(entry(&Element::from_json(&json).unwrap()), Err(Error::Corrupt { .. })));
        }
    }
}

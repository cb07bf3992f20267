//! Reads stored values: lists share the elements of those that were read before them.

use std::collections::HashMap;
use std::hash::Hash;

use threadkeep::Result;
use threadkeep::value::{ChannelValue, Element, ListValue};

use crate::form::Form;
use crate::list::plain;
use crate::manifest::{Manifest, Run, continuation, push_run};

/// Reads the stored elements and chunks of one thread.
///
/// # Errors
/// Whatever prevents reading them; a missing one is [`threadkeep::Error::Corrupt`].
pub trait ValueSource {
    /// The elements with these numbers, in this order.
    fn elements(&mut self, runs: &[Run]) -> Result<Vec<Element>>;
    /// The runs in the chunk with this number: what [`crate::chunk_runs`] returns for its bytes.
    fn chunk(&mut self, number: u32) -> Result<Vec<Run>>;
}

/// Reads values, and remembers the last list under each key, such as the name of its channel. A list that is that one
/// with more at its end costs only what it adds, so read the versions of a list oldest first.
#[derive(Debug)]
pub struct Values<K>(HashMap<K, (Manifest, ListValue)>);

impl<K> Default for Values<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Eq + Hash> Values<K> {
    /// The value that is stored in this form.
    ///
    /// # Errors
    /// Those of the source.
    pub fn read(&mut self, key: K, form: &Form, source: &mut impl ValueSource) -> Result<ChannelValue> {
        Ok(match form {
            Form::Plain(bytes) => plain(bytes.clone()),
            Form::Shared(number) => {
                let element = source.elements(&[Run { start: *number, len: 1 }])?;
                plain(element.first().map(|element| element.bytes().clone()).unwrap_or_default())
            }
            Form::Tiny(elements) => {
                elements.iter().cloned().map(Element::from_bytes).collect::<ListValue>().into()
            }
            Form::List(manifest) => self.list(key, manifest, source)?.into(),
        })
    }

    fn list(&mut self, key: K, manifest: &Manifest, source: &mut impl ValueSource) -> Result<ListValue> {
        let known = self.0.remove(&key);
        let list = match known {
            Some((have, list)) if have == *manifest => list,
            Some((have, mut list)) => match beyond(&have, manifest, source)? {
                Some(more) => {
                    source.elements(&more)?.into_iter().for_each(|element| list.push(element));
                    list
                }
                None => whole(manifest, source)?,
            },
            None => whole(manifest, source)?,
        };
        self.0.insert(key, (manifest.clone(), list.clone()));
        Ok(list)
    }
}

fn whole(manifest: &Manifest, source: &mut impl ValueSource) -> Result<ListValue> {
    let mut runs = Vec::new();
    unpack(&manifest.chunks, &mut runs, &mut |number| source.chunk(number))?;
    manifest.tail.iter().for_each(|run| push_run(&mut runs, *run));
    Ok(source.elements(&runs)?.into_iter().collect())
}

/// The runs of `manifest` after those of `have`, if it starts with them. Shared chunks are not read.
fn beyond(have: &Manifest, manifest: &Manifest, source: &mut impl ValueSource) -> Result<Option<Vec<Run>>> {
    let Some(chunks) = continuation(&have.chunks, &manifest.chunks) else { return Ok(None) };
    let mut runs = Vec::new();
    unpack(&chunks, &mut runs, &mut |number| source.chunk(number))?;
    manifest.tail.iter().for_each(|run| push_run(&mut runs, *run));
    Ok(continuation(&have.tail, &runs))
}

/// Appends the runs in these chunks.
fn unpack<E>(
    chunks: &[Run],
    runs: &mut Vec<Run>,
    chunk: &mut impl FnMut(u32) -> Result<Vec<Run>, E>,
) -> Result<(), E> {
    for number in chunks.iter().flat_map(|run| run.numbers()) {
        chunk(number)?.into_iter().for_each(|run| push_run(runs, run));
    }
    Ok(())
}

/// The numbers that stored values refer to: what must stay when all others are deleted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refers {
    /// Of elements.
    pub elements: Vec<Run>,
    /// Of chunks.
    pub chunks: Vec<Run>,
}

impl Form {
    /// The numbers that the form refers to, also through its chunks. `chunk` reads one, as [`ValueSource::chunk`].
    ///
    /// # Errors
    /// Those of `chunk`.
    pub fn refers<E>(&self, mut chunk: impl FnMut(u32) -> Result<Vec<Run>, E>) -> Result<Refers, E> {
        match self {
            Self::Plain(_) | Self::Tiny(_) => Ok(Refers::default()),
            Self::Shared(number) => {
                Ok(Refers { elements: vec![Run { start: *number, len: 1 }], chunks: Vec::new() })
            }
            Self::List(manifest) => manifest.refers(&mut chunk),
        }
    }
}

impl Manifest {
    /// As [`Form::refers`].
    ///
    /// # Errors
    /// Those of `chunk`.
    pub fn refers<E>(&self, mut chunk: impl FnMut(u32) -> Result<Vec<Run>, E>) -> Result<Refers, E> {
        let mut elements = Vec::new();
        unpack(&self.chunks, &mut elements, &mut chunk)?;
        self.tail.iter().for_each(|run| push_run(&mut elements, *run));
        Ok(Refers { elements, chunks: self.chunks.clone() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;
    use threadkeep::value::ElementHash;

    use super::*;
    use crate::list::{ListStore, Stored, draft};
    use crate::manifest::chunk_runs;
    use crate::shape::Shape;

    /// Elements and chunks in memory; counts the elements that were read.
    #[derive(Default)]
    struct Numbered {
        elements: Vec<Element>,
        chunks: Vec<bytes::Bytes>,
        read: usize,
    }

    impl ListStore for Numbered {
        fn find(&mut self, hash: &ElementHash) -> Result<Option<u32>> {
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

        fn add_chunk(&mut self, chunk: bytes::Bytes) -> Result<u32> {
            self.chunks.push(chunk);
            Ok(u32::try_from(self.chunks.len() - 1).unwrap())
        }
    }

    impl ValueSource for Numbered {
        fn elements(&mut self, runs: &[Run]) -> Result<Vec<Element>> {
            let numbers = runs.iter().flat_map(|run| run.numbers());
            let found: Vec<_> = numbers.map(|number| self.elements[number as usize].clone()).collect();
            self.read += found.len();
            Ok(found)
        }

        fn chunk(&mut self, number: u32) -> Result<Vec<Run>> {
            Ok(chunk_runs(&self.chunks[number as usize]).unwrap())
        }
    }

    fn element(n: usize) -> Element {
        Element::from_json(&json!({"id": format!("m{n}"), "content": "x".repeat(40)})).unwrap()
    }

    proptest! {
        /// Versions of a list in any order, each stored after the shape of an earlier one was read back: every one reads
        /// as it was, and refers to exactly the numbers of its elements.
        #[test]
        fn every_stored_version_reads_back(edits in prop::collection::vec((any::<usize>(), 0..3_u8), 1..60)) {
            let mut store = Numbered::default();
            let mut list: ListValue = (0..40).map(element).collect();
            let mut versions: Vec<(Form, ListValue)> = Vec::new();
            for (n, (at, kind)) in edits.into_iter().enumerate() {
                let base = versions.last().and_then(|(form, _)| match form {
                    Form::List(manifest) => Some(Shape::stored(manifest, |number| store.chunk(number)).unwrap()),
                    _ => None,
                });
                list.rebase(threadkeep::id::Version { counter: n as u64, random: 0 });
                match kind {
                    0 => list.remove(at % list.len()),
                    1 => list.replace(at % list.len(), element(100 + n)),
                    _ => list.push(element(100 + n)),
                }
                let Stored { form, .. } = draft(&mut store, &list.clone().into(), |_| base.as_ref()).unwrap();
                versions.push((form, list.clone()));
            }
            let mut values = Values::default();
            for (form, list) in versions.iter().chain(versions.iter().rev()) {
                prop_assert_eq!(values.read("k", form, &mut store).unwrap(), list.clone().into());
                let numbers = form.refers(|number| store.chunk(number)).unwrap();
                let elements: Vec<_> = list.iter().cloned().collect();
                prop_assert_eq!(store.elements(&numbers.elements).unwrap(), elements);
            }
        }
    }

    #[test]
    fn a_list_that_grew_costs_what_it_adds() {
        let mut store = Numbered::default();
        let mut values = Values::default();
        let mut list: ListValue = (0..500).map(element).collect();
        let mut read = Vec::new();
        for n in 500..503 {
            let form = draft(&mut store, &list.clone().into(), |_| None).unwrap().form;
            store.read = 0;
            assert_eq!(values.read("k", &form, &mut store).unwrap(), list.clone().into());
            read.push(store.read);
            list.push(element(n));
        }
        assert_eq!(read, [500, 1, 1]);
    }
}

//! Elements: each distinct one of a thread is stored once, and checked against its hash on every read.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bytes::Bytes;
use threadkeep::id::ThreadId;
use threadkeep::metadata::Entries;
use threadkeep::value::{Element, ElementHash};
use threadkeep::{Error, Result};
use threadkeep_layout::{
    EntrySource, Manifest, NUMBER_LIMIT, Object, Objects, Packer, Run, StoredEntry, Unpacker, chunk_runs,
    entry, push_run,
};

use crate::error::corrupt;
use crate::memory::Content;

/// A sequence of elements in a thread. Elements of one kind are numbered together, so that lists have few runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Space {
    /// Elements of lists, and large values.
    Values = 0,
    /// What is needed to decode a checkpoint: names, metadata, chunks of manifests.
    Structure = 1,
    /// Entries of large maps in metadata.
    Entries = 2,
}

pub(crate) const SPACES: [Space; 3] = [Space::Values, Space::Structure, Space::Entries];

impl Space {
    /// The sequence number of the `n`-th element.
    pub(crate) fn seq(self, n: u32) -> i64 {
        (self as i64) << 32 | i64::from(n)
    }

    /// The first and last sequence number of a run.
    pub(crate) fn bounds(self, run: Run) -> [i64; 2] {
        [self.seq(run.start), self.seq(run.end() - 1)]
    }

    /// The space and number of a sequence number.
    pub(crate) fn split(seq: i64) -> Option<(Self, u32)> {
        let space = SPACES.get(usize::try_from(seq >> 32).ok()?)?;
        u32::try_from(seq & 0xffff_ffff).ok().filter(|n| *n < NUMBER_LIMIT).map(|n| (*space, n))
    }
}

/// The elements that a thread has stored, for the writer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Index {
    numbers: [HashMap<ElementHash, u32>; 3],
    /// The next number of each space.
    pub(crate) next: [u32; 3],
}

impl Index {
    /// The number of elements it knows.
    pub(crate) fn len(&self) -> usize {
        self.numbers.iter().map(HashMap::len).sum()
    }

    /// The number of the element with this hash, if it is stored.
    pub(crate) fn find(&self, space: Space, hash: &ElementHash) -> Option<u32> {
        self.numbers[space as usize].get(hash).copied()
    }

    /// Records an element that is stored.
    pub(crate) fn note(&mut self, space: Space, n: u32, hash: ElementHash) {
        self.numbers[space as usize].insert(hash, n);
    }

    /// The numbers in use, in no order.
    pub(crate) fn stored(&self, space: Space) -> impl Iterator<Item = u32> {
        self.numbers[space as usize].values().copied()
    }
}

thread_local! {
    // Creating a packer is expensive.
    static PACKER: RefCell<Option<Packer>> = const { RefCell::new(None) };
    static UNPACKER: RefCell<Option<Unpacker>> = const { RefCell::new(None) };
}

/// The stored bytes of an element, and its size if they are packed. There is no dictionary: every process would have to
/// know it before it could read.
pub(crate) fn pack(bytes: &[u8]) -> io::Result<(Option<i32>, Vec<u8>)> {
    let Ok(size) = i32::try_from(bytes.len()) else { return Ok((None, bytes.to_vec())) };
    let packed = PACKER.with_borrow_mut(|packer| match packer {
        Some(packer) => packer.pack(bytes),
        none => none.insert(Packer::new(b"")?).pack(bytes),
    })?;
    Ok(packed.map_or_else(|| (None, bytes.to_vec()), |packed| (Some(size), packed)))
}

fn unpack(size: i64, body: &[u8]) -> io::Result<Vec<u8>> {
    let size = u64::try_from(size).map_err(|_| io::Error::other("the size is negative"))?;
    UNPACKER.with_borrow_mut(|unpacker| match unpacker {
        Some(unpacker) => unpacker.unpack(size, body),
        none => none.insert(Unpacker::new(Vec::new())?).unpack(size, body),
    })
}

/// The elements of a thread that one read has loaded.
#[derive(Debug)]
pub(crate) struct Elements {
    thread: ThreadId,
    loaded: HashMap<i64, Loaded>,
    /// What the server left out.
    remembered: Option<Arc<Content>>,
    objects: Mutex<Objects>,
}

#[derive(Debug)]
struct Loaded {
    element: Element,
    /// The decoded entry of an object, once it was asked for: shared by all checkpoints that have it.
    entry: OnceLock<StoredEntry>,
}

impl Elements {
    pub(crate) fn new(thread: &ThreadId) -> Self {
        Self { thread: thread.clone(), loaded: HashMap::new(), remembered: None, objects: Mutex::default() }
    }

    /// Goes on from what is remembered, and still holds.
    pub(crate) fn remember(&mut self, content: Arc<Content>) {
        let mut objects = self.objects();
        for (key, object) in content.objects() {
            objects.put(key, object.clone());
        }
        drop(objects);
        self.remembered = Some(content);
    }

    /// What it goes on from.
    pub(crate) fn remembered(&self) -> Option<&Content> {
        self.remembered.as_deref()
    }

    /// How many are loaded.
    pub(crate) fn len(&self) -> usize {
        self.loaded.len()
    }

    /// Adds a row. `size` is set if it is packed.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the bytes do not match their hash.
    pub(crate) fn add(&mut self, seq: i64, hash: ElementHash, size: Option<i64>, body: &[u8]) -> Result<()> {
        let bytes = match size {
            None => Bytes::copy_from_slice(body),
            Some(size) => unpack(size, body).map_err(|error| self.corrupt(seq, error))?.into(),
        };
        if Element::hash_of(&bytes) != hash {
            return Err(self.corrupt(seq, "the element does not match its hash"));
        }
        let element = Element::from_checked(bytes, hash);
        self.loaded.insert(seq, Loaded { element, entry: OnceLock::new() });
        Ok(())
    }

    /// Adds what another read of the same thread has loaded.
    pub(crate) fn join(&mut self, more: Self) {
        self.loaded.extend(more.loaded);
    }

    /// One element.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if its row is missing.
    pub(crate) fn get(&self, space: Space, n: u32) -> Result<&Element> {
        self.find(space, n).map(|loaded| &loaded.element)
    }

    fn find(&self, space: Space, n: u32) -> Result<&Loaded> {
        let seq = space.seq(n);
        self.loaded.get(&seq).ok_or_else(|| self.corrupt(seq, "the row is missing"))
    }

    /// The object under a key of metadata, with the entries of these runs.
    ///
    /// # Errors
    /// As [`Self::get`], and if an element is not an entry.
    pub(crate) fn object(&self, key: &str, runs: &[Run]) -> Result<Entries> {
        let manifest = Manifest { chunks: Vec::new(), tail: runs.to_vec() };
        self.objects().made(key, &manifest, &mut &*self)
    }

    /// The object that was made last under a key.
    pub(crate) fn made(&self, key: &str) -> Option<Object> {
        self.objects().get(key).cloned()
    }

    /// The entries that were loaded and asked for, with their numbers.
    pub(crate) fn decoded(&self) -> impl Iterator<Item = (u32, StoredEntry)> {
        self.loaded.iter().filter_map(|(seq, loaded)| match Space::split(*seq)? {
            (Space::Entries, n) => Some((n, loaded.entry.get()?.clone())),
            _ => None,
        })
    }

    // Objects are whole whenever the lock is free, even if it is poisoned.
    fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entry(&self, n: u32) -> Result<StoredEntry> {
        let known = || self.remembered.as_ref()?.entry(n);
        if !self.loaded.contains_key(&Space::Entries.seq(n))
            && let Some(entry) = known()
        {
            return Ok(entry.clone());
        }
        let loaded = self.find(Space::Entries, n)?;
        if let Some(entry) = loaded.entry.get() {
            return Ok(entry.clone());
        }
        let entry = entry(&loaded.element)?;
        Ok(loaded.entry.get_or_init(|| entry).clone())
    }

    /// The elements of these runs, in order.
    pub(crate) fn all(&self, space: Space, runs: &[Run]) -> impl Iterator<Item = Result<&Element>> {
        runs.iter().flat_map(|run| run.numbers()).map(move |n| self.get(space, n))
    }

    /// The runs of a manifest, with chunks expanded.
    pub(crate) fn runs(&self, manifest: &Manifest) -> Result<Vec<Run>> {
        let mut runs = Vec::new();
        for n in manifest.chunks.iter().flat_map(|run| run.numbers()) {
            let chunk = chunk_runs(self.get(Space::Structure, n)?.bytes())
                .map_err(|reason| self.corrupt(Space::Structure.seq(n), reason))?;
            for run in chunk {
                push_run(&mut runs, run);
            }
        }
        for run in &manifest.tail {
            push_run(&mut runs, *run);
        }
        Ok(runs)
    }

    pub(crate) fn corrupt(&self, seq: i64, reason: impl std::fmt::Display) -> Error {
        corrupt("element", &self.thread, format_args!("seq {seq}"), reason)
    }
}

impl EntrySource for &Elements {
    fn unpacked(&mut self, chunks: Vec<Run>) -> Result<Vec<Run>> {
        self.runs(&Manifest { chunks, tail: Vec::new() })
    }

    fn load(&mut self, runs: &[Run]) -> Result<Vec<StoredEntry>> {
        runs.iter().flat_map(|run| run.numbers()).map(|n| self.entry(n)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_packed_where_it_pays_and_checked_when_they_are_read() {
        for (text, packs) in [("text ".repeat(100), true), ("short".to_owned(), false)] {
            let element = Element::from_bytes(text.clone().into());
            let (size, body) = pack(element.bytes()).unwrap();
            assert_eq!(size.is_some(), packs);
            let read = |size: Option<i64>, body: &[u8]| {
                let mut elements = Elements::new(&"t".into());
                elements.add(7, *element.hash(), size, body)?;
                elements.get(Space::Values, 7).map(|element| element.bytes().clone())
            };
            let size = size.map(i64::from);
            assert_eq!(read(size, &body).unwrap(), text);
            for wrong in [None, Some(-1), Some(0), Some(499), Some(501), Some(i64::MAX)] {
                let read = read(wrong, &body);
                assert!(wrong == size || matches!(read, Err(Error::Corrupt { .. })), "{wrong:?}: {read:?}");
            }
        }
    }
}

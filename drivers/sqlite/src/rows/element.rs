//! Stored elements: each distinct one of a thread is stored once, and checked against its hash on every read.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use lru::DefaultHasher;
use rusqlite::params;
use threadkeep::metadata::Entries;
use threadkeep::value::{Element, ElementHash};
use threadkeep::{Error, Result};
use threadkeep_layout::{
    EntrySource, Manifest, NUMBER_LIMIT, Objects, Run, StoredEntry, chunk_runs, entry, push_run,
};
use threadkeep_pages::Bound;

use crate::rows::directory::ThreadKey;
use crate::rows::pack::Slab;
use crate::rows::seal::{RowKey, join_key, low_half};
use crate::sql::{Db, blob, integer};
use crate::stats::Counters;

const ADD: &str = "INSERT INTO element (key, hash, body) VALUES (?1, ?2, ?3)";
const RANGE: &str = "SELECT key, hash, body FROM element WHERE key BETWEEN ?1 AND ?2";
const HASHES: &str = "SELECT key, hash FROM element WHERE key BETWEEN ?1 AND ?2";
const STORED: &str =
    "SELECT coalesce(sum(length(hash) + length(body)), 0) FROM element WHERE key BETWEEN ?1 AND ?2";
const DROP: &str = "DELETE FROM element WHERE key BETWEEN ?1 AND ?2";
const SIZES: &str = "SELECT key, length(body) FROM element WHERE key BETWEEN ?1 AND ?2 ORDER BY key LIMIT ?3";

/// Unneeded elements that a range scan reads over instead of starting a new scan after them.
const GAP: u32 = 8;

/// A read of at least this many elements uses a [`Slab`].
const MANY: usize = 256;

/// A sequence of elements in a thread. Elements of one kind are numbered together, so that lists have few runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Space {
    /// Elements of lists, and large values.
    Values = 0,
    /// Parts of metadata.
    Metadata = 1,
    /// Chunks of manifests.
    Chunks = 2,
}

/// All of them, by their numbers.
pub(crate) const SPACES: [Space; 3] = [Space::Values, Space::Metadata, Space::Chunks];

fn key_of(thread: ThreadKey, space: Space, seq: u32) -> i64 {
    join_key(thread, space as u32 * NUMBER_LIMIT + seq)
}

/// The keys that a thread's elements have.
fn keys_of(thread: ThreadKey) -> [i64; 2] {
    [join_key(thread, 0), join_key(thread, u32::MAX)]
}

/// An element as it is stored. Nothing in it depends on its thread.
#[derive(Debug)]
pub(crate) struct StoredElement {
    /// Its number in the thread, with its space.
    number: u32,
    hash: Vec<u8>,
    pub(crate) body: Vec<u8>,
}

/// Passes every element of a thread to `look`, as it is stored.
pub(crate) fn each_stored(db: &Db, thread: ThreadKey, mut look: impl FnMut(StoredElement)) -> Result<()> {
    db.each(RANGE, keys_of(thread), |row| {
        let (hash, body) = (blob(row, 1)?.to_vec(), blob(row, 2)?.to_vec());
        look(StoredElement { number: low_half(integer(row, 0)?), hash, body });
        Ok(())
    })
}

/// Adds an element of another thread under its number.
pub(crate) fn add_stored(db: &Db, thread: ThreadKey, element: &StoredElement) -> Result<()> {
    let key = join_key(thread, element.number);
    db.often(ADD, &[Bound::Integer(key), Bound::Blob(&element.hash), Bound::Blob(&element.body)])
}

/// Deletes elements of a thread, from the first on: up to `rows` of them, and no more once they have `bytes` bytes.
/// Returns whether they were all.
pub(crate) fn drop_first(db: &Db, thread: ThreadKey, rows: usize, bytes: usize) -> Result<bool> {
    let [from, to] = keys_of(thread);
    let (mut last, mut seen, mut sum) = (None, 0, 0);
    let limit = i64::try_from(rows).unwrap_or(i64::MAX).saturating_add(1);
    db.each(SIZES, params![from, to, limit], |row| {
        if seen < rows && sum < bytes {
            last = Some(integer(row, 0)?);
            sum += usize::try_from(integer(row, 1)?).unwrap_or_default();
        } else {
            seen = usize::MAX;
        }
        seen = seen.saturating_add(1);
        Ok(())
    })?;
    if let Some(last) = last {
        db.execute(DROP, [from, last])?;
    }
    Ok(seen != usize::MAX)
}

/// Whether a thread has more than this many elements, or more than this many bytes of them.
pub(crate) fn has_more_than(db: &Db, thread: ThreadKey, rows: usize, bytes: usize) -> Result<bool> {
    let [from, to] = keys_of(thread);
    let (mut seen, mut sum) = (0, 0);
    let limit = i64::try_from(rows).unwrap_or(i64::MAX).saturating_add(1);
    db.each(SIZES, params![from, to, limit], |row| {
        seen += 1;
        sum += usize::try_from(integer(row, 1)?).unwrap_or_default();
        Ok(())
    })?;
    Ok(seen > rows || sum > bytes)
}

/// Bytes in the elements of a thread.
pub(crate) fn stored_bytes(db: &Db, thread: ThreadKey) -> Result<u64> {
    let bytes = db.one(STORED, keys_of(thread), |row| integer(row, 0))?;
    Ok(bytes.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or_default())
}

/// Deletes the elements of a space from one sequence number up to another, exclusive. Returns how many there were.
pub(crate) fn drop_range(db: &Db, thread: ThreadKey, space: Space, from: u32, to: u32) -> Result<usize> {
    if from >= to {
        return Ok(0);
    }
    db.execute(DROP, [key_of(thread, space, from), key_of(thread, space, to - 1)])
}

/// The elements that a thread already has, for the writer.
#[derive(Debug, Default)]
pub(crate) struct Index {
    /// The keys are hashes already, so a fast hash of them with a random seed is enough.
    seqs: [HashMap<ElementHash, u32, DefaultHasher>; 3],
    next: [u32; 3],
    /// Whether these are all of them.
    complete: bool,
}

impl Index {
    /// Others may have added elements.
    pub(crate) fn may_lack_some(&mut self) {
        self.complete = false;
    }

    /// Reads the hashes of the elements that it does not know.
    pub(crate) fn complete(&mut self, db: &Db, thread: ThreadKey) -> Result<()> {
        if self.complete {
            return Ok(());
        }
        for space in SPACES {
            let from = key_of(thread, space, self.next[space as usize]);
            // What comes after the last space belongs to none, and is an error.
            let next = SPACES.get(space as usize + 1).map(|next| key_of(thread, *next, 0) - 1);
            db.each(HASHES, [from, next.unwrap_or(keys_of(thread)[1])], |row| {
                let (space, seq, hash) = located(integer(row, 0)?, blob(row, 1)?)?;
                self.seqs[space as usize].insert(hash, seq);
                self.next[space as usize] = seq + 1;
                Ok(())
            })?;
        }
        self.complete = true;
        Ok(())
    }

    /// The number of elements it knows.
    pub(crate) fn len(&self) -> usize {
        self.seqs.iter().map(HashMap::len).sum()
    }

    /// The sequence number of the element with this hash, if it is stored.
    pub(crate) fn find(&self, space: Space, hash: &ElementHash, counters: &Counters) -> Option<u32> {
        counters.elements_examined.add(1);
        self.seqs[space as usize].get(hash).copied()
    }

    /// Stores an element that is not stored yet. Returns its sequence number.
    pub(crate) fn add(
        &mut self,
        db: &Db,
        thread: ThreadKey,
        space: Space,
        element: &Element,
        counters: &Counters,
    ) -> Result<u32> {
        let seq = self.next[space as usize];
        if seq >= NUMBER_LIMIT {
            return Err(Error::InvalidInput("the thread cannot hold more elements".to_owned()));
        }
        let body = db.pack(element.bytes())?;
        let key = key_of(thread, space, seq);
        db.often(ADD, &[Bound::Integer(key), Bound::Blob(element.hash()), Bound::Blob(&body)])?;
        counters.elements_stored.add(1);
        counters.bytes_stored.add(element.bytes().len() as u64);
        self.seqs[space as usize].insert(*element.hash(), seq);
        self.next[space as usize] = seq + 1;
        Ok(seq)
    }
}

/// The table and key of an element.
pub(crate) fn place(thread: ThreadKey, space: Space, seq: u32) -> RowKey {
    RowKey::new("element", key_of(thread, space, seq))
}

/// The space and sequence number at a place of the table.
pub(crate) fn space_of(place: RowKey) -> Option<(Space, u32)> {
    let low = low_half(place.key);
    Some((*SPACES.get((low / NUMBER_LIMIT) as usize)?, low % NUMBER_LIMIT))
}

/// Passes the number of every element of a thread to `look`.
pub(crate) fn each_number(db: &Db, thread: ThreadKey, mut look: impl FnMut(Space, u32)) -> Result<()> {
    db.each(HASHES, keys_of(thread), |row| {
        let (space, seq, _) = located(integer(row, 0)?, blob(row, 1)?)?;
        look(space, seq);
        Ok(())
    })
}

/// Passes every element of a thread to `look`: its place in the database, and the element or what is wrong with it.
pub(crate) fn each(
    db: &Db,
    thread: ThreadKey,
    mut look: impl FnMut(RowKey, Result<(Space, u32)>),
) -> Result<()> {
    db.each(RANGE, keys_of(thread), |row| {
        let key = integer(row, 0)?;
        let place = RowKey::new("element", key);
        let found = located(key, blob(row, 1)?);
        look(
            place,
            found.and_then(|(space, seq, hash)| {
                decode(db, place, hash, blob(row, 2)?, None).map(|_| (space, seq))
            }),
        );
        Ok(())
    })
}

/// The elements of a thread that one read has loaded; each is read and checked once.
pub(crate) struct Elements<'a> {
    db: &'a Db,
    thread: ThreadKey,
    loaded: [HashMap<u32, Element>; 3],
    /// Those that are entries of objects, decoded: shared by all checkpoints that have them.
    entries: HashMap<u32, StoredEntry>,
    objects: Objects,
    counters: Option<&'a Counters>,
}

impl<'a> Elements<'a> {
    pub(crate) fn new(db: &'a Db, thread: ThreadKey) -> Self {
        Self {
            db,
            thread,
            loaded: Default::default(),
            entries: HashMap::new(),
            objects: Objects::default(),
            counters: None,
        }
    }

    /// The same, counting what is read.
    pub(crate) fn counted(self, counters: &'a Counters) -> Self {
        Self { counters: Some(counters), ..self }
    }

    /// One element.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if it is missing or does not match its hash.
    pub(crate) fn get(&mut self, space: Space, seq: u32) -> Result<Element> {
        self.load(space, &[Run { start: seq, len: 1 }])?;
        self.loaded(space, seq)
    }

    /// The elements of these runs, in order.
    pub(crate) fn get_all(&mut self, space: Space, runs: &[Run]) -> Result<Vec<Element>> {
        self.load(space, runs)?;
        runs.iter().flat_map(|run| run.numbers()).map(|seq| self.loaded(space, seq)).collect()
    }

    /// The object under a key of metadata, with the entries of a manifest.
    pub(crate) fn object(&mut self, key: &str, manifest: &Manifest) -> Result<Entries> {
        let mut objects = std::mem::take(&mut self.objects);
        let made = objects.made(key, manifest, self);
        self.objects = objects;
        made
    }

    /// The objects built so far, on which later ones may build.
    pub(crate) fn objects(&mut self) -> &mut Objects {
        &mut self.objects
    }

    /// The entries of an object that these runs hold.
    fn entries(&mut self, runs: &[Run]) -> Result<Vec<StoredEntry>> {
        let missing = |seq: &u32| !self.entries.contains_key(seq);
        let mut wanted = Vec::new();
        for seq in runs.iter().flat_map(|run| run.numbers()).filter(missing) {
            push_run(&mut wanted, Run { start: seq, len: 1 });
        }
        self.load(Space::Metadata, &wanted)?;
        for seq in wanted.iter().flat_map(|run| run.numbers()) {
            // It is not needed in both forms.
            let element = self.loaded(Space::Metadata, seq)?;
            self.loaded[Space::Metadata as usize].remove(&seq);
            self.entries.insert(seq, entry(&element)?);
        }
        let numbers = runs.iter().flat_map(|run| run.numbers());
        Ok(numbers.filter_map(|seq| self.entries.get(&seq).cloned()).collect())
    }

    /// The runs of a manifest, with chunks expanded.
    pub(crate) fn runs(&mut self, manifest: &Manifest) -> Result<Vec<Run>> {
        let mut runs = Vec::new();
        for (seq, chunk) in manifest
            .chunks
            .iter()
            .flat_map(|run| run.numbers())
            .zip(self.get_all(Space::Chunks, &manifest.chunks)?)
        {
            let place = place(self.thread, Space::Chunks, seq);
            for run in chunk_runs(chunk.bytes()).map_err(|reason| place.corrupt(reason))? {
                push_run(&mut runs, run);
            }
        }
        for run in &manifest.tail {
            push_run(&mut runs, *run);
        }
        Ok(runs)
    }

    fn loaded(&self, space: Space, seq: u32) -> Result<Element> {
        self.loaded[space as usize]
            .get(&seq)
            .cloned()
            .ok_or_else(|| place(self.thread, space, seq).corrupt("the row is missing"))
    }

    /// Loads what is not loaded yet. Runs close to each other are read in one scan.
    pub(crate) fn load(&mut self, space: Space, runs: &[Run]) -> Result<()> {
        let loaded = &mut self.loaded[space as usize];
        let mut runs = runs.to_vec();
        runs.sort_unstable_by_key(|run| run.start);
        let (mut scans, mut seen): (Vec<Run>, u32) = (Vec::new(), 0);
        for run in runs {
            for seq in run.start.max(seen)..run.end() {
                if loaded.contains_key(&seq) {
                    continue;
                }
                match scans.last_mut() {
                    Some(last) if seq <= last.end().saturating_add(GAP) => last.len = seq + 1 - last.start,
                    _ => scans.push(Run { start: seq, len: 1 }),
                }
            }
            seen = seen.max(run.end());
        }
        let many = scans.iter().map(|scan| scan.len as usize).sum::<usize>() >= MANY;
        let mut slab = many.then(Slab::default);
        for scan in scans {
            let range = [key_of(self.thread, space, scan.start), key_of(self.thread, space, scan.end() - 1)];
            self.db.each(RANGE, range, |row| {
                let key = integer(row, 0)?;
                let (_, seq, hash) = located(key, blob(row, 1)?)?;
                if let Entry::Vacant(place) = loaded.entry(seq) {
                    self.counters.inspect(|counters| counters.elements_loaded.add(1));
                    let at = RowKey::new("element", key);
                    place.insert(decode(self.db, at, hash, blob(row, 2)?, slab.as_mut())?);
                }
                Ok(())
            })?;
        }
        Ok(())
    }
}

impl EntrySource for Elements<'_> {
    fn unpacked(&mut self, chunks: Vec<Run>) -> Result<Vec<Run>> {
        self.runs(&Manifest { chunks, tail: Vec::new() })
    }

    fn load(&mut self, runs: &[Run]) -> Result<Vec<StoredEntry>> {
        self.entries(runs)
    }
}

fn located(key: i64, hash: &[u8]) -> Result<(Space, u32, ElementHash)> {
    let place = RowKey::new("element", key);
    let (space, seq) = space_of(place).ok_or_else(|| place.corrupt("the key is out of range"))?;
    let hash = hash.try_into().map_err(|_| place.corrupt("the hash does not have sixteen bytes"))?;
    Ok((space, seq, hash))
}

pub(crate) fn decode(
    db: &Db,
    place: RowKey,
    hash: ElementHash,
    body: &[u8],
    slab: Option<&mut Slab>,
) -> Result<Element> {
    let bytes = db.unpack(place, body, slab)?;
    if Element::hash_of(&bytes) != hash {
        return Err(place.corrupt("the element does not match its hash"));
    }
    Ok(Element::from_checked(bytes, hash))
}

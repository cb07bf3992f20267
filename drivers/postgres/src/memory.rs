//! What readers remember: the large metadata objects of the threads that they read last, with all entries that they read
//! for them. A read of one checkpoint leaves these out of its question, so it costs what was added since, however long
//! the thread is.
//!
//! What is remembered comes with the moment of the history at which it was read. It is used only if the history that the
//! same statement returns contains that moment, in the same epoch: within one epoch the number of an entry never means
//! another entry. The server cannot check that, but it can see where it cannot be so; then it leaves nothing out.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use imbl::OrdMap;
use lru::LruCache;
use threadkeep_layout::{Object, Run, StoredEntry, continuation};
use uuid::Uuid;

use crate::element::{Elements, Space};
use crate::history::{History, Moment, Since};

/// The most bytes of all that is remembered, over all threads. The last thread is remembered whatever its size.
const BYTES: usize = 48 << 20;
/// The number of remembered threads.
const THREADS: NonZeroUsize = NonZeroUsize::MIN.saturating_add((1 << 12) - 1);
/// The number of remembered namespaces of a thread.
const NAMESPACES: usize = 8;
/// The number of remembered objects of a namespace.
const OBJECTS: usize = 8;
/// Smaller objects are read as fast as they are left out.
const SMALLEST: usize = 64;
/// The most runs that a question names.
const RUNS: usize = 1024;
/// What an entry takes besides its text: under its number, and in an object.
const ENTRY: usize = 256;

/// The memory of the readers.
#[derive(Debug, Default)]
pub(crate) struct Memory(Mutex<Threads>);

#[derive(Debug)]
struct Threads {
    known: LruCache<Uuid, Vec<Place>>,
    bytes: usize,
}

/// What is remembered of a namespace.
type Place = (Vec<u8>, Remembered);

impl Default for Threads {
    fn default() -> Self {
        // Unbounded, because a bound would reserve all of its memory up front.
        Self { known: LruCache::unbounded(), bytes: 0 }
    }
}

/// What is remembered of a namespace, and when it was so.
#[derive(Debug, Clone)]
pub(crate) struct Remembered {
    moment: Moment,
    pub(crate) content: Arc<Content>,
}

/// What a read may leave out, as the parameters of the functions for that.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LeftOut {
    pub(crate) epoch: i64,
    /// The revisions of rows that can prove that they contain the moment.
    pub(crate) least: i64,
    pub(crate) most: i64,
    /// The sequence numbers of the entries, in runs.
    pub(crate) first: Vec<i64>,
    pub(crate) last: Vec<i64>,
}

impl Remembered {
    /// What a read may leave out.
    pub(crate) fn left_out(&self) -> LeftOut {
        let runs = &self.content.runs;
        let runs = &runs[runs.len().saturating_sub(RUNS)..];
        let bounds = runs.iter().map(|run| Space::Entries.bounds(*run));
        let (first, last) = bounds.map(|[first, last]| (first, last)).unzip();
        let [least, most] = self.moment.provable();
        LeftOut { epoch: self.moment.mark.epoch, least, most, first, last }
    }

    /// Whether the server has left it out, if it found this history.
    pub(crate) fn was_left_out(&self, found: &History) -> bool {
        let [least, most] = self.moment.provable();
        found.mark.epoch == self.moment.mark.epoch && (least..=most).contains(&found.mark.revision)
    }

    /// Whether it is what a thread with this history has.
    pub(crate) fn holds_in(&self, found: &History) -> bool {
        found.mark.epoch == self.moment.mark.epoch && found.since(&self.moment) == Since::Contained
    }
}

/// Large objects of a namespace, and entries.
#[derive(Debug, Clone, Default)]
pub(crate) struct Content {
    /// The last one of each key.
    objects: Vec<(String, Object)>,
    /// At least those of the objects, by number.
    entries: OrdMap<u32, StoredEntry>,
    /// Their numbers.
    runs: Vec<Run>,
    /// Their bytes as they are stored.
    bytes: usize,
}

impl Content {
    /// The entry with this number.
    pub(crate) fn entry(&self, n: u32) -> Option<&StoredEntry> {
        self.entries.get(&n)
    }

    /// The last object of each key.
    pub(crate) fn objects(&self) -> impl Iterator<Item = (&str, &Object)> {
        self.objects.iter().map(|(key, object)| (key.as_str(), object))
    }

    /// The content after a read that began with it has built the objects under these keys. None if nothing is worth
    /// remembering.
    fn after<'k>(
        before: Option<&Self>,
        keys: impl IntoIterator<Item = &'k str>,
        elements: &Elements,
    ) -> Option<Self> {
        let mut after = before.cloned().unwrap_or_default();
        for key in keys {
            let Some(made) = elements.made(key).filter(|made| made.entries.len() >= SMALLEST) else {
                continue;
            };
            let at = after.objects.iter().position(|(of, _)| of == key);
            let had = at.map(|at| after.objects.remove(at).1);
            // An older checkpoint has fewer entries; the next read is likely to be of a newer one.
            let grown = had.filter(|had| goes_on(&made, had));
            after.objects.push((key.to_owned(), grown.unwrap_or(made)));
        }
        if after.objects.is_empty() {
            return None;
        }
        after.objects.drain(..after.objects.len().saturating_sub(OBJECTS));
        for (n, entry) in elements.decoded() {
            after.add(n, entry);
        }
        after.trim();
        Some(after)
    }

    fn add(&mut self, n: u32, entry: StoredEntry) {
        self.bytes += entry.1;
        match self.entries.insert(n, entry) {
            Some((_, bytes)) => self.bytes -= bytes,
            None => add_number(&mut self.runs, n),
        }
    }

    /// Forgets the entries that no object has, if they are more than the others.
    fn trim(&mut self) {
        let used = self.objects.iter().map(|(_, object)| object.entries.len()).sum::<usize>();
        if self.entries.len() <= 2 * used + SMALLEST {
            return;
        }
        let Self { objects, entries, .. } = std::mem::take(self);
        for n in objects.iter().flat_map(|(_, object)| &object.manifest.tail).flat_map(|run| run.numbers()) {
            if let Some(entry) = entries.get(&n) {
                self.add(n, entry.clone());
            }
        }
        self.objects = objects;
    }

    /// Its bytes in memory.
    fn weight(&self) -> usize {
        let runs = self.objects.iter().map(|(_, object)| object.manifest.tail.len()).sum::<usize>();
        self.bytes + self.entries.len() * ENTRY + (self.runs.len() + runs) * size_of::<Run>()
    }
}

/// Whether `later` begins with what `object` has.
fn goes_on(object: &Object, later: &Object) -> bool {
    continuation(&object.manifest.tail, &later.manifest.tail).is_some()
}

/// Adds a number to ascending runs that lack it.
fn add_number(runs: &mut Vec<Run>, n: u32) {
    let after = runs.partition_point(|run| run.start <= n);
    let follows = after.checked_sub(1).filter(|before| runs[*before].end() == n);
    let leads = runs.get(after).is_some_and(|run| run.start == n + 1);
    match (follows, leads) {
        (Some(before), true) => runs[before].len += 1 + runs.remove(after).len,
        (Some(before), false) => runs[before].len += 1,
        (None, true) => runs[after] = Run { start: n, len: runs[after].len + 1 },
        (None, false) => runs.insert(after, Run { start: n, len: 1 }),
    }
}

impl Memory {
    /// What is remembered of a namespace.
    pub(crate) fn of(&self, thread: Uuid, ns: &[u8]) -> Option<Remembered> {
        let mut threads = self.lock();
        let places = threads.known.get(&thread)?;
        places.iter().find(|(of, _)| of == ns).map(|(_, remembered)| remembered.clone())
    }

    /// Remembers what a read found that has built the objects under these keys, unless what a later one found is known.
    pub(crate) fn learn<'k>(
        &self,
        (thread, ns): (Uuid, &[u8]),
        found: &History,
        keys: impl IntoIterator<Item = &'k str>,
        elements: &Elements,
    ) {
        let Some(content) = Content::after(elements.remembered(), keys, elements) else { return };
        let remembered = Remembered { moment: found.moment(), content: Arc::new(content) };
        // Dropped after the lock is released: dropping a long one takes a while.
        let mut old = Vec::new();
        let mut threads = self.lock();
        let is_later = |have: &Remembered| {
            let (have, found) = (have.moment, remembered.moment);
            have.life == found.life
                && have.mark.epoch == found.mark.epoch
                && have.mark.revision > found.mark.revision
        };
        let mut places = threads.take(thread);
        if places.iter().any(|(of, have)| of == ns && is_later(have)) {
            threads.put(thread, places);
            return;
        }
        old.extend(places.extract_if(.., |(of, _)| of == ns));
        places.push((ns.to_vec(), remembered));
        let most = places.len().saturating_sub(NAMESPACES);
        old.extend(places.drain(..most));
        threads.put(thread, places);
        while threads.known.len() > THREADS.get() || (threads.bytes > BYTES && threads.known.len() > 1) {
            let Some((_, least)) = threads.known.pop_lru() else { break };
            threads.bytes -= weight(&least);
            old.extend(least);
        }
        drop(threads);
    }

    /// Learns of a history of a thread that this process has written: what holds in it is remembered as of now. A later
    /// history can prove that it contains a moment only for a few writes.
    pub(crate) fn goes_on(&self, thread: Uuid, to: &History) {
        let mut threads = self.lock();
        let Some(places) = threads.known.peek_mut(&thread) else { return };
        for (_, remembered) in places {
            if remembered.holds_in(to) {
                remembered.moment = to.moment();
            }
        }
    }

    /// Forgets what is remembered of a namespace, if it is still this: it does not hold any more.
    pub(crate) fn drop_it(&self, thread: Uuid, ns: &[u8], remembered: &Remembered) {
        let mut threads = self.lock();
        let mut places = threads.take(thread);
        let is_it = |place: &mut Place| place.0 == ns && Arc::ptr_eq(&place.1.content, &remembered.content);
        let old: Vec<_> = places.extract_if(.., is_it).collect();
        threads.put(thread, places);
        drop(threads);
        drop(old);
    }

    /// Forgets everything of a thread.
    pub(crate) fn forget(&self, thread: Uuid) {
        let old = self.lock().take(thread);
        drop(old);
    }

    // Each change is whole before anything can fail, so a poisoned lock guards nothing half done.
    fn lock(&self) -> MutexGuard<'_, Threads> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Threads {
    fn take(&mut self, thread: Uuid) -> Vec<Place> {
        let places = self.known.pop(&thread).unwrap_or_default();
        self.bytes -= weight(&places);
        places
    }

    fn put(&mut self, thread: Uuid, places: Vec<Place>) {
        if !places.is_empty() {
            self.bytes += weight(&places);
            self.known.put(thread, places);
        }
    }
}

fn weight(places: &[Place]) -> usize {
    places.iter().map(|(_, remembered)| remembered.content.weight()).sum()
}

#[cfg(test)]
mod tests;

//! What is remembered of threads, so that a step looks only at what it adds: the last large objects in their metadata, and where
//! the elements of their last lists are.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use threadkeep::id::{ChannelName, Namespace, Version};
use threadkeep::metadata::Entries;
use threadkeep_layout::{Shape, entries_bytes};

use crate::keys::ThreadNumber;
use crate::record::Mark;

/// The number of threads of which something is remembered.
const THREADS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(255);
/// The most bytes of all that is remembered.
const BYTES: usize = 32 << 20;
/// What anything remembered takes besides its content.
const ITEM: usize = 256;

/// A stored object.
#[derive(Clone)]
pub(crate) struct Known {
    pub(crate) entries: Entries,
    /// The bytes of the entries as they are stored: added up as entries are added, because to look at all of them in
    /// every step would take longer the longer the object is.
    pub(crate) bytes: usize,
    pub(crate) shape: Shape,
}

/// What a step stored of a thread.
#[derive(Default)]
pub(crate) struct Stored {
    /// Large objects of metadata, by their keys.
    pub(crate) objects: HashMap<String, Known>,
    /// The last value of each channel: its version, and where its elements are if it is a list that was cut into them.
    pub(crate) lists: HashMap<(Namespace, ChannelName), (Version, Option<Shape>)>,
}

/// What is remembered of the threads that were written last. It counts only while the thread has the mark that it was given
/// with it: any other write, also one that failed in the end or that another handle made, draws another one.
pub(crate) struct Memo(Mutex<Remembered>);

struct Remembered {
    /// The marks of threads, and the stays during which they were remembered without a gap.
    threads: LruCache<ThreadNumber, (Mark, Stay)>,
    last_stay: Stay,
    values: LruCache<(Stay, Name), Value>,
    bytes: usize,
    most: usize,
}

/// What is remembered of a thread has the number of the stay that it belongs to. With a new number all of it is forgotten, and
/// gives way to other things in time.
type Stay = u64;

/// What something remembered is called in its thread.
#[derive(PartialEq, Eq, Hash)]
enum Name {
    Object(String),
    List((Namespace, ChannelName)),
}

enum Value {
    Object(Known),
    List(Version, Shape),
}

impl Default for Memo {
    fn default() -> Self {
        Self::of(BYTES)
    }
}

impl Memo {
    fn of(most: usize) -> Self {
        Self(Mutex::new(Remembered {
            threads: LruCache::new(THREADS),
            last_stay: 0,
            values: LruCache::unbounded(),
            bytes: 0,
            most,
        }))
    }

    /// The object under a key of metadata.
    pub(crate) fn object(&self, thread: ThreadNumber, mark: Mark, key: &str) -> Option<Known> {
        let mut memo = self.lock();
        let stay = memo.stay(thread, mark)?;
        match memo.values.get(&(stay, Name::Object(key.to_owned())))? {
            Value::Object(known) => Some(known.clone()),
            Value::List(..) => None,
        }
    }

    /// Where the elements of a channel's list are, if its last one has this version.
    pub(crate) fn list(
        &self,
        thread: ThreadNumber,
        mark: Mark,
        channel: &(Namespace, ChannelName),
        version: Version,
    ) -> Option<Shape> {
        let mut memo = self.lock();
        let stay = memo.stay(thread, mark)?;
        match memo.values.get(&(stay, Name::List(channel.clone())))? {
            Value::List(of, shape) if *of == version => Some(shape.clone()),
            _ => None,
        }
    }

    /// A thread has another mark now, and this is stored of it besides what was there.
    pub(crate) fn note(&self, thread: ThreadNumber, (from, to): (Mark, Mark), more: Stored) {
        let mut memo = self.lock();
        let stay = memo.stay(thread, from).unwrap_or(memo.last_stay + 1);
        memo.last_stay = memo.last_stay.max(stay);
        memo.threads.put(thread, (to, stay));
        for (key, known) in more.objects {
            memo.put(stay, Name::Object(key), Value::Object(known));
        }
        for (channel, (version, shape)) in more.lists {
            match shape {
                Some(shape) => memo.put(stay, Name::List(channel), Value::List(version, shape)),
                None => memo.drop_list(stay, channel, version),
            }
        }
        memo.shrink();
    }

    /// Elements of a thread may be deleted.
    pub(crate) fn forget(&self, thread: ThreadNumber) {
        self.lock().threads.pop(&thread);
    }

    // What a panic leaves here is whole.
    fn lock(&self) -> MutexGuard<'_, Remembered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Remembered {
    /// The stay of a thread that has this mark.
    fn stay(&self, thread: ThreadNumber, mark: Mark) -> Option<Stay> {
        self.threads.peek(&thread).filter(|(at, _)| *at == mark).map(|(_, stay)| *stay)
    }

    fn put(&mut self, stay: Stay, name: Name, value: Value) {
        self.bytes += bytes(&name, &value);
        // The one in its place.
        if let Some(((_, name), old)) = self.values.push((stay, name), value) {
            self.bytes -= bytes(&name, &old);
        }
    }

    /// Forgets a list under the version of which another value is stored now.
    fn drop_list(&mut self, stay: Stay, channel: (Namespace, ChannelName), version: Version) {
        let place = (stay, Name::List(channel));
        if matches!(self.values.peek(&place), Some(Value::List(of, _)) if *of == version)
            && let Some(old) = self.values.pop(&place)
        {
            self.bytes -= bytes(&place.1, &old);
        }
    }

    /// Forgets what was not used for longest, until the rest is small enough.
    fn shrink(&mut self) {
        while self.bytes > self.most {
            let Some(((_, name), value)) = self.values.pop_lru() else { return };
            self.bytes -= bytes(&name, &value);
        }
    }
}

fn bytes(name: &Name, value: &Value) -> usize {
    let name = match name {
        Name::Object(key) => key.len(),
        Name::List((namespace, channel)) => namespace.as_str().len() + channel.as_str().len(),
    };
    let value = match value {
        Value::Object(known) => entries_bytes(&known.entries, known.bytes) + known.shape.bytes(),
        Value::List(_, shape) => shape.bytes(),
    };
    ITEM + name + value
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(counter: u64) -> Version {
        Version { counter, random: 0 }
    }

    fn mark(n: u8) -> Mark {
        let mut mark = Mark::default();
        mark[0] = n;
        mark
    }

    fn list(n: u64) -> Stored {
        let place = (Namespace::from(format!("inner:{n}")), ChannelName::from("messages"));
        Stored { lists: [(place, (version(n), Some(Shape::default())))].into(), ..Stored::default() }
    }

    fn found(memo: &Memo, thread: ThreadNumber, at: u8, n: u64) -> bool {
        let place = (Namespace::from(format!("inner:{n}")), ChannelName::from("messages"));
        memo.list(thread, mark(at), &place, version(n)).is_some()
    }

    #[test]
    fn what_is_remembered_is_bounded_whatever_the_namespaces_of_a_thread() {
        let memo = Memo::of(20 * ITEM);
        for n in 0..200 {
            memo.note(1, (mark(7), mark(7)), list(n));
            // Again: it counts once.
            memo.note(1, (mark(7), mark(7)), list(n));
            let memo = memo.lock();
            assert!(memo.bytes <= memo.most, "{} bytes", memo.bytes);
            let sum = memo.values.iter().map(|((_, name), value)| bytes(name, value)).sum::<usize>();
            assert_eq!(memo.bytes, sum);
        }
        assert!(found(&memo, 1, 7, 199) && found(&memo, 1, 7, 190) && !found(&memo, 1, 7, 10));
    }

    #[test]
    fn the_values_of_objects_count() {
        let memo = Memo::of(20 * ITEM);
        for thread in 1..10 {
            let known = Known { entries: Entries::default(), bytes: 8 * ITEM, shape: Shape::default() };
            let objects = [("notes".to_owned(), known)].into();
            memo.note(thread, (mark(0), mark(1)), Stored { objects, ..Stored::default() });
        }
        let is_known = |thread| memo.object(thread, mark(1), "notes").is_some();
        assert!(is_known(9) && is_known(8) && !is_known(7));
    }

    #[test]
    fn what_was_stored_before_a_gap_is_forgotten() {
        let memo = Memo::default();
        memo.note(1, (mark(0), mark(1)), list(1));
        memo.note(1, (mark(1), mark(2)), list(2));
        memo.note(2, (mark(0), mark(1)), list(3));
        assert!(found(&memo, 1, 2, 1) && found(&memo, 1, 2, 2) && !found(&memo, 1, 1, 1));
        memo.note(1, (mark(5), mark(6)), list(4));
        assert!(found(&memo, 1, 6, 4) && !found(&memo, 1, 6, 1) && !found(&memo, 1, 2, 1));
        memo.forget(1);
        assert!(!found(&memo, 1, 6, 4) && found(&memo, 2, 1, 3));
    }
}

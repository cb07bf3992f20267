//! What a saver remembers of what it stored, and the bytes that this takes in memory.

use std::hash::Hash;

use lru::LruCache;
use threadkeep::metadata::Entries;

use crate::shape::Shape;

/// The bytes of a remembered hash of an element, with its number.
pub const HASH: usize = 48;
/// What an entry of an object takes besides its text: the reference counts of key and value, and a place in a tree.
const ENTRY: usize = 192;
/// What a channel of a checkpoint, a task or a write takes: its name, and where its value is.
pub const PART: usize = 128;
/// The most shapes of a thread.
pub const SHAPES: usize = 64;
/// The most bytes of them. The last one is remembered whatever its size: otherwise every step of a longer list would
/// look at all of its elements.
const BYTES: usize = 4 << 20;

/// The bytes in memory of the entries of an object, which have `stored` bytes as they are stored.
pub fn entries_bytes(entries: &Entries, stored: usize) -> usize {
    entries.len() * ENTRY + stored
}

/// The shapes of the lists of a thread that were stored last, by what names these.
#[derive(Debug, Clone)]
pub struct Shapes<K: Hash + Eq> {
    known: LruCache<K, Shape>,
    bytes: usize,
}

impl<K: Hash + Eq> Default for Shapes<K> {
    fn default() -> Self {
        // Unbounded, because a bound would reserve all of its memory up front.
        Self { known: LruCache::unbounded(), bytes: 0 }
    }
}

impl<K: Hash + Eq> Shapes<K> {
    /// The shape of a list.
    pub fn get(&mut self, key: &K) -> Option<&Shape> {
        self.known.get(key)
    }

    /// [`Self::get`], which does not count as a use of it.
    pub fn peek(&self, key: &K) -> Option<&Shape> {
        self.known.peek(key)
    }

    /// Whether the shape of a list is remembered.
    pub fn contains(&self, key: &K) -> bool {
        self.known.contains(key)
    }

    /// Remembers the shape of a list. If they are too many or too large, forgets those that were not used for longest.
    pub fn put(&mut self, key: K, shape: Shape) {
        self.bytes += Self::size(&shape);
        if let Some(old) = self.known.put(key, shape) {
            self.bytes -= Self::size(&old);
        }
        while self.known.len() > SHAPES || (self.bytes > BYTES && self.known.len() > 1) {
            let Some((_, old)) = self.known.pop_lru() else { return };
            self.bytes -= Self::size(&old);
        }
    }

    /// Remembers shapes that were stored later.
    pub fn append(&mut self, mut later: Self) {
        while let Some((key, shape)) = later.known.pop_lru() {
            self.put(key, shape);
        }
    }

    /// Forgets a shape.
    pub fn remove(&mut self, key: &K) {
        if let Some(old) = self.known.pop(key) {
            self.bytes -= Self::size(&old);
        }
    }

    /// Their bytes in memory.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn size(shape: &Shape) -> usize {
        size_of::<K>() + size_of::<Shape>() + shape.bytes()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::shape::Builder;

    /// The shape of a list each of whose elements is a run of its own.
    fn scattered(runs: u32) -> Shape {
        let mut builder = Builder::default();
        (0..runs).for_each(|n| builder.push(2 * n));
        let mut chunks = 0;
        let Ok(shape) = builder.finish(|_| {
            chunks += 1;
            Ok::<_, Infallible>(chunks)
        });
        shape
    }

    #[test]
    fn shapes_are_bounded_by_their_number_and_by_their_bytes() {
        let mut shapes = Shapes::default();
        let sum = |shapes: &Shapes<u32>| {
            shapes.known.iter().map(|(_, shape)| Shapes::<u32>::size(shape)).sum::<usize>()
        };
        for n in 0..100 {
            shapes.put(n, Shape::default());
            // Again: it counts once.
            shapes.put(n, Shape::default());
            assert_eq!(shapes.bytes(), sum(&shapes));
        }
        assert!(shapes.known.len() == SHAPES && shapes.contains(&99) && !shapes.contains(&35));

        let long = scattered(100_000);
        let most = BYTES / long.bytes();
        for n in 100..110 {
            shapes.put(n, long.clone());
            assert!(shapes.bytes() <= BYTES, "{} bytes", shapes.bytes());
            assert_eq!(shapes.bytes(), sum(&shapes));
        }
        let longs = (100..110).filter(|n| shapes.contains(n)).count();
        assert!(longs == most && shapes.contains(&109), "{longs} of {most}");

        shapes.put(200, scattered(500_000));
        assert!(shapes.bytes() > BYTES);
        assert!(shapes.known.len() == 1 && shapes.contains(&200), "one above the bound is kept alone");
        let mut later = Shapes::default();
        (0..3).for_each(|n| later.put(n, Shape::default()));
        shapes.append(later);
        assert!(!shapes.contains(&200) && (0..3).all(|n| shapes.contains(&n)));
        assert_eq!(shapes.bytes(), sum(&shapes));
        (0..3).for_each(|n| shapes.remove(&n));
        assert_eq!(shapes.bytes(), 0);
    }
}

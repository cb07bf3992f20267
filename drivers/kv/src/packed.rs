//! Packs rows into buckets, for stores whose pages would be half empty.
//!
//! The rows of a thread are put in ascending order, at the ends of a few ranges. A B-tree that splits a full page in its middle
//! then leaves each page that it has filled half empty. A bucket is a row as large as a page, with as many rows as fit. One that
//! overflows is cut after the row that was added, if that is the last one of its range: what comes next continues there, and
//! what is before it stays full.
//!
//! A bucket has the key of its first row. Its value is, for each row, how much of its key it shares with the one before, the
//! rest of its key, and its value; then a checksum.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::ops::{ControlFlow, Deref, Range};

use threadkeep::Result;
use threadkeep::saver::Flush;
use threadkeep_layout::{Decoder, Malformed, put_bytes, put_len};

use crate::keys;
use crate::rows::{corrupt, opened, sealed, unsealed};
use crate::store::{Changes, Order, Plan, Snapshot, Store, Visit};

/// The most bytes of a bucket of several rows, with its key: a page of 4096 bytes, less what stores keep in it.
const BUCKET: usize = 4032;

/// A store whose rows are packed into buckets of another one. A bucket is written as a whole, so this is for stores that write
/// whole pages of 4096 bytes; others, such as those that log each row, are better without.
#[derive(Debug)]
pub struct Packed<S> {
    store: S,
}

impl<S: Store> Packed<S> {
    /// Packs the rows of a store, which must be empty, or have been packed from its beginning.
    pub fn new(store: S) -> Self {
        Self { store }
    }

    /// The store with the buckets.
    pub fn below(&self) -> &S {
        &self.store
    }
}

impl<S: Store> Store for Packed<S> {
    fn name(&self) -> &'static str {
        self.store.name()
    }

    fn durable(&self) -> bool {
        self.store.durable()
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot + '_>> {
        Ok(Box::new(Unpacked::new(self.store.snapshot()?)))
    }

    fn write(&self, flush: Flush, plan: &mut Plan<'_>) -> Result<()> {
        self.store.write(flush, &mut |buckets| {
            let rows = Unpacked::new(buckets);
            let changes = plan(&rows)?;
            rows.repacked(changes)
        })
    }
}

/// The rows in the buckets of a snapshot.
struct Unpacked<B> {
    buckets: B,
    /// The buckets whose checksums were compared. A call looks at a few of them many times.
    checked: RefCell<HashSet<Vec<u8>>>,
}

impl<B: Deref<Target: Snapshot>> Snapshot for Unpacked<B> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let mut found = None;
        let Some((first, bucket)) = self.bucket_of(key)? else { return Ok(None) };
        self.each_row(&first, &bucket, |own, value| {
            if own == key {
                found = Some(value.to_vec());
            }
            own < key
        })?;
        Ok(found)
    }

    fn range(&self, keys: Range<&[u8]>, order: Order, visit: &mut Visit<'_>) -> Result<()> {
        if keys.start >= keys.end {
            return Ok(());
        }
        let start = self.bucket_of(keys.start)?.map_or_else(|| keys.start.to_vec(), |(first, _)| first);
        self.buckets.range(&start..keys.end, order, &mut |first, bucket| {
            let mut rows = Vec::new();
            self.each_row(first, bucket, |key, value| {
                if keys.contains(&key) {
                    rows.push((key.to_vec(), value.to_vec()));
                }
                key < keys.end
            })?;
            if order == Order::Descending {
                rows.reverse();
            }
            for (key, value) in rows {
                if visit(&key, &value)?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
            Ok(ControlFlow::Continue(()))
        })
    }
}

/// A row of a bucket that is being changed, and whether it was added.
pub(crate) type Row = (Vec<u8>, (Vec<u8>, bool));

impl<B: Deref<Target: Snapshot>> Unpacked<B> {
    fn new(buckets: B) -> Self {
        Self { buckets, checked: RefCell::default() }
    }

    /// The bucket in which a key is, if it is stored: the last one that begins at or before it.
    fn bucket_of(&self, key: &[u8]) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
        let mut found = None;
        let end = [key, &[0]].concat();
        self.buckets.range(&[]..&end, Order::Descending, &mut |first, bucket| {
            found = Some((first.to_vec(), bucket.to_vec()));
            Ok(ControlFlow::Break(()))
        })?;
        Ok(found)
    }

    /// Visits the rows of a bucket while `visit` returns true.
    fn each_row(&self, first: &[u8], bucket: &[u8], visit: impl FnMut(&[u8], &[u8]) -> bool) -> Result<()> {
        let rows = if self.checked.borrow().contains(first) {
            unsealed(first, bucket)?
        } else {
            let rows = opened(first, bucket)?;
            self.checked.borrow_mut().insert(first.to_vec());
            rows
        };
        decoded(first, rows, visit).map_err(|reason| corrupt(first, reason))
    }

    /// The changes of the buckets that make these changes of their rows.
    fn repacked(&self, changes: Changes) -> Result<Changes> {
        let mut by_bucket: BTreeMap<Option<Vec<u8>>, (Vec<u8>, Changes)> = BTreeMap::new();
        for (key, value) in changes {
            let (first, bucket) = match self.bucket_of(&key)? {
                Some((first, bucket)) => (Some(first), bucket),
                None => (None, Vec::new()),
            };
            by_bucket.entry(first).or_insert_with(|| (bucket, Changes::new())).1.insert(key, value);
        }
        let mut repacked = Changes::new();
        for (first, (bucket, changes)) in by_bucket {
            let mut rows = BTreeMap::new();
            if let Some(first) = first {
                self.each_row(&first, &bucket, |key, value| {
                    rows.insert(key.to_vec(), (value.to_vec(), false));
                    true
                })?;
                repacked.insert(first, None);
            }
            for (key, value) in changes {
                match value {
                    Some(value) => {
                        let added = !rows.contains_key(&key);
                        rows.insert(key, (value, added));
                    }
                    None => drop(rows.remove(&key)),
                }
            }
            for rows in pieces(&rows.into_iter().collect::<Vec<_>>()) {
                let Some((first, _)) = rows.first() else { continue };
                repacked.insert(first.clone(), Some(sealed(first, encoded(rows))));
            }
        }
        Ok(repacked)
    }
}

/// Visits the rows in the bytes of a bucket while `visit` returns true.
pub(crate) fn decoded(
    first: &[u8],
    rows: &[u8],
    mut visit: impl FnMut(&[u8], &[u8]) -> bool,
) -> Result<(), Malformed> {
    let mut decoder = Decoder::new(rows);
    let mut key = first.to_vec();
    while !decoder.rest().is_empty() {
        // Not a `count`, which is of what follows.
        let shared = usize::try_from(decoder.uint()?).unwrap_or(usize::MAX);
        if shared > key.len() {
            return Err(Malformed("a key shares more than there is"));
        }
        key.truncate(shared);
        key.extend_from_slice(decoder.bytes()?);
        if !visit(&key, decoder.bytes()?) {
            break;
        }
    }
    Ok(())
}

/// Cuts rows into those of each bucket.
fn pieces(rows: &[Row]) -> Vec<&[Row]> {
    if size(rows) <= BUCKET {
        return vec![rows];
    }
    // After the last row of a range that was added, the rows of other ranges begin a bucket of their own.
    let ends = |at: usize| match (rows.get(at), rows.get(at + 1)) {
        (Some((key, (_, added))), next) => {
            *added && next.is_none_or(|(next, _)| keys::range_of(next) != keys::range_of(key))
        }
        _ => false,
    };
    match (0..rows.len()).rfind(|at| ends(*at)) {
        Some(last) => {
            let (before, after) = rows.split_at(last + 1);
            let mut pieces = filled(before, BUCKET);
            if !after.is_empty() {
                pieces.extend(filled(after, BUCKET));
            }
            pieces
        }
        None => filled(rows, size(rows) / size(rows).div_ceil(BUCKET)),
    }
}

/// Cuts rows into pieces of at least one row and about `most` bytes.
fn filled(rows: &[Row], most: usize) -> Vec<&[Row]> {
    let mut pieces = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (at, row) in rows.iter().enumerate() {
        let before = at.checked_sub(1).filter(|_| at > start).and_then(|before| rows.get(before));
        let own = row_size(before, row);
        if at > start && (bytes + own > BUCKET || bytes >= most) {
            pieces.push(&rows[start..at]);
            (start, bytes) = (at, 0);
            bytes += row_size(None, row);
        } else {
            bytes += own;
        }
    }
    pieces.push(&rows[start..]);
    pieces
}

fn size(rows: &[Row]) -> usize {
    let before = [None].into_iter().chain(rows.iter().map(Some));
    before.zip(rows).map(|(before, row)| row_size(before, row)).sum()
}

/// The bytes of a row, with those of the bucket for its first one.
fn row_size(before: Option<&Row>, (key, (value, _)): &Row) -> usize {
    const LENGTHS: usize = 5;
    const SUM: usize = 4;
    let own = match before {
        Some((before, _)) => key.len() - shared(before, key),
        None => key.len() + SUM,
    };
    own + value.len() + LENGTHS
}

fn shared(a: &[u8], b: &[u8]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// The bytes of a bucket with these rows, without its checksum.
pub(crate) fn encoded(rows: &[Row]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut before = rows.first().map_or(&[][..], |(key, _)| key);
    for (key, (value, _)) in rows {
        let shared = shared(before, key);
        put_len(&mut out, shared);
        put_bytes(&mut out, &key[shared..]);
        put_bytes(&mut out, value);
        before = key;
    }
    out
}

#[cfg(test)]
mod tests;

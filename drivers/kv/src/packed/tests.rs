use std::sync::{Mutex, MutexGuard};

use proptest::prelude::*;

use super::*;

/// Buckets in memory.
#[derive(Default)]
struct Map(Mutex<BTreeMap<Vec<u8>, Vec<u8>>>);

struct At(BTreeMap<Vec<u8>, Vec<u8>>);

impl Map {
    fn rows(&self) -> MutexGuard<'_, BTreeMap<Vec<u8>, Vec<u8>>> {
        self.0.lock().unwrap()
    }
}

impl Snapshot for At {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Ok(self.0.get(key).cloned())
    }

    fn range(&self, keys: Range<&[u8]>, order: Order, visit: &mut Visit<'_>) -> Result<()> {
        let found = self.0.iter().filter(|(key, _)| keys.contains(&&key[..]));
        let mut found: Vec<_> = found.collect();
        if order == Order::Descending {
            found.reverse();
        }
        for (key, value) in found {
            if visit(key, value)?.is_break() {
                break;
            }
        }
        Ok(())
    }
}

impl Store for Map {
    fn name(&self) -> &'static str {
        "map"
    }

    fn durable(&self) -> bool {
        false
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot + '_>> {
        Ok(Box::new(At(self.rows().clone())))
    }

    fn write(&self, _: Flush, plan: &mut Plan<'_>) -> Result<()> {
        let mut rows = self.rows();
        for (key, value) in plan(&At(rows.clone()))? {
            match value {
                Some(value) => drop(rows.insert(key, value)),
                None => drop(rows.remove(&key)),
            }
        }
        Ok(())
    }
}

fn visited(rows: &dyn Snapshot, keys: Range<&[u8]>, order: Order, most: usize) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut all = Vec::new();
    rows.range(keys, order, &mut |key, value| {
        all.push((key.to_vec(), value.to_vec()));
        Ok(if all.len() >= most { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })
    .unwrap();
    all
}

fn key() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0..4_u8, 0..6)
}

proptest! {
    /// A packed store reads as one that is not, after every group of changes.
    #[test]
    fn a_packed_store_is_like_any_other(
        groups in prop::collection::vec(prop::collection::btree_map(key(), prop::option::weighted(0.7, 0..3000_usize), 0..12), 1..20),
        from in key(), to in key(), most in 1..9_usize,
    ) {
        let (packed, plain) = (Packed::new(Map::default()), Map::default());
        for (n, group) in (0_u8..).zip(groups) {
            let changes: Changes = group.into_iter().map(|(key, len)| (key, len.map(|len| vec![n; len]))).collect();
            packed.write(Flush::Now, &mut |_| Ok(changes.clone())).unwrap();
            plain.write(Flush::Now, &mut |_| Ok(changes.clone())).unwrap();
            let (packed, plain) = (packed.snapshot().unwrap(), plain.snapshot().unwrap());
            for order in [Order::Ascending, Order::Descending] {
                for (keys, most) in [(&[][..]..&[9][..], usize::MAX), (&from..&to, most)] {
                    prop_assert_eq!(visited(&*packed, keys.clone(), order, most), visited(&*plain, keys, order, most));
                }
            }
            prop_assert_eq!(packed.get(&from).unwrap(), plain.get(&from).unwrap());
        }
        let buckets = packed.below().rows();
        for (first, bucket) in &*buckets {
            let mut rows = 0;
            decoded(first, unsealed(first, bucket).unwrap(), |_, _| { rows += 1; true }).unwrap();
            prop_assert!(rows > 0 && (rows == 1 || first.len() + bucket.len() <= BUCKET), "{rows} rows");
        }
    }
}

/// Two threads that grow at the ends of two ranges each, as those of the saver do.
#[test]
fn rows_that_are_put_in_order_fill_their_buckets() {
    let packed = Packed::new(Map::default());
    let mut bytes = 0;
    for n in 0..2000_u32 {
        let mut changes = Changes::new();
        for (thread, kind, len) in [(1, 0, 90), (1, 2, 400), (2, 0, 90), (2, 2, 400)] {
            let key = [&[2, 1, thread, kind], &n.to_be_bytes()[..]].concat();
            bytes += key.len() + len;
            changes.insert(key, Some(vec![7; len]));
        }
        packed.write(Flush::Now, &mut |_| Ok(changes.clone())).unwrap();
    }
    let buckets = packed.below().rows();
    let taken = buckets.len() * 4096;
    assert!(taken < bytes + bytes / 8, "{} pages for {bytes} bytes", buckets.len());
}

#[test]
fn a_changed_bucket_is_noticed() {
    let packed = Packed::new(Map::default());
    let changes: Changes = (0..9_u8).map(|n| (vec![2, 1, 1, 0, n], Some(vec![n; 20]))).collect();
    packed.write(Flush::Now, &mut |_| Ok(changes.clone())).unwrap();
    let whole = packed.below().rows().clone();
    let (first, bucket) = whole.iter().next().unwrap();
    for place in 0..bucket.len() {
        let mut changed = bucket.clone();
        changed[place] ^= 1 << (place % 8);
        packed.below().rows().insert(first.clone(), changed);
        let read = packed.snapshot().unwrap().get(&[2, 1, 1, 0, 3]);
        assert!(matches!(read, Err(threadkeep::Error::Corrupt { .. })), "{place}: {read:?}");
    }
}

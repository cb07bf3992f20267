//! A store in memory.

use std::ops::{Bound, ControlFlow, Range};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use imbl::OrdMap;
use threadkeep::Result;
use threadkeep::saver::Flush;
use threadkeep_kv::{Order, Plan, Snapshot, Store, Visit};

pub(crate) type Rows = OrdMap<Vec<u8>, Vec<u8>>;

/// A map whose clones share what they have in common, which makes a snapshot of it free.
#[derive(Default)]
pub(crate) struct Map {
    rows: Mutex<Rows>,
    /// The values that were read.
    pub(crate) reads: Arc<AtomicUsize>,
    /// The rows that were visited in ranges.
    pub(crate) visits: Arc<AtomicUsize>,
}

struct At {
    rows: Rows,
    reads: Arc<AtomicUsize>,
    visits: Arc<AtomicUsize>,
}

impl Map {
    /// Everything that is stored.
    pub(crate) fn rows(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn at(&self, rows: &Rows) -> At {
        At { rows: rows.clone(), reads: self.reads.clone(), visits: self.visits.clone() }
    }
}

impl Snapshot for At {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        Ok(self.rows.get(key).cloned())
    }

    fn range(&self, keys: Range<&[u8]>, order: Order, visit: &mut Visit<'_>) -> Result<()> {
        if keys.start >= keys.end {
            return Ok(());
        }
        let found = self.rows.range::<_, [u8]>((Bound::Included(keys.start), Bound::Excluded(keys.end)));
        let found: &mut dyn Iterator<Item = _> = match order {
            Order::Ascending => &mut found.into_iter(),
            Order::Descending => &mut found.rev(),
        };
        for (key, value) in found {
            self.visits.fetch_add(1, Ordering::Relaxed);
            if visit(key, value)? == ControlFlow::Break(()) {
                break;
            }
        }
        Ok(())
    }
}

impl Store for Map {
    fn name(&self) -> &'static str {
        "kv"
    }

    fn durable(&self) -> bool {
        true // As far as its handles go: what they leave is there for the next one.
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot + '_>> {
        Ok(Box::new(self.at(&self.rows())))
    }

    fn write(&self, _: Flush, plan: &mut Plan<'_>) -> Result<()> {
        let mut rows = self.rows();
        for (key, value) in plan(&self.at(&rows))? {
            match value {
                Some(value) => rows.insert(key, value),
                None => rows.remove(&key),
            };
        }
        Ok(())
    }
}

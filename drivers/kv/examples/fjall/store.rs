//! The store: everything that a driver is.

use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use fjall::{Database, Keyspace, KeyspaceCreateOptions, PersistMode, Readable};
use threadkeep::saver::Flush;
use threadkeep::{Error, Result};
use threadkeep_kv::{Order, Plan, Snapshot, Store, Visit};

const NAME: &str = "fjall";

/// A directory of fjall with checkpoints. One process at a time has it open, once. A key has at most 65,535 bytes, so
/// it refuses ids of threads and namespaces that are about as long.
pub(crate) struct FjallStore {
    db: Database,
    rows: Keyspace,
    /// Held by the one that writes: a batch of fjall is atomic, but does not lock what it was planned on.
    turn: Mutex<()>,
    /// Whether a batch failed: it may be in the log, and fjall shows what was before it until the directory is opened
    /// again.
    doubtful: AtomicBool,
}

impl FjallStore {
    /// Opens a directory, which is created if it does not exist.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let db = Database::builder(path).open().map_err(unavailable)?;
        let rows = db.keyspace("threadkeep", KeyspaceCreateOptions::default).map_err(unavailable)?;
        Ok(Self { db, rows, turn: Mutex::default(), doubtful: AtomicBool::new(false) })
    }

    /// A write failed, at once or because an earlier one had.
    fn failed(&self, error: fjall::Error) -> Error {
        match error {
            fjall::Error::Poisoned => unavailable(error),
            error => {
                self.doubtful.store(true, Ordering::Release);
                Error::InDoubt { saver: NAME, reason: error.to_string() }
            }
        }
    }

    fn now(&self) -> At<'_> {
        At { rows: &self.rows, moment: self.db.snapshot() }
    }

    /// The bytes of the rows that a reader finds. Files also hold what was replaced or deleted, until a compaction.
    pub(crate) fn live_bytes(&self) -> Result<u64> {
        let mut bytes = 0;
        for row in self.db.snapshot().iter(&self.rows) {
            let (key, value) = row.into_inner().map_err(unavailable)?;
            bytes += (key.len() + value.len()) as u64;
        }
        Ok(bytes)
    }
}

impl Store for FjallStore {
    fn name(&self) -> &'static str {
        NAME
    }

    fn durable(&self) -> bool {
        true
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot + '_>> {
        if self.doubtful.load(Ordering::Acquire) {
            return Err(unavailable(fjall::Error::Poisoned));
        }
        Ok(Box::new(self.now()))
    }

    fn write(&self, flush: Flush, plan: &mut Plan<'_>) -> Result<()> {
        // The lock guards no data, so it is fine if its last holder panicked.
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let changes = plan(&self.now())?;
        let mode = match flush {
            Flush::Now => PersistMode::SyncData,
            Flush::WithNext => PersistMode::Buffer, // With the operating system, so it survives this process.
        };
        if changes.is_empty() {
            return self.db.persist(mode).map_err(|error| self.failed(error));
        }
        changes.keys().try_for_each(|key| fits(key))?;
        let mut batch = self.db.batch().durability(Some(mode));
        for (key, value) in changes {
            match value {
                Some(value) => batch.insert(&self.rows, key, value),
                None => batch.remove(&self.rows, key),
            }
        }
        batch.commit().map_err(|error| self.failed(error))
    }
}

struct At<'a> {
    rows: &'a Keyspace,
    moment: fjall::Snapshot,
}

impl Snapshot for At<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        fits(key)?;
        Ok(self.moment.get(self.rows, key).map_err(unavailable)?.map(|value| value.to_vec()))
    }

    fn range(&self, keys: Range<&[u8]>, order: Order, visit: &mut Visit<'_>) -> Result<()> {
        if keys.start >= keys.end {
            return Ok(());
        }
        fits(keys.start).and_then(|()| fits(keys.end))?;
        let mut found = self.moment.range(self.rows, keys);
        let mut next = || match order {
            Order::Ascending => found.next(),
            Order::Descending => found.next_back(),
        };
        while let Some(row) = next() {
            let (key, value) = row.into_inner().map_err(unavailable)?;
            if visit(&key, &value)? == ControlFlow::Break(()) {
                break;
            }
        }
        Ok(())
    }
}

/// Refuses a key that fjall cannot hold: it would panic, and all calls that share the write would end in doubt.
fn fits(key: &[u8]) -> Result<()> {
    if u16::try_from(key.len()).is_ok() {
        return Ok(());
    }
    Err(Error::InvalidInput(format!(
        "a key of {} bytes is too long for fjall, which takes {}",
        key.len(),
        u16::MAX
    )))
}

fn unavailable(error: fjall::Error) -> Error {
    Error::Unavailable { saver: NAME, reason: error.to_string() }
}

#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

use std::fmt;
use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use redb::{
    CommitError, Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError, TableDefinition,
    TableError, TransactionError,
};
use threadkeep::saver::Flush;
use threadkeep::{Error, Result};
use threadkeep_kv::{KvSaver, Order, Packed, Plan, Snapshot, Store, Visit};

const NAME: &str = "redb";
const ROWS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("threadkeep");
/// The most memory that pages of the file take.
const CACHE: usize = 64 << 20;

/// Opens the saver of a file, which is created if it does not exist. This blocks: after a crash, until redb has checked the
/// file.
///
/// # Errors
/// [`Error::Unavailable`] if the file cannot be opened, or is open already; and as [`KvSaver::open`].
pub fn open(path: impl AsRef<Path>) -> Result<KvSaver> {
    KvSaver::open(RedbStore::open(path)?)
}

/// A redb file with checkpoints. One handle of one process has it open at a time; share it in an [`Arc`](std::sync::Arc).
pub struct RedbStore(Packed<File>);

/// The file, whose rows are buckets: redb cuts a full page in its middle, and would leave all pages but the newest half empty.
struct File {
    db: Database,
    /// Whether a commit failed. The disk may have it, and redb goes on to show what was before it.
    doubtful: AtomicBool,
}

impl fmt::Debug for RedbStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedbStore").finish_non_exhaustive()
    }
}

impl RedbStore {
    /// Opens a file, which is created if it does not exist.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if it cannot be opened, or is open already; [`Error::Corrupt`] if it is damaged;
    /// [`Error::InvalidInput`] if it has a format of redb that this version does not read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let opened = Database::builder().set_cache_size(CACHE).create(path);
        let db = opened.map_err(|error| match error {
            DatabaseError::UpgradeRequired(version) => Error::InvalidInput(format!(
                "{} has version {version} of redb's format; upgrade it with the redb that wrote it",
                path.display()
            )),
            DatabaseError::Storage(error) => storage(error),
            other => unavailable(format!("{}: {other}", path.display())),
        })?;
        let file = File { db, doubtful: AtomicBool::default() };
        // Readers need the table.
        file.write(Flush::Now, &mut |_| Ok(threadkeep_kv::Changes::new()))?;
        Ok(Self(Packed::new(file)))
    }

    /// The bytes of the pages that the file uses: without those that it keeps free.
    ///
    /// # Errors
    /// [`Error::Unavailable`] or [`Error::Corrupt`] if the file cannot be read.
    pub fn used_bytes(&self) -> Result<u64> {
        let transaction = self.0.below().db.begin_write().map_err(transaction)?;
        let stats = transaction.stats().map_err(storage)?;
        let used = stats.allocated_pages() * stats.page_size() as u64;
        transaction.abort().map_err(storage)?;
        Ok(used)
    }
}

impl Store for RedbStore {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn durable(&self) -> bool {
        self.0.durable()
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot + '_>> {
        self.0.snapshot()
    }

    fn write(&self, flush: Flush, plan: &mut Plan<'_>) -> Result<()> {
        self.0.write(flush, plan)
    }
}

impl Store for File {
    fn name(&self) -> &'static str {
        NAME
    }

    fn durable(&self) -> bool {
        true
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot + '_>> {
        if self.doubtful.load(Ordering::Acquire) {
            return Err(storage(StorageError::PreviousIo));
        }
        let transaction = self.db.begin_read().map_err(transaction)?;
        Ok(Box::new(Rows(transaction.open_table(ROWS).map_err(table)?)))
    }

    // A commit of redb that is not flushed is only in memory, so every one is flushed.
    fn write(&self, _: Flush, plan: &mut Plan<'_>) -> Result<()> {
        // Waits for the writer before it.
        let transaction = self.db.begin_write().map_err(transaction)?;
        {
            let mut rows = Rows(transaction.open_table(ROWS).map_err(table)?);
            for (key, value) in plan(&rows)? {
                match value {
                    Some(value) => rows.0.insert(&key[..], &value[..]).map(drop),
                    None => rows.0.remove(&key[..]).map(drop),
                }
                .map_err(storage)?;
            }
        }
        transaction.commit().map_err(|error| match error {
            CommitError::Storage(StorageError::PreviousIo) => storage(StorageError::PreviousIo),
            error => {
                self.doubtful.store(true, Ordering::Release);
                Error::InDoubt { saver: NAME, reason: error.to_string() }
            }
        })
    }
}

/// The rows at one moment: in a snapshot, or in the transaction that changes them.
struct Rows<T>(T);

impl<T: ReadableTable<&'static [u8], &'static [u8]>> Snapshot for Rows<T> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Ok(self.0.get(key).map_err(storage)?.map(|value| value.value().to_vec()))
    }

    fn range(&self, keys: Range<&[u8]>, order: Order, visit: &mut Visit<'_>) -> Result<()> {
        if keys.start >= keys.end {
            return Ok(());
        }
        let mut found = self.0.range::<&[u8]>(keys).map_err(storage)?;
        let mut next = || match order {
            Order::Ascending => found.next(),
            Order::Descending => found.next_back(),
        };
        while let Some(row) = next() {
            let (key, value) = row.map_err(storage)?;
            if visit(key.value(), value.value())? == ControlFlow::Break(()) {
                break;
            }
        }
        Ok(())
    }
}

fn unavailable(reason: impl fmt::Display) -> Error {
    Error::Unavailable { saver: NAME, reason: reason.to_string() }
}

fn storage(error: StorageError) -> Error {
    match error {
        StorageError::Corrupted(reason) => Error::corrupt("the redb file", reason),
        StorageError::PreviousIo => unavailable("an earlier operation failed; open the file again"),
        other => unavailable(other),
    }
}

fn table(error: TableError) -> Error {
    match error {
        TableError::Storage(error) => storage(error),
        other => unavailable(other),
    }
}

fn transaction(error: TransactionError) -> Error {
    match error {
        TransactionError::Storage(error) => storage(error),
        other => unavailable(other),
    }
}

#[cfg(test)]
mod tests;

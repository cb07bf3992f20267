#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod guard;
mod place;

use std::fmt;
use std::ops::{ControlFlow, Range};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use redb::backends::FileBackend;
use redb::{
    Builder, Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError, TableDefinition,
    TableError, TransactionError,
};
use threadkeep::saver::Flush;
use threadkeep::{Error, Result};
use threadkeep_kv::{Changes, KvSaver, Order, Packed, Plan, Snapshot, Store, Visit};

use crate::guard::{caught, guarded};
use crate::place::Place;

const NAME: &str = "redb";
const ROWS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("threadkeep");
/// The most memory that pages of the file take.
const CACHE: usize = 64 << 20;
/// The file was moved or replaced since it was opened.
const GONE: &str = "the file was removed, renamed or replaced while the store was open, so nothing was written; put it back \
    where it was, or restore a copy of it, then open it again";

/// Opens the saver of a file, which is created if it does not exist. This blocks until redb has compared the checksums of the
/// whole file.
///
/// # Errors
/// As [`RedbStore::open`] and [`KvSaver::open`].
pub fn open(path: impl AsRef<Path>) -> Result<KvSaver> {
    KvSaver::open(RedbStore::open(path)?)
}

/// A redb file with checkpoints. One handle of one process has it open at a time; share it in an [`Arc`](std::sync::Arc).
pub struct RedbStore(Packed<File>);

/// The file, whose rows are buckets: redb cuts a full page in its middle, and would leave all pages but the newest half empty.
struct File {
    db: Database,
    /// None of one in memory, which tests use.
    place: Option<Place>,
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
        let failed = |error: &dyn fmt::Display| unavailable(format!("{}: {error}", path.display()));
        let file = place::open(path, std::fs::File::sync_all).map_err(|error| failed(&error))?;
        let place = Place::of(path, &file).map_err(|error| failed(&error))?;
        let opened = guarded(|| {
            let file = FileBackend::new(file).map_err(|error| failed(&error))?;
            checking(&mut Builder::new()).create_with_backend(file).map_err(|error| match error {
                DatabaseError::UpgradeRequired(version) => Error::InvalidInput(format!(
                    "{} has version {version} of redb's format; upgrade it with the redb that wrote it",
                    path.display()
                )),
                DatabaseError::Storage(error) => storage(error),
                other => failed(&other),
            })
        });
        Ok(Self(Packed::new(File::new(opened?, Some(place))?)))
    }

    /// The bytes of the pages that the file uses: without those that it keeps free.
    ///
    /// # Errors
    /// [`Error::Unavailable`] or [`Error::Corrupt`] if the file cannot be read.
    pub fn used_bytes(&self) -> Result<u64> {
        guarded(|| {
            let transaction = self.0.below().db.begin_write().map_err(transaction)?;
            let stats = transaction.stats().map_err(storage)?;
            let used = stats.allocated_pages() * stats.page_size() as u64;
            transaction.abort().map_err(storage)?;
            Ok(used)
        })
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

/// Lets redb compare the checksums of all pages when it opens a file. It does not when it reads one: a page that was
/// damaged before would hide rows, or end the process.
fn checking(builder: &mut Builder) -> &mut Builder {
    builder.set_cache_size(CACHE).set_check_integrity_on_open(true)
}

impl File {
    fn new(db: Database, place: Option<Place>) -> Result<Self> {
        let file = Self { db, place, doubtful: AtomicBool::default() };
        // Readers need the table.
        file.write(Flush::Now, &mut |_| Ok(Changes::new()))?;
        Ok(file)
    }

    /// Stores what `plan` returns.
    fn change(&self, plan: &mut Plan<'_>) -> Result<()> {
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
        if let Some(path) = self.place.as_ref().and_then(Place::left) {
            return Err(unavailable(format!("{}: {GONE}", path.display())));
        }
        // Also if another call's read failed meanwhile, which ends the commit wherever it is.
        let failed = match caught(|| transaction.commit()) {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => panic,
        };
        self.doubtful.store(true, Ordering::Release);
        Err(Error::InDoubt { saver: NAME, reason: format!("{failed}; open the file again") })
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
        guarded(|| {
            let transaction = self.db.begin_read().map_err(transaction)?;
            Ok(Box::new(Rows(transaction.open_table(ROWS).map_err(table)?)) as Box<dyn Snapshot>)
        })
    }

    // A commit of redb that is not flushed is only in memory, so every one is flushed.
    fn write(&self, _: Flush, plan: &mut Plan<'_>) -> Result<()> {
        // A panic of `plan` is its caller's, and passed on. One of redb says that the file is damaged, also when it gives a
        // transaction up.
        let mut panicked = None;
        let written = guarded(|| {
            self.change(&mut |rows| {
                catch_unwind(AssertUnwindSafe(|| plan(rows))).unwrap_or_else(|panic| {
                    panicked = Some(panic);
                    Err(unavailable("its plan panicked"))
                })
            })
        });
        match panicked {
            Some(panic) => resume_unwind(panic),
            None => written,
        }
    }
}

/// The rows at one moment: in a snapshot, or in the transaction that changes them.
struct Rows<T>(T);

impl<T: ReadableTable<&'static [u8], &'static [u8]>> Snapshot for Rows<T> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        guarded(|| Ok(self.0.get(key).map_err(storage)?.map(|value| value.value().to_vec())))
    }

    fn range(&self, keys: Range<&[u8]>, order: Order, visit: &mut Visit<'_>) -> Result<()> {
        if keys.start >= keys.end {
            return Ok(());
        }
        let mut found = guarded(|| self.0.range::<&[u8]>(keys).map_err(storage))?;
        let mut next = || match order {
            Order::Ascending => found.next(),
            Order::Descending => found.next_back(),
        };
        while let Some((key, value)) = guarded(|| next().transpose().map_err(storage))? {
            let (key, value) = guarded(|| Ok((key.value(), value.value())))?;
            if visit(key, value)? == ControlFlow::Break(()) {
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
        StorageError::ValueTooLarge(len) => {
            Error::InvalidInput(format!("a value of {len} bytes is too large for redb"))
        }
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

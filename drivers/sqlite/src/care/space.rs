//! The size of a database, and returning the space that deletions freed.

use threadkeep::Result;

use crate::rows::checkpoints;
use crate::rows::directory::{self, ThreadKey};
use crate::rows::element;
use crate::sql::{Db, integer};

/// `auto_vacuum` of a database that returns freed pages on request.
const INCREMENTAL: i64 = 2;

/// The size of a database on disk, without its write-ahead log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSize {
    /// Bytes of the database file.
    pub bytes: u64,
    /// Bytes of it that are free. They are reused before the file grows.
    pub free: u64,
    /// Whether [`crate::SqliteSaver::vacuum`] can return free bytes. Databases of earlier versions cannot until
    /// [`crate::SqliteSaver::vacuum_fully`] has run once.
    pub incremental: bool,
}

impl FileSize {
    pub(crate) fn of(db: &Db) -> Result<Self> {
        let number = |pragma| {
            let value = db.one(pragma, [], |row| integer(row, 0))?.unwrap_or_default();
            Ok(u64::try_from(value).unwrap_or_default())
        };
        let page = number("PRAGMA page_size")?;
        Ok(Self {
            bytes: page * number("PRAGMA page_count")?,
            free: page * number("PRAGMA freelist_count")?,
            incremental: db.one("PRAGMA auto_vacuum", [], |row| integer(row, 0))? == Some(INCREMENTAL),
        })
    }
}

/// How the writer returns space.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Vacuum {
    /// At most this many pages, in one transaction.
    Pages(u32),
    /// Everything, by rewriting the database.
    Fully,
}

/// Moves at most `pages` pages from the end of the file into free ones, inside an open transaction.
pub(crate) fn give_back(db: &Db, pages: u32) -> Result<()> {
    // SQLite takes 0, and what is no positive 32-bit integer, for all pages.
    let pages = pages.min(i32::MAX.unsigned_abs());
    if pages == 0 {
        return Ok(());
    }
    // The number is ours; a pragma takes no parameters.
    db.each(&format!("PRAGMA incremental_vacuum({pages})"), [], |_| Ok(()))
}

/// Rewrites the database without free pages, so that later ones can be returned gradually. Must run outside any
/// transaction; other writers are blocked meanwhile.
///
/// # Errors
/// [`threadkeep::Error::InDoubt`] if what reached the disk is unknown.
pub(crate) fn write_anew(db: &Db) -> Result<()> {
    db.each("PRAGMA auto_vacuum = INCREMENTAL", [], |_| Ok(()))?;
    db.vacuum()
}

/// Bytes in the rows of a thread.
pub(crate) fn of_thread(db: &Db, thread: ThreadKey) -> Result<u64> {
    let mut bytes = element::stored_bytes(db, thread)?;
    for (_, chain) in directory::chains(db, thread)? {
        bytes += checkpoints::stored_bytes(db, chain.key)?;
    }
    Ok(bytes)
}

//! How much room a database takes, and giving back what deletions freed.

use threadkeep::Result;

use crate::rows::checkpoints;
use crate::rows::directory::{self, ThreadKey};
use crate::rows::element;
use crate::sql::{Db, integer};

/// `auto_vacuum` of a database that gives back freed pages when it is asked to.
const INCREMENTAL: i64 = 2;

/// How much room a database takes on the disk, its write-ahead log apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSize {
    /// Bytes of the database.
    pub bytes: u64,
    /// Of these, bytes that hold nothing. They are used again before the file grows.
    pub free: u64,
    /// Whether [`crate::SqliteSaver::vacuum`] can give free bytes back. Databases of earlier versions cannot until
    /// [`crate::SqliteSaver::vacuum_fully`] was carried out once.
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

/// What the writer does to give back room.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Vacuum {
    /// At most so many pages, in one transaction.
    Pages(u32),
    /// Everything, by writing the database anew.
    Fully,
}

/// Moves at most so many pages from the end of the file into free ones, inside an open transaction.
pub(crate) fn give_back(db: &Db, pages: u32) -> Result<()> {
    // The number is ours; a pragma takes no parameters.
    db.each(&format!("PRAGMA incremental_vacuum({pages})"), [], |_| Ok(()))
}

/// Writes the database anew without free pages, and so that later ones can be given back bit by bit. Outside of any
/// transaction; nobody else can write meanwhile.
pub(crate) fn write_anew(db: &Db) -> Result<()> {
    db.each("PRAGMA auto_vacuum = INCREMENTAL", [], |_| Ok(()))?;
    db.execute("VACUUM", []).map(|_| ())
}

/// Bytes in the rows of a thread.
pub(crate) fn of_thread(db: &Db, thread: ThreadKey) -> Result<u64> {
    let mut bytes = element::stored_bytes(db, thread)?;
    for (_, chain) in directory::chains(db, thread)? {
        bytes += checkpoints::stored_bytes(db, chain.key)?;
    }
    Ok(bytes)
}

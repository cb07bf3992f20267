//! The tables, and the check that a file is ours.
//!
//! # On-disk format, version 3
//!
//! An SQLite database in WAL mode with [`APPLICATION_ID`] and, as `user_version`, the [`FORMAT_VERSION`]. `auto_vacuum`
//! is INCREMENTAL; those of earlier versions may lack it.
//!
//! | table | key | holds |
//! |---|---|---|
//! | `scope` | number of a thread or chain | owner and text, a hash of both, and a sealed body: the ordinal floor |
//! | `name` | number of the name | the text of a channel or node, and its checksum |
//! | `checkpoint` | chain and ordinal | the checkpoint's id, a sealed body, and, sealed, the tasks that ran from it |
//! | `element` | thread, space and sequence number | a hash, and the bytes with that hash |
//! | `dictionary` | its number | a sealed dictionary for compressing elements |
//!
//! ## Keys
//!
//! A thread is a scope of owner 0; while a long one is being written in pieces, of owner 2^32 - 1, and while the rows of a
//! deleted one are being removed, of owner 2^32 - 2: no reader looks for these. A *chain*, a namespace of a thread, is a scope of the thread. Their numbers are
//! never reused. They are looked up by text *or* hash and must match both, so that a damaged row is an error rather
//! than an unknown thread.
//!
//! The checkpoints of a chain have *ordinals*, counting up from 1 in the order of commits; an ordinal is never reused,
//! not even after deletions (the chain's floor is at least the greatest ordinal deleted). A commit must expect the head
//! and have a greater id, so the order of ordinals is the order of ids: the head is the greatest key, an id is found by
//! binary search, and no index is needed.
//!
//! * key of `checkpoint`: `chain << 32 | ordinal`
//! * key of `element`: `thread << 32 | space << 30 | sequence number`. Spaces: 0 list elements and large plain values,
//!   1 metadata, 2 manifest chunks. Each counts from 0.
//!
//! ## Rows
//!
//! Numbers are LEB128 varints, signed ones in zigzag form. A *sealed* body ends with four bytes of BLAKE3 over table,
//! key and the rest of the row. The high half of a body's first byte is the version of its form, 1.
//!
//! * `scope`: version byte, floor; of a thread, its rewrite count
//! * `checkpoint`: version byte with source and delta marker, flags, distance to the parent's ordinal (0: none; 1 is
//!   reserved for a parent that was deleted, so a distance d is d + 1), step, next nodes, applied tasks (as places in
//!   the parent's `tasks`), `parents` if flagged, counters if flagged, `extra`, channels. A channel is its name and
//!   either an ordinal, whose checkpoint holds the entry (it was held), or a version and what is stored: a sentinel or
//!   a value.
//! * `tasks`: version byte, and of each task its id, node, index and writes (channel, whether it replaces, value). It
//!   grows when a task is stored; nothing else of a checkpoint ever changes.
//! * `element`: a codec byte and the bytes: 0 uncompressed; 1 their number and a zstd frame of them; 2 the number of a
//!   dictionary, their number and a zstd frame made with it. The hash is the first sixteen bytes of the BLAKE3 hash of
//!   the bytes; it is checked on every read.
//!
//! An element is packed with the newest dictionary, and unpacked with the one that it names. A dictionary never changes, and
//! none is deleted.
//!
//! Version 1 had no table `dictionary`; it is added when such a file is opened. Since version 3 every page ends with a
//! checksum ([`threadkeep_pages`]), so that damage below the tables, which could hide rows, is an error too. A file
//! created without them stays without, and stays at version 2.
//!
//! ## Values
//!
//! A value of up to 32 bytes is stored inline. A larger one is split: each element of a list is a row of `element`,
//! stored once per thread, and the value is a *manifest*: runs of sequence numbers, so that an append-only list of any
//! length takes a few bytes. Runs beyond sixteen are packed in groups of eight into chunks, which are elements
//! themselves, and the manifest holds runs of chunks, so that a much-edited list stays small too. A large value that is
//! not a list is one element. A large map in `extra` is a manifest over its entries.

use std::time::Duration;

use rusqlite::{Connection, ErrorCode};
use threadkeep::{Error, Result};

use crate::error::{from_sqlite, unavailable};
use crate::sql::patiently;

/// The `application_id` of our databases: `THKP`.
pub const APPLICATION_ID: i32 = 0x5448_4b50;
/// The newest format that this driver reads, and the format that it writes.
pub const FORMAT_VERSION: u32 = 3;
/// The newest format of a file whose pages have no checksums.
const UNSEALED_VERSION: u32 = 2;

/// The pause between two attempts at what SQLite does not wait for.
const PAUSE: Duration = Duration::from_millis(2);
/// Older versions can lose a commit when a WAL is reset while another connection writes.
const OLDEST_SQLITE: i32 = 3_051_003;

const TABLES: &str = "
CREATE TABLE scope (
    key INTEGER PRIMARY KEY AUTOINCREMENT, owner INTEGER NOT NULL, text TEXT NOT NULL,
    hash INTEGER NOT NULL UNIQUE, body BLOB NOT NULL, UNIQUE (owner, text)
) STRICT;
CREATE TABLE name (key INTEGER PRIMARY KEY, text TEXT NOT NULL, sum BLOB NOT NULL) STRICT;
CREATE TABLE checkpoint (key INTEGER PRIMARY KEY, id BLOB NOT NULL, body BLOB NOT NULL, tasks BLOB) STRICT;
CREATE TABLE element (key INTEGER PRIMARY KEY, hash BLOB NOT NULL, body BLOB NOT NULL) STRICT;
";
/// What each version added to the one before it, from version 2 on. Version 3 has the same tables.
const MIGRATIONS: [&str; 2] =
    ["CREATE TABLE dictionary (key INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT;", ""];

/// What a file is before it is used.
enum Found {
    Empty,
    Ours(u32),
    Foreign(i32),
}

/// Ensures that the database of `conn` has our tables, in a format that this driver knows. A database of another
/// program is left untouched.
///
/// # Errors
/// [`Error::NewerFormat`]; [`Error::InvalidInput`] for another program's database; [`Error::Corrupt`] for a file that
/// is not a database.
pub(crate) fn prepare(conn: &Connection, store: &str, patience: Duration) -> Result<()> {
    if rusqlite::version_number() < OLDEST_SQLITE {
        let version = rusqlite::version();
        return Err(unavailable(format!("SQLite {version} is too old; build with 3.51.3 or newer")));
    }
    let failed = |error| from_sqlite(store, &error);
    // In one transaction: another process may be creating the tables right now.
    conn.execute_batch("BEGIN").map_err(failed)?;
    let found = identify(conn).map_err(failed);
    let ended = conn.execute_batch("ROLLBACK").map_err(failed);
    let found = known(found?, store)?;
    ended?;
    if let Found::Empty = found {
        conn.pragma_update(None, "page_size", threadkeep_pages::PAGE_SIZE).map_err(failed)?;
        threadkeep_pages::seal(conn).map_err(failed)?;
        // Free pages can be returned gradually, at the cost of a page of pointers for every three thousand.
        conn.pragma_update(None, "auto_vacuum", "INCREMENTAL").map_err(failed)?;
    }
    let journal = write_ahead(conn, patience).map_err(failed)?;
    if journal != "wal" {
        return Err(unavailable(format!("{store}: the file system does not allow a write-ahead log")));
    }
    let sealed = threadkeep_pages::is_sealed(conn).map_err(failed)?;
    if !sealed {
        // Else a vacuum would give it checksums, which its version does not have.
        threadkeep_pages::unseal(conn).map_err(failed)?;
    }
    let newest = if sealed { FORMAT_VERSION } else { UNSEALED_VERSION };
    match found {
        Found::Ours(version) if !agree(version, sealed) => Err(disagreement(store, version, sealed)),
        Found::Ours(version) if version == newest => Ok(()),
        _ => {
            conn.execute_batch("BEGIN IMMEDIATE").map_err(failed)?;
            let migrated = migrate(conn, store, newest);
            let end = if migrated.is_ok() { "COMMIT" } else { "ROLLBACK" };
            let ended = conn.execute_batch(end).map_err(failed);
            migrated.and(ended)
        }
    }
}

/// Checks a database that can only be read.
///
/// # Errors
/// As [`prepare`]; [`Error::Unavailable`] for one that an earlier version left, which must be migrated first.
pub(crate) fn check(conn: &Connection, store: &str) -> Result<()> {
    let failed = |error| from_sqlite(store, &error);
    let found = identify(conn).map_err(failed)?;
    let sealed = threadkeep_pages::is_sealed(conn).map_err(failed)?;
    match known(found, store)? {
        Found::Ours(version @ UNSEALED_VERSION..) if !agree(version, sealed) => {
            Err(disagreement(store, version, sealed))
        }
        Found::Ours(UNSEALED_VERSION..) => Ok(()),
        _ => Err(unavailable(format!(
            "{store}: an earlier version made it; open it once where it can be written, which migrates it"
        ))),
    }
}

/// Whether a file of this version has checksums of pages if, and only if, it should.
fn agree(version: u32, sealed: bool) -> bool {
    (version > UNSEALED_VERSION) == sealed
}

/// The error of a file whose version and pages do not [`agree`].
fn disagreement(store: &str, version: u32, sealed: bool) -> Error {
    let pages = if sealed { "with" } else { "without" };
    Error::corrupt(store, format!("format version {version}, {pages} checksums of pages"))
}

/// Turns the write-ahead log on, and returns the resulting journal mode. If several do so at once, SQLite does not wait
/// as it does elsewhere: it reports the file as locked to all but one. It does wait for the end of reads.
fn write_ahead(conn: &Connection, patience: Duration) -> rusqlite::Result<String> {
    let switch = |left| {
        conn.busy_timeout(left)?;
        conn.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0))
    };
    let is_locked = |switched: &rusqlite::Result<String>| {
        let error = switched.as_ref().err();
        error.and_then(rusqlite::Error::sqlite_error_code) == Some(ErrorCode::DatabaseBusy)
    };
    let mode = patiently((patience, PAUSE), switch, is_locked)?;
    conn.busy_timeout(patience)?;
    Ok(mode)
}

/// Creates what a version lacks, unless another process did so since the check.
fn migrate(conn: &Connection, store: &str, newest: u32) -> Result<()> {
    let failed = |error| from_sqlite(store, &error);
    let version = match known(identify(conn).map_err(failed)?, store)? {
        Found::Empty => {
            conn.execute_batch(TABLES).map_err(failed)?;
            conn.pragma_update(None, "application_id", APPLICATION_ID).map_err(failed)?;
            1
        }
        Found::Ours(version) => version,
        Found::Foreign(_) => return Ok(()), // Refused by `known`.
    };
    for (to, migration) in (2..=newest).zip(MIGRATIONS).filter(|(to, _)| *to > version) {
        conn.execute_batch(migration).map_err(failed)?;
        conn.pragma_update(None, "user_version", to).map_err(failed)?;
    }
    Ok(())
}

fn identify(conn: &Connection) -> rusqlite::Result<Found> {
    let number = |pragma| conn.pragma_query_value(None, pragma, |row| row.get::<_, i32>(0));
    let (application, version) = (number("application_id")?, number("user_version")?);
    if application == APPLICATION_ID {
        return Ok(Found::Ours(version.cast_unsigned()));
    }
    let tables: i64 = conn.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    Ok(if application == 0 && version == 0 && tables == 0 {
        Found::Empty
    } else {
        Found::Foreign(application)
    })
}

fn known(found: Found, store: &str) -> Result<Found> {
    match found {
        Found::Ours(1..=FORMAT_VERSION) | Found::Empty => Ok(found),
        Found::Ours(version) if version > FORMAT_VERSION => {
            Err(Error::NewerFormat { store: store.to_owned(), found: version, supported: FORMAT_VERSION })
        }
        Found::Ours(version) => Err(Error::corrupt(store, format!("unknown format version {version}"))),
        Found::Foreign(application) => Err(Error::InvalidInput(format!(
            "{store} is a database of another program (application id {application:#x}); choose another path"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As one that was restored from a backup, which has no log. SQLite waits for its readers, once.
    #[test]
    fn a_database_without_a_log_that_others_read_is_waited_for_no_longer_than_the_patience() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Connection::open(dir.path().join("db")).unwrap();
        let reader = open();
        reader.execute_batch("CREATE TABLE t (n); BEGIN; SELECT * FROM t").unwrap();
        let conn = open();
        let waits = || conn.pragma_query_value(None, "busy_timeout", |row| row.get::<_, u32>(0)).unwrap();
        let patience = Duration::from_millis(20);
        let error = write_ahead(&conn, patience).unwrap_err();
        assert_eq!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy), "{error}");
        assert_eq!(waits(), 0, "the last attempt, when the time is up, waits no more");
        drop(reader);
        assert_eq!(write_ahead(&conn, patience).unwrap(), "wal");
        assert_eq!(waits(), 20, "what comes after it is waited for");
    }
}

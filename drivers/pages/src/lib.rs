#![doc = include_str!("../README.md")]

mod database;
mod kept;
mod log;
mod sum;
mod vfs;

use std::ffi::{c_int, c_void};
use std::path::Path;

pub use kept::{Bound, Kept};
use rusqlite::{Connection, OpenFlags, ffi};

/// The page size of a new database. A commit writes whole pages to the log and flushes them, so small pages make it
/// cheap.
///
/// Databases with pages of 16 KiB, which earlier versions created, are read and written too.
pub const PAGE_SIZE: u16 = 4096;

/// Opens a database through the VFS. A missing or empty file gets pages with checksums: see [`seal`]. A database that
/// was created without them is read and written as it is.
///
/// # Errors
/// SQLite's own, and `SQLITE_CANTOPEN` if the VFS cannot be registered.
pub fn open(path: impl AsRef<Path>, flags: OpenFlags) -> rusqlite::Result<Connection> {
    let name = vfs::register()?;
    Connection::open_with_flags_and_vfs(path, flags, name)
}

/// Reserves the space for checksums in a database that has no page yet. It must have been opened by [`open`], with page
/// size [`PAGE_SIZE`]. A database that has pages, of another program or another process by now, stays as it is: check
/// [`is_sealed`]. But SQLite keeps the request, and the next `VACUUM` of this connection would follow it:
/// [`unseal`].
///
/// # Errors
/// SQLite's own.
pub fn seal(conn: &Connection) -> rusqlite::Result<()> {
    reserve(conn, sum::RESERVED)
}

/// Takes the request of [`seal`] back. A database that has checksums keeps them.
///
/// # Errors
/// SQLite's own.
pub fn unseal(conn: &Connection) -> rusqlite::Result<()> {
    reserve(conn, 0)
}

/// Asks for this many bytes at the end of each page, in a database that is written from its first page on.
fn reserve(conn: &Connection, bytes: u8) -> rusqlite::Result<()> {
    let mut bytes = c_int::from(bytes);
    control(conn, ffi::SQLITE_FCNTL_RESERVE_BYTES, (&raw mut bytes).cast())
}

/// Whether the pages of a database have checksums, as far as this connection has seen. The connection must come from
/// [`open`], and have read from the database or written to it.
///
/// The answer comes from the connection, not from the file: on Unix, closing any descriptor of a file drops all POSIX
/// locks that the process holds on it, including those of its SQLite connections.
///
/// # Errors
/// SQLite's own.
pub fn is_sealed(conn: &Connection) -> rusqlite::Result<bool> {
    let mut file: *mut ffi::sqlite3_file = std::ptr::null_mut();
    control(conn, ffi::SQLITE_FCNTL_FILE_POINTER, (&raw mut file).cast())?;
    // SAFETY: SQLite returned the connection's file, which is open as long as the connection is.
    let pages = unsafe { vfs::pages_of(file) };
    Ok(matches!(pages, Some(database::Pages::Sealed(_))))
}

/// Whether the file of a database is no longer where it was opened: removed, renamed or replaced. What is committed to
/// it is lost, or ends up in a file under another name. Only looks the name up in the file system, and opens nothing.
///
/// # Errors
/// SQLite's own.
pub fn has_moved(conn: &Connection) -> rusqlite::Result<bool> {
    let mut moved: c_int = 0;
    control(conn, ffi::SQLITE_FCNTL_HAS_MOVED, (&raw mut moved).cast())?;
    Ok(moved != 0)
}

/// A number that changes with every commit of this connection, and when a transaction or query of it begins after
/// another connection has committed. `PRAGMA data_version` tells only the latter, but is a statement to run.
///
/// # Errors
/// SQLite's own.
pub fn data_version(conn: &Connection) -> rusqlite::Result<u32> {
    let mut version: u32 = 0;
    control(conn, ffi::SQLITE_FCNTL_DATA_VERSION, (&raw mut version).cast())?;
    Ok(version)
}

/// A file control operation on the database file. `argument` points to the operation's input and output.
fn control(conn: &Connection, operation: c_int, argument: *mut c_void) -> rusqlite::Result<()> {
    // SAFETY: the handle is used during this call only, while `conn` is borrowed.
    let handle = unsafe { conn.handle() };
    // SAFETY: the handle is open, the name is a C string, and each caller passes what its operation expects.
    match unsafe { ffi::sqlite3_file_control(handle, c"main".as_ptr(), operation, argument) } {
        ffi::SQLITE_OK => Ok(()),
        code => Err(vfs::failure(code)),
    }
}

/// Whether this error is a page that fails its checksum.
pub fn is_damage(error: &rusqlite::Error) -> bool {
    error.sqlite_error().is_some_and(|error| error.extended_code == ffi::SQLITE_IOERR_DATA)
}

#[cfg(test)]
mod tests;

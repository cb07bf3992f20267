#![doc = include_str!("../README.md")]

mod sum;
mod vfs;

use std::ffi::c_int;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use rusqlite::{Connection, OpenFlags, ffi};

/// Bytes of a page of a new database. A commit writes whole pages to the log, and flushes them: small ones make it cheap.
///
/// Databases with pages of 16 KiB, as earlier versions made them, are read and written too.
pub const PAGE_SIZE: u16 = 4096;

/// Opens a database through the VFS. A file that is not there, or empty, gets pages with checksums: see [`seal`]. A
/// database that was made without them is read and written as it is.
///
/// # Errors
/// What SQLite says, and `SQLITE_CANTOPEN` if the VFS cannot be registered.
pub fn open(path: impl AsRef<Path>, flags: OpenFlags) -> rusqlite::Result<Connection> {
    let name = vfs::register()?;
    Connection::open_with_flags_and_vfs(path, flags, name)
}

/// Reserves the room for checksums in a database that has no page yet. It must have been opened by [`open`] and be about to
/// have pages of [`PAGE_SIZE`]. On a database that has pages it does nothing: [`is_sealed`] tells.
///
/// # Errors
/// What SQLite says.
pub fn seal(conn: &Connection) -> rusqlite::Result<()> {
    let mut bytes = c_int::from(sum::RESERVED);
    // SAFETY: the handle is used during this call only, while `conn` is borrowed.
    let handle = unsafe { conn.handle() };
    // SAFETY: the handle is open, the name is a C string, and this operation reads and writes one `int`.
    let code = unsafe {
        ffi::sqlite3_file_control(
            handle,
            c"main".as_ptr(),
            ffi::SQLITE_FCNTL_RESERVE_BYTES,
            (&raw mut bytes).cast(),
        )
    };
    if code == ffi::SQLITE_OK { Ok(()) } else { Err(vfs::failure(code)) }
}

/// Whether the first page of a database file says that all have room for checksums: whether they have them, if only this
/// crate wrote to it.
///
/// # Errors
/// What the file system says. A file without a whole header is an `UnexpectedEof`.
pub fn is_sealed(path: impl AsRef<Path>) -> std::io::Result<bool> {
    let mut header = [0; sum::HEADER];
    File::open(path)?.read_exact(&mut header)?;
    Ok(sum::page_size(&header).is_some())
}

/// Whether this is a page without its checksum.
pub fn is_damage(error: &rusqlite::Error) -> bool {
    error.sqlite_error().is_some_and(|error| error.extended_code == ffi::SQLITE_IOERR_DATA)
}

#[cfg(test)]
mod tests;

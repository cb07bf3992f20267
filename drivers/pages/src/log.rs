//! The methods of a write-ahead log: a page that is read from it must have the checksum of its frame.
//!
//! SQLite gives every frame a checksum, over the frame and the checksum of the previous frame, but checks them only
//! when it recovers a log. Without this check, a changed byte in a log in use would be read as it is, and moved into
//! the database.
//!
//! The frames of the transaction in progress are not checked: SQLite writes some of them twice, and sets their
//! checksums at the commit.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rusqlite::ffi::{self, sqlite3_file, sqlite3_io_methods};

use crate::vfs::{self, Methods, OpenFile};

/// Bytes of the header of a log, including the checksum at its end.
const LOG_HEADER: u64 = 32;
/// Bytes of the header of a frame: number of the page, size of the database, two salts, the checksum.
const HEADER: usize = 24;
const FRAME_HEADER: u64 = HEADER as u64;
/// Bytes of a checksum.
const SUM: usize = 8;
/// The offset of the number of committed frames in the index of a log.
const COMMITTED: usize = 16;

pub(crate) static METHODS: OnceLock<Methods> = OnceLock::new();

/// The default's log methods, with ours in place of some.
pub(crate) fn methods(real: &sqlite3_io_methods) -> sqlite3_io_methods {
    sqlite3_io_methods { xRead: Some(read), ..*real }
}

/// The number of the frame whose page is at this offset, from 1. None if there is no page.
fn frame(amount: usize, offset: u64) -> Option<u64> {
    let page = (512..=65_536).contains(&amount) && amount.is_power_of_two();
    let place = offset.checked_sub(LOG_HEADER + FRAME_HEADER)?;
    let size = amount as u64 + FRAME_HEADER;
    (page && place.is_multiple_of(size)).then(|| place / size + 1)
}

/// `xRead`.
unsafe extern "C" fn read(file: *mut sqlite3_file, buffer: *mut c_void, amount: c_int, offset: i64) -> c_int {
    let (Ok(bytes), Ok(place)) = (usize::try_from(amount), u64::try_from(offset)) else {
        return ffi::SQLITE_IOERR_READ;
    };
    // SAFETY: SQLite calls the methods of an open file with room for `amount` bytes, not shared with anyone.
    let room = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<u8>(), bytes) };
    // SAFETY: the file has these methods.
    let real = unsafe { OpenFile::of(file) }.real;
    // SAFETY: as above.
    let code = unsafe { vfs::read(real, file, room, offset) };
    let (ffi::SQLITE_OK, Some(number)) = (code, frame(bytes, place)) else { return code };
    // SAFETY: as above.
    unsafe { check(file, room, number, place) }
}

/// Checks a page of the log.
///
/// # Safety
/// The file is open and has these methods.
unsafe fn check(file: *mut sqlite3_file, page: &[u8], number: u64, place: u64) -> c_int {
    // SAFETY: guaranteed by the caller.
    let state = unsafe { OpenFile::of(file) };
    let Some(database) = state.database else { return ffi::SQLITE_OK };
    // SAFETY: SQLite closes a log before its database, and calls the methods of both from one thread at a time.
    let database = unsafe { OpenFile::of(database.as_ptr()) };
    let Some(index) = database.index else { return ffi::SQLITE_OK };
    // SAFETY: the index begins with a header of more bytes than this.
    let committed = unsafe { index.add(COMMITTED) };
    // SAFETY: it is mapped as long as the database is open, aligned, and written atomically by SQLite.
    let committed = unsafe { AtomicU32::from_ptr(committed.as_ptr().cast()) }.load(Ordering::Acquire);
    if number > u64::from(committed) {
        return ffi::SQLITE_OK;
    }
    let (mut header, mut before) = ([0; HEADER], [0; SUM]);
    let own = place - FRAME_HEADER;
    // The checksum at the end of the log's header, or that of the previous frame.
    let last = if number == 1 { LOG_HEADER } else { own - page.len() as u64 } - SUM as u64;
    for (room, place) in [(&mut header[..], own), (&mut before[..], last)] {
        let Ok(place) = i64::try_from(place) else { return ffi::SQLITE_IOERR_READ };
        // SAFETY: guaranteed by the caller.
        match unsafe { vfs::read(state.real, file, room, place) } {
            ffi::SQLITE_OK => {}
            ffi::SQLITE_IOERR_SHORT_READ => return ffi::SQLITE_IOERR_DATA,
            code => return code,
        }
    }
    if !is_whole(&header, before, page) {
        return ffi::SQLITE_IOERR_DATA;
    }
    if header.starts_with(&1_u32.to_be_bytes()) {
        database.pages.look(page);
    }
    ffi::SQLITE_OK
}

/// Whether a frame matches its checksum. A log has the byte order of the machine that began it.
fn is_whole(header: &[u8; HEADER], before: [u8; SUM], page: &[u8]) -> bool {
    let (fields, sum) = (&header[..8], &header[HEADER - SUM..]);
    let has = |word: fn([u8; 4]) -> u32| {
        let mut made = [u32::from_be_bytes(half(&before, 0)), u32::from_be_bytes(half(&before, 4))];
        for part in [fields, page] {
            for pair in part.chunks_exact(8) {
                made[0] = made[0].wrapping_add(word(half(pair, 0))).wrapping_add(made[1]);
                made[1] = made[1].wrapping_add(word(half(pair, 4))).wrapping_add(made[0]);
            }
        }
        [half(sum, 0), half(sum, 4)] == made.map(u32::to_be_bytes)
    };
    has(u32::from_le_bytes) || has(u32::from_be_bytes)
}

/// Four bytes of eight.
fn half(pair: &[u8], at: usize) -> [u8; 4] {
    let mut bytes = [0; 4];
    if let Some(part) = pair.get(at..at + 4) {
        bytes.copy_from_slice(part);
    }
    bytes
}

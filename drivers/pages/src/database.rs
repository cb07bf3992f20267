//! The methods of a database file: pages end with a checksum when they are written, and are checked when they are read.
//!
//! A check must not refuse what plain SQLite reads, so it looks only at what SQLite relies on:
//!
//! * The header is read without a lock, before the log; it may be half written, by a power loss or by a process that is
//!   moving the log into the file. SQLite takes the page size from it and reads it again later, as part of the first
//!   page.
//! * The first page is read before SQLite knows of a log that has just been created. SQLite learns of the log from that
//!   page, and reads it again through the log. Not if the file is opened as immutable: then it is read once, and
//!   checked.
//! * A header without checksums is believed only if the first page of the file has none: a changed byte in it would
//!   turn off the checks of all pages. What is read after such a header is damage, unless the log has the first page.
//! * Every other read is of a page that no process is writing: a page that is being written has a newer version in the
//!   log, which is read instead, or is locked. So the file does not end within it either.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;

use rusqlite::ffi::{self, sqlite3_file, sqlite3_io_methods};

use crate::sum::{self, HEADER, LARGEST};
use crate::vfs::{self, Methods, OpenFile};

pub(crate) static METHODS: OnceLock<Methods> = OnceLock::new();

/// The default's database methods, with ours in place of some.
pub(crate) fn methods(real: &sqlite3_io_methods) -> sqlite3_io_methods {
    sqlite3_io_methods {
        xRead: Some(read),
        xWrite: Some(write),
        xShmMap: Some(map),
        xShmUnmap: Some(unmap),
        ..*real
    }
}

/// What is known of a database's pages, from its first page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pages {
    /// No whole header was seen. Pages that are read must have checksums.
    Unknown,
    /// There is no page yet. Pages that are written must have room for a checksum.
    New,
    /// All have checksums; the page size.
    Sealed(usize),
    /// None has a checksum.
    Plain,
    /// The first page has a checksum, but its header shows none, or another size of pages.
    Denied,
}

impl Pages {
    /// Takes note of the first bytes of the first page.
    pub(crate) fn look(&mut self, bytes: &[u8]) {
        let Some(header) = bytes.first_chunk::<HEADER>().filter(|header| sum::is_header(header.as_slice()))
        else {
            return;
        };
        match (sum::page_size(header), *self) {
            (Some(size), _) => *self = Self::Sealed(size),
            // Checksums never go away: a header without them is damaged.
            (None, Self::Sealed(_) | Self::Denied) => {}
            (None, _) => *self = Self::Plain,
        }
    }
}

/// The position of a whole page: its number, and its length. None if it is not a whole page.
fn whole(amount: usize, offset: u64) -> Option<u64> {
    let page = amount as u64;
    (sum::is_page(amount) && offset.is_multiple_of(page)).then(|| offset / page)
}

/// `xRead`.
unsafe extern "C" fn read(file: *mut sqlite3_file, buffer: *mut c_void, amount: c_int, offset: i64) -> c_int {
    let (Ok(bytes), Ok(place)) = (usize::try_from(amount), u64::try_from(offset)) else {
        return ffi::SQLITE_IOERR_READ;
    };
    // SAFETY: SQLite calls the methods of an open file with room for `amount` bytes, not shared with anyone.
    let room = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<u8>(), bytes) };
    // SAFETY: the file has these methods.
    let state = unsafe { OpenFile::of(file) };
    if let Pages::Sealed(size) = state.pages
        && place >= size as u64
        && bytes < size
    {
        // SAFETY: as above.
        return unsafe { read_part(state.real, file, room, place, size) };
    }
    // SAFETY: as above.
    let code = unsafe { vfs::read(state.real, file, room, offset) };
    if place == 0 && code == ffi::SQLITE_OK {
        let before = state.pages;
        state.pages.look(room);
        if (before, state.pages) == (Pages::Unknown, Pages::Plain) {
            // SAFETY: as above.
            match unsafe { is_denied(file, state.real) } {
                Ok(true) => state.pages = Pages::Denied,
                Ok(false) => {}
                Err(failed) => return failed,
            }
        }
    }
    if state.pages == Pages::Denied && matches!(code, ffi::SQLITE_OK | ffi::SQLITE_IOERR_SHORT_READ) {
        // The header, or the first page before the log: both are read again.
        let is_header = place < HEADER as u64 && bytes <= HEADER;
        let is_before_log = place == 0 && !state.through_log && sum::is_logged(room);
        return if is_header || is_before_log { code } else { ffi::SQLITE_IOERR_DATA };
    }
    if place == 0 && code == ffi::SQLITE_IOERR_SHORT_READ && state.pages == Pages::Unknown {
        // SAFETY: as above.
        return match unsafe { length(file, state.real) } {
            Ok(0) => {
                state.pages = Pages::New;
                code
            }
            Ok(_) => code,
            Err(failed) => failed,
        };
    }
    if state.pages == Pages::Plain {
        return code;
    }
    // A file that ends within a page: the rest is zeros by now, and SQLite would take them for what the page holds.
    let is_cut = code == ffi::SQLITE_IOERR_SHORT_READ
        // SAFETY: as above.
        && match unsafe { length(file, state.real) } {
            Ok(length) => u64::try_from(length).is_ok_and(|length| length > place),
            Err(failed) => return failed,
        };
    if code != ffi::SQLITE_OK && !is_cut {
        return code;
    }
    match whole(bytes, place) {
        Some(number) if sum::is_whole(room, number) => code,
        // The first page, read to see whether there is a log: see the module documentation.
        Some(0) if !state.through_log && sum::is_logged(room) => code,
        // SQLite itself refuses it: this is not a database.
        Some(0) if !sum::is_header(room) => code,
        // SQLite reads with another page size before it has seen the header, and then once more.
        Some(0) if matches!(state.pages, Pages::Sealed(size) if size != bytes) => code,
        Some(_) => ffi::SQLITE_IOERR_DATA,
        // A part of the first page: see the module documentation.
        None => code,
    }
}

/// Reads a part of a page, as SQLite does for long values. The checksum covers the whole page.
///
/// # Safety
/// The file is open, and these are the default's methods of it.
unsafe fn read_part(
    real: &sqlite3_io_methods,
    file: *mut sqlite3_file,
    room: &mut [u8],
    place: u64,
    size: usize,
) -> c_int {
    let mut page = [0; LARGEST];
    let Some(page) = page.get_mut(..size) else { return ffi::SQLITE_IOERR_READ };
    let number = place / size as u64;
    let (Ok(offset), Ok(start)) = (i64::try_from(number * size as u64), usize::try_from(place % size as u64))
    else {
        return ffi::SQLITE_IOERR_READ;
    };
    // SAFETY: guaranteed by the caller.
    match unsafe { vfs::read(real, file, page, offset) } {
        ffi::SQLITE_OK if sum::is_whole(page, number) => {
            let Some(part) = page.get(start..start + room.len()) else { return ffi::SQLITE_IOERR_READ };
            room.copy_from_slice(part);
            ffi::SQLITE_OK
        }
        ffi::SQLITE_OK | ffi::SQLITE_IOERR_SHORT_READ => ffi::SQLITE_IOERR_DATA,
        code => code,
    }
}

/// Whether the first page has a checksum, though its header says that it has none.
///
/// # Safety
/// The file is open, and these are the default's methods of it.
unsafe fn is_denied(file: *mut sqlite3_file, real: &sqlite3_io_methods) -> Result<bool, c_int> {
    let mut room = [0; LARGEST];
    for size in sum::PAGES {
        let Some(page) = room.get_mut(..size) else { return Err(ffi::SQLITE_IOERR_READ) };
        // SAFETY: guaranteed by the caller.
        match unsafe { vfs::read(real, file, page, 0) } {
            ffi::SQLITE_OK if sum::is_whole_but_for_its_header(page) => return Ok(true),
            ffi::SQLITE_OK | ffi::SQLITE_IOERR_SHORT_READ => {}
            code => return Err(code),
        }
    }
    Ok(false)
}

/// The length of a file.
///
/// # Safety
/// The file is open, and these are its methods.
unsafe fn length(file: *mut sqlite3_file, real: &sqlite3_io_methods) -> Result<i64, c_int> {
    let mut bytes = 0;
    let Some(size) = real.xFileSize else { return Err(ffi::SQLITE_IOERR_FSTAT) };
    // SAFETY: guaranteed by the caller.
    match unsafe { size(file, &raw mut bytes) } {
        ffi::SQLITE_OK => Ok(bytes),
        code => Err(code),
    }
}

/// `xWrite`.
unsafe extern "C" fn write(
    file: *mut sqlite3_file,
    buffer: *const c_void,
    amount: c_int,
    offset: i64,
) -> c_int {
    let (Ok(bytes), Ok(place)) = (usize::try_from(amount), u64::try_from(offset)) else {
        return ffi::SQLITE_IOERR_WRITE;
    };
    // SAFETY: SQLite calls the methods of an open file with this many bytes, which do not change meanwhile.
    let given = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), bytes) };
    // SAFETY: the file has these methods.
    let state = unsafe { OpenFile::of(file) };
    let Some(write) = state.real.xWrite else { return ffi::SQLITE_IOERR_WRITE };
    if place == 0 && state.pages != Pages::New {
        state.pages.look(given);
    }
    if state.pages == Pages::Plain {
        // SAFETY: the arguments are SQLite's own.
        return unsafe { write(file, buffer, amount, offset) };
    }
    // SQLite writes whole pages.
    let Some(number) = whole(bytes, place) else { return ffi::SQLITE_IOERR_WRITE };
    if number == 0 {
        if given.first_chunk().and_then(sum::page_size) != Some(bytes) {
            // No space was reserved: the checksum would overwrite something else.
            return ffi::SQLITE_IOERR_WRITE;
        }
        state.pages = Pages::Sealed(bytes);
    }
    // The page belongs to SQLite's cache and must not be changed.
    let mut room = [0; LARGEST];
    let Some(page) = room.get_mut(..bytes) else { return ffi::SQLITE_IOERR_WRITE };
    page.copy_from_slice(given);
    sum::seal(page, number);
    // SAFETY: the file is open and the page is as large as it says.
    unsafe { write(file, page.as_ptr().cast(), amount, offset) }
}

/// `xShmMap`: the connection begins to read through the log.
unsafe extern "C" fn map(
    file: *mut sqlite3_file,
    region: c_int,
    size: c_int,
    extend: c_int,
    out: *mut *mut c_void,
) -> c_int {
    // SAFETY: the file has these methods.
    let state = unsafe { OpenFile::of(file) };
    let Some(map) = state.real.xShmMap else { return ffi::SQLITE_IOERR_SHMMAP };
    // SAFETY: the arguments are SQLite's own.
    let code = unsafe { map(file, region, size, extend, out) };
    state.through_log = true;
    if region == 0 && matches!(code, ffi::SQLITE_OK | ffi::SQLITE_READONLY) {
        // SAFETY: the default's method has just written the pointer.
        state.index = NonNull::new(unsafe { *out }.cast());
    }
    code
}

/// `xShmUnmap`: the connection no longer reads through the log.
unsafe extern "C" fn unmap(file: *mut sqlite3_file, delete: c_int) -> c_int {
    // SAFETY: the file has these methods.
    let state = unsafe { OpenFile::of(file) };
    (state.through_log, state.index) = (false, None);
    let Some(unmap) = state.real.xShmUnmap else { return ffi::SQLITE_IOERR_SHMMAP };
    // SAFETY: the arguments are SQLite's own.
    unsafe { unmap(file, delete) }
}

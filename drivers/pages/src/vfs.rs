//! The VFS: SQLite's own, with two methods of database files exchanged.
//!
//! A file of the default VFS begins with a pointer to its methods. After it has opened a database with checksums, that pointer
//! is set to a copy of the table in which `xRead` and `xWrite` are ours; everything else (locks, shared memory, logs and
//! journals) is the default's and never passes here.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use rusqlite::ffi::{self, sqlite3_file, sqlite3_io_methods, sqlite3_vfs};

use crate::sum::{self, HEADER, LARGEST};

const NAME: &CStr = c"threadkeep-pages";

/// The default VFS.
struct Default(*mut sqlite3_vfs);

// SAFETY: the default VFS stays registered as long as the process runs, and is made to be used by any thread.
unsafe impl Send for Default {}
// SAFETY: as above.
unsafe impl Sync for Default {}

static DEFAULT: OnceLock<Default> = OnceLock::new();

/// The methods of the default VFS' files, and the same with ours.
struct Methods {
    real: *const sqlite3_io_methods,
    read: ReadFn,
    write: WriteFn,
    ours: sqlite3_io_methods,
}

type ReadFn = unsafe extern "C" fn(*mut sqlite3_file, *mut c_void, c_int, i64) -> c_int;
type WriteFn = unsafe extern "C" fn(*mut sqlite3_file, *const c_void, c_int, i64) -> c_int;

// SAFETY: the table behind `real` is a constant of SQLite's, and only its address is looked at.
unsafe impl Send for Methods {}
// SAFETY: as above.
unsafe impl Sync for Methods {}

static METHODS: OnceLock<Methods> = OnceLock::new();

/// Registers the VFS, once in a process. Answers its name.
///
/// # Errors
/// `SQLITE_CANTOPEN` if there is no default VFS; what SQLite says if it does not take ours.
pub(crate) fn register() -> rusqlite::Result<&'static CStr> {
    static DONE: OnceLock<c_int> = OnceLock::new();
    match *DONE.get_or_init(add) {
        ffi::SQLITE_OK => Ok(NAME),
        code => Err(failure(code)),
    }
}

fn add() -> c_int {
    // SAFETY: may be called at any time; null asks for the default VFS.
    let real = unsafe { ffi::sqlite3_vfs_find(std::ptr::null()) };
    // SAFETY: SQLite answers null or a VFS that stays where it is.
    let Some(copy) = (unsafe { real.as_ref() }) else { return ffi::SQLITE_CANTOPEN };
    let ours = sqlite3_vfs { pNext: null_mut(), zName: NAME.as_ptr(), xOpen: Some(open), ..*copy };
    DEFAULT.get_or_init(|| Default(real));
    // SAFETY: the VFS is never freed, and from here on only SQLite writes to it.
    unsafe { ffi::sqlite3_vfs_register(Box::into_raw(Box::new(ours)), 0) }
}

/// A result code as an error.
pub(crate) fn failure(code: c_int) -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)
}

/// Whether a file has our methods.
///
/// # Safety
/// The pointer is null or that of a file that stays open during the call.
pub(crate) unsafe fn is_ours(file: *mut sqlite3_file) -> bool {
    // SAFETY: the file is open.
    let table = unsafe { file.as_ref() }.map(|file| file.pMethods);
    METHODS.get().is_some_and(|methods| table == Some(&raw const methods.ours))
}

/// `xOpen`: opens as the default does, and exchanges the methods of a database with checksums.
unsafe extern "C" fn open(
    _: *mut sqlite3_vfs,
    name: ffi::sqlite3_filename,
    file: *mut sqlite3_file,
    flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    let Some(&Default(vfs)) = DEFAULT.get() else { return ffi::SQLITE_CANTOPEN };
    // SAFETY: it was there when we were registered, and stays.
    let Some(real) = (unsafe { (*vfs).xOpen }) else { return ffi::SQLITE_CANTOPEN };
    // SAFETY: the arguments are SQLite's own; the file has the size that the default asks for, as our VFS is its copy.
    let code = unsafe { real(vfs, name, file, flags, out_flags) };
    if code != ffi::SQLITE_OK || flags & ffi::SQLITE_OPEN_MAIN_DB == 0 {
        return code;
    }
    // SAFETY: the file was just opened and nobody else has it.
    match unsafe { exchange(file) } {
        Ok(()) => ffi::SQLITE_OK,
        Err(code) => {
            // SAFETY: as above; SQLite does not close a file that failed to open unless it has methods.
            unsafe { close(file) };
            code
        }
    }
}

/// Exchanges the methods of an open database file, if its pages have checksums.
///
/// # Safety
/// The file is open, has the methods of the default VFS, and nobody else uses it.
unsafe fn exchange(file: *mut sqlite3_file) -> Result<(), c_int> {
    // SAFETY: the file is open.
    let table = unsafe { (*file).pMethods };
    // SAFETY: an open file has methods, and they outlive it.
    let real = unsafe { table.as_ref() }.ok_or(ffi::SQLITE_CANTOPEN)?;
    let (Some(read_real), Some(write_real), Some(size)) = (real.xRead, real.xWrite, real.xFileSize) else {
        return Err(ffi::SQLITE_CANTOPEN);
    };
    let mut header = [0; HEADER];
    // SAFETY: the file is open, and there is room for so many bytes.
    let code = unsafe { read_real(file, header.as_mut_ptr().cast(), length(&header), 0) };
    let sealed = match code {
        ffi::SQLITE_OK => sum::page_size(&header).is_some(),
        ffi::SQLITE_IOERR_SHORT_READ => {
            let mut bytes = 0;
            // SAFETY: the file is open.
            let code = unsafe { size(file, &raw mut bytes) };
            if code != ffi::SQLITE_OK {
                return Err(code);
            }
            bytes == 0
        }
        code => return Err(code),
    };
    if !sealed {
        return Ok(());
    }
    let methods = METHODS.get_or_init(|| Methods {
        real: table,
        read: read_real,
        write: write_real,
        // Version 2 has no memory mapping, which would pass us by.
        ours: sqlite3_io_methods {
            iVersion: real.iVersion.min(2),
            xRead: Some(read),
            xWrite: Some(write),
            xFetch: None,
            xUnfetch: None,
            ..*real
        },
    });
    // A file system with another way of locking has another table; there is none on the systems that we know.
    if !std::ptr::eq(methods.real, table) {
        return Err(ffi::SQLITE_CANTOPEN);
    }
    // SAFETY: the file is open; the table stays for good.
    unsafe { (*file).pMethods = &raw const methods.ours };
    Ok(())
}

/// Closes a file of the default VFS.
///
/// # Safety
/// The file is open and is not used any more.
unsafe fn close(file: *mut sqlite3_file) {
    // SAFETY: the file is open.
    let table = unsafe { (*file).pMethods };
    // SAFETY: an open file has methods.
    if let Some(close) = unsafe { table.as_ref() }.and_then(|methods| methods.xClose) {
        // SAFETY: the file is open.
        unsafe { close(file) };
    }
    // SAFETY: the memory is still there; null tells SQLite that nothing is open.
    unsafe { (*file).pMethods = std::ptr::null() };
}

/// The length of a small buffer as SQLite counts.
fn length(buffer: &[u8]) -> c_int {
    c_int::try_from(buffer.len()).unwrap_or_default()
}

/// Where a whole page is: its number and its length. None if it is none.
fn whole(amount: c_int, offset: i64) -> Option<(u64, usize)> {
    let (bytes, offset) = (usize::try_from(amount).ok()?, u64::try_from(offset).ok()?);
    let page = bytes as u64;
    (sum::is_page(bytes) && offset.is_multiple_of(page)).then(|| (offset / page, bytes))
}

/// `xRead` of a database with checksums.
unsafe extern "C" fn read(file: *mut sqlite3_file, buffer: *mut c_void, amount: c_int, offset: i64) -> c_int {
    let Some(methods) = METHODS.get() else { return ffi::SQLITE_IOERR_READ };
    let Some((number, bytes)) = whole(amount, offset) else {
        // SAFETY: the arguments are SQLite's own.
        return unsafe { read_part(methods, file, buffer, amount, offset) };
    };
    // SAFETY: the arguments are SQLite's own.
    let code = unsafe { (methods.read)(file, buffer, amount, offset) };
    if code != ffi::SQLITE_OK {
        return code;
    }
    // SAFETY: the default's method has just filled so many bytes, and SQLite waits for us.
    let page = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), bytes) };
    if sum::is_whole(page, number) { ffi::SQLITE_OK } else { ffi::SQLITE_IOERR_DATA }
}

/// Reads a part of a page: the header, before SQLite knows how large a page is. The checksum is that of the page.
///
/// # Safety
/// The file is open and there is room for `amount` bytes.
unsafe fn read_part(
    methods: &Methods,
    file: *mut sqlite3_file,
    buffer: *mut c_void,
    amount: c_int,
    offset: i64,
) -> c_int {
    let mut header = [0; HEADER];
    // SAFETY: the file is open, and there is room for so many bytes.
    let code = unsafe { (methods.read)(file, header.as_mut_ptr().cast(), length(&header), 0) };
    if code == ffi::SQLITE_IOERR_SHORT_READ {
        // There is no page yet: as the default answers it.
        // SAFETY: the arguments are SQLite's own.
        return unsafe { (methods.read)(file, buffer, amount, offset) };
    }
    let place = usize::try_from(amount).ok().zip(usize::try_from(offset).ok());
    let (ffi::SQLITE_OK, Some((asked, offset))) = (code, place) else { return code };
    let Some(size) = sum::page_size(&header) else { return ffi::SQLITE_IOERR_DATA };
    let (number, start) = (offset / size, offset % size);
    let mut room = [0; LARGEST];
    let (Some(page), Ok(first)) = (room.get_mut(..size), i64::try_from(offset - start)) else {
        return ffi::SQLITE_IOERR_READ;
    };
    // SAFETY: the file is open, and there is room for a page.
    let code = unsafe { (methods.read)(file, page.as_mut_ptr().cast(), length(page), first) };
    let Some(part) = page.get(start..start + asked) else { return ffi::SQLITE_IOERR_READ };
    match code {
        ffi::SQLITE_OK if sum::is_whole(page, number as u64) => {
            // SAFETY: SQLite has room for `amount` bytes, and the page is memory of our own.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), buffer.cast(), asked) };
            ffi::SQLITE_OK
        }
        ffi::SQLITE_OK | ffi::SQLITE_IOERR_SHORT_READ => ffi::SQLITE_IOERR_DATA,
        code => code,
    }
}

/// `xWrite` of a database with checksums.
unsafe extern "C" fn write(
    file: *mut sqlite3_file,
    buffer: *const c_void,
    amount: c_int,
    offset: i64,
) -> c_int {
    let mut room = [0; LARGEST];
    let (Some(methods), Some((number, bytes))) = (METHODS.get(), whole(amount, offset)) else {
        // SQLite writes whole pages, and they have a size of ours, or the file would not have our methods.
        return ffi::SQLITE_IOERR_WRITE;
    };
    let Some(page) = room.get_mut(..bytes) else { return ffi::SQLITE_IOERR_WRITE };
    // The caller's page is its cache's: it is not ours to change.
    // SAFETY: SQLite hands over a page, and ours is memory of our own.
    unsafe { std::ptr::copy_nonoverlapping(buffer.cast::<u8>(), page.as_mut_ptr(), bytes) };
    if number == 0 && page.first_chunk().and_then(sum::page_size) != Some(bytes) {
        // No room was reserved: the checksum would stand in the place of something else.
        return ffi::SQLITE_IOERR_WRITE;
    }
    sum::seal(page, number);
    // SAFETY: the file is open and the page is as large as it says.
    unsafe { (methods.write)(file, page.as_ptr().cast(), amount, offset) }
}

//! The VFS: SQLite's own, with some methods of database and log files replaced.
//!
//! A file of the default VFS begins with a pointer to its methods. After it has opened a database or its write-ahead
//! log, that pointer is set to a copy of the table in which a few methods are ours; everything else (locks, journals,
//! flushes) is the default's. Our state of a file is kept after the default's own part of it: see [`OpenFile`].

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{NonNull, null, null_mut};
use std::sync::OnceLock;

use rusqlite::ffi::{self, sqlite3_file, sqlite3_io_methods, sqlite3_vfs};

use crate::{database, log};

const NAME: &CStr = c"threadkeep-pages";

/// The default VFS.
struct Default(*mut sqlite3_vfs);

// SAFETY: the default VFS stays registered as long as the process runs, and may be used by any thread.
unsafe impl Send for Default {}
// SAFETY: as above.
unsafe impl Sync for Default {}

static DEFAULT: OnceLock<Default> = OnceLock::new();

/// A method table of the default VFS, and its copy with our methods.
pub(crate) struct Methods {
    real: *const sqlite3_io_methods,
    ours: sqlite3_io_methods,
}

// SAFETY: the table that `real` points to is a constant in SQLite.
unsafe impl Send for Methods {}
// SAFETY: as above.
unsafe impl Sync for Methods {}

/// Our state of an open file. It follows the default's file in memory.
pub(crate) struct OpenFile {
    /// The methods of the default VFS.
    pub(crate) real: &'static sqlite3_io_methods,
    /// Of a database: what is known of its pages.
    pub(crate) pages: database::Pages,
    /// Of a database: whether this connection reads through a log, so that every read is of a snapshot that it has
    /// locked. From the start if the file is opened as immutable: SQLite takes it for one that nobody writes, and looks
    /// for no log.
    pub(crate) through_log: bool,
    /// Of a database: the index of its log in shared memory, once it is mapped.
    pub(crate) index: Option<NonNull<u8>>,
    /// Of a log: its database.
    pub(crate) database: Option<NonNull<sqlite3_file>>,
}

impl OpenFile {
    /// Our state of a file.
    ///
    /// # Safety
    /// The file was opened by [`open`] and has methods of ours. Nothing else uses the reference: SQLite calls the
    /// methods of a file from one thread at a time.
    pub(crate) unsafe fn of<'a>(file: *mut sqlite3_file) -> &'a mut Self {
        // SAFETY: our VFS asked SQLite for this much more memory than the default.
        let place = unsafe { file.byte_add(offset()) };
        // SAFETY: `open` wrote it before it replaced the methods.
        unsafe { &mut *place.cast() }
    }
}

/// The offset of a file's [`OpenFile`].
fn offset() -> usize {
    let own = DEFAULT.get().map_or(0, |&Default(vfs)| {
        // SAFETY: the default VFS existed when we registered, and stays.
        usize::try_from(unsafe { (*vfs).szOsFile }).unwrap_or_default()
    });
    own.next_multiple_of(align_of::<OpenFile>().max(8))
}

/// Registers the VFS, once per process. Returns its name.
///
/// # Errors
/// `SQLITE_CANTOPEN` if there is no default VFS; SQLite's error if it does not accept ours.
pub(crate) fn register() -> rusqlite::Result<&'static CStr> {
    static DONE: OnceLock<c_int> = OnceLock::new();
    match *DONE.get_or_init(add) {
        ffi::SQLITE_OK => Ok(NAME),
        code => Err(failure(code)),
    }
}

fn add() -> c_int {
    // SAFETY: may be called at any time; null asks for the default VFS.
    let real = unsafe { ffi::sqlite3_vfs_find(null()) };
    // SAFETY: SQLite returns null or a VFS that stays where it is.
    let Some(copy) = (unsafe { real.as_ref() }) else { return ffi::SQLITE_CANTOPEN };
    DEFAULT.get_or_init(|| Default(real));
    let Ok(size) = c_int::try_from(offset() + size_of::<OpenFile>()) else { return ffi::SQLITE_CANTOPEN };
    let ours =
        sqlite3_vfs { pNext: null_mut(), zName: NAME.as_ptr(), szOsFile: size, xOpen: Some(open), ..*copy };
    // SAFETY: the VFS is never freed, and from here on only SQLite writes to it.
    unsafe { ffi::sqlite3_vfs_register(Box::into_raw(Box::new(ours)), 0) }
}

/// A result code as an error.
pub(crate) fn failure(code: c_int) -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)
}

/// What is known of a database file's pages; none if [`open`] did not open it.
///
/// # Safety
/// The pointer is null or that of a file that stays open during the call.
pub(crate) unsafe fn pages_of(file: *mut sqlite3_file) -> Option<database::Pages> {
    // SAFETY: the file is open.
    let table = unsafe { file.as_ref() }?.pMethods;
    let ours = database::METHODS.get().is_some_and(|methods| std::ptr::eq(table, &raw const methods.ours));
    // SAFETY: it has our methods.
    ours.then(|| unsafe { OpenFile::of(file) }.pages)
}

/// `xOpen`: opens as the default does, and replaces the methods of a database or a log.
unsafe extern "C" fn open(
    _: *mut sqlite3_vfs,
    name: ffi::sqlite3_filename,
    file: *mut sqlite3_file,
    flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    let Some(&Default(vfs)) = DEFAULT.get() else { return ffi::SQLITE_CANTOPEN };
    // SAFETY: it existed when we registered, and stays.
    let Some(real) = (unsafe { (*vfs).xOpen }) else { return ffi::SQLITE_CANTOPEN };
    // SAFETY: the arguments are SQLite's own; the file is larger than the default asks for.
    let code = unsafe { real(vfs, name, file, flags, out_flags) };
    if code != ffi::SQLITE_OK {
        return code;
    }
    let exchanged = if flags & ffi::SQLITE_OPEN_MAIN_DB != 0 {
        // SAFETY: the name is that of a database, as SQLite gives it to `xOpen`.
        let immutable = unsafe { ffi::sqlite3_uri_boolean(name, c"immutable".as_ptr(), 0) } != 0;
        // SAFETY: the file was just opened and is not shared yet.
        unsafe { exchange(file, None, immutable, &database::METHODS, database::methods) }
    } else if flags & ffi::SQLITE_OPEN_WAL != 0 {
        // SAFETY: the name is that of a log, as SQLite gives it to `xOpen`.
        let database = NonNull::new(unsafe { ffi::sqlite3_database_file_object(name) });
        // SAFETY: the file was just opened and is not shared yet.
        unsafe { exchange(file, database, false, &log::METHODS, log::methods) }
    } else {
        Some(())
    };
    if exchanged.is_none() {
        // SAFETY: as above; SQLite does not close a file that failed to open unless it has methods.
        unsafe { close(file) };
        return ffi::SQLITE_CANTOPEN;
    }
    ffi::SQLITE_OK
}

/// Replaces the methods of an open file. None if that is impossible.
///
/// # Safety
/// The file is open, has the methods of the default VFS, and nothing else uses it.
unsafe fn exchange(
    file: *mut sqlite3_file,
    database: Option<NonNull<sqlite3_file>>,
    through_log: bool,
    methods: &'static OnceLock<Methods>,
    ours: impl FnOnce(&sqlite3_io_methods) -> sqlite3_io_methods,
) -> Option<()> {
    // SAFETY: the file is open.
    let table = unsafe { (*file).pMethods };
    // SAFETY: an open file has methods; the default's tables are constants.
    let real: &'static sqlite3_io_methods = unsafe { table.as_ref() }?;
    // Version 2 has no memory mapping, which would bypass us.
    let ours =
        || sqlite3_io_methods { iVersion: real.iVersion.min(2), xFetch: None, xUnfetch: None, ..ours(real) };
    let methods = methods.get_or_init(|| Methods { real: table, ours: ours() });
    // A file system with another locking style has another table; there is none on the systems that we know.
    if !std::ptr::eq(methods.real, table) {
        return None;
    }
    let state = OpenFile { real, pages: database::Pages::Unknown, through_log, index: None, database };
    // SAFETY: our VFS asked SQLite for this much more memory than the default.
    let place = unsafe { file.byte_add(offset()) };
    // SAFETY: the memory is ours, large enough and aligned.
    unsafe { place.cast::<OpenFile>().write(state) };
    // SAFETY: the file is open; the table stays for good.
    unsafe { (*file).pMethods = &raw const methods.ours };
    Some(())
}

/// Closes a file of the default VFS.
///
/// # Safety
/// The file is open and not used afterwards.
unsafe fn close(file: *mut sqlite3_file) {
    // SAFETY: the file is open.
    let table = unsafe { (*file).pMethods };
    // SAFETY: an open file has methods.
    if let Some(close) = unsafe { table.as_ref() }.and_then(|methods| methods.xClose) {
        // SAFETY: the file is open.
        unsafe { close(file) };
    }
    // SAFETY: the memory is still there; null tells SQLite that nothing is open.
    unsafe { (*file).pMethods = null() };
}

/// Reads with the default's method.
///
/// # Safety
/// The file is open, and these are its methods.
pub(crate) unsafe fn read(
    real: &sqlite3_io_methods,
    file: *mut sqlite3_file,
    room: &mut [u8],
    offset: i64,
) -> c_int {
    let (Some(method), Ok(amount)) = (real.xRead, c_int::try_from(room.len())) else {
        return ffi::SQLITE_IOERR_READ;
    };
    // SAFETY: the file is open, and there is room for this many bytes.
    unsafe { method(file, room.as_mut_ptr().cast::<c_void>(), amount, offset) }
}

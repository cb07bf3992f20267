//! A SQLite VFS below the driver's own: it records operations on the files of a directory, and makes operations fail.
//!
//! [`install`] makes it the process's default VFS, so it must run before anything opens a database. The driver's page
//! VFS wraps the default one, so it is on top of this one. The previous default VFS opens the files; then the four
//! methods that change a file are replaced by ours. Locks, shared memory and reads do not pass through here.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rusqlite::ffi::{self, sqlite3_file, sqlite3_io_methods, sqlite3_vfs};

use crate::trace::{Recorder, Verdict};

const NAME: &CStr = c"threadkeep-torture";

/// The VFS that was the default before ours.
struct Real(*mut sqlite3_vfs);

// SAFETY: a registered VFS stays where it is as long as the process runs, and any thread may use it.
unsafe impl Send for Real {}
// SAFETY: as above.
unsafe impl Sync for Real {}

static REAL: OnceLock<Real> = OnceLock::new();

/// An open file.
#[derive(Clone)]
struct Open {
    real: &'static sqlite3_io_methods,
    /// The recorder of its directory, and its number there.
    recorded: Option<(Arc<Recorder>, usize)>,
}

#[derive(Default)]
struct Shared {
    recorders: HashMap<PathBuf, Arc<Recorder>>,
    /// By the address of SQLite's structure.
    files: HashMap<usize, Open>,
    /// Our table for each table of the real VFS, by its address.
    tables: HashMap<usize, &'static sqlite3_io_methods>,
}

// SAFETY: the tables hold function pointers and are never written to.
unsafe impl Send for Shared {}

fn shared() -> MutexGuard<'static, Shared> {
    static SHARED: OnceLock<Mutex<Shared>> = OnceLock::new();
    SHARED.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the VFS the default of this process. Does nothing the second time.
///
/// # Errors
/// If SQLite has no default VFS or does not accept ours.
pub fn install() -> anyhow::Result<()> {
    static DONE: OnceLock<c_int> = OnceLock::new();
    let code = *DONE.get_or_init(|| {
        // SAFETY: may be called at any time; null asks for the default VFS.
        let real = unsafe { ffi::sqlite3_vfs_find(std::ptr::null()) };
        // SAFETY: SQLite returns null or a VFS that stays where it is.
        let Some(copy) = (unsafe { real.as_ref() }) else { return ffi::SQLITE_CANTOPEN };
        REAL.get_or_init(|| Real(real));
        let ours = sqlite3_vfs {
            pNext: null_mut(),
            zName: NAME.as_ptr(),
            xOpen: Some(open),
            xDelete: Some(delete),
            ..*copy
        };
        // SAFETY: the VFS is never freed, and from here on only SQLite writes to it.
        unsafe { ffi::sqlite3_vfs_register(Box::into_raw(Box::new(ours)), 1) }
    });
    anyhow::ensure!(code == ffi::SQLITE_OK, "the VFS cannot be registered: code {code}");
    Ok(())
}

/// Records what is written to the files of `directory` until the result is dropped. Nothing there is flushed.
///
/// # Errors
/// If the directory does not exist, and as [`install`].
pub fn record(directory: &Path, recorder: Arc<Recorder>) -> anyhow::Result<Recording> {
    install()?;
    let directory = directory.canonicalize()?;
    shared().recorders.insert(directory.clone(), recorder);
    Ok(Recording { directory })
}

/// The recording of a directory.
#[derive(Debug)]
pub struct Recording {
    directory: PathBuf,
}

impl Drop for Recording {
    fn drop(&mut self) {
        shared().recorders.remove(&self.directory);
    }
}

/// The recorder of the file with this name, and the name without the directory.
///
/// # Safety
/// `name` is null or a C string.
unsafe fn recorder(name: *const c_char) -> Option<(Arc<Recorder>, String)> {
    if name.is_null() {
        return None;
    }
    // SAFETY: guaranteed by the caller.
    let path = Path::new(unsafe { CStr::from_ptr(name) }.to_str().ok()?);
    let recorder = shared().recorders.get(path.parent()?)?.clone();
    Some((recorder, path.file_name()?.to_str()?.to_owned()))
}

/// `xOpen`.
unsafe extern "C" fn open(
    _: *mut sqlite3_vfs,
    name: ffi::sqlite3_filename,
    file: *mut sqlite3_file,
    flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    let Some(&Real(vfs)) = REAL.get() else { return ffi::SQLITE_CANTOPEN };
    // SAFETY: it was registered before ours, and stays.
    let Some(real) = (unsafe { (*vfs).xOpen }) else { return ffi::SQLITE_CANTOPEN };
    // SAFETY: the arguments are SQLite's own, and the structure has the size that the real VFS asks for.
    let code = unsafe { real(vfs, name, file, flags, out_flags) };
    if code != ffi::SQLITE_OK {
        return code;
    }
    // SAFETY: SQLite passes null or a C string.
    let named = unsafe { recorder(name) };
    let journal = ffi::SQLITE_OPEN_WAL | ffi::SQLITE_OPEN_MAIN_JOURNAL | ffi::SQLITE_OPEN_SUPER_JOURNAL;
    let recorded = named.map(|(recorder, name)| {
        let number = recorder.open(&name, flags & journal != 0);
        (recorder, number)
    });
    // SAFETY: the file is open.
    let table = unsafe { (*file).pMethods };
    // SAFETY: the methods of an open file are a constant of the real VFS.
    let Some(methods) = (unsafe { table.as_ref() }) else { return ffi::SQLITE_CANTOPEN };
    let mut shared = shared();
    let ours: &'static sqlite3_io_methods = shared.tables.entry(table as usize).or_insert_with(|| {
        Box::leak(Box::new(sqlite3_io_methods {
            // Version 2 has no memory mapping, which would bypass us.
            iVersion: methods.iVersion.min(2),
            xClose: Some(close),
            xWrite: Some(write),
            xTruncate: Some(truncate),
            xSync: Some(sync),
            xFetch: None,
            xUnfetch: None,
            ..*methods
        }))
    });
    shared.files.insert(file as usize, Open { real: methods, recorded });
    // SAFETY: the file is not shared yet, and the table stays for good.
    unsafe { (*file).pMethods = ours };
    ffi::SQLITE_OK
}

fn find(file: *mut sqlite3_file) -> Option<Open> {
    shared().files.get(&(file as usize)).cloned()
}

/// `xClose`.
unsafe extern "C" fn close(file: *mut sqlite3_file) -> c_int {
    let Some(open) = shared().files.remove(&(file as usize)) else { return ffi::SQLITE_IOERR };
    let Some(close) = open.real.xClose else { return ffi::SQLITE_IOERR };
    // SAFETY: the file is open and of the real VFS.
    unsafe { close(file) }
}

/// `xWrite`.
unsafe extern "C" fn write(file: *mut sqlite3_file, buffer: *const c_void, amount: c_int, at: i64) -> c_int {
    let Some(open) = find(file) else { return ffi::SQLITE_IOERR_WRITE };
    let Some(real) = open.real.xWrite else { return ffi::SQLITE_IOERR_WRITE };
    if let Some((recorder, number)) = &open.recorded {
        let verdict = recorder.may_write();
        if verdict != Verdict::Fail {
            let length = usize::try_from(amount).unwrap_or_default();
            // SAFETY: SQLite passes this many bytes and waits for us.
            let bytes = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), length) };
            recorder.write(*number, u64::try_from(at).unwrap_or_default(), bytes);
        }
        if verdict != Verdict::Do {
            if verdict == Verdict::DoAndFail {
                // SAFETY: the arguments are SQLite's own.
                unsafe { real(file, buffer, amount, at) };
            }
            return ffi::SQLITE_IOERR_WRITE;
        }
    }
    // SAFETY: the arguments are SQLite's own.
    unsafe { real(file, buffer, amount, at) }
}

/// `xTruncate`.
unsafe extern "C" fn truncate(file: *mut sqlite3_file, size: i64) -> c_int {
    let Some(open) = find(file) else { return ffi::SQLITE_IOERR_TRUNCATE };
    let Some(real) = open.real.xTruncate else { return ffi::SQLITE_IOERR_TRUNCATE };
    if let Some((recorder, number)) = &open.recorded {
        recorder.truncate(*number, u64::try_from(size).unwrap_or_default());
    }
    // SAFETY: the arguments are SQLite's own.
    unsafe { real(file, size) }
}

/// `xSync`: recorded files need no disk.
unsafe extern "C" fn sync(file: *mut sqlite3_file, flags: c_int) -> c_int {
    let Some(open) = find(file) else { return ffi::SQLITE_IOERR_FSYNC };
    if let Some((recorder, number)) = &open.recorded {
        return match recorder.sync(*number) {
            Verdict::Do => ffi::SQLITE_OK,
            Verdict::Fail | Verdict::DoAndFail => ffi::SQLITE_IOERR_FSYNC,
        };
    }
    let Some(real) = open.real.xSync else { return ffi::SQLITE_IOERR_FSYNC };
    // SAFETY: the arguments are SQLite's own.
    unsafe { real(file, flags) }
}

/// `xDelete`.
unsafe extern "C" fn delete(_: *mut sqlite3_vfs, name: *const c_char, sync_directory: c_int) -> c_int {
    let Some(&Real(vfs)) = REAL.get() else { return ffi::SQLITE_IOERR_DELETE };
    // SAFETY: it was registered before ours, and stays.
    let Some(real) = (unsafe { (*vfs).xDelete }) else { return ffi::SQLITE_IOERR_DELETE };
    // SAFETY: the arguments are SQLite's own.
    let code = unsafe { real(vfs, name, sync_directory) };
    if code == ffi::SQLITE_OK {
        // SAFETY: SQLite passes a C string.
        if let Some((recorder, name)) = unsafe { recorder(name) } {
            recorder.delete(&name, sync_directory != 0);
        }
    }
    code
}

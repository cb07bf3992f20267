//! SQLite's errors as errors of the saver contract; the fixed texts with their remedies.

use rusqlite::ErrorCode;
use threadkeep::Error;

/// The saver's name in errors and reports.
pub(crate) const SAVER: &str = "sqlite";

/// The saver was closed.
pub(crate) const CLOSED: &str = "the store is closed; open it again";
/// The writer thread cannot be started.
pub(crate) const CANNOT_START: &str = "the system cannot start another thread";
/// The writer thread ended during a command.
pub(crate) const LOST: &str = "the writer stopped before it answered; reopen the store";
/// A commit failed earlier; what reached the disk is unknown until the file is reopened.
pub(crate) const POISONED: &str =
    "an earlier commit failed, so this handle refuses further writes; reopen the store";
/// Another connection holds the write lock for longer than the busy timeout.
pub(crate) const LOCKED: &str = "another process holds the lock on the database; let it finish or stop it, then retry; \
    code that opens the store may give it a longer busy_timeout";
/// The file system is full, or a quota is exhausted.
pub(crate) const FULL: &str = "the disk with this file is full; what was acknowledged before is safe. Free some space on it \
    (other files, never the -wal or -shm beside the database), then retry";
/// The index of the log could not grow or be mapped.
const NO_INDEX: &str = "the index of the log (-shm, beside the database) could not be written, as on a full disk; what was \
    acknowledged before is safe. Free some space, then retry";
/// The file system refuses a lock.
const NO_LOCKS: &str = "the file system does not lock files as SQLite needs it, as many network file systems and folders that \
    virtual machines share do not; move the database to a local disk";
/// The file is not writable.
pub(crate) const READ_ONLY: &str = "the database cannot be written, so nothing was changed; check the permissions of the \
    file and its directory, and that its file system is mounted for writing";
/// The file or its directory cannot be opened.
pub(crate) const CANNOT_OPEN: &str =
    "the database cannot be opened; check that its directory exists and can be written";
/// The database was moved or replaced since it was opened.
pub(crate) const GONE: &str = "the file of the database, its -wal or its -shm was removed, renamed or replaced while the \
    store was open, so nothing was written; put it back where it was, or restore a backup (`threadkeep backup --out FILE` \
    makes one), then reopen the store";
/// A piece of a thread is complete before the checkpoint at work is; never shown to a caller.
pub(crate) const NO_ROOM: &str = "the rest of the thread is written in the next transaction";
/// A thread that was being written in pieces is gone.
pub(crate) const SWEPT: &str =
    "another process deleted what had been written of the new thread so far; repeat it";
/// The disk returns other bytes than were written.
const DAMAGED: &str = "a page does not match its checksum: the file was damaged, or written by another program; \
    restore a backup (`threadkeep backup --out FILE` makes one), or export the threads that can still be read";

/// What SQLite reports if it cannot make the index of the log larger.
const NO_INDEX_CODES: [i32; 3] = [
    rusqlite::ffi::SQLITE_IOERR_SHMOPEN,
    rusqlite::ffi::SQLITE_IOERR_SHMSIZE,
    rusqlite::ffi::SQLITE_IOERR_SHMMAP,
];

/// What SQLite reports if the file system refuses a lock that nobody holds.
const NO_LOCK_CODES: [i32; 3] = [
    rusqlite::ffi::SQLITE_IOERR_LOCK,
    rusqlite::ffi::SQLITE_IOERR_RDLOCK,
    rusqlite::ffi::SQLITE_IOERR_SHMLOCK,
];

/// Whether another process held the lock on the database for longer than [`crate::Options::busy_timeout`].
pub fn is_locked(error: &Error) -> bool {
    matches!(
        error,
        Error::Unavailable { reason, .. } | Error::InDoubt { reason, .. } if reason.contains(LOCKED)
    )
}

/// An error after which the caller may retry: nothing was written.
pub(crate) fn unavailable(reason: impl Into<String>) -> Error {
    Error::Unavailable { saver: SAVER, reason: reason.into() }
}

/// An error that leaves open whether the command took effect.
pub(crate) fn in_doubt(reason: impl Into<String>) -> Error {
    Error::InDoubt { saver: SAVER, reason: reason.into() }
}

/// Whether the disk failed, so that the file system may have dropped data that it had accepted. A page that cannot be
/// trusted and a full disk are no such failures.
pub(crate) fn io_failed(error: &rusqlite::Error) -> bool {
    error.sqlite_error().is_some_and(|failure| {
        failure.code == ErrorCode::SystemIoFailure
            && !threadkeep_pages::is_damage(error)
            && !NO_INDEX_CODES.contains(&failure.extended_code)
    })
}

/// The error of a statement on `store` (the path of the database) that failed before its transaction was committed.
pub(crate) fn from_sqlite(store: &str, error: &rusqlite::Error) -> Error {
    if threadkeep_pages::is_damage(error) {
        return Error::corrupt(store, DAMAGED);
    }
    if error.sqlite_error().is_some_and(|error| NO_INDEX_CODES.contains(&error.extended_code)) {
        return unavailable(format!("{store}: {NO_INDEX} ({error})"));
    }
    if error.sqlite_error().is_some_and(|error| NO_LOCK_CODES.contains(&error.extended_code)) {
        return unavailable(format!("{store}: {NO_LOCKS} ({error})"));
    }
    let remedy = match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => LOCKED,
        Some(ErrorCode::DiskFull) => FULL,
        Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => READ_ONLY,
        Some(ErrorCode::CannotOpen) => CANNOT_OPEN,
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => return Error::corrupt(store, error),
        Some(ErrorCode::TooBig) => {
            return Error::InvalidInput(format!("{store}: a value is too large: {error}"));
        }
        _ => return unavailable(format!("{store}: {error}")),
    };
    unavailable(format!("{store}: {remedy} ({error})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_that_refuses_a_lock_is_named() {
        for code in NO_LOCK_CODES {
            let error = rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(code), None);
            let error = from_sqlite("/mnt/share/checkpoints.db", &error);
            assert!(
                matches!(&error, Error::Unavailable { reason, .. } if reason.contains(NO_LOCKS)),
                "{error}"
            );
        }
    }
}

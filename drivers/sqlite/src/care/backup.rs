//! A copy of a database that is in use.
//!
//! A copy of the files is none: while the database is copied, writers move pages from the log into it. SQLite's backup reads
//! everything in one read transaction, which no writer waits for.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use rusqlite::backup::{Backup, StepResult};
use rusqlite::{Connection, OpenFlags};
use tempfile::{Builder, TempPath};
use threadkeep::{Error, Result};

use super::check;
use crate::config::Options;
use crate::error::{from_sqlite, unavailable};
use crate::rows::names::Names;
use crate::sql::Db;

/// Between two attempts while the database is locked.
const PAUSE: Duration = Duration::from_millis(50);
const INTEGRITY: &str = "PRAGMA integrity_check(1)";

/// Copies any SQLite database that may be in use into a new file, which only the user may read. It holds what was committed at
/// one moment, has no log, and has passed SQLite's own check before it gets its name. Blocks.
///
/// # Errors
/// [`Error::InvalidInput`] if there is a file at `to`; [`Error::Corrupt`] if the database is damaged; [`Error::Unavailable`] if
/// it cannot be read, or the copy cannot be written. There is nothing at `to` after an error.
pub fn copy_database(from: &Path, to: &Path, patience: Duration) -> Result<()> {
    let copy = copy(from, to, patience)?;
    let failed = |error| from_sqlite(&to.display().to_string(), &error);
    let conn = threadkeep_pages::open(&copy, OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(failed)?;
    let found: String = conn.query_row(INTEGRITY, [], |row| row.get(0)).map_err(failed)?;
    drop(conn);
    if found != "ok" {
        return Err(damaged(from, found));
    }
    keep(copy, to)
}

/// Copies a store, looks at every row of the copy, and gives it its name.
pub(crate) fn copy_store(from: &Path, to: &Path, options: &Options) -> Result<()> {
    let copy = copy(from, to, options.busy_timeout)?;
    let db = Db::reader(&copy, options)?;
    let found = check::check(&db, &Names::default())?.into_iter().find(|finding| !finding.orphan);
    drop(db);
    match found {
        Some(finding) => Err(damaged(from, finding)),
        None => keep(copy, to),
    }
}

fn damaged(from: &Path, found: impl std::fmt::Display) -> Error {
    Error::corrupt(
        from.display().to_string(),
        format!("the backup is not kept, for the database is damaged: {found}"),
    )
}

/// A copy beside `to`, which is deleted if it is not kept.
fn copy(from: &Path, to: &Path, patience: Duration) -> Result<TempPath> {
    if to.symlink_metadata().is_ok() {
        return Err(taken(to));
    }
    // In the same directory, to be renamed. Nobody but the user may read it, from the first byte on.
    let directory = to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let made = Builder::new().prefix(".threadkeep-backup-").tempfile_in(directory);
    let copy = made.map_err(|error| not_written(to, &error))?.into_temp_path();

    let name = from.display().to_string();
    let failed = |error| from_sqlite(&name, &error);
    let source = threadkeep_pages::open(from, OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(failed)?;
    source.busy_timeout(patience).map_err(failed)?;
    // What its pages are is known once it was read from.
    source.pragma_query_value(None, "schema_version", |_| Ok(())).map_err(failed)?;
    let sealed = threadkeep_pages::is_sealed(&source).map_err(failed)?;
    let name = to.display().to_string();
    let failed = |error| from_sqlite(&name, &error);
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE;
    let target =
        if sealed { threadkeep_pages::open(&copy, flags) } else { Connection::open_with_flags(&copy, flags) };
    let mut target = target.map_err(failed)?;
    // A copy that is not finished is thrown away, and one that is finished is flushed at the end.
    target.execute_batch("PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF").map_err(failed)?;
    run(&source, &mut target, patience).map_err(failed)?;
    // Without a log the copy is one file, and can be read where nothing can be written.
    target.pragma_update_and_check(None, "journal_mode", "DELETE", |_| Ok(())).map_err(failed)?;
    target.close().map_err(|(_, error)| failed(error))?;
    Ok(copy)
}

/// Copies all pages in one step: a step that left some for later would begin from the first again whenever somebody wrote.
fn run(source: &Connection, target: &mut Connection, patience: Duration) -> rusqlite::Result<()> {
    let backup = Backup::new(source, target)?;
    let started = std::time::Instant::now();
    loop {
        match backup.step(-1)? {
            StepResult::Done => return Ok(()),
            StepResult::More => {}
            _ if started.elapsed() < patience => std::thread::sleep(PAUSE),
            _ => {
                let busy = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_BUSY);
                return Err(rusqlite::Error::SqliteFailure(busy, None));
            }
        }
    }
}

/// Flushes a copy and gives it its name, unless another file has it by now.
fn keep(copy: TempPath, to: &Path) -> Result<()> {
    // No connection of this process has this file open any more, so opening it drops no lock.
    let flushed = File::open(&copy).and_then(|file| file.sync_all());
    flushed.map_err(|error| not_written(to, &error))?;
    copy.persist_noclobber(to).map_err(|failed| {
        if failed.error.kind() == std::io::ErrorKind::AlreadyExists {
            taken(to)
        } else {
            not_written(to, &failed.error)
        }
    })?;
    #[cfg(unix)]
    if let Some(directory) = to.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        let flushed = File::open(directory).and_then(|directory| directory.sync_all());
        flushed.map_err(|error| not_written(to, &error))?;
    }
    Ok(())
}

fn taken(to: &Path) -> Error {
    Error::InvalidInput(format!("there is a file {}; name one that does not exist", to.display()))
}

fn not_written(to: &Path, error: &std::io::Error) -> Error {
    unavailable(format!("the backup {} cannot be written: {error}", to.display()))
}

//! A copy of a database that is in use.
//!
//! Copying the files does not work: writers move pages from the log into the database meanwhile. SQLite's backup reads
//! everything in one read transaction, which blocks no writer.

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

/// The pause between two attempts while the database is locked.
const PAUSE: Duration = Duration::from_millis(50);
/// The pages that are copied before they are flushed: 2 MB. Where many unflushed pages wait, each flush of another file on the
/// same disk waits for them too, a writer's commit among them.
const PAGES: i32 = 512;
const INTEGRITY: &str = "PRAGMA integrity_check(1)";

/// Copies any SQLite database that may be in use into a new file, readable only by the user. It holds what was
/// committed at one moment, has no log, and is renamed into place only after SQLite's own check. Blocks.
///
/// # Errors
/// [`Error::InvalidInput`] if there is a file at `to`; [`Error::Corrupt`] if the database is damaged;
/// [`Error::Unavailable`] if it cannot be read, or the copy cannot be written. After an error, `to` does not exist.
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

/// Copies a store, checks every row of the copy, and gives the copy its name.
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
        format!("the backup was deleted because the database is damaged: {found}"),
    )
}

/// A copy in the directory of `to`, deleted unless it is kept.
fn copy(from: &Path, to: &Path, patience: Duration) -> Result<TempPath> {
    if to.symlink_metadata().is_ok() {
        return Err(taken(to));
    }
    // In the same directory, so that it can be renamed. Only the user may read it, from the first byte on.
    let made = Builder::new().prefix(".threadkeep-backup-").tempfile_in(directory_of(to));
    let (file, copy) = made.map_err(|error| not_written(to, &error))?.into_parts();

    let name = from.display().to_string();
    let failed = |error| from_sqlite(&name, &error);
    let source = threadkeep_pages::open(from, OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(failed)?;
    source.busy_timeout(patience).map_err(failed)?;
    // Whether the pages have checksums is known only after a first read.
    source.pragma_query_value(None, "schema_version", |_| Ok(())).map_err(failed)?;
    let sealed = threadkeep_pages::is_sealed(&source).map_err(failed)?;
    let name = to.display().to_string();
    let failed = |error| from_sqlite(&name, &error);
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE;
    let target =
        if sealed { threadkeep_pages::open(&copy, flags) } else { Connection::open_with_flags(&copy, flags) };
    let mut target = target.map_err(failed)?;
    // An unfinished copy is thrown away, and a finished one is flushed at the end.
    target.execute_batch("PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF").map_err(failed)?;
    let flush = || file.sync_data().map_err(|error| not_written(to, &error));
    run(&source, &mut target, patience, flush, failed)?;
    // Without a log the copy is one file, and readable on read-only media.
    target.pragma_update_and_check(None, "journal_mode", "DELETE", |_| Ok(())).map_err(failed)?;
    target.close().map_err(|(_, error)| failed(error))?;
    Ok(copy)
}

/// Copies all pages in one read transaction: otherwise any write between two steps would restart the copy from the first page.
/// `flush` is called after each step but the last.
fn run(
    source: &Connection,
    target: &mut Connection,
    patience: Duration,
    flush: impl Fn() -> Result<()>,
    failed: impl Fn(rusqlite::Error) -> Error,
) -> Result<()> {
    source.execute_batch("BEGIN").map_err(&failed)?;
    source.pragma_query_value(None, "schema_version", |_| Ok(())).map_err(&failed)?;
    let backup = Backup::new(source, target).map_err(&failed)?;
    let started = std::time::Instant::now();
    loop {
        match backup.step(PAGES).map_err(&failed)? {
            StepResult::Done => break,
            // A failure that is passed over here might not be reported again.
            StepResult::More => flush()?,
            _ if started.elapsed() < patience => std::thread::sleep(PAUSE),
            _ => {
                let busy = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_BUSY);
                return Err(failed(rusqlite::Error::SqliteFailure(busy, None)));
            }
        }
    }
    drop(backup);
    source.execute_batch("COMMIT").map_err(failed)
}

/// Flushes a copy and gives it its name, unless that name is taken by now.
fn keep(copy: TempPath, to: &Path) -> Result<()> {
    // This process has no connection to this file any more, so opening it drops no lock.
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
    File::open(directory_of(to))
        .and_then(|directory| directory.sync_all())
        .map_err(|error| not_written(to, &error))?;
    Ok(())
}

/// The directory that a file is in; of a bare name, the current one.
fn directory_of(file: &Path) -> &Path {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn taken(to: &Path) -> Error {
    Error::InvalidInput(format!("the file {} exists; name one that does not", to.display()))
}

fn not_written(to: &Path, error: &std::io::Error) -> Error {
    unavailable(format!("the backup {} cannot be written: {error}", to.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_of_a_bare_name_is_the_current_one() {
        for (file, directory) in [("b.db", "."), ("./b.db", "."), ("copies/b.db", "copies"), ("/b.db", "/")] {
            assert_eq!(directory_of(Path::new(file)), Path::new(directory), "{file}");
        }
    }
}

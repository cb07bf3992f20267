//! A copy of a database that is in use.
//!
//! Copying the files does not work: writers move pages from the log into the database meanwhile. SQLite's backup reads
//! everything in one read transaction, which blocks no writer.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rusqlite::backup::{Backup, StepResult};
use rusqlite::{Connection, ErrorCode, OpenFlags};
use tempfile::{Builder, TempPath};
use threadkeep::{Error, Result};

use super::check;
use crate::config::{Options, bounded};
use crate::error::{from_sqlite, unavailable};
use crate::rows::names::Names;
use crate::sql::{Db, patiently, resting_file};

/// The pause between two attempts while the database is locked.
const PAUSE: Duration = Duration::from_millis(50);
/// The pages that are copied before they are flushed: 256 kB. Where many unflushed pages wait, each flush of another file on
/// the same disk waits for them too, a writer's commit among them.
const PAGES: i32 = 64;
/// The longest pause after such a flush. It is as long as the flush took, so that writers have half of the disk's time.
const BREATH: Duration = Duration::from_millis(100);
const INTEGRITY: &str = "PRAGMA integrity_check(1)";

/// A copy that is complete and checked, beside the place where it will be. It is removed when dropped without
/// [`Self::keep`], and while it is made with the future that makes it: an interrupted backup leaves nothing.
#[derive(Debug)]
pub struct BackupFile {
    copy: TempPath,
    to: PathBuf,
    _stop: Stop,
}

/// Ends a copy at work when dropped.
#[derive(Debug)]
struct Stop(Arc<AtomicBool>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The same for the thread that makes it.
struct Unfinished {
    file: File,
    copy: PathBuf,
    to: PathBuf,
    stopped: Arc<AtomicBool>,
}

impl BackupFile {
    /// Makes the copy that will be at `to` on a blocking thread. The future keeps the file meanwhile.
    async fn made(to: &Path, make: impl FnOnce(&Unfinished) -> Result<()> + Send + 'static) -> Result<Self> {
        if to.symlink_metadata().is_ok() {
            return Err(taken(to));
        }
        // In the same directory, so that it can be renamed. Only the user may read it, from the first byte on.
        let file = Builder::new().prefix(".threadkeep-backup-").tempfile_in(directory_of(to));
        let (file, copy) = file.map_err(|error| not_written(to, &error))?.into_parts();
        let stopped = Arc::<AtomicBool>::default();
        let unfinished =
            Unfinished { file, copy: copy.to_path_buf(), to: to.to_owned(), stopped: Arc::clone(&stopped) };
        let backup = Self { copy, to: to.to_owned(), _stop: Stop(stopped) };
        let making = tokio::task::spawn_blocking(move || {
            let made = make(&unfinished);
            // SQLite keeps the log of a database that was removed while it was open.
            for file in ["-wal", "-shm"] {
                let mut name = unfinished.copy.clone().into_os_string();
                name.push(file);
                let _ = std::fs::remove_file(name);
            }
            made
        });
        making.await.map_err(|error| unavailable(error.to_string()))??;
        Ok(backup)
    }

    /// Flushes the copy and gives it its name, unless that name is taken by now. Blocks briefly.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if there is a file by now; [`Error::Unavailable`] if the copy cannot be written. It is
    /// removed then.
    pub fn keep(self) -> Result<()> {
        let Self { copy, to, .. } = self;
        // This process has no connection to this file any more, so opening it drops no lock.
        let flushed = File::open(&copy).and_then(|file| file.sync_all());
        flushed.map_err(|error| not_written(&to, &error))?;
        copy.persist_noclobber(&to).map_err(|failed| {
            if failed.error.kind() == std::io::ErrorKind::AlreadyExists {
                taken(&to)
            } else {
                not_written(&to, &failed.error)
            }
        })?;
        #[cfg(unix)]
        File::open(directory_of(&to))
            .and_then(|directory| directory.sync_all())
            .map_err(|error| not_written(&to, &error))?;
        Ok(())
    }
}

/// Copies any SQLite database that may be in use, for a new file at `to`, readable only by the user. The copy holds what
/// was committed at one moment, has no log, and has passed SQLite's own check. [`BackupFile::keep`] gives it its name. A
/// patience of more than 24 days counts as 24 days.
///
/// # Errors
/// [`Error::InvalidInput`] if there is a file at `to`; [`Error::Corrupt`] if the database is damaged;
/// [`Error::Unavailable`] if it cannot be read, or the copy cannot be written.
pub async fn copy_database(from: &Path, to: &Path, patience: Duration) -> Result<BackupFile> {
    let from = from.to_owned();
    let copying = BackupFile::made(to, move |unfinished| {
        copy(&from, unfinished, patience)?;
        let failed = |error| from_sqlite(&unfinished.to.display().to_string(), &error);
        let conn =
            threadkeep_pages::open(&unfinished.copy, OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(failed)?;
        let found: String = conn.query_row(INTEGRITY, [], |row| row.get(0)).map_err(failed)?;
        if found == "ok" { Ok(()) } else { Err(damaged(&from, found)) }
    });
    copying.await
}

/// Copies a store, and checks every row of the copy.
pub(crate) async fn copy_store(from: PathBuf, to: &Path, options: Options) -> Result<BackupFile> {
    let copying = BackupFile::made(to, move |unfinished| {
        copy(&from, unfinished, options.busy_timeout)?;
        let db = Db::reader(&unfinished.copy, &options)?;
        let found = check::check(&db, &Names::default())?.into_iter().find(|finding| !finding.orphan);
        found.map_or(Ok(()), |finding| Err(damaged(&from, finding)))
    });
    copying.await
}

fn damaged(from: &Path, found: impl std::fmt::Display) -> Error {
    Error::corrupt(
        from.display().to_string(),
        format!("the backup was deleted because the database is damaged: {found}"),
    )
}

/// A connection to the database, which has read from it: only then is it known whether its pages have checksums.
fn source(from: &Path, patience: Duration) -> rusqlite::Result<Connection> {
    let open = |path: &Path, flags| {
        let source = threadkeep_pages::open(path, flags)?;
        source.busy_timeout(patience)?;
        source.pragma_query_value(None, "schema_version", |_| Ok(()))?;
        Ok(source)
    };
    let opened = open(from, OpenFlags::SQLITE_OPEN_READ_ONLY);
    let Err(rusqlite::Error::SqliteFailure(failure, _)) = &opened else { return opened };
    let cannot_be_written = matches!(failure.code, ErrorCode::ReadOnly | ErrorCode::CannotOpen);
    match resting_file(from).filter(|_| cannot_be_written) {
        // The log and its index cannot be made in a directory that cannot be written.
        Some(file) => open(&file, OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI),
        None => opened,
    }
}

fn copy(from: &Path, unfinished: &Unfinished, patience: Duration) -> Result<()> {
    let Unfinished { file, copy, to, stopped } = unfinished;
    let patience = bounded(patience);
    let name = from.display().to_string();
    let failed = |error| from_sqlite(&name, &error);
    let source = source(from, patience).map_err(failed)?;
    let sealed = threadkeep_pages::is_sealed(&source).map_err(failed)?;
    let name = to.display().to_string();
    let failed = |error| from_sqlite(&name, &error);
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE;
    let target =
        if sealed { threadkeep_pages::open(copy, flags) } else { Connection::open_with_flags(copy, flags) };
    let mut target = target.map_err(failed)?;
    // An unfinished copy is thrown away, and a finished one is flushed at the end.
    target.execute_batch("PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF").map_err(failed)?;
    let flush = || {
        if stopped.load(Ordering::Relaxed) {
            return Err(unavailable(format!("the backup {} was stopped", to.display())));
        }
        file.sync_data().map_err(|error| not_written(to, &error))
    };
    run(&source, &mut target, patience, flush, failed)?;
    // Without a log the copy is one file, and readable on read-only media.
    target.pragma_update_and_check(None, "journal_mode", "DELETE", |_| Ok(())).map_err(failed)?;
    target.close().map_err(|(_, error)| failed(error))
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
    let is_locked = |step: &rusqlite::Result<_>| matches!(step, Ok(StepResult::Busy | StepResult::Locked));
    loop {
        match patiently((patience, PAUSE), |_| backup.step(PAGES), is_locked).map_err(&failed)? {
            StepResult::Done => break,
            // A failure that is passed over here might not be reported again.
            StepResult::More => {
                let began = Instant::now();
                flush()?;
                std::thread::sleep(began.elapsed().min(BREATH));
            }
            _ => {
                let busy = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_BUSY);
                return Err(failed(rusqlite::Error::SqliteFailure(busy, None)));
            }
        }
    }
    drop(backup);
    source.execute_batch("COMMIT").map_err(failed)
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

    /// The last step of a copy ends its log. SQLite does not remove a log whose database is gone by then.
    #[tokio::test]
    async fn a_backup_that_is_given_up_late_leaves_no_log() {
        let dir = tempfile::tempdir().unwrap();
        let (logged, has_log) = std::sync::mpsc::channel();
        let to = dir.path().join("backup");
        let mut backup = Box::pin(BackupFile::made(&to, move |unfinished| {
            let conn = Connection::open(&unfinished.copy).unwrap();
            conn.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(())).unwrap();
            conn.execute_batch("CREATE TABLE t (text TEXT)").unwrap();
            logged.send(()).unwrap();
            while !unfinished.stopped.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            drop(conn);
            Err(unavailable("the backup was stopped"))
        }));
        let names = || std::fs::read_dir(dir.path()).unwrap().count();
        assert!(futures::poll!(&mut backup).is_pending());
        has_log.recv().unwrap();
        assert_eq!(names(), 3, "the copy, its log and the index of that");
        drop(backup);
        let gone = async {
            while names() > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_mins(1), gone).await.expect("no file is left");
    }

    #[test]
    fn the_directory_of_a_bare_name_is_the_current_one() {
        for (file, directory) in [("b.db", "."), ("./b.db", "."), ("copies/b.db", "copies"), ("/b.db", "/")] {
            assert_eq!(directory_of(Path::new(file)), Path::new(directory), "{file}");
        }
    }
}

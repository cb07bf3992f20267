//! Deletes a conversation with those of its subagents, and its working directory.
//!
//! A process that stands still in a deletion may lose its reservation, and another one use the thread meanwhile. So
//! nothing is deleted that may have come after that: the conversation is deleted as it was seen, and each further
//! part only after a look whether the thread is still reserved.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep::state::{SeenThread, StateAccessor};
use threadkeep_records::{Records, RecordsError, Reservation};

/// Where the working directories of deleted threads are until they are removed, beside those of threads. No thread has
/// this name.
const DELETED: &str = ".deleted";

/// Why the contents of a thread could not be deleted.
#[derive(Debug, thiserror::Error)]
pub enum DeletionError {
    /// The checkpoints could not be deleted.
    #[error(transparent)]
    Engine(#[from] Error),
    /// The records could not be read or written, or the reservation was lost.
    #[error(transparent)]
    Records(#[from] RecordsError),
    /// The working directory could not be removed.
    #[error("cannot remove {}: {source}", directory.display())]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
}

impl DeletionError {
    /// Whether somebody else has used the thread, or may: what is left of it was not deleted.
    pub fn is_overtaken(&self) -> bool {
        match self {
            Self::Engine(error) => matches!(error, Error::Stale { .. }),
            Self::Records(error) => error.is_lost_reservation(),
            Self::Directory { .. } => false,
        }
    }
}

/// Deletes the checkpoints of the reserved thread, which were seen, then those of its subagents. Not the records:
/// they come after everything else, so that a deletion that failed can be repeated.
///
/// # Errors
/// [`Error::Stale`] if somebody else has written to the thread since: it stays whole, with its subagents.
/// [`RecordsError::NotFound`] if the reservation was lost since. What the stores return.
pub async fn delete_checkpoints(
    records: &Records,
    accessor: &StateAccessor,
    reservation: &Reservation,
    seen: SeenThread,
) -> Result<(), DeletionError> {
    accessor.delete_seen(seen).await?;
    // From now on no worker begins another item of the thread.
    records.batches().cancel_of_thread(reservation).await?;
    let children = records.executions().child_threads(reservation.thread_id()).await?;
    delete_children(accessor, children, || reservation.ensure_held()).await
}

/// Deletes the threads of subagents as they were seen before `held` looked whether their thread is still reserved: as
/// long as it is, their executions have rows, and nobody else has their threads. Later another execution may have one: a
/// copy of the thread has the ids of its executions, and numbers that were deleted are given again.
async fn delete_children<F>(
    accessor: &StateAccessor,
    children: Vec<String>,
    held: impl Fn() -> F,
) -> Result<(), DeletionError>
where
    F: Future<Output = Result<(), RecordsError>>,
{
    let mut left: Vec<ThreadId> = children.into_iter().map(ThreadId::from).collect();
    loop {
        let mut seen = Vec::with_capacity(left.len());
        for child in &left {
            seen.push(accessor.look(child).await?);
        }
        held().await?;
        let mut changed = Vec::new();
        for (child, seen) in left.into_iter().zip(seen) {
            match accessor.delete_seen(seen).await {
                // A last write of its own subagent, unless the thread is lost by now.
                Err(Error::Stale { .. }) => changed.push(child),
                deleted => deleted?,
            }
        }
        if changed.is_empty() {
            return Ok(());
        }
        left = changed;
    }
}

/// Removes the working directory of the reserved thread; false if it has none.
///
/// All processes share it, and the file system knows no reservations. So it is moved away first, which is one step;
/// if the thread is still reserved after that, nobody else has written to it.
///
/// # Errors
/// [`DeletionError::Directory`]; [`RecordsError::NotFound`] if the reservation was lost: the directory stays, or is
/// put back.
pub async fn remove_directory(reservation: &Reservation, directory: &Path) -> Result<bool, DeletionError> {
    reservation.ensure_held().await?;
    remove_moved(directory, reservation.row_id(), || reservation.ensure_held()).await
}

/// `held` looks whether the thread is still reserved, by the row with this id.
async fn remove_moved<F>(
    directory: &Path,
    row_id: &str,
    held: impl FnOnce() -> F,
) -> Result<bool, DeletionError>
where
    F: Future<Output = Result<(), RecordsError>>,
{
    let failed = |source| DeletionError::Directory { directory: directory.to_owned(), source };
    let (Some(all), Some(name)) = (directory.parent(), directory.file_name()) else {
        return Err(failed(ErrorKind::InvalidInput.into()));
    };
    let deleted = all.join(DELETED).join(name);
    let moved = deleted.join(row_id);
    // What earlier deletions, which were cut off, have left. What comes later may be moved away from a later run, by a
    // process that has lost the thread and is about to put it back.
    let mut removed = entries(&deleted).await.map_err(failed)?;
    let exists = tokio::fs::try_exists(directory).await.map_err(failed)?;
    if exists {
        tokio::fs::create_dir_all(&deleted).await.map_err(failed)?;
        tokio::fs::rename(directory, &moved).await.map_err(failed)?;
        removed.push(moved.clone());
    }
    if removed.is_empty() {
        return Ok(false);
    }
    if let Err(error) = held().await {
        if exists {
            put_back(&moved, directory).await;
        }
        return Err(error.into());
    }
    for path in removed {
        if let Err(error) = tokio::fs::remove_dir_all(path).await
            && error.kind() != ErrorKind::NotFound
        {
            return Err(failed(error));
        }
    }
    // It stays if another process has moved something there.
    let _ = tokio::fs::remove_dir(&deleted).await;
    Ok(exists)
}

/// What is in a directory; nothing if it is missing.
async fn entries(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = match tokio::fs::read_dir(directory).await {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        found => found?,
    };
    let mut paths = Vec::new();
    while let Some(entry) = found.next_entry().await? {
        paths.push(entry.path());
    }
    Ok(paths)
}

/// Gives a directory its name again. If a later run has created another one by now, that gets what it does not have.
async fn put_back(moved: &Path, directory: &Path) {
    let (from, to) = (moved.to_owned(), directory.to_owned());
    let error = match tokio::task::spawn_blocking(move || merge(&from, &to)).await {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error,
        Err(panic) => io::Error::other(panic),
    };
    let (moved, directory) = (moved.display(), directory.display());
    tracing::error!(
        %moved, %directory, %error,
        "the deletion of a thread was overtaken by another process, and not all files moved for it could be put back; \
         move those that you need yourself, before the thread is deleted"
    );
}

/// Moves what is at `from` to `to`, except files in the place of which there is something: that is newer.
///
/// # Errors
/// The first one; everything else is moved all the same.
fn merge(from: &Path, to: &Path) -> io::Result<()> {
    let is_directory = |path: &Path| std::fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
    if !is_directory(from) {
        // Unlike a rename, a link replaces nothing.
        std::fs::hard_link(from, to)?;
        return std::fs::remove_file(from);
    }
    // A rename would also take the place of an empty directory, in which a command of the later run may be at work.
    if !is_directory(to) {
        let Err(error) = std::fs::rename(from, to) else { return Ok(()) };
        if !is_directory(to) {
            return Err(error);
        }
    }
    let mut merged = Ok(());
    for entry in std::fs::read_dir(from)?.collect::<io::Result<Vec<_>>>()? {
        merged = merged.and(merge(&entry.path(), &to.join(entry.file_name())));
    }
    merged?;
    std::fs::remove_dir(from)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use chrono::TimeDelta;
    use serde_json::Map;
    use threadkeep::channel::Schema;
    use threadkeep::id::IdSource;
    use threadkeep::mode::ChannelMode;
    use threadkeep_memory::MemorySaver;
    use threadkeep_records::{RecordsOptions, WriterKind};

    use super::*;

    /// After the look whether the thread is reserved, the process stands still. A subagent of the thread writes
    /// meanwhile, or another process deletes the thread, and a copy gets an execution with the number that is free again.
    #[tokio::test]
    async fn a_subagent_that_has_the_name_of_a_deleted_one_stays() {
        for lost in [false, true] {
            let table = Schema::thread_state().compile(ChannelMode::Delta, 3).unwrap();
            let ids = Arc::new(IdSource::default());
            let accessor = StateAccessor::new(Arc::new(MemorySaver::default()), Arc::new(table), ids);
            let child = ThreadId::from("subagent:e:2");
            accessor.create(&child, Map::new()).await.unwrap();
            let records = Records::open_memory(RecordsOptions::default()).await.unwrap();
            let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
            let stood_still = AtomicBool::new(false);
            let held = || async {
                reservation.ensure_held().await?;
                if !stood_still.swap(true, Ordering::SeqCst) {
                    accessor.delete_thread(&child).await.unwrap();
                    accessor.create(&child, Map::new()).await.unwrap();
                    if lost {
                        records.runs().recover_orphans(records.now(), TimeDelta::zero()).await.unwrap();
                    }
                }
                Ok::<(), RecordsError>(())
            };
            let deleted = delete_children(&accessor, vec![child.to_string()], held).await;
            let expected = if lost { Err(true) } else { Ok(()) };
            assert_eq!(deleted.map_err(|error| error.is_overtaken()), expected);
            let state = accessor.get(&child, None).await.unwrap();
            assert_eq!(state.is_some(), lost, "what is not the thread's stays");
        }
    }

    /// Another process takes the thread for free just before the directory is moved, or after: its files stay.
    #[tokio::test]
    async fn a_directory_is_put_back_if_the_reservation_is_lost() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("threads").join("t");
        let file = directory.join("sub").join("file.txt");
        let write = |text: &str| {
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, text).unwrap();
        };
        let records = Records::open_memory(RecordsOptions::default()).await.unwrap();
        let reserve = async || records.runs().reserve("t", WriterKind::Delete).await.unwrap();
        let reservation = reserve().await;
        records.runs().recover_orphans(records.now(), TimeDelta::zero()).await.unwrap();
        write("of a later run");
        let refused = remove_directory(&reservation, &directory).await.unwrap_err();
        assert!(refused.is_overtaken(), "{refused}");
        let held = || reservation.ensure_held();
        let refused = remove_moved(&directory, reservation.row_id(), held).await.unwrap_err();
        assert!(refused.is_overtaken(), "{refused}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "of a later run");
        // The later run has created its directory again: it gets what it does not have, and keeps what it has written.
        let moved = home.path().join("threads").join(DELETED).join("t").join("moved");
        std::fs::create_dir_all(moved.join("sub").join("deep")).unwrap();
        for (name, text) in [("file.txt", "earlier"), ("other.txt", "other"), ("deep/last.txt", "last")] {
            std::fs::write(moved.join("sub").join(name), text).unwrap();
        }
        put_back(&moved, &directory).await;
        let read = |name: &str| std::fs::read_to_string(directory.join("sub").join(name)).unwrap();
        let found = ["file.txt", "other.txt", "deep/last.txt"].map(read);
        assert_eq!(found, ["of a later run", "other", "last"]);
        assert_eq!(
            std::fs::read_to_string(moved.join("sub/file.txt")).unwrap(),
            "earlier",
            "nothing is lost"
        );
        std::fs::remove_file(moved.join("sub/file.txt")).unwrap();
        put_back(&moved, &directory).await;
        assert!(!moved.exists(), "nothing is left");

        // One who holds the thread removes it, with what others have left.
        let reservation = reserve().await;
        assert!(remove_directory(&reservation, &directory).await.unwrap());
        assert!(!directory.exists() && !moved.exists());
        assert!(!remove_directory(&reservation, &directory).await.unwrap(), "there is none");
        reservation.release().await.unwrap();
    }

    #[tokio::test]
    async fn a_directory_in_which_a_command_may_be_at_work_is_not_replaced() {
        use std::os::unix::fs::MetadataExt as _;

        let home = tempfile::tempdir().unwrap();
        let (moved, directory) = (home.path().join("moved"), home.path().join("t"));
        for empty in [moved.join("sub"), directory.join("sub")] {
            std::fs::create_dir_all(empty).unwrap();
        }
        std::fs::write(moved.join("sub/file.txt"), "earlier").unwrap();
        let inodes = || ["", "sub"].map(|name| std::fs::metadata(directory.join(name)).unwrap().ino());
        let before = inodes();
        put_back(&moved, &directory).await;
        assert_eq!(inodes(), before);
        assert_eq!(std::fs::read_to_string(directory.join("sub/file.txt")).unwrap(), "earlier");
        assert!(!moved.exists());
    }

    /// Another process, which has lost the thread too, moves the files of a later run away meanwhile.
    #[tokio::test]
    async fn what_is_moved_away_after_a_deletion_has_looked_stays() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("threads").join("t");
        let other = home.path().join("threads").join(DELETED).join("t").join("other");
        std::fs::create_dir_all(&directory).unwrap();
        let held = || async {
            std::fs::create_dir_all(&other).unwrap();
            Ok::<(), RecordsError>(())
        };
        assert!(remove_moved(&directory, "own", held).await.unwrap());
        assert!(!directory.exists() && other.exists());
        // If nobody puts it back, the next deletion of the thread removes it.
        let held = || async { Ok::<(), RecordsError>(()) };
        assert!(!remove_moved(&directory, "next", held).await.unwrap());
        assert!(!other.exists());
    }
}

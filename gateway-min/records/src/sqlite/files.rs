//! Whether the files of a database still have the names under which they were opened.

use std::path::{Path, PathBuf};

use crate::failure::{DatabaseError, SqliteFailure};

/// The device, and the number of the file on it: it is another file's only after this one is closed.
type Identity = (u64, u64);

/// The file of a database, its log and the log's index, as they were when it was opened.
#[derive(Debug)]
pub(crate) struct Files {
    path: PathBuf,
    known: Vec<(PathBuf, Identity)>,
}

impl Files {
    /// The file of a database that a connection has just opened.
    pub(crate) fn of(path: &Path) -> Result<Self, DatabaseError> {
        // SQLite has followed the links, and names the log after what they lead to.
        let path = path.canonicalize()?;
        let known = vec![(path.clone(), identity(&path)?)];
        Ok(Self { path, known })
    }

    /// The log and its index too. They exist once a connection in WAL mode has read, for as long as one is open.
    pub(crate) fn with_log(mut self) -> Self {
        for end in ["-wal", "-shm"] {
            let mut file = self.path.clone().into_os_string();
            file.push(end);
            // Where a file system has no WAL mode there are none.
            if let Ok(identity) = identity(Path::new(&file)) {
                self.known.push((file.into(), identity));
            }
        }
        self
    }

    /// Fails if one of them was removed, renamed or replaced: what is committed to a file without a name is lost. Asks
    /// the file system only, because closing any descriptor of a file drops the locks of the process on it.
    pub(crate) fn in_place(&self) -> Result<(), SqliteFailure> {
        let stays = |(file, known): &(PathBuf, Identity)| identity(file).is_ok_and(|found| found == *known);
        if self.known.iter().all(stays) { Ok(()) } else { Err(SqliteFailure::gone(&self.path)) }
    }
}

/// Follows no link: a file that was moved and left one in its place has its log elsewhere when it is opened again.
fn identity(file: &Path) -> std::io::Result<Identity> {
    let metadata = file.symlink_metadata()?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt as _;
        Ok((metadata.dev(), metadata.ino()))
    }
    #[cfg(not(unix))]
    {
        Ok((0, u64::from(metadata.is_file())))
    }
}

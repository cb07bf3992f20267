//! The name of the file. What is committed to a file without one is lost when it is closed.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// Opens a file, which is created if it does not exist. Unless it has content, `flush` flushes its directory: a power
/// loss could take the name, and so the file with everything that was acknowledged. What has content was opened like this
/// before.
pub(crate) fn open(path: &Path, flush: impl FnOnce(&File) -> io::Result<()>) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    // Elsewhere a directory cannot be opened.
    if cfg!(unix) && file.metadata()?.len() == 0 {
        // The name is in this directory also if the path is that of a symbolic link.
        if let Some(directory) = std::fs::canonicalize(path)?.parent() {
            flush(&File::open(directory)?)?;
        }
    }
    Ok(file)
}

/// A path, and the file that was opened there.
pub(crate) struct Place {
    path: PathBuf,
    file: Identity,
}

impl Place {
    /// The place of a file that was opened at `path`.
    pub(crate) fn of(path: &Path, file: &File) -> io::Result<Self> {
        // The process may change its directory.
        Ok(Self { path: std::path::absolute(path)?, file: identity(&file.metadata()?) })
    }

    /// The path, if the file is no longer there: it was removed, renamed or replaced.
    pub(crate) fn left(&self) -> Option<&Path> {
        let found = std::fs::metadata(&self.path).ok().map(|metadata| identity(&metadata));
        (found != Some(self.file)).then_some(&*self.path)
    }
}

#[cfg(unix)]
type Identity = (u64, u64);

#[cfg(unix)]
fn identity(metadata: &std::fs::Metadata) -> Identity {
    use std::os::unix::fs::MetadataExt as _;
    (metadata.dev(), metadata.ino())
}

/// Elsewhere an open file can be neither removed nor replaced.
#[cfg(not(unix))]
type Identity = bool;

#[cfg(not(unix))]
fn identity(metadata: &std::fs::Metadata) -> Identity {
    metadata.is_file()
}

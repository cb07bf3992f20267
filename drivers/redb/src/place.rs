//! Whether an open file still has its name. What is committed to a file without one is lost when it is closed.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

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

//! Detects whether a file has changed without reading it.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{fs, io};

/// How old a file's time stamp must be, when the file is read, to be trusted. Two edits within the clock's resolution
/// can leave the same stamp and size, so a younger file is read again.
const TRUSTED_AGE: Duration = Duration::from_secs(2);

/// A file's path, time stamp and size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stamp {
    path: PathBuf,
    modified: SystemTime,
    len: u64,
}

impl Stamp {
    /// The file's current stamp.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        Ok(Self { path: path.to_owned(), modified: metadata.modified()?, len: metadata.len() })
    }

    /// The file's path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether an equal stamp means the same content.
    pub(crate) fn is_trusted(&self) -> bool {
        SystemTime::now().duration_since(self.modified).is_ok_and(|age| age > TRUSTED_AGE)
    }
}

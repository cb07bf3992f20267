//! Detects whether a file has changed without reading it.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{fs, io};

/// How old a file's time stamp must be, before the file is read, to be trusted. Two edits within the clock's resolution
/// can leave the same stamp and size, so a younger file is read again.
const TRUSTED_AGE: Duration = Duration::from_secs(2);

/// A file's path, time stamp and size. Those of a file that has not changed are equal, however old they are.
#[derive(Debug, Clone)]
pub(crate) struct Stamp {
    path: PathBuf,
    modified: SystemTime,
    len: u64,
    is_trusted: bool,
}

impl Stamp {
    /// The file's current stamp. Take it before the file is read.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        Self::at(path, SystemTime::now())
    }

    /// The same at this time. The process may stand still at any point from here on, so a later look at the clock says
    /// nothing about the age that the file has when it is read.
    fn at(path: &Path, now: SystemTime) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        let modified = metadata.modified()?;
        let is_trusted = now.duration_since(modified).is_ok_and(|age| age > TRUSTED_AGE);
        Ok(Self { path: path.to_owned(), modified, len: metadata.len(), is_trusted })
    }

    /// The file's path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether an equal stamp means the content that was read after this one was taken.
    pub(crate) fn is_trusted(&self) -> bool {
        self.is_trusted
    }
}

impl PartialEq for Stamp {
    fn eq(&self, other: &Self) -> bool {
        (&self.path, self.modified, self.len) == (&other.path, other.modified, other.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_is_as_old_as_it_was_when_it_was_taken() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let modified = SystemTime::now() - Duration::from_hours(1);
        file.as_file().set_modified(modified).unwrap();
        // The process has stood still for almost an hour since.
        for (age, is_trusted) in [(0, false), (1, false), (3, true)] {
            let taken = Stamp::at(file.path(), modified + Duration::from_secs(age)).unwrap();
            assert_eq!(taken.is_trusted(), is_trusted, "{age}");
            assert_eq!(taken, Stamp::of(file.path()).unwrap(), "the file has not changed");
        }
        assert!(!Stamp::at(file.path(), modified - Duration::from_secs(1)).unwrap().is_trusted());
        assert!(Stamp::of(file.path()).unwrap().is_trusted());
    }
}

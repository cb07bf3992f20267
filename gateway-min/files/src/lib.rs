#![doc = include_str!("../README.md")]

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;

/// Writes `content` next to the file, makes it durable and replaces the file with it. `mode` is the new file's
/// permission bits; it gets the old file's owner if the process may set that.
///
/// # Errors
/// The operating system's; the file is then unchanged, unless only the final flush of its directory failed.
pub fn replace(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let part = path.with_file_name(format!(".{}.{}.part", name.display(), uuid::Uuid::new_v4().simple()));
    let written = write_new(&part, content, mode).and_then(|()| {
        keep_owner(path, &part);
        fs::rename(&part, path)
    });
    if let Err(error) = written {
        // It may not exist.
        let _ = fs::remove_file(&part);
        return Err(error);
    }
    sync_directory(path)
}

fn write_new(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, mode);
    #[cfg(not(unix))]
    let _ = mode;
    let mut file = options.open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Gives the new file the old one's owner, for an administrator who edits a service's files.
fn keep_owner(old: &Path, new: &Path) {
    #[cfg(unix)]
    if let Ok(old) = fs::metadata(old) {
        use std::os::unix::fs::MetadataExt as _;
        // Only the superuser may; for everyone else the owner is usually right already.
        let _ = std::os::unix::fs::chown(new, Some(old.uid()), Some(old.gid()));
    }
    #[cfg(not(unix))]
    let _ = (old, new);
}

/// Makes the directory entry of `path` durable.
///
/// # Errors
/// The operating system's.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    #[cfg(unix)]
    if let Some(directory) = path.parent() {
        let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
        File::open(directory)?.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_with_the_mode_that_was_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        for (content, mode) in [("one", 0o600), ("", 0o640)] {
            replace(&path, content.as_bytes(), mode).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
            #[cfg(unix)]
            {
                use std::os::unix::fs::PermissionsExt as _;
                assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
            }
        }
        assert_eq!(names(dir.path()), ["f"], "nothing else is left");
    }

    #[test]
    fn a_failed_replacement_leaves_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let taken = dir.path().join("taken");
        fs::create_dir(&taken).unwrap();
        fs::write(taken.join("inside"), "x").unwrap();
        replace(&taken, b"new", 0o600).unwrap_err();
        assert_eq!(fs::read_to_string(taken.join("inside")).unwrap(), "x");
        assert_eq!(names(dir.path()), ["taken"]);
        replace(&dir.path().join("no/such/place"), b"new", 0o600).unwrap_err();
    }
}

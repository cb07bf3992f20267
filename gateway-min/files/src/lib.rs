#![doc = include_str!("../README.md")]

mod names;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

pub use names::{adopt_thread_names, thread_name};

/// Writes `content` next to the file, makes it durable and replaces the file with it. `mode` is the new file's
/// permission bits; it gets the old file's owner if the process may set that.
///
/// # Errors
/// The operating system's; the file is then unchanged, unless only the final flush of its directory failed.
pub fn replace(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let part = part_of(path)?;
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
    let mut file = open_new(path, mode)?;
    file.write_all(content)?;
    // The umask of this process counts when a file is created, and this one may have been another's.
    #[cfg(unix)]
    file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(mode))?;
    file.sync_all()
}

/// Creates a file that does not exist, not even as a link.
fn open_new(path: &Path, mode: u32) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, mode);
    #[cfg(not(unix))]
    let _ = mode;
    options.open(path)
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

/// Creates a directory that only its owner may enter, with those above it; one that exists is unchanged.
///
/// # Errors
/// The operating system's.
pub fn create_private_dir(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// A new file that only its owner may read, under a name that nobody can foresee until it is complete. Removed when
/// dropped before that.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    part: PathBuf,
    path: PathBuf,
    complete: bool,
}

impl NewFile {
    /// Starts the file that will be at `path`, which must not exist: nothing is overwritten, and no link is followed.
    ///
    /// # Errors
    /// The operating system's; `AlreadyExists` if there is something at `path`.
    pub fn create(path: &Path) -> io::Result<Self> {
        if path.symlink_metadata().is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let part = part_of(path)?;
        let file = open_new(&part, 0o600)?;
        Ok(Self { file, part, path: path.to_owned(), complete: false })
    }

    /// The file, to be written.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Makes the file durable and gives it its name.
    ///
    /// # Errors
    /// The operating system's; `AlreadyExists` if there is something at its path by now.
    pub fn finish(mut self) -> io::Result<()> {
        self.file.sync_all()?;
        // Unlike a rename, a link does not replace what is there.
        match fs::hard_link(&self.part, &self.path) {
            Ok(()) => fs::remove_file(&self.part)?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(error),
            // Not every file system has hard links.
            Err(_) => fs::rename(&self.part, &self.path)?,
        }
        self.complete = true;
        sync_directory(&self.path)
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.complete {
            // Report the error that led here, not one of the cleanup.
            let _ = fs::remove_file(&self.part);
        }
    }
}

/// The name of a file that will become `path`.
fn part_of(path: &Path) -> io::Result<PathBuf> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    Ok(path.with_file_name(format!(".{}.{}.part", name.display(), uuid::Uuid::new_v4().simple())))
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

    #[cfg(unix)]
    #[test]
    fn a_new_file_follows_no_link_overwrites_nothing_and_is_its_owners_alone() {
        use std::io::Write as _;
        use std::os::unix::fs::{PermissionsExt as _, symlink};
        let dir = tempfile::tempdir().unwrap();
        let (path, victim) = (dir.path().join("out"), dir.path().join("victim"));
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, dir.path().join("out.part")).unwrap();
        let file = NewFile::create(&path).unwrap();
        file.file().write_all(b"content").unwrap();
        assert!(!path.exists(), "it is not complete");
        file.finish().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "content");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        for place in [&path, &victim, &dir.path().join("out.part")] {
            let error = NewFile::create(place).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists, "{}", place.display());
        }

        let late = dir.path().join("late");
        let file = NewFile::create(&late).unwrap();
        symlink(&victim, &late).unwrap();
        assert_eq!(file.finish().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        drop(NewFile::create(&dir.path().join("dropped")).unwrap());
        let mut left = names(dir.path());
        left.sort();
        assert_eq!(left, ["late", "out", "out.part", "victim"], "no part remains");
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    }

    #[cfg(unix)]
    #[test]
    fn a_private_directory_is_its_owners_alone_and_an_existing_one_stays() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        create_private_dir(&dir.path().join("a/b")).unwrap();
        assert_eq!((mode(&dir.path().join("a")), mode(&dir.path().join("a/b"))), (0o700, 0o700));
        fs::set_permissions(dir.path().join("a"), fs::Permissions::from_mode(0o750)).unwrap();
        create_private_dir(&dir.path().join("a/b")).unwrap();
        assert_eq!(mode(&dir.path().join("a")), 0o750);
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

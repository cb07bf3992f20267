//! Copies a thread's directory for another thread.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use cap_std::ambient_authority;
use cap_std::fs::{Dir, DirEntry};
use threadkeep_files::create_private_dir;

use super::is_temporary;

/// Copies the directories and files of `from` to `to`, which must not exist, and which only its owner may enter;
/// `false` if there is nothing to copy. Links and special files are skipped: a link may lead outside the directory, or
/// back into `from`. So is what a call is writing or what disappears meanwhile: the items of a batch work in the
/// directory of their thread, and replace files there. Blocks.
///
/// # Errors
/// The file system's; nothing of `to` remains.
pub fn copy(from: &Path, to: &Path) -> io::Result<bool> {
    if !from.try_exists()? {
        return Ok(false);
    }
    let copied = create_private_dir(to).and_then(|()| {
        let open = |path| Dir::open_ambient_dir(path, ambient_authority());
        copy_into(&open(from)?, &open(to)?)
    });
    if copied.is_err() {
        // Report the original error, not one of the cleanup.
        let _ = fs::remove_dir_all(to);
    }
    copied.map(|()| true)
}

/// The handles keep a link that replaces a directory meanwhile from leading the copy elsewhere.
fn copy_into(from: &Dir, to: &Dir) -> io::Result<()> {
    copy_entries(from.entries()?, from, to)
}

fn copy_entries(entries: impl Iterator<Item = io::Result<DirEntry>>, from: &Dir, to: &Dir) -> io::Result<()> {
    for entry in entries {
        match copy_entry(&entry?, from, to) {
            Err(gone) if gone.kind() == ErrorKind::NotFound => {}
            copied => copied?,
        }
    }
    Ok(())
}

fn copy_entry(entry: &DirEntry, from: &Dir, to: &Dir) -> io::Result<()> {
    let (kind, name) = (entry.file_type()?, entry.file_name());
    if is_temporary(&name) {
        return Ok(());
    }
    if kind.is_dir() {
        let inside = entry.open_dir()?;
        to.create_dir(&name)?;
        copy_into(&inside, &to.open_dir(&name)?)?;
    } else if kind.is_file() {
        from.copy(&name, to, &name)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_copy_is_for_its_owner_alone_and_has_no_file_that_a_call_was_writing() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir(&from).unwrap();
        fs::write(from.join("file"), "text").unwrap();
        fs::write(from.join(format!(".{}.tmp", "a".repeat(32))), "te").unwrap();
        assert!(copy(&from, &to).unwrap());
        assert_eq!(fs::metadata(&to).unwrap().permissions().mode() & 0o777, 0o700);
        let copied: Vec<_> = fs::read_dir(&to).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(copied, ["file"]);
    }

    #[test]
    fn files_and_directories_are_copied_and_links_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        assert!(!copy(&from, &to).unwrap());
        assert!(!to.exists());
        fs::create_dir_all(from.join("a/b")).unwrap();
        fs::write(from.join("a/b/file"), "text").unwrap();
        fs::write(dir.path().join("secret"), "outside").unwrap();
        std::os::unix::fs::symlink(dir.path().join("secret"), from.join("link")).unwrap();
        assert!(copy(&from, &to).unwrap());
        assert_eq!(fs::read_to_string(to.join("a/b/file")).unwrap(), "text");
        assert!(!to.join("link").exists());
    }

    #[test]
    fn what_disappears_meanwhile_is_skipped_and_the_rest_is_copied() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        for directory in ["kept", "gone"] {
            fs::create_dir_all(from.join(directory)).unwrap();
            fs::write(from.join(directory).join("file"), directory).unwrap();
        }
        for file in ["a", "b", "c"] {
            fs::write(from.join(file), file).unwrap();
        }
        fs::create_dir(&to).unwrap();
        let open = |path: &Path| Dir::open_ambient_dir(path, ambient_authority()).unwrap();
        let (source, target) = (open(&from), open(&to));
        let listed: Vec<io::Result<DirEntry>> = source.entries().unwrap().collect();
        assert_eq!(listed.len(), 5);
        fs::remove_file(from.join("b")).unwrap();
        fs::remove_dir_all(from.join("gone")).unwrap();
        copy_entries(listed.into_iter(), &source, &target).unwrap();
        let mut copied: Vec<_> = fs::read_dir(&to).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        copied.sort_unstable();
        assert_eq!(copied, ["a", "c", "kept"]);
        assert_eq!(fs::read_to_string(to.join("kept/file")).unwrap(), "kept");
    }

    #[test]
    fn a_copy_that_fails_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("from");
        fs::write(&from, "a file").unwrap();
        let to = dir.path().join("to");
        copy(&from, &to).unwrap_err();
        assert!(!to.exists());
    }
}

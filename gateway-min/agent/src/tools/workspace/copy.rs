//! Copies a thread's directory for another thread.

use std::fs;
use std::io;
use std::path::Path;

use cap_std::ambient_authority;
use cap_std::fs::Dir;

/// Copies the directories and files of `from` to `to`, which must not exist; `false` if there is nothing to copy. Links
/// and special files are skipped: a link may lead outside the directory, or back into `from`. Blocks.
///
/// # Errors
/// The file system's; nothing of `to` remains.
pub fn copy(from: &Path, to: &Path) -> io::Result<bool> {
    if !from.try_exists()? {
        return Ok(false);
    }
    let copied = fs::create_dir_all(to).and_then(|()| {
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
    for entry in from.entries()? {
        let entry = entry?;
        let (kind, name) = (entry.file_type()?, entry.file_name());
        if kind.is_dir() {
            to.create_dir(&name)?;
            copy_into(&entry.open_dir()?, &to.open_dir(&name)?)?;
        } else if kind.is_file() {
            from.copy(&name, to, &name)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_copy_that_fails_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("from");
        fs::write(&from, "a file").unwrap();
        let to = dir.path().join("to");
        copy(&from, &to).unwrap_err();
        assert!(!to.exists());
    }
}

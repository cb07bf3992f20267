//! Cleans up at once after a dead process of the same machine, if several share a database.
//!
//! The rows of a killed process are ended when its lease and the grace have expired, because other machines cannot know
//! whether it is alive. Its successor on the same machine can: it holds the lock of a file in the state directory,
//! which the operating system releases when a process dies, and finds there the name under which the last holder owned
//! its rows.
//!
//! The name only counts in the same file and the same boot of the system in which it was written. A copy of the
//! directory, even on another machine, and a file system that does not lock across machines, prove nothing; then the
//! leases decide, as they do if the operating system identifies neither.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// The file in the state directory.
const FILE: &str = "instance.json";
/// Identifies a boot of the system.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The lock of a state directory, held until this is dropped or the process dies.
#[derive(Debug)]
pub(crate) struct Instance {
    file: File,
    place: FileIdentity,
}

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    owner: String,
    place: FileIdentity,
}

/// A file, in one boot of the system.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileIdentity {
    boot: String,
    device: u64,
    inode: u64,
}

impl Instance {
    /// Takes the lock of the state directory; `None` if a live process holds it. Blocks briefly.
    ///
    /// # Errors
    /// The operating system's.
    pub(crate) fn enter(state_dir: &Path) -> io::Result<Option<Self>> {
        threadkeep_files::create_private_dir(state_dir)?;
        let path = state_dir.join(FILE);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self { place: FileIdentity::of(&file)?, file })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// The name of the previous holder, if it is certainly gone.
    pub(crate) fn predecessor(&mut self) -> Option<String> {
        let mut text = String::new();
        self.file.rewind().and_then(|()| self.file.read_to_string(&mut text)).ok()?;
        let note: Note = serde_json::from_str(&text).ok()?;
        (note.place == self.place).then_some(note.owner)
    }

    /// Records the name of this process: call it after the predecessor's rows are ended, and before this process owns
    /// any.
    ///
    /// # Errors
    /// The operating system's.
    pub(crate) fn sign(&mut self, owner: &str) -> io::Result<()> {
        let note = Note { owner: owner.to_owned(), place: FileIdentity::of(&self.file)? };
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.file.write_all(&serde_json::to_vec(&note)?)?;
        self.file.sync_all()
    }
}

impl FileIdentity {
    #[cfg(unix)]
    fn of(file: &File) -> io::Result<Self> {
        use std::os::unix::fs::MetadataExt as _;
        let metadata = file.metadata()?;
        let boot = std::fs::read_to_string(BOOT_ID)?.trim().to_owned();
        Ok(Self { boot, device: metadata.dev(), inode: metadata.ino() })
    }

    #[cfg(not(unix))]
    fn of(_: &File) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;

    fn note(dir: &Path) -> String {
        std::fs::read_to_string(dir.join(FILE)).unwrap()
    }

    /// Takes a lock that nobody holds any more. A program that another test starts has this process's open files, and
    /// with them their locks, until it is executed.
    fn enter(state_dir: &Path) -> Instance {
        for _ in 0..60_000 {
            if let Some(instance) = Instance::enter(state_dir).unwrap() {
                return instance;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        panic!("it is locked for ever");
    }

    #[test]
    fn a_process_knows_the_one_before_it_and_not_one_that_lives() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let mut first = Instance::enter(&state).unwrap().unwrap();
        assert_eq!(first.predecessor(), None);
        first.sign("a process with a long name").unwrap();
        assert!(Instance::enter(&state).unwrap().is_none(), "it lives");
        drop(first);
        let mut second = enter(&state);
        for _ in 0..2 {
            assert_eq!(second.predecessor().as_deref(), Some("a process with a long name"));
        }
        second.sign("b").unwrap();
        drop(second);
        assert_eq!(enter(&state).predecessor().as_deref(), Some("b"));
    }

    #[test]
    fn a_copy_and_a_note_of_another_start_of_the_system_and_half_a_note_prove_nothing() {
        let (dir, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        Instance::enter(dir.path()).unwrap().unwrap().sign("a").unwrap();
        let whole = note(dir.path());
        std::fs::write(copy.path().join(FILE), &whole).unwrap();
        assert_eq!(Instance::enter(copy.path()).unwrap().unwrap().predecessor(), None);
        let boot = std::fs::read_to_string(BOOT_ID).unwrap();
        let other = whole.replace(boot.trim(), "00000000-0000-0000-0000-000000000000");
        for text in [other.as_str(), &whole[..whole.len() - 1], "", "[]"] {
            std::fs::write(dir.path().join(FILE), text).unwrap();
            assert_eq!(enter(dir.path()).predecessor(), None, "{text}");
        }
        std::fs::write(dir.path().join(FILE), &whole).unwrap();
        let again = enter(dir.path()).predecessor();
        assert_eq!(again.as_deref(), Some("a"), "what was written in place is the same file");
    }
}

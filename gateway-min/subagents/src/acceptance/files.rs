//! Looks at files of a thread: bounded, without following a path out of the thread's directory.

use std::io::{self, Read as _};
use std::path::{Component, Path, PathBuf};

use cap_fs_ext::{FollowSymlinks, OpenOptionsFollowExt as _, OpenOptionsSyncExt as _};
use cap_std::ambient_authority;
use cap_std::fs::{Dir, File, OpenOptions};

use super::Finding;
use super::form::Want;

/// Of a larger file only the size is looked at, in bytes.
const MAX_READ_BYTES: u64 = 50_000;
/// Where tools of other systems find the thread's files; accepted in criteria.
const VIRTUAL: &str = "/mnt/user-data";
/// The folder with what users sent. A file that was there before the task is no evidence of it.
const UPLOADS: &str = "uploads";

/// The service reference, "Acceptance criteria", has these texts.
const UNAVAILABLE: &str = "shared thread workspace unavailable";
const OUTSIDE: &str = "path is outside the shared thread workspace";
const ABSENT: &str = "file does not exist";
const NO_SIZE: &str = "file size could not be established by a bounded probe; content not read";
const NOT_OPENED: &str = "file cannot be opened for reading (bounded open probe failed)";
const EMPTY: &str = "file is empty";

/// A thread's directory.
#[derive(Debug)]
pub(super) struct Workspace {
    /// As it was given.
    given: PathBuf,
    /// Canonical, so that a path inside has it as a prefix.
    root: PathBuf,
    /// The open directory: nothing outside it is opened.
    dir: Dir,
}

impl Workspace {
    /// The directory at `given`; `None` if there is none.
    pub(super) fn open(given: &Path) -> Option<Self> {
        let root = given.canonicalize().ok()?;
        let dir = Dir::open_ambient_dir(&root, ambient_authority()).ok()?;
        Some(Self { given: given.to_owned(), root, dir })
    }

    /// `path` of a criterion, relative to the root; `None` if it leads outside, by its text.
    fn relative(&self, path: &str) -> Option<PathBuf> {
        let path = Path::new(path);
        let whole = normal(&self.given.join(path));
        let inside = if let Ok(of_thread) = whole.strip_prefix(VIRTUAL) {
            let mut parts = of_thread.components();
            match parts.next()?.as_os_str().to_str()? {
                "workspace" => parts.as_path().to_owned(),
                "outputs" => Path::new("outputs").join(parts.as_path()),
                _ => return None,
            }
        } else {
            let roots = [&self.given, &self.root];
            roots.into_iter().find_map(|root| whole.strip_prefix(root).ok())?.to_owned()
        };
        (!inside.starts_with(UPLOADS)).then_some(inside)
    }

    /// Where `path` really is, relative to the root.
    fn resolve(&self, path: &str) -> Result<PathBuf, Finding> {
        let outside = || Finding::Unchecked(OUTSIDE.to_owned());
        let whole = self.root.join(self.relative(path).ok_or_else(outside)?);
        let exists = |part: &&Path| part.symlink_metadata().is_ok();
        let existing = whole.ancestors().find(exists).unwrap_or(&self.root);
        let real = match existing.canonicalize() {
            Ok(real) => real,
            // A link whose target is missing.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(absent()),
            Err(_) => return Err(Finding::Unchecked(NO_SIZE.to_owned())),
        };
        let inside = real.strip_prefix(&self.root).ok().filter(|inside| !inside.starts_with(UPLOADS));
        let inside = inside.ok_or_else(outside)?;
        if existing != whole {
            return Err(absent());
        }
        let is_root = inside.as_os_str().is_empty();
        Ok(if is_root { PathBuf::from(".") } else { inside.to_owned() })
    }

    /// Opens the file at a resolved path, even if it was replaced by a link or a pipe meanwhile.
    fn file(&self, path: &Path) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).follow(FollowSymlinks::No).nonblock(true);
        let file = self.dir.open_with(path, &options)?;
        if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is not a regular file")) }
    }
}

fn absent() -> Finding {
    Finding::DoesNotHold(ABSENT.to_owned())
}

/// A path without `.` and `..`, by its text.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                normal.pop();
            }
            part => normal.push(part),
        }
    }
    normal
}

/// Whether the file at `path` is as wanted. Blocks.
pub(super) fn check(workspace: Option<&Workspace>, path: &str, want: Want) -> Finding {
    let Some(workspace) = workspace else { return Finding::Unchecked(UNAVAILABLE.to_owned()) };
    let path = match workspace.resolve(path) {
        Ok(path) => path,
        Err(finding) => return finding,
    };
    let size = match workspace.dir.symlink_metadata(&path) {
        Ok(found) if found.is_file() => found.len(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return absent(),
        _ => return Finding::Unchecked(NO_SIZE.to_owned()),
    };
    if size > MAX_READ_BYTES {
        return of_large(workspace, &path, want, size);
    }
    let mut content = Vec::new();
    let read = workspace.file(&path).and_then(|file| file.take(MAX_READ_BYTES + 1).read_to_end(&mut content));
    match read {
        Ok(_) if content.len() as u64 > MAX_READ_BYTES => {
            of_large(workspace, &path, want, content.len() as u64)
        }
        Ok(_) => of_content(&content, want),
        Err(error) if error.kind() == io::ErrorKind::NotFound => absent(),
        Err(error) => Finding::Unchecked(format!("read failed: {error}")),
    }
}

fn of_large(workspace: &Workspace, path: &Path, want: Want, size: u64) -> Finding {
    match want {
        Want::Exists => Finding::Holds(format!("exists, {size} bytes")),
        Want::NonEmpty => Finding::Holds(format!("{size} bytes")),
        Want::Written => match workspace.file(path).and_then(|mut file| file.read_exact(&mut [0])) {
            Ok(()) => Finding::Holds(format!("opened for reading, {size} bytes")),
            Err(_) => Finding::Unchecked(NOT_OPENED.to_owned()),
        },
    }
}

fn of_content(content: &[u8], want: Want) -> Finding {
    let size = content.len();
    if std::str::from_utf8(content).is_err() {
        return Finding::Holds(format!("binary file, {size} bytes"));
    }
    match want {
        Want::Exists => Finding::Holds(format!("exists, {size} bytes")),
        Want::NonEmpty if size == 0 => Finding::DoesNotHold(EMPTY.to_owned()),
        Want::NonEmpty => Finding::Holds(format!("{size} bytes")),
        Want::Written => Finding::Holds(format!("read-back ok, {size} bytes")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    struct Thread(tempfile::TempDir);

    impl Thread {
        /// A thread's directory, beside a directory that is none of its business.
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            for folder in ["t/outputs", "t/uploads", "t/sub", "other"] {
                fs::create_dir_all(dir.path().join(folder)).unwrap();
            }
            fs::write(dir.path().join("other/secret"), "x").unwrap();
            fs::write(dir.path().join("t/uploads/sent.txt"), "sent").unwrap();
            Self(dir)
        }

        fn root(&self) -> PathBuf {
            self.0.path().join("t")
        }

        fn write(&self, path: &str, content: impl AsRef<[u8]>) {
            fs::write(self.root().join(path), content).unwrap();
        }

        fn check(&self, path: &str, want: Want) -> Finding {
            check(Workspace::open(&self.root()).as_ref(), path, want)
        }

        fn all(&self, path: &str) -> [Finding; 3] {
            [Want::Exists, Want::NonEmpty, Want::Written].map(|want| self.check(path, want))
        }
    }

    fn holds(detail: &str) -> Finding {
        Finding::Holds(detail.to_owned())
    }

    fn unchecked(detail: &str) -> [Finding; 3] {
        [0; 3].map(|_| Finding::Unchecked(detail.to_owned()))
    }

    /// Scenario 22.
    #[test]
    fn each_form_on_present_missing_and_empty_files() {
        let thread = Thread::new();
        thread.write("a.txt", "abc");
        thread.write("empty", "");
        thread.write("outputs/b.txt", "b");
        let found = [holds("exists, 3 bytes"), holds("3 bytes"), holds("read-back ok, 3 bytes")];
        for path in ["a.txt", "./a.txt", "sub/../a.txt", "/mnt/user-data/workspace/a.txt"] {
            assert_eq!(thread.all(path), found, "{path}");
        }
        assert_eq!(thread.all(thread.root().join("a.txt").to_str().unwrap()), found, "its whole path");
        let one = [holds("exists, 1 bytes"), holds("1 bytes"), holds("read-back ok, 1 bytes")];
        for path in
            ["outputs/b.txt", "/mnt/user-data/outputs/b.txt", "/mnt/user-data/workspace/outputs/b.txt"]
        {
            assert_eq!(thread.all(path), one, "{path}");
        }
        let empty = Finding::DoesNotHold("file is empty".to_owned());
        assert_eq!(thread.all("empty"), [holds("exists, 0 bytes"), empty, holds("read-back ok, 0 bytes")]);
        let missing = [0; 3].map(|_| Finding::DoesNotHold("file does not exist".to_owned()));
        for path in ["none", "none/at/all", "a.txt/x", "/mnt/user-data/outputs/none"] {
            assert_eq!(thread.all(path), missing, "{path}");
        }
    }

    /// Scenario 22 and bug 29: an upload is no evidence, by whatever path.
    #[test]
    fn what_is_outside_or_was_uploaded_is_not_looked_at() {
        let thread = Thread::new();
        symlink("uploads/sent.txt", thread.root().join("by-link")).unwrap();
        symlink("uploads", thread.root().join("sub/uploads")).unwrap();
        symlink(thread.0.path().join("other"), thread.root().join("out")).unwrap();
        symlink("../uploads", thread.root().join("outputs/up")).unwrap();
        for path in [
            "../other/secret",
            "sub/../../other/secret",
            "/etc/hostname",
            "out/secret",
            "out/none",
            "uploads/sent.txt",
            "./uploads/none",
            "by-link",
            "outputs/up/sent.txt",
            "/mnt/user-data/uploads/sent.txt",
            "/mnt/user-data/workspace/uploads/sent.txt",
            "/mnt/user-data/workspace/../uploads/sent.txt",
            "/mnt/user-data",
            "/mnt/user-data/../../etc/hostname",
            "/mnt/elsewhere/a",
        ] {
            assert_eq!(thread.all(path), unchecked(OUTSIDE), "{path}");
        }
        assert_eq!(check(None, "a.txt", Want::Exists), Finding::Unchecked(UNAVAILABLE.to_owned()));
        assert!(Workspace::open(&thread.root().join("none")).is_none());
    }

    #[test]
    fn a_link_inside_counts_as_its_target_and_a_broken_one_as_missing() {
        let thread = Thread::new();
        thread.write("a.txt", "abc");
        symlink("a.txt", thread.root().join("link")).unwrap();
        symlink(thread.root().join("a.txt"), thread.root().join("whole")).unwrap();
        symlink("none", thread.root().join("broken")).unwrap();
        symlink("circle", thread.root().join("circle")).unwrap();
        assert_eq!(thread.check("link", Want::NonEmpty), holds("3 bytes"));
        assert_eq!(thread.check("whole", Want::NonEmpty), holds("3 bytes"));
        assert_eq!(thread.check("broken", Want::Exists), Finding::DoesNotHold(ABSENT.to_owned()));
        assert_eq!(thread.check("circle", Want::Exists), Finding::Unchecked(NO_SIZE.to_owned()));
    }

    /// Scenario 22.
    #[test]
    fn only_regular_files_have_a_size() {
        let thread = Thread::new();
        let pipe = thread.root().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        for path in ["sub", ".", "pipe", "/mnt/user-data/workspace"] {
            assert_eq!(thread.all(path), unchecked(NO_SIZE), "{path}");
        }
    }

    /// Scenario 22.
    #[test]
    fn content_is_read_up_to_50000_bytes_and_binary_files_count() {
        let thread = Thread::new();
        thread.write("at", "x".repeat(50_000));
        thread.write("beyond", "x".repeat(50_001));
        thread.write("binary", [0xff, 0xfe]);
        let sizes = |size: &str, written: &str| {
            [holds(&format!("exists, {size}")), holds(size), holds(&format!("{written}, {size}"))]
        };
        assert_eq!(thread.all("at"), sizes("50000 bytes", "read-back ok"));
        assert_eq!(thread.all("beyond"), sizes("50001 bytes", "opened for reading"));
        assert_eq!(thread.all("binary"), [0; 3].map(|_| holds("binary file, 2 bytes")));
    }

    /// Scenario 22 and bug 29. Root may read everything, so a thread of the test becomes somebody else.
    #[test]
    fn a_file_of_mode_000_is_not_written() {
        let thread = Thread::new();
        thread.write("small", "abc");
        thread.write("large", "x".repeat(50_001));
        let open = |mode| fs::Permissions::from_mode(mode);
        for path in ["small", "large"] {
            fs::set_permissions(thread.root().join(path), open(0o000)).unwrap();
        }
        fs::set_permissions(thread.0.path(), open(0o755)).unwrap();
        let work = std::thread::spawn(move || {
            if rustix::process::geteuid().is_root() {
                let nobody = rustix::fs::Uid::from_raw(65_534);
                rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            }
            (thread.all("small"), thread.all("large"), thread)
        });
        let (small, large, _thread) = work.join().unwrap();
        for finding in small {
            assert!(
                matches!(&finding, Finding::Unchecked(why) if why.starts_with("read failed: ")),
                "{finding:?}"
            );
        }
        let [exists, non_empty, written] = large;
        assert_eq!([exists, non_empty], [holds("exists, 50001 bytes"), holds("50001 bytes")]);
        assert_eq!(written, Finding::Unchecked(NOT_OPENED.to_owned()));
    }
}

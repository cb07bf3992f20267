//! A thread's own directory, and the only way the file tools reach files: nothing outside it is read or written, for
//! any path.
//!
//! A path must be relative and free of `..`. Its deepest existing part is then resolved, including symbolic links, and
//! must be inside the directory. A link may be created after that, for example by a `bash` command. So everything is
//! opened relative to a handle of the directory, and no component can lead out of it (`cap-std`); files are never opened
//! through a link as the last component, and new content first goes to a temporary file beside its target.

pub(super) mod copy;
pub(super) mod snapshot;

use std::ffi::{OsStr, OsString};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read, Write};
use std::ops::ControlFlow;
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cap_fs_ext::{FollowSymlinks, OpenOptionsFollowExt, OpenOptionsSyncExt};
use cap_std::ambient_authority;
use cap_std::fs::{Dir, File, FileType, OpenOptions};
use threadkeep_files::create_private_dir;
use uuid::Uuid;

use super::ToolError;

/// The maximum size of a file that the tools read or write, in bytes.
pub(super) const MAX_FILE_BYTES: usize = 10 * 1024 * 1024;
/// The maximum length of a path, in bytes: that of the operating system, which is asked about each beginning of a path.
/// So a path of megabytes would keep a thread busy for hours.
const MAX_PATH_BYTES: usize = 4096;
/// The maximum number of directories in a path. Whatever removes or copies a directory holds each of them open.
const MAX_PATH_PARTS: usize = 128;
/// The maximum number of entries that a walk visits.
pub(super) const MAX_WALK_ENTRIES: usize = 20_000;

/// A thread's directory. All its methods block.
pub(super) struct Workspace {
    /// Canonical, so that a path inside has it as a prefix.
    root: PathBuf,
    /// The open directory.
    dir: Dir,
}

/// An entry visited by a walk.
pub(super) struct Visited {
    /// Its path inside the workspace.
    pub(super) path: PathBuf,
    /// Its depth below the start; 1 for the start's own entries.
    pub(super) depth: usize,
    /// Its own type: a link is not followed.
    pub(super) kind: FileType,
}

impl Workspace {
    /// The workspace in `root`, which is created if it does not exist.
    pub(super) fn open(root: &Path) -> Result<Self, ToolError> {
        let opened = create_private_dir(root).and_then(|()| Self::at(root));
        opened.map_err(|source| file_error("use", "the working directory", source))
    }

    /// The workspace in an existing directory.
    fn at(root: &Path) -> io::Result<Self> {
        let root = root.canonicalize()?;
        let dir = Dir::open_ambient_dir(&root, ambient_authority())?;
        Ok(Self { root, dir })
    }

    /// The workspace's directory.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// `path`, which is inside, as shown by the tools.
    pub(super) fn shown(&self, path: &Path) -> String {
        path.strip_prefix(&self.root).unwrap_or(path).display().to_string()
    }

    /// Where `path` leads: a canonical path inside the workspace, whose last components may not exist yet.
    pub(super) fn resolve(&self, path: &str) -> Result<PathBuf, ToolError> {
        let refused = |reason| ToolError::Path { path: path.to_owned(), reason };
        if path.len() > MAX_PATH_BYTES {
            // The reason follows the path, and what a tool returns is cut at its end.
            let path = path.chars().take(200).chain(['\u{2026}']).collect();
            return Err(ToolError::Path { path, reason: "it has more than 4096 bytes" });
        }
        if path.contains('\0') {
            return Err(refused("it has a NUL byte"));
        }
        let mut inside = PathBuf::new();
        for part in Path::new(path).components() {
            match part {
                Component::Normal(name) => inside.push(name),
                Component::CurDir => {}
                Component::ParentDir => return Err(refused("it has `..`")),
                Component::RootDir | Component::Prefix(_) => return Err(refused("it is absolute")),
            }
        }
        if inside.components().count() > MAX_PATH_PARTS {
            return Err(refused("it has more than 128 parts"));
        }
        let full = self.root.join(&inside);
        let existing = full.ancestors().find(|part| part.symlink_metadata().is_ok()).unwrap_or(&self.root);
        // A path that exists but does not resolve is a broken or circular link.
        let resolved = existing.canonicalize().map_err(|_| refused("it has a broken link"))?;
        if !resolved.starts_with(&self.root) {
            return Err(refused("it leads out of the working directory"));
        }
        // Joining an empty rest would append a slash, which does not work for a file.
        match full.strip_prefix(existing) {
            Ok(rest) if rest.as_os_str().is_empty() => Ok(resolved),
            Ok(rest) => Ok(resolved.join(rest)),
            Err(_) => Err(refused("it cannot be resolved")),
        }
    }

    /// The content of the file at `path`.
    pub(super) fn read(&self, path: &str) -> Result<Vec<u8>, ToolError> {
        let resolved = self.resolve(path)?;
        self.read_resolved(&resolved).map_err(|source| file_error("read", path, source))
    }

    /// The content of the file at `path`, a canonical path inside.
    pub(super) fn read_resolved(&self, path: &Path) -> io::Result<Vec<u8>> {
        let mut options = OpenOptions::new();
        // Opening a pipe would otherwise wait for a writer.
        options.read(true).follow(FollowSymlinks::No).nonblock(true);
        let file = self.dir.open_with(self.below(path), &options).map_err(named)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            let what = if metadata.is_dir() { "it is a directory" } else { "it is not a regular file" };
            return Err(io::Error::other(what));
        }
        let too_large = || io::Error::other(format!("it is larger than {MAX_FILE_BYTES} bytes"));
        if metadata.len() > MAX_FILE_BYTES as u64 {
            return Err(too_large());
        }
        let mut content = Vec::new();
        // The file may be growing.
        file.take(MAX_FILE_BYTES as u64 + 1).read_to_end(&mut content)?;
        if content.len() > MAX_FILE_BYTES { Err(too_large()) } else { Ok(content) }
    }

    /// Writes `content` to the file at `path`, creating its directories. The file is either written completely or
    /// unchanged. Returns its path, as shown by the tools.
    pub(super) fn write(&self, path: &str, content: &[u8]) -> Result<String, ToolError> {
        let resolved = self.resolve(path)?;
        let _lock = lock(&resolved);
        self.replace(&resolved, content).map_err(|source| file_error("write", path, source))?;
        Ok(self.shown(&resolved))
    }

    /// Replaces the content of the file at `path` by the result of `change`. Edits of one file do not overlap. Returns
    /// its path, as shown by the tools.
    pub(super) fn edit(
        &self,
        path: &str,
        change: impl FnOnce(Vec<u8>) -> Result<Vec<u8>, ToolError>,
    ) -> Result<String, ToolError> {
        let resolved = self.resolve(path)?;
        let _lock = lock(&resolved);
        let content = self.read_resolved(&resolved).map_err(|source| file_error("read", path, source))?;
        let changed = change(content)?;
        self.replace(&resolved, &changed).map_err(|source| file_error("write", path, source))?;
        Ok(self.shown(&resolved))
    }

    fn replace(&self, target: &Path, content: &[u8]) -> io::Result<()> {
        if content.len() > MAX_FILE_BYTES {
            return Err(io::Error::other(format!("the content is larger than {MAX_FILE_BYTES} bytes")));
        }
        let target = self.below(target);
        let Some(name) = target.file_name() else { return Err(io::Error::other("it is a directory")) };
        let directory = match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => self.open_or_create(parent).map_err(named)?,
            _ => self.dir.try_clone()?,
        };
        let old = match directory.symlink_metadata(name) {
            Ok(old) if old.is_file() => Some(old),
            Ok(old) if old.is_dir() => return Err(io::Error::other("it is a directory")),
            Ok(_) => return Err(io::Error::other("it is not a regular file")),
            Err(_) => None,
        };
        let mut temporary = Temporary::new(directory)?;
        temporary.file.write_all(content)?;
        if let Some(old) = old {
            temporary.file.set_permissions(old.permissions())?;
        }
        temporary.file.sync_all()?;
        temporary.rename(name)
    }

    fn open_or_create(&self, directory: &Path) -> io::Result<Dir> {
        match self.dir.open_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.dir.create_dir_all(directory)?;
                self.dir.open_dir(directory)
            }
            other => other,
        }
    }

    /// A canonical path inside, relative to the open directory.
    fn below<'a>(&self, path: &'a Path) -> &'a Path {
        match path.strip_prefix(&self.root) {
            Ok(rest) if rest.as_os_str().is_empty() => Path::new("."),
            Ok(rest) => rest,
            Err(_) => path,
        }
    }

    /// Visits the file at `path`, or the entries of the directory there, in order of their names; descends into a
    /// directory if `visit` returns `Continue(true)`. Links are visited, not followed. Returns whether the walk was
    /// complete, stopped neither by `visit` nor by [`MAX_WALK_ENTRIES`].
    pub(super) fn walk(
        &self,
        path: &str,
        mut visit: impl FnMut(&Visited) -> ControlFlow<(), bool>,
    ) -> Result<bool, ToolError> {
        let start = self.resolve(path)?;
        let mut ahead = match self.dir.symlink_metadata(self.below(&start)) {
            Ok(found) if found.is_file() => vec![Visited { path: start, depth: 1, kind: found.file_type() }],
            _ => self.list(&start, 1).map_err(|source| file_error("list", path, source))?,
        };
        let (mut visited, mut complete) = (0, true);
        while let Some(entry) = ahead.pop() {
            visited += 1;
            match visit(&entry) {
                ControlFlow::Break(()) => return Ok(false),
                // An unreadable or deleted directory has no entries to visit.
                ControlFlow::Continue(true) if entry.kind.is_dir() => {
                    ahead.extend(self.list(&entry.path, entry.depth + 1).unwrap_or_default());
                }
                ControlFlow::Continue(_) => {}
            }
            if visited + ahead.len() > MAX_WALK_ENTRIES {
                // The next entries are at the end.
                ahead.drain(..ahead.len().min(visited + ahead.len() - MAX_WALK_ENTRIES));
                complete = false;
            }
        }
        Ok(complete)
    }

    /// The entries of a directory, in reverse order of their names.
    fn list(&self, directory: &Path, depth: usize) -> io::Result<Vec<Visited>> {
        let mut entries = Vec::new();
        // One more than will be visited, so that the walk notices that there are more.
        for entry in self.dir.read_dir(self.below(directory)).map_err(named)?.take(MAX_WALK_ENTRIES + 1) {
            let entry = entry?;
            if is_temporary(&entry.file_name()) {
                continue;
            }
            entries.push(Visited {
                path: directory.join(entry.file_name()),
                depth,
                kind: entry.file_type()?,
            });
        }
        entries.sort_by(|one, other| other.path.cmp(&one.path));
        Ok(entries)
    }
}

fn file_error(action: &'static str, path: &str, source: io::Error) -> ToolError {
    ToolError::File { action, path: path.to_owned(), source }
}

/// Says what happened if a path that was resolved inside now leads out of the directory.
fn named(error: io::Error) -> io::Error {
    // This error is the library's own, not the system's.
    if error.kind() == io::ErrorKind::PermissionDenied && error.raw_os_error().is_none() {
        return io::Error::other("it was moved or replaced by a link meanwhile");
    }
    error
}

/// Serialises changes of one file. Files share locks, which only costs some waiting.
fn lock(path: &Path) -> MutexGuard<'static, ()> {
    static LOCKS: [Mutex<()>; 64] = [const { Mutex::new(()) }; 64];
    let mut hasher = DefaultHasher::new();
    path.hash(&mut hasher);
    let index = usize::try_from(hasher.finish() % LOCKS.len() as u64).unwrap_or_default();
    LOCKS[index].lock().unwrap_or_else(PoisonError::into_inner)
}

/// The end of a temporary file's name.
const TEMPORARY: &str = ".tmp";

/// Whether this is the name of a [`Temporary`]: an agent must not see, edit or report a file that another call is writing.
fn is_temporary(name: &OsStr) -> bool {
    let id = name.to_str().and_then(|name| name.strip_prefix('.')?.strip_suffix(TEMPORARY));
    id.is_some_and(|id| id.len() == 32 && id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')))
}

/// A file that is removed unless it is renamed.
struct Temporary {
    file: File,
    directory: Dir,
    name: OsString,
    renamed: bool,
}

impl Temporary {
    fn new(directory: Dir) -> io::Result<Self> {
        let name = OsString::from(format!(".{}{TEMPORARY}", Uuid::new_v4().simple()));
        let file = directory.open_with(&name, OpenOptions::new().write(true).create_new(true))?;
        Ok(Self { file, directory, name, renamed: false })
    }

    fn rename(mut self, name: &OsStr) -> io::Result<()> {
        self.directory.rename(&self.name, &self.directory, name)?;
        self.renamed = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.renamed {
            let _ = self.directory.remove_file(&self.name);
        }
    }
}

#[cfg(test)]
mod tests;

//! What a run changed in its thread's directory: a snapshot before the run, one after it, and the difference.
//!
//! Stores only names, sizes, times and hashes, never content. The work is bounded; what one snapshot skipped is
//! excluded from the comparison on both sides, so that a bound never makes an untouched file look new or deleted.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use cap_std::fs::{Metadata, MetadataExt};
use serde::Serialize;

use super::{MAX_WALK_ENTRIES, Workspace};

/// The maximum number of files in a snapshot.
const MAX_FILES: usize = 5_000;
/// Files up to this size are hashed; larger ones are compared by size and modification time.
const MAX_HASHED_FILE: u64 = 1024 * 1024;
/// The maximum number of bytes hashed per snapshot.
const MAX_HASHED_TOTAL: u64 = 32 * 1024 * 1024;
/// The maximum length of each list in [`Changes`].
const MAX_LISTED: usize = 200;

/// The files of a thread's directory at one time, by path. Links are neither followed nor listed.
#[derive(Debug, Default)]
pub struct Snapshot {
    files: BTreeMap<PathBuf, Print>,
    /// Directories that could not be read, or have too many entries.
    skipped: Vec<PathBuf>,
    /// The first path beyond the limit; neither it nor any later path was visited.
    end: Option<PathBuf>,
}

/// What distinguishes versions of a file.
#[derive(Debug, Clone, Copy)]
struct Print {
    size: u64,
    modified: (i64, i64),
    /// For small files only.
    hash: Option<blake3::Hash>,
}

impl Print {
    fn same(&self, other: &Self) -> bool {
        self.size == other.size
            && match (self.hash, other.hash) {
                (Some(hash), Some(other)) => hash == other,
                _ => self.modified == other.modified,
            }
    }
}

/// What differs between two snapshots: the content of a `workspace_changes` event. Each list is sorted by path and has
/// at most 200 entries.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Changes {
    created: Vec<Change>,
    modified: Vec<Change>,
    deleted: Vec<Change>,
    truncated: Truncated,
}

/// One file.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct Change {
    /// Relative to the thread's directory.
    path: String,
    /// In bytes; for a deleted file, its last size.
    size: u64,
}

/// Which parts are incomplete.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct Truncated {
    created: bool,
    modified: bool,
    deleted: bool,
    /// Whether a snapshot reached a limit, so that parts of the directory were not compared.
    scan: bool,
}

/// The limits of a snapshot.
struct Limits {
    files: usize,
    entries: usize,
    hashed_total: u64,
}

impl Snapshot {
    /// The current files in `root`; `None` if it does not exist. Blocks.
    pub fn take(root: &Path) -> io::Result<Self> {
        let limits = Limits { files: MAX_FILES, entries: MAX_WALK_ENTRIES, hashed_total: MAX_HASHED_TOTAL };
        Self::take_within(root, &limits)
    }

    fn take_within(root: &Path, limits: &Limits) -> io::Result<Self> {
        let workspace = match Workspace::at(root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            other => other?,
        };
        let mut snapshot = Self::default();
        let (mut visited, mut hashable) = (0, limits.hashed_total);
        let mut ahead = workspace.list(&workspace.root, 1)?;
        if ahead.len() > limits.entries {
            ahead.clear();
            snapshot.skipped.push(PathBuf::new());
        }
        while let Some(entry) = ahead.pop() {
            let path = entry.path.strip_prefix(&workspace.root).unwrap_or(&entry.path).to_owned();
            visited += 1;
            if visited > limits.entries || (entry.kind.is_file() && snapshot.files.len() == limits.files) {
                snapshot.end = Some(path);
                break;
            }
            if entry.kind.is_dir() {
                match workspace.list(&entry.path, entry.depth + 1) {
                    Ok(entries) if entries.len() <= limits.entries => ahead.extend(entries),
                    _ => snapshot.skipped.push(path),
                }
            } else if entry.kind.is_file()
                && let Ok(metadata) = workspace.dir.symlink_metadata(&path)
            {
                let print = workspace.print(&entry.path, &metadata, &mut hashable);
                snapshot.files.insert(path, print);
            }
        }
        Ok(snapshot)
    }

    /// The differences to `later`, in both directions; `None` if there are none.
    pub fn changes(&self, later: &Self) -> Option<Changes> {
        let end = [&self.end, &later.end].into_iter().flatten().min();
        let skipped: Vec<&PathBuf> = self.skipped.iter().chain(&later.skipped).collect();
        let comparable = |path: &Path| {
            end.is_none_or(|end| path < end.as_path())
                && !skipped.iter().any(|directory| path.starts_with(directory))
        };
        let mut changes = Changes::default();
        for (path, print) in later.files.iter().filter(|(path, _)| comparable(path)) {
            match self.files.get(path) {
                None => changes.created.push(Change::of(path, print)),
                Some(before) if !before.same(print) => changes.modified.push(Change::of(path, print)),
                Some(_) => {}
            }
        }
        let gone = self.files.iter().filter(|(path, _)| comparable(path) && !later.files.contains_key(*path));
        changes.deleted.extend(gone.map(|(path, print)| Change::of(path, print)));
        if changes == Changes::default() {
            return None;
        }
        changes.truncated = Truncated {
            created: cut(&mut changes.created),
            modified: cut(&mut changes.modified),
            deleted: cut(&mut changes.deleted),
            scan: end.is_some() || !skipped.is_empty(),
        };
        Some(changes)
    }
}

impl Change {
    fn of(path: &Path, print: &Print) -> Self {
        Self { path: path.display().to_string(), size: print.size }
    }
}

/// Sorts a list and truncates it to what an event shows; `true` if it was truncated.
fn cut(changes: &mut Vec<Change>) -> bool {
    changes.sort();
    let too_long = changes.len() > MAX_LISTED;
    changes.truncate(MAX_LISTED);
    too_long
}

impl Workspace {
    /// `hashable` is the number of bytes that may still be hashed.
    fn print(&self, path: &Path, metadata: &Metadata, hashable: &mut u64) -> Print {
        let size = metadata.len();
        let mut hash = None;
        if size <= MAX_HASHED_FILE && size <= *hashable {
            *hashable -= size;
            // An unreadable file is compared by time.
            hash = self.read_resolved(path).ok().map(|content| blake3::hash(&content));
        }
        Print { size, modified: (metadata.mtime(), metadata.mtime_nsec()), hash }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};

    use super::*;

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn with(files: &[(&str, &str)]) -> Self {
            let place = Self(tempfile::tempdir().unwrap());
            for (path, content) in files {
                place.write(path, content);
            }
            place
        }

        fn write(&self, path: &str, content: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }

        fn remove(&self, path: &str) {
            fs::remove_file(self.0.path().join(path)).unwrap();
        }

        fn snapshot(&self) -> Snapshot {
            Snapshot::take(self.0.path()).unwrap()
        }

        fn within(&self, files: usize, entries: usize, hashed_total: u64) -> Snapshot {
            Snapshot::take_within(self.0.path(), &Limits { files, entries, hashed_total }).unwrap()
        }

        /// Restores the modification time of a file.
        fn same_time(&self, path: &str, as_of: &Snapshot) {
            let (seconds, nanos) = as_of.files[Path::new(path)].modified;
            let seconds = std::time::Duration::from_secs(seconds.unsigned_abs());
            let nanos = std::time::Duration::from_nanos(nanos.unsigned_abs());
            let file = fs::File::options().write(true).open(self.0.path().join(path)).unwrap();
            file.set_modified(std::time::UNIX_EPOCH + seconds + nanos).unwrap();
        }
    }

    fn difference(before: &Snapshot, after: &Snapshot) -> Value {
        before.changes(after).map_or(Value::Null, |changes| serde_json::to_value(changes).unwrap())
    }

    #[test]
    fn what_was_created_changed_and_deleted_is_listed_by_path_with_sizes() {
        let place = Folder::with(&[("same", "s"), ("a/old", "12"), ("a/gone", "123"), ("b", "1")]);
        let before = place.snapshot();
        place.write("a/old", "1234");
        place.write("z/new", "");
        place.write("a.txt", "1");
        place.remove("a/gone");
        assert_eq!(
            difference(&before, &place.snapshot()),
            json!({
                "created": [{"path": "a.txt", "size": 1}, {"path": "z/new", "size": 0}],
                "modified": [{"path": "a/old", "size": 4}],
                "deleted": [{"path": "a/gone", "size": 3}],
                "truncated": {"created": false, "modified": false, "deleted": false, "scan": false},
            })
        );
    }

    #[test]
    fn nothing_differs_where_nothing_changed_and_a_missing_directory_has_no_files() {
        let place = Folder::with(&[("a", "1"), ("d/b", "2")]);
        let before = place.snapshot();
        place.write("a", "1");
        assert_eq!(before.changes(&place.snapshot()), None, "rewritten with the same content");
        let missing = Snapshot::take(&place.0.path().join("missing")).unwrap();
        assert!(missing.files.is_empty());
        assert!(!place.0.path().join("missing").exists(), "looking at it does not create it");
        let created = difference(&missing, &before);
        assert_eq!(created["created"], json!([{"path": "a", "size": 1}, {"path": "d/b", "size": 1}]));
    }

    #[test]
    fn content_tells_of_small_files_and_the_time_of_those_that_are_not_hashed() {
        let place = Folder::with(&[("a", "one")]);
        let (hashed, timed) = (place.snapshot(), place.within(9, 9, 0));
        place.write("a", "two");
        place.same_time("a", &hashed);
        assert_eq!(difference(&hashed, &place.snapshot())["modified"], json!([{"path": "a", "size": 3}]));
        assert_eq!(timed.changes(&place.within(9, 9, 0)), None, "same size, same time");
        let file = fs::File::options().write(true).open(place.0.path().join("a")).unwrap();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        let modified = difference(&timed, &place.within(9, 9, 0));
        assert_eq!(modified["modified"], json!([{"path": "a", "size": 3}]));
    }

    #[test]
    fn a_bound_never_makes_an_untouched_file_look_new_or_deleted() {
        let place = Folder::with(&[("b", "1"), ("c", "1"), ("d", "1")]);
        let before = place.within(3, 100, 100);
        place.write("a", "1");
        let after = place.within(3, 100, 100);
        assert_eq!(after.end.as_deref(), Some(Path::new("d")), "now it is beyond the limit");
        let found = difference(&before, &after);
        assert_eq!(found["created"], json!([{"path": "a", "size": 1}]));
        assert_eq!((&found["deleted"], &found["truncated"]["scan"]), (&json!([]), &json!(true)));
        let back = difference(&after, &before);
        assert_eq!(back["deleted"], json!([{"path": "a", "size": 1}]));
        assert_eq!(back["created"], json!([]), "d was not looked at before");

        let bounded = place.within(100, 2, 100);
        assert_eq!(
            (bounded.files.len(), &bounded.skipped[..]),
            (0, &[PathBuf::new()][..]),
            "too many at once"
        );
        assert_eq!(bounded.changes(&after), None);

        let nested = Folder::with(&[("d/1", ""), ("d/2", ""), ("e", "")]);
        let bounded = nested.within(100, 3, 100);
        assert_eq!((bounded.files.len(), bounded.end.as_deref()), (2, Some(Path::new("e"))));
    }

    #[test]
    fn a_directory_with_too_many_entries_is_left_out_whole() {
        let place = Folder::with(&[("d/1", ""), ("d/2", ""), ("e", "")]);
        let before = place.within(100, 4, 100);
        place.write("d/3", "");
        place.write("d/4", "");
        place.write("d/5", "");
        place.write("f", "");
        let after = place.within(100, 4, 100);
        assert_eq!(after.skipped, [PathBuf::from("d")]);
        let found = difference(&before, &after);
        assert_eq!(found["created"], json!([{"path": "f", "size": 0}]));
        assert_eq!((&found["deleted"], &found["truncated"]["scan"]), (&json!([]), &json!(true)));
    }

    #[test]
    fn links_are_not_followed_and_do_not_count() {
        let place = Folder::with(&[("a", "1")]);
        let outside = Folder::with(&[("secret", "2")]);
        let before = place.snapshot();
        std::os::unix::fs::symlink(outside.0.path(), place.0.path().join("link")).unwrap();
        std::os::unix::fs::symlink(outside.0.path().join("secret"), place.0.path().join("file")).unwrap();
        assert_eq!(before.changes(&place.snapshot()), None);
    }

    #[test]
    fn long_lists_are_cut_and_say_so() {
        let place = Folder::with(&[]);
        let before = place.snapshot();
        for n in 0..=MAX_LISTED {
            place.write(&format!("{n:04}"), "");
        }
        let found = difference(&before, &place.snapshot());
        let created = found["created"].as_array().unwrap();
        assert_eq!((created.len(), &created[199]["path"]), (200, &json!("0199")));
        assert_eq!(found["truncated"]["created"], true);
        assert_eq!(found["truncated"]["scan"], false);
    }
}

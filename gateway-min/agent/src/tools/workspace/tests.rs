use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

/// A workspace next to a secret that must stay unreachable.
struct Folder {
    outside: tempfile::TempDir,
    workspace: Workspace,
}

const SECRET: &str = "the secret";

impl Folder {
    fn new() -> Self {
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("secret.txt"), SECRET).unwrap();
        fs::create_dir(outside.path().join("elsewhere")).unwrap();
        let workspace = Workspace::open(&outside.path().join("threads/t1")).unwrap();
        Self { outside, workspace }
    }

    fn inside(&self, path: &str) -> PathBuf {
        self.workspace.root().join(path)
    }

    /// Everything outside the workspace, to check that it did not change.
    fn outside(&self) -> Vec<String> {
        let mut names = vec![fs::read_to_string(self.outside.path().join("secret.txt")).unwrap()];
        for directory in ["", "threads", "elsewhere"] {
            for entry in fs::read_dir(self.outside.path().join(directory)).unwrap() {
                names.push(entry.unwrap().path().display().to_string());
            }
        }
        names.sort();
        names
    }
}

fn refusal(result: Result<impl Sized, ToolError>) -> &'static str {
    match result.err().expect("refused") {
        ToolError::Path { reason, .. } => reason,
        other => panic!("another error: {other}"),
    }
}

#[test]
fn what_is_written_can_be_read_and_directories_are_made() {
    let place = Folder::new();
    place.workspace.write("a/b/c.txt", b"one").unwrap();
    assert_eq!(place.workspace.write("./a/./b/c.txt", b"two").unwrap(), "a/b/c.txt");
    assert_eq!(place.workspace.read("a/b/c.txt").unwrap(), b"two");
    let names: Vec<_> = fs::read_dir(place.inside("a/b")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["c.txt"], "no temporary file is left");
    assert_eq!(place.workspace.shown(&place.inside("a/b")), "a/b");
}

#[test]
fn paths_that_lead_out_by_their_text_are_refused() {
    let place = Folder::new();
    let before = place.outside();
    let cases = [
        ("/etc/passwd", "it is absolute"),
        ("../../secret.txt", "it has `..`"),
        ("a/../b", "it has `..`"),
        ("..", "it has `..`"),
        ("a\0b", "it has a NUL byte"),
    ];
    for (path, reason) in cases {
        assert_eq!(refusal(place.workspace.read(path)), reason, "{path:?}");
        assert_eq!(refusal(place.workspace.write(path, b"x")), reason, "{path:?}");
        assert_eq!(refusal(place.workspace.edit(path, Ok)), reason, "{path:?}");
        assert_eq!(refusal(place.workspace.walk(path, |_| ControlFlow::Continue(true))), reason, "{path:?}");
    }
    let absolute = place.inside("a").display().to_string();
    assert_eq!(refusal(place.workspace.write(&absolute, b"x")), "it is absolute");
    assert_eq!(place.outside(), before);
}

#[test]
fn paths_that_are_too_long_or_too_deep_are_refused_before_they_are_followed() {
    let place = Folder::new();
    let (long, deep) = ("a/".repeat(3000), "a/".repeat(129));
    for (path, reason) in [(&long, "it has more than 4096 bytes"), (&deep, "it has more than 128 parts")] {
        assert_eq!(refusal(place.workspace.read(path)), reason);
        assert_eq!(refusal(place.workspace.write(path, b"x")), reason);
        assert_eq!(refusal(place.workspace.walk(path, |_| ControlFlow::Continue(true))), reason);
        let shown = place.workspace.read(path).unwrap_err().to_string();
        assert!(shown.contains(reason) && shown.len() < 1000, "{shown}");
    }
    let deepest = format!("{}b.txt", "a/".repeat(127));
    assert_eq!(place.workspace.write(&deepest, b"x").unwrap(), deepest);
}

#[test]
fn links_that_lead_out_are_refused_wherever_they_stand() {
    let place = Folder::new();
    let before = place.outside();
    symlink(place.outside.path().join("secret.txt"), place.inside("file")).unwrap();
    symlink(place.outside.path().join("elsewhere"), place.inside("dir")).unwrap();
    symlink("../..", place.inside("up")).unwrap();
    symlink("dir", place.inside("chain")).unwrap();
    for path in ["file", "dir/new.txt", "dir/new/deep.txt", "up/secret.txt", "chain/new.txt"] {
        assert_eq!(refusal(place.workspace.read(path)), "it leads out of the working directory", "{path}");
        assert_eq!(refusal(place.workspace.write(path, b"x")), "it leads out of the working directory");
    }
    for path in ["dir", "up"] {
        let walk = place.workspace.walk(path, |_| ControlFlow::Continue(true));
        assert_eq!(refusal(walk), "it leads out of the working directory");
    }
    assert_eq!(place.outside(), before);
}

#[test]
fn broken_links_are_refused_and_do_not_make_their_target() {
    let place = Folder::new();
    let before = place.outside();
    symlink(place.outside.path().join("made.txt"), place.inside("dangling")).unwrap();
    symlink("loop", place.inside("loop")).unwrap();
    for path in ["dangling", "dangling/x", "loop", "loop/x"] {
        assert_eq!(refusal(place.workspace.write(path, b"x")), "it has a broken link", "{path}");
    }
    assert_eq!(place.outside(), before);
}

#[test]
fn links_inside_are_followed() {
    let place = Folder::new();
    place.workspace.write("real/a.txt", b"one").unwrap();
    symlink("real", place.inside("link")).unwrap();
    place.workspace.write("link/a.txt", b"two").unwrap();
    assert_eq!(place.workspace.read("real/a.txt").unwrap(), b"two");
}

#[test]
fn a_link_put_in_the_way_after_the_check_is_noticed() {
    let place = Folder::new();
    place.workspace.write("dir/secret.txt", b"harmless").unwrap();
    let resolved = place.workspace.resolve("dir/secret.txt").unwrap();
    let unmade = place.workspace.resolve("dir/new.txt").unwrap();
    let before = place.outside();
    // The parent directory is replaced by a link between check and use.
    fs::rename(place.inside("dir"), place.inside("old")).unwrap();
    symlink(place.outside.path(), place.inside("dir")).unwrap();
    assert!(place.workspace.read_resolved(&resolved).unwrap_err().to_string().contains("meanwhile"));
    assert!(place.workspace.replace(&unmade, b"x").unwrap_err().to_string().contains("meanwhile"));
    assert!(place.workspace.replace(&resolved, b"x").unwrap_err().to_string().contains("meanwhile"));
    assert!(place.workspace.list(&place.inside("dir"), 1).is_err());
    assert_eq!(place.outside(), before);

    // The file itself is replaced by a link.
    place.workspace.write("plain.txt", b"harmless").unwrap();
    let resolved = place.workspace.resolve("plain.txt").unwrap();
    fs::remove_file(&resolved).unwrap();
    symlink(place.outside.path().join("secret.txt"), &resolved).unwrap();
    assert!(place.workspace.read_resolved(&resolved).is_err());
    assert!(place.workspace.replace(&resolved, b"x").is_err());
    assert_eq!(place.outside(), before);

    // Not even a link to a file inside is opened where a regular file was resolved.
    fs::remove_file(&resolved).unwrap();
    place.workspace.write("other.txt", b"other").unwrap();
    symlink("other.txt", &resolved).unwrap();
    assert!(place.workspace.read_resolved(&resolved).is_err());
}

#[test]
fn only_regular_files_are_read_and_replaced() {
    let place = Folder::new();
    fs::create_dir(place.inside("dir")).unwrap();
    let pipe = place.inside("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    for (path, what) in [("dir", "it is a directory"), ("pipe", "it is not a regular file")] {
        assert!(place.workspace.read(path).unwrap_err().to_string().ends_with(what), "{path}");
        assert!(place.workspace.write(path, b"x").unwrap_err().to_string().ends_with(what), "{path}");
    }
    assert!(place.workspace.write("", b"x").unwrap_err().to_string().ends_with("it is a directory"));
    assert!(place.workspace.read("nothing").unwrap_err().to_string().starts_with("cannot read `nothing`"));
}

#[test]
fn files_beyond_the_size_limit_are_refused() {
    let place = Folder::new();
    let file = fs::File::create(place.inside("big")).unwrap();
    file.set_len(MAX_FILE_BYTES as u64).unwrap();
    assert_eq!(place.workspace.read("big").unwrap().len(), MAX_FILE_BYTES);
    file.set_len(MAX_FILE_BYTES as u64 + 1).unwrap();
    assert!(place.workspace.read("big").unwrap_err().to_string().contains("larger than"));
    let content = vec![b'x'; MAX_FILE_BYTES + 1];
    assert!(place.workspace.write("new", &content).unwrap_err().to_string().contains("larger than"));
    assert!(!place.inside("new").exists());
}

#[test]
fn a_failed_write_leaves_the_old_content_and_no_temporary_file() {
    let place = Folder::new();
    place.workspace.write("a.txt", b"old").unwrap();
    let failed = place.workspace.edit("a.txt", |_| Err(ToolError::Failed("no".into())));
    assert!(failed.is_err());
    // A directory at the target makes the final rename fail.
    fs::create_dir(place.inside("full")).unwrap();
    fs::write(place.inside("full/x"), "x").unwrap();
    let temporary = Temporary::new(place.workspace.dir.try_clone().unwrap()).unwrap();
    assert!(temporary.rename(OsStr::new("full")).is_err());
    let mut names: Vec<_> =
        fs::read_dir(place.workspace.root()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["a.txt", "full"]);
    assert_eq!(place.workspace.read("a.txt").unwrap(), b"old");
}

#[test]
fn a_replacement_never_shows_a_half_written_file() {
    let place = Folder::new();
    place.workspace.write("a.txt", b"old").unwrap();
    // A reader that has the old file open, here through another name, still sees it whole.
    fs::hard_link(place.inside("a.txt"), place.inside("kept.txt")).unwrap();
    place.workspace.write("a.txt", b"new").unwrap();
    assert_eq!(place.workspace.read("kept.txt").unwrap(), b"old");
    assert_eq!(place.workspace.read("a.txt").unwrap(), b"new");
}

#[test]
fn permissions_survive_a_replacement() {
    let place = Folder::new();
    place.workspace.write("run.sh", b"one").unwrap();
    fs::set_permissions(place.inside("run.sh"), fs::Permissions::from_mode(0o750)).unwrap();
    place.workspace.write("run.sh", b"two").unwrap();
    assert_eq!(place.inside("run.sh").metadata().unwrap().permissions().mode() & 0o777, 0o750);
}

#[test]
fn edits_of_one_file_do_not_overlap() {
    let place = Folder::new();
    place.workspace.write("count", b"").unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..5 {
                    let one_more = |content: Vec<u8>| Ok([content, b"x".to_vec()].concat());
                    place.workspace.edit("count", one_more).unwrap();
                }
            });
        }
    });
    assert_eq!(place.workspace.read("count").unwrap().len(), 20);
}

#[test]
fn a_walk_is_sorted_follows_no_link_and_can_be_broken_off() {
    let place = Folder::new();
    for path in ["b/2.txt", "b/1.txt", "a.txt", "c/d/e.txt"] {
        place.workspace.write(path, b"").unwrap();
    }
    symlink(place.outside.path(), place.inside("link")).unwrap();
    let walk = |limit: usize, down: bool| {
        let mut seen = Vec::new();
        let complete = place
            .workspace
            .walk("", |entry| {
                if seen.len() == limit {
                    return ControlFlow::Break(());
                }
                seen.push((place.workspace.shown(&entry.path), entry.depth));
                ControlFlow::Continue(down)
            })
            .unwrap();
        (complete, seen)
    };
    let (complete, seen) = walk(99, true);
    let expected = [
        ("a.txt", 1),
        ("b", 1),
        ("b/1.txt", 2),
        ("b/2.txt", 2),
        ("c", 1),
        ("c/d", 2),
        ("c/d/e.txt", 3),
        ("link", 1),
    ];
    assert!(complete);
    assert_eq!(seen, expected.map(|(path, depth)| (path.to_owned(), depth)));
    assert_eq!(walk(99, false).1.len(), 4);
    assert_eq!((walk(2, true).0, walk(2, true).1.len()), (false, 2));
}

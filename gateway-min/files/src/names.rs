//! Names of the files and directories of threads.

use std::fs;
use std::io;
use std::path::Path;

/// The maximum length of an id that is a name itself.
const MAX_LEN: usize = 64;

/// The name under which the files of a thread are stored. The names of two threads differ also where a disk ignores
/// case: an id with capital letters is followed by a part of its hash.
pub fn thread_name(id: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if !(1..=MAX_LEN).contains(&id.len()) || !id.bytes().all(plain) {
        return format!("%{}", blake3::hash(id.as_bytes()).to_hex());
    }
    if !id.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return id.to_owned();
    }
    let hash = blake3::hash(id.as_bytes()).to_hex();
    // No id contains the separator.
    format!("{}~{}", id.to_ascii_lowercase(), &hash[..16])
}

/// Renames what an earlier version stored in `directory` under ids with capital letters, followed by `extension`. A
/// missing directory has nothing.
///
/// # Errors
/// The operating system's; what was renamed by then stays so.
pub fn adopt_thread_names(directory: &Path, extension: &str) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let name = entry?.file_name();
        let Some(id) = name.to_str().and_then(|name| name.strip_suffix(extension)) else { continue };
        let now = thread_name(id);
        if now == id || now.starts_with('%') {
            continue;
        }
        let to = directory.join(format!("{now}{extension}"));
        if !to.try_exists()? {
            fs::rename(directory.join(&name), to)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ_where_case_is_ignored() {
        let ids = ["thread", "Thread", "tHread", "THREAD", "a-b_C", "a-b_c", "", "../x", "x~y", "\u{e9}"];
        let mut names: Vec<String> = ids.iter().map(|id| thread_name(id).to_ascii_lowercase()).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), ids.len(), "{names:?}");
        assert_eq!(thread_name("a-b_c"), "a-b_c", "most ids are their own names");
        assert!(thread_name("Thread").starts_with("thread~"));
        assert!(thread_name("../x").starts_with('%') && thread_name(&"x".repeat(65)).starts_with('%'));
    }

    #[test]
    fn what_an_earlier_version_stored_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        adopt_thread_names(&path("missing"), "").unwrap();
        for name in ["Thread.jsonl", "lower.jsonl", "Other.txt", "%AB.jsonl"] {
            fs::write(path(name), name).unwrap();
        }
        for _ in 0..2 {
            adopt_thread_names(dir.path(), ".jsonl").unwrap();
            let renamed = fs::read_to_string(path(&format!("{}.jsonl", thread_name("Thread")))).unwrap();
            assert_eq!(renamed, "Thread.jsonl");
            assert!(path("lower.jsonl").exists() && path("Other.txt").exists() && path("%AB.jsonl").exists());
        }
    }
}

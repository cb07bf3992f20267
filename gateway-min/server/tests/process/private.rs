//! What a gateway writes is its owner's alone.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use serde_json::json;
use threadkeep_testing::unconfigured;

use super::{Gateway, command, configured};

/// Everything below a directory, with the directory.
fn below(path: &Path) -> Vec<PathBuf> {
    let mut found = vec![path.to_owned()];
    if path.is_dir() {
        found.extend(fs::read_dir(path).unwrap().flat_map(|entry| below(&entry.unwrap().path())));
    }
    found
}

#[tokio::test]
async fn databases_state_and_working_directories_are_not_for_other_users() {
    let dir = configured("full");
    let script = json!({"rules": [{"answers": [
        {"tool_calls": [{"name": "write_file", "args": {"path": "a/b.txt", "content": "x"}}]}, {"text": "done"},
    ]}]});
    fs::write(dir.path().join("script.json"), script.to_string()).unwrap();
    // The machine's own mask may already keep other users out.
    let usual = command(dir.path());
    let mut open = unconfigured("sh");
    open.args(["-c", r#"umask 022; exec "$0" "$@""#]).arg(usual.get_program()).args(usual.get_args());
    let gateway = Gateway::start_by(open.current_dir(dir.path()).env("SVC_HOME", dir.path().join("state")));
    gateway.post("/api/threads", json!({"thread_id": "t"})).await;
    gateway.ask("write").await;
    let found = below(&dir.path().join("state"));
    for name in ["checkpoints.db", "gateway.db", "b.txt"] {
        assert!(found.iter().any(|path| path.ends_with(name)), "{name} is missing: {found:?}");
    }
    let open: Vec<_> = found.iter().filter(|path| fs::metadata(path).unwrap().mode() & 0o077 != 0).collect();
    assert!(open.is_empty(), "other users may read {open:?}");
    let mode = fs::metadata(dir.path().join("state")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
}

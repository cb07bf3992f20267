//! A file that cannot be written, as that of a backup on read-only media.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::support::*;
use crate::*;

/// What the test that runs as another user reads.
const FILE: &str = "THREADKEEP_TEST_READ_ONLY";

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Runs a test of this file again, as a user who may not write to the file and its directory.
fn again_as_nobody(test: &str, file: &Path) {
    let directory = file.parent().unwrap();
    set_mode(file, 0o444);
    set_mode(directory, 0o555);
    again(test, file);
    set_mode(directory, 0o755);
}

/// Runs a test of this file again, not as root, who may do everything.
fn again(test: &str, file: &Path) {
    let module = module_path!().split_once("::").unwrap().1;
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([&format!("{module}::{test}"), "--exact", "--nocapture"]).env(FILE, file).current_dir("/");
    if std::fs::metadata(file).unwrap().uid() == 0 {
        command.uid(65_534).gid(65_534);
    }
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A directory whose name means something in an address.
fn place() -> (tempfile::TempDir, PathBuf) {
    let home = tempfile::tempdir().unwrap();
    set_mode(home.path(), 0o755);
    let directory = home.path().join("a?b#c%41");
    std::fs::create_dir(&directory).unwrap();
    let file = directory.join(DATABASE_FILE);
    (home, file)
}

async fn filled(path: &Path) -> Records {
    let options = RecordsOptions { event_backend: EventBackend::Database, ..RecordsOptions::default() };
    let records = Records::open(path, options).await.unwrap();
    create_thread(&records, "t").await;
    start(&records, "t", "r").await;
    records
}

#[tokio::test]
async fn records_that_cannot_be_written_are_read_and_a_write_names_the_remedy() {
    let Some(path) = std::env::var_os(FILE).map(PathBuf::from) else {
        let (_home, path) = place();
        filled(&path).await.close().await;
        return again_as_nobody(
            "records_that_cannot_be_written_are_read_and_a_write_names_the_remedy",
            &path,
        );
    };
    let options = RecordsOptions { event_backend: EventBackend::Database, ..RecordsOptions::default() };
    let records = Records::open_read_only(&path, options).await.unwrap();
    assert_eq!(thread(&records, "t").await.thread_id, "t");
    assert_eq!(run(&records, "r").await.status, RunStatus::Running);
    assert_eq!(
        records.threads().search(&ThreadQuery { limit: 9, ..ThreadQuery::default() }).await.unwrap().len(),
        1
    );
    let refused = [
        records.threads().set_status("t", ThreadStatus::Error).await.unwrap_err(),
        records.runs().reserve("u", WriterKind::Delete).await.unwrap_err(),
        Records::open(&path, RecordsOptions::default()).await.unwrap_err(),
    ];
    for error in refused {
        assert!(matches!(error, RecordsError::ReadOnly { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(&path.display().to_string()), "{text}");
        for remedy in ["chmod", "mount", "database.sqlite_dir"] {
            assert!(text.contains(remedy), "{text}");
        }
    }
    // A write that others wait for does not wait for what will not come.
    let never = until_available(|| records.threads().set_status("t", ThreadStatus::Error));
    assert!(matches!(soon(never).await, Err(RecordsError::ReadOnly { .. })));
    records.close().await;
    assert!(records.threads().get("t", None).await.is_err());
}

/// The rows in the log would be missing. It is beside the file, also if that is reached through a link.
#[tokio::test]
async fn records_with_a_log_that_cannot_be_read_are_not_shown_without_it() {
    let Some(path) = std::env::var_os(FILE).map(PathBuf::from) else {
        let (home, path) = place();
        std::os::unix::fs::symlink(&path, home.path().join("link")).unwrap();
        let original = tempfile::tempdir().unwrap();
        let from = original.path().join(DATABASE_FILE);
        filled(&from).await.close().await;
        let records = Records::open(&from, RecordsOptions::default()).await.unwrap();
        create_thread(&records, "in the log").await;
        let log = |path: &Path| path.with_file_name(format!("{DATABASE_FILE}-wal"));
        std::fs::copy(&from, &path).unwrap();
        std::fs::copy(log(&from), log(&path)).unwrap();
        set_mode(&log(&path), 0o444);
        records.close().await;
        return again_as_nobody("records_with_a_log_that_cannot_be_read_are_not_shown_without_it", &path);
    };
    let link = path.parent().and_then(Path::parent).unwrap().join("link");
    for path in [path, link] {
        let error = Records::open_read_only(&path, RecordsOptions::default()).await.unwrap_err();
        assert!(matches!(error, RecordsError::Open { .. } | RecordsError::ReadOnly { .. }), "{error}");
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }
}

#[tokio::test]
async fn records_of_an_older_build_that_cannot_be_upgraded_are_refused_with_the_remedy() {
    let (_home, path) = place();
    let records = filled(&path).await;
    sql(&records, "DELETE FROM _sqlx_migrations WHERE version > 10").await;
    records.close().await;
    let error = Records::open_read_only(&path, RecordsOptions::default()).await.unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, RecordsError::ReadOnly { .. }), "{text}");
    assert!(text.contains("older build") && text.contains("copy the files"), "{text}");

    // Nor is a file without tables taken for empty records.
    std::fs::write(&path, "").unwrap();
    let error = Records::open_read_only(&path, RecordsOptions::default()).await.unwrap_err();
    assert!(matches!(error, RecordsError::ReadOnly { .. }), "{error}");
}

/// What a deletion has left of an earlier thread would be shown as of the new one, which may be another user's.
#[tokio::test]
async fn a_thread_is_not_created_beside_events_that_cannot_be_removed() {
    let Some(home) = std::env::var_os(FILE).map(PathBuf::from) else {
        let home = tempfile::tempdir().unwrap();
        set_mode(home.path(), 0o777);
        return again("a_thread_is_not_created_beside_events_that_cannot_be_removed", home.path());
    };
    let event_directory = home.join("events");
    let options = RecordsOptions {
        event_backend: EventBackend::Jsonl,
        event_directory: event_directory.clone(),
        ..RecordsOptions::default()
    };
    let records = Records::open(&home.join(DATABASE_FILE), options).await.unwrap();
    create_thread(&records, "t").await;
    start(&records, "t", "r").await;
    let event = NewEvent::new("run.start", "trace", serde_json::json!(null));
    records.events().append("t", "r", vec![event]).await.unwrap();
    sql(&records, "DELETE FROM runs").await;
    sql(&records, "DELETE FROM threads_meta").await;

    set_mode(&event_directory, 0o500);
    let new = NewThread { thread_id: "t".to_owned(), ..NewThread::default() };
    let error = records.threads().create(new).await.unwrap_err();
    assert!(matches!(error, RecordsError::Unavailable { .. }), "{error}");
    assert_eq!(records.threads().get("t", None).await.unwrap(), None);
    set_mode(&event_directory, 0o700);
    create_thread(&records, "t").await;
    assert!(!records.events().has_remains("t").await);
    records.close().await;
}

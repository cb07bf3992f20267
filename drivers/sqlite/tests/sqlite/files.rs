//! A file that is removed or replaced under an open store: the next commit reports it instead of writing to a lost
//! file.
#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rusqlite::Connection;
use threadkeep::Error;
use threadkeep::saver::{Flush, ListQuery, Saver, StepCommit};
use threadkeep_sqlite::{Options, SqliteSaver};

use crate::common::{Talk, message};

/// The directory of the store, in the process that changes its own.
const PLACE: &str = "THREADKEEP_TEST_FILES_PLACE";

async fn say(saver: &SqliteSaver, talk: &mut Talk) -> threadkeep::Result<()> {
    let step = talk.say(&message(talk.messages.len(), 300));
    saver.commit(step.clone()).await?;
    talk.accept(&step);
    Ok(())
}

fn file(path: &Path, end: &str) -> PathBuf {
    PathBuf::from(format!("{}{end}", path.display()))
}

#[track_caller]
fn assert_gone(result: threadkeep::Result<()>, what: &str) {
    let error = result.expect_err(what);
    let said = error.to_string();
    assert!(matches!(error, Error::Unavailable { .. }), "{what}: {said}");
    assert!(said.contains("removed, renamed or replaced") && said.contains("threadkeep backup"), "{said}");
}

#[tokio::test]
async fn a_file_that_is_removed_renamed_or_replaced_is_an_error_of_the_next_commit() {
    for end in ["", "-wal", "-shm"] {
        for what in ["removed", "renamed", "replaced"] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("db");
            let saver = SqliteSaver::open(&path, &Options::default()).unwrap();
            let mut talk = Talk::new("t");
            say(&saver, &mut talk).await.unwrap();
            let (file, kept) = (file(&path, end), dir.path().join("kept"));
            // A second name, so that it can be put back.
            std::fs::hard_link(&file, &kept).unwrap();
            std::fs::remove_file(&file).unwrap();
            if what == "replaced" {
                std::fs::copy(&kept, &file).unwrap();
            }
            if what == "renamed" {
                std::fs::rename(&kept, dir.path().join("elsewhere")).unwrap();
            }
            let what = format!("{} {what}", file.display());
            for flush in [Flush::Now, Flush::WithNext] {
                let step = StepCommit { flush, ..talk.say(&message(1, 300)) };
                assert_gone(saver.commit(step).await.map(|_| ()), &what);
            }
            let task = talk.say(&message(1, 300)).writes.remove(0);
            assert_gone(saver.put_writes(&talk.key(), &task).await, &what);
            assert_gone(saver.delete_thread(&talk.thread).await, &what);
            assert_gone(saver.vacuum(1).await.map(|_| ()), &what);
            assert_gone(saver.vacuum_fully().await.map(|_| ()), &what);
            let there = saver.list(&ListQuery::new(&talk.thread)).await.unwrap();
            assert_eq!(there.len(), 1, "{what}: nothing was written");

            let kept = if kept.exists() { kept } else { dir.path().join("elsewhere") };
            std::fs::rename(kept, &file).unwrap();
            say(&saver, &mut talk).await.unwrap();
            saver.close().await;
            let saver = SqliteSaver::open(&path, &Options::default()).unwrap();
            assert_eq!(saver.list(&ListQuery::new(&talk.thread)).await.unwrap().len(), 2, "{what}");
            assert_eq!(saver.check().await.unwrap(), []);
        }
    }
}

#[tokio::test]
async fn a_store_that_is_reached_through_a_link_is_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let (path, link) = (dir.path().join("db"), dir.path().join("link"));
    SqliteSaver::open(&path, &Options::default()).unwrap().close().await;
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let saver = SqliteSaver::open(&link, &Options::default()).unwrap();
    let mut talk = Talk::new("t");
    say(&saver, &mut talk).await.unwrap();
    std::fs::rename(&path, dir.path().join("elsewhere")).unwrap();
    assert_gone(say(&saver, &mut talk).await, "the file that the link names");
}

/// A backup opens it again by its name, which another store may have by then.
#[tokio::test]
async fn a_backup_is_of_the_file_that_was_opened() {
    let dir = tempfile::tempdir().unwrap();
    let [path, other, link, kept, backup] =
        ["db", "other", "link", "kept", "backup"].map(|name| dir.path().join(name));
    let options = Options::default();
    for (path, thread) in [(&path, "t"), (&other, "another")] {
        let saver = SqliteSaver::open(path, &options).unwrap();
        say(&saver, &mut Talk::new(thread)).await.unwrap();
        saver.close().await;
    }
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let saver = SqliteSaver::open(&link, &options).unwrap();
    let reading = SqliteSaver::open_read_only(&link, &options).unwrap();

    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(&other, &link).unwrap();
    for (number, saver) in [&saver, &reading].into_iter().enumerate() {
        let copy = dir.path().join(format!("copy-{number}"));
        saver.backup(&copy).await.unwrap();
        let copy = SqliteSaver::open(&copy, &options).unwrap();
        assert_eq!(copy.threads(None, 9).await.unwrap(), ["t".into()], "not where the link leads now");
    }

    std::fs::rename(&path, &kept).unwrap();
    assert_gone(saver.backup(&backup).await, "renamed");
    std::fs::copy(&other, &path).unwrap();
    for saver in [&saver, &reading] {
        assert_gone(saver.backup(&backup).await, "replaced");
        assert!(!backup.exists());
    }
    std::fs::rename(&kept, &path).unwrap();
    saver.backup(&backup).await.unwrap();
}

/// A backup and a training open the file again. The directory is that of a process, so this is the test again in one of its
/// own.
#[tokio::test]
async fn a_store_is_where_it_was_opened_when_its_program_changes_the_directory() {
    let Some(place) = std::env::var_os(PLACE).map(PathBuf::from) else {
        let dir = tempfile::tempdir().unwrap();
        let test = "files::a_store_is_where_it_was_opened_when_its_program_changes_the_directory";
        let output = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture"])
            .env(PLACE, dir.path())
            .current_dir(dir.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("1 passed"), "{said}{errors}");
        return;
    };
    let options = Options::default();
    let saver = SqliteSaver::open("db", &options).unwrap();
    let mut talk = Talk::new("t");
    say(&saver, &mut talk).await.unwrap();
    let second = SqliteSaver::open_async("db", options.clone()).await.unwrap();
    let reading = SqliteSaver::open_read_only("db", &options).unwrap();
    std::fs::create_dir("elsewhere").unwrap();
    std::env::set_current_dir("elsewhere").unwrap();
    for (number, saver) in [&saver, &second, &reading].into_iter().enumerate() {
        saver.backup(place.join(format!("copy-{number}"))).await.unwrap();
    }
    let trained = async {
        let conn = Connection::open(place.join("db")).unwrap();
        let count = "SELECT count(*) FROM dictionary";
        while conn.query_row(count, [], |row| row.get::<_, i64>(0)).unwrap() == 0 {
            let step = talk.say(&message(talk.messages.len(), 6_000));
            saver.commit(step.clone()).await.unwrap();
            talk.accept(&step);
        }
    };
    tokio::time::timeout(Duration::from_mins(10), trained).await.expect("no dictionary");
}

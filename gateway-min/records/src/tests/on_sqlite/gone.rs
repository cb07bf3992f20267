//! A file that is removed or replaced under open records: the next commit reports it instead of writing to a lost file.

use std::path::PathBuf;

use super::support::*;
use crate::*;

#[track_caller]
fn assert_gone<T>(result: Result<T, RecordsError>, what: &str) {
    let Err(error) = result else { panic!("{what}: it was written") };
    let said = error.to_string();
    assert!(matches!(error, RecordsError::Unavailable { .. }), "{what}: {said}");
    assert!(said.contains(DATABASE_FILE) && said.contains("removed, renamed or replaced"), "{what}: {said}");
    assert!(said.contains("threadkeep backup") && said.contains("restart the gateway"), "{what}: {said}");
}

#[tokio::test]
async fn records_whose_file_is_removed_renamed_or_replaced_refuse_the_next_commit() {
    for suffix in ["", "-wal", "-shm"] {
        for what in ["removed", "renamed", "replaced"] {
            let fixture = fixture_with(EventBackend::Database).await;
            let records = &fixture.records;
            create_thread(records, "t").await;
            start(records, "t", "r").await;
            let path = fixture.place.path();
            let file = PathBuf::from(format!("{}{suffix}", path.display()));
            // A second name, so that it can be put back.
            let (mut kept, elsewhere) = (path.with_file_name("kept"), path.with_file_name("elsewhere"));
            std::fs::hard_link(&file, &kept).unwrap();
            std::fs::remove_file(&file).unwrap();
            if what == "replaced" {
                std::fs::copy(&kept, &file).unwrap();
            }
            if what == "renamed" {
                std::fs::rename(&kept, &elsewhere).unwrap();
                kept = elsewhere;
            }
            let what = format!("{suffix} {what}");
            assert_gone(records.threads().set_status("t", ThreadStatus::Error).await, &what);
            assert_gone(records.runs().finish("r", &end(RunStatus::Success)).await, &what);
            let event = NewEvent::new("run.end", "outputs", serde_json::Value::Null);
            assert_gone(records.events().append("t", "r", vec![event]).await, &what);
            let unchanged = records.db.write("t", |tx| {
                Box::pin(tx.fetch_optional::<(String,)>(query::query("SELECT run_id FROM runs")))
            });
            assert_gone(unchanged.await, &what);
            assert_eq!(run(records, "r").await.status, RunStatus::Running, "{what}: nothing was written");

            std::fs::rename(&kept, &file).unwrap();
            records.runs().finish("r", &end(RunStatus::Success)).await.unwrap();
            records.close().await;
            let records = fixture.reopen(EventBackend::Database).await;
            assert_eq!(run(&records, "r").await.status, RunStatus::Success, "{what}");
        }
    }
}

#[tokio::test]
async fn records_that_are_reached_through_a_link_are_where_they_were_also_after_a_vacuum() {
    let directory = tempfile::tempdir().unwrap();
    let names = [DATABASE_FILE, "link", "elsewhere"];
    let [path, link, elsewhere] = names.map(|name| directory.path().join(name));
    Records::open(&path, RecordsOptions::default()).await.unwrap().close().await;
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let records = Records::open(&link, RecordsOptions::default()).await.unwrap();
    create_thread(&records, "t").await;
    rusqlite::Connection::open(&path).unwrap().execute_batch("VACUUM").unwrap();
    create_thread(&records, "u").await;
    // The log would be beside the other name when they are opened again.
    std::fs::rename(&path, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
    assert_gone(records.threads().set_status("t", ThreadStatus::Error).await, "moved");
}

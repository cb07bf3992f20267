use super::support::*;
use crate::*;

#[tokio::test]
async fn open_creates_the_directory_and_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a/b").join(DATABASE_FILE);
    let opened = path.clone();
    // In its own task, because the future may move to another thread.
    let opening = tokio::spawn(async move { Records::open(&opened, RecordsOptions::default()).await });
    let records = opening.await.unwrap().unwrap();
    create_thread(&records, "t").await;
    records.close().await;
    assert!(path.is_file());
}

#[tokio::test]
async fn rows_outlive_the_process_that_wrote_them() {
    let fixture = fixture_with(EventBackend::Database).await;
    create_thread(&fixture.records, "t").await;
    start(&fixture.records, "t", "r").await;
    let event = NewEvent::new("run.start", "trace", serde_json::Value::Null);
    fixture.records.events().append("t", "r", vec![event]).await.unwrap();
    let before = dump(&fixture.records).await;
    fixture.records.close().await;

    let reopened = fixture.reopen(EventBackend::Database).await;
    assert_eq!(dump(&reopened).await, before);
}

#[tokio::test]
async fn closed_store_is_unavailable() {
    let fixture = fixture().await;
    let clone = fixture.records.clone();
    fixture.records.close().await;
    let read = clone.threads().get("t", None).await.unwrap_err();
    assert!(matches!(read, RecordsError::Unavailable { .. }), "{read}");
    let write = clone.runs().reserve("t", WriterKind::Delete).await.unwrap_err();
    assert!(matches!(write, RecordsError::Unavailable { .. }), "{write}");
}

#[tokio::test]
async fn writing_connection_is_durable_and_checks_foreign_keys() {
    let directory = tempfile::tempdir().unwrap();
    let records =
        Records::open(&directory.path().join(DATABASE_FILE), RecordsOptions::default()).await.unwrap();
    for (pragma, expected) in [
        ("SELECT journal_mode FROM pragma_journal_mode", "wal"),
        ("SELECT CAST(synchronous AS TEXT) FROM pragma_synchronous", "2"),
        ("SELECT CAST(foreign_keys AS TEXT) FROM pragma_foreign_keys", "1"),
        ("SELECT CAST(timeout AS TEXT) FROM pragma_busy_timeout", "5000"),
    ] {
        let sql = query::query(pragma);
        let value = records.db.write("t", move |tx| Box::pin(tx.fetch_optional::<(String,)>(sql)));
        assert_eq!(value.await.unwrap().unwrap().0, expected, "{pragma}");
    }
}

#[tokio::test]
async fn reading_connections_cannot_write() {
    let fixture = fixture().await;
    let delete = query::query("DELETE FROM runs RETURNING run_id");
    let error = fixture.records.db.fetch_all::<(String,)>(delete).await.unwrap_err();
    assert!(error.to_string().contains("readonly"), "{error}");
}

#[tokio::test]
async fn readers_do_not_wait_for_a_writer() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t").await;
    let (in_transaction, opened) = tokio::sync::oneshot::channel();
    let (go_on, waits) = std::sync::mpsc::channel::<()>();
    let db = fixture.records.db.clone();
    let writing = tokio::spawn(async move {
        let deleting = db.write("t", move |tx| {
            Box::pin(async move {
                tx.execute(query::query("DELETE FROM threads_meta")).await?;
                in_transaction.send(()).unwrap();
                // Blocks the writer's thread, not this runtime.
                let _ = waits.recv();
                Ok(())
            })
        });
        deleting.await
    });
    opened.await.unwrap();
    // Returns although the transaction is open, and does not see uncommitted changes.
    assert_eq!(thread(&fixture.records, "t").await.thread_id, "t");
    go_on.send(()).unwrap();
    writing.await.unwrap().unwrap();
    assert!(fixture.records.threads().get("t", None).await.unwrap().is_none());
}

#[tokio::test]
async fn opening_again_changes_nothing() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t").await;
    let schema = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name";
    let before: Vec<(String,)> = fixture.records.db.fetch_all(query::query(schema)).await.unwrap();
    fixture.records.close().await;
    let again = Records::open(fixture.place.path(), RecordsOptions::default()).await.unwrap();
    let after: Vec<(String,)> = again.db.fetch_all(query::query(schema)).await.unwrap();
    assert_eq!(after, before);
    assert_eq!(thread(&again, "t").await.thread_id, "t");
}

#[tokio::test]
async fn newer_schema_is_refused_and_left_alone() {
    let fixture = fixture().await;
    sql(
        &fixture.records,
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
         VALUES (1000, 'future', TRUE, x'00', 0)",
    )
    .await;
    fixture.records.close().await;
    let before = std::fs::read(fixture.place.path()).unwrap();

    let error = Records::open(fixture.place.path(), RecordsOptions::default()).await.unwrap_err();
    assert!(matches!(error, RecordsError::NewerSchema { found: 1000, .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains(&fixture.place.path().display().to_string()) && text.contains("newer"), "{text}");
    assert_eq!(std::fs::read(fixture.place.path()).unwrap(), before);
}

#[tokio::test]
async fn older_schema_is_refused_and_left_alone_by_what_must_not_upgrade_it() {
    let fixture = fixture().await;
    let path = fixture.place.path().to_owned();
    create_thread(&fixture.records, "t").await;
    fixture.records.close().await;
    let current = Records::open_existing(&path, RecordsOptions::default()).await.unwrap();
    assert_eq!(thread(&current, "t").await.thread_id, "t");
    let older = "DELETE FROM _sqlx_migrations WHERE version = (SELECT max(version) FROM _sqlx_migrations)";
    sql(&current, older).await;
    current.close().await;
    let before = std::fs::read(&path).unwrap();

    let error = Records::open_existing(&path, RecordsOptions::default()).await.unwrap_err();
    assert!(matches!(error, RecordsError::OlderSchema { missing: 1, .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains(&path.display().to_string()) && text.contains("`threadkeep setup`"), "{text}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[tokio::test]
async fn changed_migration_is_refused() {
    let fixture = fixture().await;
    sql(&fixture.records, "UPDATE _sqlx_migrations SET checksum = x'00' WHERE version = 2").await;
    fixture.records.close().await;
    let error = Records::open(fixture.place.path(), RecordsOptions::default()).await.unwrap_err();
    assert!(matches!(error, RecordsError::Corrupt { .. }) && error.to_string().contains('2'), "{error}");
}

#[tokio::test]
async fn file_that_is_no_database_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(DATABASE_FILE);
    let garbage = "not a database ".repeat(1000);
    std::fs::write(&path, &garbage).unwrap();
    let error = Records::open(&path, RecordsOptions::default()).await.unwrap_err();
    assert!(matches!(error, RecordsError::Corrupt { .. }), "{error}");
    assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), garbage);
}

#[tokio::test]
async fn path_that_cannot_be_opened_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let blocked = directory.path().join("file");
    std::fs::write(&blocked, "").unwrap();
    for path in [directory.path().to_owned(), blocked.join(DATABASE_FILE)] {
        let error = Records::open(&path, RecordsOptions::default()).await.unwrap_err();
        assert!(matches!(error, RecordsError::Open { .. }), "{error}");
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }
}

#[tokio::test]
async fn memory_store_keeps_its_rows_and_is_private() {
    let first = Records::open_memory(RecordsOptions::default()).await.unwrap();
    let second = Records::open_memory(RecordsOptions::default()).await.unwrap();
    create_thread(&first, "t").await;
    start(&first, "t", "r").await;
    assert_eq!(holder(&first, "t").await.as_deref(), Some("r"));
    assert!(second.threads().get("t", None).await.unwrap().is_none());
}

#[tokio::test]
async fn damaged_cell_is_named_and_not_shown() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t1").await;
    for (damage, column) in [
        ("UPDATE threads_meta SET status = 'secret'", "status"),
        ("UPDATE threads_meta SET status = 'idle', metadata_json = '\"secret\"'", "metadata_json"),
        ("UPDATE threads_meta SET metadata_json = '{}', created_at = 'secret'", "created_at"),
    ] {
        sql(&fixture.records, damage).await;
        let error = fixture.records.threads().get("t1", None).await.unwrap_err();
        assert!(matches!(error, RecordsError::Corrupt { .. }), "{error}");
        let text = format!("{error} {error:?}");
        assert!(text.contains(&format!("threads_meta.{column} of row t1")), "{text}");
        assert!(!text.contains("secret"), "{text}");
    }
}

#[tokio::test]
async fn damaged_event_is_named_by_thread_and_number() {
    let fixture = fixture_with(EventBackend::Database).await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    admit(records, "t", "r").await;
    let event = NewEvent::new("run.start", "trace", serde_json::Value::Null);
    records.events().append("t", "r", vec![event.clone(), event]).await.unwrap();
    sql(records, "UPDATE run_events SET content = '{' WHERE seq = 2").await;
    let error = records.events().list(&EventQuery::new("t", "r")).await.unwrap_err().to_string();
    assert!(error.contains("run_events.content of row t/2"), "{error}");
}

#[tokio::test]
async fn damaged_cell_of_a_lookup_is_damage_too() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t").await;
    admit(&fixture.records, "t", "r").await;
    sql(&fixture.records, "UPDATE runs SET user_id = x'736563726574'").await;
    let event = NewEvent::new("run.start", "trace", serde_json::Value::Null);
    let error = fixture.records.events().append("t", "r", vec![event]).await.unwrap_err();
    assert!(matches!(error, RecordsError::Corrupt { .. }), "{error:?}");
    assert!(!format!("{error} {error:?}").contains("secret"), "{error:?}");
}

/// As on a file system that was mounted for reading meanwhile.
#[tokio::test]
async fn a_write_to_a_database_that_cannot_be_written_names_it_and_the_remedy() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t").await;
    sql(&fixture.records, "PRAGMA query_only = 1").await;
    let error = fixture.records.threads().set_status("t", ThreadStatus::Error).await.unwrap_err();
    let text = error.to_string();
    for says in
        [&*fixture.place.path().display().to_string(), "cannot be written", "chmod", "mount", "sqlite_dir"]
    {
        assert!(text.contains(says), "{text}");
    }
    assert!(error.is_unavailable(), "it may be writable again");
    assert_eq!(thread(&fixture.records, "t").await.status, ThreadStatus::Idle);
}

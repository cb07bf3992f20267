use super::support::*;
use crate::*;

/// The server says in a warning that a commit did not wait for the standby.
#[tokio::test]
async fn a_transaction_hears_warnings_whatever_the_role_is_set_to() {
    let fixture = fixture().await;
    let sql = query::query("SHOW client_min_messages");
    let setting = fixture.records.db.write("t", move |tx| Box::pin(tx.fetch_optional::<(String,)>(sql)));
    assert_eq!(setting.await.unwrap(), Some(("warning".to_owned(),)));
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
    let closed = fixture.records.threads().get("t", None).await.unwrap_err();
    assert!(matches!(closed, RecordsError::Unavailable { .. }), "{closed}");

    let reopened = fixture.reopen(EventBackend::Database).await;
    assert_eq!(dump(&reopened).await, before);
}

/// As after an upgrade of the server by logical replication.
#[tokio::test]
async fn numbers_that_were_replicated_without_their_sequences_are_not_given_again() {
    let fixture = fixture_with(EventBackend::Database).await;
    let work = async |records: &Records, name: &str| {
        create_thread(records, name).await;
        start(records, name, name).await;
        let event = NewEvent::new("run.start", "trace", serde_json::Value::Null);
        records.events().append(name, name, vec![event]).await.unwrap();
    };
    for name in ["a", "b", "c"] {
        work(&fixture.records, name).await;
    }
    fixture.records.close().await;
    fixture
        .place
        .execute(
            "ALTER TABLE {s}.threadkeep_gateway_runs ALTER COLUMN admission_seq RESTART; \
             ALTER TABLE {s}.threadkeep_gateway_run_events ALTER COLUMN id RESTART",
        )
        .await;
    let reopened = fixture.reopen(EventBackend::Database).await;
    work(&reopened, "d").await;
}

#[tokio::test]
async fn newer_schema_and_changed_migration_are_refused() {
    let fixture = fixture().await;
    let place = fixture.place.describe();
    let open = || fixture.place.try_open(RecordsOptions::default());
    fixture
        .place
        .execute("UPDATE {s}.threadkeep_gateway_migrations SET checksum = 'x' WHERE version = 2")
        .await;
    let error = open().await.unwrap_err();
    assert!(matches!(error, RecordsError::Corrupt { .. }) && error.to_string().contains('2'), "{error}");
    fixture
        .place
        .execute(
            "INSERT INTO {s}.threadkeep_gateway_migrations (version, description, success, checksum, execution_time) \
             VALUES (99, 'future', TRUE, 'x', 0)",
        )
        .await;
    let error = open().await.unwrap_err();
    assert!(matches!(error, RecordsError::NewerSchema { found: 99, .. }), "{error}");
    assert!(error.to_string().contains(&place), "{error}");
}

#[tokio::test]
async fn older_schema_is_refused_and_left_alone_by_what_must_not_upgrade_it() {
    let database = threadkeep_testing::postgres().unwrap().database().await.unwrap();
    let target = postgres_target(database.url(), "public", 1);
    Records::open_postgres(&target, RecordsOptions::default()).await.unwrap().close().await;
    let admin = target.open().await.unwrap();
    let newest = "SELECT max(version) FROM threadkeep_gateway_migrations";
    let newest: i64 = admin.query_typed(newest, &[]).await.unwrap()[0].get(0);
    let unapply = format!("DELETE FROM threadkeep_gateway_migrations WHERE version = {newest}");
    admin.batch_execute(&unapply).await.unwrap();
    let error = Records::open_existing_postgres(&target, RecordsOptions::default()).await.unwrap_err();
    assert!(matches!(error, RecordsError::OlderSchema { missing: 1, .. }), "{error}");
    let there = admin.query_typed("SELECT version FROM threadkeep_gateway_migrations", &[]).await.unwrap();
    let there: Vec<i64> = there.iter().map(|row| row.get(0)).collect();
    assert!(there.iter().all(|version| *version < newest), "nothing was applied: {there:?}");
}

/// Frames live for a moment, and the server would spend most of an insert on compressing them.
#[tokio::test]
async fn frames_are_stored_as_they_are() {
    let database = threadkeep_testing::postgres().unwrap().database().await.unwrap();
    let target = postgres_target(database.url(), "public", 1);
    Records::open_postgres(&target, RecordsOptions::default()).await.unwrap().close().await;
    let admin = target.open().await.unwrap();
    let sql = "SELECT attstorage::text FROM pg_attribute \
               WHERE attrelid = 'threadkeep_gateway_run_frames'::regclass AND attname = 'frames'";
    let found = admin.query_typed(sql, &[]).await.unwrap();
    assert_eq!(found[0].get::<_, String>(0), "e");
}

#[tokio::test]
async fn a_server_that_cannot_be_reached_is_named_without_the_password() {
    for address in ["postgres://u:hunter2@127.0.0.1:1/d", "postgres://u:hunter2@no-such-host.invalid/d"] {
        let target = postgres_target(address, "public", 1);
        let error = Records::open_postgres(&target, RecordsOptions::default()).await.unwrap_err();
        assert!(matches!(error, RecordsError::Open { .. }), "{error}");
        let text = format!("{error} {error:?}");
        assert!(text.contains("the test's database") && !text.contains("hunter2"), "{text}");
    }
    let database = threadkeep_testing::postgres().unwrap().database().await.unwrap();
    let wrong = database.url().replacen("threadkeep:", "threadkeep:hunter2", 1);
    let target = postgres_target(&wrong, "public", 1);
    let error = Records::open_postgres(&target, RecordsOptions::default()).await.unwrap_err();
    let text = format!("{error} {error:?}");
    assert!(text.contains("password authentication failed") && !text.contains("hunter2"), "{text}");
}

#[tokio::test]
async fn a_connection_with_tls_trusts_only_who_it_was_told_to() {
    let server = threadkeep_testing::Postgres::start().unwrap();
    let database = server.database().await.unwrap();
    let certificate = server.certificate().unwrap().display().to_string();
    let open = async |options: &str| {
        let target = postgres_target(&format!("{}{options}", database.url()), "public", 1);
        Records::open_postgres(&target, RecordsOptions::default()).await
    };
    let records = open(&format!("?sslmode=require&sslrootcert={certificate}")).await.unwrap();
    // A superuser may read its own session.
    let sql = "SELECT version FROM pg_stat_ssl WHERE pid = pg_backend_pid() AND ssl";
    let session: Option<(String,)> = records.db.fetch_optional(query::query(sql)).await.unwrap();
    assert!(session.unwrap().0.starts_with("TLSv1."));
    let untrusted = open("?sslmode=require").await.unwrap_err();
    assert!(matches!(untrusted, RecordsError::Open { .. }), "{untrusted}");
}

/// Postgres text cannot contain one.
#[tokio::test]
async fn a_nul_is_replaced_where_it_is_text_and_kept_where_it_is_json() {
    let fixture = fixture_with(EventBackend::Database).await;
    let records = &fixture.records;
    let metadata = object(serde_json::json!({"k": "a\0b", "other": "c"}));
    let new = NewThread {
        thread_id: "t".into(),
        display_name: Some("n\0".into()),
        metadata,
        ..NewThread::default()
    };
    let row = records.threads().create(new).await.unwrap().row;
    assert_eq!(
        (row.display_name.as_deref(), &row.metadata["k"]),
        (Some("n\u{fffd}"), &serde_json::json!("a\0b"))
    );
    for (filter, found) in [("a\0b", 1), ("ab", 0)] {
        let metadata =
            MetadataFilter::parse(&object(serde_json::json!({"k": filter, "other": "c"}))).unwrap();
        let query = ThreadQuery { metadata, limit: 5, ..ThreadQuery::default() };
        assert_eq!(records.threads().search(&query).await.unwrap().len(), found);
    }
    let run = NewRun { first_human_message: Some("\0".into()), ..new_run("t", "r") };
    records.runs().admit(run, MultitaskStrategy::Reject).await.unwrap();
    let event = NewEvent::new("x", MESSAGE_CATEGORY, serde_json::json!("\0"));
    records.events().append("t", "r", vec![event]).await.unwrap();
    assert_eq!(records.events().list(&EventQuery::new("t", "r")).await.unwrap()[0].content, "\0");
}

/// As old applications, which share the database, need it.
#[tokio::test]
async fn a_database_in_which_a_backslash_escapes_is_upgraded_and_searched() {
    let database = threadkeep_testing::postgres().unwrap().database().await.unwrap();
    let target = postgres_target(database.url(), "public", 1);
    let set = format!("ALTER DATABASE {} SET standard_conforming_strings = off", database.name());
    target.open().await.unwrap().batch_execute(&set).await.unwrap();
    let records = Records::open_postgres(&target, RecordsOptions::default()).await.unwrap();
    let metadata = object(serde_json::json!({"k": "a\0\\b"}));
    let new = NewThread { thread_id: "t".into(), metadata: metadata.clone(), ..NewThread::default() };
    records.threads().create(new).await.unwrap();
    let metadata = MetadataFilter::parse(&metadata).unwrap();
    let query = ThreadQuery { metadata, limit: 5, ..ThreadQuery::default() };
    assert_eq!(records.threads().search(&query).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_database_that_cannot_store_every_text_gets_no_records() {
    let database = threadkeep_testing::postgres().unwrap().database().await.unwrap();
    let admin = postgres_target(database.url(), "public", 1).open().await.unwrap();
    let latin = format!("{}_latin", database.name());
    let create =
        format!("CREATE DATABASE {latin} TEMPLATE template0 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'");
    admin.batch_execute(&create).await.unwrap();
    let target = postgres_target(&database.url().replace(database.name(), &latin), "public", 1);
    let error = Records::open_postgres(&target, RecordsOptions::default()).await.unwrap_err();
    assert!(matches!(error, RecordsError::Invalid { field: "database.postgres_url", .. }), "{error}");
    assert!(error.to_string().contains("LATIN1"), "{error}");
    assert!(Records::open_existing_postgres(&target, RecordsOptions::default()).await.unwrap().is_none());
    admin.batch_execute(&format!("DROP DATABASE {latin} WITH (FORCE)")).await.unwrap();
}

#[tokio::test]
async fn the_clocks_of_process_and_database_are_compared() {
    let records = lone(RecordsOptions::default()).await;
    assert!(records.clock_skew().await.unwrap().abs() < chrono::TimeDelta::minutes(1));
    let late = Clock::from_fn(|| chrono::Utc::now() - chrono::TimeDelta::hours(1));
    let records = lone(RecordsOptions { clock: late, ..RecordsOptions::default() }).await;
    let skew = records.clock_skew().await.unwrap() - chrono::TimeDelta::hours(1);
    assert!(skew.abs() < chrono::TimeDelta::minutes(1), "{skew}");
}

/// The process waits for minutes for the database's time, which is that of a moment in between.
#[tokio::test]
async fn a_slow_answer_is_no_difference_of_the_clocks() {
    let asked = std::sync::atomic::AtomicBool::new(false);
    let clock = Clock::from_fn(move || {
        let (now, minutes) = (chrono::Utc::now(), chrono::TimeDelta::minutes(5));
        if asked.fetch_not(std::sync::atomic::Ordering::SeqCst) { now + minutes } else { now - minutes }
    });
    let records = lone(RecordsOptions { clock, ..RecordsOptions::default() }).await;
    assert_eq!(records.clock_skew().await.unwrap(), chrono::TimeDelta::zero());
}

/// A process that stalls in the middle of a transaction, as when its machine is suspended.
#[tokio::test]
async fn a_process_that_stands_still_does_not_hold_up_the_others_for_long() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t").await;
    let still = OpenTransaction::begin(&fixture.records, "SELECT 1").await;
    let second = fixture.reopen(EventBackend::Memory).await;
    // The thread's own transactions wait until the server ends the stalled one; those of other threads do not wait.
    create_thread(&second, "u").await;
    let waited = soon(async {
        loop {
            match second.threads().set_status("t", ThreadStatus::Error).await {
                Ok(()) => break,
                Err(error) => assert!(matches!(error, RecordsError::Unavailable { .. }), "{error}"),
            }
        }
    });
    waited.await;
    assert_eq!(thread(&second, "t").await.status, ThreadStatus::Error);
    still.give_up().await;
}

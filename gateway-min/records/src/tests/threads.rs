use chrono::TimeDelta;
use serde_json::json;

use super::support::*;
use crate::*;

fn named(thread_id: &str) -> NewThread {
    NewThread {
        thread_id: thread_id.to_owned(),
        assistant_id: Some("lead_agent".to_owned()),
        user_id: Some("ann".to_owned()),
        display_name: Some("A title".to_owned()),
        metadata: object(json!({"a": 1, "nested": {"b": [true, null]}})),
    }
}

#[tokio::test]
async fn created_thread_reads_back() {
    let fixture = fixture().await;
    fixture.clock.advance_micros(7);
    let created = fixture.records.threads().create(named("t")).await.unwrap();
    assert!(created.created);
    let expected = ThreadRow {
        thread_id: "t".to_owned(),
        assistant_id: Some("lead_agent".to_owned()),
        user_id: Some("ann".to_owned()),
        display_name: Some("A title".to_owned()),
        status: ThreadStatus::Idle,
        metadata: object(json!({"a": 1, "nested": {"b": [true, null]}})),
        created_at: fixture.clock.now(),
        updated_at: fixture.clock.now(),
    };
    assert_eq!(created.row, expected);
    assert_eq!(thread(&fixture.records, "t").await, expected);
    let text: Option<(String,)> =
        fixture.records.db.fetch_optional(query::query("SELECT created_at FROM threads_meta")).await.unwrap();
    assert_eq!(text.unwrap().0, "2026-01-02T03:04:05.000007+00:00");
}

#[tokio::test]
async fn times_are_whole_microseconds() {
    let nanos = chrono::DateTime::from_timestamp(1_767_323_045, 123_456_789).unwrap();
    let options = RecordsOptions { clock: Clock::from_fn(move || nanos), ..RecordsOptions::default() };
    let records = lone(options).await;
    create_thread(&records, "t").await;
    let patched = records.threads().patch_metadata("t", None, object(json!({"a": 1}))).await.unwrap();
    assert_eq!(patched.updated_at.timestamp_subsec_nanos(), 123_456_000);
    assert_eq!(thread(&records, "t").await, patched);
}

#[tokio::test]
async fn second_create_returns_the_first_row_unchanged() {
    let fixture = fixture().await;
    let first = fixture.records.threads().create(named("t")).await.unwrap().row;
    let before = dump(&fixture.records).await;
    fixture.clock.advance_micros(1);
    let second =
        NewThread { thread_id: "t".to_owned(), user_id: Some("bob".to_owned()), ..NewThread::default() };
    let again = fixture.records.threads().create(second).await.unwrap();
    assert_eq!(again, CreatedThread { row: first, created: false });
    assert_eq!(dump(&fixture.records).await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_parallel_creates_one_creates() {
    let fixture = fixture().await;
    let tasks = (0..20).map(|i| {
        let records = fixture.records.clone();
        let new = NewThread { assistant_id: Some(i.to_string()), ..named("t") };
        tokio::spawn(async move { records.threads().create(new).await.unwrap() })
    });
    let results = futures::future::try_join_all(tasks).await.unwrap();
    assert_eq!(results.iter().filter(|result| result.created).count(), 1);
    assert!(results.iter().all(|result| result.row == results[0].row));
}

#[tokio::test]
async fn owner_sees_own_and_shared_threads() {
    let fixture = fixture().await;
    let threads = fixture.records.threads();
    threads.create(named("anns")).await.unwrap();
    create_thread(&fixture.records, "shared").await;
    for (thread_id, owner, visible) in [
        ("anns", None, true),
        ("anns", Some("ann"), true),
        ("anns", Some("bob"), false),
        ("shared", Some("bob"), true),
        ("missing", None, false),
    ] {
        let found = threads.get(thread_id, owner).await.unwrap();
        assert_eq!(found.is_some(), visible, "{thread_id} {owner:?}");
    }
}

/// Each request of a user asks for it, however large the metadata is.
#[tokio::test]
async fn the_owner_is_read_without_the_rest_of_the_row() {
    let fixture = fixture().await;
    let threads = fixture.records.threads();
    threads.create(named("anns")).await.unwrap();
    create_thread(&fixture.records, "shared").await;
    sql(&fixture.records, "UPDATE threads_meta SET metadata_json = '{'").await;
    assert!(matches!(threads.get("anns", None).await, Err(RecordsError::Corrupt { .. })));
    for (thread_id, owner) in [("anns", Some("ann")), ("shared", None), ("missing", None)] {
        assert_eq!(threads.owner(thread_id).await.unwrap().as_deref(), owner, "{thread_id}");
    }
}

#[tokio::test]
async fn patch_merges_at_the_top_level() {
    let fixture = fixture().await;
    fixture.records.threads().create(named("t")).await.unwrap();
    fixture.clock.advance_micros(5);
    let patch = object(json!({"nested": {"c": 2}, "new": null}));
    let patched = fixture.records.threads().patch_metadata("t", None, patch).await.unwrap();
    assert_eq!(patched.metadata, object(json!({"a": 1, "nested": {"c": 2}, "new": null})));
    assert_eq!(patched.updated_at, fixture.clock.now());
    assert!(patched.created_at < patched.updated_at);
    assert_eq!(thread(&fixture.records, "t").await, patched);
}

#[tokio::test]
async fn patch_of_the_pin_alone_keeps_updated_at() {
    let fixture = fixture().await;
    let created = fixture.records.threads().create(named("t")).await.unwrap().row;
    fixture.clock.advance_micros(5);
    let threads = fixture.records.threads();
    for pinned in [true, false] {
        let patched = threads.patch_metadata("t", None, object(json!({ PINNED_KEY: pinned }))).await.unwrap();
        assert_eq!(patched.updated_at, created.updated_at);
        assert_eq!(patched.metadata[PINNED_KEY], pinned);
        assert_eq!(patched.metadata["a"], 1);
    }
    let both = threads.patch_metadata("t", None, object(json!({ PINNED_KEY: true, "a": 2 }))).await.unwrap();
    assert_eq!(both.updated_at, fixture.clock.now());
    fixture.clock.advance_micros(5);
    let empty = threads.patch_metadata("t", None, JsonObject::new()).await.unwrap();
    assert_eq!(empty.updated_at, fixture.clock.now());
}

/// It may be the time at which its last run ended, of a process whose clock is ahead: the next run begins after that.
#[tokio::test]
async fn the_time_of_a_thread_is_set_back_only_with_the_clock() {
    let fixture = fixture().await;
    let (records, threads, runs) = (&fixture.records, fixture.records.threads(), fixture.records.runs());
    create_thread(records, "t").await;
    start(records, "t", "r1").await;
    let ended = fixture.clock.now() + TimeDelta::seconds(5);
    let ahead = RunEnd { not_before: Some(ended), ..end(RunStatus::Success) };
    runs.finish("r1", &ahead).await.unwrap();
    let time = async || thread(records, "t").await.updated_at;
    assert_eq!(time().await, ended);

    assert!(threads.set_display_name("t", None, Some("renamed")).await.unwrap());
    assert_eq!(time().await, ended, "renamed");
    let patched = threads.patch_metadata("t", None, object(json!({"a": 1}))).await.unwrap();
    assert_eq!((patched.updated_at, time().await), (ended, ended), "patched");
    start(records, "t", "r2").await;
    assert_eq!(time().await, ended, "started");
    runs.finish("r2", &end(RunStatus::Success)).await.unwrap();
    assert_eq!(time().await, ended, "finished");
    start(records, "t", "r3").await;
    let recovered = runs.recover_orphans(fixture.clock.now(), TimeDelta::seconds(10)).await.unwrap();
    assert_eq!((recovered.runs.len(), time().await), (1, ended), "recovered");

    fixture.clock.advance_seconds(-55);
    assert!(threads.set_display_name("t", Some("renamed"), None).await.unwrap());
    assert_eq!(time().await, fixture.clock.now(), "the clock was set back by a minute");
}

#[tokio::test]
async fn status_and_display_name_change_and_touch() {
    let fixture = fixture().await;
    create_thread(&fixture.records, "t").await;
    let threads = fixture.records.threads();
    for status in [ThreadStatus::Running, ThreadStatus::Interrupted, ThreadStatus::Error, ThreadStatus::Idle]
    {
        fixture.clock.advance_micros(1);
        threads.set_status("t", status).await.unwrap();
        let row = thread(&fixture.records, "t").await;
        assert_eq!((row.status, row.updated_at), (status, fixture.clock.now()));
    }
    let mut seen = None;
    for (given, stored) in [
        (Some("Ünïcode".to_owned()), Some("Ünïcode".to_owned())),
        (Some("é".repeat(256)), Some("é".repeat(256))),
        (Some("é".repeat(257)), Some("é".repeat(256))),
        (None, None),
    ] {
        fixture.clock.advance_micros(1);
        let set = async |seen: &Option<String>| {
            threads.set_display_name("t", seen.as_deref(), given.as_deref()).await.unwrap()
        };
        assert!(set(&seen).await);
        let row = thread(&fixture.records, "t").await;
        assert_eq!((&row.display_name, row.updated_at), (&stored, fixture.clock.now()));
        // Another title was seen: nothing changes.
        fixture.clock.advance_micros(1);
        for other in [Some("another".to_owned()), seen] {
            if other != stored {
                assert!(!set(&other).await);
                assert_eq!(thread(&fixture.records, "t").await, row);
            }
        }
        seen = stored;
    }
    let long = NewThread { display_name: Some("x".repeat(300)), ..named("long") };
    assert_eq!(threads.create(long).await.unwrap().row.display_name, Some("x".repeat(256)));
}

#[tokio::test]
async fn changing_an_unknown_thread_is_not_found() {
    let fixture = fixture().await;
    let threads = fixture.records.threads();
    let errors = [
        threads.patch_metadata("t9", None, JsonObject::new()).await.unwrap_err(),
        threads.set_status("t9", ThreadStatus::Idle).await.unwrap_err(),
        threads.set_display_name("t9", None, Some("x")).await.unwrap_err(),
    ];
    for error in errors {
        assert!(error.is_not_found());
        assert_eq!(error.to_string(), "Thread t9 not found");
    }
    assert!(dump(&fixture.records).await.is_empty());
}

/// A process that has lost its run does not show the thread as running.
#[tokio::test]
async fn a_thread_is_running_only_while_its_run_is() {
    let fixture = fixture().await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    let status = async || thread(records, "t").await.status;
    admit(records, "t", "r").await;
    assert_eq!(status().await, ThreadStatus::Idle, "it has not begun");
    records.runs().start("r").await.unwrap();
    assert_eq!(status().await, ThreadStatus::Running);
    records.runs().recover_orphans(fixture.clock.now(), chrono::TimeDelta::zero()).await.unwrap();
    assert_eq!(status().await, ThreadStatus::Error);
    let again = records.runs().start("r").await.unwrap();
    assert_eq!(again, StartOutcome::NotPending(RunStatus::Error));
    assert_eq!(status().await, ThreadStatus::Error, "the run was ended by somebody else");
}

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::Barrier;

use super::support::*;
use crate::*;

async fn full_thread(records: &Records, thread_id: &str) {
    create_thread(records, thread_id).await;
    for n in 0..2 {
        let run_id = format!("{thread_id}-r{n}");
        start(records, thread_id, &run_id).await;
        let events = vec![NewEvent::new("llm.human.input", MESSAGE_CATEGORY, json!({"n": n})); 2];
        records.events().append(thread_id, &run_id, events).await.unwrap();
        records.runs().finish(&run_id, &end(RunStatus::Success)).await.unwrap();
    }
}

async fn events(records: &Records, thread_id: &str, run_id: &str) -> usize {
    records.events().list(&EventQuery::new(thread_id, run_id)).await.unwrap().len()
}

#[tokio::test]
async fn deletion_takes_everything_of_the_thread_and_nothing_else() {
    for backend in [EventBackend::Memory, EventBackend::Database, EventBackend::Jsonl] {
        let fixture = fixture_with(backend).await;
        let records = &fixture.records;
        full_thread(records, "kept").await;
        let kept = dump(records).await;
        full_thread(records, "gone").await;
        let reservation = records.runs().reserve("gone", WriterKind::Delete).await.unwrap();
        let deleted = records.delete_thread(reservation).await.unwrap();
        assert_eq!(deleted, DeletedThread { thread: true, runs: 2, events: 4 });
        assert_eq!(dump(records).await, kept);
        assert_eq!(events(records, "kept", "kept-r1").await, 2);
        assert_eq!(events(records, "gone", "gone-r1").await, 0);

        // The id can be used again.
        create_thread(records, "gone").await;
        assert_eq!(records.events().count_messages("gone").await.unwrap(), 0);
        start(records, "gone", "new").await;
        let seqs = records
            .events()
            .append("gone", "new", vec![NewEvent::new("run.start", "trace", json!(null))])
            .await;
        assert_eq!(seqs.unwrap(), [1]);
    }
}

/// A client that continues after an event would take the next one for one that it has.
#[tokio::test]
async fn numbers_of_a_deleted_run_are_never_given_again() {
    for backend in [EventBackend::Memory, EventBackend::Database, EventBackend::Jsonl] {
        let fixture = fixture_with(backend).await;
        let records = &fixture.records;
        create_thread(records, "t").await;
        let other = fixture.reopen(backend).await;
        // The last run is deleted, then one before others, then all.
        let mut next = 1;
        for (run_id, deleted) in [
            ("r1", &[][..]),
            ("r2", &["r2"]),
            ("r3", &[]),
            ("r4", &["r1"]),
            ("r5", &["r5", "r4", "r3"]),
            ("r6", &[]),
        ] {
            // Another process sees the same, if the feed is not in this one's memory.
            let records = if backend == EventBackend::Memory || next % 4 == 1 { records } else { &other };
            start(records, "t", run_id).await;
            let events = vec![NewEvent::new("llm.human.input", MESSAGE_CATEGORY, json!({})); 2];
            let places = records.events().append("t", run_id, events).await.unwrap();
            assert_eq!(places, [next, next + 1], "{backend:?} {run_id}");
            next += 2;
            records.runs().finish(run_id, &end(RunStatus::Success)).await.unwrap();
            for run_id in deleted {
                records.delete_run("t", run_id).await.unwrap();
            }
        }
        records.delete_run("t", "r6").await.unwrap();
        let seed = SeedRun {
            run_id: "checkpoint-seed-t-0".to_owned(),
            events: vec![NewEvent::new("llm.human.input", MESSAGE_CATEGORY, json!({}))],
        };
        assert!(records.events().seed("t", vec![seed]).await.unwrap());
        let seeded = records.events().list(&EventQuery::new("t", "checkpoint-seed-t-0")).await.unwrap();
        assert_eq!(seeded[0].seq, next, "{backend:?}");
    }
}

#[tokio::test]
async fn deletion_of_a_thread_without_row_finds_nothing() {
    let fixture = fixture().await;
    let reservation = fixture.records.runs().reserve("t", WriterKind::Delete).await.unwrap();
    let deleted = fixture.records.delete_thread(reservation).await.unwrap();
    assert_eq!(deleted, DeletedThread { thread: false, runs: 0, events: 0 });
    assert!(dump(&fixture.records).await.is_empty());
}

#[tokio::test]
async fn deletion_needs_its_own_reservation() {
    let fixture = fixture().await;
    let records = &fixture.records;
    full_thread(records, "t").await;
    let before = dump(records).await;
    let reservation = records.runs().reserve("t", WriterKind::CheckpointWrite).await.unwrap();
    let error = records.delete_thread(reservation).await.unwrap_err();
    assert!(matches!(error, RecordsError::Invalid { field: "reservation", .. }), "{error}");
    until_free(records, "t").await;
    assert_eq!(dump(records).await, before);

    let stale = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
    assert!(stale.is_held().await.unwrap());
    records.runs().recover_orphans(fixture.clock.now(), chrono::TimeDelta::zero()).await.unwrap();
    assert!(!stale.is_held().await.unwrap());
    let error = records.delete_thread(stale).await.unwrap_err();
    assert!(matches!(error, RecordsError::NotFound { entity: Entity::Reservation, .. }), "{error}");
    assert_eq!(dump(records).await, before);
}

/// A process stood still in a deletion, and another one has freed the thread: what was stored since stays.
#[tokio::test]
async fn a_deletion_that_has_lost_its_reservation_takes_no_batch_of_a_later_run() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    full_thread(records, "t").await;
    let stale = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
    records.runs().recover_orphans(fixture.clock.now(), chrono::TimeDelta::zero()).await.unwrap();
    super::batches::submit(records, super::batches::batch("b", 2, 2, 2)).await;
    let lease = chrono::TimeDelta::seconds(35);
    let claimed = batches.claim("b", "a", lease, 1, true).await.unwrap().unwrap().items.remove(0);
    assert!(batches.finalize(&claimed.claim, super::batches::succeeded("x"), None).await.unwrap());
    let before = dump(records).await;
    let error = batches.cancel_of_thread(&stale).await.unwrap_err();
    assert!(error.is_lost_reservation(), "{error}");
    assert!(stale.ensure_held().await.unwrap_err().is_lost_reservation());
    let error = batches.delete_items_of_thread(&stale).await.unwrap_err();
    assert!(error.is_lost_reservation(), "{error}");
    let error = records.delete_thread(stale).await.unwrap_err();
    assert!(error.is_lost_reservation(), "{error}");
    assert_eq!(dump(records).await, before);
    assert_eq!(batches.get("b").await.unwrap().unwrap().status, BatchStatus::Running);
}

#[tokio::test]
async fn late_events_of_a_deleted_thread_are_refused() {
    for backend in [EventBackend::Memory, EventBackend::Database, EventBackend::Jsonl] {
        let fixture = fixture_with(backend).await;
        let records = &fixture.records;
        full_thread(records, "t").await;
        let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
        records.delete_thread(reservation).await.unwrap();
        create_thread(records, "t").await;
        let event = NewEvent::new("run.delivery", "outputs", json!({}));
        let late = records.events().append("t", "t-r1", vec![event.clone()]).await.unwrap_err();
        assert_eq!(late.to_string(), "Run t-r1 not found");
        assert!(records.events().append_if_absent("t", "t-r1", event).await.unwrap_err().is_not_found());
        assert_eq!(events(records, "t", "t-r1").await, 0);
    }
}

/// Runs an append and the deletion of its thread concurrently, 100 times: in the end nothing is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn events_racing_with_the_deletion_leave_nothing() {
    for backend in [EventBackend::Memory, EventBackend::Database, EventBackend::Jsonl] {
        let fixture = fixture_with(backend).await;
        let records = &fixture.records;
        for _ in 0..100 {
            full_thread(records, "t").await;
            let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
            let late = records.clone();
            let appending = tokio::spawn(async move {
                let event = NewEvent::new("run.delivery", "outputs", json!({}));
                late.events().append("t", "t-r1", vec![event]).await
            });
            records.delete_thread(reservation).await.unwrap();
            let appended = appending.await.unwrap();
            assert!(
                appended.as_ref().map_or_else(RecordsError::is_not_found, |seqs| seqs == &[5]),
                "{appended:?}"
            );
            assert_eq!(events(records, "t", "t-r1").await, 0);
            assert!(dump(records).await.is_empty());
        }
    }
}

/// The answer to the commit is lost.
#[tokio::test]
async fn a_deletion_in_doubt_that_was_carried_out_takes_the_events_too() {
    for backend in [EventBackend::Memory, EventBackend::Database, EventBackend::Jsonl] {
        let fixture = fixture_with(backend).await;
        let records = &fixture.records;
        full_thread(records, "t").await;
        let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
        records.doubt_commit(1);
        let deleted = records.delete_thread(reservation).await.unwrap();
        assert!(!records.fail_statement(0), "{backend:?}: the commit was in doubt");
        assert_eq!(deleted, DeletedThread { thread: true, runs: 2, events: 4 }, "{backend:?}");
        assert!(dump(records).await.is_empty());
        assert!(!records.events().has_remains("t").await, "{backend:?}");
    }
}

#[tokio::test]
async fn a_deletion_in_doubt_that_was_not_carried_out_keeps_the_events() {
    for backend in [EventBackend::Memory, EventBackend::Database, EventBackend::Jsonl] {
        let fixture = fixture_with(backend).await;
        let records = &fixture.records;
        full_thread(records, "t").await;
        let before = dump(records).await;
        let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
        records.lose_commit(1);
        let error = records.delete_thread(reservation).await.unwrap_err();
        assert!(matches!(error, RecordsError::InDoubt { .. }), "{backend:?}: {error}");
        until_free(records, "t").await;
        assert_eq!(dump(records).await, before, "{backend:?}");
        assert_eq!(events(records, "t", "t-r1").await, 2, "{backend:?}");
    }
}

/// Another client may create a thread with the same id before anybody looks whether the deletion was carried out.
#[tokio::test]
async fn rows_of_a_newer_thread_do_not_say_that_a_deletion_was_not_carried_out() {
    let fixture = fixture().await;
    let records = &fixture.records;
    full_thread(records, "t").await;
    let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
    fixture.clock.advance_seconds(1);
    let has_old_rows = async || records.has_old_rows(&reservation).await.unwrap();
    for deletes in [
        "DELETE FROM runs WHERE operation_kind = 'run'",
        "DELETE FROM threads_meta",
        "DELETE FROM runs WHERE operation_kind <> 'run'",
    ] {
        assert!(has_old_rows().await, "before {deletes}");
        sql(records, deletes).await;
    }
    assert!(!has_old_rows().await);
    create_thread(records, "t").await;
    start(records, "t", "new").await;
    assert!(!has_old_rows().await, "they are newer");
}

/// Neither the commit nor a look at the rows is answered, as if the process had died after the commit.
#[tokio::test]
async fn what_a_deletion_has_left_of_events_is_found_and_goes_with_another() {
    const STATEMENTS: usize = 10;
    for backend in [EventBackend::Memory, EventBackend::Database, EventBackend::Jsonl] {
        let fixture = fixture_with(backend).await;
        let records = &fixture.records;
        full_thread(records, "t").await;
        let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
        records.doubt_commit(1);
        records.fail_from(STATEMENTS + 1);
        let error = records.delete_thread(reservation).await.unwrap_err();
        assert!(matches!(error, RecordsError::InDoubt { .. }), "{backend:?}: {error}");
        records.fail_statement(0);
        until_free(records, "t").await;
        assert!(records.threads().get("t", None).await.unwrap().is_none(), "{backend:?}: it was carried out");
        let (has_remains, left) = if backend == EventBackend::Database { (false, 0) } else { (true, 4) };
        assert_eq!(records.events().has_remains("t").await, has_remains, "{backend:?}");

        let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
        let deleted = records.delete_thread(reservation).await.unwrap();
        assert_eq!(deleted, DeletedThread { thread: false, runs: 0, events: left }, "{backend:?}");
        assert!(!records.events().has_remains("t").await, "{backend:?}");
    }
}

/// The feed is held from before the commit, after which another client may create a thread of the same id at once.
#[tokio::test]
async fn events_of_a_newer_thread_wait_until_those_of_the_deleted_one_are_gone() {
    for backend in [EventBackend::Memory, EventBackend::Jsonl] {
        let fixture = fixture_with(backend).await;
        let records = &fixture.records;
        full_thread(records, "t").await;
        let feed = records.events().hold_to_delete("t").await.unwrap();
        // The row of the thread is a newer one's.
        sql(records, "DELETE FROM runs").await;
        start(records, "t", "new").await;
        let event = NewEvent::new("run.start", "trace", json!(null));
        let mut appending = Box::pin(records.events().append("t", "new", vec![event]));
        assert!(futures::poll!(appending.as_mut()).is_pending(), "{backend:?}");
        assert_eq!(feed.forget("t").await.unwrap(), 4, "{backend:?}");
        assert_eq!(soon(appending).await.unwrap(), [1], "{backend:?}");
        assert_eq!(events(records, "t", "new").await, 1, "{backend:?}");
    }
}

/// The process died between the commit and the removal of the file, and the deletion was not repeated.
#[tokio::test]
async fn a_new_thread_does_not_go_on_with_the_file_that_a_deletion_has_left() {
    let fixture = fixture_with(EventBackend::Jsonl).await;
    let records = &fixture.records;
    full_thread(records, "t").await;
    sql(records, "DELETE FROM runs").await;
    sql(records, "DELETE FROM threads_meta").await;
    assert!(records.events().has_remains("t").await);
    create_thread(records, "t").await;
    assert!(!records.events().has_remains("t").await);
    start(records, "t", "new").await;
    let event = NewEvent::new("run.start", "trace", json!(null));
    assert_eq!(records.events().append("t", "new", vec![event]).await.unwrap(), [1]);

    let again = NewThread { thread_id: "t".to_owned(), ..NewThread::default() };
    assert!(!records.threads().create(again).await.unwrap().created);
    assert_eq!(events(records, "t", "new").await, 1, "a thread that is there keeps its file");
}

/// The answer to the creation was lost, and it is repeated.
#[tokio::test]
async fn a_new_thread_whose_creation_was_in_doubt_does_not_go_on_with_that_file_either() {
    let fixture = fixture_with(EventBackend::Jsonl).await;
    let records = &fixture.records;
    full_thread(records, "t").await;
    sql(records, "DELETE FROM runs").await;
    sql(records, "DELETE FROM threads_meta").await;
    let new = || NewThread { thread_id: "t".to_owned(), ..NewThread::default() };
    records.doubt_commit(1);
    let error = records.threads().create(new()).await.unwrap_err();
    assert!(matches!(error, RecordsError::InDoubt { .. }), "{error}");
    assert!(!records.threads().create(new()).await.unwrap().created);
    assert!(!records.events().has_remains("t").await);
}

/// Another client may create the thread as soon as the deletion has committed.
#[tokio::test]
async fn a_thread_is_created_after_the_file_of_the_deleted_one_is_gone() {
    let fixture = fixture_with(EventBackend::Jsonl).await;
    let records = &fixture.records;
    full_thread(records, "t").await;
    let feed = records.events().hold_to_delete("t").await.unwrap();
    sql(records, "DELETE FROM runs").await;
    sql(records, "DELETE FROM threads_meta").await;
    let mut creating = Box::pin(create_thread(records, "t"));
    let early = tokio::time::timeout(Duration::from_millis(50), &mut creating).await;
    assert!(early.is_err(), "it waits for the file");
    assert_eq!(feed.forget("t").await.unwrap(), 4);
    soon(creating).await;
    assert!(!records.events().has_remains("t").await);
}

/// An append that has found its run holds the feed until the events are in it.
#[tokio::test]
async fn the_deletion_of_a_run_waits_for_an_append_that_has_found_it() {
    for backend in [EventBackend::Memory, EventBackend::Jsonl] {
        let fixture = fixture_with(backend).await;
        let records = &fixture.records;
        full_thread(records, "t").await;
        let append = records.events().hold_to_delete("t").await.unwrap();
        let mut deleting = Box::pin(records.delete_run("t", "t-r0"));
        let early = tokio::time::timeout(Duration::from_millis(50), &mut deleting).await;
        assert!(early.is_err(), "{backend:?}: {early:?}");
        drop(append);
        soon(deleting).await.unwrap();
        assert_eq!(events(records, "t", "t-r0").await, 0, "{backend:?}");
        assert_eq!(events(records, "t", "t-r1").await, 2, "{backend:?}");
    }
}

/// An attempt that was cut off after its commit has deleted the row only.
#[tokio::test]
async fn a_repeated_deletion_of_a_run_removes_the_events_that_were_left() {
    for backend in [EventBackend::Memory, EventBackend::Jsonl] {
        let fixture = fixture_with(backend).await;
        let records = &fixture.records;
        create_thread(records, "t").await;
        let messages = || vec![NewEvent::new("llm.human.input", MESSAGE_CATEGORY, json!({})); 2];
        let seed = SeedRun { run_id: format!("{SEED_PREFIX}t-0"), events: messages() };
        assert!(records.events().seed("t", vec![seed]).await.unwrap());
        for run_id in ["r1", "r2"] {
            start(records, "t", run_id).await;
            records.events().append("t", run_id, messages()).await.unwrap();
            records.runs().finish(run_id, &end(RunStatus::Success)).await.unwrap();
        }
        sql(records, "DELETE FROM runs WHERE run_id = 'r1'").await;
        assert_eq!(events(records, "t", "r1").await, 2, "{backend:?}");
        for (thread_id, run_id) in [("t", "r1"), ("other", "r2"), ("t", "checkpoint-seed-t-0")] {
            let error = records.delete_run(thread_id, run_id).await.unwrap_err();
            assert!(error.is_not_found(), "{backend:?}: {error}");
        }
        assert!(!records.events().has_remains("other").await, "{backend:?}");
        assert_eq!(events(records, "t", "r1").await, 0, "{backend:?}");
        assert_eq!(events(records, "t", "r2").await, 2, "{backend:?}");
        assert_eq!(events(records, "t", "checkpoint-seed-t-0").await, 2, "{backend:?}: it never had a row");
        records.delete_run("t", "r2").await.unwrap();
    }
}

/// A branch shows what its source said under the ids of runs that it never had.
#[tokio::test]
async fn a_deletion_of_a_run_that_a_branch_never_had_leaves_its_events() {
    for backend in [EventBackend::Memory, EventBackend::Database, EventBackend::Jsonl] {
        let fixture = fixture_with(backend).await;
        let records = &fixture.records;
        create_thread(records, "t").await;
        let run_id = "branch-seed-t-0";
        let said = vec![NewEvent::new("llm.human.input", MESSAGE_CATEGORY, json!({})); 2];
        let seed = SeedRun { run_id: run_id.to_owned(), events: said };
        assert!(records.events().seed("t", vec![seed]).await.unwrap());
        let error = records.delete_run("t", run_id).await.unwrap_err();
        assert!(error.is_not_found(), "{backend:?}: {error}");
        assert_eq!(events(records, "t", run_id).await, 2, "{backend:?}");
    }
}

#[tokio::test]
async fn a_run_whose_events_could_not_be_removed_is_deleted_again() {
    let fixture = fixture_with(EventBackend::Jsonl).await;
    let records = &fixture.records;
    full_thread(records, "t").await;
    let file = fixture.place.event_directory().join("t.jsonl");
    let away = file.with_extension("away");
    std::fs::rename(&file, &away).unwrap();
    std::fs::create_dir(&file).unwrap();
    let error = records.delete_run("t", "t-r0").await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    std::fs::remove_dir(&file).unwrap();
    std::fs::rename(&away, &file).unwrap();
    assert!(records.delete_run("t", "t-r0").await.unwrap_err().is_not_found());
    assert_eq!(events(records, "t", "t-r0").await, 0);
    assert_eq!(events(records, "t", "t-r1").await, 2);
}

/// Another client waits for the id of a thread that is being deleted, 100 times.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_thread_created_right_after_a_deletion_keeps_its_events() {
    for backend in [EventBackend::Memory, EventBackend::Database, EventBackend::Jsonl] {
        let fixture = fixture_with(backend).await;
        let records = &fixture.records;
        for _ in 0..100 {
            full_thread(records, "t").await;
            let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
            let next = records.clone();
            let creating = tokio::spawn(async move {
                let new = || NewThread { thread_id: "t".to_owned(), ..NewThread::default() };
                while !next.threads().create(new()).await.unwrap().created {
                    tokio::task::yield_now().await;
                }
                start(&next, "t", "new").await;
                let event = NewEvent::new("run.start", "trace", json!(null));
                next.events().append("t", "new", vec![event]).await
            });
            records.delete_thread(reservation).await.unwrap();
            assert_eq!(creating.await.unwrap().unwrap(), [1], "{backend:?}");
            assert_eq!(events(records, "t", "new").await, 1, "{backend:?}");
            records.runs().finish("new", &end(RunStatus::Success)).await.unwrap();
            let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
            records.delete_thread(reservation).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_a_run_and_a_deletion_exactly_one_wins() {
    let fixture = fixture().await;
    let second = fixture.reopen(EventBackend::Memory).await;
    for round in 0..100 {
        let (thread_id, run_id) = (format!("t{round}"), format!("r{round}"));
        create_thread(&fixture.records, &thread_id).await;
        let barrier = Arc::new(Barrier::new(2));
        let admitting = {
            // Every other round through another process's records.
            let records = if round % 2 == 0 { fixture.records.clone() } else { second.clone() };
            let (run, barrier) = (new_run(&thread_id, &run_id), barrier.clone());
            tokio::spawn(async move {
                barrier.wait().await;
                records.runs().admit(run, MultitaskStrategy::Reject).await
            })
        };
        let deleting = {
            let (records, thread_id) = (fixture.records.clone(), thread_id.clone());
            tokio::spawn(async move {
                barrier.wait().await;
                let reservation = records.runs().reserve(&thread_id, WriterKind::Delete).await?;
                records.delete_thread(reservation).await
            })
        };
        match (admitting.await.unwrap(), deleting.await.unwrap()) {
            (Ok(_), Err(error)) => {
                assert_eq!(error.to_string(), format!("Thread {thread_id} already has an active run"));
                assert_eq!(holder(&fixture.records, &thread_id).await, Some(run_id));
            }
            (Err(error), Ok(deleted)) => {
                assert!(error.is_conflict() || error.is_not_found(), "{error}");
                assert!(deleted.thread);
                assert_eq!(holder(&fixture.records, &thread_id).await, None);
                assert!(fixture.records.threads().get(&thread_id, None).await.unwrap().is_none());
            }
            other => panic!("not exactly one won: {other:?}"),
        }
    }
}

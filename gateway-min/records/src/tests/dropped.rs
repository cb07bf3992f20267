//! Drops every future at every await point: its work is then done completely or not at all.

use chrono::TimeDelta;
use serde_json::json;
use threadkeep_testing::DropAfter;

use super::support::*;
use crate::MultitaskStrategy::{Interrupt, Reject};
use crate::*;

async fn open() -> (Records, TestClock) {
    let clock = TestClock::new();
    (lone(options(&clock, EventBackend::Database)).await, clock)
}

/// Drops `operation` after 0, 1, 2, ... waits until it completes, each time on new records.
async fn dropped_everywhere(
    prepare: impl AsyncFn(&Records),
    operation: impl AsyncFn(&Records) -> Result<(), RecordsError>,
) {
    let (finished, clock) = open().await;
    prepare(&finished).await;
    let before = dump(&finished).await;
    clock.advance_micros(1);
    operation(&finished).await.unwrap();
    let after = dump(&finished).await;
    assert_ne!(before, after);

    // How often it waits depends on how fast the database answers; on a busy machine it occasionally does not wait at
    // all.
    let (mut dropped, mut unwaited) = (0, 0);
    loop {
        let (records, clock) = open().await;
        prepare(&records).await;
        clock.advance_micros(1);
        let outcome = DropAfter::waits(operation(&records), dropped).await;
        let left = dump(&records).await;
        if let Some(result) = outcome {
            result.unwrap();
            assert_eq!(left, after);
            unwaited += 1;
            if dropped > 0 || unwaited == 50 {
                break;
            }
            continue;
        }
        assert!(left == before || left == after, "dropped after {dropped} waits: {left:#?}");
        dropped += 1;
    }
    assert!(dropped > 0, "the operation never waited");
}

async fn thread_and_run(records: &Records) {
    create_thread(records, "t").await;
    start(records, "t", "r").await;
}

#[tokio::test]
async fn thread_changes() {
    dropped_everywhere(
        async |_| {},
        async |records| {
            let new = NewThread { thread_id: "t".to_owned(), ..NewThread::default() };
            records.threads().create(new).await.map(drop)
        },
    )
    .await;
    dropped_everywhere(
        async |records| create_thread(records, "t").await,
        async |records| records.threads().patch_metadata("t", None, object(json!({"a": 1}))).await.map(drop),
    )
    .await;
}

#[tokio::test]
async fn admission_and_takeover() {
    dropped_everywhere(
        async |records| create_thread(records, "t").await,
        async |records| records.runs().admit(new_run("t", "r"), Reject).await.map(drop),
    )
    .await;
    dropped_everywhere(
        async |records| {
            thread_and_run(records).await;
            wait(records, "t", "r2", Interrupt).await;
        },
        async |records| records.runs().admit(new_run("t", "r3"), Interrupt).await.map(drop),
    )
    .await;
}

#[tokio::test]
async fn cancel_and_finish() {
    dropped_everywhere(thread_and_run, async |records| {
        records.runs().request_cancel("r", CancelAction::Rollback).await.map(drop)
    })
    .await;
    dropped_everywhere(
        async |records| {
            thread_and_run(records).await;
            wait(records, "t", "r2", Interrupt).await;
        },
        async |records| records.runs().finish("r", &end(RunStatus::Interrupted)).await.map(drop),
    )
    .await;
}

#[tokio::test]
async fn recovery() {
    dropped_everywhere(thread_and_run, async |records| {
        records.runs().recover_orphans(TestClock::new().now(), TimeDelta::zero()).await.map(drop)
    })
    .await;
}

#[tokio::test]
async fn events() {
    let events = || vec![NewEvent::new("x", "trace", json!(null)); 3];
    dropped_everywhere(thread_and_run, async |records| {
        records.events().append("t", "r", events()).await.map(drop)
    })
    .await;
    dropped_everywhere(thread_and_run, async |records| {
        let runs = vec![SeedRun { run_id: "s".to_owned(), events: events() }];
        records.events().seed("t", runs).await.map(drop)
    })
    .await;
}

#[tokio::test]
async fn a_reservation_whose_future_is_dropped_is_given_back() {
    let (records, _) = open().await;
    // More than once, because the await points vary, and the commit's is the one that matters.
    for _ in 0..20 {
        let mut dropped = 0;
        loop {
            let reserving = Box::pin(records.runs().reserve("t", WriterKind::CheckpointWrite));
            match DropAfter::waits(reserving, dropped).await {
                Some(Ok(reservation)) => break reservation.release().await.unwrap(),
                // An abandoned earlier reservation is only now being created and released.
                Some(Err(error)) => assert!(error.is_conflict(), "{error}"),
                None => dropped += 1,
            }
            // The abandoned reservation is created and released in the background; this one must succeed.
            let next = soon(async {
                loop {
                    match records.runs().reserve("t", WriterKind::CheckpointWrite).await {
                        Err(error) => assert!(error.is_conflict(), "{error}"),
                        Ok(reservation) => break reservation,
                    }
                }
            });
            next.await.release().await.unwrap();
        }
        assert!(dropped > 0);
    }
    soon(async {
        while !dump(&records).await.is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_deletion_whose_future_is_dropped_goes_on() {
    let (records, _) = open().await;
    thread_and_run(&records).await;
    records.runs().finish("r", &end(RunStatus::Success)).await.unwrap();
    let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
    assert!(DropAfter::waits(records.delete_thread(reservation), 0).await.is_none());
    until_free(&records, "t").await;
    assert!(dump(&records).await.is_empty());
}

/// Only of events outside the database can it leave a part.
#[tokio::test]
async fn the_deletion_of_a_run_whose_future_is_dropped_goes_on() {
    for backend in [EventBackend::Memory, EventBackend::Database, EventBackend::Jsonl] {
        let fixture = fixture_with(backend).await;
        let records = &fixture.records;
        create_thread(records, "t").await;
        let mut dropped = 0;
        loop {
            let run_id = format!("r{dropped}");
            start(records, "t", &run_id).await;
            let events = vec![NewEvent::new("x", "trace", json!(null)); 3];
            records.events().append("t", &run_id, events).await.unwrap();
            records.runs().finish(&run_id, &end(RunStatus::Success)).await.unwrap();
            let outcome = DropAfter::waits(records.delete_run("t", &run_id), dropped).await;
            let events = EventQuery::new("t", &run_id);
            soon(async {
                while records.runs().get(&run_id).await.unwrap().is_some()
                    || !records.events().list(&events).await.unwrap().is_empty()
                {
                    tokio::task::yield_now().await;
                }
            })
            .await;
            if let Some(result) = outcome {
                break result.unwrap();
            }
            dropped += 1;
        }
        assert!(dropped > 0, "{backend:?}: it never waited");
    }
}

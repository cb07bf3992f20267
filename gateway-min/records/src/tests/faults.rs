//! Every statement of every write fails once; nothing has changed afterwards.

use chrono::TimeDelta;
use serde_json::json;

use super::support::*;
use crate::MultitaskStrategy::{Enqueue, Interrupt, Reject};
use crate::*;

/// Makes the 1st, 2nd, ... statement of `operation` fail until it succeeds, and checks after each failure that all rows
/// are unchanged. `statements` is their number including the commit, so that the test fails if it stops reaching one.
async fn every_statement_fails_once<T: std::fmt::Debug>(
    records: &Records,
    statements: usize,
    operation: impl AsyncFn() -> Result<T, RecordsError>,
) {
    let before = dump(records).await;
    for k in 1..=statements {
        records.db.fault.arm(k);
        let error = operation().await.unwrap_err();
        assert!(error.to_string().contains("injected fault"), "statement {k}: {error}");
        assert_eq!(dump(records).await, before, "statement {k}");
    }
    records.db.fault.arm(statements + 1);
    operation().await.unwrap();
    assert!(records.db.fault.disarm(), "there are more than {statements} statements");
    assert_ne!(dump(records).await, before);
}

#[tokio::test]
async fn threads() {
    let fixture = fixture().await;
    let threads = fixture.records.threads();
    let new = || NewThread { thread_id: "t".to_owned(), ..NewThread::default() };
    every_statement_fails_once(&fixture.records, 2, async || threads.create(new()).await).await;
    fixture.clock.advance_micros(1);
    let patch = || object(json!({"a": 1}));
    every_statement_fails_once(&fixture.records, 3, async || {
        threads.patch_metadata("t", None, patch()).await
    })
    .await;
    every_statement_fails_once(&fixture.records, 2, async || {
        threads.set_status("t", ThreadStatus::Error).await
    })
    .await;
    every_statement_fails_once(&fixture.records, 2, async || {
        threads.set_display_name("t", None, Some("x")).await.map(|changed| assert!(changed))
    })
    .await;
}

#[tokio::test]
async fn subagents() {
    let fixture = fixture().await;
    let (records, subagents) = (&fixture.records, fixture.records.subagents());
    every_statement_fails_once(records, 2, async || subagents.insert("a", "1").await).await;
    every_statement_fails_once(records, 2, async || subagents.replace("a", "1", "2").await).await;
    every_statement_fails_once(records, 2, async || subagents.remove("a").await).await;
}

#[tokio::test]
async fn a_run_from_admission_to_end() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    let keyed = |run_id: &str| NewRun { idempotency_key: Some(run_id.to_owned()), ..new_run("t", run_id) };
    every_statement_fails_once(records, 2, async || runs.admit(keyed("r1"), Reject).await).await;
    every_statement_fails_once(records, 3, async || runs.start("r1").await).await;
    let totals = RunTotals { message_count: 1, ..RunTotals::default() };
    every_statement_fails_once(records, 2, async || runs.progress("r1", &totals).await).await;
    every_statement_fails_once(records, 3, async || runs.request_cancel("r1", CancelAction::Rollback).await)
        .await;
    every_statement_fails_once(records, 2, async || runs.decide("r1", &settled(RunStatus::Error)).await)
        .await;
    every_statement_fails_once(records, 4, async || runs.finish("r1", &end(RunStatus::Error)).await).await;
}

#[tokio::test]
async fn the_last_events_with_the_decided_end() {
    let fixture = fixture_with(EventBackend::Database).await;
    let records = &fixture.records;
    create_thread(records, "t").await;
    start(records, "t", "r").await;
    let event = |event_type: &str| NewEvent::new(event_type, "trace", json!(null));
    let end = end(RunStatus::Success);
    every_statement_fails_once(records, 3, async || {
        let decided =
            records.conclude_and_decide(("t", "r"), (0, vec![event("a")]), event("run.delivery"), &end).await;
        decided.map(|decided| assert_eq!(decided, DecideOutcome::Decided))
    })
    .await;
    assert_eq!(records.events().list(&EventQuery::new("t", "r")).await.unwrap().len(), 2);
}

/// The statements of an admission that does not get the thread at once: in Postgres the attempt is a transaction of its
/// own.
fn when_taken(records: &Records, statements: usize) -> usize {
    statements + usize::from(records.db.dialect() == crate::query::Dialect::Postgres)
}

#[tokio::test]
async fn a_takeover_with_a_superseded_run() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    start(records, "t", "r1").await;
    let interrupting = async |run_id: &str| runs.admit(new_run("t", run_id), Interrupt).await;
    every_statement_fails_once(records, when_taken(records, 8), async || interrupting("r2").await).await;
    fixture.clock.advance_micros(1);
    every_statement_fails_once(records, when_taken(records, 7), async || interrupting("r3").await).await;
    every_statement_fails_once(records, 4, async || runs.finish("r1", &end(RunStatus::Interrupted)).await)
        .await;
    assert_eq!(holder(records, "t").await.as_deref(), Some("r3"));
}

#[tokio::test]
async fn a_queue() {
    let fixture = fixture().await;
    let (records, runs) = (&fixture.records, fixture.records.runs());
    create_thread(records, "t").await;
    start(records, "t", "r1").await;
    let queueing = async |run_id: &str| runs.admit(new_run("t", run_id), Enqueue).await;
    every_statement_fails_once(records, when_taken(records, 7), async || queueing("r2").await).await;
    every_statement_fails_once(records, when_taken(records, 7), async || queueing("r3").await).await;
    every_statement_fails_once(records, 4, async || runs.finish("r2", &end(RunStatus::Error)).await).await;
    every_statement_fails_once(records, 4, async || runs.finish("r1", &end(RunStatus::Success)).await).await;
    assert_eq!(holder(records, "t").await.as_deref(), Some("r3"));
}

#[tokio::test]
async fn a_reservation() {
    let fixture = fixture().await;
    let runs = fixture.records.runs();
    every_statement_fails_once(&fixture.records, 2, async || {
        // Leaked, because a dropped reservation would be released.
        runs.reserve("t", WriterKind::CheckpointWrite).await.map(std::mem::forget)
    })
    .await;
}

#[tokio::test]
async fn recovery() {
    let fixture = fixture().await;
    let records = &fixture.records;
    for thread_id in ["t1", "t2"] {
        create_thread(records, thread_id).await;
        start(records, thread_id, thread_id).await;
    }
    std::mem::forget(records.runs().reserve("t3", WriterKind::Delete).await.unwrap());
    let now = fixture.clock.now();
    // Two for each of the two runs, one for the writer, four for all, the commit.
    every_statement_fails_once(records, 10, async || {
        records.runs().recover_orphans(now, TimeDelta::zero()).await
    })
    .await;
}

#[tokio::test]
async fn events_in_the_database() {
    let fixture = fixture_with(EventBackend::Database).await;
    let (records, events) = (&fixture.records, fixture.records.events());
    create_thread(records, "t").await;
    admit(records, "t", "r").await;
    let event = |event_type: &str| NewEvent::new(event_type, "trace", json!(null));
    let three = || vec![event("a"), event("b"), event("c")];
    every_statement_fails_once(records, 2, async || events.append("t", "r", three()).await).await;
    every_statement_fails_once(records, 2, async || {
        events.append_if_absent("t", "r", event("run.delivery")).await
    })
    .await;
    let seeds = || {
        let run = |run_id: &str| SeedRun { run_id: run_id.to_owned(), events: vec![event("a"), event("b")] };
        vec![run("s1"), run("s2")]
    };
    every_statement_fails_once(records, 5, async || events.seed("t", seeds()).await).await;
    assert_eq!(events.list(&EventQuery::new("t", "s2")).await.unwrap().last().unwrap().seq, 8);
}

#[tokio::test]
async fn batches() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    let lease = TimeDelta::seconds(30);
    let new_batch = || NewBatch { max_attempts: 1, ..super::batches::batch("b", 3, 3, 3) };
    super::batches::begin_run(records, "t", "r").await;
    // The owner, the time, the batch, the items, and reading both.
    every_statement_fails_once(records, 7, async || batches.submit(new_batch()).await).await;
    // The batch, the promotion, the claim, the batch, the commit.
    let claim = async || batches.claim("b", "a", lease, 3, true).await;
    for k in 1..=5 {
        let before = dump(records).await;
        records.db.fault.arm(k);
        claim().await.unwrap_err();
        assert_eq!(dump(records).await, before, "statement {k}");
    }
    records.db.fault.arm(6);
    let items = claim().await.unwrap().unwrap().items;
    assert!(records.db.fault.disarm(), "there are more than 5 statements");
    // The lock, going on with an execution, opening one, the item, the commit.
    let new = || super::batches::execution(&fixture, &items[0].claim);
    let launch =
        async || batches.launch(&items[0].claim, lease, new()).await.map(|row| assert!(row.is_some()));
    every_statement_fails_once(records, 5, launch).await;
    // The lock, the item, the batch, the commit; with the execution that and its tokens.
    let row = records.executions().of_thread("t").await.unwrap().remove(0);
    let end = ExecutionEnd {
        status: ExecutionStatus::Completed,
        error: None,
        stop_reason: None,
        usage: std::collections::BTreeMap::new(),
    };
    let done = async || {
        let end = (super::batches::succeeded("x"), Some((row.clone(), end.clone())));
        batches.finalize(&items[0].claim, end.0, end.1).await.map(|done| assert!(done))
    };
    every_statement_fails_once(records, 6, done).await;
    let failed = super::batches::failed("x");
    let done =
        async || batches.finalize(&items[1].claim, failed.clone(), None).await.map(|done| assert!(done));
    every_statement_fails_once(records, 5, done).await;
    // Two at once: the lock, an item, an execution that may fail with the other, that item, the batch, the commit.
    let pair = NewBatch { id: "p".into(), submission_key: "p".into(), ..new_batch() };
    batches.submit(pair).await.unwrap();
    let two = batches.claim("p", "a", lease, 2, true).await.unwrap().unwrap().items;
    let together = async || {
        let of = |at: usize, end: ItemEnd| Ended { claim: two[at].claim.clone(), end, execution: None };
        let ended = vec![of(0, super::batches::succeeded("x")), of(1, super::batches::failed("x"))];
        batches.finalize_all("p", ended).await.map(|done| assert_eq!(done, [true, true]))
    };
    every_statement_fails_once(records, 6, together).await;
    let retry = async || batches.retry("b", &items[1].claim.item_id).await;
    every_statement_fails_once(records, 4, retry).await;
    every_statement_fails_once(records, 5, async || batches.cancel("b").await).await;
    // Leases that have expired: the batch, the items that fail, their executions, the others, the batch twice, the commit.
    batches.submit(NewBatch { id: "c".into(), submission_key: "c".into(), ..new_batch() }).await.unwrap();
    batches.claim("c", "a", lease, 3, true).await.unwrap().unwrap();
    fixture.pass_seconds(40).await;
    every_statement_fails_once(records, 7, async || batches.claim("c", "b", lease, 0, true).await).await;
}

/// A failed deletion releases the thread, so everything but that must be unchanged.
#[tokio::test]
async fn a_deletion() {
    for (backend, statements) in [(EventBackend::Database, 10), (EventBackend::Memory, 10)] {
        let fixture = fixture_with(backend).await;
        let records = &fixture.records;
        create_thread(records, "t").await;
        start(records, "t", "r").await;
        let message = NewEvent::new("llm.ai.response", MESSAGE_CATEGORY, json!({}));
        records.events().append("t", "r", vec![message]).await.unwrap();
        records.runs().finish("r", &end(RunStatus::Success)).await.unwrap();
        let before = dump(records).await;
        for k in 1..=statements {
            let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
            records.db.fault.arm(k);
            let error = records.delete_thread(reservation).await.unwrap_err();
            assert!(error.to_string().contains("injected fault"), "statement {k}: {error}");
            until_free(records, "t").await;
            assert_eq!(dump(records).await, before, "statement {k}");
            assert_eq!(records.events().count_messages("t").await.unwrap(), 1);
        }
        let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
        records.db.fault.arm(statements + 1);
        records.delete_thread(reservation).await.unwrap();
        assert!(records.db.fault.disarm(), "there are more than {statements} statements");
        assert!(dump(records).await.is_empty());
        assert_eq!(records.events().count_messages("t").await.unwrap(), 0);
    }
}

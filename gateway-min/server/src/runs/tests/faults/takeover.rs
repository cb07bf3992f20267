//! Rollbacks that are taken over from a process that is gone, and cannot be carried out at once, or at all.

use std::time::Duration;

use serde_json::json;
use threadkeep::id::ThreadId;
use threadkeep::state::Update;
use threadkeep_records::{CancelAction, MultitaskStrategy, NewRun, RunRow, RunStatus, RunTotals};

use super::super::{Gateway, everywhere};
use super::{faulty, goes_on, said};

/// A run that has written a message and is to be rolled back, whose process is gone.
async fn left(gateway: &Gateway) -> RunRow {
    let runs = gateway.app.records.runs();
    let run = NewRun { run_id: "gone".into(), thread_id: "t".into(), ..NewRun::default() };
    runs.admit(run, MultitaskStrategy::Reject).await.unwrap();
    runs.start("gone").await.unwrap();
    runs.progress("gone", &RunTotals { total_tokens: 7, ..RunTotals::default() }).await.unwrap();
    let accessor = gateway.app.threads.accessor();
    let message = json!([{"type": "human", "content": "more", "id": "more"}]);
    let extra = json!({"run_id": "gone"}).as_object().unwrap().clone();
    let writes = vec![accessor.write("messages", message, false).unwrap()];
    let update = Update { at: None, node: "model".into(), writes, extra };
    accessor.update(&ThreadId::from("t"), update).await.unwrap();
    runs.request_cancel("gone", CancelAction::Rollback).await.unwrap();
    runs.get("gone").await.unwrap().unwrap()
}

/// Takes the run over, and waits for its end.
async fn rolled_back(gateway: &Gateway, row: RunRow) -> RunRow {
    gateway.app.runs.roll_back(vec![row]);
    let ended = gateway.row("gone");
    tokio::time::timeout(Duration::from_mins(10), ended).await.expect("it holds its thread for ever")
}

#[tokio::test]
async fn a_rollback_that_cannot_be_carried_out_ends_its_run_and_frees_its_thread() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        let before = gateway.head().await.unwrap();
        let row = left(&gateway).await;
        faults.damage(before.key.id);
        let row = rolled_back(&gateway, row).await;
        faults.disarm();
        assert_eq!((row.status, row.totals.total_tokens), (RunStatus::Error, 7), "{on:?}");
        let error = row.error.unwrap();
        assert!(
            error.starts_with("Run gone could not be rolled back, and what it committed is kept: "),
            "{error}"
        );
        assert!(error.ends_with("corrupt data: a checkpoint: injected fault"), "{error}");
        assert_eq!(said(&gateway.head().await.unwrap()), ["first", "You said: first", "more"], "{on:?}");
        goes_on(&gateway).await;
    }
}

#[tokio::test]
async fn a_rollback_waits_for_a_store_that_is_unavailable() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        let row = left(&gateway).await;
        faults.away(3);
        let row = rolled_back(&gateway, row).await;
        assert!(!faults.disarm(), "{on:?}");
        assert_eq!(row.error.as_deref(), Some("Rolled back by user"), "{on:?}");
        assert_eq!(said(&gateway.head().await.unwrap()), ["first", "You said: first"], "{on:?}");
        goes_on(&gateway).await;
    }
}

#[tokio::test]
async fn a_rollback_that_a_stopping_process_has_not_carried_out_is_left_to_the_next() {
    let (gateway, faults) = faulty(("sqlite", "delta"), "none").await;
    let row = left(&gateway).await;
    faults.away(usize::MAX);
    gateway.app.runs.roll_back(vec![row]);
    tokio::time::timeout(Duration::from_mins(10), gateway.app.stop_runs()).await.expect("it stops");
    faults.disarm();
    let row = gateway.app.records.runs().get("gone").await.unwrap().unwrap();
    assert_eq!((row.status, row.cancel_action), (RunStatus::Running, Some(CancelAction::Rollback)));
}

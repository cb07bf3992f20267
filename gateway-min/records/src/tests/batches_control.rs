//! Batches that people pause, resume, cancel, or have tried again.

use std::collections::BTreeMap;

use super::batches::{LEASE, batch, claim, execution, failed, items, status, statuses, submit, succeeded};
use super::support::*;
use crate::BatchItemStatus::{Cancelled, Failed, Pending, Succeeded};
use crate::*;

#[tokio::test]
async fn s55_a_paused_batch_starts_nothing_and_ends_what_runs() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, batch("b", 2, 2, 1)).await;
    let item = claim(records, "b", "a", 1).await.remove(0);
    assert_eq!(batches.pause("b").await.unwrap().unwrap().status, BatchStatus::Paused);
    let new = execution(&fixture, &item.claim);
    assert!(batches.launch(&item.claim, LEASE, new).await.unwrap().is_some());
    assert!(batches.finalize(&item.claim, succeeded("x"), None).await.unwrap());
    assert_eq!(status(records, "b").await, BatchStatus::Paused, "an end does not resume it");
    assert!(claim(records, "b", "b", 1).await.is_empty());
    assert!(batches.claimable().await.unwrap().is_empty());
    assert_eq!(batches.resume("b").await.unwrap().unwrap().status, BatchStatus::Queued);
    let last = claim(records, "b", "c", 1).await.remove(0);
    batches.pause("b").await.unwrap();
    assert!(batches.finalize(&last.claim, succeeded("x"), None).await.unwrap());
    assert_eq!(status(records, "b").await, BatchStatus::Completed, "the last item ends a paused batch");
    for changed in [batches.pause("b").await, batches.resume("b").await, batches.cancel("b").await] {
        assert_eq!(changed.unwrap().unwrap().status, BatchStatus::Completed);
    }
    assert_eq!(batches.pause("none").await.unwrap(), None);
}

/// A lease that expires in a paused batch is noticed, and ends the batch if it was the last attempt of the last item.
#[tokio::test]
async fn an_expired_lease_of_a_paused_batch_is_recovered() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, NewBatch { max_attempts: 1, ..batch("b", 1, 1, 1) }).await;
    claim(records, "b", "a", 1).await;
    batches.pause("b").await.unwrap();
    fixture.pass_seconds(40).await;
    assert_eq!(batches.claimable().await.unwrap(), ["b"]);
    claim(records, "b", "b", 0).await;
    assert_eq!(
        (statuses(records, "b").await, status(records, "b").await),
        (vec![Failed], BatchStatus::Failed)
    );
}

#[tokio::test]
async fn s57_only_failed_items_of_batches_that_are_not_cancelled_are_tried_again() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, NewBatch { max_attempts: 1, ..batch("b", 3, 3, 3) }).await;
    let claimed = claim(records, "b", "a", 3).await;
    let new = execution(&fixture, &claimed[0].claim);
    let opened = batches.launch(&claimed[0].claim, LEASE, new).await.unwrap().unwrap();
    let end = ExecutionEnd {
        status: ExecutionStatus::Failed,
        error: Some("no".into()),
        stop_reason: None,
        usage: BTreeMap::new(),
    };
    assert!(batches.finalize(&claimed[0].claim, failed("no"), Some((opened, end))).await.unwrap());
    assert!(batches.finalize(&claimed[1].claim, succeeded("yes"), None).await.unwrap());
    let rows = items(records, "b").await;
    for refused in [&rows[1].id, &rows[2].id, "none"] {
        assert_eq!(batches.retry("b", refused).await.unwrap(), RetryOutcome::Refused);
    }
    fixture.clock.advance_seconds(1);
    let RetryOutcome::Retried(row) = batches.retry("b", &rows[0].id).await.unwrap() else {
        panic!("refused")
    };
    let fresh = BatchItemRow {
        status: Pending,
        attempt: 0,
        model_name: None,
        error: None,
        stop_reason: None,
        started_at: None,
        completed_at: None,
        updated_at: row.updated_at,
        ..rows[0].clone()
    };
    assert_eq!(*row, fresh, "as if it were new");
    assert_eq!(status(records, "b").await, BatchStatus::Running, "another item is at work");
    // A new attempt is a new execution.
    let again = claim(records, "b", "b", 3).await.remove(0).claim;
    let new = execution(&fixture, &again);
    let opened = batches.launch(&again, LEASE, new).await.unwrap().unwrap();
    assert_eq!((opened.attempt, opened.status), (2, ExecutionStatus::Running));
    assert!(opened.child_thread.ends_with(":2"), "a thread of its own");
    batches.pause("b").await.unwrap();
    assert!(batches.finalize(&again, failed("no"), None).await.unwrap());
    let retried = batches.retry("b", &rows[0].id).await.unwrap();
    assert!(matches!(retried, RetryOutcome::Retried(_)));
    assert_eq!(status(records, "b").await, BatchStatus::Paused, "it stays paused");
    batches.resume("b").await.unwrap();
    let again = claim(records, "b", "c", 3).await.remove(0).claim;
    assert!(batches.finalize(&again, failed("no"), None).await.unwrap());
    assert!(batches.finalize(&claimed[2].claim, failed("no"), None).await.unwrap());
    assert_eq!(status(records, "b").await, BatchStatus::Completed);
    batches.retry("b", &rows[0].id).await.unwrap();
    let row = batches.get("b").await.unwrap().unwrap();
    assert_eq!((row.status, row.completed_at), (BatchStatus::Queued, None));
    batches.cancel("b").await.unwrap();
    assert_eq!(batches.retry("b", &rows[2].id).await.unwrap(), RetryOutcome::Refused, "it is cancelled");
}

#[tokio::test]
async fn cancelling_ends_items_and_executions_at_once() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, batch("b", 3, 3, 2)).await;
    let claimed = claim(records, "b", "a", 2).await;
    let new = execution(&fixture, &claimed[0].claim);
    let opened = batches.launch(&claimed[0].claim, LEASE, new).await.unwrap().unwrap();
    assert!(batches.finalize(&claimed[1].claim, succeeded("yes"), None).await.unwrap());
    let row = batches.cancel("b").await.unwrap().unwrap();
    assert_eq!((row.status, row.completed_at.is_some()), (BatchStatus::Cancelled, true));
    assert_eq!(statuses(records, "b").await, [Cancelled, Succeeded, Cancelled]);
    assert_eq!(items(records, "b").await[0].error.as_deref(), Some(ITEM_CANCELLED));
    let ended = records.executions().of_thread("t").await.unwrap().remove(0);
    assert_eq!((ended.status, ended.error.as_deref()), (ExecutionStatus::Cancelled, Some(ITEM_CANCELLED)));
    // What it had used is added once.
    let tokens = |total_tokens| ExecutionTokens { total_tokens, ..ExecutionTokens::default() };
    records.batches().used("b", &opened, &BTreeMap::from([("m".into(), tokens(7))])).await.unwrap();
    records.batches().used("b", &opened, &BTreeMap::from([("m".into(), tokens(9))])).await.unwrap();
    assert_eq!(records.executions().of_thread("t").await.unwrap()[0].tokens(), Some(tokens(7)));
}

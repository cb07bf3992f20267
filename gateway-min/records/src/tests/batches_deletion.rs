//! Batches whose run has ended or whose thread is deleted.

use std::collections::BTreeMap;

use chrono::TimeDelta;

use super::batches::{LEASE, batch, begin_run, claim, execution, items, submit, succeeded};
use super::support::*;
use crate::*;

/// Ends the run of [`batch`], so that its thread can be deleted.
async fn end_run(records: &Records) {
    records.runs().finish("r", &end(RunStatus::Success)).await.unwrap();
}

/// A process stood still before it submitted a batch: its run was ended, and its thread deleted. Nobody could reach
/// the batch then but the next user who takes the thread's id.
#[tokio::test]
async fn a_batch_of_a_run_that_has_ended_is_not_stored() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    let before = submit(records, batch("before", 1, 1, 1)).await.batch;
    let late = async || {
        let error = batches.submit(batch("late", 2, 2, 2)).await.unwrap_err();
        assert!(matches!(error, RecordsError::RunEnded { .. }), "{error}");
        assert_eq!(
            error.to_string(),
            "Run r has ended or was deleted, so nothing was stored for it; start another run"
        );
        assert_eq!(batches.get("late").await.unwrap(), None);
    };
    records.runs().recover_orphans(fixture.clock.now(), TimeDelta::zero()).await.unwrap();
    late().await;
    // The run that goes on with the call finds what was stored before.
    begin_run(records, "t", "r2").await;
    let again = NewBatch { run_id: "r2".into(), ..batch("again", 1, 1, 1) };
    let again = NewBatch { submission_key: "before".into(), ..again };
    let again = batches.submit(again).await.unwrap();
    assert_eq!((again.is_new, again.batch.id), (false, before.id));
    records.runs().finish("r2", &end(RunStatus::Success)).await.unwrap();
    let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
    records.delete_thread(reservation).await.unwrap();
    late().await;
    // Another user's.
    begin_run(records, "t", "r3").await;
    late().await;
    // A run of another thread.
    begin_run(records, "u", "r4").await;
    let foreign = NewBatch { run_id: "r4".into(), ..batch("late", 2, 2, 2) };
    let error = batches.submit(foreign).await.unwrap_err();
    assert!(matches!(error, RecordsError::RunEnded { .. }), "{error}");
}

#[tokio::test]
async fn a_large_batch_is_deleted_with_its_thread_and_its_workers_notice() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    let others = NewBatch { thread_id: "kept".into(), run_id: "of kept".into(), ..batch("kept", 2, 2, 2) };
    submit(records, others).await;
    submit(records, batch("b", 5000, 100, 10)).await;
    let claimed = claim(records, "b", "a", 10).await;
    end_run(records).await;
    let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
    records.delete_thread(reservation).await.unwrap();
    assert!(batches.held(claimed.iter().map(|item| item.claim.clone()).collect()).await.unwrap().is_empty());
    for item in claimed {
        let new = execution(&fixture, &item.claim);
        assert!(batches.launch(&item.claim, LEASE, new).await.unwrap().is_none());
        assert!(!batches.finalize(&item.claim, succeeded("x"), None).await.unwrap());
        assert!(!batches.exists(&item.claim.item_id).await.unwrap());
    }
    assert_eq!(batches.get("b").await.unwrap(), None);
    assert!(records.executions().of_thread("t").await.unwrap().is_empty());
    assert_eq!(batches.claimable().await.unwrap(), ["kept"]);
    assert_eq!(items(records, "kept").await.len(), 2);
}

/// Of a deleted thread's items those are noted that may have been at work: their processes may still write.
#[tokio::test]
async fn items_that_may_be_at_work_are_noted_when_their_thread_is_deleted() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, batch("b", 4, 4, 4)).await;
    end_run(records).await;
    let claimed = claim(records, "b", "a", 3).await;
    let mut launched = Vec::new();
    for item in &claimed[..2] {
        let row =
            batches.launch(&item.claim, LEASE, execution(&fixture, &item.claim)).await.unwrap().unwrap();
        launched.push(row);
    }
    let end = ExecutionEnd {
        status: ExecutionStatus::Completed,
        error: None,
        stop_reason: None,
        usage: BTreeMap::new(),
    };
    let ended = Some((launched[1].clone(), end));
    assert!(batches.finalize(&claimed[1].claim, succeeded("x"), ended).await.unwrap());
    assert!(batches.remains(TimeDelta::zero()).await.unwrap().is_empty());
    let reservation = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
    records.delete_thread(reservation).await.unwrap();
    let left = &launched[0].child_thread;
    assert_eq!(batches.remains(TimeDelta::zero()).await.unwrap(), std::slice::from_ref(left));
    assert!(batches.remains(TimeDelta::hours(1)).await.unwrap().is_empty(), "it was deleted a moment ago");
    batches.forget_remains(left).await.unwrap();
    assert!(batches.remains(TimeDelta::zero()).await.unwrap().is_empty());
}

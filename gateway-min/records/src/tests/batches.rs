use std::collections::BTreeMap;

use chrono::TimeDelta;
use serde_json::json;

use super::support::*;
use crate::BatchItemStatus::{Cancelled, Failed, Leased, Pending, Queued, Running, Succeeded};
use crate::*;

const LEASE: TimeDelta = TimeDelta::seconds(35);

pub(super) fn batch(id: &str, items: usize, live: u32, running: u32) -> NewBatch {
    NewBatch {
        id: id.to_owned(),
        thread_id: "t".to_owned(),
        run_id: "r".to_owned(),
        tool_call_id: "call_0".to_owned(),
        submission_key: id.to_owned(),
        title: "Files".to_owned(),
        subagent_type: "bash".to_owned(),
        max_live_items: live,
        max_running_items: running,
        max_attempts: 2,
        execution_spec: object(json!({"secret": 1})),
        items: (0..items).map(|n| item(&format!("k{n}"))).collect(),
    }
}

/// Submits a batch for a run that is at work.
pub(super) async fn submit(records: &Records, new: NewBatch) -> SubmittedBatch {
    begin_run(records, &new.thread_id, &new.run_id).await;
    records.batches().submit(new).await.unwrap()
}

/// Creates a thread and starts a run, unless that exists.
pub(super) async fn begin_run(records: &Records, thread_id: &str, run_id: &str) {
    let new = NewThread { thread_id: thread_id.to_owned(), ..NewThread::default() };
    records.threads().create(new).await.unwrap();
    if records.runs().get(run_id).await.unwrap().is_none() {
        start(records, thread_id, run_id).await;
    }
}

/// Ends the run of [`batch`], so that its thread can be deleted.
async fn end_run(records: &Records) {
    records.runs().finish("r", &end(RunStatus::Success)).await.unwrap();
}

fn item(key: &str) -> NewBatchItem {
    NewBatchItem { key: key.to_owned(), prompt: format!("do {key}"), acceptance_criteria: None }
}

pub(super) fn succeeded(result: &str) -> ItemEnd {
    let result = ItemResult::Succeeded {
        result: result.to_owned(),
        preview: result.chars().take(2).collect(),
        truncated: false,
        verdict: Some(json!({"all_hold": true})),
    };
    let tokens = ExecutionTokens { input_tokens: 1, output_tokens: 2, total_tokens: 3 };
    ItemEnd { result, model_name: Some("m".into()), stop_reason: None, token_usage: Some(tokens) }
}

pub(super) fn failed(error: &str) -> ItemEnd {
    let result = ItemResult::Failed { error: error.to_owned() };
    ItemEnd {
        result,
        model_name: Some("m".into()),
        stop_reason: Some("turn_capped".into()),
        token_usage: None,
    }
}

async fn claim(records: &Records, batch: &str, owner: &str, most: usize) -> Vec<ClaimedItem> {
    records.batches().claim(batch, owner, LEASE, most, true).await.unwrap().unwrap().items
}

async fn status(records: &Records, batch: &str) -> BatchStatus {
    records.batches().get(batch).await.unwrap().unwrap().status
}

async fn items(records: &Records, batch: &str) -> Vec<BatchItemRow> {
    records.batches().items(batch, None, 0, 10_000).await.unwrap()
}

async fn counts(records: &Records, batch: &str) -> ItemCounts {
    records.batches().counts(&[batch.to_owned()]).await.unwrap().remove(batch).unwrap_or_default()
}

async fn statuses(records: &Records, batch: &str) -> Vec<BatchItemStatus> {
    items(records, batch).await.into_iter().map(|item| item.status).collect()
}

pub(super) fn execution(fixture: &Fixture, claim: &Claim) -> Launch {
    let execution = NewExecution {
        execution_id: claim.item_id.clone(),
        thread_id: "t".to_owned(),
        run_id: "r".to_owned(),
        delegating: Delegating::Item,
        parent_execution: None,
        kind: ExecutionKind::BatchItem,
        tool_call_id: "call_0".to_owned(),
        agent_name: "bash".to_owned(),
        definition: object(json!({"name": "bash"})),
        definition_digest: "d".to_owned(),
        description: "look".to_owned(),
        deadline: fixture.clock.now() + TimeDelta::seconds(5),
    };
    Launch { execution, model: "m".to_owned(), waited_ms: 3 }
}

#[tokio::test]
async fn a_batch_of_5000_is_submitted_with_a_few_statements_and_once() {
    let fixture = fixture().await;
    let records = &fixture.records;
    begin_run(records, "t", "r").await;
    let before = records.commits().statements();
    let submitted = records.batches().submit(batch("b", 5000, 100, 3)).await.unwrap();
    assert!(submitted.is_new);
    assert_eq!((submitted.batch.status, submitted.batch.total_items), (BatchStatus::Queued, 5000));
    assert_eq!(submitted.counts.of(Pending), 5000);
    let statements = records.commits().statements() - before;
    assert!(statements <= 20, "{statements} statements");
    // The same key again, with other items: the first one, as it is by now.
    claim(records, "b", "a", 1).await;
    let again = NewBatch { id: "other".into(), ..batch("b", 2, 1, 1) };
    let again = submit(records, again).await;
    assert!(!again.is_new);
    assert_eq!((again.batch.id.as_str(), again.batch.total_items), ("b", 5000));
    assert_eq!((again.counts.of(Leased), again.counts.of(Queued)), (1, 99));
    assert_eq!(again.counts.of(Pending), 4900);
    let refused = records.batches().submit(batch("c", 0, 1, 1)).await.unwrap_err();
    assert!(matches!(refused, RecordsError::Invalid { .. }), "{refused}");
}

#[tokio::test]
async fn s50_windows_limit_what_is_live_and_what_is_at_work() {
    let fixture = fixture().await;
    let records = &fixture.records;
    submit(records, batch("b", 4, 2, 1)).await;
    let claimed = records.batches().claim("b", "a", LEASE, 9, true).await.unwrap().unwrap();
    assert_eq!(claimed.batch.status, BatchStatus::Running);
    assert_eq!(claimed.items.iter().map(|item| item.item_key.as_str()).collect::<Vec<_>>(), ["k0"]);
    let counts = counts(records, "b").await;
    assert_eq!((counts.of(Pending), counts.of(Queued), counts.of(Leased)), (2, 1, 1));
    assert!(claim(records, "b", "b", 9).await.is_empty(), "one at work is the most");
    assert!(records.batches().claimable().await.unwrap().is_empty());
}

#[tokio::test]
async fn s51_an_expired_lease_is_claimed_again_and_fails_after_the_last_attempt() {
    let fixture = fixture().await;
    let records = &fixture.records;
    submit(records, batch("b", 1, 1, 1)).await;
    let first = claim(records, "b", "a", 1).await.remove(0);
    let new = execution(&fixture, &first.claim);
    let opened = records.batches().launch(&first.claim, LEASE, new).await.unwrap().unwrap();
    let row = records.executions().of_thread("t").await.unwrap().remove(0);
    assert_eq!((row.status, row.waited_ms), (ExecutionStatus::Running, Some(3)));
    assert!(records.batches().claimable().await.unwrap().is_empty());
    fixture.pass_seconds(40).await;
    assert_eq!(records.batches().claimable().await.unwrap(), ["b"]);
    let second = claim(records, "b", "b", 1).await.remove(0);
    assert_eq!((&second.claim.item_id, second.claim.attempt), (&first.claim.item_id, 2));
    // It goes on with the same execution, on the same thread, and has its whole time again.
    let new = execution(&fixture, &second.claim);
    let next = records.batches().launch(&second.claim, LEASE, new).await.unwrap().unwrap();
    assert_eq!((next.attempt, &next.child_thread), (1, &opened.child_thread));
    assert_eq!(next.deadline, fixture.clock.now() + TimeDelta::seconds(5));
    fixture.pass_seconds(40).await;
    assert!(claim(records, "b", "c", 1).await.is_empty());
    let item = items(records, "b").await.remove(0);
    assert_eq!((item.status, item.error.as_deref()), (Failed, Some(LEASE_EXPIRED_LAST)));
    assert_eq!(status(records, "b").await, BatchStatus::Failed, "the batch ends as well");
    let row = records.executions().of_thread("t").await.unwrap().remove(0);
    assert_eq!((row.status, row.delivered), (ExecutionStatus::Failed, true));
}

/// Leases of a process that is known to be gone end at once, those of others do not.
#[tokio::test]
async fn s62_leases_of_a_process_that_is_gone_are_ended() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, batch("b", 3, 3, 3)).await;
    let (gone, alike) = (worker_name("p"), worker_name("pp"));
    let first = claim(records, "b", &format!("{gone}:7"), 1).await.remove(0);
    let other = claim(records, "b", &format!("{alike}:7"), 1).await.remove(0);
    batches.end_leases(Some(&worker_name("q"))).await.unwrap();
    assert!(batches.renew(&first.claim, LEASE).await.unwrap());
    batches.end_leases(Some(&gone)).await.unwrap();
    assert!(!batches.renew(&first.claim, LEASE).await.unwrap(), "its lease is over");
    let again = claim(records, "b", "next:1", 1).await.remove(0);
    assert_eq!((&again.claim.item_id, again.claim.attempt), (&first.claim.item_id, 2));
    batches.end_leases(None).await.unwrap();
    for claim in [&other.claim, &again.claim] {
        assert!(!batches.renew(claim, LEASE).await.unwrap());
    }
}

#[tokio::test]
async fn s52_nothing_late_counts() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, batch("b", 2, 2, 2)).await;
    let mut late = claim(records, "b", "a", 2).await;
    let (late, cancelled) = (late.remove(0).claim, late.remove(0).claim);
    // Also before anybody else has it.
    let launched = batches.launch(&late, LEASE, execution(&fixture, &late)).await.unwrap().unwrap();
    fixture.pass_seconds(40).await;
    let refused = async |claim: &Claim, ended: (Option<String>, bool)| {
        assert!(!batches.renew(claim, LEASE).await.unwrap());
        assert!(!batches.release(claim).await.unwrap());
        let end = ExecutionEnd {
            status: ExecutionStatus::Completed,
            error: None,
            stop_reason: None,
            usage: BTreeMap::new(),
        };
        assert!(!batches.finalize(claim, succeeded("late"), Some((launched.clone(), end))).await.unwrap());
        assert!(!batches.finalize(claim, failed("late"), None).await.unwrap());
        let row = records.executions().of_thread("t").await.unwrap().remove(0);
        assert_eq!(
            (row.error, row.completed_at.is_some()),
            ended,
            "an end that does not count ends no execution"
        );
        assert!(batches.launch(claim, LEASE, execution(&fixture, claim)).await.unwrap().is_none());
        assert!(batches.held(vec![claim.clone()]).await.unwrap().is_empty());
    };
    refused(&late, (None, false)).await;
    let taken = claim(records, "b", "b", 1).await.remove(0).claim;
    refused(&late, (None, false)).await;
    // A claim with the same attempt and another name is another claim.
    refused(&Claim { owner: "a".into(), ..taken.clone() }, (None, false)).await;
    assert_eq!(batches.held(vec![taken.clone(), late]).await.unwrap(), std::slice::from_ref(&taken));
    batches.cancel("b").await.unwrap();
    let cancellation = || (Some(ITEM_CANCELLED.to_owned()), true);
    refused(&taken, cancellation()).await;
    refused(&cancelled, cancellation()).await;
    assert_eq!(statuses(records, "b").await, [Cancelled, Cancelled]);
    assert!(items(records, "b").await.iter().all(|item| item.result_preview.is_none()));
}

#[tokio::test]
async fn s53_failures_are_tried_again_and_the_items_decide_how_the_batch_ends() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    for (ends, expected) in [
        (["no", "no"], BatchStatus::Failed),
        (["no", "yes"], BatchStatus::Completed),
        (["yes", "yes"], BatchStatus::Completed),
    ] {
        let id = format!("b-{}", ends.join("-"));
        submit(records, batch(&id, 2, 2, 2)).await;
        for attempt in 1..=2 {
            for item in claim(records, &id, &format!("a{attempt}"), 2).await {
                assert_eq!(item.claim.attempt, attempt);
                let position = usize::try_from(item.position).unwrap();
                let end = if ends[position] == "yes" { succeeded("done") } else { failed("no") };
                assert!(batches.finalize(&item.claim, end, None).await.unwrap());
                let row = items(records, &id).await.remove(position);
                if ends[position] == "no" && attempt == 1 {
                    assert_eq!(
                        (row.status, row.error.as_deref(), row.started_at),
                        (Queued, Some("no"), None)
                    );
                }
            }
        }
        let row = batches.get(&id).await.unwrap().unwrap();
        assert_eq!((row.status, row.completed_at.is_some()), (expected, true), "{ends:?}");
    }
}

/// An attempt that failed because a store did not answer: the next one goes on with its execution, and after the last one
/// that fails, too.
#[tokio::test]
async fn an_execution_that_did_not_end_goes_on_with_the_next_attempt() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, batch("b", 1, 1, 1)).await;
    for (attempt, expected) in [(1, ExecutionStatus::Running), (2, ExecutionStatus::Failed)] {
        let claim = claim(records, "b", &format!("a{attempt}"), 1).await.remove(0).claim;
        let new = execution(&fixture, &claim);
        let opened = batches.launch(&claim, LEASE, new).await.unwrap().unwrap();
        assert_eq!((claim.attempt, opened.attempt), (attempt, 1));
        assert!(batches.finalize(&claim, failed("away"), None).await.unwrap());
        let row = records.executions().of_thread("t").await.unwrap().remove(0);
        assert_eq!((row.status, row.delivered), (expected, attempt == 2));
    }
    assert_eq!(status(records, "b").await, BatchStatus::Failed);
}

/// Attempts that end in one transaction: each counts if its own claim holds, and the last ones end the batch.
#[tokio::test]
async fn s52_of_ends_that_are_written_together_each_counts_by_its_own_claim() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, NewBatch { max_attempts: 1, ..batch("b", 3, 3, 3) }).await;
    let claimed = claim(records, "b", "a", 3).await;
    let row = batches
        .launch(&claimed[0].claim, LEASE, execution(&fixture, &claimed[0].claim))
        .await
        .unwrap()
        .unwrap();
    let end = ExecutionEnd {
        status: ExecutionStatus::Completed,
        error: None,
        stop_reason: None,
        usage: BTreeMap::new(),
    };
    let of = |claim: &Claim, end: ItemEnd| Ended { claim: claim.clone(), end, execution: None };
    let stranger = Claim { owner: "b".into(), ..claimed[1].claim.clone() };
    let ended = vec![
        of(&stranger, succeeded("not its own")),
        Ended { execution: Some((row, end)), ..of(&claimed[0].claim, succeeded("one")) },
        of(&claimed[2].claim, failed("no")),
    ];
    assert_eq!(batches.finalize_all("b", ended.clone()).await.unwrap(), [false, true, true]);
    assert_eq!(statuses(records, "b").await, [Succeeded, Leased, Failed]);
    assert_eq!(status(records, "b").await, BatchStatus::Running);
    let execution = records.executions().of_thread("t").await.unwrap().remove(0);
    assert_eq!((execution.status, execution.delivered), (ExecutionStatus::Completed, true));
    assert_eq!(batches.finalize_all("b", ended).await.unwrap(), [false; 3], "once");
    let last = vec![of(&claimed[1].claim, succeeded("two"))];
    assert_eq!(batches.finalize_all("b", last).await.unwrap(), [true]);
    assert_eq!(status(records, "b").await, BatchStatus::Completed);
}

#[tokio::test]
async fn s54_a_released_item_has_its_attempt_back() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, batch("b", 1, 1, 1)).await;
    for name in ["a", "b", "c"] {
        let item = claim(records, "b", name, 1).await.remove(0);
        assert_eq!(item.claim.attempt, 1);
        assert!(batches.release(&item.claim).await.unwrap());
        let row = items(records, "b").await.remove(0);
        assert_eq!((row.status, row.attempt, row.started_at), (Queued, 0, None));
        assert!(
            !batches.finalize(&item.claim, succeeded("x"), None).await.unwrap(),
            "it is not its own any more"
        );
    }
}

/// The answer to a claim was lost: nobody knows which items it got, and nobody works on them.
#[tokio::test]
async fn what_a_claim_without_an_answer_got_is_given_back_with_its_attempts() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    create_thread(records, "t").await;
    start(records, "t", "r").await;
    batches.submit(batch("b", 4, 4, 4)).await.unwrap();
    let known = claim(records, "b", "known", 2).await;
    let launch = execution(&fixture, &known[0].claim);
    assert!(batches.launch(&known[0].claim, LEASE, launch).await.unwrap().is_some());
    for happens in [true, false] {
        if happens {
            records.doubt_commit(1);
        } else {
            records.lose_commit(1);
        }
        let claimed = batches.claim("b", "lost", LEASE, 1, true).await;
        assert!(matches!(claimed, Err(RecordsError::InDoubt { .. })), "{claimed:?}");
        let expected = if happens { Leased } else { Queued };
        assert_eq!(statuses(records, "b").await, [Running, Leased, expected, Queued]);
        // Again, as after an answer that was lost.
        for _ in 0..2 {
            batches.release_unanswered("b", "lost").await.unwrap();
        }
        let rows = items(records, "b").await;
        assert_eq!(statuses(records, "b").await, [Running, Leased, Queued, Queued]);
        assert_eq!(rows.iter().map(|row| row.attempt).collect::<Vec<_>>(), [1, 1, 0, 0]);
        assert_eq!(rows[2].started_at, None);
    }
    assert_eq!(claim(records, "b", "next", 1).await[0].claim.attempt, 1);
}

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

/// A result may be as long as a model's answer: pages are cut by their bytes, and are complete.
#[tokio::test]
async fn a_page_of_results_has_a_few_megabytes_however_long_they_are() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, batch("b", 8, 8, 8)).await;
    // In bytes; a character of the texts has three.
    let lengths = [1_500_000, 1_500_000, 1_500_000, 0, 6_000_000, 3];
    for (claimed, length) in claim(records, "b", "a", 6).await.iter().zip(lengths) {
        let result = "\u{20ac}".repeat(length / 3);
        assert!(batches.finalize(&claimed.claim, succeeded(&result), None).await.unwrap());
    }
    let (mut pages, mut after) = (Vec::new(), None);
    loop {
        let page = batches.results("b", after, 500).await.unwrap();
        let Some((last, _)) = page.last() else { break };
        after = Some(last.position);
        pages.push(page.iter().map(|(_, result)| result.as_ref().map(String::len)).collect::<Vec<_>>());
    }
    let mega = Some(1_500_000);
    assert_eq!(
        pages,
        [vec![mega, mega], vec![mega, Some(0)], vec![Some(6_000_000)], vec![Some(3), None, None]]
    );
}

/// Workers go on while somebody reads: an item that leaves the selection takes no other one out of the next page.
#[tokio::test]
async fn a_page_of_items_skips_none_when_others_change_their_status() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, batch("b", 6, 6, 6)).await;
    claim(records, "b", "a", 1).await;
    let first = batches.items_after("b", Some(Queued), None, 2).await.unwrap();
    assert_eq!(first.iter().map(|item| item.position).collect::<Vec<_>>(), [1, 2]);
    claim(records, "b", "a", 2).await;
    let second = batches.items_after("b", Some(Queued), Some(2), 2).await.unwrap();
    assert_eq!(second.iter().map(|item| item.position).collect::<Vec<_>>(), [3, 4]);
    assert_eq!(batches.items_after("b", None, Some(3), 500).await.unwrap().len(), 2);
    assert_eq!(batches.items_after("b", None, Some(5), 500).await.unwrap(), []);
}

#[tokio::test]
async fn s58_results_are_in_the_export_alone_and_pages_are_complete() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, batch("b", 1200, 1200, 1000)).await;
    let first = claim(records, "b", "a", 1).await.remove(0);
    assert!(batches.finalize(&first.claim, succeeded("long result"), None).await.unwrap());
    let item = items(records, "b").await.remove(0);
    assert_eq!(item.result_preview.as_deref(), Some("lo"));
    assert_eq!(item.token_usage.unwrap().total_tokens, 3);
    let mut positions = Vec::new();
    let mut after = None;
    loop {
        let page = batches.results("b", after, 500).await.unwrap();
        let Some((last, _)) = page.last() else { break };
        after = Some(last.position);
        if positions.is_empty() {
            assert_eq!(page[0].1.as_deref(), Some("long result"));
        }
        positions.extend(page.iter().map(|(item, _)| item.position));
    }
    assert_eq!(positions, (0..1200).collect::<Vec<_>>());
    let mut pages = Vec::new();
    for offset in [0, 500, 1000, 1500] {
        pages.extend(
            batches.items("b", None, offset, 500).await.unwrap().into_iter().map(|item| item.position),
        );
    }
    assert_eq!(pages, positions);
    assert_eq!(batches.items("b", Some(Succeeded), 0, 500).await.unwrap().len(), 1);
    assert_eq!(batches.items("b", Some(Running), 0, 500).await.unwrap().len(), 0);
    let newest = NewBatch { submission_key: "other".into(), ..batch("c", 1, 1, 1) };
    submit(records, newest).await;
    assert_eq!(batches.of_thread("t", 20).await.unwrap().len(), 2);
    assert_eq!(batches.of_thread("t", 1).await.unwrap().len(), 1);
    assert_eq!(batches.of_thread("other", 20).await.unwrap().len(), 0);
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

/// Several processes claim at once: each item once, and none is left while there is room.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn claims_of_several_processes_never_overlap() {
    let fixture = fixture().await;
    submit(&fixture.records, batch("b", 60, 60, 50)).await;
    let mut workers = Vec::new();
    for worker in 0..5 {
        let records = fixture.reopen(EventBackend::Memory).await;
        workers.push(tokio::spawn(async move {
            let mut claimed = Vec::new();
            for n in 0..5 {
                let owner = format!("w{worker}:{n}");
                let batches = records.batches();
                let some = batches.claim("b", &owner, LEASE, 3, n % 2 == 0).await.unwrap();
                claimed.extend(some.into_iter().flat_map(|some| some.items).map(|item| item.position));
            }
            claimed
        }));
    }
    let mut all = Vec::new();
    for worker in workers {
        all.extend(worker.await.unwrap());
    }
    all.sort_unstable();
    let claimed = all.len();
    all.dedup();
    assert_eq!(all.len(), claimed, "an item was claimed twice");
    let rest = claim(&fixture.records, "b", "last", 99).await.len();
    assert_eq!(claimed + rest, 50, "as many as may run");
}

/// The last two items end at the same time: one of them ends the batch.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_last_items_end_the_batch_also_if_they_end_together() {
    let fixture = fixture().await;
    for round in 0..10 {
        let id = format!("b{round}");
        submit(&fixture.records, batch(&id, 8, 8, 8)).await;
        let mut ends = Vec::new();
        for item in claim(&fixture.records, &id, "a", 8).await {
            let records = fixture.records.clone();
            ends.push(tokio::spawn(async move {
                records.batches().finalize(&item.claim, succeeded("x"), None).await.unwrap()
            }));
        }
        for end in ends {
            assert!(soon(end).await.unwrap());
        }
        assert_eq!(status(&fixture.records, &id).await, BatchStatus::Completed);
    }
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

/// A subagent that is given up leaves tokens, and the attempt that goes on with it replaces them by all of its own.
#[tokio::test]
async fn the_tokens_of_a_batch_are_those_of_its_executions_each_once() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, batch("b", 2, 2, 2)).await;
    let sum = async || batches.tokens("b").await.unwrap();
    assert_eq!(sum().await, ExecutionTokens::default());
    let tokens = |n: u64| ExecutionTokens { input_tokens: n, output_tokens: 1, total_tokens: n + 1 };
    let usage = |n: u64| BTreeMap::from([("m".to_owned(), tokens(n)), ("o\0\u{fffd}".to_owned(), tokens(n))]);
    let end = |status, n| ExecutionEnd { status, error: None, stop_reason: None, usage: usage(n) };
    let launched = async |claim: &Claim| {
        batches.launch(claim, LEASE, execution(&fixture, claim)).await.unwrap().unwrap()
    };
    let first = claim(records, "b", "a", 1).await.remove(0).claim;
    let row = launched(&first).await;
    let so_far = async |claim: &Claim, n| {
        let used = UsedSoFar { claim: claim.clone(), row: row.clone(), usage: usage(n) };
        batches.used_so_far("b", vec![used]).await.unwrap()
    };
    assert_eq!(so_far(&first, 5).await.input_tokens, 10, "that of the batch");
    so_far(&first, 10).await;
    batches.used("b", &row, &usage(99)).await.unwrap();
    assert_eq!((sum().await.input_tokens, sum().await.output_tokens, sum().await.total_tokens), (20, 2, 22));
    // The claim that goes on with the same execution.
    assert!(batches.release(&first).await.unwrap());
    let second = claim(records, "b", "c", 1).await.remove(0).claim;
    let row = launched(&second).await;
    assert_eq!(so_far(&first, 70).await.input_tokens, 20, "the claim does not hold");
    let failing = Some((row.clone(), end(ExecutionStatus::Failed, 30)));
    assert!(!batches.finalize(&first, failed("late"), failing.clone()).await.unwrap());
    assert_eq!(sum().await.input_tokens, 20, "the claim does not hold");
    assert!(batches.finalize(&second, failed("e"), failing.clone()).await.unwrap());
    assert_eq!(sum().await.input_tokens, 60);
    assert!(!batches.finalize(&second, failed("e"), failing).await.unwrap(), "once");
    // Another attempt, and another item.
    for claimed in claim(records, "b", "d", 2).await {
        let row = launched(&claimed.claim).await;
        let ending = Some((row, end(ExecutionStatus::Completed, 1)));
        assert!(batches.finalize(&claimed.claim, succeeded("ok"), ending).await.unwrap());
    }
    assert_eq!((sum().await.input_tokens, sum().await.total_tokens), (64, 70));
    batches.used("b", &row, &usage(99)).await.unwrap();
    assert_eq!(sum().await.input_tokens, 64, "what ended with its tokens is counted");
    let of_thread = batches.usage("t").await.unwrap();
    assert_eq!(
        of_thread.values().map(|tokens| tokens.total_tokens).sum::<u64>(),
        70,
        "as its executions say"
    );
    assert_eq!(batches.tokens("unknown").await.unwrap(), ExecutionTokens::default());
}

/// An attempt that somebody else ended is found until it is counted, and counted once.
#[tokio::test]
async fn attempts_that_others_ended_are_found_until_they_are_counted() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, batch("b", 3, 3, 3)).await;
    let found = async |seconds| {
        let found = batches.uncounted(TimeDelta::seconds(seconds)).await.unwrap();
        found.into_iter().map(|item| (item.batch_id, item.row.child_thread)).collect::<Vec<_>>()
    };
    let mut rows = Vec::new();
    let claimed = claim(records, "b", "a", 3).await;
    for item in &claimed {
        let launch = execution(&fixture, &item.claim);
        rows.push(batches.launch(&item.claim, LEASE, launch).await.unwrap().unwrap());
    }
    // One ends with its tokens, and the others with the batch.
    let tokens = ExecutionTokens { input_tokens: 1, output_tokens: 2, total_tokens: 3 };
    let usage = BTreeMap::from([("m".to_owned(), tokens)]);
    let end = ExecutionEnd {
        status: ExecutionStatus::Completed,
        error: None,
        stop_reason: None,
        usage: usage.clone(),
    };
    let ending = Some((rows[0].clone(), end));
    assert!(batches.finalize(&claimed[0].claim, succeeded("ok"), ending).await.unwrap());
    assert_eq!(found(0).await, [], "nothing that is at work");
    batches.cancel("b").await.unwrap();
    assert_eq!(found(3600).await, [], "not yet");
    let mut expected: Vec<_> =
        rows[1..].iter().map(|row| ("b".to_owned(), row.child_thread.clone())).collect();
    expected.sort();
    let mut uncounted = found(0).await;
    uncounted.sort();
    assert_eq!(uncounted, expected);
    for n in [1, 2] {
        batches.used("b", &rows[1], &usage).await.unwrap();
        assert_eq!(batches.tokens("b").await.unwrap().total_tokens, 6, "{n}");
    }
    // Without tokens it is counted, too.
    batches.used("b", &rows[2], &BTreeMap::new()).await.unwrap();
    assert_eq!(found(0).await, []);
    assert_eq!(batches.tokens("b").await.unwrap().total_tokens, 6);
}

use std::collections::BTreeMap;

use chrono::TimeDelta;
use serde_json::json;

use super::support::*;
use crate::BatchItemStatus::{Cancelled, Failed, Leased, Pending, Queued, Running, Succeeded};
use crate::*;

pub(super) const LEASE: TimeDelta = TimeDelta::seconds(35);

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
        budget_id: None,
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

pub(super) async fn claim(records: &Records, batch: &str, owner: &str, most: usize) -> Vec<ClaimedItem> {
    records.batches().claim(batch, owner, LEASE, most, true).await.unwrap().unwrap().items
}

pub(super) async fn status(records: &Records, batch: &str) -> BatchStatus {
    records.batches().get(batch).await.unwrap().unwrap().status
}

pub(super) async fn items(records: &Records, batch: &str) -> Vec<BatchItemRow> {
    records.batches().items(batch, None, 0, 10_000).await.unwrap()
}

async fn counts(records: &Records, batch: &str) -> ItemCounts {
    records.batches().counts(&[batch.to_owned()]).await.unwrap().remove(batch).unwrap_or_default()
}

pub(super) async fn statuses(records: &Records, batch: &str) -> Vec<BatchItemStatus> {
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

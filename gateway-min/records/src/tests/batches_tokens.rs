//! The tokens of batches: those of each attempt are counted once.

use std::collections::BTreeMap;

use chrono::TimeDelta;

use super::batches::{LEASE, batch, begin_run, claim, execution, failed, submit, succeeded};
use super::support::*;
use crate::*;

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
        batches.used_so_far("b", vec![used]).await.unwrap().batches
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

/// Batches with one limit and the runs of their turn; a deletion leaves nothing of that.
#[tokio::test]
async fn batches_with_one_limit_and_their_run_know_what_all_have_used() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    let tokens = |n: u64| ExecutionTokens { input_tokens: n, output_tokens: 0, total_tokens: n };
    let shared = |id: &str| NewBatch { budget_id: Some("t:a".into()), ..batch(id, 1, 1, 1) };
    let (run, other) = (("t", "r"), ("t", "another"));
    begin_run(records, "t", "r").await;
    assert_eq!(batches.budget("t:a", run, None).await.unwrap(), None, "no batch has it");
    for new in [shared("b"), shared("c"), batch("own", 1, 1, 1)] {
        submit(records, new).await;
    }
    let used = async |id: &str, n: u64| {
        let claim = claim(records, id, id, 1).await.remove(0).claim;
        let row = batches.launch(&claim, LEASE, execution(&fixture, &claim)).await.unwrap().unwrap();
        let usage = BTreeMap::from([("m".to_owned(), tokens(n))]);
        let found = batches.used_so_far(id, vec![UsedSoFar { claim, row, usage }]).await.unwrap();
        (found.run.total_tokens, found.batches.total_tokens)
    };
    assert_eq!(used("b", 5).await, (0, 5));
    let stored = batches.budget("t:a", run, Some(tokens(12))).await.unwrap();
    assert_eq!(stored, Some(BudgetTokens { run: tokens(12), batches: tokens(5) }));
    assert_eq!(used("c", 30).await, (12, 35));
    assert_eq!(used("own", 100).await, (0, 100));
    // A run that goes on from an earlier checkpoint gives nothing back.
    let stored = batches.budget("t:a", run, Some(tokens(7))).await.unwrap().unwrap();
    assert_eq!((stored.run, stored.batches), (tokens(12), tokens(35)));
    // One that is not active stores nothing, and reads.
    let stored = batches.budget("t:a", other, Some(tokens(900))).await.unwrap().unwrap();
    assert_eq!((stored.run, stored.batches), (tokens(12), tokens(35)));
    let reopened = fixture.reopen(EventBackend::Database).await;
    assert_eq!(reopened.batches().budget("t:a", run, None).await.unwrap(), Some(stored));
    records.runs().finish("r", &end(RunStatus::Success)).await.unwrap();
    let deletion = records.runs().reserve("t", WriterKind::Delete).await.unwrap();
    records.delete_thread(deletion).await.unwrap();
    // A newer thread with the id begins without it.
    submit(records, NewBatch { run_id: "r2".into(), ..shared("d") }).await;
    let found = batches.budget("t:a", ("t", "r2"), None).await.unwrap();
    assert_eq!(found, Some(BudgetTokens::default()));
}

/// An attempt that somebody else ended is found until it is counted, and counted once.
#[tokio::test]
async fn attempts_that_others_ended_are_found_until_they_are_counted() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, batch("b", 3, 3, 3)).await;
    let found = async |seconds| {
        let found = batches.uncounted(TimeDelta::seconds(seconds), 0).await.unwrap().into_iter().flatten();
        found.map(|item| (item.batch_id, item.row.child_thread)).collect::<Vec<_>>()
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

#[tokio::test]
async fn a_damaged_attempt_hides_no_other_one_that_is_not_counted() {
    let fixture = fixture().await;
    let (records, batches) = (&fixture.records, fixture.records.batches());
    submit(records, batch("b", 2, 2, 2)).await;
    let mut items = Vec::new();
    for item in claim(records, "b", "a", 2).await {
        batches.launch(&item.claim, LEASE, execution(&fixture, &item.claim)).await.unwrap().unwrap();
        items.push(item.claim.item_id);
    }
    batches.cancel("b").await.unwrap();
    let damage = "UPDATE executions SET usage_json = 'damaged' \
                  WHERE execution_id = (SELECT MIN(execution_id) FROM executions)";
    sql(records, damage).await;
    items.sort();
    let found = async |skipped| batches.uncounted(TimeDelta::zero(), skipped).await.unwrap();
    let ids = |found: Vec<Result<UncountedItem, RecordsError>>| -> Vec<_> {
        found.into_iter().flatten().map(|item| item.row.execution_id).collect()
    };
    assert_eq!(ids(found(0).await), items[1..]);
    assert!(matches!(&found(0).await[..], [Err(RecordsError::Corrupt { .. }), Ok(_)]));
    assert_eq!(ids(found(1).await), items[1..], "after the damaged one");
    assert!(found(2).await.is_empty());
}

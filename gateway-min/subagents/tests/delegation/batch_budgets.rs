//! The token budget of a run binds the batches that it submits, whichever processes work on them or die.

use std::time::Duration;

use serde_json::{Value as Json, json};
use threadkeep_agent::model::scripted::gate;
use threadkeep_records::{BatchItemStatus, BatchStatus};

use crate::batches::{
    SECTIONS, WORKER, batch, ended, gate_name, items_call, rows, submitted, two_turns, worker,
};
use crate::guards::{SUMMARIES, summarized};
use crate::support::{House, lead};

/// Tokens of the limit that the run leaves to its batch.
pub(crate) const LEFT: u64 = 988;
/// The section with the limit.
pub(crate) const LIMITED: &str = "token_budget: {enabled: true, max_tokens: 1000}";

/// An answer of this many tokens that calls a tool, as no other one does.
pub(crate) fn turn(number: usize, tokens: u64) -> Json {
    json!({"text": format!("{number}."), "tool_calls": [{"name": "glob", "args": {"pattern": number.to_string()}}],
           "usage": {"input_tokens": tokens - 1, "output_tokens": 1}})
}

/// What all attempts at items have used, as the records say.
pub(crate) async fn used(house: &House) -> u64 {
    let tokens = house.executions().await.into_iter().filter_map(|row| row.tokens());
    tokens.map(|tokens| tokens.total_tokens).sum()
}

/// What the row of the batch says of that.
pub(crate) async fn sum(house: &House) -> u64 {
    let id = batch(house).await.id;
    house.delegator.records.batches().tokens(&id).await.unwrap().total_tokens
}

/// The sum cannot be read or changed when the work on an item goes on: that is tried again, also for longer, and what the
/// item has is not begun a second time.
#[tokio::test]
async fn a_failed_read_of_the_sum_throws_no_work_away() {
    for failures in [1, 5] {
        let name = gate_name("sum");
        let house = submitted(&["a"], two_turns(&name), LIMITED).await;
        let first = worker(&house).await;
        gate(&name).reached().await;
        first.stop().await;
        let next = house.restarted();
        next.delegator.records.fail_with("SELECT id, input_tokens", failures);
        gate(&name).open();
        let second = worker(&next).await;
        assert_eq!(ended(&next).await.status, BatchStatus::Completed, "{failures}");
        second.stop().await;
        assert_eq!(next.delegator.records.left_to_fail(), 0, "{failures}");
        let row = rows(&next).await.remove(0);
        assert_eq!((row.status, row.attempt), (BatchItemStatus::Succeeded, 1), "{failures}");
        // The first answer was stored, and is not asked for again.
        assert_eq!(next.requests(WORKER).len(), 3, "{failures}");
        assert_eq!((next.executions().await.len(), sum(&next).await), (1, 13), "{failures}");
    }
}

/// What the summaries of an item's conversation cost is in the sum of its batch.
#[tokio::test]
async fn the_summaries_of_an_items_conversation_are_in_the_sum_of_its_batch() {
    let script = lead(&[items_call(&["a"])], summarized("It searched.", 900));
    let house = House::new(script, &format!("{SECTIONS}\n{LIMITED}\n{SUMMARIES}")).await;
    let worker = worker(&house).await;
    house.ask("go").await;
    assert_eq!(ended(&house).await.status, BatchStatus::Completed);
    worker.stop().await;
    let total = house.requests(WORKER).len() as u64 * 6 + 910;
    assert_eq!((sum(&house).await, used(&house).await), (total, total));
    let tokens = rows(&house).await[0].token_usage.unwrap();
    assert_eq!(tokens.total_tokens, total);
}

/// Three items have used 600 tokens when their process stops: the next one knows that, although it goes on with them one
/// after the other.
#[tokio::test]
async fn a_restart_gives_no_budget_of_a_batch_back() {
    let name = gate_name("budget");
    let mut answers: Vec<Json> = (0..4).map(|number| turn(number, 200)).collect();
    answers[1]["gate"] = json!({"name": name});
    let sections = format!("{LIMITED}\nsubagent_runtime: {{max_running: 3}}");
    let house = submitted(&["a", "b", "c"], json!(answers), &sections).await;
    let first = worker(&house).await;
    let all_wait = async {
        while house.requests(WORKER).len() < 6 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), all_wait)
        .await
        .expect("three items wait at their second answers");
    first.stop().await;
    house.reconfigure("max_running: 3", "max_running: 1");
    let next = house.restarted();
    gate(&name).open();
    let second = worker(&next).await;
    ended(&next).await;
    second.stop().await;
    let used = used(&next).await;
    assert!((LEFT..LEFT + 200).contains(&used), "{used} tokens");
    assert_eq!(sum(&next).await, used);
}

/// Two processes with an item each: after each answer, both know what the other one has used.
#[tokio::test]
async fn processes_that_work_on_one_batch_share_its_budget() {
    let answers: Vec<Json> = (0..40).map(|number| turn(number, 50)).collect();
    let sections =
        format!("{LIMITED}\nsubagent_runtime: {{max_running: 1}}\nloop_detection: {{enabled: false}}");
    let house = submitted(&["a", "b"], json!(answers), &sections).await;
    let other = house.restarted();
    let (first, second) = (worker(&house).await, worker(&other).await);
    ended(&house).await;
    first.stop().await;
    second.stop().await;
    let used = used(&house).await;
    // The calls under way when the limit is reached.
    assert!((LEFT..LEFT + 2 * 50).contains(&used), "{used} tokens");
    assert_eq!(sum(&house).await, used);
}

/// A process stops while its item is at work, and the batch is cancelled before another one goes on with it: what the
/// attempt used is read from its checkpoints, once.
#[tokio::test]
async fn the_tokens_of_an_attempt_that_nobody_ends_are_added_once() {
    let name = gate_name("uncounted");
    let house = submitted(&["a"], two_turns(&name), "").await;
    let first = worker(&house).await;
    gate(&name).reached().await;
    first.stop().await;
    let id = batch(&house).await.id;
    house.delegator.records.batches().cancel(&id).await.unwrap();
    assert_eq!(sum(&house).await, 0);
    let next = house.restarted();
    let second = worker(&next).await;
    until_counted(&next).await;
    second.stop().await;
    assert_eq!((sum(&next).await, used(&next).await), (6, 6));
}

/// Waits until a worker has counted what ended without it.
pub(crate) async fn until_counted(house: &House) {
    let counted = async {
        while !house.executions().await.iter().all(|row| row.counted) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), counted).await.expect("nobody counted it");
}

//! The token budget of a run binds the batches that it submits, whichever processes work on them or die.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value as Json, json};
use threadkeep_agent::model::message;
use threadkeep_agent::model::scripted::gate;
use threadkeep_agent::tools::ToolSource;
use threadkeep_agent::{Ended, Input, Next};
use threadkeep_records::{BatchItemStatus, BatchStatus};
use tokio_util::sync::CancellationToken;

use crate::batches::{
    Held, SECTIONS, WORKER, batch, ended, ended_elsewhere, gate_name, items_call, rows, submitted,
    submitted_by, submitted_with, two_turns, worker,
};
use crate::guards::{SUMMARIES, summarized};
use crate::support::{House, Seen, THREAD, lead, subagent};

/// Tokens of the limit that the run, with its answer after the submission, leaves to its batches.
pub(crate) const LEFT: u64 = 965;
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
        next.delegator.records.fail_with("AS run_input_tokens", failures);
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

/// An item is not at its model while another process uses the limit up: it does not ask it then.
#[tokio::test]
async fn an_item_asks_no_model_once_others_have_used_the_limit_up() {
    let answers: Vec<Json> = (0..40).map(|number| turn(number, 100)).collect();
    let settings = SECTIONS.replace("lease_seconds: 10", "lease_seconds: 10, max_attempts: 1");
    let sections = format!(
        "{settings}\n{LIMITED}\nsubagent_runtime: {{max_running: 1}}\nloop_detection: {{enabled: false}}"
    );
    let house = submitted_with(&["a", "b"], json!(answers), &sections).await;
    let source = Arc::<Held>::default();
    let slow = house.restarted().with_source(Arc::clone(&source) as Arc<dyn ToolSource>);
    let waiting = worker(&slow).await;
    source.reached.notified().await;
    let first = worker(&house).await;
    let other_ended = async {
        while !rows(&house).await.iter().any(|row| row.status == BatchItemStatus::Succeeded) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), other_ended).await.expect("the other item never ended");
    let asked = house.requests(WORKER).len();
    source.open.notify_one();
    ended(&house).await;
    first.stop().await;
    waiting.stop().await;
    assert_eq!(house.requests(WORKER).len(), asked);
    assert!(rows(&house).await.iter().any(|row| row.stop_reason.as_deref() == Some("token_capped")));
}

/// Waits until all batches have ended.
async fn all_ended(house: &House) {
    let ended = async {
        loop {
            let batches = house.delegator.records.batches().of_thread(THREAD, 10).await.unwrap();
            if batches.iter().all(|batch| batch.status.is_terminal()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), ended).await.expect("a batch never ended");
}

/// Two batches of a run have the one limit of the run, not one each, and what the run used after their submission counts.
#[tokio::test]
async fn all_batches_of_a_run_end_within_its_one_limit() {
    let answers: Vec<Json> = (0..40).map(|number| turn(number, 50)).collect();
    let sections = format!(
        "{SECTIONS}\n{LIMITED}\nsubagent_runtime: {{max_running: 1}}\nloop_detection: {{enabled: false}}"
    );
    let calls = [items_call(&["a"]), items_call(&["b"])];
    let house = submitted_by(&calls, json!(answers), &sections).await;
    let worker = worker(&house).await;
    all_ended(&house).await;
    worker.stop().await;
    let used = used(&house).await;
    assert!((LEFT..LEFT + 50).contains(&used), "{used} tokens");
}

/// The gate at which the item of [`lead_beside_its_batch`] waits.
fn item_gate(name: &str) -> String {
    format!("{name}-item")
}

/// A lead that submits an item that will use up the limit, and waits at a gate in its next answer.
async fn lead_beside_its_batch(name: &str) -> House {
    let mut answers: Vec<Json> = (0..40).map(|number| turn(number, 50)).collect();
    answers[0]["gate"] = json!({"name": item_gate(name)});
    let mut script = lead(&[items_call(&["a"])], vec![subagent(json!(answers))]);
    let mut waits = turn(0, 12);
    waits["gate"] = json!({"name": name});
    script["rules"][0]["answers"][1] = waits;
    script["rules"][0]["answers"].as_array_mut().unwrap().push(json!({"text": "Done."}));
    House::new(script, &format!("{SECTIONS}\n{LIMITED}\nloop_detection: {{enabled: false}}")).await
}

/// What its batch uses counts for the run: it makes no further call.
#[tokio::test]
async fn a_run_ends_within_what_its_batches_leave_of_its_limit() {
    let name = gate_name("beside");
    let house = lead_beside_its_batch(&name).await;
    let worker = worker(&house).await;
    let mut seen = Seen::default();
    let (done, ()) = tokio::join!(house.run("r1", Some("go"), &mut seen), async {
        gate(&name).reached().await;
        gate(&item_gate(&name)).open();
        ended(&house).await;
        gate(&name).open();
    });
    worker.stop().await;
    let Ended::Done { stop_reason, .. } = done.unwrap() else { panic!("it ends by itself") };
    assert_eq!((stop_reason.as_deref(), house.requests("lead_agent").len()), (Some("token_capped"), 2));
}

/// The same for a run that goes on with the turn after its process has died.
#[tokio::test]
async fn a_run_that_goes_on_knows_what_its_batches_have_used() {
    let name = gate_name("goes-on");
    let house = lead_beside_its_batch(&name).await;
    let worker = worker(&house).await;
    let mut seen = Seen::default();
    let batch_ended = async {
        gate(&name).reached().await;
        gate(&item_gate(&name)).open();
        ended(&house).await;
    };
    tokio::select! {
        done = house.run("r1", Some("go"), &mut seen) => panic!("{done:?}"),
        () = batch_ended => {}
    }
    worker.stop().await;
    gate(&name).open();
    let next = house.restarted();
    let done = next.run("r2", None, &mut Seen::default()).await.unwrap();
    let Ended::Done { stop_reason, .. } = done else { panic!("{done:?}") };
    assert_eq!((stop_reason.as_deref(), next.requests("lead_agent").len()), (Some("token_capped"), 2));
}

/// A run that goes on with the call of an earlier one: its batch gets what that one has left of the limit.
#[tokio::test]
async fn a_batch_that_a_later_run_submits_gets_what_is_left_of_the_limit() {
    let name = gate_name("submits-late-limited");
    let mut script = lead(&[items_call(&["a"])], vec![subagent(json!([{"text": "done"}]))]);
    script["rules"][0]["answers"][0]["gate"] = json!({"name": name});
    let house = House::new(script, &format!("{SECTIONS}\n{LIMITED}")).await;
    let worker = worker(&house).await;
    ended_elsewhere(&house, &name).await;
    house.run("r2", None, &mut Seen::default()).await.unwrap();
    worker.stop().await;
    assert_eq!(batch(&house).await.execution_spec["budget"]["used"]["total_tokens"], 12);
}

/// A client adds a question, and the run goes on with the calls of the answer before it: their batches have one limit
/// all the same, and the run with them.
#[tokio::test]
async fn batches_whose_turn_has_no_answer_yet_share_a_limit() {
    let name = gate_name("question-since");
    let items = subagent(json!([{"text": "done", "usage": {"input_tokens": 5, "output_tokens": 1}}]));
    let mut script = lead(&[items_call(&["a"]), items_call(&["b"])], vec![items]);
    script["rules"][0]["when"]["contains"] = json!(["go"]);
    script["rules"][0]["answers"][0]["gate"] = json!({"name": name});
    let last = json!({"text": "Both.", "usage": {"input_tokens": 20, "output_tokens": 3}});
    let rule = json!({"when": {"caller": "lead_agent"}, "answers": [last]});
    script["rules"].as_array_mut().unwrap().push(rule);
    let house = House::new(script, &format!("{SECTIONS}\n{LIMITED}")).await;
    let worker = worker(&house).await;
    ended_elsewhere(&house, &name).await;
    let question = Map::from_iter([("messages".to_owned(), json!([message::human("Also this")]))]);
    let input = Input { next: Next::Stay, ..Input::from(question) };
    house.run_from("r2", Some(input), &mut Seen::default(), CancellationToken::new()).await.unwrap();
    all_ended(&house).await;
    worker.stop().await;
    let batches = house.delegator.records.batches();
    assert_eq!(batches.of_thread(THREAD, 10).await.unwrap().len(), 2);
    let messages = house.messages().await;
    let answer = messages.iter().find(|message| message["type"] == "ai").unwrap()["id"].as_str().unwrap();
    let found = batches.budget(&format!("{THREAD}:{answer}"), (THREAD, "r2"), None).await.unwrap().unwrap();
    assert_eq!((found.run.total_tokens, found.batches.total_tokens), (23, 12));
    // A run that goes on with the turn finds it by the results.
    let results = house.results().await;
    let named = results.iter().map(|result| &result["additional_kwargs"]["subagent_first_answer"]);
    assert_eq!(named.collect::<Vec<_>>(), [answer, answer]);
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

//! Batches: submitted by a lead agent, worked on by the workers of one process or several.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use threadkeep::id::ThreadId;
use threadkeep_agent::model::scripted::gate;
use threadkeep_agent::tools::{Tool, ToolSource};
use threadkeep_agent::{Added, AgentError, Observer, ObserverError};
use threadkeep_config::Config;
use threadkeep_records::{
    BatchItemRow, BatchItemStatus, BatchRow, BatchStatus, ExecutionKind, ExecutionStatus, NewThread, RunEnd,
    WriterKind,
};
use threadkeep_subagents::batches::{AttemptEnd, BatchWorker};
use threadkeep_subagents::delete_checkpoints;
use tokio::sync::Notify;

use crate::support::{House, Seen, THREAD, lead, subagent};

pub(crate) const SECTIONS: &str =
    "subagent_batches: {enabled: true, poll_interval_seconds: 0.1, lease_seconds: 10}";
/// The first attempt is the last.
const LAST_ATTEMPT: &str =
    "subagent_batches: {enabled: true, poll_interval_seconds: 0.1, lease_seconds: 10, max_attempts: 1}";
pub(crate) const WORKER: &str = "subagent:general-purpose";

fn call(items: Json) -> Json {
    json!({"name": "batch_task", "args": {"title": "Files", "items": items, "subagent_type": "general-purpose",
        "max_running_items": 3}})
}

fn items(keys: &[&str]) -> Json {
    keys.iter().map(|key| json!({"key": key, "prompt": format!("do {key}")})).collect()
}

/// A call that submits these items.
pub(crate) fn items_call(keys: &[&str]) -> Json {
    call(items(keys))
}

pub(crate) async fn worker(house: &House) -> BatchWorker {
    BatchWorker::start(&house.delegator, house.accessor.clone()).await.unwrap().unwrap()
}

pub(crate) async fn batch(house: &House) -> BatchRow {
    house.delegator.records.batches().of_thread(THREAD, 1).await.unwrap().remove(0)
}

pub(crate) async fn rows(house: &House) -> Vec<BatchItemRow> {
    let batch = batch(house).await;
    house.delegator.records.batches().items(&batch.id, None, 0, 10_000).await.unwrap()
}

/// Waits until the batch has ended.
pub(crate) async fn ended(house: &House) -> BatchRow {
    let ended = async {
        loop {
            let batch = batch(house).await;
            if batch.status.is_terminal() {
                return batch;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), ended).await.expect("the batch never ended")
}

/// A house whose lead submits these items; the batch is submitted, and nobody works on it.
pub(crate) async fn submitted(keys: &[&str], answers: Json, sections: &str) -> House {
    submitted_with(keys, answers, &format!("{SECTIONS}\n{sections}")).await
}

/// The same with these sections alone.
pub(crate) async fn submitted_with(keys: &[&str], answers: Json, sections: &str) -> House {
    submitted_by(&[items_call(keys)], answers, sections).await
}

/// The same with a batch for each of these calls.
pub(crate) async fn submitted_by(calls: &[Json], answers: Json, sections: &str) -> House {
    let script = lead(calls, vec![subagent(answers)]);
    let house = House::new(script, sections).await;
    let first = worker(&house).await;
    let held = hold_slots(&house);
    house.ask("go").await;
    first.stop().await;
    drop(held);
    house.restarted()
}

/// Takes every slot, so that no item is begun.
fn hold_slots(house: &House) -> Vec<threadkeep_subagents::admission::Slot> {
    std::iter::from_fn(|| house.delegator.admission.try_acquire()).collect()
}

#[tokio::test]
async fn s61_items_are_worked_on_and_their_criteria_checked_without_a_retry() {
    let given = json!([
        {"key": "a", "prompt": "write", "acceptance_criteria": ["file:a.txt non-empty", 7]},
        {"key": "b", "prompt": "write", "acceptance_criteria": ["file:none.txt exists"]},
        {"key": "c", "prompt": "write"},
    ]);
    let answers = json!([
        {"text": "", "tool_calls": [{"name": "write_file", "args": {"path": "a.txt", "content": "x"}}]},
        {"text": "done", "usage": {"input_tokens": 5, "output_tokens": 1}},
    ]);
    let house = House::new(lead(&[call(given)], vec![subagent(answers)]), SECTIONS).await;
    let worker = worker(&house).await;
    house.ask("go").await;
    let message = house.results().await.remove(0);
    let batch = ended(&house).await;
    assert_eq!(batch.status, BatchStatus::Completed);
    assert_eq!(message["additional_kwargs"]["subagent_batch_id"], *batch.id);
    assert_eq!(message["additional_kwargs"]["subagent_batch_error"], json!(false));
    assert_eq!(message["additional_kwargs"]["subagent_batch_status"], "queued");
    assert_eq!(message["additional_kwargs"]["subagent_batch_total_items"], 3);
    assert!(message["content"].as_str().unwrap().contains(&batch.id));
    let rows = rows(&house).await;
    for row in &rows {
        assert_eq!((row.status, row.attempt, row.error.as_deref()), (BatchItemStatus::Succeeded, 1, None));
        assert_eq!(row.result_preview.as_deref(), Some("done"));
        assert_eq!(row.token_usage.unwrap().total_tokens, 6);
        assert_eq!(row.model_name.as_deref(), Some("main"));
    }
    assert_eq!(rows[0].acceptance_criteria.as_deref(), Some(&["file:a.txt non-empty".to_owned()][..]));
    assert_eq!(rows[0].acceptance_verdict.as_ref().unwrap()["all_hold"], true);
    assert_eq!(rows[1].acceptance_verdict.as_ref().unwrap()["all_hold"], false);
    assert_eq!((&rows[2].acceptance_criteria, &rows[2].acceptance_verdict), (&None, &None));
    let executions = house.executions().await;
    assert_eq!(executions.len(), 3);
    for row in &executions {
        assert_eq!((row.kind, row.status), (ExecutionKind::BatchItem, ExecutionStatus::Completed));
        assert!(row.delivered);
    }
    // The subagent's prompt has the item's key, and it has no delegation tools.
    let request = house.requests(WORKER).remove(0);
    let task = request["messages"][0]["content"].as_str().unwrap();
    assert!(task.starts_with("Item key: ") && task.contains("may be tried again"), "{task}");
    let tools = request["tools"].to_string();
    assert!(!tools.contains("batch_task") && !tools.contains("\"task\""), "{tools}");
    worker.stop().await;
    assert_eq!(house.delegator.admission.counts().running, 0, "every slot is free");
    assert_eq!(house.delegator.batches.as_ref().unwrap().attempts(AttemptEnd::Succeeded), 3);
}

#[tokio::test]
async fn the_tools_say_what_is_wrong_and_show_and_cancel_a_batch() {
    let status = |id: &str| json!({"name": "batch_status", "args": {"batch_id": id}});
    let of = |name: &str, args: Json| json!({"name": name, "args": args});
    let calls = [
        call(json!([])),
        call(json!([{"key": "a", "prompt": "p"}, {"key": "a", "prompt": "p"}])),
        of("batch_task", json!({"title": "x", "items": items(&["a"]), "subagent_type": "nobody"})),
        of(
            "batch_task",
            json!({"title": "x", "items": items(&["a"]), "subagent_type": "general-purpose",
            "max_live_items": 0}),
        ),
        status("none"),
        of("cancel_batch", json!({"batch_id": "none"})),
    ];
    let house = House::new(lead(&calls, vec![]), SECTIONS).await;
    let started = worker(&house).await;
    house.ask("go").await;
    let results = house.results().await;
    let texts: Vec<&str> = results.iter().map(|result| result["content"].as_str().unwrap()).collect();
    assert_eq!(
        texts,
        [
            "A batch must contain at least one item.",
            "Batch item keys must be unique.",
            "Unknown or disallowed subagent type 'nobody'. Available: general-purpose",
            "Batch submission failed: max_live_items must be between 1 and 1000",
            "Batch not found.",
            "Batch not found.",
        ]
    );
    for result in &results[..4] {
        assert_eq!(result["status"], "error");
        assert_eq!(result["additional_kwargs"]["subagent_batch_error"], json!(true));
    }
    started.stop().await;
    // Without a worker nothing can be submitted.
    let house = House::new(lead(&[call(items(&["a"]))], vec![]), SECTIONS).await;
    house.ask("go").await;
    assert_eq!(house.results().await[0]["content"], "Durable subagent batches are unavailable.");
    // Without the setting there are no such tools.
    let house = House::new(lead(&[], vec![]), "").await;
    house.ask("go").await;
    assert!(!house.requests("lead_agent")[0]["tools"].to_string().contains("batch"));
}

/// The error of the run `r1`, which another process ends before the answer at this gate comes.
pub(crate) async fn ended_elsewhere(house: &House, name: &str) -> AgentError {
    let mut seen = Seen::default();
    let (refused, ()) = tokio::join!(house.run("r1", Some("go"), &mut seen), async {
        gate(name).reached().await;
        let end = RunEnd::failed("ended elsewhere");
        house.delegator.records.runs().finish("r1", &end).await.unwrap();
        gate(name).open();
    });
    refused.unwrap_err()
}

/// A process stood still before it submitted: its run was ended elsewhere, and the next one makes the call.
#[tokio::test]
async fn a_run_that_has_ended_stores_no_result_of_a_submission() {
    let name = gate_name("submits-late");
    let mut script = lead(&[items_call(&["a"])], vec![subagent(json!([{"text": "done"}]))]);
    script["rules"][0]["answers"][0]["gate"] = json!({"name": name});
    let house = House::new(script, SECTIONS).await;
    let worker = worker(&house).await;
    let error = ended_elsewhere(&house, &name).await.to_string();
    assert!(error.contains("Run r1 has ended") && error.ends_with("makes the call again"), "{error}");
    assert_eq!(house.results().await, Vec::<Json>::new());
    house.run("r2", None, &mut Seen::default()).await.unwrap();
    let results = house.results().await;
    let metadata = &results[0]["additional_kwargs"];
    assert_eq!((results.len(), &metadata["subagent_batch_error"]), (1, &json!(false)), "{results:?}");
    assert_eq!(ended(&house).await.run_id, "r2");
    worker.stop().await;
}

/// No call says that a batch failed which is worked on: its model would submit it again.
#[tokio::test]
async fn a_submission_whose_answer_is_lost_is_one_batch() {
    let name = gate_name("submits-in-doubt");
    let mut script = lead(&[items_call(&["a"])], vec![subagent(json!([{"text": "done"}]))]);
    script["rules"][0]["answers"][0]["gate"] = json!({"name": name});
    let house = House::new(script, SECTIONS).await;
    let worker = worker(&house).await;
    let records = &house.delegator.records;
    // The worker writes nothing meanwhile.
    let held = hold_slots(&house);
    let (seen, ()) = tokio::join!(house.ask("go"), async {
        gate(&name).reached().await;
        records.doubt_commit(1);
        gate(&name).open();
    });
    assert!(!records.fail_statement(0), "an answer was lost");
    assert!(seen.events.is_empty(), "{:?}", seen.events);
    let results = house.results().await;
    let metadata = &results[0]["additional_kwargs"];
    assert_eq!((results.len(), &metadata["subagent_batch_error"]), (1, &json!(false)), "{results:?}");
    assert_eq!(metadata["subagent_batch_id"], *batch(&house).await.id);
    drop(held);
    ended(&house).await;
    let batches = records.batches().of_thread(THREAD, 10).await.unwrap();
    assert_eq!(batches.len(), 1, "it was found again");
    worker.stop().await;
}

#[tokio::test]
async fn s53_failures_are_tried_again_on_a_new_thread() {
    let failing = json!([{"error": {"kind": "fatal", "message": "no"}}]);
    let house = submitted(&["a"], failing, "").await;
    let worker = worker(&house).await;
    let batch = ended(&house).await;
    worker.stop().await;
    assert_eq!(batch.status, BatchStatus::Failed);
    let row = rows(&house).await.remove(0);
    assert_eq!((row.status, row.attempt), (BatchItemStatus::Failed, 3));
    assert!(row.error.unwrap().contains("no"));
    let executions = house.executions().await;
    let attempts: Vec<_> = executions.iter().map(|row| (row.attempt, row.status)).collect();
    assert_eq!(attempts, [1, 2, 3].map(|attempt| (attempt, ExecutionStatus::Failed)));
}

pub(crate) fn two_turns(gate: &str) -> Json {
    json!([
        {"text": "One.", "tool_calls": [{"name": "ls", "args": {}}], "usage": {"input_tokens": 5, "output_tokens": 1}},
        {"text": "Two.", "usage": {"input_tokens": 6, "output_tokens": 1}, "gate": {"name": gate}},
    ])
}

/// Each program of these tests has gates of its own, also if several tests run at once.
pub(crate) fn gate_name(test: &str) -> String {
    format!("{test}-{}", uuid::Uuid::new_v4())
}

#[tokio::test]
async fn an_orderly_stop_gives_items_back_and_the_next_process_goes_on_at_once() {
    let name = gate_name("stop");
    let house = submitted(&["a"], two_turns(&name), "").await;
    let first = worker(&house).await;
    gate(&name).reached().await;
    first.stop().await;
    let row = rows(&house).await.remove(0);
    assert_eq!((row.status, row.attempt), (BatchItemStatus::Queued, 0), "it costs no attempt");
    let next = house.restarted();
    gate(&name).open();
    let second = worker(&next).await;
    ended(&next).await;
    second.stop().await;
    // The first answer was stored, and is not asked for again.
    assert_eq!(next.requests(WORKER).len(), 3);
    let executions = next.executions().await;
    assert_eq!((executions.len(), executions[0].attempt), (1, 1));
    assert_eq!(rows(&next).await[0].token_usage.unwrap().total_tokens, 13);
}

/// The database is away for longer than a write is repeated at once, and the attempt is the last one.
#[tokio::test]
async fn a_result_that_cannot_be_written_at_once_is_written_when_the_database_is_back() {
    let name = gate_name("written-later");
    let house = submitted_with(&["a"], two_turns(&name), LAST_ATTEMPT).await;
    let worker = worker(&house).await;
    gate(&name).reached().await;
    let records = &house.delegator.records;
    records.fail_with(", model_name = ", 4);
    gate(&name).open();
    ended(&house).await;
    worker.stop().await;
    assert_eq!(records.left_to_fail(), 0);
    let row = rows(&house).await.remove(0);
    assert_eq!((row.status, row.attempt, row.error), (BatchItemStatus::Succeeded, 1, None));
}

/// What it got is leased under a name that nobody works under.
#[tokio::test]
async fn a_claim_whose_answer_is_lost_costs_no_attempt() {
    let house = submitted_with(&["a"], json!([{"text": "done"}]), LAST_ATTEMPT).await;
    house.delegator.records.doubt_commit(1);
    let worker = worker(&house).await;
    let batch = ended(&house).await;
    worker.stop().await;
    assert!(!house.delegator.records.fail_statement(0), "an answer was lost");
    let row = rows(&house).await.remove(0);
    assert_eq!((row.status, row.attempt, row.error), (BatchItemStatus::Succeeded, 1, None));
    assert_eq!(batch.status, BatchStatus::Completed);
}

/// Its leases are renewed on another thread: a process that is busy for long is not dead.
#[tokio::test]
async fn a_worker_whose_threads_are_busy_for_longer_than_a_lease_keeps_its_items() {
    let name = gate_name("deaf");
    // The thread that renews them may stand still for seconds itself.
    let sections = SECTIONS.replace("lease_seconds: 10", "lease_seconds: 18");
    let house = submitted_with(&["a"], two_turns(&name), &sections).await;
    let worker = worker(&house).await;
    gate(&name).reached().await;
    // The only thread of this test.
    std::thread::sleep(Duration::from_secs(20));
    gate(&name).open();
    ended(&house).await;
    worker.stop().await;
    let row = rows(&house).await.remove(0);
    assert_eq!((row.status, row.attempt, row.error), (BatchItemStatus::Succeeded, 1, None));
}

#[tokio::test]
async fn a_cancelled_batch_stops_its_subagents_and_records_what_they_used() {
    let name = gate_name("cancel");
    let house = submitted(&["a"], two_turns(&name), "").await;
    let worker = worker(&house).await;
    gate(&name).reached().await;
    let id = batch(&house).await.id;
    house.delegator.records.batches().cancel(&id).await.unwrap();
    until_lost(&house).await;
    worker.stop().await;
    let row = rows(&house).await.remove(0);
    assert_eq!((row.status, row.result_preview), (BatchItemStatus::Cancelled, None));
    let execution = house.executions().await.remove(0);
    assert_eq!((execution.status, execution.tokens().unwrap().total_tokens), (ExecutionStatus::Cancelled, 6));
    assert_eq!(house.delegator.admission.counts().running, 0);
}

/// The thread of a batch is deleted while its items are at work: they stop, and nothing of them comes back.
#[tokio::test]
async fn a_thread_is_deleted_while_its_batch_is_at_work() {
    let name = gate_name("delete");
    let house = submitted(&["a", "b", "c", "d"], two_turns(&name), "").await;
    let records = &house.delegator.records;
    records
        .threads()
        .create(NewThread { thread_id: THREAD.to_owned(), ..NewThread::default() })
        .await
        .unwrap();
    let worker = worker(&house).await;
    gate(&name).reached().await;
    let children: Vec<_> = house.executions().await.into_iter().map(|row| row.child_thread).collect();
    assert!(!children.is_empty());
    delete_thread(&house).await;
    // Whatever they were about to do, they do now.
    gate(&name).open();
    let at_work = async {
        while house.delegator.admission.counts().running > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), at_work).await.expect("they never stopped");
    worker.stop().await;
    assert!(records.batches().of_thread(THREAD, 10).await.unwrap().is_empty());
    assert!(house.executions().await.is_empty());
    for child in children {
        let state = house.accessor.get(&ThreadId::from(child.as_str()), None).await.unwrap();
        assert!(state.is_none(), "{child} came back");
    }
}

/// Another process deletes the thread meanwhile, and takes long.
#[tokio::test]
async fn a_worker_that_stops_does_not_wait_for_a_deletion() {
    let name = gate_name("stops-in-a-deletion");
    let house = submitted(&["a"], two_turns(&name), "").await;
    let worker = worker(&house).await;
    gate(&name).reached().await;
    let records = &house.delegator.records;
    let child = house.executions().await.remove(0).child_thread;
    let reservation = records.runs().reserve(THREAD, WriterKind::Delete).await.unwrap();
    records.batches().cancel_of_thread(&reservation).await.unwrap();
    let stopped = tokio::time::timeout(Duration::from_mins(10), worker.stop()).await;
    stopped.expect("it waits for the deletion");
    records.delete_thread(reservation).await.unwrap();
    assert_eq!(remains(&house).await, [child.as_str()], "the next process removes it");
}

/// Deletes the thread as the gateway does.
pub(crate) async fn delete_thread(house: &House) {
    let (records, thread) = (&house.delegator.records, ThreadId::from(THREAD));
    let reservation = records.runs().reserve(THREAD, WriterKind::Delete).await.unwrap();
    let seen = house.accessor.look(&thread).await.unwrap();
    delete_checkpoints(records, &house.accessor, &reservation, seen).await.unwrap();
    records.delete_thread(reservation).await.unwrap();
}

/// The threads of deleted items that may have been at work.
pub(crate) async fn remains(house: &House) -> Vec<String> {
    house.delegator.records.batches().remains(chrono::TimeDelta::zero()).await.unwrap()
}

/// Waits until nothing is left of a deleted item: a worker removes it when nobody can be at work on it any more.
pub(crate) async fn until_removed(house: &House, child: &str) {
    let removed = async {
        while !remains(house).await.is_empty() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), removed).await.expect("nobody removed it");
    assert!(house.accessor.get(&ThreadId::from(child), None).await.unwrap().is_none(), "hidden checkpoints");
}

/// A process that has launched an item writes its first checkpoint after the thread was deleted, and dies before it can
/// remove it.
#[tokio::test]
async fn what_a_dead_process_wrote_of_a_deleted_item_is_removed_by_the_next() {
    let source = Arc::<Held>::default();
    let house = submitted(&["a"], json!([{"text": "ok"}]), "").await;
    let first = house.restarted().with_source(Arc::clone(&source) as Arc<dyn ToolSource>);
    let at_work = worker(&first).await;
    source.reached.notified().await;
    let child = house.executions().await.remove(0).child_thread;
    delete_thread(&house).await;
    until_lost(&first).await;
    at_work.stop().await;
    assert_eq!(remains(&house).await, [child.as_str()]);
    // What a process writes that was a little faster.
    house.accessor.create(&ThreadId::from(child.as_str()), serde_json::Map::new()).await.unwrap();
    let next = house.restarted();
    let worker = worker(&next).await;
    until_removed(&next, &child).await;
    worker.stop().await;
}

/// Two processes work on one batch, and a third has stopped: each item ends once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_processes_work_on_one_batch() {
    let keys: Vec<String> = (0..40).map(|n| format!("k{n}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let answers = json!([{"text": "done", "usage": {"input_tokens": 1, "output_tokens": 1}}]);
    let house = submitted(&keys, answers, "subagent_runtime: {max_running: 4}").await;
    let others = [house.restarted(), house.restarted()];
    let workers = futures::future::join_all(others.iter().map(worker)).await;
    let batch = ended(&house).await;
    for worker in workers {
        worker.stop().await;
    }
    assert_eq!(batch.status, BatchStatus::Completed);
    assert!(
        rows(&house).await.iter().all(|row| (row.status, row.attempt) == (BatchItemStatus::Succeeded, 1))
    );
    assert_eq!(house.requests(WORKER).len(), 40, "none was worked on twice");
    let usage = house.delegator.records.batches();
    assert_eq!(usage.tokens(&batch.id).await.unwrap().total_tokens, 80);
}

/// Lets no result of a tool into the conversation: what it notifies of is a run that has submitted a batch and is about
/// to say so.
#[derive(Default)]
pub(crate) struct Between(pub(crate) Arc<Notify>);

#[async_trait]
impl Observer for Between {
    async fn message_added(&mut self, message: Added<'_>) -> Result<(), ObserverError> {
        if let Added::ToolResult { .. } = message {
            self.0.notify_one();
            std::future::pending::<()>().await;
        }
        Ok(())
    }
}

/// A lead that submits two items, and subagents that answer at once.
pub(crate) async fn two_items() -> House {
    let script = lead(&[call(items(&["a", "b"]))], vec![subagent(json!([{"text": "ok"}]))]);
    House::new(script, SECTIONS).await
}

/// A run whose batch was submitted before the run ended without saying so: the next one repeats the call, and finds the
/// batch.
pub(crate) async fn repeated(house: &House) {
    let first = house.delegator.records.batches().of_thread(THREAD, 10).await.unwrap();
    assert_eq!(first.len(), 1, "it was submitted");
    assert!(house.results().await.is_empty(), "and nobody was told");
    let next = house.restarted();
    let worker = worker(&next).await;
    next.run("r2", None, &mut Seen::default()).await.unwrap();
    ended(&next).await;
    worker.stop().await;
    let batches = next.delegator.records.batches().of_thread(THREAD, 10).await.unwrap();
    assert_eq!(batches.iter().map(|batch| &batch.id).collect::<Vec<_>>(), [&first[0].id]);
    let results = next.results().await;
    assert_eq!(results.len(), 1);
    assert_eq!(results[0]["additional_kwargs"]["subagent_batch_id"], *first[0].id);
    assert_eq!(rows(&next).await.len(), 2);
    assert_eq!(next.requests(WORKER).len(), 2, "no item was worked on twice");
}

#[tokio::test]
async fn s62_a_call_that_is_repeated_after_its_run_was_dropped_finds_its_batch() {
    let house = two_items().await;
    let first = worker(&house).await;
    let held = hold_slots(&house);
    let mut observer = Between::default();
    let reached = Arc::clone(&observer.0);
    tokio::select! {
        ended = house.run_observed("r1", Some("go"), &mut observer) => panic!("{ended:?}"),
        () = reached.notified() => {}
    }
    first.stop().await;
    drop(held);
    repeated(&house).await;
}

/// The database is away for longer than the repeated call waits for it. Its batch may be worked on, so no result says
/// that it failed.
#[tokio::test]
async fn a_repeated_call_has_no_result_while_the_database_is_away() {
    let house = two_items().await;
    let first = worker(&house).await;
    let held = hold_slots(&house);
    let mut observer = Between::default();
    let reached = Arc::clone(&observer.0);
    tokio::select! {
        ended = house.run_observed("r1", Some("go"), &mut observer) => panic!("{ended:?}"),
        () = reached.notified() => {}
    }
    first.stop().await;
    drop(held);
    let source = Arc::<Held>::default();
    let next = house.restarted().with_source(Arc::clone(&source) as Arc<dyn ToolSource>);
    // The worker writes nothing meanwhile.
    let held = hold_slots(&next);
    let second = worker(&next).await;
    let records = &next.delegator.records;
    let mut seen = Seen::default();
    let (ended, ()) = tokio::join!(next.run("away", None, &mut seen), async {
        source.reached.notified().await;
        records.fail_from(1);
        source.open.notify_one();
        let tries = async {
            while records.failed() < 3 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_mins(10), tries).await.expect("it was not tried three times");
        records.fail_statement(0);
    });
    let error = ended.unwrap_err().to_string();
    assert!(error.ends_with("the next run of the thread makes the call again"), "{error}");
    second.stop().await;
    drop(held);
    repeated(&next).await;
}

/// A source of tools that is reached, and answers when it is opened: that there are none.
#[derive(Default)]
pub(crate) struct Held {
    pub(crate) reached: Notify,
    pub(crate) open: Notify,
}

#[async_trait]
impl ToolSource for Held {
    async fn tools(&self, _: &Config) -> Vec<Arc<dyn Tool>> {
        self.reached.notify_one();
        self.open.notified().await;
        Vec::new()
    }
}

/// Bug 7: a batch that is cancelled while the tools of its item are put together asks no model.
#[tokio::test]
async fn a_batch_that_is_cancelled_while_tools_are_assembled_starts_nothing() {
    let source = Arc::<Held>::default();
    let house = submitted(&["a"], json!([{"text": "ok"}]), "").await;
    let house = house.with_source(Arc::clone(&source) as Arc<dyn ToolSource>);
    let worker = worker(&house).await;
    source.reached.notified().await;
    let id = batch(&house).await.id;
    house.delegator.records.batches().cancel(&id).await.unwrap();
    until_lost(&house).await;
    worker.stop().await;
    assert_eq!(house.requests(WORKER).len(), 0);
    assert_eq!(rows(&house).await[0].status, BatchItemStatus::Cancelled);
    assert_eq!(house.delegator.admission.counts().running, 0);
}

/// Waits until an attempt of this process did not count.
pub(crate) async fn until_lost(house: &House) {
    let lost = async {
        let batching = house.delegator.batches.as_ref().unwrap();
        while batching.attempts(AttemptEnd::Lost) == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), lost).await.expect("it never noticed");
}

/// The budget of the run binds the sum of the items.
#[tokio::test]
async fn a_batch_ends_within_the_budget_of_its_run() {
    let answers = json!([
        {"text": "One.", "tool_calls": [{"name": "ls", "args": {}}], "usage": {"input_tokens": 300, "output_tokens": 100}},
        {"text": "Two.", "usage": {"input_tokens": 300, "output_tokens": 100}},
    ]);
    let sections = "token_budget: {enabled: true, max_tokens: 1000}\nsubagent_runtime: {max_running: 1}";
    let house = submitted(&["a", "b", "c", "d"], answers, sections).await;
    let worker = worker(&house).await;
    ended(&house).await;
    worker.stop().await;
    let executions = house.executions().await;
    let used: u64 =
        executions.iter().flat_map(|row| row.usage.values()).map(|tokens| tokens.total_tokens).sum();
    // The run used 12 of it before; one call may be under way when the limit is reached.
    assert!((988..988 + 400).contains(&used), "{used} tokens");
    assert!(rows(&house).await.iter().any(|row| row.stop_reason.as_deref() == Some("token_capped")));
}

/// Answers have at most 8 MiB. A result of 50 MB is none, and says so; of one that is just within, the beginning is kept.
#[tokio::test]
async fn a_result_of_50_mb_fails_its_item_and_costs_no_other() {
    let says = |key: &str, length: usize| json!({"when": {"contains": [format!("Item key: {key}")]}, "answers": [{"text": "y".repeat(length)}]});
    let rules = vec![says("huge", 50_000_000), says("large", 8_000_000), says("small", 2)];
    let mut script = lead(&[call(items(&["huge", "large", "small"]))], rules);
    script["chunk_chars"] = json!(2_000_000);
    let house = House::new(script, SECTIONS).await;
    let worker = worker(&house).await;
    house.ask("go").await;
    ended(&house).await;
    worker.stop().await;
    let batch = batch(&house).await;
    let found = house.delegator.records.batches().results(&batch.id, None, 10).await.unwrap();
    let lengths: Vec<_> =
        found.iter().map(|(row, result)| (row.status, result.as_ref().map(String::len))).collect();
    let succeeded = BatchItemStatus::Succeeded;
    assert_eq!(lengths, [(BatchItemStatus::Failed, None), (succeeded, Some(100_000)), (succeeded, Some(2))]);
    // What the model said so far, and why that is not all, cut to what an error may be long.
    assert_eq!(found[0].0.error.as_ref().unwrap().len(), 4_000);
}

/// A result of one character more than is kept.
#[tokio::test]
async fn s58_a_long_result_is_cut_and_says_so() {
    let text = "x".repeat(100_001);
    let house = submitted(&["a"], json!([{"text": text}]), "").await;
    let worker = worker(&house).await;
    ended(&house).await;
    worker.stop().await;
    let batch = batch(&house).await;
    let (row, result) =
        house.delegator.records.batches().results(&batch.id, None, 10).await.unwrap().remove(0);
    assert_eq!((row.result_truncated, result.unwrap().len()), (true, 100_000));
    assert_eq!(row.result_preview.unwrap().len(), 2_000);
}

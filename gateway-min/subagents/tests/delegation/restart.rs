//! Processes that die: what a delegation is worth to the next one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value as Json, json};
use threadkeep::id::ThreadId;
use threadkeep::saver::CheckpointSelector;
use threadkeep_agent::Ended;
use threadkeep_agent::tools::ToolSource;
use threadkeep_records::{CHILD_PREFIX, Delegating, ExecutionKind, ExecutionStatus, NewExecution};
use tokio::sync::Notify;

use crate::batches::{Held, delete_thread, gate_name};
use crate::support::{House, Seen, THREAD, lead, subagent, task};

/// A process that is gone: its runtime ends where it stands, with every task in it, as a kill ends them. No task is asked
/// to stop.
pub(crate) fn killed_at(house: &House, question: Option<&str>, events: usize) {
    killed_when(house, question, events, async || {});
}

/// The same, when this has returned after that many events.
fn killed_when(house: &House, question: Option<&str>, events: usize, ready: impl AsyncFnOnce() + Send) {
    let process = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut observer = Counting { left: AtomicUsize::new(events), reached: Arc::new(Notify::new()) };
    let reached = Arc::clone(&observer.reached);
    std::thread::scope(|threads| {
        threads.spawn(move || {
            let mut running = Box::pin(house.run_observed("r1", question, &mut observer));
            process.block_on(async {
                tokio::select! {
                    ended = &mut running => panic!("it ended: {ended:?}"),
                    () = async { reached.notified().await; ready().await } => {}
                }
            });
            // Its tasks first: dropping the run would tell them to stop.
            drop(process);
            std::mem::forget(running);
        });
    });
}

/// Reports when `left` events have come, and lets no further one pass.
struct Counting {
    left: AtomicUsize,
    reached: Arc<Notify>,
}

#[async_trait::async_trait]
impl threadkeep_agent::Observer for Counting {
    async fn custom(&mut self, _: &Json) {
        if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.reached.notify_one();
            std::future::pending::<()>().await;
        }
    }
}

fn three_turns() -> Json {
    subagent(json!([
        {"text": "One.", "tool_calls": [{"name": "write_file", "args": {"path": "a", "content": "{{input}}"}}], "usage": {"input_tokens": 5, "output_tokens": 1}},
        {"text": "Two.", "tool_calls": [{"name": "ls", "args": {}}], "usage": {"input_tokens": 6, "output_tokens": 1}},
        {"text": "Three.", "usage": {"input_tokens": 7, "output_tokens": 1}},
    ]))
}

/// However far a run got before its process died, the next one finishes it: with each answer of a subagent that was
/// stored requested once, and with the result of a run that nobody killed.
#[tokio::test]
async fn a_run_that_died_is_finished_with_every_stored_answer_requested_once() {
    let script = || lead(&[task("work", "general-purpose")], vec![three_turns()]);
    let whole = House::new(script(), "").await;
    whole.ask("go").await;
    // Started, five messages, completed.
    for events in 1..=7 {
        let house = House::new(script(), "").await;
        killed_at(&house, Some("go"), events);
        house.settled().await;
        let next = house.restarted();
        let mut seen = Seen::default();
        let ended = next.run("r2", None, &mut seen).await.unwrap();
        assert!(matches!(ended, Ended::Done { .. }), "{events}: {ended:?}");
        let results =
            |list: Vec<Json>| list.into_iter().map(|result| result["content"].clone()).collect::<Vec<_>>();
        assert_eq!(results(next.results().await), results(whole.results().await), "{events}");
        // The answer that was under way when the process died may be asked for again.
        let requests = next.requests("subagent:general-purpose").len();
        assert!((3..=4).contains(&requests), "{events}: {requests} requests");
        assert_eq!(next.requests("lead_agent").len(), 2, "{events}");
        let [row] = &next.executions().await[..] else { panic!("{events}: one execution") };
        assert_eq!(
            (row.status, row.attempt, row.delivered),
            (ExecutionStatus::Completed, 1, true),
            "{events}"
        );
        assert_eq!(row.usage["main"].total_tokens, 21, "{events}");
        let used: i64 = seen.used.iter().map(|(.., tokens)| tokens.total).sum();
        assert_eq!(used, 21, "{events}: reported by the run that delivers");
        // The numbers of messages go on and never name another message.
        let numbers: Vec<u64> =
            seen.events.iter().filter_map(|event| event["message_index"].as_u64()).collect();
        assert!(numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{events}: {numbers:?}");
        assert!(numbers.last().is_none_or(|last| *last == 5), "{events}: {numbers:?}");
        assert_eq!(next.delegator.admission.counts().running, 0);
    }
}

/// A result that is stored is given to no subagent again, so nobody asks what was done for it: the next run counts it.
#[tokio::test]
async fn what_was_done_for_a_stored_result_is_counted_by_the_next_run() {
    let short = json!({"when": {"caller": "subagent", "contains": ["short"]}, "answers": [
        {"text": "Short.", "usage": {"input_tokens": 2, "output_tokens": 1}},
    ]});
    let calls = [task("short", "general-purpose"), task("long", "general-purpose")];
    let mut stored = 0;
    for events in 1..=10 {
        let house = House::new(lead(&calls, vec![short.clone(), three_turns()]), "").await;
        killed_at(&house, Some("go"), events);
        house.settled().await;
        let next = house.restarted();
        let (mut seen, mut later) = (Seen::default(), Seen::default());
        next.run("r2", None, &mut seen).await.unwrap();
        let sum = |seen: &Seen| seen.used.iter().map(|(.., tokens)| tokens.total).sum::<i64>();
        assert_eq!(sum(&seen), 21 + 3, "{events}");
        let begun = seen.types().iter().filter(|kind| **kind == "task_started").count();
        stored += usize::from(begun == 1);
        let counted = next.executions().await.iter().all(|row| row.counted && row.delivered);
        assert!(counted, "{events}");
        next.run("r3", Some("go"), &mut later).await.unwrap();
        assert_eq!(sum(&later), 21 + 3, "{events}: what it has delegated itself");
    }
    assert!(stored > 0, "no process died between the results");
}

/// Check 2: between the end of the subagent and the parent's write.
#[tokio::test]
async fn a_result_that_was_not_delivered_is_delivered_without_another_call() {
    let house = House::new(lead(&[task("work", "general-purpose")], vec![three_turns()]), "").await;
    killed_at(&house, Some("go"), 7);
    house.settled().await;
    assert_eq!(house.executions().await[0].status, ExecutionStatus::Completed);
    let before = house.requests("subagent:general-purpose").len();
    let next = house.restarted();
    next.run("r2", None, &mut Seen::default()).await.unwrap();
    assert_eq!(next.requests("subagent:general-purpose").len(), before, "no further call");
    assert_eq!(next.results().await.len(), 1, "one tool message");
}

/// The same, and the next process has the subagent, or its model, no longer.
#[tokio::test]
async fn a_result_that_was_not_delivered_outlives_its_subagent() {
    const CUSTOM: &str =
        "subagents: {custom_agents: {helper: {description: Helps, system_prompt: Help, model: other}}}";
    for (from, to) in [(CUSTOM, ""), ("{name: other,", "{name: another,")] {
        let house = House::new(lead(&[task("work", "helper")], vec![three_turns()]), CUSTOM).await;
        killed_at(&house, Some("go"), 7);
        house.settled().await;
        let before = house.requests("subagent:helper").len();
        house.reconfigure(from, to);
        let next = house.restarted();
        next.run("r2", None, &mut Seen::default()).await.unwrap();
        assert_eq!(next.results().await[0]["content"], "Task Succeeded. Result: Three.");
        assert_eq!(next.requests("subagent:helper").len(), before, "no further call");
        let [row] = &next.executions().await[..] else { panic!("one execution") };
        assert_eq!((row.status, row.delivered), (ExecutionStatus::Completed, true));
    }
}

/// A process that stops in order cancels its runs, but not the work of their subagents.
#[tokio::test]
async fn a_subagent_of_a_process_that_stops_goes_on_in_the_next_one() {
    let script = |gate: Json| {
        lead(
            &[task("work", "general-purpose")],
            vec![subagent(json!([
                {"text": "One.", "tool_calls": [{"name": "ls", "args": {}}]},
                {"text": "Two.", "gate": gate},
            ]))],
        )
    };
    let house = House::new(script(json!({"name": "a-process-that-stops"})), "").await;
    house.delegator.stopping.cancel();
    let mut seen = Seen {
        cancel_at: Some(("task_running", tokio_util::sync::CancellationToken::new())),
        ..Seen::default()
    };
    assert_eq!(house.run("r1", Some("go"), &mut seen).await.unwrap(), Ended::Cancelled);
    assert_eq!(house.executions().await[0].status, ExecutionStatus::Running);
    let said = |seen: &Seen| {
        let of = |event: &Json| (event["type"].as_str().unwrap().to_owned(), event["message_index"].as_u64());
        seen.events.iter().map(of).collect::<Vec<_>>()
    };
    let running = |index: u64| ("task_running".to_owned(), Some(index));
    let begun = said(&seen);
    assert_eq!(begun[..2], [("task_started".to_owned(), None), running(1)]);
    assert!(begun[2..].iter().all(|event| event.0 == "task_running"), "no end of what goes on: {begun:?}");
    threadkeep_agent::model::scripted::gate("a-process-that-stops").open();
    let next = house.restarted();
    let mut seen = Seen::default();
    next.run("r2", None, &mut seen).await.unwrap();
    let went_on = said(&seen);
    assert_eq!(
        (went_on[0].0.as_str(), went_on.last().unwrap().0.as_str()),
        ("task_started", "task_completed")
    );
    assert_eq!(went_on[went_on.len() - 2], running(3), "{went_on:?}");
    assert_eq!(next.results().await[0]["content"], "Task Succeeded. Result: Two.");
}

/// A new question turns away from what was delegated. What was done for it and counted by no run is counted by the run of
/// that question, once.
#[tokio::test]
async fn what_a_new_question_turns_away_from_is_counted_once() {
    let sum = |seen: &Seen| seen.used.iter().map(|(.., tokens)| tokens.total).sum::<i64>();
    let answers = |gate: &str| {
        let mut answers = three_turns();
        answers["answers"][2]["gate"] = json!({ "name": gate });
        let mut script = lead(&[task("work", "general-purpose")], vec![answers]);
        script["rules"].as_array_mut().unwrap().insert(0, json!({
            "when": {"caller": "lead_agent", "contains": ["something else"]}, "answers": [{"text": "Yes?"}],
        }));
        script
    };
    // The process dies, or it stops in order and leaves the subagent to the next one.
    for dies in [true, false] {
        let house = House::new(answers("turned-away"), "").await;
        if dies {
            // Started, three messages.
            killed_at(&house, Some("go"), 4);
            house.settled().await;
        } else {
            house.delegator.stopping.cancel();
            let cancel_at = Some(("task_running", tokio_util::sync::CancellationToken::new()));
            let mut seen = Seen { cancel_at, ..Seen::default() };
            assert_eq!(house.run("r1", Some("go"), &mut seen).await.unwrap(), Ended::Cancelled);
            assert_eq!(sum(&seen), 0, "the next process counts it");
        }
        let row = house.executions().await[0].clone();
        assert!(!row.status.is_terminal(), "{row:?}");
        let next = house.restarted();
        let mut seen = Seen::default();
        next.run("r2", Some("something else"), &mut seen).await.unwrap();
        let row = next.executions().await[0].clone();
        assert_eq!((row.status, row.delivered), (ExecutionStatus::Cancelled, false), "{dies}");
        let used = row.tokens().unwrap().total_tokens;
        assert!(used >= 6, "{dies}: {used}");
        assert_eq!(u64::try_from(sum(&seen)).unwrap(), used, "{dies}");
        assert_eq!(seen.used[0].1, "subagent:general-purpose");
        let mut later = Seen::default();
        next.run("r3", Some("something else"), &mut later).await.unwrap();
        assert_eq!(sum(&later), 0, "{dies}: once");
        assert_eq!(next.executions().await, [row], "{dies}: it has no result that a run was given");
    }
    // One that had ended when the process died keeps its end.
    let script = answers("turned-away-open");
    threadkeep_agent::model::scripted::gate("turned-away-open").open();
    let house = House::new(script, "").await;
    killed_at(&house, Some("go"), 7);
    house.settled().await;
    let next = house.restarted();
    let mut seen = Seen::default();
    next.run("r2", Some("something else"), &mut seen).await.unwrap();
    assert_eq!((next.executions().await[0].status, sum(&seen)), (ExecutionStatus::Completed, 21));
    let mut later = Seen::default();
    next.run("r3", Some("something else"), &mut later).await.unwrap();
    assert_eq!(sum(&later), 0);
}

/// The process stands still before the first checkpoint of its subagent, and the thread is deleted meanwhile.
#[tokio::test]
async fn a_subagent_that_goes_on_after_the_deletion_of_its_thread_leaves_no_checkpoints() {
    let source = Arc::<Held>::default();
    let script = lead(&[task("work", "general-purpose")], vec![subagent(json!([{"text": "ok"}]))]);
    let house = House::new(script, "").await.with_source(Arc::clone(&source) as Arc<dyn ToolSource>);
    let mut seen = Seen::default();
    let (_, child) =
        tokio::join!(house.run("r1", Some("go"), &mut seen), deleted_before_its_first(&house, &source));
    assert_eq!(house.requests("subagent:general-purpose").len(), 1, "it went on");
    house.settled().await;
    assert!(house.accessor.get(&child, None).await.unwrap().is_none(), "hidden checkpoints");
}

/// Deletes the thread before the first checkpoint of its subagent, whose thread is returned, and lets that go on.
async fn deleted_before_its_first(house: &House, source: &Held) -> ThreadId {
    let child = loop {
        source.reached.notified().await;
        if let Some(row) = house.executions().await.pop() {
            break row.child_thread;
        }
        source.open.notify_one();
    };
    delete_thread(house).await;
    source.open.notify_one();
    ThreadId::from(child.as_str())
}

/// The same in a process that stops then, which leaves its subagents to the next one.
#[tokio::test]
async fn a_subagent_that_is_stopped_after_the_deletion_of_its_thread_leaves_no_checkpoints() {
    let (source, name) = (Arc::<Held>::default(), gate_name("deleted-and-stopped"));
    let answers = json!([{"text": "never", "gate": {"name": name}}]);
    let script = lead(&[task("work", "general-purpose")], vec![subagent(answers)]);
    let house = House::new(script, "").await.with_source(Arc::clone(&source) as Arc<dyn ToolSource>);
    let (mut seen, cancel) = (Seen::default(), tokio_util::sync::CancellationToken::new());
    let running = house.run_until("r1", Some("go"), &mut seen, cancel.clone());
    let (_, child) = tokio::join!(running, async {
        let child = deleted_before_its_first(&house, &source).await;
        threadkeep_agent::model::scripted::gate(&name).reached().await;
        let begun = house.accessor.get(&child, None).await.unwrap();
        assert!(begun.is_some(), "it was written after the deletion");
        house.delegator.stopping.cancel();
        cancel.cancel();
        child
    });
    house.settled().await;
    assert!(house.accessor.get(&child, None).await.unwrap().is_none(), "hidden checkpoints");
}

/// The same after a copy of the thread, which has the ids of its executions, got the number that was deleted.
#[tokio::test]
async fn a_subagent_that_is_stopped_after_its_deletion_leaves_the_thread_to_who_has_it_by_then() {
    let (source, name) = (Arc::<Held>::default(), gate_name("deleted-and-taken"));
    let answers = json!([{"text": "never", "gate": {"name": name}}]);
    let script = lead(&[task("work", "general-purpose")], vec![subagent(answers)]);
    let house = House::new(script, "").await.with_source(Arc::clone(&source) as Arc<dyn ToolSource>);
    let (mut seen, cancel) = (Seen::default(), tokio_util::sync::CancellationToken::new());
    let running = house.run_until("r1", Some("go"), &mut seen, cancel.clone());
    let (_, child) = tokio::join!(running, async {
        let child = deleted_before_its_first(&house, &source).await;
        threadkeep_agent::model::scripted::gate(&name).reached().await;
        let records = &house.delegator.records;
        let of_copy = NewExecution {
            execution_id: child.as_str().strip_prefix(CHILD_PREFIX).unwrap().to_owned(),
            thread_id: "copy".to_owned(),
            run_id: "r2".to_owned(),
            delegating: Delegating::Unrecorded,
            parent_execution: None,
            kind: ExecutionKind::Task,
            tool_call_id: "call".to_owned(),
            agent_name: "general-purpose".to_owned(),
            definition: serde_json::Map::new(),
            definition_digest: String::new(),
            description: "work".to_owned(),
            deadline: records.now() + chrono::TimeDelta::hours(1),
        };
        let opened = records.executions().open(of_copy).await.unwrap();
        assert_eq!(opened.row.child_thread, child.as_str());
        house.delegator.stopping.cancel();
        cancel.cancel();
        child
    });
    house.settled().await;
    assert!(house.accessor.get(&child, None).await.unwrap().is_some(), "it is the copy's");
}

const BASH: &str = "sandbox: {use: local, allow_host_bash: true}";

/// A subagent that makes these two calls at once.
fn two_calls(first: Json, second: Json) -> Json {
    let answers = json!([{"text": "One.", "tool_calls": [first, second]}, {"text": "Two."}]);
    lead(&[task("work", "general-purpose")], vec![subagent(answers)])
}

fn bash(command: &str) -> Json {
    json!({"name": "bash", "args": {"command": command}})
}

/// The numbers of the messages that were reported, each with what it is.
fn numbered(seen: &Seen) -> Vec<(u64, String)> {
    let running = seen.events.iter().filter(|event| event["type"] == "task_running");
    let what = |message: &Json| message["name"].as_str().unwrap_or("answer").to_owned();
    running.map(|event| (event["message_index"].as_u64().unwrap(), what(&event["message"]))).collect()
}

/// Of two calls at work one has ended when the process dies. Its number is not that of the other one later.
#[tokio::test]
async fn a_number_never_names_another_message() {
    let second = bash("test -e d || { touch d; sleep 1000; }");
    let house = House::new(two_calls(json!({"name": "ls", "args": {}}), second), BASH).await;
    // Started, the answer, the result of `ls`, which is durable; the other call is at work.
    killed_when(&house, Some("go"), 3, async || {
        let child = ThreadId::from(house.executions().await[0].child_thread.as_str());
        let begun = house.delegator.agents.thread_dir(THREAD).join("d");
        let head = CheckpointSelector::head(&child);
        while house.accessor.saver().get(&head).await.unwrap().unwrap().writes.is_empty() || !begun.exists() {
            tokio::task::yield_now().await;
        }
    });
    house.settled().await;
    let next = house.restarted();
    let mut seen = Seen::default();
    next.run("r2", None, &mut seen).await.unwrap();
    assert_eq!(numbered(&seen), [(3, "bash".to_owned()), (4, "answer".to_owned())]);
}

/// Calls end in any order. A result has the number of its place in the conversation.
#[tokio::test]
async fn a_result_has_the_number_of_its_call() {
    let first = bash("until test -e stored; do sleep 0.05; done");
    let house = House::new(two_calls(first, json!({"name": "ls", "args": {}})), BASH).await;
    // The first call ends once the result of the second is stored.
    let stored = async {
        let row = loop {
            match house.executions().await.pop() {
                Some(row) => break row,
                None => tokio::task::yield_now().await,
            }
        };
        let head = CheckpointSelector::head(&ThreadId::from(row.child_thread.as_str()));
        while house.accessor.saver().get(&head).await.unwrap().is_none_or(|head| head.writes.is_empty()) {
            tokio::task::yield_now().await;
        }
        std::fs::write(house.delegator.agents.thread_dir(THREAD).join("stored"), "").unwrap();
    };
    let (seen, ()) = tokio::join!(house.ask("go"), stored);
    let numbers: Vec<u64> = numbered(&seen).into_iter().map(|(number, _)| number).collect();
    assert_eq!(numbers, [1, 3, 2, 4]);
    let totals: Vec<u64> = seen.events.iter().filter_map(|event| event["total_messages"].as_u64()).collect();
    assert_eq!(totals, [1, 3, 3, 4]);
}

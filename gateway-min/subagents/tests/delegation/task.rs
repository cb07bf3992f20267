//! The tool `task` in a lead agent's run: what the model, the clients and the ledger see of a delegation.

use std::sync::{Arc, Mutex};

use serde_json::{Value as Json, json};
use threadkeep_agent::Ended;
use threadkeep_records::ExecutionStatus;
use threadkeep_subagents::hooks::{HookStore, Hooks, LifecycleHooks, TaskConclusion, TaskInfo};
use tokio_util::sync::CancellationToken;

use crate::support::{House, Seen, lead, subagent, task};

fn two_turns() -> Json {
    subagent(json!([
        {"text": "Looking.", "tool_calls": [{"name": "ls", "args": {}}], "usage": {"input_tokens": 5, "output_tokens": 1}},
        {"text": "Found nothing.", "usage": {"input_tokens": 7, "output_tokens": 2}},
    ]))
}

/// Providers repeat the ids of calls.
#[tokio::test]
async fn an_entry_of_the_ledger_names_the_message_with_its_result() {
    let mut calls = ["one", "two"].map(|prompt| task(prompt, "general-purpose"));
    for call in &mut calls {
        call["id"] = json!("call_0");
    }
    let house = House::new(lead(&calls, vec![subagent(json!([{"text": "{{input}}"}]))]), "").await;
    house.ask("go").await;
    let (ledger, results) = (house.ledger().await, house.results().await);
    let named: Vec<_> =
        ledger.iter().map(|entry| (entry["result_brief"].as_str(), &entry["result_ref"])).collect();
    assert_eq!(named, [(Some("one"), &results[0]["id"]), (Some("two"), &results[1]["id"])]);
    assert_ne!(results[0]["id"], results[1]["id"]);
}

/// Scenarios 4 and 5.
#[tokio::test]
async fn a_delegation_is_started_followed_and_completed() {
    let house = House::new(lead(&[task("look around", "general-purpose")], vec![two_turns()]), "").await;
    let seen = house.ask("go").await;
    assert_eq!(
        seen.types(),
        ["task_started", "task_running", "task_running", "task_running", "task_completed"]
    );
    let [started, first, second, third, completed] = &seen.events[..] else { panic!() };
    assert_eq!((&started["description"], &started["model_name"]), (&json!("look around"), &json!("main")));
    let task_id = house.messages().await[1]["tool_calls"][0]["id"].clone();
    assert!(seen.events.iter().all(|event| event["task_id"] == task_id));
    for (index, event) in [first, second, third].into_iter().enumerate() {
        assert_eq!(
            (&event["message_index"], &event["total_messages"]),
            (&json!(index + 1), &json!(index + 1))
        );
    }
    assert_eq!((&first["message"]["type"], &second["message"]["type"]), (&json!("ai"), &json!("tool")));
    let usage = |input, output| json!({"input_tokens": input, "output_tokens": output, "total_tokens": input + output});
    assert_eq!(
        (&first["usage"], &second["usage"], &third["usage"]),
        (&usage(5, 1), &usage(5, 1), &usage(12, 3))
    );
    assert_eq!((&completed["result"], &completed["usage"]), (&json!("Found nothing."), &usage(12, 3)));

    let result = &house.results().await[0];
    assert_eq!(
        (&result["content"], &result["status"]),
        (&json!("Task Succeeded. Result: Found nothing."), &json!("success"))
    );
    let metadata = &result["additional_kwargs"];
    assert_eq!(
        (&metadata["subagent_status"], &metadata["subagent_token_usage"]),
        (&json!("completed"), &usage(12, 3))
    );
    assert_eq!(metadata["subagent_model_name"], "main");
    assert_eq!(metadata["subagent_tool_receipts"][0]["tool_name"], "ls");
    let used: Vec<_> = seen
        .used
        .iter()
        .map(|(model, caller, calls, tokens)| (model.as_str(), caller.as_str(), *calls, tokens.total))
        .collect();
    assert_eq!(used, [("main", "subagent:general-purpose", 2, 15)], "once");

    let ledger = house.ledger().await;
    assert_eq!(ledger.len(), 1);
    assert_eq!(
        (&ledger[0]["status"], &ledger[0]["result_brief"]),
        (&json!("completed"), &json!("Found nothing."))
    );
    let [row] = &house.executions().await[..] else { panic!() };
    assert_eq!(
        (row.status, row.delivered, ledger[0]["id"].as_str()),
        (ExecutionStatus::Completed, true, Some(row.execution_id.as_str()))
    );
    assert_eq!(row.usage["main"].total_tokens, 15);
    assert_eq!(house.delegator.admission.counts().running, 0);
}

/// Scenario 1.
#[tokio::test]
async fn an_unknown_subagent_is_refused_without_a_trace_but_the_ledger() {
    let house =
        House::new(lead(&[task("x", "nobody")], vec![]), "sandbox: {use: local, allow_host_bash: true}")
            .await;
    let seen = house.ask("go").await;
    assert_eq!(seen.events, [] as [Json; 0]);
    assert_eq!(
        house.results().await[0]["content"],
        "Task failed. Error: Unknown subagent type 'nobody'. Available: general-purpose, bash"
    );
    assert_eq!(house.executions().await, []);
    assert_eq!(house.ledger().await[0]["status"], "failed");
}

/// Scenario 2.
#[tokio::test]
async fn an_allowlist_filters_the_subagents_and_an_empty_one_takes_the_tool_away() {
    let mut house = House::new(lead(&[task("x", "general-purpose")], vec![two_turns()]), "").await;
    house.allowed = Some(vec!["researcher".to_owned()]);
    house.ask("go").await;
    assert_eq!(
        house.results().await[0]["content"],
        "Task failed. Error: Unknown subagent type 'general-purpose'. Available: none permitted by caller policy"
    );
    house.allowed = Some(vec![]);
    house.ask("again").await;
    let text = house.results().await[1]["content"].clone();
    assert!(text.as_str().unwrap().starts_with("Error: there is no tool `task`"), "{text}");
}

/// Scenario 3.
#[tokio::test]
async fn bash_without_permission_gets_the_advice_even_if_it_is_not_allowed_either() {
    let mut house = House::new(lead(&[task("x", "bash")], vec![]), "").await;
    house.allowed = Some(vec!["general-purpose".to_owned()]);
    house.ask("go").await;
    let text = house.results().await[0]["content"].clone();
    assert!(text.as_str().unwrap().contains("allow_host_bash: true"), "{text}");
}

/// Scenarios 6 and 9, bug 14.
#[tokio::test]
async fn only_the_mark_of_a_failed_model_call_is_a_failure() {
    let prose = subagent(json!([{"text": "Error: everything is broken"}]));
    let house = House::new(lead(&[task("x", "general-purpose")], vec![prose]), "").await;
    let seen = house.ask("go").await;
    let result = &house.results().await[0];
    assert_eq!(result["content"], "Task Succeeded. Result: Error: everything is broken");
    assert_eq!(result["additional_kwargs"].get("subagent_token_usage"), None, "unknown is not zero");
    assert_eq!(seen.events.last().unwrap()["usage"], Json::Null);

    let broken = subagent(json!([{"text": "x", "error": {"kind": "fatal", "message": "no quota"}}]));
    let house = House::new(lead(&[task("x", "general-purpose")], vec![broken]), "").await;
    let mut seen = Seen::default();
    let ended = house.run("r", Some("go"), &mut seen).await.unwrap();
    assert!(matches!(ended, Ended::Done { fallback: None, .. }), "the parent's run does not fail: {ended:?}");
    assert_eq!(seen.events.last().unwrap()["type"], "task_failed");
    assert_eq!(house.results().await[0]["additional_kwargs"]["subagent_status"], "failed");
}

/// Scenario 10.
#[tokio::test]
async fn a_subagent_that_takes_too_long_is_stopped_with_the_receipts_so_far() {
    // All cores may be busy: a subagent that did not come to its second request gets more time.
    let mut seconds = 1;
    let house = loop {
        let slow = subagent(json!([
            {"tool_calls": [{"name": "ls", "args": {}}]},
            {"text": "never said", "gate": {"name": "scenario-10"}},
        ]));
        let limit = format!("subagents: {{timeout_seconds: {seconds}}}");
        let house = House::new(lead(&[task("x", "general-purpose")], vec![slow]), &limit).await;
        let seen = house.ask("go").await;
        let last = seen.events.last().unwrap();
        let error = format!("Execution timed out after {seconds} seconds");
        assert_eq!((&last["type"], &last["error"]), (&json!("task_timed_out"), &json!(error)));
        let result = &house.results().await[0];
        assert_eq!(result["content"], format!("Task timed out. Error: {error}"));
        let receipts = result["additional_kwargs"]["subagent_tool_receipts"].as_array().map_or(0, Vec::len);
        if receipts == 1 {
            break house;
        }
        seconds *= 4;
        assert!(seconds <= 64, "{receipts} receipts");
    };
    // First terminal status wins.
    let row = &house.executions().await[0];
    let late = threadkeep_records::ExecutionEnd {
        status: ExecutionStatus::Completed,
        error: None,
        stop_reason: None,
        usage: std::collections::BTreeMap::new(),
    };
    assert_eq!(
        house.delegator.records.executions().finish(row, late).await.unwrap().status,
        ExecutionStatus::TimedOut
    );
}

/// Scenario 12.
#[tokio::test]
async fn a_cancelled_parent_stops_its_subagents_and_settles_them() {
    let waiting = subagent(json!([
        {"text": "First.", "tool_calls": [{"name": "ls", "args": {}}], "usage": {"input_tokens": 5, "output_tokens": 1}},
        {"text": "never said", "gate": {"name": "scenario-12"}},
    ]));
    let calls = [task("a", "general-purpose"), task("b", "general-purpose")];
    let house = House::new(lead(&calls, vec![waiting]), "").await;
    let mut seen = Seen { cancel_at: Some(("task_running", CancellationToken::new())), ..Seen::default() };
    let ended = house.run("r", Some("go"), &mut seen).await.unwrap();
    assert_eq!(ended, Ended::Cancelled);
    assert_eq!(house.results().await, [] as [Json; 0], "a cancelled run has no result");
    let rows = house.executions().await;
    assert_eq!(rows.iter().map(|row| row.status).collect::<Vec<_>>(), [ExecutionStatus::Cancelled; 2]);
    assert_eq!(rows[0].error.as_deref(), Some("Cancelled by user"));
    assert_eq!(house.delegator.admission.counts().running, 0, "no slot is left");
    let reported: i64 = seen.used.iter().map(|(.., tokens)| tokens.total).sum();
    let recorded: u64 = rows
        .iter()
        .filter_map(threadkeep_records::ExecutionRow::tokens)
        .map(|tokens| tokens.total_tokens)
        .sum();
    assert_eq!(u64::try_from(reported).unwrap(), recorded, "usage is reported once");
}

/// Scenario 15.
#[tokio::test]
async fn a_subagent_cannot_delegate_whatever_its_definition_says() {
    let custom = "subagents: {custom_agents: {boss: {description: d, system_prompt: p, tools: [task, ls], disallowed_tools: []}}}";
    let rules = lead(&[task("x", "boss")], vec![subagent(json!([{"text": "ok"}]))]);
    let house = House::new(rules, custom).await;
    house.ask("go").await;
    let of_child = house.requests("subagent:boss");
    assert_eq!(of_child.len(), 1);
    assert_eq!(of_child[0]["tools"], json!(["ls"]));
    assert!(of_child[0]["system"].as_str().unwrap().starts_with("p\n\n"));
}

/// Scenario 68, bug 16.
#[tokio::test]
async fn turns_are_model_calls_and_the_last_text_decides() {
    let turns = |texts: [&str; 3]| {
        let answers: Vec<Json> = texts
            .iter()
            .enumerate()
            .map(|(index, text)| json!({"text": text, "tool_calls": [{"name": "glob", "args": {"pattern": index.to_string()}}]}))
            .collect();
        subagent(json!(answers))
    };
    let limit = "subagents: {max_turns: 3}";
    let house =
        House::new(lead(&[task("x", "general-purpose")], vec![turns(["a", "b", "partial"])]), limit).await;
    let seen = house.ask("go").await;
    assert_eq!(
        seen.types().iter().filter(|kind| **kind == "task_running").count(),
        6,
        "three answers, three results"
    );
    let result = &house.results().await[0];
    assert_eq!(result["content"], "Task Succeeded (capped: turn budget). Result: partial");
    assert_eq!(result["additional_kwargs"]["subagent_stop_reason"], "turn_capped");

    let house = House::new(lead(&[task("x", "general-purpose")], vec![turns(["a", "b", ""])]), limit).await;
    house.ask("go").await;
    let result = &house.results().await[0];
    assert_eq!(result["content"], "Task failed (capped: turn budget). Error: Reached max_turns=3");
}

/// Scenario 66, for a subagent.
#[tokio::test]
async fn a_subagent_that_used_its_tokens_ends_with_the_text_so_far() {
    let spending = subagent(json!([
        {"text": "one", "tool_calls": [{"name": "ls", "args": {}}], "usage": {"input_tokens": 700, "output_tokens": 50}},
        {"text": "two", "tool_calls": [{"name": "ls", "args": {"path": "x"}}], "usage": {"input_tokens": 200, "output_tokens": 50}},
    ]));
    let house = House::new(
        lead(&[task("x", "general-purpose")], vec![spending]),
        "subagents: {token_budget: {max_tokens: 1000}}",
    )
    .await;
    house.ask("go").await;
    let result = &house.results().await[0];
    assert!(
        result["content"].as_str().unwrap().starts_with("Task Succeeded (capped: token budget). Result: two"),
        "{result}"
    );
    assert_eq!(result["additional_kwargs"]["subagent_stop_reason"], "token_capped");
}

/// Scenarios 41 and 43: what is beyond the limits is taken out of the answer.
#[tokio::test]
async fn calls_beyond_the_limits_never_start() {
    let calls: Vec<Json> = (0..5).map(|index| task(&format!("work {index}"), "general-purpose")).collect();
    let house = House::new(lead(&calls, vec![two_turns()]), "").await;
    house.ask("go").await;
    assert_eq!(house.results().await.len(), 3, "three at once by default");
    let mut house = House::new(lead(&calls, vec![two_turns()]), "").await;
    house.limits.total = 1;
    let seen = house.ask("go").await;
    assert_eq!(seen.types().iter().filter(|kind| **kind == "task_completed").count(), 1);
    assert_eq!(house.ledger().await.len(), 1);
}

/// The calls beyond the limit are taken away before anything counts them: fifty of one tool would be a loop.
#[tokio::test]
async fn fifty_calls_in_one_answer_are_cut_to_the_limit_and_are_no_loop() {
    let calls: Vec<Json> = (0..50).map(|index| task(&format!("work {index}"), "general-purpose")).collect();
    let mut house = House::new(lead(&calls, vec![two_turns()]), "").await;
    let ended = house.run("r1", Some("go"), &mut Seen::default()).await.unwrap();
    assert_eq!(ended, Ended::Done { stop_reason: None, fallback: None });
    assert_eq!(house.results().await.len(), 3);
    assert_eq!(house.ledger().await.len(), 3);
    // The limit of the run is why it ends, if it is reached.
    house.limits.total = 0;
    let ended = house.run("r2", Some("again"), &mut Seen::default()).await.unwrap();
    let reason = Some("subagent_limit_capped".to_owned());
    assert_eq!(ended, Ended::Done { stop_reason: reason, fallback: None });
    assert_eq!(house.ledger().await.len(), 3);
}

/// Records the notifications that an extension gets.
#[derive(Default)]
struct Noting(Mutex<Vec<String>>);

#[async_trait::async_trait]
impl LifecycleHooks for Noting {
    async fn on_task_start(&self, _: &HookStore, _: &HookStore, info: &TaskInfo) {
        self.0.lock().unwrap().push(format!("{} of {} starts", info.agent_name, info.run_id));
    }

    async fn on_task_stop(&self, _: &HookStore, _: &HookStore, _: &TaskInfo, outcome: TaskConclusion) {
        self.0.lock().unwrap().push(outcome.as_str().to_owned());
    }
}

/// Scenario 78: once each, and not for work that never got a slot.
#[tokio::test]
async fn extensions_are_told_of_a_start_and_an_end() {
    let script = || lead(&[task("x", "general-purpose")], vec![two_turns()]);
    let told = |house: &mut House| {
        let noting = Arc::new(Noting::default());
        let hooks = Hooks::new(vec![Arc::clone(&noting) as Arc<dyn LifecycleHooks>]);
        Arc::get_mut(&mut house.delegator).unwrap().hooks = Arc::new(hooks);
        noting
    };
    let mut house = House::new(script(), "").await;
    let noting = told(&mut house);
    house.ask("go").await;
    assert_eq!(*noting.0.lock().unwrap(), ["general-purpose of r starts", "completed"]);

    let mut full = House::new(script(), "subagent_runtime: {max_running: 1, admission_policy: reject}").await;
    let noting = told(&mut full);
    let held = full.delegator.admission.try_acquire().unwrap();
    let seen = full.ask("go").await;
    drop(held);
    let text = "Subagent execution capacity is full (1 running, 0 queued)";
    assert_eq!(seen.events.last().unwrap()["error"], text);
    assert_eq!(full.results().await[0]["content"], format!("Task failed. Error: {text}"));
    assert_eq!(*noting.0.lock().unwrap(), [""; 0]);
}

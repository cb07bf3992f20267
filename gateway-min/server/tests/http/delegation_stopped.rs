//! Runs that are stopped in the middle of three subagents: what stays, what goes on, and what a copy, an edit and a
//! deletion make of it.

use std::time::Duration;

use axum::http::Method;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{ALL, Gateway, MODES, Setup, id};

/// A lead that delegates three tasks, or looks and then delegates one. Of most subagents, the second answer waits at a
/// gate; those of alpha and of delta are done at once.
pub(crate) fn script(name: &str) -> Value {
    let task = |prompt: &str| json!({"name": "task", "args": {"prompt": prompt, "subagent_type": "general-purpose"}});
    let subagent = |prompt: &str, gate: Option<String>| {
        let mut last = json!({"text": "Done: {{input}}", "usage": {"input_tokens": 7, "output_tokens": 2}});
        if let Some(gate) = gate {
            last["gate"] = json!({ "name": gate });
        }
        json!({"when": {"caller": "subagent", "contains": [prompt]}, "answers": [
            {"text": "Looking.", "tool_calls": [{"name": "ls", "args": {}}], "usage": {"input_tokens": 5, "output_tokens": 1}},
            last,
        ]})
    };
    json!({"rules": [
        {"when": {"caller": "middleware:summarization"}, "answers": [{"text": "They delegated."}]},
        subagent("alpha", None),
        subagent("bravo", Some(format!("{name}-bravo"))),
        subagent("charlie", Some(format!("{name}-charlie"))),
        subagent("delta", None),
        subagent("echo", Some(format!("{name}-echo"))),
        {"when": {"contains": ["delegate"]}, "answers": [
            {"text": "I delegate.", "tool_calls": [task("alpha"), task("bravo"), task("charlie")],
             "usage": {"input_tokens": 10, "output_tokens": 2}},
            {"text": "All is done.", "usage": {"input_tokens": 20, "output_tokens": 3}},
        ]},
        {"when": {"contains": ["please look"]}, "answers": [
            {"text": "I look.", "tool_calls": [{"name": "ls", "args": {}}]},
            {"text": "I delegate.", "tool_calls": [task("alpha")]},
            {"text": "All is seen."},
        ]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

/// Tokens of the subagents when the first one is done and the others have answered once; and of all when they are done.
const SO_FAR: u64 = 15 + 6 + 6;
const ALL_OF_THEM: u64 = 3 * 15;

/// A body whose run may delegate; without a question, it goes on.
pub(crate) fn delegating(question: Option<&str>) -> Value {
    let mut body = json!({"context": {"subagent_enabled": true}});
    if let Some(question) = question {
        body["input"] = json!({"messages": [{"role": "user", "content": question}]});
    }
    body
}

pub(crate) fn open(name: &str) {
    for which in ["bravo", "charlie"] {
        gate(&format!("{name}-{which}")).open();
    }
}

async fn executions(gateway: &Gateway, thread: &str) -> Vec<Value> {
    let listed = gateway.get(&format!("/api/threads/{thread}/executions")).await.ok();
    listed["executions"].as_array().unwrap().clone()
}

/// Task, status, attempt and delivery of each execution, by task.
pub(crate) async fn summary(gateway: &Gateway, thread: &str) -> Vec<Value> {
    let mut rows: Vec<Value> = executions(gateway, thread)
        .await
        .iter()
        .map(|row| json!([row["description"], row["status"], row["attempt"], row["delivered"]]))
        .collect();
    rows.sort_by_key(ToString::to_string);
    rows
}

/// The statuses in the ledger, in the order of the calls.
pub(crate) async fn ledger(gateway: &Gateway, thread: &str) -> Vec<Value> {
    let state = gateway.state(thread).await;
    let entries = state["values"]["delegations"].as_array().cloned().unwrap_or_default();
    entries.iter().map(|entry| json!([entry["description"], entry["status"]])).collect()
}

pub(crate) async fn tokens(gateway: &Gateway, thread: &str) -> (Value, Value) {
    let usage = gateway.get(&format!("/api/threads/{thread}/token-usage")).await.ok();
    (usage["by_caller"]["lead_agent"].clone(), usage["by_caller"]["subagent"].clone())
}

pub(crate) async fn results(gateway: &Gateway, thread: &str) -> Vec<String> {
    let state = gateway.state(thread).await;
    let messages = state["values"]["messages"].as_array().unwrap();
    let tools = messages.iter().filter(|message| message["type"] == "tool");
    tools.map(|message| message["content"].as_str().unwrap().to_owned()).collect()
}

/// Every slot comes back. A run does not wait for that of a subagent which takes too long to stop, as on a machine that
/// stood still.
async fn no_slot_is_left(gateway: &Gateway) {
    let line = "\nthreadkeep_subagents_active 0\n";
    let free = async {
        while !gateway.get("/metrics").await.ok().as_str().unwrap().contains(line) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), free).await.expect("a slot is left");
}

/// A gateway with a run in the middle of its subagents: the first is done, the others are asked the second time.
pub(crate) async fn in_the_middle(setup: Setup, name: &str) -> (Gateway, String) {
    in_the_middle_after(&[], setup, name).await
}

/// The same after these questions.
async fn in_the_middle_after(questions: &[&str], setup: Setup, name: &str) -> (Gateway, String) {
    let gateway = Setup { script: script(name), ..setup }.start().await;
    gateway.create("t").await;
    for question in questions {
        gateway.ask("t", question).await;
    }
    let run = gateway.post("/api/threads/t/runs", delegating(Some("please delegate"))).await.ok();
    for which in ["bravo", "charlie"] {
        gate(&format!("{name}-{which}")).reached().await;
    }
    while !summary(&gateway, "t").await[0].to_string().contains("completed") {
        tokio::task::yield_now().await;
    }
    (gateway, run["run_id"].as_str().unwrap().to_owned())
}

async fn cancelled(gateway: &Gateway, run: &str, action: &str) {
    let path = format!("/api/threads/t/runs/{run}/cancel?wait=true&action={action}");
    assert_eq!(gateway.call(Method::POST, &path, None).await.status, 204);
}

/// The same, interrupted.
pub(crate) async fn interrupted(setup: Setup, name: &str) -> Gateway {
    let (gateway, run) = in_the_middle(setup, name).await;
    cancelled(&gateway, &run, "interrupt").await;
    gateway
}

fn of_all(status: [&str; 3], attempt: u64, delivered: bool) -> Vec<Value> {
    let tasks = ["alpha", "bravo", "charlie"].into_iter().zip(status);
    tasks.map(|(task, status)| json!([task, status, attempt, delivered])).collect()
}

const STOPPED: [&str; 3] = ["completed", "cancelled", "cancelled"];

#[tokio::test]
async fn an_interrupted_run_ends_its_subagents_and_the_next_one_goes_on_with_what_they_left() {
    for (backend, mode) in ALL {
        let name = format!("stopped-interrupt-{backend}-{mode}");
        let (gateway, run) = in_the_middle(Setup::on(backend, mode), &name).await;
        cancelled(&gateway, &run, "interrupt").await;
        assert_eq!(gateway.run("t", &run).await["status"], "interrupted");
        assert_eq!(summary(&gateway, "t").await, of_all(STOPPED, 1, false), "{backend} {mode}");
        for row in executions(&gateway, "t").await {
            let error = if row["description"] == "alpha" { json!(null) } else { json!("Cancelled by user") };
            assert_eq!(row["error"], error, "{backend} {mode}");
        }
        assert_eq!(tokens(&gateway, "t").await, (json!(12), json!(SO_FAR)), "{backend} {mode}");
        no_slot_is_left(&gateway).await;
        assert_eq!(gateway.state("t").await["next"], json!(["tools", "tools", "tools"]));

        // What was cancelled is not asked again, and what it used is counted once.
        gateway.post("/api/threads/t/runs/wait", delegating(None)).await.ok();
        let expected =
            ["Task Succeeded. Result: Done: alpha", "Task cancelled by user.", "Task cancelled by user."];
        let found = results(&gateway, "t").await;
        assert!(found.iter().zip(expected).all(|(found, expected)| found.starts_with(expected)), "{found:?}");
        assert_eq!(summary(&gateway, "t").await, of_all(STOPPED, 1, true), "{backend} {mode}");
        let statuses = ledger(&gateway, "t").await;
        assert_eq!(
            json!(statuses),
            json!([["alpha", "completed"], ["bravo", "cancelled"], ["charlie", "cancelled"]])
        );
        assert_eq!(tokens(&gateway, "t").await, (json!(35), json!(SO_FAR)), "{backend} {mode}: counted once");
        no_slot_is_left(&gateway).await;
    }
}

#[tokio::test]
async fn a_run_that_is_rolled_back_leaves_no_delegation_in_its_thread() {
    for (backend, mode) in ALL {
        let name = format!("stopped-rollback-{backend}-{mode}");
        let (gateway, run) = in_the_middle(Setup::on(backend, mode), &name).await;
        cancelled(&gateway, &run, "rollback").await;
        assert_eq!(summary(&gateway, "t").await, of_all(STOPPED, 1, false), "{backend} {mode}");
        assert_eq!(ledger(&gateway, "t").await, [] as [Value; 0], "{backend} {mode}");
        assert_eq!(
            tokens(&gateway, "t").await,
            (json!(12), json!(SO_FAR)),
            "{backend} {mode}: spent all the same"
        );
        no_slot_is_left(&gateway).await;
        open(&name);
        gateway.post("/api/threads/t/runs/wait", delegating(Some("please delegate"))).await.ok();
        assert_eq!(results(&gateway, "t").await.len(), 3);
        assert_eq!(executions(&gateway, "t").await.len(), 6, "they are others");
        assert_eq!(
            tokens(&gateway, "t").await,
            (json!(12 + 35), json!(SO_FAR + ALL_OF_THEM)),
            "{backend} {mode}"
        );
    }
}

#[tokio::test]
async fn a_new_question_turns_away_from_what_was_delegated() {
    for (backend, mode) in ALL {
        let name = format!("stopped-question-{backend}-{mode}");
        let gateway = interrupted(Setup::on(backend, mode), &name).await;
        gateway.post("/api/threads/t/runs/wait", delegating(Some("hello"))).await.ok();
        let entries = ledger(&gateway, "t").await;
        assert_eq!(entries.len(), 3);
        assert!(entries.iter().all(|entry| entry[1] != "in_progress"), "{backend} {mode}: {entries:?}");
        assert_eq!(summary(&gateway, "t").await, of_all(STOPPED, 1, false), "{backend} {mode}");
        assert_eq!(tokens(&gateway, "t").await.1, json!(SO_FAR));
        open(&name);
        gateway.post("/api/threads/t/runs/wait", delegating(Some("please delegate"))).await.ok();
        assert_eq!(executions(&gateway, "t").await.len(), 6, "{backend} {mode}: none is reused");
        assert_eq!(tokens(&gateway, "t").await, (json!(12 + 35), json!(SO_FAR + ALL_OF_THEM)));

        // The conversation has no result of the first three: a run from before that question gets what they left.
        let mut first = of_all(STOPPED, 1, false);
        first.extend(of_all(["completed"; 3], 1, true));
        first.sort_by_key(ToString::to_string);
        assert_eq!(summary(&gateway, "t").await, first, "{backend} {mode}");
        let history = gateway.history("t").await;
        let before = history.iter().rfind(|state| state["next"][0] == "tools").unwrap();
        let mut body = delegating(None);
        body["checkpoint"] = json!({"checkpoint_ns": "", "checkpoint_id": id(before)});
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        let expected =
            ["Task Succeeded. Result: Done: alpha", "Task cancelled by user.", "Task cancelled by user."];
        let found = results(&gateway, "t").await;
        assert!(found.iter().zip(expected).all(|(found, expected)| found.starts_with(expected)), "{found:?}");
        assert_eq!(executions(&gateway, "t").await.len(), 6, "{backend} {mode}: no further attempt");
        assert_eq!(tokens(&gateway, "t").await, (json!(12 + 35 + 23), json!(SO_FAR + ALL_OF_THEM)));
    }
}

#[tokio::test]
async fn a_thread_takes_its_subagents_along_when_it_is_deleted_after_a_cancellation() {
    for mode in MODES {
        let name = format!("stopped-delete-{mode}");
        let (gateway, run) = in_the_middle(Setup::on("sqlite", mode), &name).await;
        assert_eq!(gateway.delete("/api/threads/t").await.status, 409);
        cancelled(&gateway, &run, "interrupt").await;
        gateway.delete("/api/threads/t").await.ok();
        assert_eq!(executions(&gateway, "t").await, [] as [Value; 0]);
        let mut left = gateway.rows().await;
        left.retain(|table, rows| *rows > 0 && !table.ends_with("grave"));
        for table in ["executions", "threads", "runs", "run_events"] {
            assert_eq!(left.get(&format!("gateway.db.{table}")), None, "{mode}: {left:?}");
        }
        for table in ["checkpoint", "thread", "write"] {
            assert_eq!(left.get(&format!("checkpoints.db.{table}")), None, "{mode}: {left:?}");
        }
    }
}

#[tokio::test]
async fn a_copy_asks_its_own_subagents_and_leaves_its_source_alone() {
    for mode in MODES {
        let name = format!("stopped-copy-{mode}");
        let gateway = interrupted(Setup::on("memory", mode), &name).await;
        let source = executions(&gateway, "t").await;
        let copy = gateway.post("/api/threads/t/copy", json!({})).await.ok();
        let copy = copy["thread_id"].as_str().unwrap();
        assert_eq!(executions(&gateway, copy).await, [] as [Value; 0]);
        open(&name);
        gateway.post(&format!("/api/threads/{copy}/runs/wait"), delegating(None)).await.ok();
        let expected =
            ["alpha", "bravo", "charlie"].map(|task| format!("Task Succeeded. Result: Done: {task}"));
        assert_eq!(results(&gateway, copy).await, expected, "{mode}");
        let of_copy = summary(&gateway, copy).await;
        assert!(of_copy.iter().all(|row| row[1] == "completed" && row[3] == true), "{of_copy:?}");
        assert_eq!(executions(&gateway, "t").await, source, "{mode}");
        gateway.delete(&format!("/api/threads/{copy}")).await.ok();
        assert_eq!(executions(&gateway, "t").await, source, "{mode}");
        gateway.post("/api/threads/t/runs/wait", delegating(None)).await.ok();
        assert_eq!(summary(&gateway, "t").await, of_all(STOPPED, 1, true), "{mode}");
    }
}

/// Scenario 44, first half: the ledger is no part of what a summary replaces.
#[tokio::test]
async fn a_branch_and_a_summary_keep_the_ledger_and_a_branch_takes_no_subagent() {
    for mode in MODES {
        let name = format!("stopped-branch-{mode}");
        let sections = json!({"summarization": {"enabled": true}});
        let gateway = interrupted(Setup { sections, ..Setup::on("memory", mode) }, &name).await;
        gateway.post("/api/threads/t/runs/wait", delegating(None)).await.ok();
        let kept = ledger(&gateway, "t").await;
        let state = gateway.state("t").await;
        let answer = state["values"]["messages"].as_array().unwrap().last().unwrap()["id"].clone();
        let branch = gateway.post("/api/threads/t/branches", json!({ "message_id": answer })).await.ok();
        let branch = branch["thread_id"].as_str().unwrap();
        assert_eq!(ledger(&gateway, branch).await, kept, "{mode}: it says what the conversation says");
        assert_eq!(executions(&gateway, branch).await, [] as [Value; 0]);
        assert_eq!(tokens(&gateway, branch).await.1, json!(0));

        gateway.ask("t", "one").await;
        let keep = json!({"keep": {"type": "messages", "value": 2}});
        let done = gateway.post("/api/threads/t/compact", keep).await.ok();
        assert_eq!(done["compacted"], true, "{done}");
        assert_eq!(ledger(&gateway, "t").await, kept, "{mode}");
        assert_eq!(summary(&gateway, "t").await, of_all(STOPPED, 1, true), "{mode}");
    }
}

#[tokio::test]
async fn who_goes_back_asks_again_after_a_delivery_and_anew_before_the_answer() {
    for mode in MODES {
        let name = format!("stopped-back-{mode}");
        open(&name);
        let gateway = Setup { script: script(&name), ..Setup::on("memory", mode) }.start().await;
        gateway.create("t").await;
        gateway.post("/api/threads/t/runs/wait", delegating(Some("please delegate"))).await.ok();
        let history = gateway.history("t").await;
        let before_tools = history.iter().find(|state| state["next"][0] == "tools").unwrap();
        let mut body = delegating(None);
        body["checkpoint"] = json!({"checkpoint_ns": "", "checkpoint_id": id(before_tools)});
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        let all = |status: &str, attempt| of_all([status; 3], attempt, true);
        let mut expected = [all("completed", 1), all("completed", 2)].concat();
        expected.sort_by_key(ToString::to_string);
        assert_eq!(summary(&gateway, "t").await, expected, "{mode}");
        assert_eq!(tokens(&gateway, "t").await, (json!(35 + 23), json!(2 * ALL_OF_THEM)), "{mode}");
        assert!(ledger(&gateway, "t").await.iter().all(|entry| entry[1] == "completed"), "{mode}");
        assert_eq!(ledger(&gateway, "t").await.len(), 3);

        let state = gateway.state("t").await;
        let question = state["values"]["messages"][0]["id"].clone();
        let edit = json!({"human_message_id": question, "replacement_text": "delegate it again"});
        let prepared = gateway.post("/api/threads/t/runs/edit-regenerate/prepare", edit).await.ok();
        let mut body = delegating(None);
        for key in ["input", "checkpoint", "metadata"] {
            body[key] = prepared[key].clone();
        }
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        assert_eq!(executions(&gateway, "t").await.len(), 9, "{mode}");
        assert_eq!(ledger(&gateway, "t").await.len(), 3, "{mode}: of this conversation");
        assert_eq!(results(&gateway, "t").await.len(), 3);
        no_slot_is_left(&gateway).await;
    }
}

/// What would take the conversation of three subagents at work elsewhere, or change it.
fn changes(state: &Value) -> [(&'static str, Value); 4] {
    let messages = state["values"]["messages"].as_array().unwrap();
    let of = |kind: &str| messages.iter().rfind(|message| message["type"] == kind).unwrap()["id"].clone();
    [
        ("branches", json!({"message_id": of("ai")})),
        ("copy", json!({})),
        ("compact", json!({"keep": {"type": "messages", "value": 2}})),
        (
            "runs/edit-regenerate/prepare",
            json!({"human_message_id": of("human"), "replacement_text": "other"}),
        ),
    ]
}

#[tokio::test]
async fn a_thread_in_the_middle_of_its_subagents_is_not_branched_copied_edited_or_compacted() {
    for (backend, mode) in ALL {
        let name = format!("stopped-busy-{backend}-{mode}");
        let sections = json!({"summarization": {"enabled": true}});
        let setup = Setup { sections, ..Setup::on(backend, mode) };
        let (gateway, run) = in_the_middle_after(&["one", "two"], setup, &name).await;
        let state = gateway.state("t").await;
        for (path, body) in changes(&state) {
            let refused = gateway.post(&format!("/api/threads/t/{path}"), body).await;
            assert_eq!(refused.status, 409, "{backend} {mode}: {path}");
        }
        assert_eq!(gateway.delete("/api/threads/t").await.status, 409);
        assert_eq!(gateway.state("t").await["checkpoint_id"], state["checkpoint_id"], "{backend} {mode}");
        assert_eq!(gateway.post("/api/threads/count", json!({})).await.ok(), json!(1));
        open(&name);
        gateway.join("t", &run).await;
        assert_eq!(summary(&gateway, "t").await, of_all(["completed"; 3], 1, true), "{backend} {mode}");
        assert_eq!(tokens(&gateway, "t").await, (json!(35), json!(ALL_OF_THEM)));
        no_slot_is_left(&gateway).await;
    }
}

/// A summary of what came before an interrupted delegation leaves the delegation to the run that goes on.
#[tokio::test]
async fn a_thread_that_was_stopped_among_its_subagents_goes_on_after_a_summary() {
    for (backend, mode) in ALL {
        let name = format!("stopped-compact-{backend}-{mode}");
        let sections = json!({"summarization": {"enabled": true}});
        let setup = Setup { sections, ..Setup::on(backend, mode) };
        let (gateway, run) = in_the_middle_after(&["one", "two"], setup, &name).await;
        cancelled(&gateway, &run, "interrupt").await;
        let state = gateway.state("t").await;
        let [_, _, (_, keep), (_, edit)] = changes(&state);
        // Only the turn of a successful run is edited.
        let refused = gateway.post("/api/threads/t/runs/edit-regenerate/prepare", edit).await;
        assert_eq!(refused.status, 409, "{backend} {mode}");
        let done = gateway.post("/api/threads/t/compact", keep).await.ok();
        assert_eq!(done["compacted"], true, "{backend} {mode}: {done}");
        gateway.post("/api/threads/t/runs/wait", delegating(None)).await.ok();
        let expected =
            ["Task Succeeded. Result: Done: alpha", "Task cancelled by user.", "Task cancelled by user."];
        let found = results(&gateway, "t").await;
        assert_eq!(found.len(), 3, "{backend} {mode}");
        assert!(found.iter().zip(expected).all(|(found, expected)| found.starts_with(expected)), "{found:?}");
        assert_eq!(summary(&gateway, "t").await, of_all(STOPPED, 1, true), "{backend} {mode}");
        assert_eq!(tokens(&gateway, "t").await, (json!(35), json!(SO_FAR)), "{backend} {mode}: counted once");
        no_slot_is_left(&gateway).await;
    }
}

/// A process stops in the middle of the subagents. A change of the state in the next one is no new question: its run
/// goes on with them, and asks none of them twice.
#[tokio::test]
async fn an_update_of_a_stopped_run_goes_on_with_its_subagents() {
    let beside = [json!({}), json!({"resume": "go on"}), json!({"goto": "tools"})];
    for (at, mut command) in beside.into_iter().enumerate() {
        command["update"] = json!({"title": "Seen"});
        for mode in MODES {
            let name = format!("stopped-update-{at}-{mode}");
            let (gateway, _) = in_the_middle(Setup::on("sqlite", mode), &name).await;
            let gateway = gateway.reopen(mode).await;
            let left = ["completed", "running", "running"];
            assert_eq!(summary(&gateway, "t").await, of_all(left, 1, false), "{command} {mode}");
            open(&name);
            let mut body = delegating(None);
            body["command"] = command.clone();
            gateway.post("/api/threads/t/runs/wait", body).await.ok();
            let expected =
                ["alpha", "bravo", "charlie"].map(|task| format!("Task Succeeded. Result: Done: {task}"));
            assert_eq!(results(&gateway, "t").await, expected, "{command} {mode}");
            assert_eq!(summary(&gateway, "t").await, of_all(["completed"; 3], 1, true), "{command} {mode}");
            assert_eq!(gateway.state("t").await["values"]["title"], "Seen");
            assert_eq!(tokens(&gateway, "t").await, (json!(35), json!(ALL_OF_THEM)), "{command} {mode}");
        }
    }
}

//! Calls of `task` that a client edits, adds or takes away before a run goes on with their answer.

use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::delegation_stopped::{
    delegating, in_the_middle, interrupted, ledger, open, results, script, summary, tokens,
};
use crate::support::{Gateway, MODES, Setup};

/// A call of `task` that a client makes.
fn call(prompt: &str) -> Value {
    let args = json!({"prompt": prompt, "subagent_type": "general-purpose"});
    json!({"type": "tool_call", "name": "task", "id": format!("call-{prompt}"), "args": args})
}

/// The body of a run that goes on with the thread's last answer after this change of its calls.
async fn with_calls(gateway: &Gateway, change: impl FnOnce(&mut Vec<Value>)) -> Value {
    let state = gateway.state("t").await;
    let messages = state["values"]["messages"].as_array().unwrap();
    let mut answer = messages.iter().rfind(|message| message["type"] == "ai").unwrap().clone();
    change(answer["tool_calls"].as_array_mut().unwrap());
    let mut body = delegating(None);
    body["command"] = json!({"update": {"messages": [answer]}});
    body
}

fn succeeded(tasks: &[&str]) -> Vec<String> {
    tasks.iter().map(|task| format!("Task Succeeded. Result: Done: {task}")).collect()
}

/// A process stops in the middle of three subagents, and a client edits the call of one.
#[tokio::test]
async fn an_edited_call_is_made_with_its_new_content_and_the_others_go_on() {
    for mode in MODES {
        let name = format!("edited-one-{mode}");
        let (gateway, _) = in_the_middle(Setup::on("sqlite", mode), &name).await;
        let gateway = gateway.reopen(mode).await;
        open(&name);
        let body = with_calls(&gateway, |calls| calls[2]["args"]["prompt"] = json!("delta")).await;
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        assert_eq!(results(&gateway, "t").await, succeeded(&["alpha", "bravo", "delta"]), "{mode}");
        let expected = [
            json!(["alpha", "completed", 1, true]),
            json!(["bravo", "completed", 1, true]),
            json!(["charlie", "cancelled", 1, true]),
            json!(["delta", "completed", 1, true]),
        ];
        assert_eq!(summary(&gateway, "t").await, expected, "{mode}");
        let expected = [("alpha", "completed"), ("bravo", "completed"), ("charlie", "cancelled")];
        let expected = expected.into_iter().chain([("delta", "completed")]);
        let expected: Vec<Value> = expected.map(|(task, status)| json!([task, status])).collect();
        assert_eq!(ledger(&gateway, "t").await, expected, "{mode}");
        // Three whole ones, and the first answer of the one that was edited.
        assert_eq!(tokens(&gateway, "t").await, (json!(35), json!(3 * 15 + 6)), "{mode}");
    }
}

/// The same by a write to the state, after which the run goes to the tools.
#[tokio::test]
async fn a_call_that_a_write_to_the_state_edits_is_made_with_its_new_content() {
    for mode in MODES {
        let name = format!("edited-state-{mode}");
        let (gateway, _) = in_the_middle(Setup::on("sqlite", mode), &name).await;
        let gateway = gateway.reopen(mode).await;
        open(&name);
        let mut messages = gateway.state("t").await["values"]["messages"].clone();
        let answer = messages.as_array_mut().unwrap().last_mut().unwrap();
        answer["tool_calls"][2]["args"]["prompt"] = json!("delta");
        gateway.post("/api/threads/t/state", json!({"values": {"messages": messages}})).await.ok();
        let mut body = delegating(None);
        body["command"] = json!({"goto": "tools"});
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        assert_eq!(results(&gateway, "t").await, succeeded(&["alpha", "bravo", "delta"]), "{mode}");
        let rows = summary(&gateway, "t").await;
        assert!(rows.contains(&json!(["charlie", "cancelled", 1, true])), "{mode}: {rows:?}");
        assert_eq!(rows.len(), 4, "{mode}: {rows:?}");
    }
}

/// A run is interrupted when one of three subagents is done: its result is not that of another call, and what was
/// cancelled stays so.
#[tokio::test]
async fn an_edited_call_does_not_get_the_result_of_the_call_before() {
    for mode in MODES {
        let gateway = interrupted(Setup::on("memory", mode), &format!("edited-done-{mode}")).await;
        let body = with_calls(&gateway, |calls| {
            calls[0]["args"]["prompt"] = json!("delta");
            calls.pop();
        });
        gateway.post("/api/threads/t/runs/wait", body.await).await.ok();
        let found = results(&gateway, "t").await;
        let [done, cancelled] = &found[..] else { panic!("{mode}: {found:?}") };
        assert_eq!(*done, succeeded(&["delta"])[0], "{mode}");
        assert!(cancelled.starts_with("Task cancelled by user."), "{mode}: {cancelled}");
    }
}

/// A client edits a call, and takes that back after the process has stopped once more.
#[tokio::test]
async fn a_call_that_is_changed_back_is_made_again() {
    for mode in MODES {
        let name = format!("edited-back-{mode}");
        let (gateway, _) = in_the_middle(Setup::on("sqlite", mode), &name).await;
        let gateway = gateway.reopen(mode).await;
        let body = with_calls(&gateway, |calls| calls[2]["args"]["prompt"] = json!("echo")).await;
        gateway.post("/api/threads/t/runs", body).await.ok();
        gate(&format!("{name}-echo")).reached().await;
        let gateway = gateway.reopen(mode).await;
        open(&name);
        let body = with_calls(&gateway, |calls| calls[2]["args"]["prompt"] = json!("charlie")).await;
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        assert_eq!(results(&gateway, "t").await, succeeded(&["alpha", "bravo", "charlie"]), "{mode}");
        let expected = [
            json!(["alpha", "completed", 1, true]),
            json!(["bravo", "completed", 1, true]),
            json!(["charlie", "cancelled", 1, true]),
            json!(["charlie", "completed", 2, true]),
            json!(["echo", "cancelled", 1, true]),
        ];
        assert_eq!(summary(&gateway, "t").await, expected, "{mode}");
    }
}

/// A process stops while a subagent works whose call a client has added. The head moves before the call is repeated.
#[tokio::test]
async fn an_added_call_is_made_once_wherever_the_head_is() {
    for mode in MODES {
        let name = format!("edited-added-{mode}");
        let (gateway, _) = in_the_middle(Setup::on("sqlite", mode), &name).await;
        let gateway = gateway.reopen(mode).await;
        let body = with_calls(&gateway, |calls| calls.push(call("echo"))).await;
        gateway.post("/api/threads/t/runs", body).await.ok();
        gate(&format!("{name}-echo")).reached().await;
        let gateway = gateway.reopen(mode).await;
        open(&name);
        gate(&format!("{name}-echo")).open();
        let mut body = delegating(None);
        body["command"] = json!({"update": {"title": "Seen"}});
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        let tasks = ["alpha", "bravo", "charlie", "echo"];
        assert_eq!(results(&gateway, "t").await, succeeded(&tasks), "{mode}");
        let expected = tasks.map(|task| json!([task, "completed", 1, true]));
        assert_eq!(summary(&gateway, "t").await, expected, "{mode}");
        assert_eq!(ledger(&gateway, "t").await, tasks.map(|task| json!([task, "completed"])), "{mode}");
        assert_eq!(tokens(&gateway, "t").await, (json!(35), json!(4 * 15)), "{mode}");
    }
}

/// A thread before the calls of an answer that delegates nothing.
async fn before_the_tools(gateway: &Gateway) {
    gateway.create("t").await;
    let mut body = delegating(Some("please look"));
    body["interrupt_before"] = json!(["tools"]);
    gateway.post("/api/threads/t/runs/wait", body).await.ok();
}

#[tokio::test]
async fn an_added_call_is_cancelled_when_the_conversation_turns_away_from_it() {
    for mode in MODES {
        let name = format!("edited-left-{mode}");
        let gateway = Setup { script: script(&name), ..Setup::on("sqlite", mode) }.start().await;
        before_the_tools(&gateway).await;
        let body = with_calls(&gateway, |calls| *calls = vec![call("echo")]).await;
        gateway.post("/api/threads/t/runs", body).await.ok();
        gate(&format!("{name}-echo")).reached().await;
        let gateway = gateway.reopen(mode).await;
        assert_eq!(summary(&gateway, "t").await, [json!(["echo", "running", 1, false])], "{mode}");
        gateway.post("/api/threads/t/runs/wait", delegating(Some("Anything else?"))).await.ok();
        assert_eq!(summary(&gateway, "t").await, [json!(["echo", "cancelled", 1, false])], "{mode}");
    }
}

/// The same after a write to the state, from which on the thread waits for no call.
#[tokio::test]
async fn an_added_call_is_cancelled_also_after_a_write_to_the_state() {
    for mode in MODES {
        let name = format!("edited-written-{mode}");
        let gateway = Setup { script: script(&name), ..Setup::on("sqlite", mode) }.start().await;
        before_the_tools(&gateway).await;
        let body = with_calls(&gateway, |calls| *calls = vec![call("echo")]).await;
        gateway.post("/api/threads/t/runs", body).await.ok();
        gate(&format!("{name}-echo")).reached().await;
        let gateway = gateway.reopen(mode).await;
        gateway.post("/api/threads/t/state", json!({"values": {"title": "Seen"}})).await.ok();
        assert_eq!(gateway.state("t").await["next"], json!([]), "{mode}");
        assert_eq!(summary(&gateway, "t").await, [json!(["echo", "running", 1, false])], "{mode}");
        gateway.post("/api/threads/t/runs/wait", delegating(Some("Anything else?"))).await.ok();
        assert_eq!(summary(&gateway, "t").await, [json!(["echo", "cancelled", 1, false])], "{mode}");
    }
}

/// The limits take calls out of the model's answers. A call that a client adds is made, and the model has one less.
#[tokio::test]
async fn an_added_call_is_one_of_the_delegations_of_its_run() {
    for mode in MODES {
        let name = format!("edited-counted-{mode}");
        let gateway = Setup { script: script(&name), ..Setup::on("memory", mode) }.start().await;
        gate(&format!("{name}-echo")).open();
        before_the_tools(&gateway).await;
        let mut body = with_calls(&gateway, |calls| *calls = vec![call("echo")]).await;
        body["context"]["max_total_subagents"] = json!(1);
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        assert_eq!(summary(&gateway, "t").await, [json!(["echo", "completed", 1, true])], "{mode}");
        let state = gateway.state("t").await;
        let last = state["values"]["messages"].as_array().unwrap().last().unwrap();
        let text = last["content"].to_string();
        assert!(text.contains("[SUBAGENT LIMIT REACHED]"), "{mode}: {text}");
    }
}

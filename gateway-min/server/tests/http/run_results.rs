//! The answer to a client that waits for a run: the state in which that run ended, whatever the thread does next.

use axum::http::Method;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{ALL, Gateway, Setup};

fn script(gate: &str) -> Value {
    json!({"rules": [
        {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": gate}}]},
        {"when": {"contains": ["fail"]}, "answers": [{"error": {"kind": "fatal", "message": "no such model"}}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

/// The contents of the messages of channel values; none without messages.
fn said(values: &Value) -> Vec<&str> {
    let messages = values["messages"].as_array().into_iter().flatten();
    messages.map(|message| message["content"].as_str().unwrap()).collect()
}

async fn joined(gateway: &Gateway, run: &str) -> Value {
    gateway.get(&format!("/api/threads/t/runs/{run}/join")).await.ok()
}

/// Starts a run that works until the gate is open, and waits until the thread has its question.
async fn at_work(gateway: &Gateway, name: &str) -> String {
    let run = gateway.start_run("t", "wait").await;
    gate(name).reached().await;
    while said(&gateway.state("t").await["values"]).last() != Some(&"wait") {}
    run
}

#[tokio::test]
async fn a_joined_run_is_answered_with_the_state_in_which_it_ended() {
    for (backend, mode) in ALL {
        let name = |part: &str| format!("results-{backend}-{mode}-{part}");
        // A first run that is rolled back leaves no state, and the one after it does not show it one.
        let gateway = Setup { script: script(&name("none")), ..Setup::on(backend, mode) }.start().await;
        gateway.create("t").await;
        let gone = at_work(&gateway, &name("none")).await;
        let cancel = format!("/api/threads/t/runs/{gone}/cancel?action=rollback&wait=true");
        assert_eq!(gateway.call(Method::POST, &cancel, None).await.status, 204);
        let answered = gateway.ask("t", "one").await;
        let values = joined(&gateway, &gone).await;
        assert_eq!((said(&values), &values["status"]), (vec![], &json!("error")), "{backend} {mode}");
        let values = joined(&gateway, &answered).await;
        assert_eq!(said(&values), ["one", "You said: one"], "{backend} {mode}");

        gate(&name("none")).open();
        let gateway = Setup { script: script(&name("back")), ..Setup::on(backend, mode) }.start().await;
        gateway.create("t").await;
        let failed = gateway.ask("t", "fail").await;
        let after_failure = joined(&gateway, &failed).await;
        assert_eq!(after_failure["status"], "error");
        let back = at_work(&gateway, &name("back")).await;
        let cancel = format!("/api/threads/t/runs/{back}/cancel?action=rollback&wait=true");
        assert_eq!(gateway.call(Method::POST, &cancel, None).await.status, 204);
        let after_rollback = joined(&gateway, &back).await;
        assert_eq!(said(&after_rollback), said(&after_failure), "{backend} {mode}");

        // The next one is at work, and what a person changes comes after it.
        let last = gateway.ask("t", "two").await;
        let after_last = joined(&gateway, &last).await;
        gateway.post("/api/threads/t/state", json!({"values": {"title": "Another"}})).await.ok();
        gateway.ask("t", "three").await;
        for (run, expected) in [(failed, after_failure), (back, after_rollback), (last, after_last)] {
            assert_eq!(joined(&gateway, &run).await, expected, "{backend} {mode}");
        }
    }
}

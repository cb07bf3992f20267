//! The answer to a client that waits for a run: the state in which that run ended, whatever the thread does next.

use axum::http::Method;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::support::{ALL, Gateway, Setup, connect};

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

/// What a run was asked may be of any size. It is read where it is shown, and nowhere else: here, where reading it fails.
#[tokio::test]
async fn only_what_shows_the_request_of_a_run_reads_it() {
    let gateway = Setup { script: script("unused"), ..Setup::on("sqlite", "delta") }.start().await;
    gateway.create("t").await;
    gateway.ask("t", "one").await;
    // Its duration is not noted in the thread, so that the history looks for it in the records.
    let run = gateway.ask("t", "fail").await;
    let database = connect(&gateway.data().join("gateway.db"));
    let unreadable = "ALTER TABLE runs RENAME COLUMN kwargs_json TO kept; \
         ALTER TABLE runs ADD COLUMN kwargs_json TEXT GENERATED ALWAYS AS (json(kept || '?')) VIRTUAL";
    database.execute_batch(unreadable).unwrap();
    for whole in ["/api/threads/t/runs", "/api/threads/t/runs?select=kwargs"] {
        assert_eq!(gateway.get(whole).await.status, 503, "{whole}: it cannot be read");
    }
    let run = format!("/api/threads/t/runs/{run}");
    assert_eq!(gateway.get(&run).await.status, 503);
    let usage = gateway.get("/api/threads/t/token-usage").await.ok();
    assert_eq!((&usage["total_runs"], &usage["by_model"]["m"]["runs"]), (&json!(2), &json!(2)), "{usage}");
    let listed = gateway.get("/api/threads/t/runs?select=run_id&select=status").await.ok();
    assert_eq!(listed[0]["status"], "error");
    assert_eq!(gateway.get("/api/runs").await.ok().as_array().unwrap().len(), 2);
    let history = gateway.post("/api/threads/t/history", json!({"limit": 1})).await.ok();
    assert!(history[0]["values"]["messages"].as_array().unwrap().len() > 2, "{history}");
    for read in ["/api/threads/t", "/api/threads/t/state", "/threads/t", "/threads/t/runs", "/runs"] {
        assert_eq!(gateway.get(read).await.status, 200, "{read}");
    }
    gateway.get(&format!("{run}/join")).await.ok();
    for stream in ["/api/threads/t/stream", &format!("{run}/stream")] {
        let request = axum::http::Request::get(stream).body(axum::body::Body::empty()).unwrap();
        assert_eq!(gateway.open_answer(request).await.status(), 200, "{stream}");
    }
    let cancelled = gateway.call(Method::POST, &format!("{run}/cancel"), None).await;
    assert_eq!(cancelled.status, 409, "it has ended");
}

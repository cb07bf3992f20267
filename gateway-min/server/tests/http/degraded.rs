//! Threads whose agent cannot be built (service reference, "Other rules" 2). Reading a thread needs its channels and no
//! agent, so no fallback is necessary: it reads whole in both modes, with the compatibility gate in front, and a run on
//! it fails before it writes anything.

use axum::http::Method;
use serde_json::{Value, json};

use crate::support::{ALL, DURABLE, Gateway, Setup, id, question, texts};

const MISMATCH: &str =
    "Thread requires delta mode; materialize and convert its checkpoints before using full mode.";

/// From now on no agent can be built: the script of the only model is gone.
fn without_an_agent(gateway: &mut Gateway) {
    let model = json!({"name": "m", "use": "scripted", "model": "m", "script": "gone.json"});
    gateway
        .reconfigure(|setup| setup.sections = json!({"models": [model], "summarization": {"enabled": true}}));
}

/// A gateway with two turns on thread `t`, and the checkpoint after the first.
async fn two_turns(backend: &'static str, mode: &'static str) -> (Gateway, String) {
    let gateway = Setup::on(backend, mode).start().await;
    gateway.create("t").await;
    gateway.ask("t", "one").await;
    let older = id(&gateway.state("t").await).to_owned();
    gateway.ask("t", "two").await;
    (gateway, older)
}

/// What the reading routes show of thread `t`.
async fn shown(gateway: &Gateway, older: &str) -> Vec<Value> {
    let mut shown = Vec::new();
    for path in ["", "/state", &format!("/state/{older}"), "/goal", "/token-usage", "/runs"] {
        shown.push(gateway.get(&format!("/api/threads/t{path}")).await.ok());
    }
    shown.push(gateway.post("/api/threads/t/history", json!({"limit": 100})).await.ok());
    let last = gateway.state("t").await["values"]["messages"][3]["id"].clone();
    shown.push(
        gateway.post("/api/threads/t/runs/regenerate/prepare", json!({ "message_id": last })).await.ok(),
    );
    shown
}

#[tokio::test]
async fn a_thread_whose_agent_cannot_be_built_reads_whole_and_is_written_from_outside_of_runs() {
    for (backend, mode) in ALL {
        let (mut gateway, older) = two_turns(backend, mode).await;
        gateway.history("t").await;
        let before = shown(&gateway, &older).await;
        without_an_agent(&mut gateway);
        assert_eq!(shown(&gateway, &older).await, before, "{backend} {mode}");
        // A summary needs a model; a title does not.
        let refused = gateway.post("/api/threads/t/compact", json!({})).await;
        refused.refused(500, "Failed to compact thread context.");
        assert_eq!(shown(&gateway, &older).await, before, "{backend} {mode}");
        gateway.post("/api/threads/t/state", json!({"values": {"title": "Other"}})).await.ok();
        assert_eq!(gateway.get("/api/threads/t").await.ok()["values"]["title"], "Other");
    }
}

/// Not even a restored older state is written, which in delta mode is such a run's first write.
#[tokio::test]
async fn a_run_whose_agent_cannot_be_built_fails_and_leaves_the_thread_as_it_was() {
    for (backend, mode) in ALL {
        let (mut gateway, older) = two_turns(backend, mode).await;
        let (state, history) = (gateway.state("t").await, gateway.history("t").await);
        without_an_agent(&mut gateway);
        let mut from_older = question("three");
        from_older["checkpoint_id"] = json!(older);
        let mut edit = from_older.clone();
        edit["metadata"] = json!({"replay_kind": "edit"});
        for body in [question("three"), from_older, edit] {
            let answer = gateway.post("/api/threads/t/runs/wait", body).await.ok();
            assert_eq!(answer["status"], "error");
            let told = answer["error"].as_str().unwrap();
            assert!(told.contains("gone.json"), "{told}");
            assert_eq!(texts(&json!({ "values": answer })), texts(&state), "{backend} {mode}");
            assert_eq!(gateway.state("t").await, state);
            assert_eq!(gateway.history("t").await, history, "{backend} {mode}");
        }
        assert_eq!(gateway.get("/api/threads/t").await.ok()["status"], "idle", "nothing is left to run");
    }
}

#[tokio::test]
async fn the_gate_comes_before_an_agent_that_cannot_be_built() {
    for backend in DURABLE {
        let gateway = Setup::on(backend, "delta").start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        let mut gateway = gateway.reopen("full").await;
        without_an_agent(&mut gateway);
        let text = format!("Thread t: {MISMATCH}");
        for (method, path, body) in [
            (Method::GET, "", None),
            (Method::GET, "/state", None),
            (Method::POST, "/history", Some(json!({}))),
            (Method::POST, "/compact", Some(json!({}))),
        ] {
            gateway.call(method, &format!("/api/threads/t{path}"), body).await.refused(409, &text);
        }
        let answer = gateway.post("/api/threads/t/runs/wait", question("two")).await.ok();
        assert_eq!((&answer["status"], &answer["error"]), (&json!("error"), &json!(MISMATCH)));
    }
}

//! Runs that make the last turn again with another text and do not complete: the old turn takes its place again.

use axum::http::{Method, Request};
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::sse::{self, Frame, names};
use crate::support::{ALL, Gateway, MODES, Setup, id, texts};

/// Fails on `fail`, circles on `loop`, waits at `gate` on `wait`; else answers.
fn setup(backend: &'static str, mode: &'static str, gate: &str) -> Setup {
    let script = json!({"rules": [
        {"when": {"contains": ["fail"]}, "answers": [{"error": {"kind": "fatal", "message": "no such model"}}]},
        {"when": {"contains": ["loop"]}, "repeat_last": true, "answers": [{"tool_calls": [{"name": "ls"}]}]},
        {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": gate}}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]});
    Setup { script, ..Setup::on(backend, mode) }
}

/// A thread `t` with these turns.
async fn with_turns(setup: Setup, turns: &[&str]) -> Gateway {
    let gateway = setup.start().await;
    gateway.create("t").await;
    for text in turns {
        gateway.ask("t", text).await;
    }
    gateway
}

/// The body of a run that makes the last turn of `t` again with this text.
async fn edited(gateway: &Gateway, text: &str) -> Value {
    let state = gateway.state("t").await;
    let messages = state["values"]["messages"].as_array().unwrap();
    let question = messages.iter().rfind(|message| message["type"] == "human").unwrap();
    let body = json!({"human_message_id": question["id"], "replacement_text": text});
    let prepared = gateway.post("/api/threads/t/runs/edit-regenerate/prepare", body).await.ok();
    json!({"input": prepared["input"], "checkpoint": prepared["checkpoint"], "metadata": prepared["metadata"]})
}

/// Streams a run to its end; returns its frames and its record.
async fn streamed(gateway: &Gateway, body: Value) -> (Vec<Frame>, Value) {
    let request = Request::post("/api/threads/t/runs/stream").header("content-type", "application/json");
    let answer = gateway.open_answer(request.body(body.to_string().into()).unwrap()).await;
    let frames = sse::all(answer).await;
    let runs = gateway.get("/api/threads/t/runs?limit=1").await.ok();
    (frames, runs[0].clone())
}

/// Scenario 72: also a failure of the model, which sends no error frame.
#[tokio::test]
async fn a_failed_edit_leaves_the_turn_that_it_was_to_replace() {
    for (backend, mode) in ALL {
        let gateway = with_turns(setup(backend, mode, "none"), &["one", "two"]).await;
        for (text, limit, error, expected) in [
            (
                "loop",
                1,
                "GraphRecursionError",
                vec!["metadata", "values", "values", "error", "values", "end"],
            ),
            ("fail", 100, "", vec!["metadata", "values", "values", "values", "end"]),
        ] {
            let before = gateway.state("t").await;
            let mut body = edited(&gateway, text).await;
            body["config"] = json!({"recursion_limit": limit});
            let (frames, record) = streamed(&gateway, body).await;
            assert_eq!(names(&frames), expected, "{backend} {mode} {text}");
            assert_eq!(record["status"], "error");
            assert_eq!(frames.iter().any(|frame| frame.data["name"] == *error), !error.is_empty());
            let shown = &frames[frames.len() - 2];
            assert_eq!(shown.data["messages"], before["values"]["messages"], "what is true again");
            let state = gateway.state("t").await;
            assert_eq!((&state["values"], &state["next"]), (&before["values"], &json!([])));
            assert!(id(&state) > id(&before));
            if mode == "full" {
                assert_eq!(state["parent_checkpoint_id"], id(&before));
            }
        }
        let gateway = if backend == "sqlite" { gateway.reopen(mode).await } else { gateway };
        let body = edited(&gateway, "better").await;
        streamed(&gateway, body).await;
        assert_eq!(texts(&gateway.state("t").await), ["one", "You said: one", "better", "You said: better"]);
    }
}

#[tokio::test]
async fn a_cancelled_edit_leaves_the_turn_that_it_was_to_replace() {
    for (backend, mode) in ALL {
        for (action, status, error) in
            [("interrupt", "interrupted", Value::Null), ("rollback", "error", json!("Rolled back by user"))]
        {
            let name = format!("edit-cancel-{backend}-{mode}-{action}");
            let gateway = with_turns(setup(backend, mode, &name), &["one", "two"]).await;
            let before = gateway.state("t").await;
            let body = edited(&gateway, "wait").await;
            let cancel = async {
                gate(&name).reached().await;
                let runs = gateway.get("/api/threads/t/runs?limit=1").await.ok();
                let path = format!("/api/threads/t/runs/{}/cancel", runs[0]["run_id"].as_str().unwrap());
                gateway.call(Method::POST, &format!("{path}?wait=true&action={action}"), None).await.status
            };
            let ((frames, record), cancelled) = tokio::join!(streamed(&gateway, body), cancel);
            assert_eq!(cancelled, 204);
            assert_eq!((&record["status"], &record["error"]), (&json!(status), &error));
            assert_eq!(names(&frames)[frames.len() - 2..], ["values", "end"]);
            assert_eq!(frames[frames.len() - 2].data["messages"], before["values"]["messages"]);
            let state = gateway.state("t").await;
            assert_eq!(state["values"], before["values"], "{backend} {mode} {action}");
        }
    }
}

/// A first turn has no title before it, and a failed edit of it gets none.
#[tokio::test]
async fn an_edit_that_fails_gives_the_thread_no_title_and_shows_nothing_that_nobody_asked_for() {
    for mode in MODES {
        let gateway = with_turns(setup("sqlite", mode, "none"), &["one"]).await;
        let before = gateway.state("t").await;
        let mut body = edited(&gateway, "fail").await;
        body["stream_mode"] = json!(["updates"]);
        let (frames, record) = streamed(&gateway, body).await;
        assert_eq!(record["status"], "error");
        assert_eq!(names(&frames), ["metadata", "updates", "end"]);
        let state = gateway.state("t").await;
        assert_eq!(state["values"], before["values"]);
        assert_eq!(state["values"]["title"], "one");
        let entries = gateway.history("t").await;
        let titled = |entry: &Value| entry["metadata"]["writes"].get("runtime_interrupt_title").is_some();
        assert!(!entries.iter().any(titled));
    }
}

/// Only an edit gives way to the old turn: a failed regeneration stays, like any failed turn.
#[tokio::test]
async fn a_regenerated_answer_that_fails_stays_as_it_is() {
    for mode in MODES {
        let gateway = with_turns(setup("memory", mode, "none"), &["one", "two"]).await;
        let mut body = edited(&gateway, "fail").await;
        body["metadata"] = json!({});
        let (_, record) = streamed(&gateway, body).await;
        assert_eq!(record["status"], "error");
        let state = gateway.state("t").await;
        assert_eq!(texts(&state)[..3], ["one", "You said: one", "fail"], "{mode}");
    }
}

/// The run starts from the older checkpoint: a breakpoint is no failure.
#[tokio::test]
async fn an_edit_that_stops_at_a_breakpoint_stays() {
    for mode in MODES {
        let gateway = with_turns(setup("memory", mode, "none"), &["one", "two"]).await;
        let mut body = edited(&gateway, "better").await;
        body["interrupt_before"] = json!(["model"]);
        let (_, record) = streamed(&gateway, body).await;
        assert_eq!(record["status"], "success");
        let state = gateway.state("t").await;
        assert_eq!((texts(&state)[2..].to_vec(), &state["next"]), (vec!["better"], &json!(["model"])));
        gateway.post("/api/threads/t/runs/wait", json!({"input": null})).await.ok();
        assert_eq!(texts(&gateway.state("t").await)[2..], ["better", "You said: better"], "{mode}");
    }
}

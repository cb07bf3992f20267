//! Runs in a full process on a thread that was written in delta mode, and conversions in both directions (service
//! reference, "Run routes", "Compatibility gate").

use std::collections::BTreeMap;

use axum::body::Body;
use axum::http::{Request, Response};
use serde_json::{Value, json};

use crate::sse;
use crate::support::{DURABLE, Gateway, Setup, id, question, texts};

const MISMATCH: &str =
    "Thread requires delta mode; materialize and convert its checkpoints before using full mode.";
const NAME: &str = "CheckpointModeMismatchError";

/// The routes that create a run, by how they answer.
const BACKGROUND: [&str; 2] = ["/api/threads/t/runs", "/api/runs"];
const STREAM: [&str; 2] = ["/api/threads/t/runs/stream", "/api/runs/stream"];
const WAIT: [&str; 2] = ["/api/threads/t/runs/wait", "/api/runs/wait"];

/// A thread `t` of two turns, written in delta mode, in a full process, and the id of a checkpoint of it.
async fn mismatching(backend: &'static str, events: &'static str) -> (Gateway, String) {
    let gateway = Setup { events, ..Setup::on(backend, "delta") }.start().await;
    gateway.create("t").await;
    gateway.ask("t", "one").await;
    let checkpoint = id(&gateway.state("t").await).to_owned();
    gateway.ask("t", "two").await;
    (gateway.reopen("full").await, checkpoint)
}

/// A run on `t`, also for the routes that take the thread from the body.
fn asking(path: &str, text: &str) -> Value {
    let mut body = question(text);
    if path.starts_with("/api/runs") {
        body["config"] = json!({"configurable": {"thread_id": "t"}});
    }
    body
}

async fn open(gateway: &Gateway, path: &str, body: &Value) -> Response<Body> {
    let request = Request::post(path).header("content-type", "application/json");
    gateway.open_answer(request.body(body.to_string().into()).unwrap()).await
}

/// Only the rows of the checkpoint file: failed runs leave records and events, too.
async fn checkpoints(gateway: &Gateway) -> BTreeMap<String, i64> {
    let mut rows = gateway.rows().await;
    rows.retain(|table, _| table.starts_with("checkpoints.db."));
    assert!(rows.values().any(|count| *count > 1));
    rows
}

/// Asserts that the record of this run shows the mismatch, and that the run wrote its events and nothing else.
async fn failed(gateway: &Gateway, run: &str) {
    gateway.join("t", run).await;
    let record = gateway.run("t", run).await;
    assert_eq!((&record["status"], &record["error"]), (&json!("error"), &json!(MISMATCH)));
    assert_eq!((&record["total_tokens"], &record["message_count"]), (&json!(0), &json!(0)));
    let events = gateway.get(&format!("/api/threads/t/runs/{run}/events")).await.ok();
    let events = events.as_array().unwrap();
    let types: Vec<&str> = events.iter().map(|event| event["event_type"].as_str().unwrap()).collect();
    assert_eq!(types, ["run.start", "run.error", "run.delivery"]);
    assert_eq!(events[1]["content"], json!({"name": NAME, "message": MISMATCH}));
}

fn run_of(answer: &Response<Body>) -> String {
    let place = answer.headers()["content-location"].to_str().unwrap();
    place.strip_prefix("/api/threads/t/runs/").unwrap().to_owned()
}

/// The two selections of a request: none, and a checkpoint of the thread.
fn selections(path: &str, checkpoint: &str) -> [Value; 2] {
    let mut selecting = asking(path, "three");
    selecting["checkpoint_id"] = json!(checkpoint);
    [asking(path, "three"), selecting]
}

#[tokio::test]
async fn a_background_run_is_accepted_and_its_record_has_the_mismatch_later() {
    for backend in DURABLE {
        let (gateway, checkpoint) = mismatching(backend, "db").await;
        let rows = checkpoints(&gateway).await;
        for path in BACKGROUND {
            for body in selections(path, &checkpoint) {
                let record = gateway.post(path, body).await.ok();
                assert_eq!((&record["status"], &record["error"]), (&json!("pending"), &Value::Null));
                failed(&gateway, record["run_id"].as_str().unwrap()).await;
            }
        }
        assert_eq!(checkpoints(&gateway).await, rows);
        let found = gateway.post("/api/threads/search", json!({"ids": ["t"]})).await.ok();
        assert_eq!(found[0]["status"], "error");
    }
}

#[tokio::test]
async fn a_stream_shows_the_mismatch_by_name_and_ends() {
    for backend in DURABLE {
        let (gateway, checkpoint) = mismatching(backend, "db").await;
        let rows = checkpoints(&gateway).await;
        for path in STREAM {
            for mut body in selections(path, &checkpoint) {
                body["stream_mode"] = json!(["values", "messages-tuple", "updates", "debug"]);
                let answer = open(&gateway, path, &body).await;
                assert_eq!(answer.headers()["content-type"], "text/event-stream");
                let run = run_of(&answer);
                let frames = sse::all(answer).await;
                assert_eq!(sse::names(&frames), ["error", "end"]);
                assert_eq!(frames[0].data, json!({"message": MISMATCH, "name": NAME}));
                failed(&gateway, &run).await;
                let joined = Request::get(format!("/api/threads/t/runs/{run}/stream")).body(Body::empty());
                assert_eq!(sse::all(gateway.open_answer(joined.unwrap()).await).await, frames);
            }
        }
        assert_eq!(checkpoints(&gateway).await, rows);
    }
}

#[tokio::test]
async fn waiting_gives_the_mismatch_as_status_and_error_and_never_409() {
    for backend in DURABLE {
        let (gateway, checkpoint) = mismatching(backend, "db").await;
        let rows = checkpoints(&gateway).await;
        let expected = json!({
            "status": "error", "error": MISMATCH, "__error__": {"error": "RunError", "message": MISMATCH},
        });
        for path in WAIT {
            for body in selections(path, &checkpoint) {
                let answer = gateway.post(path, body).await;
                let place = answer.headers["content-location"].to_str().unwrap().to_owned();
                assert_eq!(answer.ok(), expected, "{path}");
                failed(&gateway, place.rsplit_once('/').unwrap().1).await;
                let joined = gateway.get(&format!("{place}/join")).await;
                assert_eq!(joined.ok(), expected);
            }
        }
        assert_eq!(checkpoints(&gateway).await, rows);
    }
}

#[tokio::test]
async fn after_failed_runs_the_thread_is_as_it_was_for_a_delta_process() {
    for backend in DURABLE {
        let gateway = Setup::on(backend, "delta").start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        let (state, history) = (gateway.state("t").await, gateway.history("t").await);
        let gateway = gateway.reopen("full").await;
        for path in WAIT {
            assert_eq!(gateway.post(path, asking(path, "two")).await.ok()["status"], "error");
        }
        let gateway = gateway.reopen("delta").await;
        assert_eq!((gateway.state("t").await, gateway.history("t").await), (state, history));
        assert_eq!(gateway.get("/api/threads/t").await.ok()["status"], "idle", "the head has no failed task");
        let run = gateway.ask("t", "two").await;
        assert_eq!(gateway.run("t", &run).await["status"], "success");
        assert_eq!(texts(&gateway.state("t").await), ["one", "You said: one", "two", "You said: two"]);
    }
}

/// The feed is empty after the restart and would be filled from the head, so the head is read before a run exists.
#[tokio::test]
async fn with_an_empty_feed_every_creating_route_is_500_with_the_mismatch_and_changes_nothing() {
    for backend in DURABLE {
        let (gateway, checkpoint) = mismatching(backend, "memory").await;
        let runs = gateway.get("/api/threads/t/runs").await.ok();
        assert_eq!(runs.as_array().unwrap().len(), 2);
        let rows = gateway.rows().await;
        for path in [BACKGROUND, STREAM, WAIT].concat() {
            for body in selections(path, &checkpoint) {
                let answer = gateway.post(path, body).await;
                assert_eq!((answer.status, &answer.body), (500, &json!({"detail": MISMATCH})), "{path}");
                assert_eq!(answer.headers["content-type"], "application/json");
                assert_eq!(answer.headers.get("content-location"), None);
            }
        }
        assert_eq!(gateway.get("/api/threads/t/runs").await.ok(), runs);
        assert_eq!(gateway.rows().await, rows);

        let wrong = gateway.post("/api/threads/t/runs", json!({"nope": 1})).await;
        assert_eq!(wrong.status, 422, "the form of the body is checked before");
        let mut unknown = question("three");
        unknown["checkpoint_id"] = json!("0190b0f0-0000-7000-8000-000000000000");
        assert_eq!(gateway.post("/api/threads/t/runs", unknown).await.status, 404, "and so is the selector");
        gateway.create("u").await;
        gateway.ask("u", "another thread").await;
    }
}

/// A state update writes a checkpoint and no event.
#[tokio::test]
async fn a_thread_without_runs_has_an_empty_feed_also_in_a_database() {
    for backend in DURABLE {
        let gateway = Setup::on(backend, "delta").start().await;
        gateway.create("t").await;
        gateway.post("/api/threads/t/state", json!({"values": {"title": "x"}})).await.ok();
        let gateway = gateway.reopen("full").await;
        let rows = gateway.rows().await;
        for path in [BACKGROUND, STREAM, WAIT].concat() {
            gateway.post(path, asking(path, "one")).await.refused(500, MISMATCH);
        }
        assert_eq!(gateway.rows().await, rows);
    }
}

#[tokio::test]
async fn the_feed_that_a_restart_emptied_is_filled_from_the_head_by_the_next_run() {
    for backend in DURABLE {
        for mode in ["full", "delta"] {
            let gateway = Setup { events: "memory", ..Setup::on(backend, mode) }.start().await;
            gateway.create("t").await;
            gateway.ask("t", "one").await;
            gateway.ask("t", "two").await;
            let gateway = gateway.reopen(mode).await;
            let run = gateway.ask("t", "three").await;
            let events = async |run: &str| {
                let events = gateway.get(&format!("/api/threads/t/runs/{run}/events")).await.ok();
                let shape = events.as_array().unwrap().iter();
                shape.map(|e| (e["seq"].clone(), e["content"]["content"].clone())).collect::<Vec<_>>()
            };
            let say = |seq: u8, text: &str| (json!(seq), json!(text));
            assert_eq!(events("checkpoint-seed-t-0").await, [say(1, "one"), say(2, "You said: one")]);
            assert_eq!(events("checkpoint-seed-t-1").await, [say(3, "two"), say(4, "You said: two")]);
            let own = events(&run).await;
            assert_eq!((&own[0].0, &own[1]), (&json!(5), &say(6, "three")), "{mode}: after them");
            gateway.ask("t", "four").await;
            assert_eq!(events("checkpoint-seed-t-0").await.len(), 2, "once");
            let runs = gateway.get("/api/threads/t/runs").await.ok();
            assert_eq!(runs.as_array().unwrap().len(), 4, "that made no records of runs");
        }
    }
}

/// The scenario of an operator who switches to delta mode and back.
#[tokio::test]
async fn every_form_of_run_takes_a_full_thread_over_into_delta_mode_and_then_none_works_in_full() {
    for backend in DURABLE {
        for path in [BACKGROUND, STREAM, WAIT].concat() {
            let gateway = Setup::on(backend, "full").start().await;
            gateway.create("t").await;
            gateway.ask("t", "one").await;
            let full = gateway.history("t").await;
            let gateway = gateway.reopen("delta").await;
            let answer = open(&gateway, path, &asking(path, "two")).await;
            let run = run_of(&answer);
            axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
            gateway.join("t", &run).await;
            assert_eq!(gateway.run("t", &run).await["status"], "success", "{path}");
            let history = gateway.history("t").await;
            assert_eq!(texts(&history[0]), ["one", "You said: one", "two", "You said: two"]);
            let ids = |entries: &[Value]| entries.iter().map(|e| id(e).to_owned()).collect::<Vec<_>>();
            assert_eq!(ids(&history[history.len() - full.len()..]), ids(&full), "the history is complete");
            let gateway = gateway.reopen("full").await;
            for path in WAIT {
                assert_eq!(gateway.post(path, asking(path, "three")).await.ok()["error"], MISMATCH);
            }
        }
    }
}

#[tokio::test]
async fn a_run_from_a_full_checkpoint_in_delta_mode_becomes_the_head_of_one_line() {
    for backend in DURABLE {
        let gateway = Setup::on(backend, "full").start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        let selected = gateway.state("t").await;
        gateway.ask("t", "two").await;
        let old = id(&gateway.state("t").await).to_owned();
        let gateway = gateway.reopen("delta").await;
        let mut body = question("instead");
        body["checkpoint"] = json!({"thread_id": "t", "checkpoint_ns": "", "checkpoint_id": id(&selected)});
        gateway.post("/api/threads/t/runs/wait", body).await.ok();
        let expected = ["one", "You said: one", "instead", "You said: instead"];
        assert_eq!(texts(&gateway.state("t").await), expected);
        let history = gateway.history("t").await;
        let child = history.iter().find(|entry| entry["parent_checkpoint_id"] == old.as_str());
        assert!(child.is_some(), "the restored state is on top of the old head");
        let gateway = gateway.reopen("delta").await;
        assert_eq!(texts(&gateway.state("t").await), expected);
    }
}

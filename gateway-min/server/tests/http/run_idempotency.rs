//! Repeated run create requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::IntoResponse as _;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;
use tower::ServiceExt as _;

use crate::support::{ALL, Answer, Gateway, Setup, question, texts};

async fn post(gateway: &Gateway, path: &str, key: &str) -> Answer {
    let request =
        Request::post(path).header("content-type", "application/json").header("Idempotency-Key", key);
    gateway.send(request.body(Body::from(question("hello").to_string())).unwrap()).await
}

fn place(answer: &Answer) -> String {
    answer.headers["content-location"].to_str().unwrap().to_owned()
}

async fn runs(gateway: &Gateway, thread: &str) -> usize {
    gateway.get(&format!("/api/threads/{thread}/runs")).await.ok().as_array().unwrap().len()
}

#[tokio::test]
async fn the_same_key_gives_the_same_run_in_every_form_and_starts_nothing() {
    for (backend, mode) in ALL {
        let gateway = Setup::on(backend, mode).start().await;
        gateway.create("t").await;
        gateway.create("other").await;
        let first = post(&gateway, "/api/threads/t/runs/wait", "k").await;
        let history = gateway.history("t").await;
        let again = post(&gateway, "/api/threads/t/runs/wait", " k ").await;
        assert_eq!((place(&again), &again.body), (place(&first), &first.body));
        let created = post(&gateway, "/api/threads/t/runs", "k").await;
        assert_eq!(place(&created), place(&first));
        assert_eq!(created.ok()["status"], "success");
        let request = Request::post("/api/threads/t/runs/stream").header("Idempotency-Key", "k");
        let request = request.body(Body::from(question("hello").to_string())).unwrap();
        let (parts, body) = gateway.open_answer(request).await.into_parts();
        assert_eq!(parts.headers["content-location"], place(&first));
        let frames = String::from_utf8(to_bytes(body, usize::MAX).await.unwrap().to_vec()).unwrap();
        assert!(frames.contains("event: end"), "{frames}");
        assert_eq!(gateway.history("t").await, history);
        assert_eq!(runs(&gateway, "t").await, 1);

        assert_ne!(place(&post(&gateway, "/api/threads/other/runs/wait", "k").await), place(&first));
        post(&gateway, "/api/threads/t/runs/wait", "k2").await.ok();
        for empty in ["", "  "] {
            post(&gateway, "/api/threads/t/runs/wait", empty).await.ok();
        }
        assert_eq!((runs(&gateway, "t").await, runs(&gateway, "other").await), (4, 1));
        assert_eq!(texts(&gateway.state("t").await).len(), 8);
        if backend == "memory" {
            continue;
        }
        let gateway = gateway.reopen(mode).await;
        assert_eq!(place(&post(&gateway, "/api/threads/t/runs/wait", "k").await), place(&first));
    }
}

#[tokio::test]
async fn requests_with_one_key_at_once_create_one_run() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    let send = || post(&gateway, "/api/threads/t/runs", "k");
    let (a, b, c) = tokio::join!(send(), send(), send());
    let ids: Vec<Value> = [a, b, c].into_iter().map(|answer| answer.ok()["run_id"].clone()).collect();
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    gateway.join("t", ids[0].as_str().unwrap()).await;
    assert_eq!(texts(&gateway.state("t").await), ["hello", "You said: hello"]);
}

#[tokio::test]
async fn a_key_has_a_length_and_means_nothing_without_a_thread() {
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    let long = post(&gateway, "/api/threads/t/runs", &"x".repeat(256)).await;
    long.refused(422, "Header Idempotency-Key must have at most 255 characters");
    assert_eq!(gateway.get("/api/threads/t/runs").await.ok(), json!([]));
    post(&gateway, "/api/threads/t/runs/wait", &"x".repeat(255)).await.ok();
    let first = post(&gateway, "/api/runs/wait", "k").await;
    assert_ne!(place(&first), place(&post(&gateway, "/api/runs/wait", "k").await));
}

/// The statuses that the JavaScript client does not retry; it retries every other failure four times.
const FINAL: [u16; 11] = [400, 401, 402, 403, 404, 405, 406, 407, 408, 409, 422];

/// Sends a request as the JavaScript client does, through a proxy that answers the first `lost` requests with a 500
/// after the gateway has carried them out. Returns the last answer, and the number of requests.
async fn as_javascript(
    gateway: &Gateway,
    lost: usize,
    path: &str,
    key: Option<&str>,
    body: &Value,
) -> (u16, Value, usize) {
    let requests = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&requests);
    let between = from_fn(move |request: axum::extract::Request, next: Next| {
        let sent = count.fetch_add(1, Ordering::SeqCst);
        async move {
            let answer = next.run(request).await;
            if sent < lost { StatusCode::INTERNAL_SERVER_ERROR.into_response() } else { answer }
        }
    });
    let router = gateway.router().layer(between);
    loop {
        let request = Request::post(path).header("content-type", "application/json");
        let request = key.into_iter().fold(request, |request, key| request.header("Idempotency-Key", key));
        let answer =
            router.clone().oneshot(request.body(Body::from(body.to_string())).unwrap()).await.unwrap();
        let (status, sent) = (answer.status().as_u16(), requests.load(Ordering::SeqCst));
        let bytes = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
        if status == 200 || FINAL.contains(&status) || sent > 4 {
            return (status, serde_json::from_slice(&bytes).unwrap_or_default(), sent);
        }
    }
}

/// Scenario 60, second half.
#[tokio::test]
async fn a_request_whose_answers_are_lost_creates_one_run_if_it_has_a_key() {
    for (backend, mode) in ALL {
        let gateway = Setup::on(backend, mode).start().await;
        let mut body = question("hello");
        body["on_disconnect"] = json!("continue");
        for (n, form) in ["", "/wait", "/stream"].into_iter().enumerate() {
            let thread = format!("t{n}");
            gateway.create(&thread).await;
            let path = format!("/api/threads/{thread}/runs{form}");
            let (status, _, requests) = as_javascript(&gateway, 3, &path, Some("k"), &body).await;
            assert_eq!((status, requests), (200, 4), "{backend} {mode} {form}");
            let listed = gateway.get(&format!("/api/threads/{thread}/runs")).await.ok();
            let [run] = &listed.as_array().unwrap()[..] else { panic!("{form}: {listed}") };
            gateway.join(&thread, run["run_id"].as_str().unwrap()).await;
            assert_eq!(texts(&gateway.state(&thread).await), ["hello", "You said: hello"], "{form}");
        }
        // Without a key, a repeated request is indistinguishable from a new one.
        gateway.create("t").await;
        let waits = "/api/threads/t/runs/wait";
        assert_eq!(as_javascript(&gateway, 1, waits, None, &body).await.2, 2);
        assert_eq!(runs(&gateway, "t").await, 2);
    }
}

/// Scenario 60, first half: a request that would fail again is not answered with a status that is retried.
#[tokio::test]
async fn what_is_refused_for_good_is_asked_once() {
    let name = "idempotency-busy";
    let script = json!({"rules": [{"when": {"contains": ["wait"]}, "answers": [{"text": "", "gate": {"name": name}}]},
        {"answers": [{"text": "You said: {{input}}"}]}]});
    let gateway = Setup { script, ..Setup::default() }.start().await;
    for thread in ["t", "busy", "fresh"] {
        gateway.create(thread).await;
    }
    let held = gateway.start_run("busy", "wait").await;
    gate(name).reached().await;
    let with = |field: &str, value: Value| {
        let mut body = question("hello");
        body[field] = value;
        body
    };
    let none = "0199aaaa-0000-7000-8000-000000000000";
    for (thread, status, body) in [
        ("t", 422, with("unknown", json!(1))),
        ("t", 422, with("webhook", json!("http://x"))),
        ("t", 422, with("stream_mode", json!("tools"))),
        ("t", 422, with("metadata", json!({"auth_token": "x"}))),
        ("t", 400, with("input", json!({"messages": [{"role": "nobody"}]}))),
        ("t", 400, with("context", json!({"model_name": "unknown"}))),
        ("t", 400, with("checkpoint", json!({"thread_id": "other", "checkpoint_id": none}))),
        ("t", 404, with("checkpoint_id", json!(none))),
        ("gone", 404, question("hello")),
        ("busy", 409, question("hello")),
        ("fresh", 409, json!({"command": {"resume": "yes"}})),
    ] {
        for form in ["", "/wait", "/stream"] {
            let path = format!("/api/threads/{thread}/runs{form}");
            let (found, answer, requests) = as_javascript(&gateway, 0, &path, None, &body).await;
            assert_eq!((found, requests), (status, 1), "{path} {body}: {answer}");
        }
    }
    gate(name).open();
    gateway.join("busy", &held).await;
    assert_eq!(
        (runs(&gateway, "t").await, runs(&gateway, "busy").await, runs(&gateway, "fresh").await),
        (0, 1, 0)
    );
}

//! Repeating a request that creates a run.

use axum::body::{Body, to_bytes};
use axum::http::Request;
use serde_json::{Value, json};

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

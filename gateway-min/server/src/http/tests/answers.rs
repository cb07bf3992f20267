//! The check of a thread's owner before an answer, and answers that take long.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::Response;
use axum::routing::{MethodRouter, any};
use axum::{Extension, Router};
use futures::StreamExt as _;
use serde_json::Value;
use threadkeep_config::{KeyFile, Role};
use threadkeep_records::{NewThread, WriterKind};
use tower::ServiceExt as _;

use super::super::auth::{HasWritten, authenticate};
use super::super::awaited::awaited;
use super::super::select::Select;
use super::super::state::ThreadState;
use super::Gateway;
use crate::app::App;
use crate::auth::Principal;
use crate::streams::verdict::DELETED;

fn of(user: &str) -> NewThread {
    NewThread { thread_id: "x".into(), user_id: Some(user.into()), ..NewThread::default() }
}

/// What bob is answered on his thread `x` by a handler at this path.
async fn answered(method: &str, path: &str, handler: MethodRouter<Arc<App>>) -> StatusCode {
    let Gateway { app, _dir, .. } = Gateway::start_with("full", true).await;
    let file = KeyFile::new(&app.config.last_known().auth.keys_file);
    let (_, key) = file.create("bob", Role::User).unwrap();
    assert!(app.records.threads().create(of("bob")).await.unwrap().created);
    let checked = from_fn_with_state(Arc::clone(&app), authenticate);
    let router: Router = Router::new().route(path, handler).layer(checked).with_state(Arc::clone(&app));
    let request = Request::builder().method(method).uri(path.replace("{thread_id}", "x"));
    let request = request.header("x-api-key", key.expose()).body(Body::empty()).unwrap();
    router.oneshot(request).await.unwrap().status()
}

/// Another user makes a thread with its id at once; the page that asks has its title.
#[tokio::test]
async fn a_deletion_with_the_form_of_the_page_is_answered_as_one() {
    async fn replaced(State(app): State<Arc<App>>) -> &'static str {
        let deletion = app.records.runs().reserve("x", WriterKind::Delete).await.unwrap();
        app.records.delete_thread(deletion).await.unwrap();
        assert!(app.records.threads().create(of("ann")).await.unwrap().created);
        "done"
    }
    for (method, status) in [("POST", 200), ("GET", 404)] {
        assert_eq!(answered(method, "/threads/{thread_id}/delete", any(replaced)).await, status, "{method}");
    }
}

/// The database is away when a request is done. What was written is reported, so that nobody writes it again; what was
/// read may be of another user's thread by then.
#[tokio::test]
async fn a_write_is_reported_though_its_owner_cannot_be_compared_again() {
    async fn done(State(app): State<Arc<App>>) -> &'static str {
        app.records.fail_reads(1);
        "done"
    }
    async fn command(State(app): State<Arc<App>>) -> (Extension<HasWritten>, &'static str) {
        app.records.fail_reads(1);
        (Extension(HasWritten), "done")
    }
    async fn refused(State(app): State<Arc<App>>) -> (StatusCode, &'static str) {
        app.records.fail_reads(1);
        (StatusCode::CONFLICT, "of another user's thread?")
    }
    for (method, path, status) in [
        ("POST", "/api/threads/{thread_id}/runs", 200),
        ("POST", "/api/threads/{thread_id}/state", 200),
        ("GET", "/api/threads/{thread_id}/state", 503),
        ("POST", "/api/threads/{thread_id}/history", 503),
        ("POST", "/api/threads/{thread_id}/runs/wait", 503),
    ] {
        assert_eq!(answered(method, path, any(done)).await, status, "{method} {path}");
        assert_eq!(answered(method, path, any(refused)).await, 503, "{method} {path}");
    }
    // Some commands write, and some read.
    let path = "/api/threads/{thread_id}/commands";
    assert_eq!(answered("POST", path, any(command)).await, 200);
    assert_eq!(answered("POST", path, any(done)).await, 503);
}

/// A conversation of megabytes would be there twice.
#[tokio::test]
async fn a_state_is_shown_without_a_copy_of_its_values() {
    let gateway = Gateway::start("full").await;
    gateway.turn("r").await;
    let head = gateway.app.threads.accessor().get(&gateway.thread, None).await.unwrap().unwrap();
    let state = ThreadState::of(&head).unwrap();
    let place = |messages: &Value| messages[0]["content"].as_str().unwrap().as_ptr();
    let read = place(&state.values["messages"]);
    let shown = state.selected(&Select::default(), "no JSON").unwrap();
    assert_eq!(place(&shown["values"]["messages"]), read);
    assert_eq!(shown["checkpoint_id"], head.key.id.to_string());
}

/// With the answer the subscription would go, as if the client had left; by default that cancels the run.
#[tokio::test]
async fn a_long_run_is_waited_for_though_its_owner_cannot_be_compared_when_the_head_is_sent() {
    async fn waiting(State(app): State<Arc<App>>) -> Response {
        let _run = app.streams.open("long");
        let stream = app.streams.subscribe("long");
        let answer = awaited(&app, &Principal::single_user(), &"x".into(), "long", stream, BEAT).await;
        app.records.fail_reads(1);
        answer
    }
    let path = "/api/threads/{thread_id}/runs/wait";
    assert_eq!(answered("POST", path, any(waiting)).await, 200);
}

const BEAT: Duration = Duration::from_millis(20);

/// Proxies end an answer that says nothing for a minute.
#[tokio::test]
async fn line_breaks_precede_the_result_of_a_long_run() {
    let Gateway { app, thread, _dir } = Gateway::start("full").await;
    let run = app.streams.open("long");
    let stream = app.streams.subscribe("long");
    let answer = awaited(&app, &Principal::single_user(), &thread, "long", stream, BEAT).await;
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.headers()[header::CONTENT_TYPE], "application/json");
    assert_eq!(answer.headers()[header::LOCATION], format!("/threads/{thread}/runs/long/join"));
    assert_eq!(answer.headers()["x-accel-buffering"], "no", "nginx would hold them back");
    let mut pieces = answer.into_body().into_data_stream();
    for _ in 0..2 {
        assert_eq!(pieces.next().await.unwrap().unwrap(), "\n");
    }
    run.end();
    let mut rest = Vec::new();
    while let Some(piece) = pieces.next().await {
        rest.extend_from_slice(&piece.unwrap());
    }
    let body: Value = serde_json::from_slice(&rest).unwrap();
    assert_eq!(body["error"], DELETED);
}

/// The head has said already that all is well.
#[tokio::test]
async fn a_late_result_of_a_thread_of_another_user_by_now_is_broken_off() {
    let Gateway { app, _dir, .. } = Gateway::start_with("full", true).await;
    let file = KeyFile::new(&app.config.last_known().auth.keys_file);
    let (_, key) = file.create("bob", Role::User).unwrap();
    let bob = app.auth.authenticate(Some(key)).await.unwrap().unwrap();
    let run = app.streams.open("long");
    let answer = awaited(&app, &bob, &"x".into(), "long", app.streams.subscribe("long"), BEAT).await;
    assert!(app.records.threads().create(of("ann")).await.unwrap().created);
    run.end();
    let pieces: Vec<_> = answer.into_body().into_data_stream().collect().await;
    let (last, before) = pieces.split_last().unwrap();
    assert!(last.is_err());
    assert!(before.iter().all(|piece| piece.as_ref().unwrap() == "\n"));
}

//! Tests that need access to internals, as of short-lived states of a run.

mod answers;
mod damaged;
mod notes;
mod unwritten;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::Request;
use axum::middleware::from_fn_with_state;
use axum::response::IntoResponse as _;
use axum::routing::any;
use chrono::Utc;
use serde_json::{Map, Value, json};
use tempfile::TempDir;
use threadkeep::checkpoint::{ERROR_CHANNEL, INTERRUPT_CHANNEL, TaskWrites, Write};
use threadkeep::id::ThreadId;
use threadkeep::metadata::Source;
use threadkeep::mode::ModeRegister;
use threadkeep::saver::Load;
use threadkeep::state::{HistoryQuery, StateSnapshot, Update};
use threadkeep::step::StepWriter;
use threadkeep::value::ChannelValue;
use threadkeep_agent::goal_state;
use tower::ServiceExt as _;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::Registry;

use super::delete::delete_contents;
use super::history::{Page, ReadHistory, page};
use super::run_follow::finished;
use crate::app::{App, Parts};
use crate::streams::verdict::DELETED;
use crate::telemetry::recent::{ERRORS, Recent};
use crate::testing::execution_of;
use threadkeep_config::{ConfigHandle, Environment, KeyFile, LoadOptions, Role};
use threadkeep_records::{
    Clock, MultitaskStrategy, NewEvent, NewRun, NewThread, Records, RecordsOptions, RunEnd, RunQuery,
    RunStatus, ThreadStatus, WriterKind,
};

const MODES: [&str; 2] = ["full", "delta"];

/// A gateway with a thread `t`.
struct Gateway {
    app: Arc<App>,
    thread: ThreadId,
    _dir: TempDir,
}

impl Gateway {
    async fn start(mode: &str) -> Self {
        Self::start_with(mode, false).await
    }

    async fn start_with(mode: &str, has_keys: bool) -> Self {
        Self::start_draining(mode, has_keys, Parts::default().drain).await
    }

    /// As [`Self::start_with`]; it waits for this long when it stops. The clock of its records does not move: its runs
    /// take no time, however busy the machine is.
    async fn start_draining(mode: &str, has_keys: bool, drain: Duration) -> Self {
        let dir = TempDir::new().unwrap();
        let config = json!({
            "config_version": 49,
            "database": {"backend": "memory", "checkpoint_channel_mode": mode},
            "auth": {"enabled": has_keys},
        });
        std::fs::write(dir.path().join("config.yaml"), config.to_string()).unwrap();
        let options = LoadOptions {
            config_path: None,
            environment: Environment::default(),
            working_dir: dir.path().to_owned(),
        };
        let config = ConfigHandle::open(&options).unwrap();
        let now = Utc::now();
        let options = RecordsOptions { clock: Clock::from_fn(move || now), ..RecordsOptions::default() };
        let records = Some(Records::open_memory(options).await.unwrap());
        let parts = Parts { drain, records, ..Parts::default() };
        let app = App::start_with(config, Arc::new(ModeRegister::new()), parts).await.unwrap();
        let thread = NewThread { thread_id: "t".into(), ..NewThread::default() };
        app.records.threads().create(thread).await.unwrap();
        let thread = ThreadId::from("t");
        app.threads.accessor().create(&thread, Map::new()).await.unwrap();
        Self { app, thread, _dir: dir }
    }

    /// Stores a run's record with this status.
    async fn record(&self, run: &str, status: RunStatus) {
        let runs = self.app.records.runs();
        let new = NewRun { run_id: run.into(), thread_id: "t".into(), ..NewRun::default() };
        runs.admit(new, MultitaskStrategy::Reject).await.unwrap();
        if status != RunStatus::Pending {
            runs.start(run).await.unwrap();
        }
        if !status.is_active() {
            let end = RunEnd { status, error: None, ..RunEnd::failed("") };
            runs.finish(run, &end).await.unwrap();
        }
    }

    /// Runs a turn for this run, without its duration note.
    async fn turn(&self, run: &str) {
        let messages = json!([
            {"type": "human", "id": format!("h-{run}"), "content": "?", "additional_kwargs": {"run_id": run}},
            {"type": "ai", "id": format!("a-{run}"), "content": "!"},
        ]);
        let accessor = self.app.threads.accessor();
        let writes = vec![accessor.write("messages", messages, false).unwrap()];
        let update = Update { at: None, node: "test".into(), writes, extra: Map::new() };
        accessor.update(&self.thread, update).await.unwrap();
    }

    async fn get(&self, rest: &str) -> Value {
        let request = Request::get(format!("/api/threads/t{rest}")).body(Body::empty()).unwrap();
        self.answer(request).await
    }

    /// A page for browsers.
    async fn page_of(&self, path: &str) -> String {
        let request = Request::get(path).body(Body::empty()).unwrap();
        let response = super::router(Arc::clone(&self.app)).oneshot(request).await.unwrap();
        assert_eq!(response.status(), 200);
        String::from_utf8(to_bytes(response.into_body(), usize::MAX).await.unwrap().to_vec()).unwrap()
    }

    async fn post(&self, rest: &str, body: Value) -> Value {
        let request =
            Request::post(format!("/api/threads/t{rest}")).header("content-type", "application/json");
        self.answer(request.body(body.to_string().into()).unwrap()).await
    }

    async fn answer(&self, request: Request<Body>) -> Value {
        let response = super::router(Arc::clone(&self.app)).oneshot(request).await.unwrap();
        assert_eq!(response.status(), 200);
        serde_json::from_slice(&to_bytes(response.into_body(), usize::MAX).await.unwrap()).unwrap()
    }

    /// Leaves a task to run, with this write of one attempt; returns the attempt's id.
    async fn leave_task(&self, channel: &str, value: Value) -> String {
        let accessor = self.app.threads.accessor();
        let mut writer = StepWriter::open(accessor, &self.thread, None).await.unwrap();
        let key = writer.commit(Source::Loop, vec!["model".into()], Map::new()).await.unwrap().key.clone();
        let task = writer.start_task(&"model".into(), 0).id;
        let write = Write {
            channel: channel.into(),
            value: ChannelValue::from_json(&value).unwrap(),
            overwrite: false,
        };
        let row = TaskWrites { task, node: "model".into(), index: 0, writes: vec![write] };
        accessor.saver().put_writes(&key, &row).await.unwrap();
        task.to_string()
    }

    async fn page(&self) -> Page {
        let body = ReadHistory::newest(10);
        page(&self.app, &self.thread, body).await.unwrap()
    }

    async fn checkpoints(&self) -> Vec<StateSnapshot> {
        let query = HistoryQuery { load: Load::None, ..HistoryQuery::default() };
        self.app.threads.accessor().history(&self.thread, query).await.unwrap()
    }
}

#[tokio::test]
async fn a_thread_is_busy_from_the_admission_of_a_run_to_its_last_write() {
    for mode in MODES {
        let gateway = Gateway::start(mode).await;
        gateway.record("r1", RunStatus::Pending).await;
        assert_eq!(gateway.get("").await["status"], "busy");
        let end = RunEnd { status: RunStatus::Success, error: None, ..RunEnd::failed("") };
        gateway.app.records.threads().set_status("t", ThreadStatus::Running).await.unwrap();
        gateway.app.records.runs().finish("r1", &end).await.unwrap();
        assert_eq!(gateway.get("").await["status"], "busy", "the status is the last thing that a run writes");
        gateway.app.records.threads().set_status("t", ThreadStatus::Error).await.unwrap();
        assert_eq!(gateway.get("").await["status"], "idle", "no task is left");
        let reservation = gateway.app.records.runs().reserve("t", WriterKind::CheckpointWrite).await.unwrap();
        assert_eq!(gateway.get("").await["status"], "idle", "another writer is not a run");
        reservation.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_thread_with_a_task_left_is_interrupted_or_in_error() {
    for mode in MODES {
        let gateway = Gateway::start(mode).await;
        let task = gateway.leave_task(INTERRUPT_CHANNEL, json!([{"value": "Which?", "id": "i"}])).await;
        let thread = gateway.get("").await;
        assert_eq!(thread["status"], "interrupted");
        assert_eq!(thread["interrupts"], json!({ task: [{"value": "Which?", "id": "i"}] }));
        let page = gateway.page_of("/threads/t").await;
        assert!(page.contains("Which?") && page.contains("name=\"value\""), "a person can answer: {page}");
        gateway.app.records.threads().set_status("t", ThreadStatus::Error).await.unwrap();
        assert_eq!(gateway.get("").await["status"], "error", "the last run failed outside of a task");

        gateway.app.records.threads().set_status("t", ThreadStatus::Interrupted).await.unwrap();
        gateway.leave_task(ERROR_CHANNEL, json!("it broke")).await;
        let thread = gateway.get("").await;
        assert_eq!((&thread["status"], &thread["interrupts"]), (&json!("error"), &json!({})));
    }
}

#[tokio::test]
async fn an_error_in_the_log_is_shown_to_operators_for_an_hour() {
    let gateway = Gateway::start("full").await;
    let _log = tracing::subscriber::set_default(Registry::default().with(Recent(&ERRORS)));
    tracing::error!(thread = "t", "this test <b>broke");
    let page = gateway.page_of("/status").await;
    assert!(page.contains("this test &lt;b&gt;broke thread=t"), "{page}");
    let request = Request::get("/api/errors").body(Body::empty()).unwrap();
    let errors = gateway.answer(request).await;
    let found =
        errors.as_array().unwrap().iter().find(|error| error["text"] == "this test <b>broke thread=t");
    assert!(found.is_some_and(|error| error["logged_at"].is_string()), "{errors}");
}

/// The request was admitted when there was no such thread, and waits for its turn.
#[tokio::test]
async fn a_thread_that_another_user_makes_before_a_request_writes_to_it_is_not_written() {
    for (method, body) in [("PUT", json!({"objective": "of bob"})), ("DELETE", json!({}))] {
        let Gateway { app, _dir, .. } = Gateway::start_with("full", true).await;
        let file = KeyFile::new(&app.config.last_known().auth.keys_file);
        let (_, key) = file.create("bob", Role::User).unwrap();
        let lock = app.threads.lock("new").await;
        let request =
            Request::builder().method(method).uri("/api/threads/new/goal").header("x-api-key", key.expose());
        let request = request.body(Body::from(body.to_string())).unwrap();
        let answer = tokio::spawn(super::router(Arc::clone(&app)).oneshot(request));
        while app.records.runs().active_for_thread("new").await.unwrap().is_none() {
            tokio::task::yield_now().await;
        }
        let of_ann =
            NewThread { thread_id: "new".into(), user_id: Some("ann".into()), ..NewThread::default() };
        app.records.threads().create(of_ann).await.unwrap();
        let (accessor, thread) = (app.threads.accessor(), ThreadId::from("new"));
        goal_state::set(accessor, &thread, Map::new(), &json!({"objective": "of ann"})).await.unwrap();
        drop(lock);
        assert_eq!(answer.await.unwrap().unwrap().status(), 404, "{method}");
        assert_eq!(goal_state::read(accessor, &thread).await.unwrap()["objective"], "of ann", "{method}");
    }
}

/// A run takes no reservation. Its request is let in when there is no such thread, and its admission waits.
#[tokio::test]
async fn a_run_is_not_admitted_on_a_thread_that_another_user_made_meanwhile() {
    let Gateway { app, _dir, .. } = Gateway::start_with("full", true).await;
    let file = KeyFile::new(&app.config.last_known().auth.keys_file);
    let (_, key) = file.create("bob", Role::User).unwrap();
    let send = |path: &str, body: &Value| {
        let request = Request::post(path).header("x-api-key", key.expose());
        let request = request.header("content-type", "application/json");
        let request = request.body(Body::from(body.to_string())).unwrap();
        tokio::spawn(super::router(Arc::clone(&app)).oneshot(request))
    };
    let (threads, runs) = (app.records.threads(), app.records.runs());
    for (thread, path, strategy) in [
        ("a", "/api/threads/a/runs", "reject"),
        ("b", "/api/threads/b/runs/stream", "enqueue"),
        ("c", "/api/threads/c/runs", "interrupt"),
        // Of these there is a thread, but it is another one by then.
        ("d", "/api/runs", "reject"),
        ("e", "/api/runs/batch", "reject"),
    ] {
        let of = |user: &str| NewThread {
            thread_id: thread.into(),
            user_id: Some(user.into()),
            ..NewThread::default()
        };
        let mut body = json!({
            "input": {"messages": [{"role": "user", "content": "of bob"}]},
            "multitask_strategy": strategy, "on_disconnect": "continue",
        });
        match thread {
            "d" => body["config"] = json!({"configurable": {"thread_id": thread}}),
            "e" => {
                threads.create(of("bob")).await.unwrap();
                body["thread_id"] = thread.into();
                body = json!([body]);
            }
            _ => {}
        }
        let unnoted = app.threads.unnoted(thread).await;
        let answer = send(path, &body);
        while app.runs.counts() == (0, 0) {
            tokio::task::yield_now().await;
        }
        if threads.get(thread, None).await.unwrap().is_some() {
            let deletion = runs.reserve(thread, WriterKind::Delete).await.unwrap();
            app.records.delete_thread(deletion).await.unwrap();
        }
        assert!(threads.create(of("ann")).await.unwrap().created);
        drop(unnoted);
        assert_eq!(answer.await.unwrap().unwrap().status(), 404, "{path}");
        let all = RunQuery { status: None, limit: 10, offset: 0 };
        assert!(runs.list_by_thread(thread, &all).await.unwrap().is_empty(), "{path}");
        assert_eq!(app.runs.counts(), (0, 0), "{path}");
    }
}

/// The thread of a request is deleted, and another user makes one with its id, before there is an answer.
#[tokio::test]
async fn an_answer_shows_no_thread_that_another_user_made_meanwhile() {
    async fn replaced(State(app): State<Arc<App>>) -> &'static str {
        let deletion = app.records.runs().reserve("x", WriterKind::Delete).await.unwrap();
        app.records.delete_thread(deletion).await.unwrap();
        assert!(app.records.threads().create(of("ann")).await.unwrap().created);
        "the state of ann's thread"
    }
    fn of(user: &str) -> NewThread {
        NewThread { thread_id: "x".into(), user_id: Some(user.into()), ..NewThread::default() }
    }
    for (method, status) in [("GET", 404), ("POST", 404), ("DELETE", 200)] {
        let Gateway { app, _dir, .. } = Gateway::start_with("full", true).await;
        let file = KeyFile::new(&app.config.last_known().auth.keys_file);
        let (_, key) = file.create("bob", Role::User).unwrap();
        assert!(app.records.threads().create(of("bob")).await.unwrap().created);
        let checked = from_fn_with_state(Arc::clone(&app), super::auth::authenticate);
        let router = Router::new().route("/api/threads/{thread_id}/read", any(replaced)).layer(checked);
        let router: Router = router.with_state(Arc::clone(&app));
        let request = Request::builder().method(method).uri("/api/threads/x/read");
        let request = request.header("x-api-key", key.expose()).body(Body::empty()).unwrap();
        let answer = router.oneshot(request).await.unwrap();
        assert_eq!(answer.status(), status, "{method}");
    }
}

/// Its stream says so, too.
#[tokio::test]
async fn the_result_of_a_run_that_was_deleted_meanwhile_says_so() {
    let Gateway { app, thread, _dir } = Gateway::start("full").await;
    let answer = finished(&app, &thread, "gone", app.streams.subscribe("gone")).await;
    assert_eq!(answer.status(), 200);
    let body: Value =
        serde_json::from_slice(&to_bytes(answer.into_body(), usize::MAX).await.unwrap()).unwrap();
    let failure = json!({"error": "RunError", "message": DELETED});
    assert_eq!(body, json!({"status": "error", "error": DELETED, "__error__": failure}));
}

/// The answers to the commit of a deletion, and to all looks at what it did, are lost.
#[tokio::test]
async fn a_deletion_that_left_events_can_be_repeated() {
    let gateway = Gateway::start("full").await;
    let records = &gateway.app.records;
    let thread = NewThread { thread_id: "u".into(), ..NewThread::default() };
    records.threads().create(thread).await.unwrap();
    let run = NewRun { run_id: "r".into(), thread_id: "u".into(), ..NewRun::default() };
    records.runs().admit(run, MultitaskStrategy::Reject).await.unwrap();
    records.runs().start("r").await.unwrap();
    let event = NewEvent::new("run.start", "trace", json!(null));
    records.events().append("u", "r", vec![event]).await.unwrap();
    let end = RunEnd { status: RunStatus::Success, error: None, ..RunEnd::failed("") };
    records.runs().finish("r", &end).await.unwrap();

    let reservation = records.runs().reserve("u", WriterKind::Delete).await.unwrap();
    records.doubt_commit(1);
    records.fail_from(11);
    records.delete_thread(reservation).await.unwrap_err();
    records.fail_statement(0);
    assert!(records.threads().get("u", None).await.unwrap().is_none());
    assert!(records.events().has_remains("u").await);

    for status in [200, 404] {
        let request = Request::delete("/api/threads/u").body(Body::empty()).unwrap();
        let response = super::router(Arc::clone(&gateway.app)).oneshot(request).await.unwrap();
        assert_eq!(response.status(), status);
        assert!(!records.events().has_remains("u").await);
    }
}

/// A view of one delegated task reads its events page by page.
#[tokio::test]
async fn the_events_of_one_task_are_found_before_they_are_counted() {
    let gateway = Gateway::start("full").await;
    gateway.record("r1", RunStatus::Running).await;
    let event = |task: Option<&str>| {
        let mut event = NewEvent::new("subagent.step", "subagent", json!({"kind": "ai"}));
        event.metadata.extend(task.map(|task| ("task_id".to_owned(), json!(task))));
        event
    };
    let events = [Some("a"), Some("b"), None, Some("b"), Some("a"), Some("b")].map(event);
    gateway.app.records.events().append("t", "r1", events.into()).await.unwrap();
    let seqs = async |query: &str| -> Vec<i64> {
        let events = gateway.get(&format!("/runs/r1/events?{query}")).await;
        events.as_array().unwrap().iter().map(|event| event["seq"].as_i64().unwrap()).collect()
    };
    assert_eq!(seqs("task_id=b&limit=2").await, [2, 4]);
    assert_eq!(seqs("task_id=b&limit=2&after_seq=4").await, [6]);
    assert_eq!(seqs("task_id=a&event_types=subagent.step").await, [1, 5]);
    assert_eq!(seqs("task_id=a&event_types=subagent.end").await, [] as [i64; 0]);
}

#[tokio::test]
async fn a_nested_namespace_without_an_id_is_read_at_its_own_head() {
    for mode in MODES {
        let gateway = Gateway::start(mode).await;
        let nested = gateway.app.threads.accessor().clone().in_namespace("nested".into());
        let mut ids = Vec::new();
        for _ in 0..2 {
            let mut writer = StepWriter::open(&nested, &gateway.thread, None).await.unwrap();
            let state = writer.commit(Source::Loop, Vec::new(), Map::new()).await.unwrap();
            ids.insert(0, json!(state.key.id.to_string()));
        }
        let selector = json!({"checkpoint": {"checkpoint_ns": "nested"}});
        let state = gateway.post("/state/checkpoint", selector.clone()).await;
        assert_eq!(state["checkpoint"]["checkpoint_id"], ids[0], "{mode}");
        let history = gateway.post("/history", selector).await;
        let found: Vec<&Value> =
            history.as_array().unwrap().iter().map(|entry| &entry["checkpoint_id"]).collect();
        assert_eq!(found, ids.iter().collect::<Vec<_>>(), "{mode}");
    }
}

/// A chat in another process holds no reservation: what it wrote to stays whole.
#[tokio::test]
async fn a_thread_that_changes_while_it_is_deleted_keeps_its_subagents() {
    for mode in MODES {
        let gateway = Gateway::start(mode).await;
        let accessor = gateway.app.threads.accessor();
        let row = execution_of(&gateway.app.records, "t").await.unwrap();
        let child = ThreadId::from(row.child_thread.as_str());
        accessor.create(&child, Map::new()).await.unwrap();

        let reservation = gateway.app.threads.reserve("t", WriterKind::Delete).await.unwrap();
        let seen = accessor.look(&gateway.thread).await.unwrap();
        gateway.turn("r1").await;
        let refused = delete_contents(&gateway.app, &reservation, seen).await.unwrap_err();
        assert_eq!(refused.into_response().status(), 409, "{mode}");
        assert!(accessor.get(&child, None).await.unwrap().is_some(), "{mode}");

        let seen = accessor.look(&gateway.thread).await.unwrap();
        delete_contents(&gateway.app, &reservation, seen).await.unwrap();
        assert!(accessor.get(&gateway.thread, None).await.unwrap().is_none(), "{mode}");
        assert!(accessor.get(&child, None).await.unwrap().is_none(), "{mode}");
    }
}

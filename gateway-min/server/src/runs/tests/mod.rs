//! Runs from admission to their last write, in both modes. Whatever savers could do differently is tested on all three.

mod clocks;
mod dead;
mod elsewhere;
mod faults;
mod fences;
mod golden;
mod left;
mod many;
mod older;
mod seeded;
mod shape;

use std::path::Path;
use std::sync::Arc;

use futures::StreamExt as _;
use serde_json::{Map, Value as Json, json};
use tempfile::TempDir;
use threadkeep::id::ThreadId;
use threadkeep::mode::ModeRegister;
use threadkeep::state::{HistoryQuery, StateSnapshot};
use threadkeep_agent::Interrupts;
use threadkeep_agent::model::scripted::gate;
use threadkeep_testing::Database;

use super::admission::{CreateError, Created, OnThread};
use super::request::{Delegation, OnDisconnect, RunConfig, RunInput, RunOptions, RunRequest, StreamMode};
use crate::app::{App, Parts};
use crate::auth::Principal;
use crate::streams::bridge::Frame;
use threadkeep_config::{ConfigHandle, Environment, LoadOptions};
use threadkeep_records::{
    CancelAction, CancelOutcome, EventQuery, LEASE_EXPIRED_ERROR, MultitaskStrategy, NewThread, RunRow,
    RunStatus, ThreadStatus,
};

pub(super) struct Gateway {
    pub(super) app: Arc<App>,
    dir: TempDir,
    /// The database of a gateway on Postgres.
    _database: Option<Database>,
}

/// Where and how a gateway stores its threads: `database.backend` and `database.checkpoint_channel_mode`.
pub(super) type On = (&'static str, &'static str);

/// Every stream mode.
const STREAM_MODES: [StreamMode; 7] = [
    StreamMode::Values,
    StreamMode::MessagesTuple,
    StreamMode::Updates,
    StreamMode::Debug,
    StreamMode::Tasks,
    StreamMode::Checkpoints,
    StreamMode::Custom,
];

/// Every saver.
pub(super) const SAVERS: [&str; 3] = ["memory", "sqlite", "postgres"];

/// Every saver in both modes.
pub(super) fn everywhere() -> impl Iterator<Item = On> {
    SAVERS.into_iter().flat_map(|saver| MODES.map(|mode| (saver, mode)))
}

impl Gateway {
    /// On the memory backend.
    pub(super) async fn start(mode: &'static str, script: &Json) -> Self {
        Self::start_on(("memory", mode), script).await
    }

    /// As [`Self::start`], on this backend.
    pub(super) async fn start_on(on: On, script: &Json) -> Self {
        Self::start_at(on, 3, script).await
    }

    /// As [`Self::start_on`], at this cadence.
    pub(super) async fn start_at(on: On, frequency: u64, script: &Json) -> Self {
        Self::start_with(on, frequency, script, Parts::default()).await
    }

    /// As [`Self::start_at`], with these parts in the place of the usual ones.
    pub(super) async fn start_with((backend, mode): On, frequency: u64, script: &Json, parts: Parts) -> Self {
        let database = match backend {
            "postgres" => Some(threadkeep_testing::postgres().unwrap().database().await.unwrap()),
            _ => None,
        };
        let dir = TempDir::new().unwrap();
        std::fs::write(dir.path().join("script.json"), script.to_string()).unwrap();
        let config = json!({
            "config_version": 49,
            "database": {"backend": backend, "checkpoint_channel_mode": mode,
                         "postgres_url": database.as_ref().map(Database::url),
                         "sqlite_synchronous": "normal",
                         "checkpoint_delta": {"snapshot_frequency": frequency}},
            "models": [{"name": "m", "use": "scripted", "model": "m", "script": "script.json"}],
            "sandbox": {"use": "local", "allow_host_bash": true},
            // The only process on its database.
            "run_ownership": {"heartbeat_enabled": false},
        });
        std::fs::write(dir.path().join("config.yaml"), config.to_string()).unwrap();
        let app = App::start_with(open(dir.path()), Arc::new(ModeRegister::new()), parts).await.unwrap();
        app.records
            .threads()
            .create(NewThread { thread_id: "t".into(), ..NewThread::default() })
            .await
            .unwrap();
        Self { app, dir, _database: database }
    }

    pub(super) async fn create(&self, request: RunRequest) -> Result<Created, CreateError> {
        self.create_on("t", request, None).await
    }

    pub(super) async fn create_on(
        &self,
        thread: &str,
        request: RunRequest,
        key: Option<String>,
    ) -> Result<Created, CreateError> {
        let caller = Principal::single_user();
        self.app.runs.create(thread, OnThread::Existing(&caller), request, None, key).await
    }

    /// Runs to the end; returns the frames by name, and the row.
    pub(super) async fn run(&self, request: RunRequest) -> (Vec<(String, Json)>, RunRow) {
        let created = self.create(request).await.unwrap();
        let frames = frames(created.stream).await;
        (frames, self.row(&created.run.run_id).await)
    }

    pub(super) async fn row(&self, run_id: &str) -> RunRow {
        self.app.runs.ended(run_id).await.unwrap().unwrap()
    }

    /// A section of the configuration file.
    pub(super) fn section(&self, section: &str) -> Json {
        let text = std::fs::read_to_string(self.dir.path().join("config.yaml")).unwrap();
        serde_json::from_str::<Json>(&text).unwrap()[section].take()
    }

    /// Edits a section of the configuration file while the gateway runs.
    pub(super) fn configure(&self, section: &str, value: &Json) {
        let path = self.dir.path().join("config.yaml");
        let mut config: Json = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        config[section] = value.clone();
        std::fs::write(&path, config.to_string()).unwrap();
    }

    pub(super) async fn head(&self) -> Option<StateSnapshot> {
        self.app.threads.accessor().get(&ThreadId::from("t"), None).await.unwrap()
    }

    pub(super) async fn history(&self) -> Vec<StateSnapshot> {
        self.app.threads.accessor().history(&ThreadId::from("t"), HistoryQuery::default()).await.unwrap()
    }

    pub(super) async fn events(&self, run_id: &str) -> Vec<String> {
        let rows = self.app.records.events().list(&EventQuery::new("t", run_id)).await.unwrap();
        rows.into_iter().map(|row| row.event_type).collect()
    }
}

fn open(dir: &Path) -> ConfigHandle {
    let options = LoadOptions {
        config_path: None,
        environment: Environment::from_iter([(
            "SVC_HOME".to_owned(),
            dir.join("state").display().to_string(),
        )]),
        working_dir: dir.to_owned(),
    };
    ConfigHandle::open(&options).unwrap()
}

async fn frames(stream: crate::streams::bridge::Subscription) -> Vec<(String, Json)> {
    let mut stream = std::pin::pin!(stream);
    let mut frames = Vec::new();
    while let Some(frame) = stream.next().await {
        match frame {
            Frame::Event(event) => {
                frames.push((event.name.to_string(), serde_json::from_slice(&event.data).unwrap()));
            }
            Frame::Heartbeat => {}
            Frame::Gap(gap) => panic!("{gap:?}"),
            Frame::End => frames.push(("end".into(), Json::Null)),
        }
    }
    frames
}

pub(super) fn ask(text: &str) -> RunRequest {
    let message = json!({"type": "human", "content": text, "id": uuid::Uuid::new_v4().to_string()});
    let values = Map::from_iter([("messages".to_owned(), json!([message]))]);
    RunRequest { input: RunInput::Values(values), ..go_on() }
}

pub(super) fn go_on() -> RunRequest {
    RunRequest {
        assistant_id: None,
        agent: None,
        input: RunInput::Continue,
        metadata: Map::new(),
        config: RunConfig { recursion_limit: 100, ..RunConfig::default() },
        delegation: Delegation::default(),
        checkpoint: None,
        options: options([StreamMode::Values]),
        kwargs: json!({}),
    }
}

pub(super) fn options(modes: impl Into<Vec<StreamMode>>) -> RunOptions {
    RunOptions { stream_modes: modes.into(), on_disconnect: OnDisconnect::Continue, ..RunOptions::default() }
}

pub(super) fn from(state: &StateSnapshot, request: RunRequest) -> RunRequest {
    RunRequest { checkpoint: Some(state.key.id), ..request }
}

pub(super) fn script() -> Json {
    json!({"rules": [
        {"when": {"contains": ["tools"]}, "answers": [
            {"text": "Two tools.", "tool_calls": [
                {"name": "write_file", "args": {"path": "a.txt", "content": "A"}},
                {"name": "no_such_tool", "args": {}},
            ], "usage": {"input_tokens": 10, "output_tokens": 5}},
            {"text": "Done.", "usage": {"input_tokens": 20, "output_tokens": 2}},
        ]},
        {"when": {"contains": ["fail"]}, "answers": [{"error": {"kind": "fatal", "message": "no such model"}}]},
        {"when": {"contains": ["clarify"]}, "answers": [
            {"tool_calls": [{"name": "ask_clarification", "args": {"question": "Which?"}}]},
        ]},
        {"when": {"contains": ["loop"]}, "repeat_last": true, "answers": [
            {"text": "again", "tool_calls": [{"name": "ls", "args": {}}]},
        ]},
        {"answers": [{"text": "You said: {{input}}", "usage": {"input_tokens": 3, "output_tokens": 4}}]},
    ]})
}

pub(super) fn kinds(state: &StateSnapshot) -> Vec<String> {
    let messages = state.json("messages").unwrap().unwrap_or_default();
    messages.as_array().unwrap().iter().map(|m| m["type"].as_str().unwrap().to_owned()).collect()
}

pub(super) const MODES: [&str; 2] = ["full", "delta"];

#[tokio::test]
async fn a_simple_run_writes_input_answer_and_duration() {
    use threadkeep_records::{Clock, Records, RecordsOptions};
    for mode in MODES {
        // A clock that does not move: on a busy machine the run may take longer than a second.
        let now = chrono::Utc::now();
        let options = RecordsOptions { clock: Clock::from_fn(move || now), ..RecordsOptions::default() };
        let records = Some(Records::open_memory(options).await.unwrap());
        let parts = Parts { records, ..Parts::default() };
        let gateway = Gateway::start_with(("memory", mode), 3, &script(), parts).await;
        let (frames, row) = gateway.run(ask("hello")).await;
        let names: Vec<&str> = frames.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["metadata", "values", "values", "end"]);
        assert_eq!(frames[0].1, json!({"run_id": row.run_id, "thread_id": "t"}));
        assert_eq!(frames[2].1["messages"][1]["content"], "You said: hello");
        assert_eq!(frames[2].1["title"], "hello");
        assert_eq!((row.status, row.error, row.stop_reason), (RunStatus::Success, None, None));
        assert_eq!(row.totals.total_tokens, 7);
        assert_eq!(row.totals.message_count, 2);

        let history = gateway.history().await;
        let shape: Vec<_> = history.iter().rev().map(|s| (s.metadata.step, s.next.len())).collect();
        assert_eq!(shape, [(-1, 1), (0, 0), (1, 0)], "input, model, duration");
        let head = &history[0].metadata;
        assert!(head.is_duration_only());
        assert_eq!(head.extra["run_durations"], json!({ row.run_id.as_str(): 0 }));
        assert_eq!(history[0].metadata.delta_marker, mode == "delta");
        let human = history[0].json("messages").unwrap().unwrap()[0].clone();
        assert_eq!(human["additional_kwargs"]["run_id"], row.run_id.as_str());
        assert_eq!(
            gateway.events(&row.run_id).await,
            ["run.start", "llm.human.input", "llm.ai.response", "run.end", "run.delivery"]
        );
        let thread = gateway.app.records.threads().get("t", None).await.unwrap().unwrap();
        assert_eq!((thread.status, thread.display_name.as_deref()), (ThreadStatus::Idle, Some("hello")));
    }
}

#[tokio::test]
async fn parallel_tool_calls_are_answered_in_the_order_of_the_calls() {
    for mode in MODES {
        let gateway = Gateway::start(mode, &script()).await;
        let (_, row) = gateway.run(ask("use tools")).await;
        let head = gateway.head().await.unwrap();
        assert_eq!(kinds(&head), ["human", "ai", "tool", "tool", "ai"]);
        let messages = head.json("messages").unwrap().unwrap();
        assert_eq!((&messages[2]["name"], &messages[2]["status"]), (&json!("write_file"), &json!("success")));
        assert_eq!((&messages[3]["name"], &messages[3]["status"]), (&json!("no_such_tool"), &json!("error")));
        assert_eq!(row.status, RunStatus::Success);
        assert_eq!(row.totals.llm_call_count, 2);
        assert_eq!(std::fs::read_to_string(gateway.dir.path().join("state/threads/t/a.txt")).unwrap(), "A");
        let steps: Vec<_> = gateway.history().await.iter().map(|s| s.metadata.step).collect();
        assert_eq!(steps, [3, 2, 1, 0, -1], "input, model, tools, model, duration");
    }
}

#[tokio::test]
async fn every_stream_mode_shows_the_superstep_in_the_order_of_the_reference() {
    let gateway = Gateway::start("full", &script()).await;
    let all = [
        StreamMode::Values,
        StreamMode::MessagesTuple,
        StreamMode::Updates,
        StreamMode::Tasks,
        StreamMode::Checkpoints,
    ];
    let (frames, _) = gateway.run(RunRequest { options: options(all), ..ask("hi") }).await;
    let mut names: Vec<&str> = frames.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    assert_eq!(
        names,
        [
            "metadata",
            "values",
            "checkpoints",
            "tasks",
            "messages",
            "updates",
            "tasks",
            "values",
            "checkpoints",
            "end"
        ]
    );
    let chunks: String = frames
        .iter()
        .filter(|(name, _)| name == "messages")
        .map(|(_, f)| f[0]["content"].as_str().unwrap())
        .collect();
    assert_eq!(chunks, "You said: hi");
}

#[tokio::test]
async fn a_failing_model_leaves_a_marked_answer_and_a_run_in_error() {
    let gateway = Gateway::start("delta", &script()).await;
    let (frames, row) = gateway.run(ask("fail")).await;
    assert!(!frames.iter().any(|(name, _)| name == "error"));
    assert_eq!(row.status, RunStatus::Error);
    assert!(row.error.unwrap().contains("no such model"));
    let head = gateway.head().await.unwrap();
    let messages = head.json("messages").unwrap().unwrap();
    assert_eq!(messages[1]["additional_kwargs"]["svc_error_fallback"], true);
    assert!(!head.metadata.is_duration_only(), "only a successful run is noted");
}

#[tokio::test]
async fn a_question_to_the_user_ends_the_run() {
    let gateway = Gateway::start("full", &script()).await;
    let (_, row) = gateway.run(ask("clarify")).await;
    assert_eq!(row.status, RunStatus::Success);
    let head = gateway.head().await.unwrap();
    assert_eq!(kinds(&head), ["human", "ai", "tool"]);
    assert!(head.next.is_empty());
    assert_eq!(head.json("title").unwrap(), Some(json!("clarify")), "its answer begins a second turn");
}

#[tokio::test]
async fn an_agent_that_goes_round_in_circles_is_stopped() {
    let gateway = Gateway::start("delta", &script()).await;
    let (_, row) = gateway.run(ask("loop")).await;
    assert_eq!((row.status, row.stop_reason.as_deref()), (RunStatus::Success, Some("loop_capped")));
    assert!(gateway.head().await.unwrap().next.is_empty());
}

#[tokio::test]
async fn the_recursion_limit_fails_the_run_and_leaves_the_next_node() {
    let gateway = Gateway::start("full", &script()).await;
    let (frames, row) = gateway
        .run(RunRequest { config: RunConfig { recursion_limit: 2, ..RunConfig::default() }, ..ask("loop") })
        .await;
    let error = frames.iter().find(|(name, _)| name == "error").unwrap();
    assert_eq!(
        error.1,
        json!({"name": "GraphRecursionError",
               "message": "Recursion limit of 2 reached without hitting a stop condition."})
    );
    assert_eq!(row.status, RunStatus::Error);
    assert_eq!(gateway.head().await.unwrap().next.len(), 1);
    let last = gateway.events(&row.run_id).await;
    assert_eq!(&last[last.len() - 2..], ["run.error", "run.delivery"]);
}

pub(super) fn gated(name: &str) -> Json {
    json!({"rules": [
        {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": name}}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]})
}

#[tokio::test]
async fn an_interrupted_run_keeps_what_it_committed_and_the_next_one_goes_on() {
    for on @ (saver, mode) in everywhere() {
        let name = format!("interrupt-{saver}-{mode}");
        let gateway = Gateway::start_on(on, &gated(&name)).await;
        let created = gateway.create(ask("wait")).await.unwrap();
        gate(&name).reached().await;
        let conflict = gateway.create(ask("me too")).await.err().unwrap();
        assert_eq!(conflict.to_string(), "Thread t already has an active run");
        let run_id = &created.run.run_id;
        assert_eq!(
            gateway.app.runs.cancel(run_id, CancelAction::Interrupt).await.unwrap(),
            CancelOutcome::Accepted
        );
        let row = gateway.row(run_id).await;
        assert_eq!((row.status, row.error), (RunStatus::Interrupted, None));
        let head = gateway.head().await.unwrap();
        assert_eq!(kinds(&head), ["human"]);
        assert_eq!(head.next.len(), 1);
        let again = gateway.app.runs.cancel(run_id, CancelAction::Interrupt).await.unwrap();
        assert_eq!(again, CancelOutcome::AlreadyInterrupted);
        let (_, row) = gateway.run(ask("more")).await;
        assert_eq!(row.status, RunStatus::Success);
        assert_eq!(kinds(&gateway.head().await.unwrap()), ["human", "human", "ai"]);
    }
}

#[tokio::test]
async fn a_rolled_back_run_leaves_the_state_before_it_as_the_newest_head() {
    for on @ (saver, mode) in everywhere() {
        let name = format!("rollback-{saver}-{mode}");
        let gateway = Gateway::start_on(on, &gated(&name)).await;
        gateway.run(ask("first")).await;
        let before = gateway.head().await.unwrap();
        let created = gateway.create(ask("wait")).await.unwrap();
        gate(&name).reached().await;
        let cancelled = gateway.head().await.unwrap();
        gateway.app.runs.cancel(&created.run.run_id, CancelAction::Rollback).await.unwrap();
        let row = gateway.row(&created.run.run_id).await;
        assert_eq!((row.status, row.error.as_deref()), (RunStatus::Error, Some("Rolled back by user")));
        let head = gateway.head().await.unwrap();
        assert_eq!(head.values().unwrap(), before.values().unwrap(), "{on:?}");
        let parent = if mode == "delta" { &cancelled } else { &before };
        assert_eq!(head.parent, Some(parent.key.id));
        assert_eq!(head.metadata.extra["svc_agent_name"], "__default__");
        assert!(head.next.is_empty());
    }
}

#[tokio::test]
async fn rolling_back_the_first_run_of_a_thread_without_checkpoints_leaves_none() {
    for on @ (saver, mode) in everywhere() {
        let name = format!("first-{saver}-{mode}");
        let gateway = Gateway::start_on(on, &gated(&name)).await;
        let created = gateway.create(ask("wait")).await.unwrap();
        gate(&name).reached().await;
        gateway.app.runs.cancel(&created.run.run_id, CancelAction::Rollback).await.unwrap();
        gateway.row(&created.run.run_id).await;
        assert_eq!(gateway.head().await, None);
    }
}

#[tokio::test]
async fn an_interrupting_run_waits_for_its_predecessor_and_then_runs() {
    let gateway = Gateway::start("delta", &gated("takeover")).await;
    let first = gateway.create(ask("wait")).await.unwrap();
    gate("takeover").reached().await;
    let request = RunRequest {
        options: RunOptions { multitask_strategy: MultitaskStrategy::Interrupt, ..options([]) },
        ..ask("now")
    };
    let (_, second) = gateway.run(request).await;
    assert_eq!(gateway.row(&first.run.run_id).await.status, RunStatus::Interrupted);
    assert_eq!(second.status, RunStatus::Success);
    assert_eq!(kinds(&gateway.head().await.unwrap()), ["human", "human", "ai"]);
}

#[tokio::test]
async fn a_waiting_run_is_interrupted_when_the_gateway_stops() {
    let gateway = Gateway::start("full", &gated("both")).await;
    let first = gateway.create(ask("wait")).await.unwrap();
    gate("both").reached().await;
    let options = RunOptions { multitask_strategy: MultitaskStrategy::Interrupt, ..options([]) };
    // The first run is cancelled; the second one waits for it, and is cancelled itself.
    let second = gateway.create(RunRequest { options, ..ask("wait") }).await.unwrap();
    gateway.app.stop_runs().await;
    for run in [first, second] {
        assert_eq!(gateway.row(&run.run.run_id).await.status, RunStatus::Interrupted);
    }
}

/// The process could not renew its leases in time. The clients of its runs did not ask for their end, so they are shown an
/// error, also those of a run that still waited.
#[tokio::test]
async fn a_run_that_is_lost_ends_in_error_also_while_it_waits() {
    let gateway = Gateway::start("full", &gated("lost")).await;
    let first = gateway.create(ask("wait")).await.unwrap();
    gate("lost").reached().await;
    let options = RunOptions { multitask_strategy: MultitaskStrategy::Enqueue, ..options([]) };
    let second = gateway.create(RunRequest { options, ..ask("wait") }).await.unwrap();
    let lost = gateway.app.runs.local.lose_expired(tokio::time::Instant::now(), std::time::Duration::ZERO);
    assert_eq!(lost.len(), 2, "{lost:?}");
    for created in [second, first] {
        let row = gateway.row(&created.run.run_id).await;
        assert_eq!((row.status, row.error.as_deref()), (RunStatus::Error, Some(LEASE_EXPIRED_ERROR)));
        let frames = frames(created.stream).await;
        let [.., (error, _), (end, _)] = &frames[..] else { panic!("{frames:?}") };
        assert_eq!((error.as_str(), end.as_str()), ("error", "end"), "{frames:?}");
    }
}

#[tokio::test]
async fn a_run_whose_owner_leaves_is_interrupted_and_a_joiner_does_not_matter() {
    let gateway = Gateway::start("full", &gated("owner")).await;
    let created = gateway.create(RunRequest { options: RunOptions::default(), ..ask("wait") }).await.unwrap();
    gate("owner").reached().await;
    drop(gateway.app.streams.subscribe(&created.run.run_id));
    assert_eq!(
        gateway.app.records.runs().get(&created.run.run_id).await.unwrap().unwrap().status,
        RunStatus::Running
    );
    drop(created.stream);
    assert_eq!(gateway.row(&created.run.run_id).await.status, RunStatus::Interrupted);
}

#[tokio::test]
async fn a_breakpoint_stops_the_run_and_the_next_one_without_input_continues() {
    let gateway = Gateway::start("delta", &script()).await;
    let stopping = || RunOptions {
        interrupt_before: Interrupts::Nodes(vec!["tools".to_owned()]),
        ..options([StreamMode::Values, StreamMode::Updates])
    };
    let request = RunRequest { options: stopping(), ..ask("use tools") };
    let (frames, row) = gateway.run(request).await;
    assert_eq!(row.status, RunStatus::Success);
    assert!(frames.contains(&("updates".into(), json!({"__interrupt__": []}))));
    assert_eq!(frames[frames.len() - 2].1["__interrupt__"], json!([]));
    assert_eq!(gateway.head().await.unwrap().next.len(), 2);
    let (_, row) = gateway.run(RunRequest { options: stopping(), ..go_on() }).await;
    assert_eq!(row.status, RunStatus::Success);
    assert_eq!(kinds(&gateway.head().await.unwrap()), ["human", "ai", "tool", "tool", "ai"]);
}

#[tokio::test]
async fn an_edited_cadence_fails_the_next_run_and_an_edited_mode_is_ignored() {
    let gateway = Gateway::start("delta", &script()).await;
    let path = gateway.dir.path().join("config.yaml");
    let config = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, config.replace("\"delta\"", "\"full\"")).unwrap();
    let (_, row) = gateway.run(ask("one")).await;
    assert_eq!(row.status, RunStatus::Success);
    assert!(gateway.head().await.unwrap().metadata.delta_marker);
    std::fs::write(&path, config.replace("\"snapshot_frequency\":3", "\"snapshot_frequency\":4")).unwrap();
    let (frames, row) = gateway.run(ask("two")).await;
    let text =
        "checkpoint_delta.snapshot_frequency is restart-required and cannot change in a running process";
    assert_eq!((row.status, row.error.as_deref()), (RunStatus::Error, Some(text)));
    let error = json!({"name": "CheckpointModeReconfigurationError", "message": text});
    assert_eq!(frames, [("error".to_owned(), error), ("end".to_owned(), Json::Null)]);
}

#[tokio::test]
async fn a_stopping_gateway_interrupts_its_runs_and_takes_no_new_ones() {
    let gateway = Gateway::start("delta", &gated("stop")).await;
    let created = gateway.create(ask("wait")).await.unwrap();
    gate("stop").reached().await;
    let stopping = tokio::spawn({
        let app = Arc::clone(&gateway.app);
        async move { app.stop_runs().await }
    });
    let names: Vec<String> = frames(created.stream).await.into_iter().map(|(name, _)| name).collect();
    assert_eq!(names.last().map(String::as_str), Some("end"));
    stopping.await.unwrap();
    let refused = gateway.create(ask("late")).await.err().unwrap();
    assert!(refused.to_string().contains("is stopping"));
}

/// The second message belongs to the exchange that stopped at the breakpoint.
#[tokio::test]
async fn a_first_turn_that_stopped_at_a_breakpoint_and_went_on_with_another_message_gets_a_title() {
    for mode in MODES {
        let gateway = Gateway::start(mode, &script()).await;
        let stopping = RunOptions {
            interrupt_before: Interrupts::Nodes(vec!["tools".to_owned()]),
            ..options([StreamMode::Values])
        };
        gateway.run(RunRequest { options: stopping, ..ask("use tools") }).await;
        assert_eq!(gateway.head().await.unwrap().json("title").unwrap(), None, "it may continue unchanged");
        gateway.run(ask("rather not")).await;
        assert_eq!(gateway.head().await.unwrap().json("title").unwrap(), Some(json!("use tools")), "{mode}");
        let thread = gateway.app.records.threads().get("t", None).await.unwrap().unwrap();
        assert_eq!(thread.display_name.as_deref(), Some("use tools"));
    }
}

#[tokio::test]
async fn an_enqueued_run_waits_for_a_writer_that_is_no_run_and_cannot_be_overtaken() {
    for mode in MODES {
        let gateway = Gateway::start(mode, &script()).await;
        let runs = gateway.app.records.runs();
        let reservation = runs.reserve("t", threadkeep_records::WriterKind::CheckpointWrite).await.unwrap();
        let queued =
            RunOptions { multitask_strategy: MultitaskStrategy::Enqueue, ..options([StreamMode::Values]) };
        let created = gateway.create(RunRequest { options: queued, ..ask("hello") }).await.unwrap();
        assert!(gateway.create(ask("now")).await.is_err());
        assert_eq!(runs.get(&created.run.run_id).await.unwrap().unwrap().status, RunStatus::Pending);
        reservation.release().await.unwrap();
        let row = gateway.row(&created.run.run_id).await;
        assert_eq!(
            (row.status, kinds(&gateway.head().await.unwrap())),
            (RunStatus::Success, vec!["human".into(), "ai".into()])
        );
    }
}

/// It is not known to anybody, so nothing is kept of it: clients may ask again and again.
#[tokio::test]
async fn a_run_that_is_refused_leaves_no_stream() {
    let gateway = Gateway::start("full", &gated("refused")).await;
    let first = gateway.create(ask("wait")).await.unwrap();
    gate("refused").reached().await;
    for _ in 0..3 {
        assert!(gateway.create(ask("now")).await.is_err());
    }
    assert_eq!(gateway.app.streams.counts().0, 1, "that of the first run");
    gate("refused").open();
    assert_eq!(gateway.row(&first.run.run_id).await.status, RunStatus::Success);
}

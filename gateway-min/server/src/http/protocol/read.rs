//! The commands that read a thread: `state.get`, `state.listCheckpoints` and `agent.getTree`.

use serde_json::{Map, Value, json};
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::Load;
use threadkeep::state::HistoryQuery;
use threadkeep_agent::serialize;
use threadkeep_records::{RunQuery, RunRow, RunStatus};

use super::filter::strings;
use super::reply::{Code, Refusal};
use super::translate::GRAPH;
use crate::app::App;
use crate::http::error::OrApiError as _;
use crate::http::fields::{Fields, Flaw, FromFields};
use crate::http::runs::existing;

const STATE_FAILED: &str = "Failed to read state";
const RUN_FAILED: &str = "Failed to read run";
/// The maximum number of checkpoints in an answer (service reference, "Limits").
const LIMIT_MAX: i64 = 100;
const LIMIT_DEFAULT: usize = 10;
const NO_NAMESPACE: &str =
    "The agents within a thread keep no state of their own in it: send an empty namespace";

/// The parameters of `state.get`.
#[derive(Debug)]
pub(super) struct StateQuery {
    namespace: Vec<String>,
    /// Only these channels.
    keys: Option<Vec<String>>,
}

/// The parameters of `state.listCheckpoints`.
#[derive(Debug)]
pub(super) struct CheckpointQuery {
    namespace: Vec<String>,
    limit: usize,
    /// Only older ones.
    before: Option<CheckpointId>,
}

/// The parameters of `agent.getTree`.
#[derive(Debug)]
pub(super) struct TreeQuery {
    /// The run; without it, the newest.
    run_id: Option<String>,
}

impl FromFields for StateQuery {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let namespace = fields.field("namespace").required().read(|sent| strings(&sent));
        Self { namespace: namespace.unwrap_or_default(), keys: fields.field("keys").nullable().texts() }
    }
}

impl FromFields for CheckpointQuery {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let limit = fields.field("limit").nullable().integer(&(1..=LIMIT_MAX));
        Self {
            namespace: fields.field("namespace").nullable().read(|sent| strings(&sent)).unwrap_or_default(),
            limit: limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(LIMIT_DEFAULT),
            before: fields.field("before").nullable().read(|sent| {
                let id = sent.as_str().and_then(|id| id.parse().ok());
                id.ok_or_else(|| (Flaw::new("checkpoint_id", "Input should be the id of a checkpoint"), sent))
            }),
        }
    }
}

impl FromFields for TreeQuery {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self { run_id: fields.field("run_id").nullable().text() }
    }
}

/// Only the thread's own agent has a state here.
fn own(namespace: &[String]) -> Result<(), Refusal> {
    if namespace.is_empty() { Ok(()) } else { Err(Refusal::absent(Code::NoSuchNamespace, NO_NAMESPACE)) }
}

/// The channel values at the head.
pub(super) async fn state(app: &App, thread: &ThreadId, query: StateQuery) -> Result<Value, Refusal> {
    existing(app, thread).await?;
    own(&query.namespace)?;
    let accessor = app.threads.accessor();
    let unknown =
        query.keys.iter().flatten().find(|key| accessor.table().names().all(|name| name.as_str() != **key));
    if let Some(key) = unknown {
        let text = format!("params.keys: there is no channel '{key}'");
        return Err(Refusal::new(Code::InvalidArgument, axum::http::StatusCode::UNPROCESSABLE_ENTITY, text));
    }
    let load = match query.keys {
        Some(keys) => Load::Only(keys.into_iter().map(ChannelName::from).collect()),
        None => Load::All,
    };
    let head = accessor.get_loading(thread, None, load).await.or_engine(thread, STATE_FAILED)?;
    let Some(head) = head else {
        let text = format!("Thread {thread} has no checkpoint");
        return Err(Refusal::absent(Code::NoSuchCheckpoint, text));
    };
    let values = serialize::values(&head).or_engine(thread, STATE_FAILED)?;
    let mut shown = json!({ "checkpoint": { "id": head.key.id.to_string() } });
    // `json!` would copy them.
    shown["values"] = Value::Object(values);
    Ok(shown)
}

/// The checkpoints, newest first.
pub(super) async fn checkpoints(
    app: &App,
    thread: &ThreadId,
    query: CheckpointQuery,
) -> Result<Value, Refusal> {
    existing(app, thread).await?;
    own(&query.namespace)?;
    let accessor = app.threads.accessor();
    // The gate checks the head even if the page starts at an older checkpoint.
    accessor.get_loading(thread, None, Load::None).await.or_engine(thread, STATE_FAILED)?;
    let query =
        HistoryQuery { before: query.before, limit: Some(query.limit), filter: Map::new(), load: Load::None };
    let states = accessor.history(thread, query).await.or_engine(thread, STATE_FAILED)?;
    let summaries = states.iter().map(|state| {
        json!({
            "id": state.key.id.to_string(),
            "timestamp": state.created_at(),
            "step": state.metadata.step,
            "metadata": serialize::metadata(&state.metadata),
        })
    });
    Ok(json!({ "checkpoints": summaries.collect::<Vec<_>>() }))
}

/// The thread's agent. What it delegated is a list of its own, `GET /api/threads/{thread_id}/executions`.
pub(super) async fn tree(app: &App, thread: &ThreadId, query: TreeQuery) -> Result<Value, Refusal> {
    existing(app, thread).await?;
    let run = if let Some(id) = &query.run_id {
        app.records.runs().get(id).await.or_internal(RUN_FAILED)?
    } else {
        let newest = RunQuery { status: None, limit: 1, offset: 0 };
        let runs = app.records.runs().list_by_thread(thread.as_str(), &newest).await;
        runs.or_internal(RUN_FAILED)?.pop()
    };
    let run = run.filter(|run| run.thread_id == thread.as_str());
    let run = run.ok_or_else(|| {
        let text = match query.run_id {
            Some(id) => format!("Run {id} not found"),
            None => format!("Thread {thread} has no run"),
        };
        Refusal::absent(Code::NoSuchRun, text)
    })?;
    let metadata = json!({ "run_id": run.run_id });
    let node = json!({ "namespace": [], "status": status(&run), "graph_name": GRAPH, "metadata": metadata });
    Ok(json!({ "tree": node }))
}

/// The status of a run as that of an agent.
fn status(run: &RunRow) -> &'static str {
    match run.reported_status() {
        RunStatus::Pending => "started",
        RunStatus::Running => "running",
        RunStatus::Success => "completed",
        RunStatus::Error | RunStatus::Timeout => "failed",
        RunStatus::Interrupted => "interrupted",
    }
}

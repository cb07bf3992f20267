//! The runs of a thread, and the events of one.

use std::sync::Arc;

use axum::extract::{Query, State};
use axum::response::Html;
use serde_json::json;
use threadkeep_agent::serialize::time;
use threadkeep_page::{EventLine, Excerpt, RunEvents, RunLine, Runs, seconds};

use super::super::auth::Caller;
use super::super::error::{ApiError, OrApiError as _};
use super::super::extract::{ApiPath, RunPath, ThreadPath};
use super::batches::of_thread;
use super::session::Viewer;
use super::threads::head;
use super::{Page, Parameters};
use crate::app::App;
use threadkeep_records::{EventQuery, OperationKind, RunQuery, RunRow};

const FAILED: &str = "Failed to read runs";
/// Runs on a page.
const RUNS: u32 = 100;
/// Events on a page.
const EVENTS: u32 = 500;
/// The maximum characters of a question in a list.
const QUESTION_CHARS: usize = 120;

/// `GET /threads/{thread_id}/runs`
pub(super) async fn list(
    State(app): State<Arc<App>>,
    Viewer(session): Viewer,
    Caller(caller): Caller,
    ApiPath(ThreadPath { thread_id }): ApiPath<ThreadPath>,
) -> Page {
    let thread = head(&app, &thread_id).await?;
    let query = RunQuery { status: None, limit: RUNS + 1, offset: 0 };
    let mut runs = app.records.runs().list_by_thread(thread_id.as_str(), &query).await.or_internal(FAILED)?;
    let has_more = runs.len() > RUNS as usize;
    runs.truncate(RUNS as usize);
    let view = Runs {
        batches: of_thread(&app, &caller, &thread_id).await?,
        runs: runs.iter().filter(|run| run.operation_kind == OperationKind::Run).map(line).collect(),
        has_more,
        thread,
    };
    Ok(Html(view.page(&session)))
}

pub(super) fn line(run: &RunRow) -> RunLine {
    let is_active = run.status.is_active();
    let took = (!is_active).then(|| (run.updated_at - run.created_at).num_seconds());
    let question = run.totals.first_human_message.as_deref();
    let number = |count: i64| u64::try_from(count).unwrap_or_default();
    RunLine {
        id: run.run_id.clone(),
        status: run.reported_status().as_str().to_owned(),
        is_waiting: run.waiting,
        is_active: is_active && run.cancel_action.is_none(),
        created_at: time(run.created_at),
        took: took.and_then(|took| u64::try_from(took).ok()).map(seconds),
        model: run.model_name.clone(),
        tokens: number(run.totals.total_tokens),
        calls: number(run.totals.llm_call_count),
        question: question.map(|question| question.chars().take(QUESTION_CHARS).collect()),
        error: run.error.clone(),
    }
}

/// `GET /threads/{thread_id}/runs/{run_id}`
pub(super) async fn events(
    State(app): State<Arc<App>>,
    Viewer(session): Viewer,
    ApiPath(RunPath { thread_id, run_id }): ApiPath<RunPath>,
    Query(parameters): Query<Parameters>,
) -> Page {
    let thread = head(&app, &thread_id).await?;
    let run = app.records.runs().get(&run_id).await.or_internal(FAILED)?;
    // A run of another thread is none of this one.
    let run =
        run.filter(|run| run.thread_id == thread_id.as_str() && run.operation_kind == OperationKind::Run);
    let run = run.ok_or_else(|| ApiError::not_found(format!("Run {run_id} not found")))?;
    let after_seq = parameters.get("after").and_then(|after| after.parse().ok());
    let query = EventQuery { after_seq, limit: EVENTS, ..EventQuery::new(thread_id.as_str(), &run_id) };
    let rows = app.records.events().list(&query).await.or_internal(FAILED)?;
    let more_after = (rows.len() >= EVENTS as usize).then(|| rows.last().map(|row| row.seq)).flatten();
    let events = rows.into_iter().map(|row| {
        let content = json!({"content": row.content, "metadata": row.metadata});
        EventLine {
            seq: row.seq,
            at: time(row.created_at),
            kind: row.event_type,
            category: row.category,
            // A value always has a JSON form.
            content: Excerpt::of(&serde_json::to_string_pretty(&content).unwrap_or_default()),
        }
    });
    let view = RunEvents { thread, run: line(&run), events: events.collect(), more_after };
    Ok(Html(view.page(&session)))
}

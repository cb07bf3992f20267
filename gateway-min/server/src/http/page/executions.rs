//! Delegations: those of a conversation with what happens in them, and one with all its steps.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::State;
use axum::response::Html;
use serde_json::{Map, Value};
use threadkeep::id::ThreadId;
use threadkeep_page::{Delegation, Excerpt, Execution, Step, count, seconds};

use super::super::error::{ApiError, OrApiError as _};
use super::super::executions::{self, ExecutionPath};
use super::super::extract::ApiPath;
use super::Page;
use super::conversation::summary;
use super::session::Viewer;
use super::threads::head;
use crate::app::App;
use threadkeep_records::{ExecutionKind, ExecutionRow};

const FAILED: &str = "Failed to read delegations";
/// The maximum number of delegations whose steps a conversation shows: those at work.
const LIVE: usize = 32;

/// What the runs of a thread delegated, and what happens in what is at work. The items of batches have pages of their own.
#[derive(Debug, Default)]
pub(super) struct Executions {
    rows: Vec<ExecutionRow>,
    /// By child thread.
    steps: HashMap<String, Vec<Step>>,
    /// The setting `token_usage.enabled`.
    shows_tokens: bool,
}

impl Executions {
    pub(super) async fn of(app: &App, thread: &ThreadId) -> Result<Self, ApiError> {
        let rows = app.records.executions().delegated_by_runs(thread.as_str()).await.or_internal(FAILED)?;
        let mut steps = HashMap::new();
        for row in
            rows.iter().filter(|row| row.kind == ExecutionKind::Task && !row.status.is_terminal()).take(LIVE)
        {
            // A subagent that cannot be read does not hide the conversation.
            let read = executions::steps(app, row).await.unwrap_or_default();
            steps.insert(row.child_thread.clone(), read.iter().map(step).collect());
        }
        Ok(Self { rows, steps, shows_tokens: shows_tokens(app).await })
    }

    /// What a call delegated, in this run.
    pub(super) fn of_call(&self, call: &str, run: Option<&str>) -> Vec<Delegation> {
        let is_of_call = |row: &&ExecutionRow| {
            row.parent_execution.is_none()
                && row.tool_call_id == call
                && run.is_none_or(|run| row.run_id == run)
        };
        self.rows.iter().filter(is_of_call).map(|row| self.delegation(row)).collect()
    }

    /// A delegation with what it delegated itself.
    fn delegation(&self, row: &ExecutionRow) -> Delegation {
        let below =
            self.rows.iter().filter(|other| other.parent_execution.as_ref() == Some(&row.execution_id));
        let is_newest = !self
            .rows
            .iter()
            .any(|other| other.execution_id == row.execution_id && other.attempt > row.attempt);
        let mut facts = Vec::new();
        if let Some(started) = row.started_at
            && let Some(ended) = row.completed_at
            && let Ok(took) = u64::try_from((ended - started).num_seconds())
        {
            facts.push(seconds(took));
        }
        if let Some(tokens) = row.tokens().filter(|tokens| self.shows_tokens && tokens.total_tokens > 0) {
            facts.push(format!("{} tokens", count(tokens.total_tokens)));
        }
        facts.extend(row.model_name.clone());
        if row.attempt > 1 {
            facts.push(format!("attempt {}", row.attempt));
        }
        Delegation {
            id: row.execution_id.clone(),
            agent: row.agent_name.clone(),
            description: row.description.clone(),
            status: row.status.as_str().to_owned(),
            facts,
            error: row.error.clone(),
            steps: self.steps.get(&row.child_thread).cloned().unwrap_or_default(),
            has_steps: is_newest && row.kind == ExecutionKind::Task,
            children: below.map(|row| self.delegation(row)).collect(),
        }
    }
}

async fn shows_tokens(app: &App) -> bool {
    app.config.current_async().await.token_usage.enabled
}

/// A step, as the API has it.
fn step(step: &Map<String, Value>) -> Step {
    let text = |key: &str| step.get(key).and_then(Value::as_str);
    let calls = step.get("tool_calls").and_then(Value::as_array).into_iter().flatten();
    let mut said = Excerpt::of(text("text").unwrap_or_default());
    if step.get("truncated") == Some(&Value::Bool(true)) {
        said.whole = Some(said.shown.len());
    }
    Step {
        tool: text("tool_name").map(str::to_owned),
        text: said,
        calls: calls
            .map(|call| (call["name"].as_str().unwrap_or_default().to_owned(), summary(&call["args"])))
            .collect(),
    }
}

/// `GET /threads/{thread_id}/executions/{execution_id}`
pub(super) async fn show(
    State(app): State<Arc<App>>,
    Viewer(session): Viewer,
    ApiPath(path): ApiPath<ExecutionPath>,
) -> Page {
    let thread = head(&app, &path.thread_id).await?;
    let row = executions::found(&app, &path).await?;
    let steps = executions::steps(&app, &row).await?;
    let has_ended = row.status.is_terminal();
    let rows =
        app.records.executions().delegated_by_runs(path.thread_id.as_str()).await.or_internal(FAILED)?;
    let all = Executions { rows, steps: HashMap::new(), shows_tokens: shows_tokens(&app).await };
    let delegation = Delegation { steps: steps.iter().map(step).collect(), ..all.delegation(&row) };
    Ok(Html(Execution { thread, delegation, has_ended }.page(&session)))
}

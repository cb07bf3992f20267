//! The tool `task`: hands a piece of work to a subagent and returns its report (service reference, "Subagent settings").

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, TimeDelta};
use serde::Deserialize;
use serde_json::{Map, Value as Json, json};
use threadkeep::id::ThreadId;
use threadkeep::state::StateAccessor;
use threadkeep_agent::model::message;
use threadkeep_agent::tools::{Report, Tool, ToolContext, ToolError, ToolOutput, ToolSpec, ToolStatus};
use threadkeep_records::{ExecutionKind, ExecutionRow, NewExecution, Opened, RecordsError, persistently};
use tokio::sync::OnceCell;

use crate::acceptance::Criteria;
use crate::bounds;
use crate::budget::{self, Budget};
use crate::catalog::{Available, Definition};
use crate::delegator::Delegator;
use crate::events;
use crate::execution::{self, ExecutionError, Work};
use crate::ledger::{self, Entry, TASK};
use crate::outcome::{Ending, TEXT_MAX, TaskOutcome};
use crate::prompts;
use crate::snapshot;
use crate::watched::{NoOutcome, SETTLES_WITHIN, Settled, Watched};

/// The longest detail of an unexpected error, in characters.
const DETAIL_MAX: usize = 500;
/// What the model reads after an unexpected error.
const HINT: &str = "The subagent's work may be incomplete. Check what exists before you delegate it again.";

/// Why a call of a run that is not cancelled has no result.
const TAKEN: &str = "its run has ended, and the next one goes on with the subagent";

/// The tool of one run.
pub(crate) struct Task {
    pub(crate) delegator: Arc<Delegator>,
    pub(crate) accessor: StateAccessor,
    pub(crate) available: Available,
    /// The configured name of the run's model.
    pub(crate) model: String,
    pub(crate) budget: Option<Arc<Budget>>,
    /// Set when the budget knows what an earlier run has used of it.
    pub(crate) counted: OnceCell<()>,
    pub(crate) receipts: bool,
}

/// The arguments of a call.
#[derive(Debug, Deserialize)]
struct Args {
    prompt: String,
    subagent_type: String,
    #[serde(default)]
    description: Option<String>,
    #[serde(default)]
    acceptance_criteria: Option<Vec<Json>>,
    #[serde(default)]
    context_mode: Option<ContextMode>,
}

/// What a subagent sees of the conversation that delegates to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ContextMode {
    Isolated,
    Snapshot,
}

/// A subagent's first messages.
struct Told {
    prompt: String,
    criteria: Option<Criteria>,
    snapshot: Option<Json>,
}

impl Told {
    fn messages(&self) -> Vec<Json> {
        let task = match &self.criteria {
            Some(criteria) => format!("{}\n\n{}", self.prompt, criteria.section()),
            None => self.prompt.clone(),
        };
        self.snapshot.iter().cloned().chain([message::human(task)]).collect()
    }
}

/// A call that could not be carried out.
enum Failure {
    /// For a reason that the model can do something about.
    Refused(Box<TaskOutcome>),
    /// For a reason that nobody expected.
    Unexpected { class: &'static str, detail: String },
    /// Because its run has ended and another one goes on with it.
    Undelivered(String),
    /// Because its result, which is or may be stored, cannot be read.
    Unread(String),
    /// Because its run ends before it, and the next one goes on with both.
    LeftToNextRun,
}

impl From<ExecutionError> for Failure {
    fn from(error: ExecutionError) -> Self {
        let class = match error {
            // Another run may go on with the call, or does: a failed result would be stored for good.
            ExecutionError::Records(RecordsError::RunEnded { .. }) | ExecutionError::TakenOver { .. } => {
                return Self::Undelivered(error.to_string());
            }
            ExecutionError::Records(_) => "RunStoreError",
            ExecutionError::Engine(ref error) => error.class_name(),
            ExecutionError::NoTurn => "ValueError",
        };
        Self::Unexpected { class, detail: error.to_string() }
    }
}

impl Failure {
    /// The failure of a call before its subagent is at work. If an earlier run has begun the call, a failed result
    /// would take the place of what that run has left, for good: what passes is left to the next run.
    fn before_work(error: ExecutionError, is_own: bool) -> Self {
        if !is_own && error.may_pass() { Self::Unread(error.to_string()) } else { error.into() }
    }
}

#[async_trait]
impl Tool for Task {
    fn spec(&self) -> ToolSpec {
        let subagents: Vec<String> = self
            .available
            .iter()
            .map(|definition| format!("- {}: {}", definition.name, definition.description))
            .collect();
        ToolSpec {
            name: TASK.to_owned(),
            description: format!("{}\n\nSubagents:\n{}", prompts::TASK_TOOL, subagents.join("\n")),
            parameters: json!({
                "type": "object",
                "properties": {
                    "prompt": {"type": "string", "description": "The whole task: the subagent sees nothing else."},
                    "subagent_type": {"type": "string", "description": "The name of the subagent."},
                    "description": {"type": "string", "description": "The task in a few words, for people."},
                    "acceptance_criteria": {
                        "type": "array",
                        "description": "Texts that say when the task is done, at most 20. These are checked by \
                            code afterwards: `file:<path> exists`, `file:<path> non-empty`, `file_written:<path>`, \
                            `tests_passed:<command>`. Others are shown as unverified.",
                    },
                    "context_mode": {
                        "type": "string", "enum": ["isolated", "snapshot"],
                        "description": "`isolated` (the default): the subagent sees the prompt alone. `snapshot`: it \
                            also sees a copy of this conversation.",
                    },
                },
                "required": ["prompt", "subagent_type"],
            }),
        }
    }

    fn output_max_chars(&self) -> usize {
        TEXT_MAX
    }

    fn stops_within(&self) -> Option<Duration> {
        Some(SETTLES_WITHIN)
    }

    async fn stored(&self, context: &ToolContext) {
        let Entry { id, .. } = entry(context);
        if let Err(error) = self.delegator.records.executions().delivered(&context.thread_id, &id).await {
            // Then a run that starts again from the same checkpoint uses this result instead of repeating the work.
            tracing::warn!(execution_id = id, %error, "the delivery of a result was not recorded");
        }
    }

    async fn call(&self, context: &ToolContext, args: Json) -> Result<ToolOutput, ToolError> {
        let entry = entry(context);
        let outcome = match self.delegate(context, args, &entry).await {
            Err(Failure::Refused(outcome)) => Ok(*outcome),
            Err(Failure::Unexpected { class, detail }) => Err(unexpected(class, &detail)),
            // Another result would take its place for good.
            Err(Failure::Undelivered(error)) => return Err(ToolError::Undelivered(error)),
            Err(Failure::Unread(error)) => return Err(ToolError::Unread(error)),
            // Nobody sees it: the run ends without the results of this superstep.
            Err(Failure::LeftToNextRun) if context.cancel.is_cancelled() => {
                Ok(TaskOutcome::new(Ending::Cancelled { error: None }))
            }
            Err(Failure::LeftToNextRun) => return Err(ToolError::Undelivered(TAKEN.to_owned())),
            Ok(outcome) => Ok(outcome),
        };
        let output = match outcome {
            Ok(outcome) => {
                ToolOutput { additional_kwargs: outcome.metadata(), ..ToolOutput::text(outcome.text()) }
            }
            Err(unexpected) => unexpected,
        };
        Ok(ToolOutput { writes: ended(context, &entry, &output), ..output })
    }
}

impl Task {
    async fn delegate(
        &self,
        context: &ToolContext,
        args: Json,
        entry: &Entry,
    ) -> Result<TaskOutcome, Failure> {
        let args: Args =
            serde_json::from_value(args).map_err(|error| refused(&format!("invalid arguments: {error}")))?;
        let (definition, model) = self.worker(context, &args.subagent_type, entry).await?;
        let description = ledger::description(args.description.as_deref().unwrap_or_default(), &args.prompt);
        let criteria = args.acceptance_criteria.as_deref().and_then(Criteria::normalise);
        let snapshot = match args.context_mode {
            Some(ContextMode::Snapshot) => {
                snapshot::message(context.state.as_deref()).map_err(ExecutionError::from)?
            }
            Some(ContextMode::Isolated) | None => None,
        };
        let failure = |error| Failure::before_work(error, is_own(context, entry));
        if let Some(budget) = &self.budget {
            let counting = || async {
                let turn = turn(context)?;
                count_earlier(&self.delegator, &self.accessor, budget, context, &turn).await
            };
            self.counted.get_or_try_init(counting).await.map_err(failure)?;
        }
        let opened = self.open(context, &definition, entry, description).await.map_err(failure)?;
        let row = &opened.row;
        // An execution that goes on after a restart keeps what it began with.
        let definition = stored_definition(row)?;
        let model = row.model_name.clone().unwrap_or(model);
        let task_id = context.tool_call_id.as_str();
        self.report(context, events::started(task_id, description, &model)).await;
        let told = Told { prompt: args.prompt, criteria, snapshot };
        let outcome = match self.work(context, Arc::new(definition), &model, opened, told).await {
            // Clients see no end of what goes on.
            Ok(outcome) => outcome.ok_or(Failure::LeftToNextRun)?,
            Err(none) => return Err(self.without_outcome(context, model, none).await),
        };
        self.report(context, events::ended(task_id, &outcome)).await;
        Ok(outcome)
    }

    /// The subagent and the model of a call, as they are configured. If they are not any more, and the subagent has ended
    /// and only its result was not delivered: those that it worked with.
    async fn worker(
        &self,
        context: &ToolContext,
        subagent: &str,
        entry: &Entry,
    ) -> Result<(Definition, String), Failure> {
        let refusal = match self.available.get(subagent) {
            Ok(definition) => {
                let config = self.delegator.config.current_async().await;
                match definition.model_within(Some(&self.model), &config) {
                    Ok(model) => return Ok((Definition::clone(definition), model.name.clone())),
                    Err(error) => refused(&error),
                }
            }
            Err(error) => refused(&error),
        };
        let executions = self.delegator.records.executions();
        let left = executions.undelivered(&context.thread_id, &entry.id).await;
        let left = left.map_err(|error| Failure::before_work(error.into(), is_own(context, entry)))?;
        match left.filter(|row| row.status.is_terminal()) {
            Some(row) => {
                let definition = stored_definition(&row)?;
                Ok((definition, row.model_name.unwrap_or_else(|| self.model.clone())))
            }
            None => Err(refusal),
        }
    }

    /// The row of the execution, which a restart finds again by the same id.
    async fn open(
        &self,
        context: &ToolContext,
        definition: &Definition,
        entry: &Entry,
        description: &str,
    ) -> Result<Opened, ExecutionError> {
        let timeout = TimeDelta::from_std(definition.timeout).unwrap_or(TimeDelta::MAX);
        let now = self.delegator.records.now();
        let deadline = now.checked_add_signed(timeout).unwrap_or(DateTime::<chrono::Utc>::MAX_UTC);
        let definition_json = match serde_json::to_value(definition) {
            Ok(Json::Object(map)) => map,
            _ => Map::new(),
        };
        let new = NewExecution {
            execution_id: entry.id.clone(),
            thread_id: context.thread_id.clone(),
            run_id: context.run_id.clone(),
            delegating: self.delegator.delegating,
            parent_execution: None,
            kind: ExecutionKind::Task,
            tool_call_id: context.tool_call_id.clone(),
            agent_name: definition.name.clone(),
            definition: definition_json,
            definition_digest: definition.digest(),
            description: bounds::first(description, 200).to_owned(),
            deadline,
        };
        let executions = self.delegator.records.executions();
        // Repeated, it finds what it has stored.
        Ok(persistently(|| executions.open(new.clone())).await?)
    }

    /// The work in a task of its own, so that a subagent settles what it has begun even if nobody waits for it. `None` if
    /// it is left to the run that goes on with this one.
    async fn work(
        &self,
        context: &ToolContext,
        definition: Arc<Definition>,
        model: &str,
        Opened { row, counted }: Opened,
        told: Told,
    ) -> Result<Option<TaskOutcome>, NoOutcome> {
        let work = Work {
            delegator: Arc::clone(&self.delegator),
            accessor: self.accessor.clone().with_ids(Arc::new(context.ids.derived(&row.execution_id))),
            row,
            counted,
            definition,
            model: model.to_owned(),
            sections: prompts::sections(self.receipts, told.criteria.is_some(), told.snapshot.is_some()),
            messages: told.messages(),
            criteria: told.criteria,
            budget: self.budget.clone(),
            item: None,
            receipts: self.receipts,
            reports: context.reports.clone(),
            cancel: context.cancel.child_token(),
            settled: Settled::default(),
            begun: Mutex::default(),
            namespace: context.namespace.clone(),
        };
        Watched::start(work).outcome().await
    }

    /// The failure of a call whose work has begun. Clients see its end, unless it goes on elsewhere.
    async fn without_outcome(&self, context: &ToolContext, model: String, none: NoOutcome) -> Failure {
        let (failure, usage) = match none {
            NoOutcome::TakenOver(error) => return error.into(),
            NoOutcome::Unread(error) => return Failure::Unread(error),
            NoOutcome::Failed(error, usage) => (Failure::from(error), usage),
            NoOutcome::Panicked(detail, usage) => {
                (Failure::Unexpected { class: "RuntimeError", detail }, usage)
            }
        };
        if let Failure::Unexpected { class, detail } = &failure {
            let outcome = TaskOutcome { model_name: Some(model), usage, ..crashed(class, detail) };
            self.report(context, events::ended(&context.tool_call_id, &outcome)).await;
        }
        failure
    }

    async fn report(&self, context: &ToolContext, event: Json) {
        context.reports.send(Report::Custom(event)).await;
    }
}

/// The definition that an execution began with.
fn stored_definition(row: &ExecutionRow) -> Result<Definition, Failure> {
    serde_json::from_value(json!(row.definition))
        .map_err(|error| Failure::Unexpected { class: "ValueError", detail: error.to_string() })
}

/// The answer that the call is part of.
pub(crate) fn answer(context: &ToolContext) -> Option<Json> {
    let messages = context.state.as_ref()?.json("messages").ok()??;
    messages.as_array()?.iter().rfind(|message| message::kind(message) == "ai").cloned()
}

/// Counts what an earlier run has used of the budget, if this one goes on with its calls: a restart gives none back. `turn`
/// is the call's.
pub(crate) async fn count_earlier(
    delegator: &Delegator,
    accessor: &StateAccessor,
    budget: &Budget,
    context: &ToolContext,
    turn: &[Json],
) -> Result<(), ExecutionError> {
    let Some(answer) = answer(context) else { return Ok(()) };
    let entries = ledger::entries(context.state.as_deref())?;
    let calls = ledger::executions_of(&context.thread_id, &entries, &answer);
    let of_answer = |id: &String| {
        calls.contains(id) || entries.iter().any(|entry| entry.id == *id && answer["id"] == *entry.message_id)
    };
    let mut used = budget::used_in(turn);
    for row in delegator.records.executions().unsettled(&context.thread_id).await? {
        if !row.delivered && of_answer(&row.execution_id) {
            let state = accessor.get(&ThreadId::from(row.child_thread.as_str()), None).await?;
            used += execution::used(state.as_ref())?;
        }
    }
    budget.go_on_from(used);
    budget.exchange(Some(turn)).await;
    Ok(())
}

/// The messages since the user's last one.
///
/// # Errors
/// [`ExecutionError::NoTurn`] outside of a conversation; [`ExecutionError::Engine`] if it cannot be read.
pub(crate) fn turn(context: &ToolContext) -> Result<Vec<Json>, ExecutionError> {
    let messages = context.state.as_ref().map(|state| state.json("messages")).transpose()?.flatten();
    let Some(Json::Array(mut messages)) = messages else { return Err(ExecutionError::NoTurn) };
    let begin = messages.iter().rposition(message::is_from_user).unwrap_or_default();
    Ok(messages.split_off(begin))
}

/// The failure of a call before anything was done for it.
fn refused(error: &dyn std::fmt::Display) -> Failure {
    Failure::Refused(Box::new(TaskOutcome::failed(error.to_string())))
}

/// The entry of a call: the ledger's or, of a call that a client has put into the answer, a new one.
fn entry(context: &ToolContext) -> Entry {
    let entries = ledger::entries(context.state.as_deref()).unwrap_or_default();
    let (answer, index) = (answer(context).unwrap_or_default(), context.index as usize);
    if let Some(entry) = ledger::entry_of(&entries, &answer, index) {
        return entry.clone();
    }
    let id = ledger::added_execution(&context.thread_id, &answer, index);
    let call = message::tool_calls(&answer).get(index).cloned().unwrap_or_default();
    Entry::begun(id, &context.run_id, &answer, index, &call, context.ids.now())
}

/// Whether no earlier run can have begun the call: the ledger says that this one did.
fn is_own(context: &ToolContext, entry: &Entry) -> bool {
    let entries = ledger::entries(context.state.as_deref()).unwrap_or_default();
    entries
        .iter()
        .any(|known| known.id == entry.id && known.run_id.as_deref() == Some(context.run_id.as_str()))
}

/// What came of a call that failed for a reason that nobody expected.
fn crashed(class: &str, detail: &str) -> TaskOutcome {
    TaskOutcome::failed(format!("{class}: {}", bounds::first(detail, DETAIL_MAX)))
}

/// The result of a call that failed for a reason that nobody expected.
fn unexpected(class: &str, detail: &str) -> ToolOutput {
    let additional_kwargs = crashed(class, detail).metadata();
    let detail = bounds::first(detail, DETAIL_MAX);
    ToolOutput {
        status: ToolStatus::Error,
        additional_kwargs,
        ..ToolOutput::text(format!("Task failed. Error: {class}: {detail}. {HINT}"))
    }
}

/// The entry with the result.
fn ended(context: &ToolContext, entry: &Entry, output: &ToolOutput) -> Map<String, Json> {
    let result = json!({
        "id": context.message_id, "content": output.content, "additional_kwargs": output.additional_kwargs,
        "tool_call_id": entry.tool_call_id,
    });
    [(ledger::CHANNEL.to_owned(), json!([entry.ended(&result).to_json()]))].into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_outside_of_a_conversation_has_no_turn_and_says_so() {
        let error = turn(&ToolContext::new("t", "r", "/nonexistent")).unwrap_err();
        assert!(matches!(error, ExecutionError::NoTurn) && !error.may_pass(), "{error}");
    }
}

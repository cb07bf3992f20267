//! The tools `batch_task`, `batch_status` and `cancel_batch`.

use std::sync::Arc;

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Map, Value as Json, json};
use threadkeep::state::StateAccessor;
use threadkeep_agent::model::{ToolSpec, message};
use threadkeep_agent::tools::{Tool, ToolContext, ToolError, ToolOutput, ToolStatus};
use threadkeep_records::{BatchRow, NewBatch, RecordsError, persistently};

use super::Batching;
use super::sharing::budget_id;
use super::spec::{RunBudget, Spec};
use super::submission::Args;
use crate::budget::{Budget, FIRST_ANSWER, first_answer};
use crate::catalog::{Available, Unavailable};
use crate::delegator::Delegator;
use crate::execution::ExecutionError;
use crate::progress::unsigned;
use crate::task::{answer, count_earlier, turn};

/// What the lead agent's prompt says of batches.
pub(crate) const BATCHES_PROMPT: &str = "Submit many similar tasks together with the tool `batch_task`, one item for each. \
    A batch goes on after your answer; `batch_status` shows how far it is, and `cancel_batch` ends it. Do not wait for a \
    batch: tell the user its id.";

const UNAVAILABLE: &str = "Durable subagent batches are unavailable.";
const NOT_FOUND: &str = "Batch not found.";

/// Submits a batch.
pub(crate) struct BatchTask {
    pub(crate) delegator: Arc<Delegator>,
    pub(crate) accessor: StateAccessor,
    pub(crate) batching: Arc<Batching>,
    pub(crate) available: Available,
    /// The configured name of the run's model.
    pub(crate) model: String,
    pub(crate) budget: Option<Arc<Budget>>,
    pub(crate) receipts: bool,
}

/// Shows how far a batch is.
pub(crate) struct BatchStatusTool {
    pub(crate) delegator: Arc<Delegator>,
}

/// Cancels a batch.
pub(crate) struct CancelBatch {
    pub(crate) delegator: Arc<Delegator>,
    pub(crate) batching: Arc<Batching>,
}

/// The arguments of the tools that name a batch.
#[derive(Deserialize)]
struct BatchArgs {
    batch_id: String,
}

fn of_a_batch(name: &str, description: &str) -> ToolSpec {
    ToolSpec {
        name: name.to_owned(),
        description: description.to_owned(),
        parameters: json!({
            "type": "object",
            "properties": {"batch_id": {"type": "string", "description": "The id that `batch_task` returned."}},
            "required": ["batch_id"],
        }),
    }
}

#[async_trait]
impl Tool for BatchTask {
    fn spec(&self) -> ToolSpec {
        ToolSpec {
            name: "batch_task".to_owned(),
            description: format!(
                "Submits many independent tasks for one kind of subagent. They are worked on in the background, also after \
                 this conversation has gone on; a failed one is tried again.\n\nSubagents: {}",
                self.available.names()
            ),
            parameters: json!({
                "type": "object",
                "properties": {
                    "title": {"type": "string", "description": "What the batch is about, for people."},
                    "items": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {
                                "key": {"type": "string", "description": "The item's own name, at most 128 \
                                    characters."},
                                "prompt": {"type": "string", "description": "The whole task: the subagent sees \
                                    nothing else."},
                                "acceptance_criteria": {"type": "array", "description": "Texts that say when the \
                                    item is done, as for `task`."},
                            },
                            "required": ["key", "prompt"],
                        },
                    },
                    "subagent_type": {"type": "string", "description": "The name of the subagent."},
                    "max_live_items": {"type": ["integer", "null"], "description": "How many items may be queued or \
                        at work."},
                    "max_running_items": {"type": ["integer", "null"], "description": "How many items may be at \
                        work."},
                },
                "required": ["title", "items", "subagent_type"],
            }),
        }
    }

    async fn call(&self, context: &ToolContext, args: Json) -> Result<ToolOutput, ToolError> {
        match self.submit(context, args).await {
            Ok(submitted) => Ok(submitted),
            Err(Unsubmitted::RunEnded(error)) => Err(ToolError::Undelivered(error)),
            Err(Unsubmitted::InDoubt(error)) => Err(ToolError::Unread(error)),
            Err(Unsubmitted::Refused(error)) => Ok(ToolOutput {
                status: ToolStatus::Error,
                additional_kwargs: metadata(json!({"subagent_batch_error": true})),
                ..ToolOutput::text(error)
            }),
        }
    }
}

/// Why a batch was not submitted.
enum Unsubmitted {
    /// The text for the model (delegation, section 5.2).
    Refused(String),
    /// The run has ended. Another one may go on with the call: a failed result would be stored for good.
    RunEnded(String),
    /// Nobody knows whether the batch was stored. If it was, it is worked on.
    InDoubt(String),
}

impl From<String> for Unsubmitted {
    fn from(text: String) -> Self {
        Self::Refused(text)
    }
}

impl Unsubmitted {
    /// Why the call could not be stored. If an earlier run may have made it, that one may have stored the batch: what
    /// passes is left to the next run, which finds it.
    fn of(error: &RecordsError, is_own: bool) -> Self {
        match error {
            RecordsError::RunEnded { .. } => Self::RunEnded(error.to_string()),
            RecordsError::InDoubt { .. } => Self::InDoubt(error.to_string()),
            error if !is_own && error.is_unavailable() => Self::InDoubt(error.to_string()),
            error => Self::Refused(failed(error)),
        }
    }
}

/// The text of a submission that failed.
fn failed(reason: &dyn std::fmt::Display) -> String {
    format!("Batch submission failed: {reason}")
}

impl BatchTask {
    async fn submit(&self, context: &ToolContext, args: Json) -> Result<ToolOutput, Unsubmitted> {
        let batches = self.delegator.records.batches();
        let is_own = is_own(context);
        let unsubmitted = |error: RecordsError| Unsubmitted::of(&error, is_own);
        // A stored batch must be found by its turn: what is in doubt without one is left to the next run.
        let turn = turn(context).map_err(|error| Unsubmitted::InDoubt(error.to_string()))?;
        let named_by = self.budget.as_ref().and_then(|_| naming_answer(context, &turn));
        let prepared = match self.count(context, &turn, is_own).await {
            Ok(()) => self.prepare(context, args, named_by.as_deref()).await,
            // An earlier run may have stored the batch, and the next one finds it.
            Err(error) if error.may_pass() => return Err(Unsubmitted::InDoubt(error.to_string())),
            Err(error) => Err(failed(&error)),
        };
        let batch = match prepared {
            // A submission whose answer was lost is found again by its key.
            Ok(new) => persistently(|| batches.submit(new.clone())).await.map_err(unsubmitted)?.batch,
            Err(refusal) if is_own => return Err(refusal.into()),
            // So is an earlier run's that would be refused by now: it is worked on.
            Err(refusal) => {
                let key = submission_key(context);
                let found = persistently(|| batches.submitted(&context.thread_id, &key)).await;
                found.map_err(unsubmitted)?.ok_or(refusal)?
            }
        };
        if let (Some(budget), Some(answer)) = (&self.budget, &named_by) {
            budget.submitted(answer).await;
        }
        self.batching.wake();
        let text = format!(
            "Batch {} submitted with {} items. They are worked on in the background.",
            batch.id, batch.total_items
        );
        let mut additional_kwargs = metadata(json!({
            "subagent_batch_error": false,
            "subagent_batch_id": batch.id,
            "subagent_batch_status": batch.status.as_str(),
            "subagent_batch_total_items": batch.total_items,
        }));
        // Later steps of the turn find the limit by this result.
        if let Some(answer) = named_by.filter(|_| first_answer(&turn).is_none()) {
            additional_kwargs.insert(FIRST_ANSWER.to_owned(), json!(answer));
        }
        Ok(ToolOutput { additional_kwargs, ..ToolOutput::text(text) })
    }

    /// Counts what an earlier run has used of the budget, if this one goes on with its calls: the batch gets what is left.
    async fn count(&self, context: &ToolContext, turn: &[Json], is_own: bool) -> Result<(), ExecutionError> {
        match &self.budget {
            Some(budget) if !is_own => {
                count_earlier(&self.delegator, &self.accessor, budget, context, turn).await
            }
            _ => Ok(()),
        }
    }

    /// The batch to store. All batches of the turn share the limit that `named_by` names.
    ///
    /// # Errors
    /// The text for the model.
    async fn prepare(
        &self,
        context: &ToolContext,
        args: Json,
        named_by: Option<&str>,
    ) -> Result<NewBatch, String> {
        if !self.batching.is_working() {
            return Err(UNAVAILABLE.to_owned());
        }
        let args: Args = serde_json::from_value(args)
            .map_err(|error| failed(&format_args!("invalid arguments: {error}")))?;
        args.check_items()?;
        let definition = self.available.get(&args.subagent_type).map_err(|error| match error {
            Unavailable::BashDisabled => error.to_string(),
            Unavailable::Unknown { name, .. } => {
                let names: Vec<&str> = self.available.iter().map(|known| known.name.as_str()).collect();
                let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
                format!("Unknown or disallowed subagent type '{name}'. Available: {names}")
            }
        })?;
        let settings = &self.batching.settings;
        let windows = args.windows(settings).map_err(|error| failed(&error))?;
        let config = self.delegator.config.current_async().await;
        definition.model_within(Some(&self.model), &config).map_err(|error| failed(&error))?;
        let budget = self
            .budget
            .as_ref()
            .map(|budget| RunBudget { settings: config.token_budget, used: unsigned(budget.used()) });
        let budget_id = named_by.map(|answer| budget_id(&context.thread_id, answer));
        let spec = Spec {
            definition: (**definition).clone(),
            model: self.model.clone(),
            receipts: self.receipts,
            budget,
        };
        Ok(NewBatch {
            id: format!("subagent-batch-{}", hex(&context.ids.text())),
            thread_id: context.thread_id.clone(),
            run_id: context.run_id.clone(),
            tool_call_id: context.tool_call_id.clone(),
            submission_key: submission_key(context),
            title: args.title(),
            subagent_type: definition.name.clone(),
            max_live_items: windows.live,
            max_running_items: windows.running,
            max_attempts: settings.max_attempts,
            execution_spec: spec.to_json(),
            budget_id,
            items: args.items().map_err(|error| failed(&error))?,
        })
    }
}

/// The id of the answer by which the batches of this turn know their limit: its first. If a client has added a question
/// after the answer with the call, the turn has none, and it is that one.
fn naming_answer(context: &ToolContext, turn: &[Json]) -> Option<String> {
    match first_answer(turn) {
        Some(first) => Some(first.to_owned()),
        None => answer(context)?["id"].as_str().map(str::to_owned),
    }
}

/// The hexadecimal digits of an id.
fn hex(id: &str) -> String {
    id.chars().filter(char::is_ascii_hexdigit).collect()
}

fn metadata(json: Json) -> Map<String, Json> {
    match json {
        Json::Object(map) => map,
        _ => Map::new(),
    }
}

/// What is the same when a call is repeated after a crash, by whichever run: its place in the answer that has it. The
/// model's ids of calls may repeat, the run that goes on has another id, and the head may be another one by then: a
/// title, a goal, a summary or an update leaves the call to be made.
fn submission_key(context: &ToolContext) -> String {
    let answer = answer(context);
    match (answer.as_ref().and_then(|answer| answer["id"].as_str()), &context.state) {
        (Some(answer), _) => format!("{}:{answer}:{}", context.thread_id, context.index),
        (None, Some(state)) => format!("{}:{}:{}", context.thread_id, state.key.id, context.index),
        (None, None) => format!("{}:{}", context.run_id, context.tool_call_id),
    }
}

/// Whether no earlier run can have made the call. Those of a run that came without a question may be an earlier run's.
fn is_own(context: &ToolContext) -> bool {
    let messages = context.state.as_ref().and_then(|state| state.json("messages").ok().flatten());
    messages.is_some_and(|messages| answers(&messages, &context.run_id))
}

/// Whether the last answer is to a question that this run came with.
fn answers(messages: &Json, run_id: &str) -> bool {
    let messages = messages.as_array().map(Vec::as_slice).unwrap_or_default();
    let answer = messages.iter().rposition(|message| message::kind(message) == "ai").unwrap_or_default();
    let question = messages[..answer].iter().rfind(|message| message::is_from_user(message));
    question.is_some_and(|question| question["additional_kwargs"]["run_id"] == *run_id)
}

/// The batch with this id, if the owner of the thread is also the batch's.
async fn visible(
    delegator: &Delegator,
    context: &ToolContext,
    batch_id: &str,
) -> Result<Option<BatchRow>, RecordsError> {
    let Some(batch) = delegator.records.batches().get(batch_id).await? else { return Ok(None) };
    let thread = delegator.records.threads().get(&context.thread_id, None).await?;
    let user = thread.and_then(|thread| thread.user_id);
    let is_own = if user.is_some() { batch.user_id == user } else { batch.thread_id == context.thread_id };
    Ok(is_own.then_some(batch))
}

#[async_trait]
impl Tool for BatchStatusTool {
    fn spec(&self) -> ToolSpec {
        of_a_batch("batch_status", "Shows how many items of a batch have which status.")
    }

    async fn call(&self, context: &ToolContext, args: Json) -> Result<ToolOutput, ToolError> {
        let Ok(BatchArgs { batch_id }) = serde_json::from_value(args) else {
            return Ok(ToolOutput::text(NOT_FOUND));
        };
        let shown = async {
            let Some(batch) = visible(&self.delegator, context, &batch_id).await? else { return Ok(None) };
            let counts = self.delegator.records.batches().counts(std::slice::from_ref(&batch_id)).await?;
            let counts = counts.get(&batch_id).cloned().unwrap_or_default();
            let counts: Map<String, Json> =
                counts.iter().map(|(status, number)| (status.as_str().to_owned(), json!(number))).collect();
            Ok::<_, RecordsError>(Some(json!({
                "batch_id": batch_id, "status": batch.status.as_str(), "total_items": batch.total_items, "counts": counts,
            })))
        };
        Ok(match shown.await {
            Ok(Some(shown)) => ToolOutput::text(shown.to_string()),
            Ok(None) => ToolOutput::text(NOT_FOUND),
            Err(error) => unavailable(&error),
        })
    }
}

#[async_trait]
impl Tool for CancelBatch {
    fn spec(&self) -> ToolSpec {
        of_a_batch("cancel_batch", "Cancels a batch: items at work are stopped, others are not begun.")
    }

    async fn call(&self, context: &ToolContext, args: Json) -> Result<ToolOutput, ToolError> {
        let Ok(BatchArgs { batch_id }) = serde_json::from_value(args) else {
            return Ok(ToolOutput::text(NOT_FOUND));
        };
        if !self.batching.is_working() {
            return Ok(ToolOutput::text(UNAVAILABLE));
        }
        let cancelled = async {
            match visible(&self.delegator, context, &batch_id).await? {
                Some(_) => self.delegator.records.batches().cancel(&batch_id).await,
                None => Ok(None),
            }
        };
        Ok(match cancelled.await {
            Ok(Some(_)) => ToolOutput::text(format!("Batch {batch_id} cancellation requested.")),
            Ok(None) => ToolOutput::text(NOT_FOUND),
            Err(error) => unavailable(&error),
        })
    }
}

/// The database did not answer.
fn unavailable(error: &RecordsError) -> ToolOutput {
    tracing::warn!(%error, "a batch could not be read or changed");
    ToolOutput { status: ToolStatus::Error, ..ToolOutput::text(UNAVAILABLE) }
}

#[cfg(test)]
mod tests {
    use threadkeep_records::{Records, RecordsOptions};

    use super::*;
    use crate::batches::{begin_run, new_batch};

    /// Nothing says whether the batch was stored: the call must not say that it was not.
    #[tokio::test]
    async fn a_submission_in_doubt_is_left_to_the_next_run() {
        let records = Records::open_memory(RecordsOptions::default()).await.unwrap();
        begin_run(&records).await;
        let new = new_batch(1);
        records.doubt_commit(1);
        let in_doubt = records.batches().submit(new.clone()).await.unwrap_err();
        assert!(matches!(Unsubmitted::of(&in_doubt, true), Unsubmitted::InDoubt(_)));
        assert!(!records.batches().submit(new.clone()).await.unwrap().is_new, "it was stored");
        // Nothing is changed by a call that fails otherwise, and its model may do something about it.
        records.fail_statement(1);
        let refused = records.batches().submit(new).await.unwrap_err();
        let Unsubmitted::Refused(text) = Unsubmitted::of(&refused, true) else { panic!("it is refused") };
        assert!(text.starts_with("Batch submission failed: "), "{text}");
        // Unless an earlier run may have made the call, whose batch may be stored.
        assert!(matches!(Unsubmitted::of(&refused, false), Unsubmitted::InDoubt(_)));
    }

    #[test]
    fn a_call_is_a_runs_own_if_it_answers_a_question_of_that_run() {
        let asked =
            |run: &str| json!({"type": "human", "content": "q", "additional_kwargs": {"run_id": run}});
        let answer =
            || json!({"type": "ai", "content": "", "tool_calls": [{"name": "batch_task", "id": "c"}]});
        let hidden = json!({"type": "human", "additional_kwargs": {"hide_from_ui": true, "run_id": "r2"}});
        assert!(answers(&json!([asked("r1"), asked("r2"), answer()]), "r2"));
        assert!(!answers(&json!([asked("r1"), answer()]), "r2"), "it goes on with another run's");
        assert!(!answers(&json!([asked("r1"), answer(), asked("r2")]), "r2"), "the question came later");
        assert!(!answers(&json!([asked("r1"), hidden, answer()]), "r2"), "the user did not ask that");
        assert!(!answers(&json!([answer()]), "r2") && !answers(&json!([]), "r2"));
    }
}

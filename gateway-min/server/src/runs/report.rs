//! Distributes an agent's reports: frames for the run's stream, events for its feed, sums for its row.

use async_trait::async_trait;
use serde_json::Value as Json;
use threadkeep::state::StateSnapshot;
use threadkeep::step::Task;
use threadkeep::{Error, Result};
use threadkeep_agent::serialize;
use threadkeep_agent::tools::loop_detection::Verdict;
use threadkeep_agent::tools::{Nested, WorkUsage};
use threadkeep_agent::{Added, Observer, ObserverError, Origin, TaskInput};

use super::frames::Frames;
use super::journal::Journal;
use super::owned::Owned;
use super::usage::UsageLedger;

/// Shows and stores what one run reports.
pub(super) struct Reporter {
    pub(super) frames: Frames,
    pub(super) journal: Journal,
    pub(super) usage: UsageLedger,
    pub(super) owned: Owned,
    /// That the store lost acknowledged changes of the thread, if something found it.
    pub(super) history_lost: Option<String>,
    /// Why the run's model failed, if that ends it: its answer shows that.
    pub(super) model_failed: Option<String>,
}

impl Reporter {
    /// Shows a lost history, and notes it for the process that ends the run. The run ends with it, whatever else came
    /// of it: it is found once, and nobody else would hear of it.
    pub(super) async fn report_if_lost(&mut self, error: &Error) {
        if self.show_if_lost(error) {
            self.note_loss().await;
        }
    }

    /// Shows a lost history; `true` if that was not done before.
    pub(super) fn show_if_lost(&mut self, error: &Error) -> bool {
        if self.history_lost.is_some() || !matches!(error, Error::HistoryLost { .. }) {
            return false;
        }
        let (name, message) = (error.class_name(), error.to_string());
        self.frames.error(name, &message);
        self.journal.error(name, &message);
        self.history_lost = Some(message);
        true
    }

    /// Notes the lost history in the run's row. Another process may end the run, or this one once its task is gone.
    pub(super) async fn note_loss(&self) {
        if let Some(lost) = &self.history_lost {
            self.owned.note_loss(lost).await;
        }
    }
}

#[async_trait]
impl Observer for Reporter {
    fn task_started(&mut self, step: i64, task: &Task, input: TaskInput<'_>) -> Result<()> {
        self.frames.task_started(step, task, || match input {
            TaskInput::State(Some(state)) => Ok(Json::Object(serialize::values(state)?)),
            TaskInput::State(None) => Ok(Json::Object(serde_json::Map::new())),
            TaskInput::Call(call) => Ok(call.clone()),
        })
    }

    fn message(&mut self, step: i64, task: &Task, origin: Option<Origin<'_>>, message: &Json) {
        self.frames.message(step, task, origin, message);
    }

    fn task_ended(&mut self, step: i64, task: &Task, outcome: Result<&Json, &str>) {
        if let Ok(update) = outcome {
            self.frames.updates(task.node.as_str(), update);
        }
        self.frames.task_ended(step, task, outcome);
    }

    fn committed(&mut self, state: &StateSnapshot) -> Result<()> {
        self.frames.committed(state)
    }

    fn interrupted(&mut self, state: &StateSnapshot) -> Result<()> {
        self.frames.interrupted(state)
    }

    fn model_answered(&mut self, model: &str, caller: &str, answer: &Json) {
        self.usage.record(model, caller, answer);
        self.journal.llm_error(answer, model, caller);
    }

    fn used(&mut self, usage: &WorkUsage) {
        self.usage.count(usage);
    }

    async fn message_added(&mut self, message: Added<'_>) -> Result<(), ObserverError> {
        // The step that stores it follows.
        self.owned.before_step().await.map_err(|error| error.to_string())?;
        match message {
            Added::Human(message) => {
                self.usage.message(message);
                self.journal.human_input(message).await?;
            }
            Added::Answer { message, caller, latency } => {
                self.usage.message(message);
                self.journal.ai_response(message, caller, latency).await?;
            }
            Added::ToolResult { message, .. } => {
                self.usage.message(message);
                self.journal.tool_result(message).await?;
            }
        }
        Ok(())
    }

    fn loop_checked(&mut self, subagent: Option<&str>, verdict: &Verdict) {
        self.journal.loop_detection(subagent, verdict);
    }

    fn tools_promoted(&mut self, subagent: Option<&str>, names: &[String]) {
        self.journal.tools_promoted(subagent, names);
    }

    async fn custom(&mut self, event: &Json) {
        self.frames.custom(event);
        self.journal.custom(event).await;
    }

    fn wants_nested(&self) -> bool {
        self.frames.wants_nested()
    }

    fn nested(&mut self, nested: &Nested) -> Result<()> {
        self.frames.nested(nested)
    }

    fn files_written(&mut self, tool: &str, paths: &[String]) {
        self.journal.delivered(tool, paths);
    }
}

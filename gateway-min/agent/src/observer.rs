//! What an agent reports while it works.

use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value as Json;
use threadkeep::Result;
use threadkeep::state::StateSnapshot;
use threadkeep::step::Task;

use crate::tools::loop_detection::Verdict;
use crate::tools::{Nested, WorkUsage};

/// Why an observer could not store a report. It fails the run.
pub type ObserverError = Box<dyn std::error::Error + Send + Sync>;

/// Observes one run of an agent.
///
/// Every method ignores the report by default, so an observer implements only what it shows or stores. The loop waits
/// for each call: only [`message_added`](Self::message_added) and [`custom`](Self::custom) may take time.
#[async_trait]
pub trait Observer: Send {
    /// A task of superstep `step` starts.
    ///
    /// # Errors
    /// If the input cannot be rendered.
    fn task_started(&mut self, step: i64, task: &Task, input: TaskInput<'_>) -> Result<()> {
        let _ = (step, task, input);
        Ok(())
    }

    /// A task produces a message, or a chunk of one. `origin` is the model it comes from, if any.
    fn message(&mut self, step: i64, task: &Task, origin: Option<Origin<'_>>, message: &Json) {
        let _ = (step, task, origin, message);
    }

    /// A task ended: with its writes, by channel, or with an error.
    fn task_ended(&mut self, step: i64, task: &Task, outcome: Result<&Json, &str>) {
        let _ = (step, task, outcome);
    }

    /// The state after a superstep, or the state from which a run without input continues.
    ///
    /// # Errors
    /// If the state cannot be rendered.
    fn committed(&mut self, state: &StateSnapshot) -> Result<()> {
        let _ = state;
        Ok(())
    }

    /// The run stops at a breakpoint, in this state.
    ///
    /// # Errors
    /// If the state cannot be rendered.
    fn interrupted(&mut self, state: &StateSnapshot) -> Result<()> {
        let _ = state;
        Ok(())
    }

    /// A model call of the lead agent or of one of its helpers ended: `answer` contains its usage, and whether it
    /// failed.
    fn model_answered(&mut self, model: &str, caller: &str, answer: &Json) {
        let _ = (model, caller, answer);
    }

    /// What models did for a tool.
    fn used(&mut self, usage: &WorkUsage) {
        let _ = usage;
    }

    /// A message is added to the conversation.
    ///
    /// # Errors
    /// If it could not be stored; this ends the run.
    async fn message_added(&mut self, message: Added<'_>) -> Result<(), ObserverError> {
        let _ = message;
        Ok(())
    }

    /// The user's message has loaded these deferred tools by its words, before the first model call that follows it; the
    /// task of a subagent, if `subagent` names one.
    fn tools_promoted(&mut self, subagent: Option<&str>, names: &[String]) {
        let _ = (subagent, names);
    }

    /// The verdict of loop detection on the last answer; of a subagent's, if `subagent` names one.
    fn loop_checked(&mut self, subagent: Option<&str>, verdict: &Verdict) {
        let _ = (subagent, verdict);
    }

    /// An event of a tool that is still working, for clients of the stream mode `custom`.
    async fn custom(&mut self, event: &Json) {
        let _ = event;
    }

    /// Whether [`Self::nested`] does something: agents inside of tool calls only report if it does.
    fn wants_nested(&self) -> bool {
        false
    }

    /// An agent that works inside of a tool call reports.
    ///
    /// # Errors
    /// If a state cannot be rendered.
    fn nested(&mut self, nested: &Nested) -> Result<()> {
        let _ = nested;
        Ok(())
    }

    /// A call of `tool` wrote these files, relative to the thread's directory.
    fn files_written(&mut self, tool: &str, paths: &[String]) {
        let _ = (tool, paths);
    }
}

/// The input of a task. It is rendered only if requested.
#[derive(Debug, Clone, Copy)]
pub enum TaskInput<'a> {
    /// The whole state; `None` if the thread has no checkpoint.
    State(Option<&'a StateSnapshot>),
    /// One call of a tool.
    Call(&'a Json),
}

/// The model that a message comes from.
#[derive(Debug, Clone, Copy)]
pub struct Origin<'a> {
    /// The provider's short name.
    pub provider: &'a str,
    /// The configured name of the model.
    pub model: &'a str,
}

/// A message added to the conversation.
#[derive(Debug, Clone, Copy)]
pub enum Added<'a> {
    /// The user's.
    Human(&'a Json),
    /// The model's.
    Answer {
        /// The message.
        message: &'a Json,
        /// The caller of the model.
        caller: &'a str,
        /// How long the model took.
        latency: Duration,
    },
    /// A tool's.
    ToolResult {
        /// The message.
        message: &'a Json,
        /// The place of its call among those of the answer, which is its place in the conversation: calls end in any
        /// order.
        index: u32,
    },
}

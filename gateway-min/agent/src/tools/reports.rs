//! What a tool reports while it works.

use serde_json::Value as Json;
use threadkeep::state::StateSnapshot;
use threadkeep::step::Task;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use super::loop_detection::Verdict;
use crate::Tokens;

/// How many reports wait for the loop; a tool that makes more waits.
const WAITING: usize = 64;

/// A report of a tool that is still working.
#[derive(Debug, Clone, PartialEq)]
pub enum Report {
    /// An event for the run's clients, in the stream mode `custom`.
    Custom(Json),
    /// What models did for the tool, once at its end.
    Usage(WorkUsage),
    /// Loop detection judged an answer of the subagent with this name.
    LoopChecked {
        /// The subagent.
        agent: String,
        /// The verdict.
        verdict: Verdict,
    },
    /// The task of the subagent with this name has loaded deferred tools by its words.
    ToolsPromoted {
        /// The subagent.
        agent: String,
        /// The tools.
        names: Vec<String>,
    },
    /// An agent at work inside of the call reports, as the run's own agent does.
    Nested(Nested),
}

/// What models did for a piece of delegated work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkUsage {
    /// The work.
    pub work_id: String,
    /// Which attempt at it; 1 for the first. A run counts each attempt once.
    pub attempt: i64,
    /// Who asked the models.
    pub caller: String,
    /// The configured name of each model, how often it was asked, and the tokens of these calls.
    pub models: Vec<(String, u64, Tokens)>,
}

impl WorkUsage {
    /// The tokens of all models.
    pub fn tokens(&self) -> Tokens {
        let mut sum = Tokens::default();
        for (.., tokens) in &self.models {
            sum += *tokens;
        }
        sum
    }
}

/// A report of an agent that works inside of a tool call.
#[derive(Debug, Clone, PartialEq)]
pub struct Nested {
    /// The place of the call: [`ToolContext::namespace`](super::ToolContext::namespace).
    pub namespace: String,
    /// The superstep.
    pub step: i64,
    /// What it reports.
    pub event: NestedEvent,
}

/// What an agent inside of a tool call reports; see the methods of [`Observer`](crate::Observer) with these names.
#[derive(Debug, Clone, PartialEq)]
pub enum NestedEvent {
    /// A task starts, with this input.
    TaskStarted(Task, Json),
    /// A task produces a message, or a chunk of one; of the model with this provider and name, if it is a model's.
    Message(Task, Option<(String, String)>, Json),
    /// A task ended: with its writes, or with an error.
    TaskEnded(Task, Result<Json, String>),
    /// The state after the superstep.
    Committed(Box<StateSnapshot>),
}

/// Where a tool sends its reports. They reach the run's observer in this order, and before the tool's result.
#[derive(Debug, Clone)]
pub struct Reports {
    sender: mpsc::Sender<Report>,
    nested: bool,
}

impl Reports {
    /// Reports that nobody reads.
    pub fn unread() -> Self {
        Self { sender: mpsc::channel(1).0, nested: false }
    }

    /// Reports, and where to read them. `nested` says whether [`Report::Nested`] is wanted.
    pub fn channel(nested: bool) -> (Self, mpsc::Receiver<Report>) {
        let (sender, receiver) = mpsc::channel(WAITING);
        (Self { sender, nested }, receiver)
    }

    /// Whether somebody wants [`Report::Nested`]; others need not be made.
    pub fn wants_nested(&self) -> bool {
        self.nested
    }

    /// Sends a report; without a reader it is dropped.
    pub async fn send(&self, report: Report) {
        // The reader is gone when the run is.
        let _ = self.sender.send(report).await;
    }

    /// Sends a report if there is room, and otherwise returns it.
    ///
    /// # Errors
    /// The report, which has to wait.
    pub fn try_send(&self, report: Report) -> Result<(), Box<Report>> {
        match self.sender.try_send(report) {
            Err(TrySendError::Full(report)) => Err(Box::new(report)),
            Ok(()) | Err(TrySendError::Closed(_)) => Ok(()),
        }
    }
}

//! What accompanies an agent's model calls: limits, ledgers, reminders.

use async_trait::async_trait;
use serde_json::{Map, Value as Json};
use threadkeep::id::IdSource;
use threadkeep::state::StateSnapshot;

use crate::AgentError;

/// Looks at every model call of an agent: before it, to show the model something or to end the run; after it, to change
/// the answer before it is stored.
///
/// A middleware keeps nothing between calls that a restart must not lose: what it needs is in the state or in the
/// messages.
#[async_trait]
pub trait Middleware: Send + Sync {
    /// Exchanges state with other processes, before [`before_model`](Self::before_model) and after an answer is stored.
    /// `turn` is the current turn. A failure must not end the run.
    async fn exchange(&self, turn: &[Json]) {
        let _ = turn;
    }

    /// Before a model call.
    ///
    /// # Errors
    /// If the state cannot be read; this ends the run.
    fn before_model(&self, view: &View<'_>) -> Result<Before, AgentError> {
        let _ = view;
        Ok(Before::default())
    }

    /// Right after a model call, before anything judges the answer: takes the tool calls away that may not be made, so that
    /// nothing counts them. Returns why the run stops early, if that is why.
    ///
    /// # Errors
    /// As [`before_model`](Self::before_model).
    fn limit_calls(&self, view: &View<'_>, answer: &mut Json) -> Result<Option<String>, AgentError> {
        let _ = (view, answer);
        Ok(None)
    }

    /// A summary replaces `removed`, the first messages of the current turn after its question, which stays: what the
    /// middleware reads from a turn it can keep in the question's metadata.
    fn summarized(&self, question: &mut Json, removed: &[Json]) {
        let _ = (question, removed);
    }

    /// After a model was asked for a summary of the conversation; `view` is the one before it. Returns values by channel that
    /// are written with the summary or, if there is none, in a superstep of their own.
    ///
    /// # Errors
    /// As [`before_model`](Self::before_model).
    fn after_summary(
        &self,
        view: &View<'_>,
        model: &str,
        answer: &Json,
    ) -> Result<Map<String, Json>, AgentError> {
        let _ = (view, model, answer);
        Ok(Map::new())
    }

    /// After a model call; `view` is the one before it. The answer is stored as this leaves it.
    ///
    /// # Errors
    /// As [`before_model`](Self::before_model).
    fn after_model(&self, view: &View<'_>, answer: &mut Json) -> Result<After, AgentError> {
        let _ = (view, answer);
        Ok(After::default())
    }
}

/// What a middleware sees of a run.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The run.
    pub run_id: &'a str,
    /// The state from which the model call starts; `None` if the thread has no checkpoint.
    pub state: Option<&'a StateSnapshot>,
    /// The source of ids and of the time.
    pub ids: &'a IdSource,
    /// The current turn: the user's last message and everything after it.
    pub turn: &'a [Json],
    /// After the call: why the run stops early, as far as something before this middleware has decided it.
    pub stop_reason: Option<&'a str>,
}

/// What happens before a model call.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Before {
    /// Messages that the model reads in this call only. They are not stored.
    pub messages: Vec<Json>,
    /// Why there is no call: the run ends with this stop reason.
    pub stop: Option<String>,
}

/// What a middleware made of an answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct After {
    /// Why the run stops early, if the answer's tool calls were taken away.
    pub stop_reason: Option<String>,
    /// Values that are written with the answer, by channel.
    pub writes: Map<String, Json>,
}

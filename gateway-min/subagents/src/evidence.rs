//! Shows an agent the receipts of its tool calls, and gathers those that a report may cite.

use serde_json::Value as Json;
use threadkeep_agent::model::message;
use threadkeep_agent::receipts::{self, Receipt, Shown};
use threadkeep_agent::{After, AgentError, Before, Middleware, View};

use crate::citations::harvest;
use crate::outcome::keys;

/// When an agent sees its receipts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Showing {
    /// Before every model call.
    Always,
    /// After a delegation of the current turn.
    AfterDelegation,
}

/// Shows an agent the receipts of its current turn, and records on each answer what was shown: a citation is checked
/// against exactly that.
pub(crate) struct Receipting(pub(crate) Showing);

impl Receipting {
    fn shown(&self, turn: &[Json]) -> Option<Shown> {
        let delegated = |message: &Json| !message["additional_kwargs"][keys::STATUS].is_null();
        let shows = self.0 == Showing::Always || turn.iter().any(delegated);
        Shown::of(&receipts::ledger(turn)).filter(|_| shows)
    }
}

impl Middleware for Receipting {
    fn before_model(&self, view: &View<'_>) -> Result<Before, AgentError> {
        let messages = self.shown(view.turn).map(|shown| shown.message()).into_iter().collect();
        Ok(Before { messages, ..Before::default() })
    }

    fn after_model(&self, view: &View<'_>, answer: &mut Json) -> Result<After, AgentError> {
        receipts::stamp_shown(answer, &self.shown(view.turn).map(|shown| shown.receipts).unwrap_or_default());
        Ok(After::default())
    }
}

/// The receipts of a subagent, by whether it completed with its last answer as the report.
pub(crate) fn harvest(completed: bool, messages: &[Json]) -> Option<Vec<Receipt>> {
    if completed {
        harvest::of_completed(messages.iter().rfind(|message| message::kind(message) == "ai")?)
    } else {
        Some(harvest::of_unfinished(messages))
    }
}

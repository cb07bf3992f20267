//! The middleware that keeps an agent within its budget.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use serde_json::{Map, Value as Json};
use threadkeep_agent::model::message;
use threadkeep_agent::{After, AgentError, Before, Middleware, Tokens, View};

use super::turn::{keep, used_in};
use super::{Budget, Share, Standing, less};
use crate::contract::StopReason;

/// The name of the message that warns a model of its budget.
const WARNING_NAME: &str = "budget_warning";

/// Keeps an agent within its budget: warns its model once, then ends the run with what it has.
pub(crate) struct Budgeting {
    budget: Arc<Budget>,
    /// Whether what was used before is read from the turn, and from nothing else.
    of_turn: bool,
    /// The warning for the next call; it stays until a call has succeeded with it.
    warning: Mutex<Option<String>>,
    /// Whether a model was called, or is about to be.
    begun: AtomicBool,
}

impl Budgeting {
    /// Keeps to this budget, of which the turn shows what was used before.
    pub(crate) fn new(budget: Arc<Budget>) -> Self {
        Self { budget, of_turn: true, warning: Mutex::default(), begun: AtomicBool::default() }
    }

    /// Keeps to this budget, which knows what was used before.
    pub(crate) fn knowing(budget: Arc<Budget>) -> Self {
        Self { of_turn: false, ..Self::new(budget) }
    }

    /// Takes over the warning of the process that had this turn before.
    fn go_on_warning(&self, turn: &[Json]) {
        // Without what a summary has used in this process: after the next answer it counts.
        let known = less(self.budget.used(), self.budget.spent());
        let used_at = |at: usize| {
            if self.of_turn { used_in(&turn[..=at]) } else { less(known, used_in(&turn[at + 1..])) }
        };
        let mut answers = (0..turn.len()).rev().filter(|at| message::kind(&turn[*at]) == "ai");
        let Some(last) = answers.next() else { return };
        // The question has what earlier answers used that a summary has replaced.
        let earlier = answers.next().or((last > 0).then_some(0)).map(used_at);
        if let Some(share) = self.budget.left_to_warn(earlier, used_at(last)) {
            *self.warning.lock().unwrap_or_else(PoisonError::into_inner) = Some(share.warning());
        }
    }
}

#[async_trait]
impl Middleware for Budgeting {
    async fn exchange(&self, turn: &[Json]) {
        self.budget.exchange(self.of_turn.then_some(turn)).await;
    }

    fn before_model(&self, view: &View<'_>) -> Result<Before, AgentError> {
        self.budget.go_on_from(used_in(view.turn));
        if !self.begun.swap(true, Ordering::Relaxed) {
            self.go_on_warning(view.turn);
        }
        if self.budget.is_exhausted() {
            let stop = Some(StopReason::TokenCapped.as_str().to_owned());
            return Ok(Before { stop, ..Before::default() });
        }
        let warning = self.warning.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let messages = warning.map(|text| message::hidden(WARNING_NAME, text)).into_iter().collect();
        Ok(Before { messages, ..Before::default() })
    }

    fn summarized(&self, question: &mut Json, removed: &[Json]) {
        if self.of_turn {
            keep(question, removed);
        }
    }

    fn after_summary(&self, _: &View<'_>, _: &str, answer: &Json) -> Result<Map<String, Json>, AgentError> {
        // A turn does not show it: a run that goes on would not know it.
        if !self.of_turn {
            self.budget.spend(Tokens::of(answer));
        }
        Ok(Map::new())
    }

    fn after_model(&self, _: &View<'_>, answer: &mut Json) -> Result<After, AgentError> {
        self.budget.spend(Tokens::of(answer));
        let mut warning = self.warning.lock().unwrap_or_else(PoisonError::into_inner);
        *warning = None;
        match self.budget.standing() {
            Standing::Within => {}
            Standing::Warn(share) => *warning = Some(share.warning()),
            // The final answer was given in time.
            Standing::Exhausted(_) if message::tool_calls(answer).is_empty() => {}
            Standing::Exhausted(Share { used, limit, of }) => {
                let notice = format!(
                    "[stopped: {used} of {limit} {of} are used, so the run ended with the results so far]"
                );
                *answer = message::strip_tool_calls(answer, &notice);
                let stop_reason = Some(StopReason::TokenCapped.as_str().to_owned());
                return Ok(After { stop_reason, ..After::default() });
            }
        }
        Ok(After::default())
    }
}

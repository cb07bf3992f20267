//! What a subagent has done so far, kept in its own state so that a restart and a summary of its conversation lose
//! nothing of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json, json};
use threadkeep::state::StateSnapshot;
use threadkeep_agent::model::message;
use threadkeep_agent::tools::WorkUsage;
use threadkeep_agent::{After, AgentError, Before, Middleware, Tokens, View};
use threadkeep_records::{ExecutionRow, ExecutionTokens};

use crate::acceptance::BashEvidence;

/// The channel of a subagent's state that holds it.
const CHANNEL: &str = "thread_data";

/// What a subagent has done so far.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Progress {
    /// Model calls.
    pub(crate) turns: u32,
    /// Answers and tool results up to the last answer.
    pub(crate) messages: u64,
    /// Why it stops early, if its last answer was cut.
    #[serde(default)]
    pub(crate) stop_reason: Option<String>,
    /// The commands that it ran, if its result is checked against criteria.
    #[serde(default)]
    pub(crate) commands: BashEvidence,
    /// Model calls and tokens by model, with those of the summaries of its conversation; only models that reported tokens.
    pub(crate) usage: BTreeMap<String, Used>,
}

/// What one model did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Used {
    /// Calls.
    pub(crate) calls: u64,
    /// Their tokens.
    #[serde(flatten)]
    pub(crate) tokens: ExecutionTokens,
}

impl Progress {
    /// The progress in a subagent's state; none yet without one.
    ///
    /// # Errors
    /// [`threadkeep::Error::Corrupt`] if it cannot be read.
    pub(crate) fn of(state: Option<&StateSnapshot>) -> threadkeep::Result<Self> {
        let stored = state.map(|state| state.json(CHANNEL)).transpose()?.flatten();
        let Some(stored) = stored.filter(|stored| !stored.is_null()) else { return Ok(Self::default()) };
        serde_json::from_value(stored).map_err(|error| threadkeep::Error::InvalidInput(format!(
            "the progress of a subagent cannot be read ({error}): its thread was changed by something else"
        )))
    }

    /// The progress including this answer of `model`, after these tool results.
    fn after(mut self, results: u64, model: &str, answer: &Json) -> Self {
        self.turns += 1;
        self.messages += results + 1;
        self.count(model, answer);
        self
    }

    /// Counts an answer of `model`; whether its provider reported tokens.
    fn count(&mut self, model: &str, answer: &Json) -> bool {
        let is_known = answer["usage_metadata"].is_object();
        if is_known {
            let used = self.usage.entry(model.to_owned()).or_default();
            used.calls += 1;
            add(&mut used.tokens, Tokens::of(answer));
        }
        is_known
    }

    /// The tokens by model.
    pub(crate) fn by_model(&self) -> BTreeMap<String, ExecutionTokens> {
        self.usage.iter().map(|(model, used)| (model.clone(), used.tokens)).collect()
    }

    /// What models did for this attempt.
    pub(crate) fn used(&self, row: &ExecutionRow) -> WorkUsage {
        let models = self.usage.iter().map(|(model, used)| (model.clone(), used.calls, signed(used.tokens)));
        WorkUsage {
            work_id: row.execution_id.clone(),
            attempt: row.attempt,
            caller: format!("subagent:{}", row.agent_name),
            models: models.collect(),
        }
    }

    /// The tokens of all models; `None` if no provider reported any.
    pub(crate) fn tokens(&self) -> Option<ExecutionTokens> {
        let sum = |mut sum: ExecutionTokens, used: &Used| {
            sum.input_tokens += used.tokens.input_tokens;
            sum.output_tokens += used.tokens.output_tokens;
            sum.total_tokens += used.tokens.total_tokens;
            sum
        };
        (!self.usage.is_empty()).then(|| self.usage.values().fold(ExecutionTokens::default(), sum))
    }
}

/// Tokens as runs count them.
pub(crate) fn signed(tokens: ExecutionTokens) -> Tokens {
    let count = |tokens: u64| i64::try_from(tokens).unwrap_or(i64::MAX);
    Tokens {
        input: count(tokens.input_tokens),
        output: count(tokens.output_tokens),
        total: count(tokens.total_tokens),
    }
}

/// Tokens as executions count them; none are negative.
pub(crate) fn unsigned(tokens: Tokens) -> ExecutionTokens {
    let count = |tokens: i64| u64::try_from(tokens).unwrap_or_default();
    ExecutionTokens {
        input_tokens: count(tokens.input),
        output_tokens: count(tokens.output),
        total_tokens: count(tokens.total),
    }
}

/// Adds tokens, none of which are negative.
pub(crate) fn add(sum: &mut ExecutionTokens, tokens: Tokens) {
    *sum += unsigned(tokens);
}

/// How many tool results follow the last answer.
fn results_after_answer(turn: &[Json]) -> u64 {
    let answered = turn.iter().rposition(|message| message::kind(message) == "ai").map_or(0, |at| at + 1);
    turn[answered..].iter().filter(|message| message::kind(message) == "tool").count() as u64
}

/// Counts what a subagent does, the summaries of its conversation included, and ends it after its last turn. It comes
/// after every other middleware, whose decisions it stores.
pub(crate) struct Counting {
    /// The configured name of its model.
    pub(crate) model: String,
    /// The model calls it may make.
    pub(crate) max_turns: u32,
    /// Whether to keep the commands that it runs.
    pub(crate) commands: bool,
}

impl Middleware for Counting {
    fn before_model(&self, view: &View<'_>) -> Result<Before, AgentError> {
        let turns = Progress::of(view.state)?.turns;
        let stop =
            (turns >= self.max_turns).then(|| crate::contract::StopReason::TurnCapped.as_str().to_owned());
        Ok(Before { stop, ..Before::default() })
    }

    fn after_summary(
        &self,
        view: &View<'_>,
        model: &str,
        answer: &Json,
    ) -> Result<Map<String, Json>, AgentError> {
        let mut progress = Progress::of(view.state)?;
        let is_known = progress.count(model, answer);
        Ok(is_known.then(|| (CHANNEL.to_owned(), json!(progress))).into_iter().collect())
    }

    fn after_model(&self, view: &View<'_>, answer: &mut Json) -> Result<After, AgentError> {
        let mut progress =
            Progress::of(view.state)?.after(results_after_answer(view.turn), &self.model, answer);
        progress.stop_reason = view.stop_reason.map(str::to_owned);
        if self.commands {
            progress.commands.add(view.turn);
        }
        let writes = [(CHANNEL.to_owned(), json!(progress))];
        Ok(After { writes: writes.into_iter().collect(), ..After::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_messages_and_tokens_add_up() {
        let answer = json!({"type": "ai", "usage_metadata": {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}});
        let silent = json!({"type": "ai"});
        let progress =
            Progress::default().after(0, "m", &answer).after(2, "m", &answer).after(1, "n", &silent);
        assert_eq!((progress.turns, progress.messages), (3, 6));
        let tokens = ExecutionTokens { input_tokens: 6, output_tokens: 4, total_tokens: 10 };
        assert_eq!(progress.tokens(), Some(tokens));
        assert_eq!(progress.usage["m"].calls, 2);
        let stored: Progress = serde_json::from_value(json!(progress)).unwrap();
        assert_eq!(stored, progress);
    }

    #[test]
    fn tokens_that_nobody_reported_are_unknown_not_zero() {
        assert_eq!(Progress::default().after(0, "m", &json!({"type": "ai"})).tokens(), None);
    }

    #[test]
    fn results_are_counted_from_the_last_answer_on() {
        let (ai, tool) = (json!({"type": "ai"}), json!({"type": "tool"}));
        assert_eq!(results_after_answer(&[json!({"type": "human"})]), 0);
        assert_eq!(results_after_answer(&[ai.clone(), tool.clone(), ai.clone(), tool.clone(), tool]), 2);
        assert_eq!(results_after_answer(&[ai]), 0);
    }
}

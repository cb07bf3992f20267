//! The token usage of a run's model calls, per model and per caller.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};
use threadkeep_agent::Tokens;
use threadkeep_agent::tools::WorkUsage;
use tokio::sync::watch;

use threadkeep_records::RunTotals;

/// Adds up the usage of model calls.
#[derive(Debug, Default)]
pub(crate) struct UsageLedger {
    totals: RunTotals,
    by_model: BTreeMap<String, Tokens>,
    shown: watch::Sender<RunTotals>,
}

impl UsageLedger {
    /// Counts one answer of `model` to `caller` (`lead_agent`, `subagent...` or `middleware...`).
    pub(crate) fn record(&mut self, model: &str, caller: &str, answer: &Json) {
        self.add(model, caller, 1, Tokens::of(answer));
        self.shown.send_replace(self.totals());
    }

    /// Counts what was done for an attempt of a subagent, once.
    pub(crate) fn count(&mut self, usage: &WorkUsage) {
        let attempt = (usage.work_id.clone(), usage.attempt);
        if self.totals.executions.contains(&attempt) {
            return;
        }
        self.totals.executions.push(attempt);
        for (model, calls, tokens) in &usage.models {
            self.add(model, &usage.caller, *calls, *tokens);
        }
        self.shown.send_replace(self.totals());
    }

    fn add(&mut self, model: &str, caller: &str, calls: u64, tokens: Tokens) {
        self.totals.llm_call_count += i64::try_from(calls).unwrap_or(i64::MAX);
        self.totals.total_input_tokens += tokens.input;
        self.totals.total_output_tokens += tokens.output;
        self.totals.total_tokens += tokens.total;
        *match caller.split(':').next() {
            Some("subagent") => &mut self.totals.subagent_tokens,
            Some("middleware") => &mut self.totals.middleware_tokens,
            _ => &mut self.totals.lead_agent_tokens,
        } += tokens.total;
        *self.by_model.entry(model.to_owned()).or_default() += tokens;
    }

    /// Counts a message of the conversation, and keeps the last answer's text.
    pub(crate) fn message(&mut self, message: &Json) {
        self.totals.message_count += 1;
        let text = || Some(threadkeep_agent::model::message::text(message)).filter(|text| !text.is_empty());
        match message["type"].as_str() {
            Some("ai") => self.totals.last_ai_message = text().or(self.totals.last_ai_message.take()),
            Some("human") if self.totals.first_human_message.is_none() => {
                self.totals.first_human_message = text();
            }
            _ => {}
        }
        self.shown.send_replace(self.totals());
    }

    /// The sums, as they change.
    pub(crate) fn watch(&self) -> watch::Receiver<RunTotals> {
        self.shown.subscribe()
    }

    /// The sums so far.
    pub(crate) fn totals(&self) -> RunTotals {
        let by_model: Map<String, Json> = self
            .by_model
            .iter()
            .map(|(model, Tokens { input, output, total })| {
                (
                    model.clone(),
                    json!({ "input_tokens": input, "output_tokens": output, "total_tokens": total }),
                )
            })
            .collect();
        RunTotals { token_usage_by_model: by_model, ..self.totals.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(input: i64, output: i64) -> Json {
        json!({"type": "ai", "content": "x",
               "usage_metadata": {"input_tokens": input, "output_tokens": output, "total_tokens": input + output}})
    }

    #[test]
    fn each_attempt_of_a_subagent_is_counted_once() {
        let mut ledger = UsageLedger::default();
        let tokens = Tokens { input: 5, output: 1, total: 6 };
        for attempt in [1, 1, 2] {
            ledger.count(&WorkUsage {
                work_id: "e".to_owned(),
                attempt,
                caller: "subagent:x".to_owned(),
                models: vec![("a".to_owned(), 2, tokens), ("b".to_owned(), 1, tokens)],
            });
        }
        let totals = ledger.totals();
        assert_eq!((totals.llm_call_count, totals.subagent_tokens, totals.total_tokens), (6, 24, 24));
        assert_eq!(totals.executions, [("e".to_owned(), 1), ("e".to_owned(), 2)]);
    }

    #[test]
    fn usage_adds_up_per_model_and_per_caller() {
        let mut ledger = UsageLedger::default();
        ledger.record("a", "lead_agent", &answer(10, 1));
        ledger.record("a", "middleware:title", &answer(5, 2));
        ledger.record("b", "subagent:x", &answer(7, 3));
        ledger.record("b", "lead_agent", &json!({"type": "ai", "usage_metadata": null}));
        let totals = ledger.totals();
        assert_eq!((totals.total_input_tokens, totals.total_output_tokens, totals.total_tokens), (22, 6, 28));
        assert_eq!((totals.lead_agent_tokens, totals.middleware_tokens, totals.subagent_tokens), (11, 7, 10));
        assert_eq!(totals.llm_call_count, 4);
        assert_eq!(totals.token_usage_by_model["a"]["total_tokens"], 18);
        assert_eq!(totals.token_usage_by_model["b"]["total_tokens"], 10);
    }

    #[test]
    fn absurd_numbers_do_not_overflow_the_sums() {
        let mut ledger = UsageLedger::default();
        let absurd = json!({"type": "ai", "usage_metadata": {
            "input_tokens": i64::MAX, "output_tokens": i64::MAX, "total_tokens": u64::MAX}});
        for _ in 0..3 {
            ledger.record("a", "lead_agent", &absurd);
        }
        let maximum = 1_i64 << 40;
        assert_eq!(ledger.totals().total_input_tokens, 3 * maximum);
        assert_eq!(ledger.totals().total_tokens, 6 * maximum);
    }

    #[test]
    fn the_first_question_and_the_last_answer_are_kept() {
        let mut ledger = UsageLedger::default();
        for message in [
            json!({"type": "human", "content": "first"}),
            json!({"type": "ai", "content": "one"}),
            json!({"type": "human", "content": "second"}),
            json!({"type": "ai", "content": ""}),
        ] {
            ledger.message(&message);
        }
        let totals = ledger.totals();
        assert_eq!(totals.message_count, 4);
        assert_eq!(totals.first_human_message.as_deref(), Some("first"));
        assert_eq!(totals.last_ai_message.as_deref(), Some("one"));
    }
}

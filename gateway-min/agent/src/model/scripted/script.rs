//! The script: its format, choosing an answer for a situation, and placeholders.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Map, Value};

/// A script; see the [module above](super) for the meaning of every key.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Script {
    #[serde(default = "default_chunk_chars")]
    pub(super) chunk_chars: usize,
    pub(super) record: Option<PathBuf>,
    rules: Vec<Rule>,
}

fn default_chunk_chars() -> usize {
    16
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    #[serde(default)]
    when: Condition,
    #[serde(default)]
    repeat_last: bool,
    answers: Vec<Answer>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Condition {
    contains: Option<Vec<String>>,
    turn: Option<usize>,
    caller: Option<String>,
    system: Option<Vec<String>>,
    offered: Option<Vec<String>>,
    anywhere: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Answer {
    #[serde(default)]
    pub(super) text: String,
    #[serde(default)]
    pub(super) tool_calls: Vec<ScriptedCall>,
    pub(super) usage: Option<Tokens>,
    pub(super) finish_reason: Option<String>,
    pub(super) error: Option<Failing>,
    pub(super) delay_ms: Option<u64>,
    pub(super) gate: Option<GateAt>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ScriptedCall {
    pub(super) name: String,
    #[serde(default)]
    pub(super) args: Map<String, Value>,
    pub(super) id: Option<String>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tokens {
    pub(super) input_tokens: u64,
    pub(super) output_tokens: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Failing {
    pub(super) kind: ErrorKind,
    pub(super) message: String,
    pub(super) attempts: Option<u32>,
    #[serde(default)]
    pub(super) after_chunks: usize,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ErrorKind {
    Transient,
    Fatal,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GateAt {
    pub(super) name: String,
    #[serde(default)]
    pub(super) after_chunks: usize,
}

/// The state of the conversation.
#[derive(Debug)]
pub(super) struct Situation {
    /// The user's last message.
    pub(super) input: String,
    /// Its id.
    pub(super) input_id: String,
    /// The number of user messages before it.
    pub(super) turn: usize,
    /// The number of answers after it.
    pub(super) answered: usize,
    /// The last tool result.
    pub(super) tool_result: String,
    /// The caller.
    pub(super) caller: String,
    /// The system prompt.
    pub(super) system: String,
    /// The names of the tools on offer.
    pub(super) offered: Vec<String>,
    /// The texts of all messages, if the script needs them.
    pub(super) said: Vec<String>,
    /// The newest result of each call, by the call's id, if the script needs them.
    pub(super) results: BTreeMap<String, String>,
}

/// What begins the placeholder for the result of one call.
const RESULT_OF: &str = "{{result:";

impl Script {
    /// Whether answers depend on earlier turns.
    pub(super) fn looks_back(&self) -> bool {
        let shows = |text: &str| text.contains("{{tool_result}}") || text.contains(RESULT_OF);
        self.rules.iter().any(|rule| {
            let shows_result = |answer: &Answer| {
                let in_args = |call: &ScriptedCall| shows(&Value::Object(call.args.clone()).to_string());
                shows(&answer.text) || answer.tool_calls.iter().any(in_args)
            };
            rule.when.turn.is_some() || rule.when.anywhere.is_some() || rule.answers.iter().any(shows_result)
        })
    }

    /// The answer for `situation`, if the script has one.
    pub(super) fn answer(&self, situation: &Situation) -> Option<&Answer> {
        let rule = self.rules.iter().find(|rule| rule.when.holds(situation))?;
        let repeated = if rule.repeat_last { rule.answers.last() } else { None };
        rule.answers.get(situation.answered).or(repeated)
    }
}

impl Condition {
    fn holds(&self, situation: &Situation) -> bool {
        let one_of = |words: &Option<Vec<String>>, texts: &[&str]| {
            words.as_ref().is_none_or(|words| {
                let found = |text: &str| {
                    let text = text.to_lowercase();
                    words.iter().any(|word| text.contains(&word.to_lowercase()))
                };
                texts.iter().any(|text| found(text))
            })
        };
        let said: Vec<&str> = situation.said.iter().map(String::as_str).collect();
        let offered = self
            .offered
            .as_ref()
            .is_none_or(|names| names.iter().all(|name| situation.offered.contains(name)));
        let caller = self.caller.as_ref().is_none_or(|caller| {
            situation
                .caller
                .strip_prefix(caller.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
        });
        one_of(&self.contains, &[&situation.input])
            && one_of(&self.system, &[&situation.system])
            && one_of(&self.anywhere, &said)
            && offered
            && caller
            && self.turn.is_none_or(|turn| turn == situation.turn)
    }
}

impl Situation {
    /// `text` with its placeholders replaced. Replacements are not expanded again.
    pub(super) fn expand(&self, text: &str) -> String {
        let mut expanded = String::new();
        let mut rest = text;
        while let Some(start) = rest.find("{{") {
            let (before, from) = rest.split_at(start);
            expanded.push_str(before);
            if let Some((id, after)) = from.strip_prefix(RESULT_OF).and_then(|rest| rest.split_once("}}")) {
                expanded.push_str(self.results.get(id).map_or("", String::as_str));
                rest = after;
                continue;
            }
            let known = [("{{input}}", &self.input), ("{{tool_result}}", &self.tool_result)];
            let (taken, value) = known
                .iter()
                .find(|(placeholder, _)| from.starts_with(placeholder))
                .map_or(("{{", "{{"), |(placeholder, value)| (*placeholder, value.as_str()));
            expanded.push_str(value);
            rest = &from[taken.len()..];
        }
        expanded + rest
    }

    /// `args` with the placeholders in their strings replaced.
    pub(super) fn expand_args(&self, args: &Map<String, Value>) -> Map<String, Value> {
        args.iter().map(|(key, value)| (key.clone(), self.expand_value(value))).collect()
    }

    fn expand_value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => self.expand(text).into(),
            Value::Array(items) => items.iter().map(|item| self.expand_value(item)).collect(),
            Value::Object(fields) => Value::Object(self.expand_args(fields)),
            other => other.clone(),
        }
    }
}

/// `text` in pieces of `size` characters (at least one).
pub(super) fn pieces(text: &str, size: usize) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    chars.chunks(size.max(1)).map(|piece| piece.iter().collect()).collect()
}

//! Noticing that the model goes round in circles.
//!
//! Two signs: the same set of tool calls over and over, and one tool called again and again with whatever
//! arguments. At the first threshold the model gets a warning with its next request, at the second the run
//! ends: the tool calls of its last message are stripped
//! ([`strip_tool_calls`](crate::model::message::strip_tool_calls)) and the run's stop reason is
//! [`STOP_REASON`].
//!
//! All of it is computed from the messages of the current turn, so a restart forgets nothing.

use serde_json::{Map, Value};
use threadkeep_config::LoopDetection;

use crate::model::message::{invalid_tool_calls, kind, tool_calls, turn_start};

/// The stop reason of a run that ended because of a loop (service reference, "Status vocabularies").
pub const STOP_REASON: &str = "loop_capped";
/// The name of the hidden message that carries a warning.
pub const WARNING_NAME: &str = "loop_warning";

/// Arguments that say what a call is about. Others (a description, a limit) vary without making the call a
/// different one.
const SALIENT_ARGS: [&str; 7] = ["path", "url", "query", "command", "pattern", "glob", "cmd"];
/// Tools of which every argument counts: another content, or another range of lines, is other work.
const ALL_ARGS_COUNT: [&str; 3] = ["write_file", "str_replace", "read_file"];

/// What to do about the model's last message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Proceed,
    /// Run its calls, and warn the model with its next request.
    Warn(Finding),
    /// Strip its calls and end the run.
    Stop(Finding),
}

/// A threshold that was reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// By which sign.
    pub layer: Layer,
    /// The tools concerned, sorted.
    pub tool_names: Vec<String>,
    /// How often it happened.
    pub count: usize,
    /// The threshold.
    pub threshold: usize,
}

/// The signs of a loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layer {
    /// The same set of calls again.
    IdenticalCallSet,
    /// One tool very often.
    ToolFrequency,
}

impl Layer {
    /// The name in audit events (`detection_layer`).
    pub fn as_str(self) -> &'static str {
        match self {
            Self::IdenticalCallSet => "identical_call_set",
            Self::ToolFrequency => "tool_frequency",
        }
    }
}

impl Finding {
    /// The text of the warning to the model.
    pub fn warning(&self) -> String {
        format!(
            "[loop warning] {}. Repeating it will not give another result. Use what you have, try something \
             different, or give your final answer now.",
            self.what_happened()
        )
    }

    /// The notice at the end of the text of a message that was stripped of its calls.
    pub fn stop_notice(&self) -> String {
        format!("[stopped: {}, so the run was ended with what was found so far]", self.what_happened())
    }

    fn what_happened(&self) -> String {
        let tools = self.tool_names.join(", ");
        match self.layer {
            Layer::IdenticalCallSet => format!("the same call of {tools} was made {} times", self.count),
            Layer::ToolFrequency => format!("{tools} was called {} times", self.count),
        }
    }
}

/// Judges the last assistant message of `messages`, the whole conversation or its end, by the current
/// turn. Warns once in a turn about the same set of calls, and once about each tool.
pub fn assess(settings: &LoopDetection, messages: &[Value]) -> Verdict {
    let turn = &messages[turn_start(messages).unwrap_or_default()..];
    let last_answer = turn.iter().rfind(|message| kind(message) == "ai");
    if !settings.enabled || last_answer.is_none_or(|message| call_set(message).is_empty()) {
        return Verdict::Proceed;
    }
    let sets: Vec<Vec<Call<'_>>> = turn
        .iter()
        .filter(|message| kind(message) == "ai")
        .map(call_set)
        .filter(|calls| !calls.is_empty())
        .collect();
    let (repeated, frequent) = (assess_repetition(settings, &sets), assess_frequency(settings, &sets));
    match (repeated, frequent) {
        (stop @ Verdict::Stop(_), _) | (_, stop @ Verdict::Stop(_)) => stop,
        (warn @ Verdict::Warn(_), _) | (_, warn) => warn,
    }
}

fn assess_repetition(settings: &LoopDetection, sets: &[Vec<Call<'_>>]) -> Verdict {
    let Some(last) = sets.last() else { return Verdict::Proceed };
    // How often the set had been made, within the window, when the first `end` answers were given.
    let count_at = |end: usize| {
        sets[end.saturating_sub(settings.window_size)..end].iter().filter(|set| *set == last).count()
    };
    let count = count_at(sets.len());
    let finding = |threshold| Finding {
        layer: Layer::IdenticalCallSet,
        tool_names: names(last.iter().map(|call| call.tool)),
        count,
        threshold,
    };
    let warned_before =
        || (1..sets.len()).any(|end| sets[end - 1] == *last && count_at(end) >= settings.warn_threshold);
    if count >= settings.hard_limit {
        Verdict::Stop(finding(settings.hard_limit))
    } else if count >= settings.warn_threshold && !warned_before() {
        Verdict::Warn(finding(settings.warn_threshold))
    } else {
        Verdict::Proceed
    }
}

fn assess_frequency(settings: &LoopDetection, sets: &[Vec<Call<'_>>]) -> Verdict {
    let Some((last, earlier)) = sets.split_last() else { return Verdict::Proceed };
    let mut verdict = Verdict::Proceed;
    for tool in names(last.iter().map(|call| call.tool)) {
        let calls_in = |set: &Vec<Call<'_>>| set.iter().filter(|call| call.tool == tool).count();
        let before: usize = earlier.iter().map(calls_in).sum();
        let count = before + calls_in(last);
        let limits = settings.tool_freq_overrides.get(&tool).unwrap_or(&settings.tool_frequency);
        let finding = |threshold| Finding {
            layer: Layer::ToolFrequency,
            tool_names: vec![tool.clone()],
            count,
            threshold,
        };
        if count >= limits.hard_limit {
            return Verdict::Stop(finding(limits.hard_limit));
        }
        if before < limits.warn && limits.warn <= count && verdict == Verdict::Proceed {
            verdict = Verdict::Warn(finding(limits.warn));
        }
    }
    verdict
}

/// A tool call, reduced to what makes it the same as another.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Call<'a> {
    tool: &'a str,
    args: String,
}

/// The calls of an answer, in an order that does not depend on theirs.
fn call_set(message: &Value) -> Vec<Call<'_>> {
    let mut calls: Vec<Call<'_>> =
        tool_calls(message).iter().chain(invalid_tool_calls(message)).map(Call::of).collect();
    calls.sort();
    calls
}

impl<'a> Call<'a> {
    fn of(call: &'a Value) -> Self {
        let tool = call["name"].as_str().unwrap_or_default();
        let args = match &call["args"] {
            Value::Object(args) if !ALL_ARGS_COUNT.contains(&tool) => salient(args),
            args => args.to_string(),
        };
        Self { tool, args }
    }
}

/// The arguments that count, as text: objects are serialised with sorted keys.
fn salient(args: &Map<String, Value>) -> String {
    let salient: Map<String, Value> = SALIENT_ARGS
        .iter()
        .filter_map(|key| args.get(*key).map(|value| ((*key).to_owned(), value.clone())))
        .collect();
    let counting = if salient.is_empty() { args.clone() } else { salient };
    Value::Object(counting).to_string()
}

fn names<'a>(tools: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut names: Vec<String> = tools.map(str::to_owned).collect();
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
// JSON literals are handed over whole.
#[allow(clippy::needless_pass_by_value)]
mod tests;

//! Detects that the model is going round in circles.
//!
//! Two signs: the same set of tool calls repeatedly, and one tool called very often with any arguments. At the first
//! threshold the model gets a warning with its next request, at the second the run ends: the tool calls of its last
//! message are stripped ([`strip_tool_calls`](crate::model::message::strip_tool_calls)) and the run's stop reason is
//! [`STOP_REASON`].
//!
//! Everything is computed from the messages of the current turn, so nothing is lost on a restart.

use serde_json::{Map, Value};
use threadkeep_config::LoopDetection;

use crate::model::message::{invalid_tool_calls, kind, tool_calls, turn_start};

/// The stop reason of a run that ended because of a loop (service reference, "Status vocabularies").
pub const STOP_REASON: &str = "loop_capped";
/// The name of the hidden message that carries a warning.
pub const WARNING_NAME: &str = "loop_warning";

/// Arguments that identify a call. Others (a description, a limit) vary without making it a different call.
const SALIENT_ARGS: [&str; 7] = ["path", "url", "query", "command", "pattern", "glob", "cmd"];
/// Tools for which every argument counts: different content or a different range of lines is different work.
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
    /// The sign.
    pub layer: Layer,
    /// The tools concerned, sorted.
    pub tool_names: Vec<String>,
    /// How often it occurred.
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
            "[loop warning] {}. Repeating it will not change the result. Use what you have, try something \
             different, or give your final answer now.",
            self.what_happened()
        )
    }

    /// The notice appended to the text of a message whose calls were stripped.
    pub fn stop_notice(&self) -> String {
        format!("[stopped: {}, so the run ended with the results so far]", self.what_happened())
    }

    fn what_happened(&self) -> String {
        let tools = self.tool_names.join(", ");
        match self.layer {
            Layer::IdenticalCallSet => format!("the same call of {tools} was made {} times", self.count),
            Layer::ToolFrequency => format!("{tools} was called {} times", self.count),
        }
    }
}

/// Judges the last assistant message of `messages` (the conversation or its end) by the current turn. Warns once per
/// turn about the same set of calls, and once about each tool.
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
    // How often the set had been called, within the window, after the first `end` answers.
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

/// A tool call, reduced to what identifies it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Call<'a> {
    tool: &'a str,
    args: String,
}

/// The calls of an answer, in canonical order.
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

/// The arguments that count, as text; objects are serialised with sorted keys.
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
// JSON literals are passed by value.
#[allow(clippy::needless_pass_by_value)]
mod tests;

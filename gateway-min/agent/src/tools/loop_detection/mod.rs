//! Detects that the model is going round in circles.
//!
//! Two signs: the same set of tool calls repeatedly, and one tool called very often with any arguments, both within a
//! window of the last answers. At the first threshold the model gets a warning with its next request, and several if an
//! answer reaches several. At the second the run ends: the tool calls of its last message are stripped
//! ([`strip_tool_calls`](crate::model::message::strip_tool_calls)) and the run's stop reason is [`STOP_REASON`].
//!
//! Everything is computed from the messages of the current turn, so nothing is lost on a restart.

use serde_json::{Map, Value};
use threadkeep_config::LoopDetection;

use crate::model::message::{invalid_tool_calls, kind, tool_calls, turn_start};

/// The stop reason of a run that ended because of a loop (service reference, "Status vocabularies").
pub const STOP_REASON: &str = "loop_capped";
/// The name of the hidden message that carries a warning.
pub const WARNING_NAME: &str = "loop_warning";

/// The maximum number of warnings in one request.
pub(crate) const WARNINGS_MAX: usize = 4;

/// Arguments that identify a call. Others (a description, a limit) vary without making it a different call.
const SALIENT_ARGS: [&str; 7] = ["path", "url", "query", "command", "pattern", "glob", "cmd"];
/// Tools for which every argument counts: different content or a different range of lines is different work.
const ALL_ARGS_COUNT: [&str; 3] = ["write_file", "str_replace", "read_file"];

/// What to do about the model's last message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Proceed,
    /// Run its calls, and warn the model with its next request of each of these: the set of calls, then tools by name.
    Warn(Vec<Finding>),
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

/// Judges the last assistant message of `messages` (the conversation or its end) by the last answers of the current
/// turn. Warns once about the same set of calls, and once about each tool; again if the count was below the threshold
/// since.
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
        (Verdict::Warn(set), Verdict::Warn(tools)) => Verdict::Warn([set, tools].concat()),
        (warn @ Verdict::Warn(_), _) | (_, warn) => warn,
    }
}

fn assess_repetition(settings: &LoopDetection, sets: &[Vec<Call<'_>>]) -> Verdict {
    let Some(last) = sets.last() else { return Verdict::Proceed };
    let counts = Counts::of(sets, settings.window_size, |set| usize::from(set == last));
    let count = counts.now;
    let finding = |threshold| Finding {
        layer: Layer::IdenticalCallSet,
        tool_names: names(last.iter().map(|call| call.tool)),
        count,
        threshold,
    };
    if count >= settings.hard_limit {
        Verdict::Stop(finding(settings.hard_limit))
    } else if counts.reach(settings.warn_threshold) {
        Verdict::Warn(vec![finding(settings.warn_threshold)])
    } else {
        Verdict::Proceed
    }
}

fn assess_frequency(settings: &LoopDetection, sets: &[Vec<Call<'_>>]) -> Verdict {
    let Some(last) = sets.last() else { return Verdict::Proceed };
    let window = frequency_window(settings);
    let mut warnings = Vec::new();
    for tool in names(last.iter().map(|call| call.tool)) {
        let counts = Counts::of(sets, window, |set| set.iter().filter(|call| call.tool == tool).count());
        let count = counts.now;
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
        if counts.reach(limits.warn) {
            warnings.push(finding(limits.warn));
        }
    }
    if warnings.is_empty() { Verdict::Proceed } else { Verdict::Warn(warnings) }
}

/// How many of the last answers are looked at for the calls of one tool: with fewer than the highest limit, a tool that
/// is called once an answer would never reach it.
fn frequency_window(settings: &LoopDetection) -> usize {
    let limits = settings.tool_freq_overrides.values().chain([&settings.tool_frequency]);
    let limits = limits.map(|limits| limits.hard_limit).chain([settings.hard_limit]);
    limits.fold(settings.window_size, usize::max)
}

/// How often something occurred within the window of the last answers, before the last one and with it.
struct Counts {
    before: usize,
    now: usize,
}

impl Counts {
    fn of<'a>(sets: &[Vec<Call<'a>>], window: usize, count: impl Fn(&[Call<'a>]) -> usize) -> Self {
        let after = |end: usize| sets[end.saturating_sub(window)..end].iter().map(|set| count(set)).sum();
        Self { before: after(sets.len().saturating_sub(1)), now: after(sets.len()) }
    }

    /// Whether the last answer reached the threshold: later answers do not, until the count has been below it.
    fn reach(&self, threshold: usize) -> bool {
        self.before < threshold && threshold <= self.now
    }
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

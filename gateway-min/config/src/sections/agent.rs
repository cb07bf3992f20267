//! Sections about what an agent does within a run. Read live: a change applies from the next run on.

use std::collections::BTreeMap;
use std::ops::Bound;

use serde::{Deserialize, Serialize};

use crate::models::Model;
use crate::node::{Node, Report};

/// `title`: how a thread gets its title.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Title {
    /// Whether threads get titles; default true.
    pub enabled: bool,
    /// The maximum number of words of a title written by a model; at least 1, default 6.
    pub max_words: usize,
    /// The longest title by a model in characters; at least 1, default 60. Without a model the first message is cut to
    /// this number or 50, whichever is less, with `...` after it.
    pub max_chars: usize,
    /// The model that writes it; `None`, or one that does not exist, cuts the title from the first message.
    pub model_name: Option<String>,
}

impl Default for Title {
    fn default() -> Self {
        Self { enabled: true, max_words: 6, max_chars: 60, model_name: None }
    }
}

impl Title {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        let (node, default) = (root.section("title"), Self::default());
        Self {
            enabled: node.bool("enabled", default.enabled),
            max_words: node.int("max_words", default.max_words, 1..),
            max_chars: node.int("max_chars", default.max_chars, 1..),
            model_name: node.nonempty_text("model_name"),
        }
    }
}

/// Limits on how often one tool is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ToolFrequency {
    /// Calls after which the model is warned; at least 1.
    pub warn: usize,
    /// Calls after which the run is stopped; at least `warn`.
    pub hard_limit: usize,
}

/// `loop_detection`: stops an agent that repeats itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoopDetection {
    /// Whether repetition is detected; default true.
    pub enabled: bool,
    /// Identical sets of calls after which the model is warned; at least 1, default 3.
    pub warn_threshold: usize,
    /// Identical sets of calls after which the run is stopped; at least `warn_threshold`, default 5.
    pub hard_limit: usize,
    /// How many responses back are compared; at least 1, default 20.
    pub window_size: usize,
    /// How many runs are tracked; at least 1, default 100.
    pub max_tracked_threads: usize,
    /// The limits of tools without their own; default 30 and 50.
    pub tool_frequency: ToolFrequency,
    /// Limits of individual tools.
    pub tool_freq_overrides: BTreeMap<String, ToolFrequency>,
}

impl Default for LoopDetection {
    fn default() -> Self {
        Self {
            enabled: true,
            warn_threshold: 3,
            hard_limit: 5,
            window_size: 20,
            max_tracked_threads: 100,
            tool_frequency: ToolFrequency { warn: 30, hard_limit: 50 },
            tool_freq_overrides: BTreeMap::new(),
        }
    }
}

impl LoopDetection {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        let (node, default) = (root.section("loop_detection"), Self::default());
        let (warn_threshold, hard_limit) =
            limits(&node, ("warn_threshold", default.warn_threshold), ("hard_limit", default.hard_limit));
        let general = default.tool_frequency;
        let (warn, hard) =
            limits(&node, ("tool_freq_warn", general.warn), ("tool_freq_hard_limit", general.hard_limit));
        let general = ToolFrequency { warn, hard_limit: hard };
        let overrides = node.named("tool_freq_overrides").into_iter().map(|(tool, node)| {
            let (warn, hard_limit) =
                limits(&node, ("warn", general.warn), ("hard_limit", general.hard_limit));
            (tool.to_owned(), ToolFrequency { warn, hard_limit })
        });
        Self {
            enabled: node.bool("enabled", default.enabled),
            warn_threshold,
            hard_limit,
            window_size: node.int("window_size", default.window_size, 1..),
            max_tracked_threads: node.int("max_tracked_threads", default.max_tracked_threads, 1..),
            tool_frequency: general,
            tool_freq_overrides: overrides.collect(),
        }
    }
}

/// A warning limit and the hard limit above it.
fn limits(node: &Node<'_>, warn: (&str, usize), hard: (&str, usize)) -> (usize, usize) {
    let warn_limit = node.int(warn.0, warn.1, 1..);
    let hard_limit = node.int(hard.0, hard.1, 1..);
    if hard_limit < warn_limit {
        node.problem(hard.0, format!("must be at least {} ({warn_limit}), got {hard_limit}", warn.0));
    }
    (warn_limit, hard_limit)
}

/// `token_usage`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenUsage {
    /// Whether the cards of tasks show tokens; default true.
    pub enabled: bool,
}

impl Default for TokenUsage {
    fn default() -> Self {
        Self { enabled: true }
    }
}

impl TokenUsage {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        Self { enabled: root.section("token_usage").bool("enabled", Self::default().enabled) }
    }
}

/// A token budget for one run. The section `token_budget` is that of the lead agent.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TokenBudget {
    /// Whether the budget applies; default false.
    pub enabled: bool,
    /// Tokens in and out together; at least 1000, default 200000.
    pub max_tokens: u64,
    /// Tokens in.
    pub max_input_tokens: Option<u64>,
    /// Tokens out.
    pub max_output_tokens: Option<u64>,
    /// The share of a limit at which the model is warned once; 0 to 1, default 0.8.
    pub warn_threshold: f64,
    /// The share of a limit at which the run is stopped; 0 to 1, at least `warn_threshold`, default 1.
    pub hard_stop_threshold: f64,
}

impl Default for TokenBudget {
    fn default() -> Self {
        Self {
            enabled: false,
            max_tokens: 200_000,
            max_input_tokens: None,
            max_output_tokens: None,
            warn_threshold: 0.8,
            hard_stop_threshold: 1.0,
        }
    }
}

impl TokenBudget {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        let node = root.section("token_budget");
        let budget = super::TokenBudgetOverride::read(&node).over(Self::default());
        budget.check(&node);
        budget
    }

    /// Reports a problem if the warning would come after the stop.
    pub(super) fn check(&self, node: &Node<'_>) {
        if self.hard_stop_threshold < self.warn_threshold {
            node.problem(
                "hard_stop_threshold",
                format!(
                    "must be at least warn_threshold ({}), got {}",
                    self.warn_threshold, self.hard_stop_threshold
                ),
            );
        }
    }
}

/// An amount of context.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ContextSize {
    /// A number of messages; at least 1.
    Messages(u64),
    /// A number of tokens; at least 1.
    Tokens(u64),
    /// A share of the model's context; more than 0, at most 1.
    Fraction(f64),
}

impl ContextSize {
    /// Reads `{type, value}`; `None` if unusable, with its problem reported.
    fn read(node: &Node<'_>) -> Option<Self> {
        for key in ["type", "value"] {
            if node.value(key).is_none() {
                node.problem(key, "is required");
                return None;
            }
        }
        match node.choice(
            "type",
            &[("messages", Some(0)), ("tokens", Some(1)), ("fraction", Some(2))],
            None,
        )? {
            0 => node.opt_int("value", 1..).map(Self::Messages),
            1 => node.opt_int("value", 1..).map(Self::Tokens),
            _ => {
                let share = (Bound::Excluded(0.0), Bound::Included(1.0));
                node.opt_float("value", share).map(Self::Fraction)
            }
        }
    }
}

/// `summarization`: summarizes the older part of a long conversation. Shared by the lead agent and subagents.
#[derive(Debug, Clone, PartialEq)]
pub struct Summarization {
    /// Whether conversations are summarized; default false.
    pub enabled: bool,
    /// The model that writes the summary; `None` for the run's own.
    pub model_name: Option<String>,
    /// When to summarize: as soon as one of these is reached. The file may hold one amount or a list.
    pub trigger: Vec<ContextSize>,
    /// How much stays unchanged; default 20 messages.
    pub keep: ContextSize,
    /// The maximum tokens sent to the summarizing model; at least 1, default 4000.
    pub trim_tokens_to_summarize: u64,
    /// The prompt of the summarizing model; `None` for the built-in one.
    pub summary_prompt: Option<String>,
    /// The tools whose reads of skill files survive; `None` for the built-in list.
    pub skill_file_read_tool_names: Option<Vec<String>>,
}

impl Default for Summarization {
    fn default() -> Self {
        Self {
            enabled: false,
            model_name: None,
            trigger: Vec::new(),
            keep: ContextSize::Messages(20),
            trim_tokens_to_summarize: 4000,
            summary_prompt: None,
            skill_file_read_tool_names: None,
        }
    }
}

impl Summarization {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        let (node, default) = (root.section("summarization"), Self::default());
        let triggers = match node.value("trigger") {
            None => Vec::new(),
            Some(value) if value.is_array() => node.items("trigger"),
            Some(_) => vec![node.section("trigger")],
        };
        let keep = node.value("keep").and_then(|_| ContextSize::read(&node.section("keep")));
        Self {
            enabled: node.bool("enabled", default.enabled),
            model_name: node.nonempty_text("model_name"),
            trigger: triggers.iter().filter_map(ContextSize::read).collect(),
            keep: keep.unwrap_or(default.keep),
            trim_tokens_to_summarize: node.int(
                "trim_tokens_to_summarize",
                default.trim_tokens_to_summarize,
                1..,
            ),
            summary_prompt: node.nonempty_text("summary_prompt"),
            skill_file_read_tool_names: node.texts("skill_file_read_tool_names"),
        }
    }

    /// Warns if summaries are enabled and no length of a conversation triggers one. That is no problem: clients can
    /// still ask for one.
    pub(crate) fn warn_if_never_due(&self, models: &[Model], report: &Report) {
        if !self.enabled {
            return;
        }
        if self.trigger.is_empty() {
            let text = "`summarization.trigger` is empty: conversations are summarized only when a client asks for it; \
                        set one, for example {type: tokens, value: 100000}";
            return report.warn(text.to_owned());
        }
        let unknown = models.iter().filter(|model| model.context_window.is_none());
        let unknown: Vec<&str> = unknown.map(|model| model.name.as_str()).collect();
        let is_fraction = |size: &ContextSize| matches!(size, ContextSize::Fraction(_));
        if !unknown.is_empty() && self.trigger.iter().all(is_fraction) {
            report.warn(format!(
                "`summarization.trigger` is a fraction of the model's context, and these models have no \
                 `context_window`: {}; their conversations are summarized only when a client asks for it",
                unknown.join(", ")
            ));
        }
    }
}

/// `tool_search`: tools that the model has to load before it calls them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolSearch {
    /// Whether loading is deferred; default false.
    pub enabled: bool,
    /// How many tools are loaded without a search because the question has their keywords; clamped to 1 to 5, default 3.
    pub auto_promote_top_k: u32,
}

impl Default for ToolSearch {
    fn default() -> Self {
        Self { enabled: false, auto_promote_top_k: 3 }
    }
}

impl ToolSearch {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        let (node, default) = (root.section("tool_search"), Self::default());
        Self {
            enabled: node.bool("enabled", default.enabled),
            auto_promote_top_k: node.clamped_int("auto_promote_top_k", default.auto_promote_top_k, 1, 5),
        }
    }
}

/// Where a subagent's tool receipts are rendered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiptsRenderMode {
    /// For delegated work only.
    DelegationOnly,
    /// For the lead agent too.
    Always,
}

/// `verification`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verification {
    /// Whether tools leave receipts and citations are checked against them; default true.
    pub receipts_enabled: bool,
    /// Where receipts are rendered; default for delegated work only.
    pub receipts_render_mode: ReceiptsRenderMode,
}

impl Default for Verification {
    fn default() -> Self {
        Self { receipts_enabled: true, receipts_render_mode: ReceiptsRenderMode::DelegationOnly }
    }
}

impl Verification {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        let (node, default) = (root.section("verification"), Self::default());
        let modes =
            [("delegation_only", ReceiptsRenderMode::DelegationOnly), ("always", ReceiptsRenderMode::Always)];
        if node.bool("judge_enabled", false) {
            node.problem("judge_enabled", "must be false: there is no judge");
        }
        if node.value("judge_model_name").is_some() {
            node.problem("judge_model_name", "must be null: there is no judge");
        }
        Self {
            receipts_enabled: node.bool("receipts_enabled", default.receipts_enabled),
            receipts_render_mode: node.choice("receipts_render_mode", &modes, default.receipts_render_mode),
        }
    }
}

#[cfg(test)]
mod tests;

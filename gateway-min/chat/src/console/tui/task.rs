//! A delegation in the conversation: one line, which follows the subagent.

use serde_json::Value as Json;
use threadkeep_agent::model::message;

use super::text::clean;

/// The status before the subagent has started.
const ASKED: &str = "asked";
/// The status of a call that was refused before a subagent started.
const REFUSED: &str = "refused";

/// What is known of a delegation. Texts contain no control characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Task {
    pub(super) description: String,
    /// `asked`, `running`, or how it ended.
    pub(super) status: String,
    /// The model calls of the subagent so far.
    pub(super) turns: u64,
    /// Its tokens so far; `None` until a provider reports some.
    pub(super) tokens: Option<u64>,
    /// Its latest message, or what came of it.
    pub(super) latest: Option<String>,
}

impl Task {
    /// The delegation that a call with these arguments asks for.
    pub(super) fn asked(args: &Json) -> Self {
        let text = |key: &str| args[key].as_str().map(str::trim).filter(|text| !text.is_empty());
        let description = text("description").or_else(|| text("prompt")).unwrap_or("(nothing)");
        Self {
            description: clean(description),
            status: ASKED.to_owned(),
            turns: 0,
            tokens: None,
            latest: None,
        }
    }

    /// Applies one of its `task_*` events.
    pub(super) fn follow(&mut self, event: &Json) {
        let kind = event["type"].as_str().unwrap_or_default();
        let Some(status) = kind.strip_prefix("task_") else { return };
        if let Some(tokens) = event["usage"]["total_tokens"].as_u64() {
            self.tokens = Some(tokens);
        }
        match status {
            "started" => {
                let description = event["description"].as_str().unwrap_or(&self.description);
                self.description = clean(description);
                "running".clone_into(&mut self.status);
            }
            "running" => {
                let said = &event["message"];
                if message::kind(said) == "ai" {
                    self.turns += 1;
                }
                self.latest = shown(said).or(self.latest.take());
            }
            ended => {
                self.status = clean(ended);
                let text = ["result", "error"].iter().find_map(|key| event[key].as_str());
                self.latest = text.map(clean).or(self.latest.take());
            }
        }
    }

    /// Its result is in the conversation.
    pub(super) fn answered(&mut self, result: &Json) {
        let metadata = &result["additional_kwargs"];
        if let Some(status) = metadata["subagent_status"].as_str() {
            self.status = clean(status);
        } else if self.status == ASKED {
            REFUSED.clone_into(&mut self.status);
        }
        if let Some(tokens) = metadata["subagent_token_usage"]["total_tokens"].as_u64() {
            self.tokens = Some(tokens);
        }
        let brief = ["subagent_result_brief", "subagent_error"].iter().find_map(|key| metadata[key].as_str());
        if self.latest.is_none() {
            self.latest = Some(brief.map_or_else(|| clean(&message::text(result)), clean));
        }
    }

    /// The line, with the tokens unless the configuration hides them.
    pub(super) fn line(&self, hides_tokens: bool) -> String {
        let turns = match self.turns {
            0 => String::new(),
            1 => ", 1 turn".to_owned(),
            turns => format!(", {turns} turns"),
        };
        let tokens = self.tokens.filter(|_| !hides_tokens);
        let tokens = tokens.map(|tokens| format!(", {tokens} tokens")).unwrap_or_default();
        format!("{}{turns}{tokens}: {}", self.status, self.description)
    }
}

/// What a message of a subagent says: its text, or the tools that it calls.
fn shown(said: &Json) -> Option<String> {
    let text = message::text(said);
    if !text.trim().is_empty() {
        return Some(clean(&text));
    }
    let names: Vec<&str> =
        message::tool_calls(said).iter().filter_map(|call| call["name"].as_str()).collect();
    (!names.is_empty()).then(|| clean(&format!("calls {}", names.join(", "))))
}

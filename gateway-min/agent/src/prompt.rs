//! System prompts.

use serde_json::Value as Json;

use crate::model::message;
use crate::tools::{ASK_CLARIFICATION, ToolSpec};

/// An agent's system prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prompt {
    /// An agent's own prompt; `None` is the lead agent's, which names the date.
    pub own: Option<String>,
    /// Further sections, in this order.
    pub sections: Vec<String>,
}

impl Prompt {
    /// The whole system prompt for a call on this date.
    pub(crate) fn system(&self, date: &str, tools: &[ToolSpec]) -> String {
        let own = match &self.own {
            Some(own) => own.clone(),
            None => system(date, tools),
        };
        std::iter::once(own).chain(self.sections.iter().cloned()).collect::<Vec<_>>().join("\n\n")
    }
}

/// The lead agent's prompt on this date.
fn system(date: &str, tools: &[ToolSpec]) -> String {
    let mut prompt = format!(
        "You are a capable assistant that works on the user's task until it is done. Today is {date}."
    );
    if !tools.is_empty() {
        prompt.push_str(
            "\n\nYou have tools. Paths are relative to this conversation's own directory. Call several tools at once \
             when their results do not depend on each other.",
        );
    }
    if tools.iter().any(|tool| tool.name == ASK_CLARIFICATION) {
        prompt.push_str(
            " When the request cannot be carried out without an answer from the user, call ask_clarification instead of \
             guessing.",
        );
    }
    prompt
}

/// What the model reads about the conversation before its first message. It is not part of the system prompt, because
/// it is derived from untrusted text.
pub(crate) fn summary(text: &str) -> Json {
    message::hidden("summary", format!("Summary of the conversation so far:\n{text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_told_as_a_message_that_the_user_did_not_write() {
        let told = summary("They talked.");
        assert_eq!((&told["type"], message::is_from_user(&told)), (&"human".into(), false));
        assert!(told["content"].as_str().is_some_and(|text| text.ends_with("so far:\nThey talked.")));
        assert!(!system("1970-01-01, Thursday", &[]).contains("Summary"));
    }
}

//! The title of a thread, after its first exchange.

use serde_json::{Value as Json, json};

use crate::config::Title;
use crate::model::message::text;
use crate::model::{ChunkAssembler, ModelRequest, RetryingModel};

/// Who asks the model for a title.
pub(crate) const CALLER: &str = "middleware:title";
/// The longest title that is cut from the user's text, whatever `title.max_chars` says.
const LOCAL_MAX_CHARS: usize = 50;
/// The title of a conversation whose first message has no text.
const EMPTY_TITLE: &str = "New Conversation";

/// Whether the conversation has had its first exchange and nothing more: one visible human message, and an answer.
pub(crate) fn is_due(messages: &[Json]) -> bool {
    is_first_turn(messages) && messages.iter().any(|m| m["type"] == "ai")
}

/// Whether the user has written once, answered or not.
pub(crate) fn is_first_turn(messages: &[Json]) -> bool {
    messages.iter().filter(|m| m["type"] == "human").count() == 1
}

/// The title made of the first human message, without a model.
pub(crate) fn local(config: &Title, messages: &[Json]) -> String {
    let first = messages.iter().find(|m| m["type"] == "human").map(text).unwrap_or_default();
    let first = first.split_whitespace().collect::<Vec<_>>().join(" ");
    let max = config.max_chars.min(LOCAL_MAX_CHARS);
    if first.is_empty() {
        EMPTY_TITLE.to_owned()
    } else if first.chars().count() > max {
        first.chars().take(max).chain("...".chars()).collect()
    } else {
        first
    }
}

/// The title that `model` gives, with its answer for the ledger; the local form if it gives none.
pub(crate) async fn by_model(
    config: &Title,
    model: &RetryingModel,
    messages: &[Json],
) -> (String, Option<Json>) {
    use futures::StreamExt as _;

    let excerpt: Vec<String> = messages
        .iter()
        .filter(|m| m["type"] == "human" || m["type"] == "ai")
        .take(4)
        .map(|m| {
            format!("{}: {}", m["type"].as_str().unwrap_or(""), text(m).chars().take(500).collect::<String>())
        })
        .collect();
    let request = ModelRequest {
        system: Some(format!(
            "Give this conversation a title of at most {} words. Answer with the title alone.",
            config.max_words
        )),
        messages: vec![json!({ "type": "human", "content": excerpt.join("\n"), "id": "title" })],
        caller: CALLER.to_owned(),
        ..ModelRequest::default()
    };
    let mut assembler = ChunkAssembler::new(model.name());
    let mut chunks = model.stream(request);
    while let Some(chunk) = chunks.next().await {
        assembler.push(&chunk);
    }
    let answer = assembler.finish();
    let usable = crate::model::message::fallback_reason(&answer).is_none();
    let title = text(&answer).trim().trim_matches('"').to_owned();
    let title: Vec<&str> = title.split_whitespace().take(config.max_words).collect();
    if !usable || title.is_empty() {
        return (local(config, messages), Some(answer));
    }
    (title.join(" ").chars().take(config.max_chars).collect(), Some(answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(first: &str) -> Vec<Json> {
        vec![json!({"type": "human", "content": first}), json!({"type": "ai", "content": "hi"})]
    }

    #[test]
    fn a_title_is_due_after_the_first_exchange_only() {
        assert!(!is_due(&messages("x")[..1]));
        assert!(is_due(&messages("x")));
        assert!(!is_due(&[messages("x"), messages("y")].concat()));
    }

    #[test]
    fn the_local_title_is_the_first_text_cut_to_fifty_characters() {
        let config = Title::default();
        assert_eq!(local(&config, &messages("Plan  a\ntrip")), "Plan a trip");
        assert_eq!(local(&config, &messages("")), "New Conversation");
        assert_eq!(local(&config, &messages(&"ä".repeat(51))), format!("{}...", "ä".repeat(50)));
        let short = Title { max_chars: 5, ..Title::default() };
        assert_eq!(local(&short, &messages("abcdefgh")), "abcde...");
    }
}

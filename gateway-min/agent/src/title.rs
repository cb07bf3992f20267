//! The title of a thread, after its first exchange.

use std::time::Duration;

use serde_json::Value as Json;
use threadkeep_config::Title;

use crate::summary::{ask, said};

use crate::model::RetryingModel;
use crate::model::message::{fallback_reason, invalid_tool_calls, is_from_user, kind, text, tool_calls};

/// The caller name for the title model.
pub const CALLER: &str = "middleware:title";
/// The maximum length of a title cut from the user's text, whatever `title.max_chars` is.
const LOCAL_MAX_CHARS: usize = 50;
/// How long a model may take: the answer that ends the first exchange is committed with the title, so it waits for it.
const PATIENCE: Duration = Duration::from_secs(30);
/// The title of a conversation whose first message has no text.
const EMPTY_TITLE: &str = "New Conversation";

/// Whether the conversation consists of exactly its first exchange: a question and an answer.
pub fn is_due(messages: &[Json]) -> bool {
    is_first_exchange(messages) && messages.iter().any(|message| kind(message) == "ai")
}

/// Whether, since the first answer, only the user has written. A turn that stopped before its answer does not end the
/// exchange: what the user writes next belongs to it.
pub fn is_first_exchange(messages: &[Json]) -> bool {
    let answer = |message: &Json| {
        kind(message) == "ai" && tool_calls(message).is_empty() && invalid_tool_calls(message).is_empty()
    };
    let end = messages.iter().position(answer).unwrap_or(messages.len());
    messages[..end].iter().any(is_from_user) && !messages[end..].iter().any(is_from_user)
}

/// The title derived from the first human message, without a model.
pub fn local(config: &Title, messages: &[Json]) -> String {
    let first = messages.iter().find(|message| is_from_user(message)).map(text).unwrap_or_default();
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

/// The title by `model`, with its answer for the ledger; the local title if the model returns none in time.
pub async fn by_model(config: &Title, model: &RetryingModel, messages: &[Json]) -> (String, Option<Json>) {
    let excerpt: Vec<String> = messages
        .iter()
        .filter(|m| m["type"] == "human" || m["type"] == "ai")
        .take(4)
        .map(|m| {
            format!("{}: {}", m["type"].as_str().unwrap_or(""), said(m).chars().take(500).collect::<String>())
        })
        .collect();
    let prompt = format!(
        "Give this conversation a title of at most {} words. Answer with the title alone.",
        config.max_words
    );
    let asked = ask(model, CALLER, &prompt, excerpt.join("\n"));
    let Ok(answer) = tokio::time::timeout(PATIENCE, asked).await else {
        tracing::warn!(
            model = model.name(),
            "the model wrote no title in time; it is cut from the first message"
        );
        return (local(config, messages), None);
    };
    let usable = fallback_reason(&answer).is_none();
    let title = written(&said(&answer));
    let title: Vec<&str> = title.split_whitespace().take(config.max_words).collect();
    if !usable || title.is_empty() {
        return (local(config, messages), Some(answer));
    }
    (title.join(" ").chars().take(config.max_chars).collect(), Some(answer))
}

/// The title in a model's answer: its first line that does not introduce another one, without decoration.
fn written(answer: &str) -> String {
    let mut lines = answer.lines().filter(|line| !line.trim_start().starts_with("```")).map(bare);
    let title = lines.find(|line| !line.is_empty() && !line.ends_with([':', '\u{ff1a}'])).unwrap_or_default();
    title.chars().filter(|char| char.is_whitespace() || !char.is_control()).collect()
}

/// A line without the marks of a heading or of emphasis, the label `Title:` and quotes around all of it.
fn bare(line: &str) -> String {
    const LABEL: &str = "title:";
    let line = line.trim();
    let heading = line.trim_start_matches('#');
    let line = if heading.starts_with(char::is_whitespace) { heading.trim_start() } else { line };
    let plain = if line.starts_with("**") { line.replace("**", "") } else { line.to_owned() };
    let labelled = plain.get(..LABEL.len()).is_some_and(|label| label.eq_ignore_ascii_case(LABEL));
    let title = if labelled { plain[LABEL.len()..].trim() } else { plain.trim() };
    unquoted(title).unwrap_or(title).trim().to_owned()
}

/// What is between the quotes around all of `title`.
fn unquoted(title: &str) -> Option<&str> {
    const QUOTES: [(char, char); 8] = [
        ('"', '"'),
        ('\'', '\''),
        ('`', '`'),
        ('\u{201c}', '\u{201d}'),
        ('\u{201e}', '\u{201c}'),
        ('\u{ab}', '\u{bb}'),
        ('\u{300c}', '\u{300d}'),
        ('\u{300a}', '\u{300b}'),
    ];
    QUOTES.into_iter().find_map(|(open, close)| {
        let inner = title.strip_prefix(open)?.strip_suffix(close)?;
        (!inner.contains([open, close])).then_some(inner)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::model::scripted::ScriptedModel;

    fn messages(first: &str) -> Vec<Json> {
        vec![json!({"type": "human", "content": first}), json!({"type": "ai", "content": "hi"})]
    }

    #[test]
    fn a_title_is_due_after_the_first_exchange_only() {
        assert!(!is_due(&messages("x")[..1]));
        assert!(is_due(&messages("x")));
        assert!(!is_due(&[messages("x"), messages("y")].concat()));
        assert!(!is_due(&messages("x")[1..]), "nobody asked");
    }

    #[test]
    fn a_turn_that_stopped_before_its_answer_goes_on_with_the_next_message() {
        let call =
            json!({"type": "ai", "content": "", "tool_calls": [{"name": "ls", "id": "c", "args": {}}]});
        let unreadable =
            json!({"type": "ai", "content": "", "invalid_tool_calls": [{"name": "ls", "id": "c"}]});
        for stopped in [call, unreadable] {
            let asked = [messages("x")[..1].to_vec(), vec![stopped], messages("y")].concat();
            assert!(is_due(&asked));
            assert!(!is_due(&[asked, messages("z")[..1].to_vec()].concat()));
        }
        let hidden = crate::model::message::hidden("n", "go on");
        assert!(is_due(&[messages("x"), vec![hidden]].concat()), "the gateway's own messages do not count");
    }

    #[tokio::test(start_paused = true)]
    async fn a_title_model_that_hangs_does_not_keep_the_answer_from_being_committed() {
        let script = json!({"rules": [{"answers": [{"text": "Late", "delay_ms": 3_600_000}]}]}).to_string();
        let model = RetryingModel::new(Arc::new(ScriptedModel::from_json("m", &script).unwrap()));
        let (title, answer) = by_model(&Title::default(), &model, &messages("Plan a trip")).await;
        assert_eq!((title.as_str(), answer), ("Plan a trip", None));
    }

    #[tokio::test]
    async fn a_title_is_what_the_model_calls_the_conversation_and_nothing_around_it() {
        for (answer, expected) in [
            ("\"Trip to Rome\"", "Trip to Rome"),
            ("<think>\nA trip.\n</think>\n\nTrip to Rome", "Trip to Rome"),
            ("A trip.\n</think>\n\nTrip to Rome", "Trip to Rome"),
            ("**Title:** Trip to Rome", "Trip to Rome"),
            ("title: \u{201c}Trip to Rome\u{201d}", "Trip to Rome"),
            ("# Trip to Rome\n\nIt says what is planned.", "Trip to Rome"),
            ("Here is a title:\n\n**Trip to Rome**", "Trip to Rome"),
            ("```\nTrip to Rome\n```", "Trip to Rome"),
            ("\u{300c}\u{7f57}\u{9a6c}\u{4e4b}\u{65c5}\u{300d}", "\u{7f57}\u{9a6c}\u{4e4b}\u{65c5}"),
            ("Trip\u{0}\u{1b}[31m to Rome", "Trip[31m to Rome"),
            ("Learn C#", "Learn C#"),
            ("Trip\tto Rome", "Trip to Rome"),
            ("\"Rome\" or \"Paris\"", "\"Rome\" or \"Paris\""),
            // Without a title.
            ("<think>A trip, so the user", "Plan a trip"),
            ("Title:", "Plan a trip"),
            ("\"\"", "Plan a trip"),
        ] {
            let script = json!({"rules": [{"answers": [{"text": answer}]}]}).to_string();
            let model = RetryingModel::new(Arc::new(ScriptedModel::from_json("m", &script).unwrap()));
            let (title, _) = by_model(&Title::default(), &model, &messages("Plan a trip")).await;
            assert_eq!(title, expected, "{answer}");
        }
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

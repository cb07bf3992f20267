//! Summarizes conversations: which messages stay, and a summary of the rest.

use futures::StreamExt as _;
use serde_json::{Value as Json, json};
use threadkeep_config::{ContextSize, Summarization};

use crate::model::message::{fallback_reason, kind, text, turn_start};
use crate::model::{ChunkAssembler, ModelRequest, RetryingModel, without_thinking};

/// The caller name for the summarizing model.
pub const CALLER: &str = "middleware:summarization";
/// The channel of the summary.
pub const CHANNEL: &str = "summary_text";
/// The default prompt of the summarizing model.
const PROMPT: &str = "Summarize this conversation for the assistant that will go on with it: what the user wants, what was \
                      decided and found out, what is still to do. Answer with the summary alone.";
/// Approximate bytes of a message's JSON per token.
const BYTES_PER_TOKEN: u64 = 4;

/// The approximate number of tokens of a message.
pub fn tokens(message: &Json) -> u64 {
    let bytes = message["content"].to_string().len() + message["tool_calls"].to_string().len();
    u64::try_from(bytes).unwrap_or(u64::MAX).div_ceil(BYTES_PER_TOKEN)
}

/// Summarizes conversations, as the section `summarization` says.
pub struct Summarizer {
    /// The model that writes the summary.
    pub model: RetryingModel,
    /// The section `summarization`.
    pub settings: Summarization,
    /// The context window of the model that continues the conversation, in tokens.
    pub window: Option<u64>,
}

/// How a conversation is cut.
#[derive(Debug, PartialEq)]
pub struct Cut {
    /// The messages before this index are summarized.
    pub at: usize,
    /// What stays: the user's message of the current turn, and everything from that index on.
    pub preserved: Vec<Json>,
}

impl Summarizer {
    /// Whether the conversation has reached the configured length.
    pub fn is_due(&self, messages: &[Json]) -> bool {
        let count: u64 = messages.iter().map(tokens).sum();
        #[allow(clippy::cast_precision_loss, reason = "an estimate")]
        let reached = |size: &ContextSize| match *size {
            ContextSize::Messages(most) => messages.len() as u64 >= most,
            ContextSize::Tokens(most) => count >= most,
            ContextSize::Fraction(share) => {
                self.window.is_some_and(|window| count as f64 >= window as f64 * share)
            }
        };
        self.settings.trigger.iter().any(reached)
    }

    /// The cut that leaves about `keep`, or the configured amount, of the conversation; `None` if it would remove
    /// nothing.
    pub fn cut(&self, messages: &[Json], keep: Option<ContextSize>) -> Option<Cut> {
        let last = beside_calls(messages, messages.len().checked_sub(1)?);
        let at = start_of_tail(messages, keep.unwrap_or(self.settings.keep), self.window).min(last);
        let question = turn_start(messages).filter(|question| *question < at);
        let preserved: Vec<Json> =
            question.into_iter().chain(at..messages.len()).map(|kept| messages[kept].clone()).collect();
        (preserved.len() < messages.len()).then_some(Cut { at, preserved })
    }

    /// The summary of `messages` (only the last ones, if they are too many for the model) and of the earlier summary;
    /// `None` if the model returns none. Also the model's answer, for the ledger.
    pub async fn summarize(&self, earlier: Option<&str>, messages: &[Json]) -> (Option<String>, Json) {
        let earlier = earlier.map(|summary| format!("summary of the earlier conversation: {summary}"));
        let lines = transcript(messages, self.settings.trim_tokens_to_summarize);
        let content = earlier.into_iter().chain(lines).collect::<Vec<_>>().join("\n");
        let prompt = self.settings.summary_prompt.as_deref().unwrap_or(PROMPT);
        let answer = ask(&self.model, CALLER, prompt, content).await;
        let summary = said(&answer).trim().to_owned();
        ((fallback_reason(&answer).is_none() && !summary.is_empty()).then_some(summary), answer)
    }
}

/// The last messages as a transcript for another model, about `most` tokens of what it shows: no calls, so a result
/// may be without its call. If the last one alone has more, its beginning: a model that is shown nothing would judge
/// nothing.
pub(crate) fn transcript(messages: &[Json], most: u64) -> Vec<String> {
    let mut left = usize::try_from(most.saturating_mul(BYTES_PER_TOKEN)).unwrap_or(usize::MAX);
    let mut lines = Vec::new();
    for message in messages.iter().rev() {
        let mut line = line(message);
        if line.len() > left {
            if lines.is_empty() {
                line.truncate(line.floor_char_boundary(left));
                lines.push(line);
            }
            break;
        }
        left -= line.len();
        lines.push(line);
    }
    lines.reverse();
    lines
}

/// A message as a line of a transcript for another model.
pub(crate) fn line(message: &Json) -> String {
    format!("{}: {}", kind(message), said(message))
}

/// The text of a message; of a model's, without the reasoning in it.
pub(crate) fn said(message: &Json) -> String {
    let text = text(message);
    if kind(message) == "ai" { without_thinking(&text).trim_start().to_owned() } else { text }
}

/// Asks a model a question outside the conversation, and waits for the whole answer.
pub(crate) async fn ask(model: &RetryingModel, caller: &str, system: &str, content: String) -> Json {
    let request = ModelRequest {
        system: Some(system.to_owned()),
        messages: vec![json!({ "type": "human", "content": content, "id": caller })],
        caller: caller.to_owned(),
        ..ModelRequest::default()
    };
    let mut assembler = ChunkAssembler::new(caller, model.name());
    let mut chunks = model.stream(request);
    while let Some(chunk) = chunks.next().await {
        assembler.push(&chunk);
    }
    assembler.finish()
}

/// The start of the last messages that make up about `keep` of the conversation. A tool result stays with its call.
/// `window` is the model's context in tokens; without one, a fraction refers to the conversation.
fn start_of_tail(messages: &[Json], keep: ContextSize, window: Option<u64>) -> usize {
    let budget = match keep {
        ContextSize::Messages(count) => {
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            return beside_calls(messages, messages.len().saturating_sub(count));
        }
        ContextSize::Tokens(tokens) => tokens,
        ContextSize::Fraction(share) => {
            let whole = window.unwrap_or_else(|| messages.iter().map(tokens).sum());
            #[allow(
                clippy::cast_precision_loss,
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "an estimate, not negative"
            )]
            let budget = (whole as f64 * share) as u64;
            budget
        }
    };
    let mut kept = 0_u64;
    let fits = |message: &&Json| {
        kept = kept.saturating_add(tokens(message));
        kept <= budget
    };
    let stays = messages.iter().rev().take_while(fits).count();
    beside_calls(messages, messages.len() - stays)
}

/// The last index up to `cut` at which no tool result is separated from its call.
fn beside_calls(messages: &[Json], cut: usize) -> usize {
    let (before, after) = messages.split_at(cut);
    // A message that was added while a call was waiting may be between it and its result.
    let next = after.iter().map(kind).find(|kind| matches!(*kind, "ai" | "tool"));
    if next != Some("tool") {
        return cut;
    }
    before.iter().rposition(|message| kind(message) == "ai").unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::scripted::ScriptedModel;

    fn message(kind: &str) -> Json {
        json!({"type": kind, "content": "12345678901234"})
    }

    fn summarizer(keep: ContextSize, trigger: &[ContextSize], window: Option<u64>) -> Summarizer {
        let script = json!({"rules": [{"answers": [{"text": " They talked. "}]}]}).to_string();
        let model = ScriptedModel::from_json("m", &script).unwrap();
        let settings = Summarization { keep, trigger: trigger.to_vec(), ..Summarization::default() };
        Summarizer { model: RetryingModel::new(std::sync::Arc::new(model)), settings, window }
    }

    #[test]
    fn what_stays_is_counted_from_the_end_and_results_stay_with_their_calls() {
        let kinds = ["human", "ai", "tool", "tool", "ai", "human", "ai"];
        let messages = kinds.map(message);
        assert_eq!(tokens(&messages[0]), 5);
        for (keep, cut_at) in [
            (ContextSize::Messages(2), 5),
            (ContextSize::Messages(4), 1),
            (ContextSize::Messages(5), 1),
            (ContextSize::Messages(7), 0),
            (ContextSize::Messages(100), 0),
            (ContextSize::Tokens(10), 5),
            (ContextSize::Tokens(14), 5),
            (ContextSize::Tokens(1), 7),
            (ContextSize::Tokens(1000), 0),
            (ContextSize::Fraction(0.3), 5),
            (ContextSize::Fraction(1.0), 0),
        ] {
            assert_eq!(start_of_tail(&messages, keep, None), cut_at, "{keep:?}");
        }
        assert_eq!(
            start_of_tail(&messages, ContextSize::Fraction(0.5), Some(20)),
            5,
            "a share of the window"
        );
    }

    #[test]
    fn a_result_stays_with_its_call_also_if_a_message_was_added_between_them() {
        let messages = ["human", "ai", "tool", "human", "tool", "human", "ai"].map(message);
        for (kept, cut_at) in [(2, 5), (3, 1), (4, 1), (5, 1), (6, 1)] {
            assert_eq!(start_of_tail(&messages, ContextSize::Messages(kept), None), cut_at, "{kept}");
        }
    }

    /// A client may add as many in one request. Looked through from each of them on, that is 45,000,000,000 messages.
    #[test]
    fn messages_between_a_call_and_its_result_are_gone_through_once() {
        let mut messages = vec![message("human"); 300_000];
        messages[1] = message("ai");
        messages.push(message("tool"));
        assert_eq!(start_of_tail(&messages, ContextSize::Messages(1), None), 1);
        messages[1] = message("human");
        assert_eq!(start_of_tail(&messages, ContextSize::Messages(1), None), 0, "of a call that is gone");
    }

    #[test]
    fn the_question_of_the_turn_and_the_last_message_always_stay() {
        let numbered = |kinds: &[&str]| -> Vec<Json> {
            (0..).zip(kinds).map(|(n, kind)| json!({"type": kind, "content": "x", "id": n})).collect()
        };
        let messages = numbered(&["human", "ai", "human", "ai", "tool", "tool", "ai", "tool"]);
        let kept = |keep: ContextSize| {
            let cut = summarizer(keep, &[], None).cut(&messages, None)?;
            Some((cut.at, cut.preserved.iter().map(|m| m["id"].as_u64().unwrap()).collect::<Vec<_>>()))
        };
        assert_eq!(kept(ContextSize::Messages(2)), Some((6, vec![2, 6, 7])));
        assert_eq!(kept(ContextSize::Tokens(0)), Some((6, vec![2, 6, 7])), "the last call with its result");
        assert_eq!(kept(ContextSize::Messages(5)), Some((3, vec![2, 3, 4, 5, 6, 7])));
        assert_eq!(kept(ContextSize::Messages(6)), Some((2, vec![2, 3, 4, 5, 6, 7])));
        assert_eq!(kept(ContextSize::Messages(8)), None);
        let asked = numbered(&["human", "ai"]);
        assert_eq!(
            summarizer(ContextSize::Messages(1), &[], None).cut(&asked, None),
            None,
            "nothing would be removed"
        );
        assert_eq!(summarizer(ContextSize::Messages(1), &[], None).cut(&[], None), None);
        let asked_for =
            summarizer(ContextSize::Messages(9), &[], None).cut(&messages, Some(ContextSize::Messages(2)));
        assert_eq!(asked_for.unwrap().at, 6, "what the caller wants to keep comes first");
    }

    #[test]
    fn a_transcript_has_the_last_messages_or_the_beginning_of_the_last_one() {
        let long = json!({"type": "tool", "content": format!("x{}", "\u{e9}".repeat(100))});
        let short = "human: 12345678901234";
        assert_eq!(transcript(&[], 10), Vec::<String>::new());
        assert_eq!(transcript(&[long.clone(), message("human")], 10), [short]);
        // 40 bytes, of which the last would be half a character.
        let beginning = format!("tool: x{}", "\u{e9}".repeat(16));
        assert_eq!(transcript(&[message("human"), long.clone()], 10), [beginning]);
        assert_eq!(transcript(&[message("human"), long], 1000).len(), 2);
    }

    #[test]
    fn a_transcript_is_as_long_as_what_it_shows() {
        let short = "tool: 12345678901234";
        let results = [message("ai"), json!({"type": "tool", "content": "x".repeat(1000)}), message("tool")];
        assert_eq!(transcript(&results, 10), [short], "the other result of the answer is too long");
        let calls = json!([{"name": "write_file", "args": {"content": "x".repeat(1000)}}]);
        let wrote = json!({"type": "ai", "content": "Yes", "tool_calls": calls});
        let shown = ["human: 12345678901234", "ai: Yes"];
        assert_eq!(transcript(&[message("human"), wrote], 10), shown, "a call is not shown");
    }

    #[tokio::test]
    async fn a_summary_is_of_something_also_if_the_last_message_is_too_long() {
        let script = json!({"rules": [{"answers": [{"text": "{{input}}"}]}]}).to_string();
        let model = RetryingModel::new(std::sync::Arc::new(ScriptedModel::from_json("m", &script).unwrap()));
        let settings = Summarization { trim_tokens_to_summarize: 10, ..Summarization::default() };
        let summarizer = Summarizer { model, settings, window: None };
        let messages = [message("human"), json!({"type": "tool", "content": "x".repeat(1000)})];
        let (summary, _) = summarizer.summarize(None, &messages).await;
        assert_eq!(summary, Some(format!("tool: {}", "x".repeat(34))));
    }

    #[tokio::test]
    async fn the_reasoning_of_a_model_is_in_no_summary_and_no_transcript() {
        let answered = json!({"type": "ai", "content": "<think>\nHm.\n</think>\n\nYes"});
        let asked = json!({"type": "human", "content": "<think>Why?</think>"});
        assert_eq!(transcript(&[asked, answered], 100), ["human: <think>Why?</think>", "ai: Yes"]);
        for (answer, expected) in [
            ("<think>Hm.</think>\n\nThey talked.", Some("They talked.")),
            ("Hm.\n</think>\n\nThey talked.", Some("They talked.")),
            ("<think>Hm, they", None),
        ] {
            let script = json!({"rules": [{"answers": [{"text": answer}]}]}).to_string();
            let model = ScriptedModel::from_json("m", &script).unwrap();
            let model = RetryingModel::new(std::sync::Arc::new(model));
            let summarizer = Summarizer { model, settings: Summarization::default(), window: None };
            let (summary, _) = summarizer.summarize(None, &[message("human")]).await;
            assert_eq!(summary.as_deref(), expected, "{answer}");
        }
    }

    #[test]
    fn a_conversation_is_long_at_the_first_amount_that_it_reaches() {
        let messages = vec![message("human"); 4];
        for (trigger, window, due) in [
            (vec![], None, false),
            (vec![ContextSize::Messages(4)], None, true),
            (vec![ContextSize::Messages(5)], None, false),
            (vec![ContextSize::Messages(5), ContextSize::Tokens(20)], None, true),
            (vec![ContextSize::Tokens(21)], None, false),
            (vec![ContextSize::Fraction(0.5)], Some(40), true),
            (vec![ContextSize::Fraction(0.6)], Some(40), false),
            (vec![ContextSize::Fraction(0.1)], None, false),
        ] {
            let summarizer = summarizer(ContextSize::Messages(2), &trigger, window);
            assert_eq!(summarizer.is_due(&messages), due, "{trigger:?} {window:?}");
        }
    }

    proptest! {
        /// Every remaining tool result has its call before it, whatever is kept.
        #[test]
        fn no_tool_result_loses_its_call(
            turns in prop::collection::vec(prop::collection::vec(0..4_usize, 0..4), 1..5),
            keep in prop_oneof![
                (1..30_u64).prop_map(ContextSize::Messages),
                (1..100_u64).prop_map(ContextSize::Tokens),
                (0.01..1.0_f64).prop_map(ContextSize::Fraction),
            ],
        ) {
            let mut messages = Vec::new();
            for (turn, steps) in turns.iter().enumerate() {
                messages.push(json!({"type": "human", "content": "ask", "id": format!("h{turn}")}));
                for (step, calls) in steps.iter().enumerate() {
                    let id = |call: usize| format!("{turn}-{step}-{call}");
                    let made: Vec<Json> = (0..*calls).map(|call| json!({"id": id(call), "name": "ls"})).collect();
                    messages.push(json!({"type": "ai", "content": "", "tool_calls": made}));
                    for call in 0..*calls {
                        messages.push(json!({"type": "tool", "content": "result", "tool_call_id": id(call)}));
                    }
                }
            }
            let cut = summarizer(keep, &[], None).cut(&messages, None);
            let preserved = cut.map_or(messages.clone(), |cut| cut.preserved);
            prop_assert!(!preserved.is_empty());
            let mut called = Vec::new();
            for message in &preserved {
                called.extend(crate::model::message::tool_calls(message).iter().map(|call| call["id"].clone()));
                if kind(message) == "tool" {
                    prop_assert!(called.contains(&message["tool_call_id"]), "{keep:?} {preserved:?}");
                }
            }
            let question = turn_start(&messages).map(|at| &messages[at]);
            prop_assert_eq!(turn_start(&preserved).map(|at| &preserved[at]), question);
            prop_assert_eq!(preserved.last(), messages.last());
        }
    }
}

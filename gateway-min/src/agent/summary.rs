//! Shortening a conversation: what stays, and a summary of the rest.

use futures::StreamExt as _;
use serde_json::{Value as Json, json};

use crate::config::ContextSize;
use crate::model::message::{fallback_reason, kind, text};
use crate::model::{ChunkAssembler, ModelRequest, RetryingModel};

/// Who asks the model for a summary.
const CALLER: &str = "middleware:summarization";
/// What the model is told unless the configuration says otherwise.
const PROMPT: &str = "Summarize this conversation for the assistant that will go on with it: what the user wants, what was \
                      decided and found out, what is still to do. Answer with the summary alone.";
/// About so many bytes of a message's JSON are a token.
const BYTES_PER_TOKEN: u64 = 4;

/// About how many tokens a model takes a message for.
pub(crate) fn tokens(message: &Json) -> u64 {
    let bytes = message["content"].to_string().len() + message["tool_calls"].to_string().len();
    u64::try_from(bytes).unwrap_or(u64::MAX).div_ceil(BYTES_PER_TOKEN)
}

/// How many messages at the beginning go, so that about `keep` of the conversation stays. A tool result stays with its
/// call. `window` is the model's context in tokens; without one, a share is one of the conversation.
pub(crate) fn cut(messages: &[Json], keep: ContextSize, window: Option<u64>) -> usize {
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

/// The place at or before `cut` at which no tool result loses its call.
fn beside_calls(messages: &[Json], mut cut: usize) -> usize {
    while cut > 0 && messages.get(cut).is_some_and(|message| kind(message) == "tool") {
        cut -= 1;
    }
    cut
}

/// The summary of `messages`, of which the last `max_tokens` are shown to the model, after the summary of what was
/// before them; `None` if the model gives none.
pub(crate) async fn summarize(
    model: &RetryingModel,
    prompt: Option<&str>,
    earlier: Option<&str>,
    messages: &[Json],
    max_tokens: u64,
) -> Option<String> {
    let shown = &messages[cut(messages, ContextSize::Tokens(max_tokens), None)..];
    let earlier = earlier.map(|summary| format!("summary of what was before: {summary}"));
    let lines = shown.iter().map(|message| format!("{}: {}", kind(message), text(message)));
    let content = earlier.into_iter().chain(lines).collect::<Vec<_>>().join("\n");
    let request = ModelRequest {
        system: Some(prompt.unwrap_or(PROMPT).to_owned()),
        messages: vec![json!({ "type": "human", "content": content, "id": "summary" })],
        caller: CALLER.to_owned(),
        ..ModelRequest::default()
    };
    let mut assembler = ChunkAssembler::new(model.name());
    let mut chunks = model.stream(request);
    while let Some(chunk) = chunks.next().await {
        assembler.push(&chunk);
    }
    let answer = assembler.finish();
    let summary = text(&answer).trim().to_owned();
    (fallback_reason(&answer).is_none() && !summary.is_empty()).then_some(summary)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: &str) -> Json {
        json!({"type": kind, "content": "12345678901234"})
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
            assert_eq!(cut(&messages, keep, None), cut_at, "{keep:?}");
        }
        assert_eq!(cut(&messages, ContextSize::Fraction(0.5), Some(20)), 5, "a share of the window");
    }
}

//! What a turn shows of its budget: the tokens that it has used, and by which answer its batches have their limit. A summary
//! keeps both in the turn's question.

use serde_json::{Value as Json, json};
use threadkeep_agent::Tokens;
use threadkeep_agent::model::message;
use threadkeep_agent::summary::Cut;

/// The key of a question's metadata with what the messages of its turn used that a summary has replaced.
pub(crate) const SUMMARIZED: &str = "summarized_token_usage";
/// The key of a question's metadata with the id of the first answer to it, which a summary has replaced; and of the
/// result of a call whose answer came before the question, with the id of that answer. It begins as the other keys do
/// that only the runtime may write.
pub(crate) const FIRST_ANSWER: &str = "subagent_first_answer";

/// The tokens of a turn: of its answers, of the subagents whose results are in it, and of the messages of it that a summary
/// has replaced.
pub(crate) fn used_in(turn: &[Json]) -> Tokens {
    turn.iter().fold(Tokens::default(), |mut sum, message| {
        sum += match message::kind(message) {
            "tool" => {
                Tokens::of(&json!({"usage_metadata": message["additional_kwargs"]["subagent_token_usage"]}))
            }
            "ai" => Tokens::of(message),
            "human" => Tokens::of(&json!({"usage_metadata": message["additional_kwargs"][SUMMARIZED]})),
            _ => Tokens::default(),
        };
        sum
    })
}

/// The id of a turn's first answer, also if a summary has replaced it, or of the one before it by which its batches
/// have their limit.
pub(crate) fn first_answer(turn: &[Json]) -> Option<&str> {
    turn.iter().find_map(|message| match message::kind(message) {
        "human" | "tool" => message["additional_kwargs"][FIRST_ANSWER].as_str(),
        "ai" => message["id"].as_str(),
        _ => None,
    })
}

/// Keeps in a turn's question what these messages of the turn used, which a summary replaces: a run that goes on with the
/// turn would have that much more to spend. The same with the first answer, by which the turn's batches know their limit.
pub(super) fn keep(question: &mut Json, removed: &[Json]) {
    let mut used = used_in(std::slice::from_ref(question));
    used += used_in(removed);
    let first = first_answer(std::slice::from_ref(question)).or_else(|| first_answer(removed));
    let first = first.map(str::to_owned);
    if used == Tokens::default() && first.is_none() {
        return;
    }
    if let Json::Object(message) = question {
        let kwargs = message.entry("additional_kwargs").or_insert_with(|| json!({}));
        if !kwargs.is_object() {
            *kwargs = json!({});
        }
        if used != Tokens::default() {
            kwargs[SUMMARIZED] =
                json!({"input_tokens": used.input, "output_tokens": used.output, "total_tokens": used.total});
        }
        if let Some(first) = first {
            kwargs[FIRST_ANSWER] = json!(first);
        }
    }
}

/// The same for a summary of these messages that no run asks for.
pub fn keep_summarized(messages: &[Json], cut: &mut Cut) {
    if let Some(question) = message::turn_start(messages).filter(|question| *question < cut.at)
        && let Some(kept) = cut.preserved.first_mut()
    {
        keep(kept, &messages[question + 1..cut.at]);
    }
}

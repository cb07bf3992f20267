//! What a provider wants back with the answers of its model.

use serde_json::Value;

use super::super::message::{CALLS_EXTRA, REASONING, TAKES_REASONING};

/// The field of a tool call whose content goes back unchanged, such as the signature of a thought.
pub(super) const EXTRA_CONTENT: &str = "extra_content";

/// Adds to an assistant message what its provider wants back. That is for the model that wrote the message: providers
/// refuse the fields of others.
pub(super) fn give_back(kwargs: &Value, sent: &mut Value) {
    if kwargs[TAKES_REASONING] == true && kwargs[REASONING].is_string() {
        sent[REASONING] = kwargs[REASONING].clone();
    }
    let calls = sent.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        let extra = kwargs[CALLS_EXTRA].get(call["id"].as_str().unwrap_or_default()).cloned();
        if let Some(extra) = extra {
            call[EXTRA_CONTENT] = extra;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::answer::AnswerParser;
    use super::super::request::body;
    use super::*;
    use crate::model::{ChunkAssembler, ModelKind, ModelRequest, ModelSettings};

    /// The message that an answer in these deltas becomes, of the model that is configured as `ours`.
    fn answer(deltas: &[Value]) -> Value {
        let mut parser = AnswerParser::default();
        let mut assembler = ChunkAssembler::new("id", "ours");
        for delta in deltas {
            let event = json!({"choices": [{"delta": delta}]}).to_string();
            if let Some(chunk) = parser.read(&event).unwrap() {
                assembler.push(&chunk);
            }
        }
        assembler.push(&parser.read("[DONE]").unwrap().unwrap());
        assembler.finish()
    }

    /// This message, as it is sent to the model that is configured as `name`.
    fn sent(message: &Value, name: &str) -> Value {
        let settings = ModelSettings::new(name, ModelKind::OpenAiCompatible, "x");
        let request = ModelRequest { messages: vec![message.clone()], ..ModelRequest::default() };
        body(&settings, &request).unwrap()["messages"][0].clone()
    }

    #[test]
    fn reasoning_goes_back_to_the_model_that_gave_it_under_this_name() {
        let call = json!({"index": 0, "id": "a", "function": {"name": "ls", "arguments": "{}"}});
        let calls = json!({ "tool_calls": [call] });
        for (name, field, expected) in [
            ("ours", "reasoning_content", json!("hmso")),
            ("theirs", "reasoning_content", Value::Null),
            // The servers with this name for it take no other one.
            ("ours", "reasoning", Value::Null),
        ] {
            let message = answer(&[json!({ field: "hm" }), json!({ field: "so" }), calls.clone()]);
            let sent = sent(&message, name);
            assert_eq!(sent["reasoning_content"], expected, "{name} {field}");
            assert_eq!(sent["tool_calls"][0]["id"], "a");
        }
    }

    #[test]
    fn the_extra_content_of_a_call_goes_back_with_it() {
        let extra = json!({"google": {"thought_signature": "c2lnbmVk"}});
        let message = answer(&[json!({"tool_calls": [
            {"index": 0, "id": "a", "function": {"name": "ls", "arguments": "{}"}, "extra_content": extra},
            {"index": 1, "id": "b", "function": {"name": "ls", "arguments": "{}"}},
        ]})]);
        let calls = sent(&message, "ours")["tool_calls"].clone();
        assert_eq!((&calls[0]["extra_content"], &calls[1]["extra_content"]), (&extra, &Value::Null));
        assert_eq!(sent(&message, "theirs")["tool_calls"][0]["extra_content"], Value::Null);
    }
}

//! What a provider wants back with the answers of its model.

use serde_json::Value;

use super::super::message::{CALLS_EXTRA, REASONING, TAKES_REASONING};
use crate::receipts::sha256;

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

/// The id of a call, as it is sent. A model gets those that it gave unchanged. Those of another one may have a form
/// that its provider refuses, in every later request of the conversation: OpenAI takes 40 characters, and Anthropic no
/// colon.
pub(super) fn call_id(id: &Value, is_own: bool) -> Value {
    /// The longest id that servers take.
    const MAX_CHARS: usize = 40;
    let is_taken = |id: &str| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        id.len() <= MAX_CHARS && id.bytes().all(is_plain)
    };
    match id.as_str() {
        Some(text) if !is_own && !is_taken(text) => format!("call_{}", &sha256(text)[..32]).into(),
        _ => id.clone(),
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
    fn an_id_that_another_model_gave_is_sent_in_a_form_that_every_provider_takes() {
        let (long, odd) = (format!("chatcmpl-tool-{}", "0".repeat(32)), "functions.ls:0");
        let call = |id: &str| json!({"name": "ls", "args": {}, "id": id});
        let sent = |model: &str| {
            let messages = vec![
                json!({
                    "type": "ai", "content": "", "response_metadata": {"model_name": "ours"},
                    "tool_calls": [call(&long), call(odd), call("call_1")],
                }),
                json!({"type": "tool", "content": "x", "tool_call_id": long}),
            ];
            let settings = ModelSettings::new(model, ModelKind::OpenAiCompatible, "x");
            let request = ModelRequest { messages, ..ModelRequest::default() };
            let sent = body(&settings, &request).unwrap()["messages"].clone();
            let ids = [0usize, 1, 2].map(|at| sent[0]["tool_calls"][at]["id"].as_str().unwrap().to_owned());
            assert_eq!(sent[1]["tool_call_id"], ids[0]);
            ids
        };
        assert_eq!(sent("ours"), [long.as_str(), odd, "call_1"]);
        let [first, second, third] = sent("theirs");
        assert_ne!(first, second);
        for id in [first, second] {
            assert!(id.len() == 37 && !id.contains([':', '.']), "{id}");
        }
        assert_eq!(third, "call_1");
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

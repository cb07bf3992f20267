//! What the models of Mistral demand of a conversation.

use serde_json::{Value, json};

use crate::receipts::sha256;

/// The answer that is sent between the result of a call and the next message of the user; it must not be empty.
const ACKNOWLEDGED: &str = "Understood.";

/// The length of the ids of calls.
const ID_CHARS: usize = 9;

/// The messages, as `model` takes them. Those of Mistral refuse a message of the user right after the result of a call,
/// which other models take: a user stopped a run, or the gateway gives a warning. They also refuse the ids of the calls
/// that other models have made in the thread.
pub(super) fn adapted(messages: Vec<Value>, model: &str) -> Vec<Value> {
    if !is_of_mistral(model) {
        return messages;
    }
    let mut adapted: Vec<Value> = Vec::with_capacity(messages.len());
    for mut message in messages {
        let ids = message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten();
        ids.filter_map(|call| call.get_mut("id")).for_each(shorten);
        message.get_mut("tool_call_id").into_iter().for_each(shorten);
        let follows_result = adapted.last().is_some_and(|last| last["role"] == "tool");
        if follows_result && message["role"] == "user" {
            adapted.push(json!({"role": "assistant", "content": ACKNOWLEDGED}));
        }
        adapted.push(message);
    }
    adapted
}

/// Replaces an id of another form than theirs; the id of a call and that of its result by the same one.
fn shorten(id: &mut Value) {
    let is_short = |id: &str| id.len() == ID_CHARS && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let short = id.as_str().filter(|id| !is_short(id)).map(|id| sha256(id)[..ID_CHARS].to_owned());
    if let Some(short) = short {
        *id = short.into();
    }
}

/// Their names are Mistral, Ministral, Magistral, Devstral, Codestral, Mixtral, Pixtral and so on.
fn is_of_mistral(model: &str) -> bool {
    let name = model.to_lowercase();
    name.contains("stral") || name.contains("xtral")
}

#[cfg(test)]
mod tests {
    use super::super::request::body;
    use super::*;
    use crate::model::{ModelKind, ModelRequest, ModelSettings, message};

    #[test]
    fn a_model_of_mistral_gets_no_message_of_the_user_right_after_a_result() {
        let call = json!({"name": "ls", "args": {}, "id": "a"});
        let messages = vec![
            message::human("list"),
            json!({"type": "ai", "content": "", "tool_calls": [call]}),
            json!({"type": "tool", "content": "x", "tool_call_id": "a"}),
            message::human("no, stop"),
            message::human("go on"),
        ];
        let roles = |model: &str| -> Vec<String> {
            let settings = ModelSettings::new("m", ModelKind::OpenAiCompatible, model);
            let request = ModelRequest { messages: messages.clone(), ..ModelRequest::default() };
            let body = body(&settings, &request).unwrap();
            let sent = body["messages"].as_array().unwrap();
            sent.iter().map(|message| message["role"].as_str().unwrap().to_owned()).collect()
        };
        for model in ["mistral-large-latest", "mistralai/Devstral-Small-2", "codestral", "Mixtral-8x7B"] {
            assert_eq!(roles(model), ["user", "assistant", "tool", "assistant", "user", "user"], "{model}");
        }
        assert_eq!(roles("gpt-x"), ["user", "assistant", "tool", "user", "user"]);
    }

    #[test]
    fn a_model_of_mistral_gets_ids_of_its_form_for_the_calls_of_other_models() {
        let call = |id: &str| json!({"name": "ls", "args": {}, "id": id});
        let result = |id: &str| json!({"type": "tool", "content": "x", "tool_call_id": id});
        let (own, other) = ("aB3dE6gH9", "call_0123456789abcdef");
        let messages = vec![
            json!({"type": "ai", "content": "", "tool_calls": [call(own), call(other)]}),
            result(own),
            result(other),
        ];
        let ids = |model: &str| {
            let settings = ModelSettings::new("m", ModelKind::OpenAiCompatible, model);
            let request = ModelRequest { messages: messages.clone(), ..ModelRequest::default() };
            let sent = body(&settings, &request).unwrap()["messages"].clone();
            let calls = [&sent[0]["tool_calls"][0]["id"], &sent[0]["tool_calls"][1]["id"]];
            assert_eq!(calls, [&sent[1]["tool_call_id"], &sent[2]["tool_call_id"]]);
            calls.map(|id| id.as_str().unwrap().to_owned())
        };
        let [first, second] = ids("mistral-small");
        assert_eq!(first, own);
        assert!(second.len() == 9 && second.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{second}");
        assert_eq!(ids("gpt-x"), [own, other]);
    }
}

//! Converts a request to the body of a chat-completions request.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::super::message::{block_text, invalid_tool_calls, kind, text, tool_calls};
use super::super::{ModelErrorKind, ModelRequest, ModelSettings, ToolSpec};
use super::failure::Failure;
use super::mistral::adapted;
use super::parameters::parameters;
use super::returned::{call_id, give_back};
use super::schema::accepted;
use crate::tools::dangling;

/// The body that asks the model of `settings` to stream an answer to `request`.
pub(super) fn body(settings: &ModelSettings, request: &ModelRequest) -> Result<Value, Failure> {
    let mut body = parameters(settings, request.thinking);
    body.entry("stream_options").or_insert_with(|| json!({"include_usage": true}));
    body.insert("stream".to_owned(), true.into());
    body.insert("model".to_owned(), settings.model.clone().into());
    if let Some(effort) = &request.reasoning_effort {
        body.insert("reasoning_effort".to_owned(), effort.clone().into());
    }
    if !request.tools.is_empty() {
        body.insert("tools".to_owned(), request.tools.iter().map(tool).collect());
    }
    let messages = adapted(messages(request, &settings.name)?, &settings.model);
    body.insert("messages".to_owned(), messages.into());
    body.retain(|_, value| !value.is_null());
    Ok(Value::Object(body))
}

fn tool(spec: &ToolSpec) -> Value {
    json!({
        "type": "function",
        "function": {
            "name": spec.name, "description": spec.description, "parameters": accepted(&spec.parameters),
        },
    })
}

/// The conversation, as the model that is configured as `model` takes it. System messages within it follow the prompt:
/// many servers refuse one at another place than the first.
fn messages(request: &ModelRequest, model: &str) -> Result<Vec<Value>, Failure> {
    let mut instructions: Vec<String> = request.system.iter().cloned().collect();
    let mut messages = Vec::new();
    let mut is_own = false;
    let conversation = request.conversation().map_err(|error| {
        Failure::new(ModelErrorKind::Rejected, format!("the conversation is damaged: {error}"))
    })?;
    for message in dangling::answering(&conversation) {
        match kind(message) {
            "system" => instructions.push(text(message)),
            "human" => messages.push(json!({"role": "user", "content": user_content(&message["content"])})),
            "ai" => {
                is_own = message["response_metadata"]["model_name"] == model;
                messages.extend(assistant(message, is_own));
            }
            "tool" => messages.push(json!({
                "role": "tool", "tool_call_id": call_id(&message["tool_call_id"], is_own),
                "content": tool_content(message),
            })),
            other => {
                let detail = format!("message {} has the unknown type `{other}`", message["id"]);
                return Err(Failure::new(ModelErrorKind::Rejected, detail));
            }
        }
    }
    instructions.retain(|text| !text.trim().is_empty());
    if !instructions.is_empty() {
        messages.insert(0, json!({"role": "system", "content": instructions.join("\n\n")}));
    }
    Ok(messages)
}

/// An assistant message; `None` for one without text and calls, which many servers refuse.
fn assistant(message: &Value, is_own: bool) -> Option<Value> {
    let said = text(message);
    let valid = tool_calls(message).iter().map(|call| function_call(call, &call["args"].to_string(), is_own));
    // Servers parse the arguments of earlier calls, so unreadable ones cannot be sent back unchanged. The call itself
    // must be sent, because its result refers to it and says what was wrong.
    let invalid = invalid_tool_calls(message).iter().map(|call| function_call(call, "{}", is_own));
    let calls: Vec<Value> = valid.chain(invalid).collect();
    let mut sent = match (said.trim().is_empty(), calls.is_empty()) {
        (true, true) => return None,
        (false, true) => json!({"role": "assistant", "content": said}),
        (true, false) => json!({"role": "assistant", "content": null, "tool_calls": calls}),
        (false, false) => json!({"role": "assistant", "content": said, "tool_calls": calls}),
    };
    if is_own {
        give_back(&message["additional_kwargs"], &mut sent);
    }
    Some(sent)
}

fn function_call(call: &Value, arguments: &str, is_own: bool) -> Value {
    let name = function_name(call["name"].as_str().unwrap_or_default());
    let id = call_id(&call["id"], is_own);
    json!({"type": "function", "id": id, "function": {"name": name, "arguments": arguments}})
}

/// A tool's name as servers take it. A model may have called a tool by a name that it made up, and servers refuse every
/// request of a conversation with a name of another form.
fn function_name(name: &str) -> String {
    /// The longest name that servers take.
    const MAX_CHARS: usize = 64;
    let is_taken = |char: char| char.is_ascii_alphanumeric() || matches!(char, '_' | '-');
    let taken = name.chars().take(MAX_CHARS).map(|char| if is_taken(char) { char } else { '_' });
    if name.is_empty() { "unknown".to_owned() } else { taken.collect() }
}

/// A tool's result as text, the only form in the protocol.
fn tool_content(message: &Value) -> String {
    match &message["content"] {
        Value::String(_) | Value::Array(_) => text(message),
        other => other.to_string(),
    }
}

/// A user's content: plain text unchanged, blocks in the protocol's form. Unsupported and blank ones are omitted. A
/// message with no other block becomes a text that names them: servers refuse a list without blocks, in every later
/// request of the conversation.
fn user_content(content: &Value) -> Value {
    match content {
        Value::Array(blocks) => {
            let sent: Vec<Value> = blocks.iter().filter_map(user_block).collect();
            if sent.is_empty() { omitted(blocks).into() } else { sent.into() }
        }
        Value::String(_) => content.clone(),
        _ => "".into(),
    }
}

/// The text in place of content of which nothing can be sent.
fn omitted(blocks: &[Value]) -> String {
    let types: BTreeSet<&str> = blocks.iter().filter_map(|block| block["type"].as_str()).collect();
    let types: Vec<&str> = types.into_iter().collect();
    format!(
        "(content that cannot be shown: {})",
        if types.is_empty() { "none".to_owned() } else { types.join(", ") }
    )
}

fn user_block(block: &Value) -> Option<Value> {
    if let Some(text) = block_text(block) {
        return (!text.trim().is_empty()).then(|| json!({"type": "text", "text": text}));
    }
    match block["type"].as_str()? {
        "image_url" | "input_audio" | "file" => Some(block.clone()),
        "image" => image_url(block).map(|url| json!({"type": "image_url", "image_url": {"url": url}})),
        _ => None,
    }
}

/// The URL of an image block, or its data as a data URL. The data is in `base64` or, in older messages, `data`.
fn image_url(block: &Value) -> Option<String> {
    if let Some(url) = block["url"].as_str() {
        return Some(url.to_owned());
    }
    let data = block["base64"].as_str().or_else(|| block["data"].as_str())?;
    let mime = block["mime_type"].as_str().unwrap_or("image/png");
    Some(format!("data:{mime};base64,{data}"))
}

#[cfg(test)]
// JSON literals are passed by value.
#[allow(clippy::needless_pass_by_value)]
mod tests {
    use serde_json::Map;

    use super::super::super::{ModelKind, message};
    use super::*;

    fn settings() -> ModelSettings {
        ModelSettings::new("gpt", ModelKind::OpenAiCompatible, "gpt-x")
    }

    fn map(value: Value) -> Map<String, Value> {
        serde_json::from_value(value).unwrap()
    }

    fn wire(messages: Value) -> Vec<Value> {
        let messages = serde_json::from_value(messages).unwrap();
        super::messages(&ModelRequest { messages, ..ModelRequest::default() }, "gpt").unwrap()
    }

    #[test]
    fn a_plain_request() {
        let request = ModelRequest {
            system: Some("Be brief.".into()),
            messages: vec![json!({"type": "human", "content": "Hi", "id": "1", "name": "ignored"})],
            ..ModelRequest::default()
        };
        assert_eq!(
            body(&settings(), &request).unwrap(),
            json!({
                "model": "gpt-x", "stream": true, "stream_options": {"include_usage": true},
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "Hi"},
                ],
            })
        );
    }

    #[test]
    fn tools_and_reasoning_effort_are_sent() {
        let tools = vec![ToolSpec {
            name: "ls".into(),
            description: "Lists".into(),
            parameters: json!({"type": "object"}),
        }];
        let request = ModelRequest { tools, reasoning_effort: Some("low".into()), ..ModelRequest::default() };
        let body = body(&settings(), &request).unwrap();
        assert_eq!(
            body["tools"],
            json!([{
                "type": "function",
                "function": {"name": "ls", "description": "Lists", "parameters": {"type": "object"}},
            }])
        );
        assert_eq!(body["reasoning_effort"], "low");
    }

    #[test]
    fn settings_become_parameters_but_not_those_of_the_client() {
        let mut settings = settings();
        settings.extra = map(json!({
            "max_tokens": 100, "temperature": 0.5, "request_timeout": 30, "timeout": 3, "max_retries": 2,
            "model": "other", "stream": false, "stream_options": null, "extra_body": {"top_k": 5},
            "default_headers": {"x-a": "b"}, "default_query": {"c": "d"},
        }));
        assert_eq!(
            body(&settings, &ModelRequest::default()).unwrap(),
            json!({
                "model": "gpt-x", "stream": true, "messages": [],
                "max_tokens": 100, "temperature": 0.5, "top_k": 5,
            })
        );
    }

    #[test]
    fn thinking_settings_are_merged_as_asked() {
        let mut settings = settings();
        settings.extra = map(json!({"extra_body": {"top_k": 5}, "temperature": 1}));
        settings.when_thinking_enabled =
            map(json!({"extra_body": {"thinking": {"type": "enabled"}}, "temperature": null}));
        settings.when_thinking_disabled = map(json!({"extra_body": {"thinking": {"type": "disabled"}}}));
        let parameters = |thinking| {
            let request = ModelRequest { thinking, ..ModelRequest::default() };
            let body = body(&settings, &request).unwrap();
            (body["thinking"]["type"].clone(), body["temperature"].clone(), body["top_k"].clone())
        };
        assert_eq!(parameters(Some(true)), (json!("enabled"), Value::Null, json!(5)));
        assert_eq!(parameters(Some(false)), (json!("disabled"), json!(1), json!(5)));
        assert_eq!(parameters(None), (Value::Null, json!(1), json!(5)));
    }

    #[test]
    fn a_tool_round_keeps_its_calls_and_results() {
        let wire = wire(json!([
            {"type": "ai", "content": "", "tool_calls": [{"name": "ls", "args": {"path": "."}, "id": "a"}]},
            {"type": "tool", "content": "x.txt", "tool_call_id": "a", "name": "ls", "status": "success"},
            {"type": "ai", "content": "Done", "tool_calls": []},
        ]));
        assert_eq!(
            json!(wire),
            json!([
                {"role": "assistant", "content": null, "tool_calls": [
                    {"type": "function", "id": "a",
                     "function": {"name": "ls", "arguments": "{\"path\":\".\"}"}},
                ]},
                {"role": "tool", "tool_call_id": "a", "content": "x.txt"},
                {"role": "assistant", "content": "Done"},
            ])
        );
    }

    #[test]
    fn unreadable_arguments_are_sent_back_as_an_empty_object() {
        let wire = wire(json!([
            {"type": "ai", "content": "x", "invalid_tool_calls": [{"name": null, "args": "{", "id": "a"}]},
        ]));
        assert_eq!(
            wire[0]["tool_calls"],
            json!([
                {"type": "function", "id": "a", "function": {"name": "unknown", "arguments": "{}"}},
            ])
        );
        assert_eq!(wire[0]["content"], "x");
    }

    #[test]
    fn a_tool_name_that_a_model_made_up_is_sent_back_in_the_form_that_servers_take() {
        let long = "x".repeat(100);
        let names = ["read_file", "functions.ls<|x|>\u{e9}", "", long.as_str()];
        let call = |name: &str| json!({"name": name, "args": {}, "id": "a"});
        let calls: Vec<Value> = names.into_iter().map(call).collect();
        let wire = wire(json!([{"type": "ai", "content": "", "tool_calls": calls}]));
        let sent: Vec<&str> =
            tool_calls(&wire[0]).iter().map(|call| call["function"]["name"].as_str().unwrap()).collect();
        assert_eq!(sent, ["read_file", "functions_ls__x___", "unknown", &long[..64]]);
    }

    #[test]
    fn blocks_are_translated_and_unknown_ones_left_out() {
        let wire = wire(json!([
            {"type": "human", "content": [
                "bare", {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
                {"type": "image", "url": "http://x/z.png"},
                {"type": "image", "source_type": "base64", "mime_type": "image/jpeg", "data": "QUJD"},
                {"type": "image", "base64": "QUJD"},
                {"type": "reasoning", "reasoning": "hm"},
            ]},
            {"type": "ai", "content": [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "t"}],
             "tool_calls": [{"name": "ls", "args": {}, "id": "c"}, {"name": "ls", "args": {}, "id": "d"}]},
            {"type": "tool", "content": [{"type": "text", "text": "r"}], "tool_call_id": "c"},
            {"type": "tool", "content": {"n": 1}, "tool_call_id": "d"},
        ]));
        let image = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
        assert_eq!(
            wire[0]["content"],
            json!([
                {"type": "text", "text": "bare"}, {"type": "text", "text": "see"},
                image("http://x/y.png"), image("http://x/z.png"),
                image("data:image/jpeg;base64,QUJD"), image("data:image/png;base64,QUJD"),
            ])
        );
        assert_eq!(wire[1]["content"], "a");
        assert_eq!(wire[2]["content"], "r");
        assert_eq!(wire[3]["content"], "{\"n\":1}");
    }

    #[test]
    fn a_message_of_unsupported_blocks_is_sent_as_a_text_that_names_them() {
        let blocks =
            json!([{"type": "video", "url": "http://x/y"}, {"type": "audio"}, {"type": "audio"}, {}]);
        let wire = wire(json!([{"type": "human", "content": blocks}, {"type": "human", "content": []}]));
        assert_eq!(wire[0]["content"], "(content that cannot be shown: audio, video)");
        assert_eq!(wire[1]["content"], "(content that cannot be shown: none)");
    }

    /// A client added the instructions; templates of models refuse them at another place than the first.
    #[test]
    fn all_system_messages_are_sent_as_one_before_the_conversation() {
        let system = |text: &str| json!({"type": "system", "content": text});
        let messages = vec![
            message::human("Hi"),
            system("Hurry."),
            json!({"type": "ai", "content": "Yes?"}),
            json!({"type": "system", "content": [{"type": "text", "text": "Shout."}]}),
        ];
        let expected = [(Some("Be brief."), "Be brief.\n\nHurry.\n\nShout."), (None, "Hurry.\n\nShout.")];
        for (prompt, instructions) in expected {
            let (system, messages) = (prompt.map(str::to_owned), messages.clone());
            let request = ModelRequest { system, messages, ..ModelRequest::default() };
            assert_eq!(
                json!(super::messages(&request, "gpt").unwrap()),
                json!([
                    {"role": "system", "content": instructions},
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Yes?"},
                ])
            );
        }
    }

    #[test]
    fn blank_texts_are_not_sent() {
        let image = json!({"type": "image_url", "image_url": {"url": "http://x/y.png"}});
        let wire = wire(json!([
            {"type": "human", "content": [{"type": "text", "text": ""}, image, " \n"]},
            {"type": "system", "content": " "},
            {"type": "ai", "content": "\n\n", "tool_calls": [{"name": "ls", "args": {}, "id": "a"}]},
            {"type": "ai", "content": "\n"},
        ]));
        assert_eq!(wire[0]["content"], json!([image]));
        assert_eq!((&wire[1]["content"], wire.len()), (&Value::Null, 2));
    }

    /// A client removed the message that made the call, or added the result.
    #[test]
    fn a_result_without_its_call_is_not_sent() {
        let call = json!({"name": "ls", "args": {}, "id": "a"});
        let result = |id: &str| json!({"type": "tool", "content": "r", "tool_call_id": id});
        let wire = wire(json!([
            result("a"),
            {"type": "ai", "content": "", "tool_calls": [call]}, result("a"), result("b"),
            {"type": "human", "content": "go on"}, {"type": "ai", "content": "Done"}, result("a"),
        ]));
        let sent: Vec<&Value> = wire.iter().map(|message| &message["role"]).collect();
        assert_eq!(json!(sent), json!(["assistant", "tool", "user", "assistant"]));
        assert_eq!(wire[1]["tool_call_id"], "a");
    }

    #[test]
    fn empty_assistant_messages_are_left_out_and_unknown_types_refused() {
        assert_eq!(wire(json!([{"type": "ai", "content": ""}])), Vec::<Value>::new());
        let messages = vec![json!({"type": "remove", "id": "m7"})];
        let request = ModelRequest { messages, ..ModelRequest::default() };
        let failure = super::messages(&request, "gpt").unwrap_err();
        let error = failure.into_error("gpt", "host", None);
        assert_eq!(error.kind, ModelErrorKind::Rejected);
        assert!(error.detail.contains("\"m7\"") && error.detail.contains("`remove`"), "{error}");
    }
}

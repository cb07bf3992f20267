//! Reads and builds serialised messages: JSON objects with `type`, `content`, `id` and, by type, tool calls or a tool
//! result.

use serde_json::{Value, json};

/// Key in `additional_kwargs` that marks an answer as a fallback for a failed model call.
pub const ERROR_FALLBACK: &str = "svc_error_fallback";
/// Key in `additional_kwargs` of a fallback: the kind of the failure.
pub const ERROR_TYPE: &str = "svc_error_type";
/// Key in `additional_kwargs` of a fallback: the failure as text.
pub const ERROR_REASON: &str = "svc_error_reason";
/// Key in `additional_kwargs` that marks a message that the user neither wrote nor sees.
pub const HIDDEN: &str = "hide_from_ui";

/// Key in `additional_kwargs`: the model's reasoning.
pub const REASONING: &str = "reasoning_content";
/// Key in `additional_kwargs` that marks reasoning that its provider takes back.
pub const TAKES_REASONING: &str = "svc_takes_reasoning";
/// Key in `additional_kwargs`: what the provider wants back with the tool calls, by their ids.
pub const CALLS_EXTRA: &str = "svc_tool_calls_extra";

/// The error of a run whose fallback answer has no reason.
pub const FALLBACK_WITHOUT_REASON: &str = "LLM provider failed after retries";

/// Whether a tool succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolStatus {
    /// It succeeded.
    Success,
    /// It failed; the content says why.
    Error,
}

impl ToolStatus {
    /// The `status` of a serialised tool message.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Error => "error",
        }
    }
}

/// The message's `type` (`human`, `ai`, `tool`, `system`), or an empty string.
pub fn kind(message: &Value) -> &str {
    message["type"].as_str().unwrap_or_default()
}

/// The message's visible text: its content, or its concatenated text blocks.
pub fn text(message: &Value) -> String {
    match &message["content"] {
        Value::String(text) => text.clone(),
        Value::Array(blocks) => blocks.iter().filter_map(block_text).collect(),
        _ => String::new(),
    }
}

/// The text of a content block, if it is a text block.
pub(super) fn block_text(block: &Value) -> Option<&str> {
    match block {
        Value::String(text) => Some(text),
        _ if block["type"] == "text" => block["text"].as_str(),
        _ => None,
    }
}

/// The message's well-formed tool calls.
pub fn tool_calls(message: &Value) -> &[Value] {
    list(message, "tool_calls")
}

/// The message's tool calls whose arguments could not be parsed.
pub fn invalid_tool_calls(message: &Value) -> &[Value] {
    list(message, "invalid_tool_calls")
}

fn list<'a>(message: &'a Value, key: &str) -> &'a [Value] {
    message[key].as_array().map_or(&[], Vec::as_slice)
}

/// Whether the message is hidden: inserted by the gateway, not written by the user.
pub fn is_hidden(message: &Value) -> bool {
    message["additional_kwargs"][HIDDEN] == true
}

/// Where the current turn starts: the index of the last human message that is not hidden.
pub fn turn_start(messages: &[Value]) -> Option<usize> {
    messages.iter().rposition(is_from_user)
}

/// Whether the user wrote the message.
pub fn is_from_user(message: &Value) -> bool {
    kind(message) == "human" && !is_hidden(message)
}

/// The run error of an assistant message that is a fallback for a failed model call.
pub fn fallback_reason(message: &Value) -> Option<&str> {
    let kwargs = &message["additional_kwargs"];
    (kwargs[ERROR_FALLBACK] == true).then(|| {
        kwargs[ERROR_REASON].as_str().filter(|reason| !reason.is_empty()).unwrap_or(FALLBACK_WITHOUT_REASON)
    })
}

/// A human message, which gets its id when it is stored.
pub fn human(content: impl Into<Value>) -> Value {
    json!({
        "type": "human", "content": content.into(), "id": null, "name": null,
        "additional_kwargs": {}, "response_metadata": {},
    })
}

/// A hidden message with the human role, named `name`: how the gateway informs the model in the middle of a
/// conversation.
pub fn hidden(name: &str, content: impl Into<Value>) -> Value {
    let mut message = human(content);
    message["name"] = name.into();
    message["additional_kwargs"][HIDDEN] = true.into();
    message
}

/// The result of the tool call `call` (an entry of `tool_calls` or `invalid_tool_calls`), which has no id yet.
pub fn tool_result(call: &Value, status: ToolStatus, content: impl Into<Value>) -> Value {
    json!({
        "type": "tool", "content": content.into(), "id": null,
        "name": call["name"], "tool_call_id": call["id"], "status": status.as_str(), "artifact": null,
        "additional_kwargs": {}, "response_metadata": {},
    })
}

/// `message` without its tool calls, wherever they are stored, and with `notice` appended to its text: how a guard ends
/// a run with the text so far.
pub fn strip_tool_calls(message: &Value, notice: &str) -> Value {
    let mut stripped = without_calls(message);
    if stripped.is_object() {
        append_text(&mut stripped, notice);
    }
    stripped
}

/// `message` without its tool calls, wherever they are stored.
fn without_calls(message: &Value) -> Value {
    let mut stripped = message.clone();
    let Some(fields) = stripped.as_object_mut() else { return stripped };
    fields.insert("tool_calls".to_owned(), json!([]));
    fields.insert("invalid_tool_calls".to_owned(), json!([]));
    if let Some(Value::Object(kwargs)) = fields.get_mut("additional_kwargs") {
        kwargs.remove("tool_calls");
        kwargs.remove("function_call");
    }
    if let Some(Value::Object(metadata)) = fields.get_mut("response_metadata")
        && metadata.get("finish_reason").is_some_and(|reason| reason == "tool_calls")
    {
        metadata.insert("finish_reason".to_owned(), "stop".into());
    }
    if let Some(Value::Array(blocks)) = fields.get_mut("content") {
        blocks.retain(|block| !is_tool_call_block(block));
    }
    stripped
}

/// `message` without those of its `tool_calls` for which `dropped` is true, wherever they are stored, and with `notice`
/// appended to its text. The other calls stay as they are.
pub fn drop_tool_calls(message: &Value, dropped: &[bool], notice: Option<&str>) -> Value {
    let is_kept = |index: usize| !dropped.get(index).copied().unwrap_or(false);
    let kept: Vec<Value> = (0..)
        .zip(tool_calls(message))
        .filter(|(index, _)| is_kept(*index))
        .map(|(_, call)| call.clone())
        .collect();
    if kept.is_empty() && invalid_tool_calls(message).is_empty() {
        return match notice {
            Some(notice) => strip_tool_calls(message, notice),
            None => without_calls(message),
        };
    }
    let mut changed = message.clone();
    changed["tool_calls"] = kept.into();
    let keep_nth = |list: &mut Value, is_call: &dyn Fn(&Value) -> bool| {
        let Some(items) = list.as_array_mut() else { return };
        let mut index = 0;
        items.retain(|item| {
            let call = is_call(item);
            index += usize::from(call);
            !call || is_kept(index - 1)
        });
    };
    keep_nth(&mut changed["content"], &is_tool_call_block);
    if let Some(raw) = changed["additional_kwargs"].get_mut("tool_calls") {
        keep_nth(raw, &|_| true);
    }
    if let Some(notice) = notice {
        append_text(&mut changed, notice);
    }
    changed
}

/// Appends a paragraph to the message's text.
fn append_text(message: &mut Value, notice: &str) {
    message["content"] = match message["content"].take() {
        Value::Array(mut blocks) => {
            blocks.push(json!({"type": "text", "text": format!("\n\n{notice}")}));
            Value::Array(blocks)
        }
        Value::String(text) if !text.is_empty() => format!("{text}\n\n{notice}").into(),
        _ => notice.into(),
    };
}

fn is_tool_call_block(block: &Value) -> bool {
    matches!(block["type"].as_str(), Some("tool_use" | "tool_call" | "function_call" | "input_json_delta"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_joins_the_text_blocks_and_skips_the_others() {
        let message = json!({"content": [{"type": "text", "text": "a"}, {"type": "image_url"}, "b"]});
        assert_eq!(text(&message), "ab");
        assert_eq!(text(&json!({"content": "plain"})), "plain");
        assert_eq!(text(&json!({"content": null})), "");
    }

    #[test]
    fn a_turn_starts_at_the_last_message_a_person_wrote() {
        let messages = [human("one"), json!({"type": "ai"}), human("two"), hidden("loop_warning", "stop it")];
        assert_eq!(turn_start(&messages), Some(2));
        assert_eq!(turn_start(&messages[1..2]), None);
    }

    #[test]
    fn fallback_reason_needs_the_mark_and_has_a_default() {
        let marked =
            |reason: Value| json!({"additional_kwargs": {ERROR_FALLBACK: true, ERROR_REASON: reason}});
        assert_eq!(fallback_reason(&marked(json!("503"))), Some("503"));
        assert_eq!(fallback_reason(&marked(json!(""))), Some("LLM provider failed after retries"));
        assert_eq!(fallback_reason(&marked(Value::Null)), Some("LLM provider failed after retries"));
        assert_eq!(fallback_reason(&json!({"additional_kwargs": {ERROR_REASON: "503"}})), None);
        assert_eq!(fallback_reason(&json!({"content": "LLM provider failed after retries"})), None);
    }

    #[test]
    fn stripping_removes_every_trace_of_tool_calls_and_appends_the_notice() {
        let message = json!({
            "type": "ai", "id": "m", "content": "so far",
            "tool_calls": [{"name": "ls"}], "invalid_tool_calls": [{"name": "ls"}],
            "additional_kwargs": {"tool_calls": [1], "function_call": {}, "kept": 1},
            "response_metadata": {"finish_reason": "tool_calls", "model_name": "x"},
        });
        let expected = json!({
            "type": "ai", "id": "m", "content": "so far\n\n[capped]",
            "tool_calls": [], "invalid_tool_calls": [],
            "additional_kwargs": {"kept": 1},
            "response_metadata": {"finish_reason": "stop", "model_name": "x"},
        });
        assert_eq!(strip_tool_calls(&message, "[capped]"), expected);
    }

    #[test]
    fn stripping_keeps_other_blocks_and_other_finish_reasons() {
        let message = json!({
            "content": [{"type": "text", "text": "a"}, {"type": "tool_use"}],
            "response_metadata": {"finish_reason": "length"},
        });
        let stripped = strip_tool_calls(&message, "[capped]");
        assert_eq!(text(&stripped), "a\n\n[capped]");
        assert_eq!(stripped["content"].as_array().unwrap().len(), 2);
        assert_eq!(stripped["response_metadata"]["finish_reason"], "length");
        assert_eq!(strip_tool_calls(&json!({"content": ""}), "[capped]")["content"], "[capped]");
    }

    #[test]
    fn dropped_calls_leave_no_trace_and_the_others_stay() {
        let call = |id: &str| json!({"type": "tool_call", "name": "t", "args": {}, "id": id});
        let message = json!({
            "type": "ai", "content": [{"type": "text", "text": "x"}, {"type": "tool_use", "id": "a"}, {"type": "tool_use", "id": "b"}],
            "tool_calls": [call("a"), call("b")], "invalid_tool_calls": [],
            "additional_kwargs": {"tool_calls": [{"id": "a"}, {"id": "b"}]},
            "response_metadata": {"finish_reason": "tool_calls"},
        });
        let one = drop_tool_calls(&message, &[true, false], None);
        assert_eq!(one["tool_calls"], json!([call("b")]));
        assert_eq!(one["content"], json!([{"type": "text", "text": "x"}, {"type": "tool_use", "id": "b"}]));
        assert_eq!(one["additional_kwargs"]["tool_calls"], json!([{"id": "b"}]));
        assert_eq!(one["response_metadata"]["finish_reason"], "tool_calls");
        let none = drop_tool_calls(&message, &[true, true], Some("[limit]"));
        assert_eq!((&none["tool_calls"], text(&none).as_str()), (&json!([]), "x\n\n[limit]"));
        assert_eq!(none["response_metadata"]["finish_reason"], "stop");
        assert_eq!(text(&drop_tool_calls(&message, &[true, true], None)), "x");
        assert_eq!(drop_tool_calls(&message, &[false, false], None), message);
    }
}

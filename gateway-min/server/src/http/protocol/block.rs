//! The content blocks of a message: text, reasoning, calls of tools.

use serde_json::{Value, json};
use threadkeep_agent::model::call_arguments;

/// A block that grows, or a piece of one.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Block {
    Text(String),
    Reasoning(String),
    Call {
        /// Which call of the message.
        index: Value,
        id: Value,
        name: Value,
        args: String,
    },
}

/// A piece of a call, of what a chunk has in `tool_call_chunks`.
pub(super) fn call_chunk(chunk: &Value) -> Block {
    Block::Call {
        index: chunk["index"].clone(),
        id: chunk["id"].clone(),
        name: chunk["name"].clone(),
        args: chunk["args"].as_str().unwrap_or_default().to_owned(),
    }
}

impl Block {
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Text(text) | Self::Reasoning(text) => text.is_empty(),
            Self::Call { .. } => false,
        }
    }

    /// Whether the piece belongs to this block.
    pub(super) fn continues_with(&self, piece: &Self) -> bool {
        match (self, piece) {
            (Self::Text(_), Self::Text(_)) | (Self::Reasoning(_), Self::Reasoning(_)) => true,
            (Self::Call { index, .. }, Self::Call { index: of, .. }) => index == of,
            _ => false,
        }
    }

    pub(super) fn append(&mut self, piece: &Self) {
        match (self, piece) {
            (Self::Text(text), Self::Text(more)) | (Self::Reasoning(text), Self::Reasoning(more)) => {
                text.push_str(more);
            }
            (
                Self::Call { id, name, args, .. },
                Self::Call { id: sent_id, name: sent_name, args: more, .. },
            ) => {
                for (known, sent) in [(id, sent_id), (name, sent_name)] {
                    if known.is_null() {
                        *known = sent.clone();
                    }
                }
                args.push_str(more);
            }
            _ => {}
        }
    }

    /// What the block is before its first piece.
    pub(super) fn begun(&self) -> Value {
        match self {
            Self::Text(_) => json!({ "type": "text", "text": "" }),
            Self::Reasoning(_) => json!({ "type": "reasoning", "reasoning": "" }),
            Self::Call { index, id, name, .. } => {
                json!({ "type": "tool_call_chunk", "id": id, "name": name, "args": "", "index": index })
            }
        }
    }

    /// How the block, which has `piece` by now, changed with it. Texts are appended; the fields of a call are replaced.
    pub(super) fn delta(&self, piece: &Self) -> Value {
        match (self, piece) {
            (Self::Call { id, name, args, .. }, _) => json!({
                "type": "block-delta",
                "fields": { "type": "tool_call_chunk", "id": id, "name": name, "args": args },
            }),
            (_, Self::Reasoning(more)) => json!({ "type": "reasoning-delta", "reasoning": more }),
            (_, Self::Text(more)) => json!({ "type": "text-delta", "text": more }),
            (_, Self::Call { .. }) => Value::Null,
        }
    }

    /// The block when another one follows.
    pub(super) fn finished(&self) -> Value {
        self.last(false)
    }

    /// The last block of an answer, which may have been cut off in the middle of it.
    pub(super) fn last(&self, is_cut_off: bool) -> Value {
        match self {
            Self::Text(text) => json!({ "type": "text", "text": text }),
            Self::Reasoning(text) => json!({ "type": "reasoning", "reasoning": text }),
            Self::Call { id, name, args, .. } => {
                // As the stored message has the call.
                match call_arguments(name.as_str(), args, is_cut_off) {
                    Ok(args) => json!({ "type": "tool_call", "id": id, "name": name, "args": args }),
                    Err(error) => json!({
                        "type": "invalid_tool_call", "id": id, "name": name, "args": args, "error": error,
                    }),
                }
            }
        }
    }
}

/// The blocks of a complete message.
pub(super) fn blocks(message: &Value) -> Vec<Value> {
    let mut blocks = Vec::new();
    if let Some(reasoning) = message["additional_kwargs"]["reasoning_content"].as_str() {
        blocks.push(json!({ "type": "reasoning", "reasoning": reasoning }));
    }
    match &message["content"] {
        Value::String(text) if !text.is_empty() => blocks.push(json!({ "type": "text", "text": text })),
        Value::Array(content) => blocks.extend(content.iter().filter_map(standard)),
        _ => {}
    }
    for (kind, field) in [("tool_call", "tool_calls"), ("invalid_tool_call", "invalid_tool_calls")] {
        for call in message[field].as_array().into_iter().flatten() {
            let mut call = call.clone();
            call["type"] = kind.into();
            blocks.push(call);
        }
    }
    blocks
}

/// A block of a message's content; none for a call, which the message has beside its content.
fn standard(block: &Value) -> Option<Value> {
    if let Value::String(text) = block {
        return Some(json!({ "type": "text", "text": text }));
    }
    match block["type"].as_str().unwrap_or_default() {
        "tool_use" | "tool_call" => None,
        "text" | "reasoning" | "image" | "audio" | "video" | "file" => Some(block.clone()),
        _ => Some(json!({ "type": "non_standard", "value": block })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(index: i64, id: &str, args: &str) -> Block {
        let id = if id.is_empty() { Value::Null } else { id.into() };
        Block::Call { index: index.into(), name: id.clone(), id, args: args.to_owned() }
    }

    #[test]
    fn a_call_grows_by_its_arguments_and_ends_as_an_object_or_as_no_call() {
        let mut call = piece(0, "c", "");
        for (more, so_far) in [(r#"{"q":"#, r#"{"q":"#), ("1}", r#"{"q":1}"#)] {
            let more = piece(0, "", more);
            assert!(call.continues_with(&more));
            call.append(&more);
            assert_eq!(call.delta(&more)["fields"]["args"], so_far);
        }
        assert_eq!(call.finished(), json!({"type": "tool_call", "id": "c", "name": "c", "args": {"q": 1}}));
        assert_eq!(piece(0, "c", " ").finished()["args"], json!({}));
        let deep = format!("{{\"q\":{}{}}}", "[".repeat(64), "]".repeat(64));
        for args in ["{", "[]", deep.as_str()] {
            assert_eq!(piece(0, "c", args).finished()["type"], "invalid_tool_call", "{args}");
        }
        for args in ["", "{\"q\":"] {
            let error = piece(0, "c", args).last(true)["error"].clone();
            assert_eq!(
                error,
                call_arguments(Some("c"), args, true).unwrap_err(),
                "as the stored message has it"
            );
        }
        assert_eq!(call.last(true)["args"], json!({"q": 1}), "it has its arguments");
        assert!(!call.continues_with(&piece(1, "d", "")));
        assert!(!call.continues_with(&Block::Text("x".into())));
    }

    #[test]
    fn a_complete_message_has_its_reasoning_its_content_and_its_calls_as_blocks() {
        let message = json!({
            "type": "ai", "id": "m", "additional_kwargs": {"reasoning_content": "hm"},
            "content": ["a", {"type": "image", "url": "u"}, {"type": "tool_use", "id": "c"}, {"type": "odd"}],
            "tool_calls": [{"id": "c", "name": "ls", "args": {}}],
            "invalid_tool_calls": [{"id": "d", "name": "ls", "args": "{", "error": "no"}],
        });
        let blocks = blocks(&message);
        let kinds: Vec<_> = blocks.iter().map(|block| block["type"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["reasoning", "text", "image", "non_standard", "tool_call", "invalid_tool_call"]);
        assert_eq!(super::blocks(&json!({"content": ""})), Vec::<Value>::new());
    }
}

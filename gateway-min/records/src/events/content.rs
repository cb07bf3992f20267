//! What is stored of an event's content: no more of a trace than the limit, and only what the feeds read back.

use serde_json::Value;
use threadkeep::json::is_deeper;

use super::NewEvent;

/// The deepest nesting of content that is stored as it is. `serde_json` writes any depth, but reads 127 levels at most,
/// and the line of a file is one of them.
const MAX_DEPTH: usize = 120;

/// Cuts long content to its first `max` bytes (a JSON value to those of its text), at a character boundary, and notes
/// that in the metadata.
pub(super) fn cut_trace(event: &mut NewEvent, max: usize) {
    let text = match &event.content {
        Value::String(text) => text.clone(),
        Value::Null => return,
        other => other.to_string(),
    };
    if text.len() <= max {
        return;
    }
    event.content = Value::from(&text[..text.floor_char_boundary(max)]);
    event.metadata.insert("content_truncated".to_owned(), Value::Bool(true));
    event.metadata.insert("original_byte_length".to_owned(), Value::from(text.len()));
}

/// Replaces content that is nested too deeply by its JSON text, and notes that in the metadata.
pub(super) fn flatten(event: &mut NewEvent) {
    if is_deeper(&event.content, MAX_DEPTH) {
        event.content = Value::from(event.content.to_string());
        event.metadata.insert("content_is_text".to_owned(), Value::Bool(true));
    }
}

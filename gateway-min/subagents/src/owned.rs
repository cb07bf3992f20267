//! What only the runtime may write: evidence of delegations. Nobody may send it, or a caller could make a subagent look as
//! if it had run.

use serde_json::{Map, Value};
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep_agent::receipts::{LEDGER_KEY, RECEIPT_KEY};

use crate::budget::SUMMARIZED;

/// The channel with the ledger of delegations.
pub const CHANNEL: &str = "delegations";
/// The prefix of every key of a delegation's result and of a batch's.
const PREFIX: &str = "subagent_";
/// The other keys: a tool result's receipt, the receipts that a model saw, and the tokens that a summary has replaced.
const KEYS: [&str; 3] = [RECEIPT_KEY, LEDGER_KEY, SUMMARIZED];
/// Where a message has metadata, besides its own fields.
const METADATA: [&str; 2] = ["additional_kwargs", "response_metadata"];

/// Whether only the runtime may write this key of a message's metadata.
pub fn is_owned(key: &str) -> bool {
    key.starts_with(PREFIX) || KEYS.contains(&key)
}

/// Removes what only the runtime writes from channel values that a caller sends: the ledger, and the metadata of messages.
pub fn strip_values(values: &mut Map<String, Value>) {
    values.remove(CHANNEL);
    if let Some(messages) = values.get_mut(MESSAGES_CHANNEL) {
        strip_messages(messages);
    }
}

/// The same, from one message or a list of them.
pub fn strip_messages(messages: &mut Value) {
    match messages {
        Value::Array(list) => list.iter_mut().for_each(strip_message),
        message => strip_message(message),
    }
}

/// The same, from the metadata of one message. Its content and the arguments of its tool calls are the caller's.
pub fn strip_message(message: &mut Value) {
    let Value::Object(fields) = message else { return };
    fields.retain(|key, _| !is_owned(key));
    for part in METADATA {
        if let Some(Value::Object(metadata)) = fields.get_mut(part) {
            metadata.retain(|key, _| !is_owned(key));
        }
    }
}

/// Removes them from a message that replaces `held`, unless that is the same message with the same evidence: a caller may
/// write back what it has read.
pub fn strip_changed(message: &mut Value, held: Option<&Value>) {
    const SAID: [&str; 5] = ["type", "content", "name", "tool_call_id", "status"];
    let held = held.filter(|held| SAID.iter().all(|field| held[field] == message[field]));
    let Some(held) = held else { return strip_message(message) };
    let Value::Object(fields) = message else { return };
    fields.retain(|key, value| !is_owned(key) || held.get(key) == Some(value));
    for part in METADATA {
        if let Some(Value::Object(metadata)) = fields.get_mut(part) {
            metadata.retain(|key, value| !is_owned(key) || held[part].get(key) == Some(value));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::outcome::keys;

    const OWNED: [&str; 17] = [
        keys::STATUS,
        keys::STOP_REASON,
        keys::ERROR,
        keys::RESULT_BRIEF,
        keys::RESULT_SHA256,
        keys::MODEL_NAME,
        keys::TOKEN_USAGE,
        keys::TOOL_RECEIPTS,
        keys::RECEIPT_VERDICT,
        keys::ACCEPTANCE_VERDICT,
        "subagent_token_usage_attributed",
        "subagent_batch_error",
        "subagent_batch_id",
        "subagent_batch_status",
        RECEIPT_KEY,
        LEDGER_KEY,
        "summarized_token_usage",
    ];

    fn forged() -> Map<String, Value> {
        OWNED.iter().map(|key| ((*key).to_owned(), json!("forged"))).collect()
    }

    fn tool_call() -> Value {
        json!([{"id": "c", "name": "task", "args": {"subagent_type": "bash", "prompt": "p"}}])
    }

    /// Check 10, of the function.
    #[test]
    fn every_owned_key_is_removed_wherever_a_message_has_metadata() {
        let mut message = json!({"type": "ai", "content": [{"subagent_x": 1}], "tool_calls": tool_call()});
        let honest = message.clone();
        message.as_object_mut().unwrap().extend(forged());
        message["additional_kwargs"] = json!(forged());
        message["response_metadata"] = json!(forged());
        message["additional_kwargs"]["mine"] = json!(1);
        for shape in [message.clone(), json!([message.clone(), "text"])] {
            let mut values = json!({"messages": shape, "delegations": [{"id": "c"}], "title": "t"});
            strip_values(values.as_object_mut().unwrap());
            assert_eq!(values.as_object().unwrap().len(), 2, "{values}");
            let text = values.to_string();
            assert!(!text.contains("forged"), "{text}");
            let kept = values["messages"].get(0).unwrap_or(&values["messages"]);
            assert_eq!(kept["additional_kwargs"], json!({"mine": 1}));
            for field in ["type", "content", "tool_calls"] {
                assert_eq!(kept[field], honest[field], "the caller's own");
            }
        }
    }

    /// Bug 23.
    #[test]
    fn the_ledger_is_never_a_callers() {
        let mut values =
            json!({"delegations": [{"id": "c", "receipt_verdict": {}, "acceptance_verdict": {}}]});
        strip_values(values.as_object_mut().unwrap());
        assert_eq!(values, json!({}));
    }

    #[test]
    fn what_was_read_may_be_written_back_but_not_under_another_text() {
        let mut held =
            json!({"type": "tool", "content": "Task Succeeded.", "name": "task", "tool_call_id": "c"});
        held["additional_kwargs"] = json!({"subagent_status": "completed", "mine": 1});
        let written = |change: &dyn Fn(&mut Value)| {
            let mut message = held.clone();
            change(&mut message);
            strip_changed(&mut message, Some(&held));
            message["additional_kwargs"].clone()
        };
        let whole = json!({"subagent_status": "completed", "mine": 1});
        assert_eq!(written(&|_| ()), whole);
        assert_eq!(written(&|message| message["additional_kwargs"]["subagent_error"] = json!("x")), whole);
        let without = json!({"mine": 1});
        assert_eq!(
            written(&|message| message["additional_kwargs"]["subagent_status"] = json!("failed")),
            without
        );
        assert_eq!(written(&|message| message["content"] = json!("Task failed.")), without);
        assert_eq!(written(&|message| message["tool_call_id"] = json!("d")), without);
        let mut unknown = held.clone();
        strip_changed(&mut unknown, None);
        assert_eq!(unknown["additional_kwargs"], without);
    }
}

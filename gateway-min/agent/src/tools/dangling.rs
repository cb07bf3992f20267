//! Tool calls that an interruption left without a result, and results that are not right after their calls.
//!
//! Providers refuse a conversation in which a call has no result, so each such call gets a result that reports the
//! interruption before the next model call. They refuse another message between a call and its result, too: one that a
//! client added while the call was waiting is sent after the result. A result without its call is not sent.

use std::collections::HashSet;

use serde_json::Value;

use crate::model::message::{ToolStatus, invalid_tool_calls, kind, tool_calls, tool_result};

/// The result shown to the model in place of the missing one.
pub const INTERRUPTED: &str =
    "Error: the tool call was interrupted and returned no result. Repeat it if you still need it.";

/// A result to insert into the conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct Repair {
    /// The index in the original list before which it belongs: right after the message that made the call. Repairs with
    /// the same index are in the order of the calls.
    pub index: usize,
    /// The tool message, with status `error`. Its id is derived from the call, so that repairing twice yields the same
    /// message.
    pub message: Value,
}

/// The repairs that `messages` needs, in order. A result only counts for a call up to the next assistant message,
/// because providers reuse call ids.
pub fn repairs(messages: &[Value]) -> Vec<Repair> {
    let mut repairs = Vec::new();
    for (position, message) in messages.iter().enumerate().filter(|(_, message)| kind(message) == "ai") {
        let results = following(messages, position).iter().filter(|later| kind(later) == "tool");
        let answered: HashSet<&Value> = results.map(|result| &result["tool_call_id"]).collect();
        for call in calls(message).filter(|call| !answered.contains(&call["id"])) {
            repairs.push(Repair { index: position + 1, message: interrupted(message, call) });
        }
    }
    repairs
}

/// `messages` as sent to the model: with their repairs inserted, and each result before whatever else follows its call.
pub fn repaired(messages: &[Value]) -> Vec<Value> {
    let mut result = Vec::with_capacity(messages.len());
    let mut repairs = repairs(messages).into_iter().peekable();
    for position in ordered(messages) {
        result.push(messages[position].clone());
        while let Some(repair) = repairs.next_if(|repair| repair.index == position + 1) {
            result.push(repair.message);
        }
    }
    result
}

/// `messages` without the results of calls that the assistant message before them did not make: providers refuse those,
/// too. A client may have removed the call, or added the result. For whole conversations that are [`repaired`]: a part
/// of one may begin with results whose calls come before it.
pub fn answering(messages: &[Value]) -> impl Iterator<Item = &Value> {
    let mut called: HashSet<&Value> = HashSet::new();
    messages.iter().filter(move |message| {
        let message = *message;
        match kind(message) {
            "ai" => {
                called = calls(message).map(|call| &call["id"]).collect();
                true
            }
            "tool" => called.contains(&message["tool_call_id"]),
            _ => true,
        }
    })
}

/// The indices of `messages` in the order in which they are sent.
fn ordered(messages: &[Value]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..messages.len()).collect();
    // Where each message belongs: a result beside its call, all others where they are.
    let mut places = order.clone();
    for (position, message) in messages.iter().enumerate().filter(|(_, message)| kind(message) == "ai") {
        let called: HashSet<&Value> = calls(message).map(|call| &call["id"]).collect();
        for (index, later) in (position + 1..).zip(following(messages, position)) {
            if kind(later) == "tool" && called.contains(&later["tool_call_id"]) {
                places[index] = position;
            }
        }
    }
    // Stable: a call before its results, and these in their own order.
    order.sort_by_key(|index| places[*index]);
    order
}

/// The messages after the one at `position`, up to the next assistant message.
fn following(messages: &[Value], position: usize) -> &[Value] {
    let later = &messages[position + 1..];
    let end = later.iter().position(|message| kind(message) == "ai").unwrap_or(later.len());
    &later[..end]
}

fn calls(message: &Value) -> impl Iterator<Item = &Value> {
    tool_calls(message).iter().chain(invalid_tool_calls(message))
}

fn interrupted(message: &Value, call: &Value) -> Value {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut result = tool_result(call, ToolStatus::Error, INTERRUPTED);
    result["id"] = format!("interrupted-{}-{}", text(&message["id"]), text(&call["id"])).into();
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn ai(id: &str, calls: &[&str]) -> Value {
        let calls: Vec<Value> = calls.iter().map(|call| json!({"name": "ls", "id": call})).collect();
        json!({"type": "ai", "id": id, "content": "", "tool_calls": calls})
    }

    fn tool(call: &str) -> Value {
        json!({"type": "tool", "tool_call_id": call, "content": "done"})
    }

    fn human() -> Value {
        json!({"type": "human", "content": "go on"})
    }

    fn found(messages: &[Value]) -> Vec<(usize, String)> {
        repairs(messages)
            .iter()
            .map(|repair| (repair.index, repair.message["tool_call_id"].as_str().unwrap().to_owned()))
            .collect()
    }

    #[test]
    fn answered_calls_need_nothing() {
        let messages = [human(), ai("m", &["a", "b"]), tool("b"), tool("a"), ai("n", &[])];
        assert_eq!(found(&messages), []);
        assert_eq!(repaired(&messages), messages);
    }

    #[test]
    fn each_unanswered_call_gets_an_error_result_right_after_its_message() {
        let messages = [human(), ai("m", &["a", "b", "c"]), tool("b"), human(), ai("n", &["d"])];
        assert_eq!(found(&messages), [(2, "a".into()), (2, "c".into()), (5, "d".into())]);
        let order: Vec<Value> = repaired(&messages).iter().map(|m| m["tool_call_id"].clone()).collect();
        assert_eq!(json!(order), json!([null, null, "a", "c", "b", null, null, "d"]));
        let repair = &repairs(&messages)[0].message;
        assert_eq!((&repair["status"], &repair["name"]), (&json!("error"), &json!("ls")));
        assert_eq!(repair["content"], INTERRUPTED);
        assert_eq!(repair["id"], "interrupted-m-a");
    }

    #[test]
    fn a_result_is_sent_right_after_its_call_also_if_a_message_was_added_between_them() {
        let messages =
            [human(), ai("m", &["a", "b", "c"]), tool("b"), human(), tool("a"), tool("x"), ai("n", &["x"])];
        let sent = repaired(&messages);
        let order: Vec<Value> = sent.iter().map(|m| json!([m["type"], m["tool_call_id"]])).collect();
        assert_eq!(
            json!(order),
            json!([
                ["human", null],
                ["ai", null],
                ["tool", "c"],
                ["tool", "b"],
                ["tool", "a"],
                ["human", null],
                ["tool", "x"],
                ["ai", null],
                ["tool", "x"],
            ])
        );
        assert_eq!(repaired(&sent), sent);
    }

    /// A client may add as many in one request. Compared one by one, that is 40,000,000,000 comparisons.
    #[test]
    fn calls_and_results_by_the_hundred_thousand_are_gone_through_once() {
        let ids: Vec<String> = (0..200_000).map(|number| format!("call-{number:06}")).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let mut messages = vec![ai("m", &ids)];
        messages.extend(ids.iter().rev().skip(1).map(|id| tool(id)));
        assert_eq!(found(&messages), [(1, "call-199999".into())]);
        let sent = repaired(&messages);
        assert_eq!((sent.len(), &sent[1]["tool_call_id"]), (ids.len() + 1, &json!("call-199999")));
        assert_eq!(sent[2..], messages[1..]);
    }

    #[test]
    fn a_repeated_call_id_is_answered_only_where_its_result_is() {
        let messages = [ai("m", &["x"]), human(), ai("n", &["x"]), tool("x")];
        assert_eq!(found(&messages), [(1, "x".into())]);
    }

    #[test]
    fn calls_with_unreadable_arguments_count_too() {
        let message = json!({"type": "ai", "id": "m", "invalid_tool_calls": [{"name": "ls", "id": "a"}]});
        assert_eq!(found(&[message]), [(1, "a".into())]);
    }

    #[test]
    fn repairing_is_idempotent_and_deterministic() {
        let messages = [human(), ai("m", &["a", "b"]), human()];
        let once = repaired(&messages);
        assert_eq!(repaired(&once), once);
        assert_eq!(repairs(&messages), repairs(&messages));
    }
}

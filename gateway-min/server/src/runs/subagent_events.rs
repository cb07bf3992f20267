//! The events of subagents in a run's feed, made from what their clients see.

use serde_json::{Map, Value as Json, json};
use threadkeep_records::NewEvent;

const CATEGORY: &str = "subagent";
/// The longest text of a step, a result or an error, in characters.
const TEXT_MAX: usize = 8192;

/// The event for the feed that a `task_*` event of a stream makes, if it makes one, and whether it is the last one of
/// its task (service reference, "Events").
pub(super) fn of(event: &Json) -> Option<(NewEvent, bool)> {
    let task_id = event["task_id"].as_str().filter(|id| !id.is_empty())?;
    let (name, content, last) = match event["type"].as_str()? {
        "task_started" => ("subagent.start", start(task_id, event), false),
        "task_running" => ("subagent.step", step(task_id, event)?, false),
        ending => ("subagent.end", end(task_id, ending.strip_prefix("task_")?, event)?, true),
    };
    let mut made = NewEvent::new(name, CATEGORY, Json::Object(content));
    made.metadata.insert("task_id".to_owned(), json!(task_id));
    if name == "subagent.step" {
        made.metadata.insert("message_index".to_owned(), event["message_index"].clone());
    }
    Some((made, last))
}

fn start(task_id: &str, event: &Json) -> Map<String, Json> {
    object([("task_id", json!(task_id)), ("description", event["description"].clone())])
}

/// What a step said; `None` for an event without an index or a message.
fn step(task_id: &str, event: &Json) -> Option<Map<String, Json>> {
    let (index, message) = (event["message_index"].as_u64()?, event["message"].as_object()?);
    let mut content = said(&Json::Object(message.clone()));
    content.extend(object([("task_id", json!(task_id)), ("message_index", json!(index))]));
    Some(content)
}

/// What a message of a subagent says: its kind, its text, and its calls or its tool.
pub(crate) fn said(message: &Json) -> Map<String, Json> {
    let text = threadkeep_agent::model::message::text(message);
    let (text, truncated) = cut(&text);
    let kind = if message["type"] == "tool" { "tool" } else { "ai" };
    let mut content = object([("kind", json!(kind)), ("text", json!(text)), ("truncated", json!(truncated))]);
    if kind == "tool" {
        content.insert("tool_name".to_owned(), message["name"].clone());
    } else {
        let calls = message["tool_calls"].as_array().map_or(&[][..], Vec::as_slice);
        content.insert("tool_calls".to_owned(), calls.iter().map(call).collect());
    }
    content
}

/// A tool call with its arguments, which become a text if they are long.
fn call(call: &Json) -> Json {
    let args = call["args"].to_string();
    let (args, truncated) = cut(&args);
    if truncated {
        json!({ "name": call["name"], "args": args, "args_truncated": true })
    } else {
        json!({ "name": call["name"], "args": call["args"] })
    }
}

fn end(task_id: &str, status: &str, event: &Json) -> Option<Map<String, Json>> {
    if !["completed", "failed", "cancelled", "timed_out"].contains(&status) {
        return None;
    }
    let mut content = object([("task_id", json!(task_id)), ("status", json!(status))]);
    for key in ["model_name", "usage"] {
        if !event[key].is_null() {
            content.insert(key.to_owned(), event[key].clone());
        }
    }
    for key in ["result", "error"] {
        if let Some(text) = event[key].as_str() {
            let (text, truncated) = cut(text);
            content.insert(key.to_owned(), json!(text));
            content.insert(format!("{key}_truncated"), json!(truncated));
        }
    }
    Some(content)
}

/// The beginning of a text, and whether that is not all.
fn cut(text: &str) -> (&str, bool) {
    text.char_indices().nth(TEXT_MAX).map_or((text, false), |(end, _)| (&text[..end], true))
}

fn object<const N: usize>(entries: [(&str, Json); N]) -> Map<String, Json> {
    entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(event: &Json) -> (String, Json, Json, bool) {
        let (event, last) = of(event).unwrap();
        assert_eq!(event.category, "subagent");
        (event.event_type, event.content, Json::Object(event.metadata), last)
    }

    #[test]
    fn the_start_names_the_task_and_what_it_is_about() {
        let (name, content, metadata, last) =
            made(&json!({"type": "task_started", "task_id": "c", "description": null, "model_name": "m"}));
        assert_eq!((name.as_str(), last), ("subagent.start", false));
        assert_eq!(content, json!({"task_id": "c", "description": null}));
        assert_eq!(metadata, json!({"task_id": "c"}));
    }

    #[test]
    fn a_step_of_8193_characters_is_cut_and_says_so() {
        let step = |message: Json| {
            made(&json!({"type": "task_running", "task_id": "c", "message_index": 2, "message": message})).1
        };
        let long = step(json!({"type": "tool", "name": "ls", "content": "\u{e9}".repeat(8193)}));
        assert_eq!(
            (&long["kind"], &long["truncated"], &long["tool_name"]),
            (&json!("tool"), &json!(true), &json!("ls"))
        );
        assert_eq!(long["text"].as_str().unwrap().chars().count(), 8192);
        let calls = [
            json!({"name": "a", "args": {"x": 1}, "id": "i"}),
            json!({"name": "b", "args": {"x": "y".repeat(9000)}}),
        ];
        let whole = step(json!({"type": "ai", "content": "x".repeat(8192), "tool_calls": calls}));
        assert_eq!((&whole["kind"], &whole["truncated"]), (&json!("ai"), &json!(false)));
        assert_eq!(whole["tool_calls"][0], json!({"name": "a", "args": {"x": 1}}));
        assert_eq!(whole["tool_calls"][1]["args_truncated"], true);
        assert_eq!(whole["tool_calls"][1]["args"].as_str().unwrap().len(), 8192);
        assert_eq!(step(json!({"type": "ai", "content": "x"}))["tool_calls"], json!([]));
    }

    #[test]
    fn an_end_has_what_is_known_of_it() {
        let usage = json!({"input_tokens": 1, "output_tokens": 2, "total_tokens": 3});
        let (name, content, _, last) = made(&json!({
            "type": "task_completed", "task_id": "c", "result": "r", "usage": usage, "model_name": "m",
        }));
        assert_eq!((name.as_str(), last), ("subagent.end", true));
        assert_eq!(
            content,
            json!({
                "task_id": "c", "status": "completed", "result": "r", "result_truncated": false, "usage": usage,
                "model_name": "m",
            })
        );
        let (_, content, ..) = made(&json!({"type": "task_timed_out", "task_id": "c", "usage": null}));
        assert_eq!(content, json!({"task_id": "c", "status": "timed_out"}));
    }

    #[test]
    fn events_without_what_identifies_them_are_not_kept() {
        for event in [
            json!({"type": "task_started"}),
            json!({"type": "task_started", "task_id": ""}),
            json!({"type": "task_started", "task_id": 7}),
            json!({"type": "task_running", "task_id": "c", "message": {}}),
            json!({"type": "task_running", "task_id": "c", "message_index": -1, "message": {}}),
            json!({"type": "task_running", "task_id": "c", "message_index": 1, "message": "x"}),
            json!({"type": "task_paused", "task_id": "c"}),
            json!({"type": "progress", "task_id": "c"}),
        ] {
            assert!(of(&event).is_none(), "{event}");
        }
    }
}

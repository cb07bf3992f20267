//! The `messages` channel: append, replace by id, remove by id, remove all.

use serde_json::{Map, Value as Json, json};

use super::Reducer;
use crate::error::{Error, Result};
use crate::id::IdSource;
use crate::value::{ChannelValue, Edit, Element, ListValue};

/// The name of the channel that accumulates the conversation.
pub const MESSAGES_CHANNEL: &str = "messages";
/// The id in a message of type `remove` that removes every preceding message.
pub const REMOVE_ALL_MESSAGES: &str = "__remove_all__";

/// The reducer of the `messages` channel.
///
/// A write is a message or a list of messages, folded in order: a message whose id is already in the list replaces that
/// message, any other is appended, and one of type `remove` removes its id ([`REMOVE_ALL_MESSAGES`]: all messages). Ids
/// are assigned by [`Reducer::prepare`], before anything is stored.
#[derive(Debug, Clone, Copy, Default)]
pub struct Messages;

impl Reducer for Messages {
    fn empty(&self) -> Option<ChannelValue> {
        Some(ListValue::default().into())
    }

    fn reduce(&self, current: ChannelValue, write: &ChannelValue) -> Result<ChannelValue> {
        let ChannelValue::List(list) = current else {
            // A stored null or other stray value counts as no messages.
            return self.reduce(ListValue::default().into(), write);
        };
        let mut list = Edit::new(list);
        match write {
            ChannelValue::List(more) => {
                for message in more.iter() {
                    fold(&mut list, message)?;
                }
            }
            plain if plain.is_null() => {}
            ChannelValue::Plain(encoded) => fold(&mut list, &Element::from_bytes(encoded.bytes.clone()))?,
        }
        Ok(list.finish().into())
    }

    fn prepare(&self, write: Json, ids: &IdSource) -> Result<Json> {
        match write {
            Json::Null => Ok(Json::Null),
            Json::Array(messages) => {
                let messages = messages.into_iter().map(|message| normalize_message(message, ids));
                messages.collect::<Result<Vec<_>>>().map(Json::Array)
            }
            message => Ok(Json::Array(vec![normalize_message(message, ids)?])),
        }
    }
}

fn fold(list: &mut Edit, message: &Element) -> Result<()> {
    let id = message.id().ok_or_else(|| {
        Error::InvalidUpdate("a message reached the messages channel without an id".to_owned())
    })?;
    let is_everything = &**id == REMOVE_ALL_MESSAGES;
    if message.text("type") != Some("remove") {
        if is_everything {
            list.push(message.clone());
        } else {
            list.put(id, message.clone());
        }
    } else if is_everything {
        *list = Edit::default();
    } else if !list.remove(id) {
        return Err(Error::InvalidUpdate(format!(
            "cannot remove message {id}: no message of the thread has this id"
        )));
    }
    Ok(())
}

/// Converts a message to its stored form: an object with `type` (`human`, `ai`, `system`, `tool`, `remove`), `content`
/// and `id`. A string is a human message; `role` with the names of chat-completions APIs is accepted; a missing id is
/// generated.
///
/// # Errors
/// [`Error::InvalidUpdate`] saying what is wrong with the message.
pub fn normalize_message(message: Json, ids: &IdSource) -> Result<Json> {
    let refuse = |why: String| Err(Error::InvalidUpdate(why));
    let mut map = match message {
        Json::Object(map) => map,
        Json::String(text) => Map::from_iter([("content".to_owned(), Json::String(text))]),
        other => return refuse(format!("a message must be an object or a string, not {}", kind(&other))),
    };
    let role = map.remove("role");
    let named = map.get("type").or(role.as_ref()).unwrap_or(&Json::Null);
    let kind = match named {
        Json::Null if role.is_none() && map.len() == 1 && map.contains_key("content") => "human",
        Json::Null => return refuse("the message has neither type nor role".to_owned()),
        Json::String(name) => match name.as_str() {
            "human" | "user" => "human",
            "ai" | "assistant" | "AIMessageChunk" => "ai",
            "system" | "developer" => "system",
            "tool" => "tool",
            "remove" => "remove",
            other => return refuse(format!("unknown message type '{other}'")),
        },
        other => return refuse(format!("the message type must be a string, not {}", self::kind(other))),
    };
    if map.get("type").and_then(Json::as_str) != Some(kind) {
        map.insert("type".into(), json!(kind));
    }
    match map.get("id") {
        None | Some(Json::Null) if kind == "remove" => {
            return refuse("a message of type remove needs the id of the message to remove".to_owned());
        }
        None | Some(Json::Null) => {
            map.insert("id".into(), json!(ids.text()));
        }
        Some(Json::String(id)) if id.is_empty() => {
            map.insert("id".into(), json!(ids.text()));
        }
        Some(Json::String(id)) if id == REMOVE_ALL_MESSAGES && kind != "remove" => {
            return refuse(format!("the id {REMOVE_ALL_MESSAGES} is reserved"));
        }
        Some(Json::String(_)) => {}
        Some(other) => return refuse(format!("the message id must be a string, not {}", self::kind(other))),
    }
    match map.get("content") {
        Some(Json::String(_) | Json::Array(_)) => {}
        None | Some(Json::Null) if kind == "remove" || kind == "ai" => {
            map.insert("content".into(), json!(""));
        }
        None | Some(Json::Null) => return refuse("the message has no content".to_owned()),
        Some(other) => {
            return refuse(format!(
                "the content must be a string or a list of blocks, not {}",
                self::kind(other)
            ));
        }
    }
    if kind == "tool" && !map.get("tool_call_id").is_some_and(Json::is_string) {
        return refuse("a tool message needs the tool_call_id that it answers".to_owned());
    }
    Ok(Json::Object(map))
}

fn kind(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "a boolean",
        Json::Number(_) => "a number",
        Json::String(_) => "a text",
        Json::Array(_) => "a list",
        Json::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(id: u8, text: u8) -> Json {
        json!({"type": "human", "content": format!("t{text}"), "id": format!("m{id}")})
    }

    /// A write is a list of: add or replace (even) or remove all (rare).
    fn write() -> impl Strategy<Value = Vec<Json>> {
        let item = prop_oneof![
            12 => (0..6_u8, any::<u8>()).prop_map(|(id, text)| message(id, text)),
            1 => Just(json!({"type": "remove", "id": REMOVE_ALL_MESSAGES, "content": ""})),
            3 => (0..6_u8).prop_map(|id| json!({"type": "remove", "id": format!("m{id}"), "content": ""})),
        ];
        prop::collection::vec(item, 0..8)
    }

    /// The obvious implementation on plain JSON.
    fn model(list: &mut Vec<Json>, message: &Json) -> Result<(), ()> {
        let place = list.iter().position(|m| m["id"] == message["id"]);
        match (message["type"] == "remove", place) {
            (false, Some(i)) => list[i] = message.clone(),
            (false, None) => list.push(message.clone()),
            (true, _) if message["id"] == REMOVE_ALL_MESSAGES => list.clear(),
            (true, Some(i)) => drop(list.remove(i)),
            (true, None) => return Err(()),
        }
        Ok(())
    }

    fn reduce(current: Option<ChannelValue>, write: &[Json]) -> Result<ChannelValue> {
        let write = ChannelValue::from_json(&Json::Array(write.to_vec())).unwrap();
        Messages.reduce(current.or_else(|| Messages.empty()).unwrap(), &write)
    }

    proptest! {
        #[test]
        fn folding_is_batching_invariant_and_equals_the_naive_fold(writes in prop::collection::vec(write(), 0..6)) {
            let mut naive = Vec::new();
            let expected = writes.iter().flatten().try_for_each(|m| model(&mut naive, m));
            let one_by_one = writes.iter().try_fold(None, |v, w| reduce(v, w).map(Some));
            let all: Vec<Json> = writes.iter().flatten().cloned().collect();
            let at_once = reduce(None, &all);
            if expected.is_err() {
                prop_assert!(one_by_one.is_err() && at_once.is_err());
            } else {
                let value = at_once.unwrap();
                prop_assert_eq!(value.to_json().unwrap(), Json::Array(naive));
                if let Some(other) = one_by_one.unwrap() { prop_assert_eq!(other, value); }
            }
        }
    }

    #[test]
    fn ids_are_assigned_once_by_prepare_and_kept_by_the_fold() {
        let ids = IdSource::default();
        let write =
            Messages.prepare(json!([{"role": "user", "content": "a"}, "b", {"type": "ai"}]), &ids).unwrap();
        let list = write.as_array().unwrap();
        assert_eq!(list[0]["type"], "human");
        assert_eq!(list[1]["content"], "b");
        assert_eq!(list[2]["content"], "");
        let drawn: Vec<_> = list.iter().map(|m| m["id"].as_str().unwrap().to_owned()).collect();
        assert_eq!(drawn.iter().collect::<std::collections::HashSet<_>>().len(), 3);
        let value = reduce(None, list).unwrap();
        assert_eq!(value.to_json().unwrap(), write);
        assert_eq!(Messages.prepare(write.clone(), &ids).unwrap(), write, "preparing again changes nothing");
    }

    #[test]
    fn malformed_messages_are_refused_with_a_reason() {
        let ids = IdSource::default();
        for (message, reason) in [
            (json!(3), "must be an object or a string, not a number"),
            (json!({"content": "x", "name": "y"}), "neither type nor role"),
            (json!({"role": "wizard", "content": "x"}), "unknown message type 'wizard'"),
            (json!({"type": 1, "content": "x"}), "type must be a string, not a number"),
            (json!({"type": "human"}), "has no content"),
            (
                json!({"type": "human", "content": {"a": 1}}),
                "content must be a string or a list of blocks, not an object",
            ),
            (json!({"type": "human", "content": "x", "id": 3}), "id must be a string, not a number"),
            (json!({"type": "tool", "content": "x"}), "needs the tool_call_id"),
            (json!({"type": "remove"}), "needs the id"),
            (json!({"type": "human", "content": "x", "id": "__remove_all__"}), "is reserved"),
        ] {
            let error = normalize_message(message.clone(), &ids).unwrap_err();
            assert!(error.to_string().contains(reason), "{message}: {error}");
        }
    }

    #[test]
    fn removing_an_unknown_id_is_an_invalid_update_that_names_it() {
        let remove = [json!({"type": "remove", "id": "m9", "content": ""})];
        assert!(reduce(None, &remove).unwrap_err().to_string().contains("cannot remove message m9"));
    }

    #[test]
    fn a_stored_null_counts_as_no_messages() {
        let null = ChannelValue::from_json(&Json::Null).unwrap();
        assert_eq!(reduce(Some(null), &[message(1, 1)]).unwrap().to_json().unwrap(), json!([message(1, 1)]));
    }
}

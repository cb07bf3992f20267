//! Converts stored values to what clients see.

mod rendered;

pub use rendered::Rendered;

use chrono::{DateTime, SecondsFormat, Utc};
use serde_json::{Map, Value, json};
use threadkeep::Result;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::metadata::Metadata;
use threadkeep::state::StateSnapshot;

use crate::model::message::is_hidden;

/// The prefix of channels that belong to another writer's graph runtime.
const RUNTIME_CHANNEL_PREFIX: &str = "__pregel_";

/// A time, ISO-8601 in UTC with microseconds.
pub fn time(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Micros, false)
}

/// Every loaded channel of a state. For text, [`Rendered::values`] is cheaper.
///
/// # Errors
/// [`threadkeep::Error::Corrupt`] if stored bytes do not decode.
pub fn values(state: &StateSnapshot) -> Result<Map<String, Value>> {
    values_of(state, |_| true)
}

/// As [`values`], of the channels that `shows` selects by their name.
///
/// # Errors
/// As [`values`].
pub fn values_of(state: &StateSnapshot, shows: impl Fn(&str) -> bool) -> Result<Map<String, Value>> {
    let shown = state.loaded().filter(|(name, _)| !is_runtime(name.as_str()) && shows(name.as_str()));
    let mut values =
        shown.map(|(name, value)| Ok((name.to_string(), value.to_json()?))).collect::<Result<Map<_, _>>>()?;
    if let Some(Value::Array(messages)) = values.get_mut(MESSAGES_CHANNEL) {
        messages.iter_mut().for_each(complete_message);
    }
    Ok(values)
}

/// Whether a channel is not for clients.
fn is_runtime(channel: &str) -> bool {
    channel.starts_with(RUNTIME_CHANNEL_PREFIX)
}

/// A checkpoint's metadata without credentials.
pub fn metadata(metadata: &Metadata) -> Map<String, Value> {
    let mut map = metadata.to_json();
    remove_secrets(&mut map);
    map
}

/// Whether a key names a credential. The names of headers are written with hyphens: `X-Api-Key`.
pub fn is_secret(key: &str) -> bool {
    let key = key.to_ascii_lowercase().replace('-', "_");
    let endings = ["secrets", "secret", "token", "password", "api_key", "apikey", "authorization"];
    endings.iter().any(|ending| key.ends_with(ending))
}

fn remove_secrets(map: &mut Map<String, Value>) {
    map.retain(|key, _| !is_secret(key));
    map.values_mut().for_each(remove_secrets_within);
}

fn remove_secrets_within(value: &mut Value) {
    match value {
        Value::Object(map) => remove_secrets(map),
        Value::Array(list) => list.iter_mut().for_each(remove_secrets_within),
        _ => {}
    }
}

/// Gives a message every field of its type, and removes the image data of a hidden one, which no client shows.
pub fn complete_message(message: &mut Value) {
    let hidden = is_hidden(message);
    let Value::Object(fields) = message else { return };
    if let Some(Value::Array(blocks)) = fields.get_mut("content")
        && hidden
    {
        blocks.retain(|block| !is_image_data(block));
    }
    for (field, default) in [
        ("content", json!("")),
        ("additional_kwargs", json!({})),
        ("response_metadata", json!({})),
        ("name", Value::Null),
        ("id", Value::Null),
    ] {
        fill(fields, field, default);
    }
    match fields.get("type").and_then(Value::as_str) {
        Some("ai") => {
            fill(fields, "tool_calls", json!([]));
            fill(fields, "invalid_tool_calls", json!([]));
            fill(fields, "usage_metadata", Value::Null);
            if let Some(Value::Array(calls)) = fields.get_mut("tool_calls") {
                for call in calls.iter_mut().filter_map(Value::as_object_mut) {
                    fill(call, "args", json!({}));
                    fill(call, "id", Value::Null);
                    fill(call, "type", json!("tool_call"));
                }
            }
        }
        Some("tool") => {
            fill(fields, "artifact", Value::Null);
            fill(fields, "status", json!("success"));
        }
        _ => {}
    }
}

/// Sets an absent or null field to its default.
fn fill(fields: &mut Map<String, Value>, field: &str, default: Value) {
    let value = fields.entry(field).or_insert(Value::Null);
    if value.is_null() {
        *value = default;
    }
}

/// Whether a content block contains an image, not just its URL.
fn is_image_data(block: &Value) -> bool {
    let is_data = |url: &Value| url.as_str().is_some_and(|url| url.starts_with("data:"));
    match block["type"].as_str() {
        Some("image_url") => is_data(&block["image_url"]) || is_data(&block["image_url"]["url"]),
        Some("image") => {
            is_data(&block["url"])
                || [&block["data"], &block["base64"], &block["source"]["data"]].iter().any(|d| d.is_string())
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use threadkeep::metadata::Source;

    use super::*;

    fn completed(mut message: Value) -> Value {
        complete_message(&mut message);
        message
    }

    #[test]
    fn each_type_of_message_has_its_fields() {
        let common = json!({"content": "x", "id": "1", "name": null, "additional_kwargs": {}, "response_metadata": {}});
        let with = |more: Value| {
            let mut message = common.clone();
            message.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            message
        };
        for kind in ["human", "system"] {
            assert_eq!(
                completed(json!({"type": kind, "content": "x", "id": "1"})),
                with(json!({"type": kind}))
            );
        }
        assert_eq!(
            completed(json!({"type": "ai", "content": "x", "id": "1", "tool_calls": [{"name": "ls"}]})),
            with(json!({
                "type": "ai", "invalid_tool_calls": [], "usage_metadata": null,
                "tool_calls": [{"name": "ls", "args": {}, "id": null, "type": "tool_call"}],
            }))
        );
        assert_eq!(
            completed(json!({"type": "tool", "content": "x", "id": "1", "tool_call_id": "c"})),
            with(json!({"type": "tool", "tool_call_id": "c", "artifact": null, "status": "success"}))
        );
    }

    #[test]
    fn fields_that_are_there_stay_and_null_containers_become_empty_ones() {
        let message = json!({
            "type": "tool", "content": [{"type": "text", "text": "x"}], "id": "1", "name": "ls",
            "additional_kwargs": {"a": 1}, "response_metadata": {"b": 2}, "tool_call_id": "c",
            "artifact": {"c": 3}, "status": "error", "unknown": 4,
        });
        assert_eq!(completed(message.clone()), message);
        let nulls =
            json!({"type": "ai", "id": "1", "content": null, "additional_kwargs": null, "tool_calls": null});
        let message = completed(nulls);
        assert_eq!(message["content"], "");
        assert_eq!(message["additional_kwargs"], json!({}));
        assert_eq!(message["tool_calls"], json!([]));
        assert_eq!(completed(json!("text")), "text");
    }

    #[test]
    fn image_data_leaves_hidden_messages_only() {
        let (text, link) = (
            json!({"type": "text", "text": "see"}),
            json!({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}),
        );
        let data = [
            json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
            json!({"type": "image_url", "image_url": "data:image/png;base64,AAAA"}),
            json!({"type": "image", "source": {"type": "base64", "data": "AAAA"}}),
            json!({"type": "image", "base64": "AAAA"}),
            json!({"type": "image", "data": "AAAA"}),
            json!({"type": "image", "url": "data:image/png;base64,AAAA"}),
        ];
        let blocks: Vec<Value> = [text.clone(), link.clone()].into_iter().chain(data).collect();
        let message = |hidden: bool| {
            let kwargs = if hidden { json!({"hide_from_ui": true}) } else { json!({}) };
            completed(json!({"type": "human", "content": blocks, "additional_kwargs": kwargs}))
        };
        assert_eq!(message(true)["content"], json!([text, link]));
        assert_eq!(message(false)["content"], json!(blocks));
    }

    #[test]
    fn metadata_keeps_the_marker_and_loses_credentials_at_any_depth() {
        let mut stored = Metadata::new(Source::Loop, 3);
        stored.delta_marker = true;
        stored.extra = json!({"run_id": "r", "github_token": "s1", "nested": {"API_KEY": "s2", "kept": 1}})
            .as_object()
            .unwrap()
            .clone()
            .into();
        assert_eq!(
            Value::Object(metadata(&stored)),
            json!({"source": "loop", "step": 3, "parents": {}, "svc_checkpoint_channel_mode": "delta",
                   "run_id": "r", "nested": {"kept": 1}})
        );
    }

    #[test]
    fn metadata_loses_the_credentials_in_lists_and_those_named_as_headers() {
        let mut stored = Metadata::new(Source::Loop, 3);
        let list = json!([{"api_key": "s1", "a": 1}, [{"sent": {"X-Api-Key": "s2", "b": 2}}], "c"]);
        stored.extra = Map::from_iter([("list".to_owned(), list)]).into();
        assert_eq!(metadata(&stored)["list"], json!([{"a": 1}, [{"sent": {"b": 2}}], "c"]));
    }

    #[test]
    fn times_have_microseconds_and_an_offset() {
        let moment = DateTime::from_timestamp_micros(1_700_000_000_000_005).unwrap();
        assert_eq!(time(moment), "2023-11-14T22:13:20.000005+00:00");
    }
}

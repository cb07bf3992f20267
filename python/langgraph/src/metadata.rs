//! LangGraph's metadata and the engine's.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};
use threadkeep::id::ChannelName;
use threadkeep::metadata::{COUNTERS_KEY, Counters, Metadata, Source};

/// The notes of what the engine's metadata cannot hold, by key: `null` for an absent one.
const NOTED: [(&str, &str); 4] = [("source", "ms"), ("step", "mp"), ("parents", "mq"), (COUNTERS_KEY, "mc")];
/// The note of the keys that are there with the value `null`.
const NULLS: &str = "mn";

/// Whether what LangGraph gives under a key may be noted.
pub(crate) fn is_noted(key: &str) -> bool {
    NOTED.iter().any(|(noted, _)| *noted == key)
}

/// The counters that LangGraph gives, of each channel.
pub(crate) fn counters(map: &Map<String, Json>) -> BTreeMap<ChannelName, Counters> {
    let given = map.get(COUNTERS_KEY).and_then(Json::as_object).into_iter().flatten();
    given
        .filter_map(|(channel, pair)| {
            let at = |i: usize| pair.get(i).and_then(Json::as_u64);
            let counters = Counters { updates: at(0)?, supersteps: at(1)? };
            Some((channel.as_str().into(), counters))
        })
        .collect()
}

/// The engine's metadata, and the notes. `stored` are the counters of the channels that are stored as changes.
pub(crate) fn split(
    mut map: Map<String, Json>,
    stored: BTreeMap<ChannelName, Counters>,
) -> (Metadata, Map<String, Json>) {
    let given = map.clone();
    let source = map.remove("source").and_then(|source| serde_json::from_value(source).ok());
    let step = map.remove("step").and_then(|step| step.as_i64());
    let mut metadata = Metadata::new(source.unwrap_or(Source::Input), step.unwrap_or(-2));
    if let Some(Json::Object(parents)) = map.remove("parents") {
        for (namespace, id) in parents {
            if let Some(id) = id.as_str().and_then(|id| id.parse().ok()) {
                metadata.parents.insert(namespace.into(), id);
            }
        }
    }
    map.remove(COUNTERS_KEY);
    metadata.delta_marker = !stored.is_empty();
    metadata.counters = stored;
    metadata.extra = map.into();
    let shown = shown(&metadata);
    let mut notes = Map::new();
    let mut nulls = Vec::new();
    for (key, note) in NOTED {
        match given.get(key) {
            Some(Json::Null) => nulls.push(key),
            value if value == shown.get(key) => {}
            value => {
                notes.insert(note.to_owned(), value.cloned().unwrap_or(Json::Null));
            }
        }
    }
    if !nulls.is_empty() {
        notes.insert(NULLS.to_owned(), json!(nulls));
    }
    (metadata, notes)
}

/// The reverse of [`split`]. Takes its notes away.
pub(crate) fn join(metadata: &Metadata, notes: &mut Map<String, Json>) -> Map<String, Json> {
    let mut map = shown(metadata);
    for (key, note) in NOTED {
        match notes.remove(note) {
            None => {}
            Some(Json::Null) => {
                map.remove(key);
            }
            Some(value) => {
                map.insert(key.to_owned(), value);
            }
        }
    }
    let nulls = notes.remove(NULLS);
    for key in nulls.iter().filter_map(Json::as_array).flatten().filter_map(Json::as_str) {
        map.insert(key.to_owned(), Json::Null);
    }
    map
}

/// The metadata as LangGraph sees them, without notes.
fn shown(metadata: &Metadata) -> Map<String, Json> {
    let mut map = metadata.extra.to_map();
    map.insert("source".to_owned(), json!(metadata.source));
    map.insert("step".to_owned(), json!(metadata.step));
    let parents = metadata.parents.iter().map(|(ns, id)| (ns.to_string(), json!(id.to_string()))).collect();
    map.insert("parents".to_owned(), Json::Object(parents));
    if !metadata.counters.is_empty() {
        let counters = metadata.counters.iter();
        let counters = counters.map(|(name, c)| (name.to_string(), json!([c.updates, c.supersteps])));
        map.insert(COUNTERS_KEY.to_owned(), Json::Object(counters.collect()));
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_of_any_form_comes_back() {
        let id = "1ef4f797-8335-6428-8001-8a1503f9b875";
        for json in [
            json!({"source": "loop", "step": 3, "parents": {}, "run_id": "r", "n": 1.5}),
            json!({"step": -2}),
            json!({}),
            json!({"source": null}),
            json!({"source": null, "step": null, "parents": null, "n": null, COUNTERS_KEY: null}),
            json!({"source": "elsewhere", "step": "x", "parents": {"": "no id", "a": id}}),
            json!({"source": "input", "step": 1, "parents": {"": id}, COUNTERS_KEY: {"a": [1, 2], "b": [0, 4]}}),
        ] {
            let map = json.as_object().unwrap().clone();
            let mut stored = counters(&map);
            stored.retain(|channel, _| channel.as_str() == "a");
            let (metadata, mut notes) = split(map.clone(), stored);
            assert_eq!(join(&metadata, &mut notes), map);
            assert!(notes.is_empty());
        }
    }
}

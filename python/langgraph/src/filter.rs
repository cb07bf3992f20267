//! Filters of metadata, which compare as Python does: as LangGraph's savers in memory and on SQLite.

use serde_json::{Map, Number, Value as Json};
use threadkeep::metadata::Source;

use crate::metadata::is_noted;

/// The part of a filter that a saver decides alike: it compares as JSON, where 1 is not 1.0 and `null` is not absence, and it
/// sees the engine's metadata.
pub(crate) fn exact(filter: &Map<String, Json>) -> Map<String, Json> {
    let is_exact = |key: &String, value: &Json| match key.as_str() {
        "source" => serde_json::from_value::<Source>(value.clone()).is_ok(),
        key => !is_noted(key) && is_plain(value),
    };
    filter.iter().filter(|(key, value)| is_exact(key, value)).map(|(k, v)| (k.clone(), v.clone())).collect()
}

/// Whether metadata have all values of a filter. An absent one is `null`.
pub(crate) fn matches(filter: &Map<String, Json>, metadata: &Map<String, Json>) -> bool {
    filter.iter().all(|(key, value)| is_equal(metadata.get(key).unwrap_or(&Json::Null), value))
}

/// Whether there is one way to write an equal value.
fn is_plain(value: &Json) -> bool {
    match value {
        Json::Null | Json::Number(_) => false,
        Json::Bool(_) | Json::String(_) => true,
        Json::Array(items) => items.iter().all(is_plain),
        Json::Object(map) => map.values().all(is_plain),
    }
}

fn is_equal(one: &Json, other: &Json) -> bool {
    match (one, other) {
        (Json::Number(one), Json::Number(other)) => is_equal_number(one, other),
        (Json::Array(one), Json::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| is_equal(one, other))
        }
        (Json::Object(one), Json::Object(other)) => {
            one.len() == other.len()
                && one.iter().all(|(key, value)| other.get(key).is_some_and(|found| is_equal(value, found)))
        }
        _ => one == other,
    }
}

fn is_equal_number(one: &Number, other: &Number) -> bool {
    // Two integers, or two floats. Integers are not compared as floats, which have fewer digits.
    if one.is_f64() == other.is_f64() { one == other } else { one.as_f64() == other.as_f64() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_compare_as_in_python() {
        let metadata =
            json!({"n": 1, "f": 2.5, "t": true, "none": null, "deep": {"a": [1, null, "x"]}, "s": "x"});
        for (filter, expected) in [
            (json!({}), true),
            (json!({"n": 1}), true),
            (json!({"n": 1.0}), true),
            (json!({"n": 1.5}), false),
            (json!({"n": "1"}), false),
            (json!({"f": 2.5, "s": "x"}), true),
            (json!({"none": null}), true),
            (json!({"absent": null}), true),
            (json!({"s": null}), false),
            (json!({"absent": "x"}), false),
            (json!({"deep": {"a": [1.0, null, "x"]}}), true),
            (json!({"deep": {"a": [1.0, "x"]}}), false),
            (json!({"deep": {"a": [1, null, "x"], "b": null}}), false),
            (json!({"n": 9_007_199_254_740_993_i64}), false),
        ] {
            let found = matches(filter.as_object().unwrap(), metadata.as_object().unwrap());
            assert_eq!(found, expected, "{filter}");
        }
        assert!(!is_equal(&json!(9_007_199_254_740_993_i64), &json!(9_007_199_254_740_992_i64)));
    }

    #[test]
    fn a_saver_decides_what_it_compares_alike() {
        let filter = json!({
            "source": "loop", "step": 1, "parents": {}, "who": "x", "yes": true, "n": 1, "none": null, "list": ["a", ["b"]],
            "mixed": ["a", 1],
        });
        let exact = exact(filter.as_object().unwrap());
        assert_eq!(
            Json::Object(exact),
            json!({"source": "loop", "who": "x", "yes": true, "list": ["a", ["b"]]})
        );
        let other = json!({"source": "elsewhere"});
        assert!(super::exact(other.as_object().unwrap()).is_empty());
    }
}

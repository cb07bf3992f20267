//! Filters of metadata, which compare as Python does: as LangGraph's savers in memory and on SQLite.

use serde_json::{Map, Value as Json};
use threadkeep::metadata::Source;

use crate::metadata::is_noted;

/// The part of a filter that a saver decides alike: it compares as JSON, where 1 is neither 1.0 nor `true` and `null` is not
/// absence, and it sees the engine's metadata.
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
        Json::Null | Json::Bool(_) | Json::Number(_) => false,
        Json::String(_) => true,
        Json::Array(items) => items.iter().all(is_plain),
        Json::Object(map) => map.values().all(is_plain),
    }
}

fn is_equal(one: &Json, other: &Json) -> bool {
    match (one, other) {
        (Json::Array(one), Json::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| is_equal(one, other))
        }
        (Json::Object(one), Json::Object(other)) => {
            one.len() == other.len()
                && one.iter().all(|(key, value)| other.get(key).is_some_and(|found| is_equal(value, found)))
        }
        _ => match (Number::of(one), Number::of(other)) {
            (Some(one), Some(other)) => one.is_equal(other),
            _ => one == other,
        },
    }
}

/// A number as Python compares it: `True` is 1, and an integer is not rounded to a float, which has fewer digits.
#[derive(Clone, Copy)]
enum Number {
    Integer(i128),
    Float(f64),
}

impl Number {
    fn of(value: &Json) -> Option<Self> {
        match value {
            Json::Bool(truth) => Some(Self::Integer(i128::from(*truth))),
            Json::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(integer), _) => Some(Self::Integer(integer.into())),
                (None, Some(integer)) => Some(Self::Integer(integer.into())),
                (None, None) => number.as_f64().map(Self::Float),
            },
            _ => None,
        }
    }

    fn is_equal(self, other: Self) -> bool {
        match (self, other) {
            (Self::Integer(one), Self::Integer(other)) => one == other,
            #[expect(clippy::float_cmp, reason = "as Python does")]
            (Self::Float(one), Self::Float(other)) => one == other,
            (Self::Integer(integer), Self::Float(float)) | (Self::Float(float), Self::Integer(integer)) => {
                // No integer has as many digits as those that the conversion cuts off.
                #[expect(clippy::cast_possible_truncation, reason = "such a float is no integer of 64 bits")]
                let whole = float as i128;
                float.fract() == 0.0 && whole == integer
            }
        }
    }
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
            (json!({"n": true, "t": 1}), true),
            (json!({"n": true, "t": 1.0}), true),
            (json!({"n": false}), false),
            (json!({"t": 0}), false),
            (json!({"t": "true"}), false),
            (json!({"deep": {"a": [true, null, "x"]}}), true),
            (json!({"deep": {"a": [true, false, "x"]}}), false),
        ] {
            let found = matches(filter.as_object().unwrap(), metadata.as_object().unwrap());
            assert_eq!(found, expected, "{filter}");
        }
        for (one, other, expected) in [
            (json!(9_007_199_254_740_993_i64), json!(9_007_199_254_740_992_i64), false),
            (json!(9_007_199_254_740_993_i64), json!(9_007_199_254_740_992.0), false),
            (json!(9_007_199_254_740_992_i64), json!(9_007_199_254_740_992.0), true),
            (json!(u64::MAX), json!(18_446_744_073_709_551_616.0), false),
            (json!(i64::MIN), json!(-9_223_372_036_854_775_808.0), true),
            (json!(0), json!(-0.0), true),
            (json!(false), json!(-0.0), true),
            (json!(u64::MAX), json!(1e300), false),
        ] {
            assert_eq!(is_equal(&one, &other), expected, "{one} and {other}");
            assert_eq!(is_equal(&other, &one), expected, "{other} and {one}");
        }
    }

    #[test]
    fn a_saver_decides_what_it_compares_alike() {
        let filter = json!({
            "source": "loop", "step": 1, "parents": {}, "who": "x", "yes": true, "n": 1, "none": null, "list": ["a", ["b"]],
            "mixed": ["a", 1], "flags": [true],
        });
        let exact = exact(filter.as_object().unwrap());
        assert_eq!(Json::Object(exact), json!({"source": "loop", "who": "x", "list": ["a", ["b"]]}));
        let other = json!({"source": "elsewhere"});
        assert!(super::exact(other.as_object().unwrap()).is_empty());
    }
}

//! Checks a call's arguments against the tool's schema, after those are converted that a model wrote in another type.

use serde_json::Value;

/// Checks required arguments and the types of given ones, by the JSON schema's `required`, `type`, `enum`, `items` and
/// `properties`. Null means that an optional argument is omitted. The error names the argument and its expected type.
pub(super) fn check(schema: &Value, args: &Value) -> Result<(), String> {
    check_value(schema, args, "")
}

fn check_value(schema: &Value, value: &Value, place: &str) -> Result<(), String> {
    let shown = || if place.is_empty() { "the arguments".to_owned() } else { format!("argument `{place}`") };
    let types = type_names(schema);
    if !types.is_empty() && !types.iter().any(|name| has_type(value, name)) {
        return Err(format!("{} must be {}, not {}", shown(), types.join(" or "), type_of(value)));
    }
    if let Some(allowed) = schema["enum"].as_array()
        && !allowed.contains(value)
    {
        let allowed: Vec<String> = allowed.iter().map(Value::to_string).collect();
        return Err(format!("{} must be one of {}", shown(), allowed.join(", ")));
    }
    if let Value::Object(fields) = value {
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        if let Some(missing) = required.iter().find(|name| !fields.contains_key(**name)) {
            return Err(format!("argument `{}` is missing", inside(place, missing)));
        }
        for (name, field) in fields {
            let not_given = field.is_null() && !required.contains(&name.as_str());
            if let Some(property) = schema["properties"].get(name)
                && !not_given
            {
                check_value(property, field, &inside(place, name))?;
            }
        }
    }
    if let (Value::Array(items), Some(schema)) = (value, schema.get("items")) {
        for (index, item) in items.iter().enumerate() {
            check_value(schema, item, &format!("{place}[{index}]"))?;
        }
    }
    Ok(())
}

/// `value` with the types of `schema` where a model wrote another one: a list, an object, a number or a boolean as the
/// text of its JSON, and an integer as `1.0`. Everything else stays as it is, for [`check`].
pub(super) fn fitted(schema: &Value, value: Value) -> Value {
    let types = type_names(schema);
    let is_taken = |value: &Value| types.iter().any(|name| has_type(value, name));
    let value = if types.is_empty() || is_taken(&value) {
        value
    } else {
        converted(&value).filter(is_taken).unwrap_or(value)
    };
    match (value, schema.get("items")) {
        (Value::Object(mut fields), _) => {
            for (name, field) in &mut fields {
                if let Some(property) = schema["properties"].get(name) {
                    *field = fitted(property, field.take());
                }
            }
            Value::Object(fields)
        }
        (Value::Array(items), Some(schema)) => items.into_iter().map(|item| fitted(schema, item)).collect(),
        (value, _) => value,
    }
}

/// The JSON in a text, and the integer that a float is.
fn converted(value: &Value) -> Option<Value> {
    match value {
        Value::String(text) => threadkeep::json::from_str(text).ok(),
        Value::Number(number) if number.is_f64() => {
            let float = number.as_f64().filter(|float| float.fract() == 0.0)?;
            format!("{float:.0}").parse::<i64>().ok().map(Value::from)
        }
        _ => None,
    }
}

fn inside(place: &str, name: &str) -> String {
    if place.is_empty() { name.to_owned() } else { format!("{place}.{name}") }
}

fn type_names(schema: &Value) -> Vec<&str> {
    match &schema["type"] {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

fn has_type(value: &Value, name: &str) -> bool {
    match name {
        "integer" => value.is_i64() || value.is_u64(),
        name => type_of(value) == name,
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn arguments_are_checked_and_the_error_names_the_place() {
        let schema = json!({
            "type": "object",
            "required": ["path"],
            "properties": {
                "path": {"type": "string"},
                "line": {"type": "integer"},
                "mode": {"enum": ["a", "b"]},
                "note": {"type": ["string", "null"]},
                "ratio": {"type": "number"},
                "items": {"type": "array", "items": {
                    "type": "object", "required": ["key"], "properties": {"key": {"type": "string"}},
                }},
            },
        });
        let good = [
            json!({"path": "x"}),
            json!({"path": "x", "line": 3, "mode": "b", "note": null, "ratio": 1, "extra": {}}),
            json!({"path": "x", "line": null, "items": [{"key": "k"}]}),
        ];
        for args in good {
            assert_eq!(check(&schema, &args), Ok(()), "{args}");
        }
        let bad = [
            (json!([]), "the arguments must be object, not array"),
            (json!({}), "argument `path` is missing"),
            (json!({"path": null}), "argument `path` must be string, not null"),
            (json!({"path": 1}), "argument `path` must be string, not number"),
            (json!({"path": "x", "line": 1.5}), "argument `line` must be integer, not number"),
            (json!({"path": "x", "line": "1"}), "argument `line` must be integer, not string"),
            (json!({"path": "x", "mode": "c"}), "argument `mode` must be one of \"a\", \"b\""),
            (json!({"path": "x", "note": 1}), "argument `note` must be string or null, not number"),
            (json!({"path": "x", "items": [{"key": "k"}, {}]}), "argument `items[1].key` is missing"),
        ];
        for (args, error) in bad {
            assert_eq!(check(&schema, &args), Err(error.to_owned()), "{args}");
        }
    }

    #[test]
    fn what_a_model_wrote_in_another_type_is_converted() {
        let schema = json!({
            "type": "object",
            "properties": {
                "line": {"type": "integer"},
                "most": {"type": ["integer", "null"]},
                "ratio": {"type": "number"},
                "all": {"type": "boolean"},
                "text": {"type": "string"},
                "either": {"type": ["string", "array"]},
                "any": {},
                "items": {"type": "array", "items": {
                    "type": "object", "properties": {"key": {"type": "string"}, "list": {"type": "array"}},
                }},
            },
        });
        for (written, expected) in [
            (json!({"line": "3"}), json!({"line": 3})),
            (json!({"line": 3.0, "ratio": "0.5"}), json!({"line": 3, "ratio": 0.5})),
            (json!({"most": "null", "all": "true"}), json!({"most": null, "all": true})),
            (
                json!({"items": r#"[{"key": "1", "list": "[\"a\"]"}]"#}),
                json!({"items": [{"key": "1", "list": ["a"]}]}),
            ),
            (json!({"items": [r#"{"key": "k"}"#]}), json!({"items": [{"key": "k"}]})),
        ] {
            let fitted = fitted(&schema, written);
            assert_eq!(fitted, expected);
            assert_eq!(check(&schema, &fitted), Ok(()));
        }
        for kept in [
            json!({"text": "[1]", "either": "[1]", "any": "[1]", "other": "1"}),
            json!({"line": "x", "ratio": "", "all": "yes", "items": "a, b"}),
            json!({"line": 1.5, "text": 1, "ratio": 2.0}),
            json!({"line": "18446744073709551616"}),
            json!([1]),
        ] {
            assert_eq!(fitted(&schema, kept.clone()), kept);
        }
    }
}

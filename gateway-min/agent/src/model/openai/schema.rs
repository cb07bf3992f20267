//! The schemas of tools, as providers accept them.

use serde_json::{Map, Value, json};

/// The keywords whose value has a schema for each of its keys.
const BY_NAME: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];
/// The keywords whose value is a schema or a list of schemas.
const NESTED: [&str; 6] = ["items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf"];
/// Keywords that were booleans in older drafts, as OpenAPI 3.0 still has them.
const NO_LONGER_BOOLEAN: [&str; 3] = ["exclusiveMinimum", "exclusiveMaximum", "required"];

/// The schema of a tool, as providers accept it.
pub(super) fn accepted(schema: &Value) -> Value {
    let mut schema = with_items(schema);
    spell_out(&mut schema);
    schema
}

/// The schema, with `items` wherever a list is described without them. JSON Schema allows that, and such tools of MCP
/// servers are common, but providers refuse every request with one. Empty `items` say no more than none. They also
/// refuse keywords in the form of older drafts: an `items` for each place of a list becomes one for all of them.
fn with_items(schema: &Value) -> Value {
    let mut schema = schema.clone();
    complete(&mut schema);
    schema
}

fn complete(schema: &mut Value) {
    let Value::Object(keywords) = schema else { return };
    keywords.retain(|keyword, value| !is_refused(keyword, value));
    if let Some(Value::Array(places)) = keywords.get("items") {
        let mut kinds: Vec<Value> = Vec::new();
        for place in places {
            if !kinds.contains(place) {
                kinds.push(place.clone());
            }
        }
        let items = match kinds.len() {
            0 => json!({}),
            1 => kinds.remove(0),
            _ => json!({"anyOf": kinds}),
        };
        keywords.insert("items".to_owned(), items);
    }
    if describes_lists(keywords) && !keywords.contains_key("items") {
        keywords.insert("items".to_owned(), Value::Object(Map::new()));
    }
    each_within(keywords, complete);
}

/// Whether providers refuse every request with this: a boolean of an older draft, or a pattern for a part of a text,
/// of which llama.cpp makes no grammar. The server of the tool checks its arguments.
fn is_refused(keyword: &str, value: &Value) -> bool {
    match value {
        Value::Bool(_) => NO_LONGER_BOOLEAN.contains(&keyword),
        Value::String(pattern) => {
            keyword == "pattern" && !(pattern.starts_with('^') && pattern.ends_with('$'))
        }
        _ => false,
    }
}

/// Replaces the schema `true`, which anything fits, by the empty one, which means the same. Servers of MCP in Go and
/// .NET describe an argument of any type with it, and llama.cpp, Ollama and others refuse every request with one.
fn spell_out(schema: &mut Value) {
    match schema {
        Value::Bool(true) => *schema = json!({}),
        Value::Object(keywords) => each_within(keywords, spell_out),
        _ => {}
    }
}

/// Mends each schema directly within one.
fn each_within(keywords: &mut Map<String, Value>, mend: fn(&mut Value)) {
    for (keyword, value) in keywords {
        match value {
            // Providers take it here, and only here.
            Value::Bool(_) if keyword == "additionalProperties" => {}
            Value::Object(schemas) if BY_NAME.contains(&keyword.as_str()) => {
                schemas.values_mut().for_each(mend);
            }
            Value::Array(schemas) if NESTED.contains(&keyword.as_str()) => {
                schemas.iter_mut().for_each(mend);
            }
            schema if NESTED.contains(&keyword.as_str()) => mend(schema),
            _ => {}
        }
    }
}

fn describes_lists(keywords: &Map<String, Value>) -> bool {
    match keywords.get("type") {
        Some(Value::Array(types)) => types.iter().any(|name| name == "array"),
        Some(name) => name == "array",
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::body;
    use super::*;
    use crate::model::{ModelKind, ModelRequest, ModelSettings, ToolSpec};

    #[test]
    fn a_request_describes_the_items_of_every_list() {
        let spec = ToolSpec {
            name: "task".into(),
            description: "Delegates".into(),
            parameters: json!({"type": "object", "properties": {"criteria": {"type": "array"}}}),
        };
        let request = ModelRequest { tools: vec![spec], ..ModelRequest::default() };
        let settings = ModelSettings::new("m", ModelKind::OpenAiCompatible, "gpt-x");
        let sent = body(&settings, &request).unwrap();
        assert_eq!(
            sent["tools"][0]["function"]["parameters"]["properties"],
            json!({"criteria": {"type": "array", "items": {}}})
        );
    }

    #[test]
    fn items_are_added_at_any_depth_and_nothing_else_changes() {
        let places: [fn(&Value) -> Value; 6] = [
            Value::clone,
            |schema| json!({"properties": {"items": schema, "type": {"type": "string"}}, "required": ["items"]}),
            |schema| json!({"type": "array", "items": {"type": "array", "items": schema}}),
            |schema| json!({"anyOf": [schema, {"type": "null"}], "default": {"type": "array"}}),
            |schema| json!({"additionalProperties": schema, "enum": [{"type": "array"}]}),
            |schema| json!({"$defs": {"list": schema}, "$ref": "#/$defs/list"}),
        ];
        let whole = json!({"type": "array", "items": {"type": "integer"}, "minItems": 1});
        for (given, expected) in [
            (json!({"type": "array"}), json!({"type": "array", "items": {}})),
            (json!({"type": ["array", "null"]}), json!({"type": ["array", "null"], "items": {}})),
            (whole.clone(), whole),
            (json!({"type": "string"}), json!({"type": "string"})),
            (json!(true), json!(true)),
        ] {
            for place in places {
                assert_eq!(with_items(&place(&given)), place(&expected));
            }
        }
    }

    #[test]
    fn an_argument_of_any_type_has_an_empty_schema_in_a_request() {
        let with = |any: Value| {
            json!({
                "type": "object", "properties": {"data": any, "list": {"type": "array", "items": any}},
                "anyOf": [any, {"$ref": "#/$defs/any"}], "$defs": {"any": any},
                "additionalProperties": true, "default": true,
            })
        };
        let spec = ToolSpec { name: "set".into(), description: "Sets".into(), parameters: with(json!(true)) };
        let request = ModelRequest { tools: vec![spec], ..ModelRequest::default() };
        let settings = ModelSettings::new("m", ModelKind::OpenAiCompatible, "gpt-x");
        let sent = body(&settings, &request).unwrap();
        assert_eq!(sent["tools"][0]["function"]["parameters"], with(json!({})));
    }

    #[test]
    fn a_pattern_for_a_part_of_a_text_is_not_sent() {
        let argument = |schema: Value| json!({"properties": {"pattern": schema}, "required": ["pattern"]});
        let with = |pattern: &str| argument(json!({"type": "string", "pattern": pattern}));
        let whole = with("^[a-z]+$");
        assert_eq!(accepted(&whole), whole);
        for part in ["[a-z]+", "^a", "b$"] {
            assert_eq!(accepted(&with(part)), argument(json!({"type": "string"})), "{part}");
        }
    }

    #[test]
    fn keywords_of_older_drafts_become_those_of_today() {
        let (text, number) = (json!({"type": "string"}), json!({"type": "number"}));
        let list = |items: Value| json!({"type": "array", "items": items, "minItems": 2});
        let ratio = json!({"type": "number", "minimum": 0, "exclusiveMinimum": true, "required": true});
        for (given, expected) in [
            (list(json!([number, number, number])), list(number.clone())),
            (list(json!([text, number])), list(json!({"anyOf": [text, number]}))),
            (list(json!([])), list(json!({}))),
            (list(json!([{"type": "array"}])), list(list_of_anything())),
            (ratio, json!({"type": "number", "minimum": 0})),
            (json!({"minimum": 0, "exclusiveMinimum": 0}), json!({"minimum": 0, "exclusiveMinimum": 0})),
        ] {
            let inside =
                |schema: &Value| json!({"properties": {"required": schema}, "required": ["required"]});
            assert_eq!(with_items(&inside(&given)), inside(&expected));
        }
    }

    fn list_of_anything() -> Value {
        json!({"type": "array", "items": {}})
    }
}

//! The schema of a tool's arguments, as providers accept it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json, json};

/// The keywords with which a schema is composed of others. Providers refuse every request with a tool that has one of
/// them at the top.
const COMPOSING: [&str; 4] = ["$ref", "allOf", "anyOf", "oneOf"];
/// The most schemas that one is composed of; a schema may refer to itself.
const PARTS_MAX: usize = 200;

/// The schema of a tool's arguments. That of a tool without any often has no `properties`, or null for them and for
/// `required`; OpenAI refuses every request with such a tool. One that is composed of others becomes one object with
/// the properties of all of them: the server checks what it is called with.
pub(crate) fn parameters(schema: &Map<String, Json>) -> Json {
    let mut flat = schema.clone();
    flat.retain(|_, value| !value.is_null());
    if COMPOSING.iter().any(|keyword| flat.contains_key(*keyword)) {
        let whole = Json::Object(flat.clone());
        let fields = fields(&whole, &whole, &mut 0);
        flat.retain(|keyword, _| !COMPOSING.contains(&keyword.as_str()) && keyword != "required");
        if !fields.required.is_empty() {
            flat.insert("required".to_owned(), json!(fields.required));
        }
        let properties = fields.properties.into_iter().map(|(name, of_parts)| (name, any_of(of_parts)));
        flat.insert("properties".to_owned(), Json::Object(properties.collect()));
    }
    flat.retain(|keyword, _| keyword != "enum" && keyword != "not");
    flat.insert("type".to_owned(), "object".into());
    flat.entry("properties").or_insert_with(|| Map::new().into());
    Json::Object(flat)
}

/// What an object may have.
#[derive(Default)]
struct Fields {
    /// By name, each as the parts of the schema describe it.
    properties: BTreeMap<String, Vec<Json>>,
    required: BTreeSet<String>,
}

impl Fields {
    fn add(&mut self, properties: BTreeMap<String, Vec<Json>>) {
        for (name, described) in properties {
            let known = self.properties.entry(name).or_default();
            for one in described {
                if !known.contains(&one) {
                    known.push(one);
                }
            }
        }
    }
}

/// The fields of a schema and of all that it is composed of. How it describes a property itself goes first.
fn fields(schema: &Json, whole: &Json, parts: &mut usize) -> Fields {
    let mut found = Fields::default();
    *parts += 1;
    if *parts > PARTS_MAX {
        return found;
    }
    let target = schema["$ref"].as_str().and_then(|place| whole.pointer(place.strip_prefix('#')?));
    for part in schema["allOf"].as_array().into_iter().flatten().chain(target) {
        let part = fields(part, whole, parts);
        found.required.extend(part.required);
        found.add(part.properties);
    }
    for keyword in ["anyOf", "oneOf"] {
        let mut required_by_all: Option<BTreeSet<String>> = None;
        for part in schema[keyword].as_array().into_iter().flatten() {
            let part = fields(part, whole, parts);
            required_by_all = Some(match required_by_all {
                Some(required) => &required & &part.required,
                None => part.required,
            });
            found.add(part.properties);
        }
        found.required.extend(required_by_all.unwrap_or_default());
    }
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        found.properties.insert(name.clone(), vec![property.clone()]);
    }
    let required = schema["required"].as_array().into_iter().flatten();
    found.required.extend(required.filter_map(Json::as_str).map(str::to_owned));
    found
}

fn any_of(mut schemas: Vec<Json>) -> Json {
    if schemas.len() == 1 { schemas.remove(0) } else { json!({"anyOf": schemas}) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat(schema: &Json) -> Json {
        parameters(schema.as_object().unwrap())
    }

    #[test]
    fn a_schema_that_is_composed_of_others_becomes_one_object() {
        let (text, number) = (json!({"type": "string"}), json!({"type": "integer"}));
        let by = |name: &str, kind: &Json| {
            let mut properties = Map::from_iter([("kind".to_owned(), kind.clone())]);
            properties.insert(name.to_owned(), text.clone());
            json!({"type": "object", "properties": properties, "required": [name, "kind"]})
        };
        let (file, link) = (json!({"const": "file"}), json!({"const": "link"}));
        for keyword in ["anyOf", "oneOf"] {
            let schema = json!({"type": "object", keyword: [by("path", &file), by("url", &link)]});
            let kind = json!({"anyOf": [file, link]});
            assert_eq!(
                flat(&schema),
                json!({
                    "type": "object", "required": ["kind"],
                    "properties": {"kind": kind, "path": text, "url": text},
                })
            );
        }
        // Either of two that are described beside the alternatives.
        let either = json!({
            "type": "object", "properties": {"a": text, "b": number}, "required": ["a"],
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "not": {"required": ["c"]},
        });
        assert_eq!(
            flat(&either),
            json!({"type": "object", "properties": {"a": text, "b": number}, "required": ["a"]})
        );
        let all = json!({
            "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": number}, "required": ["b"]}],
            "$defs": {"base": {"type": "object", "properties": {"a": text}, "required": ["a"]}},
        });
        let flattened = flat(&all);
        assert_eq!(flattened["properties"], json!({"a": text, "b": number}));
        assert_eq!(flattened["required"], json!(["a", "b"]));
        assert_eq!(flattened["$defs"], all["$defs"], "what properties refer to stays");
        assert!(flattened.get("allOf").is_none());
    }

    #[test]
    fn a_schema_that_refers_to_itself_has_an_end() {
        let itself = json!({"$ref": "#"});
        let schema = json!({"allOf": vec![itself; 50], "properties": {"a": {"type": "string"}}});
        assert_eq!(flat(&schema), json!({"type": "object", "properties": {"a": {"type": "string"}}}));
        let nowhere = json!({"$ref": "#/$defs/none"});
        assert_eq!(flat(&nowhere), json!({"type": "object", "properties": {}}));
    }

    /// Alternatives within a property are accepted.
    #[test]
    fn what_properties_are_composed_of_stays() {
        let schema = json!({
            "type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
            "required": ["a"], "additionalProperties": false,
        });
        assert_eq!(flat(&schema), schema);
    }
}

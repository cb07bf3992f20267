//! What the OpenAPI document needs besides the types that routes read and write.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};
use threadkeep::channel::ChannelTable;
use utoipa::openapi::{Info, OpenApi, Server};
use utoipa::{IntoResponses, ToSchema};

use super::described;

/// The body of an error response.
#[derive(Debug, ToSchema)]
#[allow(dead_code, reason = "described, never built: `ApiError` is what routes return")]
pub(crate) struct ErrorBody {
    /// The error as text; for an invalid request, the list of its problems.
    detail: Value,
}

/// The errors of routes that read state through the gate.
#[derive(Debug, IntoResponses)]
#[allow(dead_code, reason = "described, never built: `ApiError` is what routes return")]
pub(crate) enum Gated {
    /// The thread has delta checkpoints, and this process runs in full mode; or another writer is active on the thread
    #[response(status = 409)]
    Conflict(ErrorBody),
    /// The request is not valid
    #[response(status = 422)]
    Invalid(ErrorBody),
    /// The store failed; the log says why
    #[response(status = 500)]
    Failed(ErrorBody),
}

/// The errors of routes that create a run.
#[derive(Debug, IntoResponses)]
#[allow(dead_code, reason = "described, never built: `ApiError` is what routes return")]
pub(crate) enum RunRefused {
    /// No such thread or checkpoint
    #[response(status = 404)]
    NotFound(ErrorBody),
    /// The thread has an active run, a full queue, or nothing that waits for an answer
    #[response(status = 409)]
    Conflict(ErrorBody),
}

/// The errors of commands.
#[derive(Debug, IntoResponses)]
#[allow(dead_code, reason = "described, never built: `Refusal` is what commands return")]
pub(crate) enum CommandRefused {
    /// No such thread, run, checkpoint, namespace or question
    #[response(status = 404)]
    NotFound(ErrorBody),
    /// The thread has an active run, a full queue, or nothing that waits for an answer
    #[response(status = 409)]
    Conflict(ErrorBody),
}

/// The OpenAPI document, without the routes.
pub(crate) fn document() -> OpenApi {
    let info = Info::builder().title("Threadkeep").version(env!("CARGO_PKG_VERSION")).description(Some(
        "Threads of agents, their state and their runs. Every route below `/api` also answers below `/api/langgraph`.",
    ));
    OpenApi::builder().info(info.build()).servers(Some([Server::new("/")])).build()
}

/// Schemas with `select`: with a selection, any of their fields may be absent.
const SELECTABLE: [&str; 2] = ["Thread", "ThreadState"];

/// Requests whose unknown fields are ignored, because the contract says so.
const OPEN: [&str; 2] = ["NewSubagent", "SubagentChange"];

/// What any operation may answer.
const COMMON: [(&str, &str); 8] = [
    ("400", "The path, the query or the body cannot be read"),
    ("401", "No valid key, on a gateway with keys"),
    ("403", "A page of another site, or a host that this gateway does not answer for"),
    ("408", "The body did not arrive in time"),
    ("413", "The body is too large"),
    ("422", "The request is not valid: its problems, by name"),
    ("500", "The gateway or its store failed; the log says why"),
    ("503", "The store is away, or the gateway is stopping; try again"),
];

/// The document as served.
pub(crate) fn rendered(document: &OpenApi, channels: &ChannelTable) -> Value {
    // The document consists of strings, lists and objects, which always have a JSON form.
    let mut document =
        serde_json::to_value(document).unwrap_or_else(|error| json!({ "error": error.to_string() }));
    if let (Some(schemas), Value::Object(further)) =
        (document["components"]["schemas"].as_object_mut(), described::schemas(channels))
    {
        schemas.extend(further);
        for name in SELECTABLE {
            if let Some(schema) = schemas.get_mut(name).and_then(Value::as_object_mut) {
                schema.remove("required");
            }
        }
    }
    let error = json!({ "application/json": { "schema": { "$ref": "#/components/schemas/ErrorBody" } } });
    let common = COMMON
        .map(|(status, what)| (format!("Error{status}"), json!({ "description": what, "content": error })));
    document["components"]["responses"] = Value::Object(common.into_iter().collect());
    let mut requests = BTreeSet::new();
    // What answers 501 whatever is sent is no part of the API.
    if let Some(paths) = document["paths"].as_object_mut() {
        for operations in paths.values_mut().filter_map(Value::as_object_mut) {
            operations.retain(|_, operation| operation["responses"].get("501").is_none());
        }
        paths.retain(|_, operations| operations.as_object().is_some_and(|operations| !operations.is_empty()));
    }
    for operations in document["paths"].as_object_mut().into_iter().flat_map(Map::values_mut) {
        for operation in operations.as_object_mut().into_iter().flat_map(Map::values_mut) {
            if let Some(responses) = operation["responses"].as_object_mut() {
                for (status, _) in COMMON {
                    let common = json!({ "$ref": format!("#/components/responses/Error{status}") });
                    responses.entry(status).or_insert(common);
                }
            }
            // Threads whose ids would be refused today can be deleted, and nothing else.
            let takes_any_id = operation["operationId"] == "delete_thread";
            let parameters = operation.get_mut("parameters").and_then(Value::as_array_mut).into_iter();
            let is_exact = |parameter: &&mut Value| !takes_any_id || parameter["name"] != "thread_id";
            parameters.flatten().filter(is_exact).for_each(exact);
            if let Some(body) = operation.get_mut("requestBody") {
                names_in(&body["content"], &mut requests);
                // A body that may be absent is one type or null.
                if body["content"]["application/json"]["schema"]["$ref"].is_string() {
                    body["required"] = Value::Bool(true);
                }
            }
        }
    }
    // What a request has besides is refused, also within it.
    let mut found = requests.clone();
    while !found.is_empty() {
        let mut inner = BTreeSet::new();
        for name in &found {
            names_in(&document["components"]["schemas"][name.as_str()], &mut inner);
        }
        found = inner.difference(&requests).cloned().collect();
        requests.extend(found.iter().cloned());
    }
    for name in requests.into_iter().filter(|name| !OPEN.contains(&name.as_str())) {
        if let Some(schema) = document["components"]["schemas"].get_mut(&name) {
            close(schema);
        }
    }
    widen(&mut document);
    document
}

/// Gives integers of 32 bits without a sign a format that has all of them: `int32` ends at half of them.
fn widen(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            let is_unsigned = map.get("minimum").and_then(Value::as_i64).is_some_and(|least| least >= 0);
            let fits = map.get("maximum").and_then(Value::as_i64).is_some_and(|most| most <= i32::MAX.into());
            if is_unsigned && !fits && map.get("format").is_some_and(|format| format == "int32") {
                map.insert("format".to_owned(), json!("int64"));
            }
            map.values_mut().for_each(widen);
        }
        Value::Array(list) => list.iter_mut().for_each(widen),
        _ => {}
    }
}

/// Adds to a parameter what the types of Rust do not say.
fn exact(parameter: &mut Value) {
    let schema = match parameter["name"].as_str() {
        Some("thread_id") => json!({ "type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$" }),
        // One above the maximum, however large, counts as it.
        Some("limit") if parameter["schema"].get("maximum").is_none() => {
            json!({ "type": "integer", "minimum": 1 })
        }
        Some("offset") => json!({ "type": "integer", "minimum": 0, "maximum": i64::MAX }),
        _ => return,
    };
    parameter["schema"] = schema;
}

/// The names of the schemas that a schema refers to.
fn names_in(schema: &Value, names: &mut BTreeSet<String>) {
    match schema {
        Value::Object(map) => {
            if let Some(name) = map.get("$ref").and_then(Value::as_str) {
                names.extend(name.rsplit('/').next().map(str::to_owned));
            }
            map.values().for_each(|inner| names_in(inner, names));
        }
        Value::Array(list) => list.iter().for_each(|inner| names_in(inner, names)),
        _ => {}
    }
}

/// Refuses other fields in an object's schema, of which a part may be that of another type.
fn close(schema: &mut Value) {
    if let Some(Value::Array(parts)) = schema.as_object_mut().and_then(|schema| schema.remove("allOf")) {
        for part in parts {
            merge(schema, part);
        }
    }
    if schema["type"] == "object"
        && let Some(schema) = schema.as_object_mut()
    {
        schema.entry("additionalProperties").or_insert(Value::Bool(false));
    }
}

/// Adds to an object's schema what a part of it says.
fn merge(schema: &mut Value, part: Value) {
    match (schema, part) {
        (Value::Object(schema), Value::Object(part)) => {
            for (name, value) in part {
                merge(schema.entry(name).or_insert(Value::Null), value);
            }
        }
        (Value::Array(schema), Value::Array(part)) => schema.extend(part),
        (schema, part) => *schema = part,
    }
}

//! What the description of the API says of the thread protocol.

use serde_json::{Value, json};

use super::filter::{CHANNELS, MAX_INTEGER, MAX_ITEMS};

/// The schemas of commands, of their results and of filters. `run` is that of a run's request; `channels` are those of the
/// state.
pub(in crate::http) fn schemas(run: &Value, channels: &[String]) -> Value {
    json!({
        "Command": { "oneOf": commands(&run["properties"], channels) },
        "CommandDone": done(),
        "EventFilter": filter(),
    })
}

fn reference(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

fn nullable(schema: &Value) -> Value {
    json!({ "anyOf": [schema, { "type": "null" }] })
}

fn commands(run: &Value, channels: &[String]) -> Value {
    let text = json!({ "type": "string" });
    let namespace = json!({ "type": "array", "maxItems": 0, "items": text });
    let mut config = run["config"].clone();
    let configurable = &mut config["anyOf"][0]["properties"]["configurable"]["anyOf"][0];
    configurable["properties"]["thread_id"] =
        json!({ "description": "Nothing, or the thread of the path.", "type": "null" });
    let input = json!({
        "description": "Channel values; null to continue what was interrupted; anything else answers what the thread waits for.",
        "anyOf": [run["input"], { "type": ["string", "boolean", "number"], "minimum": i64::MIN, "maximum": u64::MAX }],
    });
    let answer = json!({
        "namespace": namespace,
        "interrupt_id": text,
        "response": { "description": "A text, or an object with messages.", "anyOf": [reference("Json")] },
    });
    let answers = json!({ "type": "array", "minItems": 1, "items": object(&answer, &["namespace", "interrupt_id", "response"]) });
    let beside = |fields: Value| {
        let mut all = json!({ "config": config, "context": run["context"], "metadata": run["metadata"] });
        merge(&mut all, fields);
        all
    };
    let with_answer = |fields: Value| {
        let command = &run["command"]["anyOf"][0]["properties"];
        let mut all = beside(json!({ "update": command["update"], "goto": command["goto"] }));
        merge(&mut all, fields);
        all
    };
    let strategy = json!({ "type": "string", "enum": ["reject", "rollback", "interrupt", "enqueue"] });
    let start = beside(json!({
        "assistant_id": run["assistant_id"],
        "input": input,
        "multitaskStrategy": nullable(&strategy),
        "langsmith_tracer": { "description": "Not supported.", "type": "null" },
    }));
    let one = with_answer(merged(answer, json!({ "responses": { "type": "null" } })));
    let fork = beside(json!({ "checkpoint_id": text, "input": input }));
    let id = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$";
    let list = json!({
        "namespace": nullable(&namespace),
        "limit": { "type": ["integer", "null"], "minimum": 1, "maximum": 100 },
        "before": { "type": ["string", "null"], "pattern": id },
    });
    let keys = json!({ "type": ["array", "null"], "items": { "type": "string", "enum": channels } });
    json!([
        command("run.start", "Start a run, on a new thread if there is none.", &object(&start, &[]), true),
        command(
            "input.respond",
            "Answer a question, and go on.",
            &object(&one, &["namespace", "interrupt_id", "response"]),
            false,
        ),
        command(
            "input.respond",
            "Answer several questions at once.",
            &object(&with_answer(json!({ "responses": answers })), &["responses"]),
            false,
        ),
        command("state.fork", "Start a run from a checkpoint.", &object(&fork, &["checkpoint_id"]), false),
        command(
            "state.get",
            "Read the state at the head.",
            &object(&json!({ "namespace": namespace, "keys": keys }), &["namespace"]),
            false,
        ),
        command("state.listCheckpoints", "List checkpoints, newest first.", &object(&list, &[]), true),
        command(
            "agent.getTree",
            "Read the status of a run's agent.",
            &object(&json!({ "run_id": { "type": ["string", "null"] } }), &[]),
            true,
        ),
    ])
}

/// A command; `optional` if it may come without parameters.
fn command(method: &str, what: &str, params: &Value, optional: bool) -> Value {
    let properties = json!({
        "id": { "type": "integer", "minimum": 0, "maximum": MAX_INTEGER },
        "method": { "type": "string", "enum": [method] },
        "params": params,
    });
    let required: &[&str] = if optional { &["id", "method"] } else { &["id", "method", "params"] };
    merged(json!({ "description": what }), object(&properties, required))
}

fn object(properties: &Value, required: &[&str]) -> Value {
    json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false })
}

fn merged(mut object: Value, more: Value) -> Value {
    merge(&mut object, more);
    object
}

fn merge(object: &mut Value, more: Value) {
    if let (Value::Object(object), Value::Object(more)) = (object, more) {
        object.extend(more);
    }
}

fn done() -> Value {
    json!({
        "type": "object",
        "description": "The result of a command; with a run, `meta` says which events came before it.",
        "required": ["type", "id", "result"],
        "properties": {
            "type": { "type": "string", "enum": ["success"] },
            "id": { "type": "integer" },
            "result": { "type": "object" },
            "meta": { "type": "object", "properties": { "applied_through_seq": { "type": "integer" } } },
        },
    })
}

fn filter() -> Value {
    let count = json!({ "type": ["integer", "null"], "minimum": 0, "maximum": MAX_INTEGER });
    let namespace = json!({ "type": "array", "maxItems": MAX_ITEMS, "items": { "type": "string" } });
    let channel = json!({ "anyOf": [
        { "type": "string", "enum": CHANNELS },
        { "type": "string", "pattern": r"^custom:[\s\S]" },
    ]});
    merged(
        json!({ "description": "Which events to follow: of these channels, at or below these places, after `since`." }),
        object(
            &json!({
                "channels": { "type": "array", "minItems": 1, "maxItems": MAX_ITEMS, "items": channel },
                "namespaces": { "type": ["array", "null"], "maxItems": MAX_ITEMS, "items": namespace },
                "depth": count,
                "since": count,
            }),
            &["channels"],
        ),
    )
}

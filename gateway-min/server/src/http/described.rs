//! What the description of the API says of requests and responses that are read and written by hand.
//!
//! It promises no more than the routes do: a tester that makes requests of it finds none that is refused, and none refused
//! by it that is accepted.

use serde_json::{Value, json};
use threadkeep::channel::{Behaviour, ChannelTable, MESSAGES_CHANNEL};
use threadkeep_subagents::owned;
use utoipa::ToSchema;
use utoipa::openapi::schema::{AdditionalProperties, ObjectBuilder, OneOfBuilder, Type};
use utoipa::openapi::{Object, Ref, Schema};

use super::protocol;

/// A status of a run.
#[derive(Debug, ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "described, never built")]
pub(super) enum RunStatusName {
    Pending,
    Running,
    Success,
    Error,
    Timeout,
    Interrupted,
}

/// How to cancel a run: keep what it wrote, or restore the state before it.
#[derive(Debug, ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "described, never built")]
pub(super) enum CancelActionName {
    Interrupt,
    Rollback,
}

/// What to stream of a run.
#[derive(Debug, ToSchema)]
#[schema(rename_all = "kebab-case")]
#[allow(dead_code, reason = "described, never built")]
pub(super) enum StreamModeName {
    Values,
    MessagesTuple,
    Messages,
    Updates,
    Debug,
    Tasks,
    Checkpoints,
    Custom,
}

/// An assistant.
#[derive(Debug, ToSchema)]
#[allow(dead_code, reason = "described, never built")]
pub(super) enum AssistantName {
    #[schema(rename = "lead_agent")]
    Agent,
    #[schema(rename = "lead-agent")]
    AgentWithHyphen,
}

/// A field of a run's record.
#[derive(Debug, ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "described, never built")]
pub(super) enum RunField {
    RunId,
    ThreadId,
    AssistantId,
    Status,
    Metadata,
    Kwargs,
    MultitaskStrategy,
    CreatedAt,
    UpdatedAt,
    TotalInputTokens,
    TotalOutputTokens,
    TotalTokens,
    LlmCallCount,
    #[schema(rename = "lead_agent_tokens")]
    AgentTokens,
    SubagentTokens,
    MiddlewareTokens,
    MessageCount,
    StopReason,
    Error,
}

/// The statuses of a run's record.
pub(super) const RUN_STATUSES: [&str; 6] =
    ["pending", "running", "success", "error", "timeout", "interrupted"];

/// The schemas that have no type of their own here.
pub(super) fn schemas(channels: &ChannelTable) -> Value {
    let names: Vec<String> = channels.names().map(ToString::to_string).collect();
    let mut schemas = protocol::described::schemas(&run_create(None), &names);
    let others = others(channels);
    if let (Value::Object(schemas), Value::Object(others)) = (&mut schemas, others) {
        schemas.extend(others);
    }
    schemas
}

fn others(channels: &ChannelTable) -> Value {
    json!({
        "StateValues": state_values(channels),
        "Json": json_value(),
        "JsonObject": { "type": "object", "additionalProperties": reference("Json") },
        "Message": message(),
        "Checkpoint": checkpoint(json!({ "type": ["string", "null"] })),
        "RootCheckpoint": checkpoint(json!({ "enum": ["", null] })),
        "CheckpointBound": checkpoint_bound(),
        "KeptContext": kept_context(),
        "RunContext": run_context(),
        "Names": {
            "description": "Names that are not blank; the space around them, and a name that is there twice, do not count.",
            "type": "array", "items": { "type": "string", "pattern": r"\S" },
        },
        "MetadataFilter": {
            "description": "Exact values by key.",
            "type": "object",
            "maxProperties": 100,
            "propertyNames": { "pattern": "^[A-Za-z0-9_-]+$" },
            "additionalProperties": {
                "type": ["null", "boolean", "integer", "number", "string"],
                "minimum": i64::MIN, "maximum": i64::MAX,
            },
        },
        "RunCreate": run_create(None),
        "BatchedRun": run_create(Some(json!({
            "description": "The thread, which exists [default: a new one].",
            "type": ["string", "null"], "pattern": "^[A-Za-z0-9_-]{1,64}$",
        }))),
        "RunBatch": { "type": "array", "maxItems": 100, "items": reference("BatchedRun") },
        "CancelMany": cancel_many(),
        "RunRecord": run_record(),
        "StreamEvent": stream_event(),
        "RunRecords": { "type": "array", "items": reference("RunRecord") },
    })
}

/// What a run is given about the conversation besides its input.
fn run_context() -> Value {
    let number = json!({ "type": ["integer", "null"], "minimum": i64::MIN, "maximum": u64::MAX });
    let flag = json!({ "type": ["boolean", "null"] });
    json!({
        "type": "object",
        "properties": {
            "subagent_enabled": {
                "description": "Whether the run may delegate to subagents [default: false].",
                "type": ["boolean", "null"],
            },
            "max_concurrent_subagents": number,
            "max_total_subagents": number,
            // `model_name` is the name of a configured model, which no schema of this document lists.
            "thinking_enabled": flag,
            "reasoning_effort": { "type": ["string", "null"] },
            "disable_clarification": {
                "description": "Whether the agent must not ask the user [default: false].",
                "type": ["boolean", "null"],
            },
            "non_interactive": {
                "description": "The same, of internal callers alone.",
                "type": ["boolean", "null"],
            },
            "mode": { "description": "A word of the client, stored with the checkpoints.", "type": ["string", "null"] },
            "agent_name": { "enum": ["lead_agent", "lead-agent", null] },
            "is_plan_mode": flag,
            "is_bootstrap": flag,
            "secrets": { "type": ["object", "null"], "maxProperties": 0 },
            "github_token": { "description": "Accepted, and dropped: no tool takes it." },
        },
        "additionalProperties": reference("Json"),
    })
}

fn reference(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

/// Any value whose numbers the gateway can hold.
fn json_value() -> Value {
    let value = reference("Json");
    json!({ "minimum": i64::MIN, "maximum": u64::MAX, "items": value, "additionalProperties": value })
}

/// Channel values to write. A channel that is not here is refused.
fn state_values(channels: &ChannelTable) -> Value {
    let any = reference("Json");
    let properties = channels.names().map(|name| {
        let empty = channels
            .behaviour(name)
            .and_then(Behaviour::reducer)
            .and_then(threadkeep::channel::Reducer::empty);
        let empty = empty.and_then(|empty| empty.to_json().ok());
        let schema = match (name.as_str(), empty) {
            (MESSAGES_CHANNEL, _) => json!({ "anyOf": [
                reference("Message"),
                { "type": "array", "items": reference("Message") },
                { "type": "null" },
            ]}),
            (owned::CHANNEL, _) => {
                json!({ "description": "Only the runtime writes it: a value is dropped.", "anyOf": [any] })
            }
            (_, Some(Value::Array(_))) => json!({ "type": ["array", "null"], "items": any }),
            (_, Some(Value::Object(_))) => {
                json!({ "type": ["object", "null"], "additionalProperties": any })
            }
            _ => reference("Json"),
        };
        (name.to_string(), schema)
    });
    json!({
        "type": "object",
        "description": "Channel values.",
        "properties": properties.collect::<serde_json::Map<_, _>>(),
        "additionalProperties": false,
    })
}

fn message() -> Value {
    let any = reference("Json");
    let of = |types: &[&str], required: &[&str], content: &[&str]| {
        json!({
            "type": "object",
            "properties": {
                "type": { "type": "string", "enum": types },
                "content": { "type": content, "items": any },
                "id": { "type": ["string", "null"], "not": { "enum": ["__remove_all__"] } },
            },
            "required": required,
            "additionalProperties": any,
        })
    };
    let text = ["string", "array"];
    let mut result = of(&["tool"], &["type", "content", "tool_call_id"], &text);
    result["properties"]["tool_call_id"] = json!({ "type": "string" });
    json!({
        "description": "A message; a text is one of the user. `role` is read if there is no `type`.",
        "anyOf": [
            { "type": "string" },
            of(&["human", "user", "system", "developer"], &["type", "content"], &text),
            of(&["ai", "assistant", "AIMessageChunk"], &["type"], &["string", "array", "null"]),
            result,
        ],
    })
}

/// A checkpoint selected by an object, in these namespaces.
fn checkpoint(namespace: Value) -> Value {
    json!({
        "description": "A checkpoint. `thread_id`, if sent, is the thread of the request; `id` is the `checkpoint_id` again.",
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "checkpoint_ns": namespace,
            "checkpoint_id": { "type": ["string", "null"] },
            "checkpoint_map": { "type": ["object", "null"], "maxProperties": 0 },
        },
    })
}

/// A checkpoint's id, or an object with it.
fn checkpoint_bound() -> Value {
    let id = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$";
    let mut object = json!({
        "type": "object",
        "properties": { "checkpoint_id": { "type": ["string", "null"], "pattern": id } },
        "additionalProperties": false,
    });
    object["properties"]["configurable"] = json!({ "anyOf": [object, { "type": "null" }] });
    json!({ "anyOf": [{ "type": "string", "pattern": id }, object] })
}

/// How much of a conversation a compaction keeps.
fn kept_context() -> Value {
    let of = |names: &[&str], value: Value| {
        json!({
            "type": "object",
            "properties": { "type": { "type": "string", "enum": names }, "value": value },
            "required": ["type", "value"],
            "additionalProperties": false,
        })
    };
    json!({ "anyOf": [
        of(&["messages", "tokens"], json!({ "type": "integer", "minimum": 1, "maximum": u64::MAX })),
        of(&["fraction"], json!({ "type": "number", "exclusiveMinimum": 0, "maximum": 1 })),
    ]})
}

/// `StateValues`, or null.
pub(super) fn state_values_or_null() -> Schema {
    or_null("StateValues")
}

/// `Checkpoint`, or null.
pub(super) fn checkpoint_or_null() -> Schema {
    or_null("Checkpoint")
}

/// `RootCheckpoint`, or null.
pub(super) fn root_checkpoint_or_null() -> Schema {
    or_null("RootCheckpoint")
}

/// A checkpoint to begin a history at: its id, an object with it, or null.
pub(super) fn bound_or_null() -> Schema {
    or_null("CheckpointBound")
}

/// `KeptContext`, or null.
pub(super) fn kept_context_or_null() -> Schema {
    or_null("KeptContext")
}

/// `JsonObject`, or null.
pub(super) fn object_or_null() -> Schema {
    or_null("JsonObject")
}

/// `Names`.
pub(super) fn names() -> Ref {
    Ref::from_schema_name("Names")
}

/// `Names`, or null.
pub(super) fn names_or_null() -> Schema {
    or_null("Names")
}

/// Values to find in metadata, or null.
pub(super) fn metadata_filter() -> Schema {
    or_null("MetadataFilter")
}

/// `{update}` of a superstep, or null.
pub(super) fn update_command_or_null() -> Schema {
    let update = ObjectBuilder::new().property("update", state_values_or_null());
    let update = update.additional_properties(Some(AdditionalProperties::FreeForm(false)));
    OneOfBuilder::new().item(update).item(null()).into()
}

fn or_null(name: &str) -> Schema {
    OneOfBuilder::new().item(Ref::from_schema_name(name)).item(null()).into()
}

fn null() -> Object {
    ObjectBuilder::new().schema_type(Type::Null).build()
}

/// The request of a run; `thread` is its field in a batch.
fn run_create(thread: Option<Value>) -> Value {
    let nullable = |schema: Value| json!({ "anyOf": [schema, { "type": "null" }] });
    let names = |names: &[&str]| json!({ "type": "string", "enum": names });
    let modes =
        ["values", "messages-tuple", "messages", "updates", "debug", "tasks", "checkpoints", "custom"];
    let nodes = json!({ "anyOf": [
        names(&["*"]),
        { "type": "array", "items": names(&["model", "tools"]) },
        { "type": "null" },
    ]});
    let goto = names(&["model", "tools", "__end__"]);
    let context = run_context();
    let typed = &context["properties"];
    let mut schema = json!({
        "type": "object",
        "description": "A run. It starts with an input or a command, not both; without either it continues.",
        "additionalProperties": false,
        "properties": {
            "assistant_id": nullable(names(&["lead_agent", "lead-agent"])),
            "input": nullable(json!({
                "description": "Channel values, for example `{\"messages\": [{\"type\": \"human\", \"content\": \"hi\"}]}`.",
                "type": "object",
                "properties": { "messages": { "anyOf": [
                    reference("Message"),
                    { "type": "array", "items": reference("Message") },
                    { "type": "null" },
                ]}},
                "additionalProperties": reference("Json"),
            })),
            "command": nullable(json!({
                "type": "object",
                "additionalProperties": false,
                "properties": {
                    "lg_name": { "description": "The name of the class that clients make it of.", "enum": ["Command", null] },
                    "update": nullable(reference("StateValues")),
                    "goto": {
                        "description": "The node to continue with [default: the thread's next nodes].",
                        "anyOf": [goto, { "type": "array", "items": goto, "maxItems": 1 }, { "type": "null" }],
                    },
                    "resume": {
                        "description": "The answer to what the thread waits for; a thread that waits for none refuses it.",
                        "anyOf": [reference("Json"), { "type": "null" }],
                    },
                },
            })),
            "metadata": nullable(reference("JsonObject")),
            "config": nullable(json!({
                "type": "object",
                "additionalProperties": false,
                "properties": {
                    "configurable": nullable(json!({
                        "description": "Entries for the agent; scalars become metadata of checkpoints.",
                        "type": "object",
                        "properties": {
                            "thread_id": { "type": ["string", "null"], "pattern": "^[A-Za-z0-9_-]{1,64}$" },
                            "checkpoint_id": { "type": ["string", "null"] },
                            "subagent_enabled": typed["subagent_enabled"],
                            "max_concurrent_subagents": typed["max_concurrent_subagents"],
                            "max_total_subagents": typed["max_total_subagents"],
                        },
                        "additionalProperties": reference("Json"),
                    })),
                    "context": nullable(reference("RunContext")),
                    "metadata": nullable(reference("JsonObject")),
                    "tags": nullable(json!({ "type": "array", "items": { "type": "string" } })),
                    "recursion_limit": {
                        "description": "The maximum number of supersteps; unusable values count as 100.",
                        "anyOf": [reference("Json")],
                    },
                },
            })),
            "context": nullable(reference("RunContext")),
            "checkpoint_id": { "type": ["string", "null"] },
            "checkpoint": nullable(reference("RootCheckpoint")),
            "interrupt_before": nodes,
            "interrupt_after": nodes,
            "stream_mode": { "anyOf": [
                names(&modes),
                { "type": "array", "items": names(&modes) },
                { "type": "null" },
            ]},
            "stream_subgraphs": { "type": "boolean" },
            "stream_resumable": { "type": ["boolean", "null"] },
            "on_disconnect": names(&["cancel", "continue"]),
            "multitask_strategy": names(&["reject", "rollback", "interrupt", "enqueue"]),
            "if_not_exists": names(&["create"]),
            "durability": nullable(names(&["sync", "async", "exit"])),
            "checkpoint_during": { "type": ["boolean", "null"] },
            "on_completion": nullable(names(&["keep", "complete"])),
            "feedback_keys": { "type": ["array", "null"], "maxItems": 0, "items": { "type": "string" } },
            "strict_resume": nullable(json!({ "const": true })),
            "webhook": { "description": "Not supported.", "type": "null" },
            "after_seconds": { "description": "Not supported.", "type": "null" },
        },
    });
    // Not both, unless one asks for nothing.
    let empty = json!({ "anyOf": [{ "type": "null" }, { "type": "array", "maxItems": 0 }] });
    let none = json!({ "type": "null" });
    schema["anyOf"] = json!([
        { "properties": { "input": none } },
        { "properties": { "command": { "anyOf": [
            none,
            { "type": "object", "properties": { "update": none, "goto": empty, "resume": none } },
        ]}}},
    ]);
    if let Some(thread) = thread {
        schema["properties"]["thread_id"] = thread;
    }
    schema
}

/// Which runs to cancel.
fn cancel_many() -> Value {
    let thread = |types: Value| json!({ "type": types, "pattern": "^[A-Za-z0-9_-]{1,64}$" });
    json!({ "anyOf": [
        {
            "type": "object",
            "description": "These runs of a thread; those that have ended are unchanged.",
            "additionalProperties": false,
            "properties": {
                "thread_id": thread(json!("string")),
                "run_ids": { "type": "array", "maxItems": 1000, "items": { "type": "string" } },
                "status": { "type": "null" },
            },
            "required": ["thread_id", "run_ids"],
        },
        {
            "type": "object",
            "description": "The caller's active runs with this status, of a thread or of all.",
            "additionalProperties": false,
            "properties": {
                "thread_id": thread(json!(["string", "null"])),
                "run_ids": { "type": "null" },
                "status": { "type": "string", "enum": ["pending", "running", "all"] },
            },
            "required": ["status"],
        },
    ]})
}

/// An event of a stream of server-sent events.
fn stream_event() -> Value {
    let text = json!({ "type": "string" });
    json!({
        "type": "object",
        "description": "A server-sent event: `data` is JSON, `id` is what a client sends as `Last-Event-ID` to go on after it.",
        "properties": { "event": text, "data": text, "id": text },
    })
}

fn run_record() -> Value {
    let text = json!({ "type": "string" });
    let count = json!({ "type": "integer", "minimum": 0 });
    let optional = json!({ "type": ["string", "null"] });
    json!({
        "type": "object",
        "description": "The record of a run.",
        "properties": {
            "run_id": text, "thread_id": text, "assistant_id": optional, "status": { "type": "string", "enum": RUN_STATUSES },
            "metadata": { "type": "object" }, "kwargs": {}, "multitask_strategy": text,
            "created_at": text, "updated_at": text,
            "total_input_tokens": count, "total_output_tokens": count, "total_tokens": count,
            "llm_call_count": count, "lead_agent_tokens": count, "subagent_tokens": count,
            "middleware_tokens": count, "message_count": count, "stop_reason": optional, "error": optional,
        },
    })
}

//! The options of a run, read from the request.

use serde_json::Value;
use threadkeep_agent::{Durability, Interrupts, NODES};

use crate::http::fields::{Fields, Flaw, shortened};
use crate::runs::request::{OnDisconnect, RunOptions, StreamMode};

impl RunOptions {
    pub(super) fn from_fields(fields: &mut Fields<'_>) -> Self {
        let options = Self {
            interrupt_before: interrupts(fields, "interrupt_before"),
            interrupt_after: interrupts(fields, "interrupt_after"),
            stream_modes: {
                let modes = stream_modes(fields);
                if modes.is_empty() { vec![StreamMode::Values] } else { modes }
            },
            stream_subgraphs: fields.field("stream_subgraphs").flag().unwrap_or(false),
            on_disconnect: match fields.field("on_disconnect").one_of(&["cancel", "continue"]) {
                Some("continue") => OnDisconnect::Continue,
                _ => OnDisconnect::Cancel,
            },
            multitask_strategy: {
                let strategies = ["reject", "rollback", "interrupt", "enqueue"];
                let name = fields.field("multitask_strategy").one_of(&strategies);
                name.and_then(|name| name.parse().ok()).unwrap_or_default()
            },
            durability: durability(fields),
        };
        // There is no choice: a missing thread is created, or is a 404 on the routes that name it.
        if_not_exists(fields);
        inert(fields);
        options
    }
}

/// `sync` waits for the disk after each superstep, `async` and `exit` at the end. Each superstep is stored as a checkpoint
/// in any case: what older clients request with `checkpoint_during: false` differs in nothing else.
fn durability(fields: &mut Fields<'_>) -> Durability {
    let name = "durability";
    let requested = fields.field(name).nullable().read(|value| match value.as_str() {
        Some("sync") => Ok(Durability::Sync),
        Some("async" | "exit") => Ok(Durability::Async),
        _ => Err((unsupported(name), value)),
    });
    requested.unwrap_or_default()
}

fn interrupts(fields: &mut Fields<'_>, name: &str) -> Interrupts {
    let field = fields.field(name).nullable();
    if field.is_text() {
        field.one_of(&["*"]).map_or(Interrupts::None, |_| Interrupts::All)
    } else {
        // A misspelt node would be passed without a stop.
        let nodes = field.each_of(&NODES);
        nodes.map_or(Interrupts::None, |nodes| Interrupts::Nodes(nodes.into_iter().map(Into::into).collect()))
    }
}

/// Takes the field `stream_mode`: the modes that it names, each once.
pub(in crate::http) fn stream_modes(fields: &mut Fields<'_>) -> Vec<StreamMode> {
    let sent = fields.peek("stream_mode").cloned().unwrap_or_default();
    let field = fields.field("stream_mode").nullable().listed();
    let names = if field.is_text() { field.text().map(|name| vec![name]) } else { field.texts() };
    let mut modes = Vec::new();
    let mut unsupported: Vec<&str> = Vec::new();
    for name in names.iter().flatten() {
        match StreamMode::parse(name) {
            Some(mode) if modes.contains(&mode) => {}
            Some(mode) => modes.push(mode),
            None => unsupported.push(name),
        }
    }
    if !unsupported.is_empty() {
        let msg = format!("Unsupported stream mode(s): {}", shortened(unsupported.join(", ")));
        fields.refuse("stream_mode", Flaw::new("unsupported_stream_mode", msg), sent);
    }
    modes
}

/// `create` is the behaviour; clients also know `reject`, which is not supported.
fn if_not_exists(fields: &mut Fields<'_>) {
    let name = "if_not_exists";
    let _: Option<()> = fields.field(name).read(|value| match value.as_str() {
        Some("create") => Ok(()),
        Some("reject") => Err((unsupported(name), value)),
        _ => Err((Flaw::literal(&["create"]), value)),
    });
}

/// Options for which only values that request nothing, or the existing behaviour, are accepted.
fn inert(fields: &mut Fields<'_>) {
    let mut inert = |name: &str, is_inert: fn(&Value) -> bool| {
        let refuse = |value| if is_inert(&value) { Ok(()) } else { Err((unsupported(name), value)) };
        let _: Option<()> = fields.field(name).nullable().read(refuse);
    };
    // Runs leave no trace to delete, streams can always be resumed, and each step is a checkpoint.
    inert("stream_resumable", Value::is_boolean);
    inert("on_completion", |value| value == "keep" || value == "complete");
    inert("feedback_keys", |value| value.as_array().is_some_and(Vec::is_empty));
    inert("webhook", |_| false);
    inert("after_seconds", |_| false);
    inert("checkpoint_during", Value::is_boolean);
    // An answer to nothing is always refused.
    inert("strict_resume", |value| *value == true);
}

fn unsupported(name: &str) -> Flaw {
    Flaw::new("unsupported_run_option", format!("Run option '{name}' is not supported by Threadkeep"))
}

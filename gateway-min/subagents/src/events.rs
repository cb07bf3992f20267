//! The `task_*` events by which clients follow a subagent (service reference, "Events").

use serde_json::{Value as Json, json};
use threadkeep_records::ExecutionTokens;

use crate::outcome::{Ending, TaskOutcome};

/// A delegation was dispatched.
pub(crate) fn started(task_id: &str, description: &str, model: &str) -> Json {
    json!({"type": "task_started", "task_id": task_id, "description": description, "model_name": model})
}

/// The subagent said something, or a tool answered it. `index` is the message's place from 1, `total` the highest one so
/// far; `usage` is the sum so far.
pub(crate) fn running(
    task_id: &str,
    message: &Json,
    (index, total): (u64, u64),
    usage: Option<ExecutionTokens>,
    model: &str,
) -> Json {
    json!({
        "type": "task_running", "task_id": task_id, "message": message, "message_index": index,
        "total_messages": total, "usage": usage, "model_name": model,
    })
}

/// The delegation ended.
pub(crate) fn ended(task_id: &str, outcome: &TaskOutcome) -> Json {
    let (kind, key, text) = match &outcome.ending {
        Ending::Completed(report) => ("task_completed", "result", Some(report.text.clone())),
        Ending::Failed { error } => ("task_failed", "error", error.clone()),
        Ending::Cancelled { error } => ("task_cancelled", "error", error.clone()),
        Ending::TimedOut { error } => ("task_timed_out", "error", error.clone()),
        Ending::PollingTimedOut { .. } => ("task_timed_out", "error", None),
    };
    let mut event =
        json!({"type": kind, "task_id": task_id, "usage": outcome.usage, "model_name": outcome.model_name});
    // Without an end of the execution there is no error to name.
    if !matches!(outcome.ending, Ending::PollingTimedOut { .. }) {
        event[key] = json!(text);
    }
    event
}

//! The channel `tools`: the start and the end of a tool's call, from those of its task.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

/// The node of tools.
const TOOLS: &str = "tools";
/// The tool that asks a subagent.
const TASK: &str = "task";

/// A call of a tool.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Call {
    /// The model's id of it.
    pub(super) id: Value,
    name: Value,
    args: Value,
}

/// The task of a tool's call.
#[derive(Debug)]
pub(super) struct ToolTask {
    pub(super) id: String,
    frame: Value,
}

#[derive(Deserialize)]
struct Named {
    name: String,
    #[serde(rename = "input", default)]
    _input: IgnoredAny,
}

/// The task of a frame, if it is that of a tool. The others' frames have whole states, and are not read.
pub(super) fn task(frame: &[u8]) -> Option<ToolTask> {
    let named: Named = threadkeep::json::from_slice(frame).ok()?;
    if named.name != TOOLS {
        return None;
    }
    let frame: Value = threadkeep::json::from_slice(frame).ok()?;
    Some(ToolTask { id: frame["id"].as_str()?.to_owned(), frame })
}

impl ToolTask {
    /// The call, if it starts.
    pub(super) fn started(&self) -> Option<Call> {
        let call = self.frame.get("input")?;
        Some(Call { id: call["id"].clone(), name: call["name"].clone(), args: call["args"].clone() })
    }
}

impl Call {
    pub(super) fn started(&self) -> Value {
        json!({ "event": "tool-started", "tool_call_id": self.id, "tool_name": self.name, "input": self.args })
    }

    /// Who works within the call: the subagent that was asked, or the tool.
    pub(super) fn graph(&self) -> &str {
        let subagent = self.args["subagent_type"].as_str().filter(|_| self.name == TASK);
        subagent.or(self.name.as_str()).unwrap_or_default()
    }
}

/// The end of a call: the result, or why there is none.
pub(super) fn ended(call: Option<&Call>, task: &ToolTask) -> Value {
    let result = task.frame["result"]["messages"].as_array().and_then(|messages| {
        let of_call = |message: &&Value| match call {
            Some(call) => message["tool_call_id"] == call.id,
            None => message["type"] == "tool",
        };
        messages.iter().find(of_call)
    });
    let id = call.map_or_else(
        || result.map_or(Value::Null, |result| result["tool_call_id"].clone()),
        |call| call.id.clone(),
    );
    let failed = |why: &Value| {
        let message = why.as_str().map_or_else(|| why.to_string(), str::to_owned);
        json!({ "event": "tool-error", "tool_call_id": id, "message": message })
    };
    match (&task.frame["error"], result) {
        (Value::Null, Some(result)) if result["status"] == "error" => failed(&result["content"]),
        (Value::Null, Some(result)) => {
            json!({ "event": "tool-finished", "tool_call_id": id, "output": result })
        }
        (Value::Null, None) => {
            json!({ "event": "tool-finished", "tool_call_id": id, "output": task.frame["result"] })
        }
        (error, _) => failed(error),
    }
}

//! The command of a request: a change of the state, the node to continue with, an answer.

use serde_json::{Map, Value};
use threadkeep::id::NodeName;
use threadkeep_agent::{END, NODES};

use crate::http::fields::{Fields, Flaw};

const ONE_NODE: &str = "Input should be one node: nodes do not run beside each other here";

#[allow(clippy::option_option, reason = "no node is asked for, or the end is")]
/// The field `command`, without what is null in it.
#[derive(Debug, Default)]
pub(in crate::http) struct Command {
    /// Channel values to combine with the state.
    pub(in crate::http) update: Option<Map<String, Value>>,
    /// The node to continue with; `Some(None)` to end.
    pub(in crate::http) goto: Option<Option<NodeName>>,
    /// The answer to what the thread waits for; null continues without one.
    pub(in crate::http) resume: Option<Value>,
}

impl Command {
    /// Takes the field `command`.
    pub(in crate::http) fn from_fields(fields: &mut Fields<'_>) -> Self {
        let Some(mut command) = fields.field("command").nullable().fields() else { return Self::default() };
        // So LangGraph for JavaScript marks its `Command` when it is written as JSON.
        command.field("lg_name").nullable().one_of(&["Command"]);
        let read = Self { resume: command.field("resume").any(), ..Self::beside_answer(&mut command) };
        command.deny_others();
        read
    }

    /// The fields `update` and `goto` that accompany an answer.
    pub(super) fn beside_answer(fields: &mut Fields<'_>) -> Self {
        Self {
            update: fields.field("update").nullable().read(update),
            goto: fields.field("goto").nullable().read(goto).flatten(),
            resume: None,
        }
    }

    /// Whether it asks for anything.
    pub(in crate::http) fn is_empty(&self) -> bool {
        self.update.is_none() && self.goto.is_none() && self.resume.is_none()
    }
}

/// Channel values: an object, or the pairs that clients make of one.
fn update(value: Value) -> Result<Map<String, Value>, (Flaw, Value)> {
    let flaw = || Flaw::new("dict_type", "Input should be a valid dictionary, or a list of pairs");
    match value {
        Value::Object(values) => Ok(values),
        Value::Array(pairs) => {
            let mut values = Map::new();
            for pair in &pairs {
                match pair.as_array().map(Vec::as_slice) {
                    Some([Value::String(name), value]) if !values.contains_key(name) => {
                        values.insert(name.clone(), value.clone());
                    }
                    _ => return Err((flaw(), pairs.into())),
                }
            }
            Ok(values)
        }
        other => Err((flaw(), other)),
    }
}

#[allow(clippy::option_option, reason = "no node is asked for, or the end is")]
/// The node: its name, or a list with it. An empty list is no node.
fn goto(value: Value) -> Result<Option<Option<NodeName>>, (Flaw, Value)> {
    let name = match &value {
        Value::Array(list) => match list.as_slice() {
            [] => return Ok(None),
            [name] => name,
            _ => return Err((Flaw::new("value_error", ONE_NODE), value)),
        },
        name => name,
    };
    match name.as_str() {
        Some(END) => Ok(Some(None)),
        Some(name) if NODES.contains(&name) => Ok(Some(Some(name.into()))),
        _ => {
            let known: Vec<&str> = NODES.into_iter().chain([END]).collect();
            Err((Flaw::literal(&known), value))
        }
    }
}

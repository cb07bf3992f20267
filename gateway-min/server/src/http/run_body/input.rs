//! The start of a run: its input, or the checkpoint it resumes from.

use serde_json::{Map, Value, json};
use threadkeep::channel::{MESSAGES_CHANNEL, normalize_message};
use threadkeep::id::{CheckpointId, IdSource, Namespace, ThreadId};
use threadkeep_subagents::owned;

use super::Command;
use crate::http::error::ApiError;
use crate::http::fields::shortened;
use crate::runs::request::{Change, Resume, RunInput};

/// Keys of a message's `additional_kwargs` that only the gateway sets: the run that a message belongs to, and its
/// position in the event feed.
pub(in crate::http) const SERVER_OWNED: [&str; 2] = ["run_id", "svc_seq"];

impl RunInput {
    /// The start of a run: its input, or its command, which has no input beside it.
    pub(super) fn new(
        input: Option<Map<String, Value>>,
        command: Command,
        ids: &IdSource,
    ) -> Result<Self, ApiError> {
        let Command { update, goto, resume } = command;
        let resume = resume.filter(|value| !value.is_null());
        let resume = match resume {
            Some(mut value) => {
                if let Value::Object(fields) = &mut value {
                    owned::strip_values(fields);
                }
                Some(Resume { messages: answer(&value, ids)?, value })
            }
            None => None,
        };
        if update.is_some() || goto.is_some() {
            let update = normalised("command.update.messages", update.unwrap_or_default(), ids)?;
            return Ok(Self::Change(Change { update, goto, resume }));
        }
        if let Some(resume) = resume {
            return Ok(Self::Resume(resume));
        }
        let Some(input) = input else { return Ok(Self::Continue) };
        normalised("input.messages", input, ids).map(Self::Values)
    }
}

/// The channel values with their messages normalised, without what only the runtime writes. `place` is where these were
/// in the request.
fn normalised(
    place: &str,
    mut values: Map<String, Value>,
    ids: &IdSource,
) -> Result<Map<String, Value>, ApiError> {
    owned::strip_values(&mut values);
    if let Some(sent) = values.remove(MESSAGES_CHANNEL).filter(|sent| !sent.is_null()) {
        values.insert(MESSAGES_CHANNEL.to_owned(), messages(place, sent, ids)?.into());
    }
    Ok(values)
}

/// The messages for a resume value that can answer a question.
fn answer(value: &Value, ids: &IdSource) -> Result<Option<Vec<Value>>, ApiError> {
    match value {
        Value::String(_) => {
            let text = json!({ "type": "human", "content": value });
            messages("command.resume", text, ids).map(Some)
        }
        Value::Object(fields) if fields.len() == 1 => {
            let sent = fields.get(MESSAGES_CHANNEL).filter(|sent| !sent.is_null());
            sent.map(|sent| messages("command.resume.messages", sent.clone(), ids)).transpose()
        }
        _ => Ok(None),
    }
}

/// One message or a list of them, normalised and with ids, without what only the gateway sets. `place` is where they were
/// in the request.
///
/// # Errors
/// 400 for a malformed message.
pub(in crate::http) fn messages(place: &str, sent: Value, ids: &IdSource) -> Result<Vec<Value>, ApiError> {
    let list = match sent {
        Value::Array(messages) => messages,
        message => vec![message],
    };
    let normalised = list.into_iter().enumerate().map(|(index, message)| {
        normalize_message(without_server_owned(message), ids)
            .map_err(|error| ApiError::bad_request(format!("Invalid message at {place}[{index}]: {error}")))
    });
    normalised.collect()
}

fn without_server_owned(mut message: Value) -> Value {
    owned::strip_message(&mut message);
    if let Some(kwargs) = message.get_mut("additional_kwargs").and_then(Value::as_object_mut) {
        kwargs.retain(|key, _| !SERVER_OWNED.contains(&&**key));
    }
    message
}

/// What a request selects of a thread.
#[derive(Debug)]
pub(in crate::http) struct Selected {
    pub(in crate::http) namespace: Namespace,
    /// A checkpoint of it, instead of its head.
    pub(in crate::http) id: Option<CheckpointId>,
}

impl Selected {
    /// The checkpoint, if one is selected, of the thread's own state.
    ///
    /// # Errors
    /// 400 with `only` for another namespace.
    pub(in crate::http) fn of_root(self, only: &str) -> Result<Option<CheckpointId>, ApiError> {
        if self.namespace == Namespace::root() {
            return Ok(self.id);
        }
        Err(ApiError::bad_request(format!("checkpoint checkpoint_ns must be empty: {only}")))
    }
}

/// What a request selects: `checkpoint`, or the separate id.
pub(in crate::http) fn selector(
    thread: &ThreadId,
    checkpoint: Option<Value>,
    id: Option<String>,
) -> Result<Selected, ApiError> {
    let mut checkpoint = match checkpoint {
        None => Map::new(),
        Some(Value::Object(checkpoint)) => checkpoint,
        Some(_) => return Err(ApiError::bad_request("checkpoint must be an object")),
    };
    let mut text = |key: &str| match checkpoint.remove(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(ApiError::bad_request(format!("checkpoint {key} must be a string"))),
    };
    if text("thread_id")?.is_some_and(|other| other != thread.as_str()) {
        return Err(ApiError::bad_request("checkpoint thread_id does not match request thread_id"));
    }
    let namespace = text("checkpoint_ns")?.map_or_else(Namespace::root, Namespace::from);
    let named = text("checkpoint_id")?;
    // What the gateway's own objects have besides: the same id again, and its time.
    if text("id")?.is_some_and(|again| named.as_ref() != Some(&again)) {
        return Err(ApiError::bad_request("checkpoint id must be its checkpoint_id"));
    }
    text("ts")?;
    let map = checkpoint.remove("checkpoint_map");
    if map.is_some_and(|map| !map.is_null() && map.as_object().is_none_or(|map| !map.is_empty())) {
        return Err(ApiError::bad_request(
            "checkpoint checkpoint_map must be empty: nested graphs have no checkpoints of their own to select",
        ));
    }
    if let Some(name) = checkpoint.keys().next() {
        return Err(ApiError::bad_request(format!("checkpoint {} is not known", shortened(name.as_str()))));
    }
    let Some(id) = named.or(id) else { return Ok(Selected { namespace, id: None }) };
    match id.parse() {
        Ok(id) => Ok(Selected { namespace, id: Some(id) }),
        Err(_) if id.is_empty() => Err(ApiError::not_found("Checkpoint not found")),
        Err(_) => Err(ApiError::not_found(format!("Checkpoint {} not found", shortened(id)))),
    }
}

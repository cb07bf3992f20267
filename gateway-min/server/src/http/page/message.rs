//! The whole of a message, as plain text.

use std::sync::Arc;

use axum::extract::{Query, State};
use serde_json::Value;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::{CheckpointId, ThreadId};
use threadkeep::saver::Load;
use threadkeep_agent::model::message::{text, tool_calls};
use threadkeep_agent::summary::CHANNEL as SUMMARY_CHANNEL;

use super::super::error::{ApiError, OrApiError as _};
use super::super::extract::{ApiPath, ThreadPath};
use super::super::fields::{Fields, FromFields};
use super::Parameters;
use crate::app::App;

const FAILED: &str = "Failed to read message";

/// The path of a message.
pub(super) struct MessagePath {
    thread_id: ThreadId,
    message_id: String,
}

impl FromFields for MessagePath {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let ThreadPath { thread_id } = ThreadPath::from_fields(fields);
        Self { thread_id, message_id: fields.field("message_id").required().text().unwrap_or_default() }
    }
}

/// The checkpoint that an address names.
///
/// # Errors
/// 400 if it is no id.
pub(super) fn checkpoint(parameters: &Parameters, name: &str) -> Result<Option<CheckpointId>, ApiError> {
    let Some(id) = parameters.get(name).filter(|id| !id.is_empty()) else { return Ok(None) };
    id.parse()
        .map(Some)
        .map_err(|_| ApiError::bad_request(format!("{name}: '{id}' is not the id of a checkpoint")))
}

/// `GET /threads/{thread_id}/messages/{message_id}`: what it says, then the tools it calls. The summary of earlier messages is one,
/// by the name of its channel.
pub(super) async fn show(
    State(app): State<Arc<App>>,
    ApiPath(MessagePath { thread_id, message_id }): ApiPath<MessagePath>,
    Query(parameters): Query<Parameters>,
) -> Result<String, ApiError> {
    let at = checkpoint(&parameters, "at")?;
    let channel = if message_id == SUMMARY_CHANNEL { SUMMARY_CHANNEL } else { MESSAGES_CHANNEL };
    let load = Load::Only([channel.into()].into());
    let state =
        app.threads.accessor().get_loading(&thread_id, at, load).await.or_engine(&thread_id, FAILED)?;
    let value = state.map(|state| state.json(channel)).transpose().or_engine(&thread_id, FAILED)?;
    let messages = match value.flatten() {
        Some(Value::Array(messages)) => messages,
        Some(Value::String(summary)) => return Ok(summary),
        _ => Vec::new(),
    };
    let message = messages.iter().find(|message| message["id"] == message_id.as_str());
    let message =
        message.ok_or_else(|| ApiError::not_found("This message is not in this state of the thread."))?;
    let mut whole = text(message);
    for call in tool_calls(message) {
        whole.push_str("\n\n");
        whole.push_str(&serde_json::to_string_pretty(call).or_internal(FAILED)?);
    }
    Ok(whole)
}

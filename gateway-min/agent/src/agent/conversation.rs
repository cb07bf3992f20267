//! The conversation of a run, and the messages in its writes.

use serde_json::{Value as Json, json};
use threadkeep::checkpoint::Write;
use threadkeep::state::StateSnapshot;
use threadkeep::value::ChannelValue;

use crate::model::{Earlier, message};
use crate::receipts::LEDGER_KEY;
use crate::{AgentError, summary, title};

/// The calls of an answer, one task each, including unreadable ones, whose result is an error.
pub(super) fn calls(answer: &Json) -> Vec<&Json> {
    message::tool_calls(answer).iter().chain(message::invalid_tool_calls(answer)).collect()
}

/// The summary of what preceded the conversation.
pub(super) fn earlier_summary(state: Option<&StateSnapshot>) -> Result<Option<String>, AgentError> {
    let summary = state.map(|state| state.json(summary::CHANNEL)).transpose()?.flatten();
    Ok(summary.and_then(|summary| summary.as_str().map(str::to_owned)))
}

/// A message as the loop keeps it: without the record of what receipts the model saw, which is most of a long turn, and
/// which is read from the stored message alone.
pub(super) fn kept(mut message: Json) -> Json {
    if let Some(Json::Object(kwargs)) = message.get_mut("additional_kwargs") {
        kwargs.remove(LEDGER_KEY);
    }
    message
}

/// The conversation of a run: the current turn, decoded, and what came before it, which only a model needs, and not
/// every one. So the work of a turn does not grow with its thread.
pub(super) struct Conversation {
    pub(super) earlier: Earlier,
    /// From the user's last message on.
    pub(super) turn: Vec<Json>,
}

impl Conversation {
    /// How many messages decide whether a long conversation is beyond its first exchange.
    const BEGINNING: usize = 32;

    pub(super) fn of(state: Option<&StateSnapshot>) -> Result<Self, AgentError> {
        let Some(ChannelValue::List(messages)) = state.and_then(|state| state.value("messages")) else {
            return Ok(Self {
                earlier: Earlier::default(),
                turn: conversation(state)?.into_iter().map(kept).collect(),
            });
        };
        let mut turn = Vec::new();
        for message in messages.iter().rev() {
            turn.push(kept(message.to_json()?));
            if turn.last().is_some_and(message::is_from_user) {
                break;
            }
        }
        turn.reverse();
        Ok(Self { earlier: Earlier::new(messages.clone(), messages.len() - turn.len()), turn })
    }

    /// All messages.
    pub(super) fn whole(&self) -> Result<Vec<Json>, AgentError> {
        let mut messages = self.earlier.decode()?;
        messages.extend_from_slice(&self.turn);
        Ok(messages)
    }

    /// Whether its beginning shows that the first exchange is over.
    pub(super) fn is_beyond_first_exchange(&self) -> Result<bool, AgentError> {
        let mut beginning = self.earlier.first(Self::BEGINNING)?;
        beginning.extend_from_slice(&self.turn);
        Ok(!title::is_first_exchange(&beginning))
    }
}

pub(crate) fn conversation(state: Option<&StateSnapshot>) -> Result<Vec<Json>, AgentError> {
    Ok(match state.map(|state| state.json("messages")).transpose()?.flatten() {
        Some(Json::Array(messages)) => messages,
        _ => Vec::new(),
    })
}

/// The messages in writes to the messages channel.
pub(super) fn messages_of(writes: &[Write]) -> Result<Vec<Json>, AgentError> {
    let mut messages = Vec::new();
    for write in writes.iter().filter(|w| w.channel.as_str() == "messages") {
        if let Json::Array(more) = write.value.to_json()? {
            messages.extend(more);
        }
    }
    Ok(messages)
}

/// Stamps the run's human messages with its id, over a client's stamp, because it distinguishes turns.
pub(super) fn stamp_run(messages: &mut Json, run_id: &str) {
    let stamp = |message: &mut Json| {
        let role = message.get("type").or_else(|| message.get("role")).and_then(Json::as_str);
        if !matches!(role, Some("human" | "user")) {
            return;
        }
        if let Some(map) = message.as_object_mut() {
            let kwargs = map.entry("additional_kwargs").or_insert_with(|| json!({}));
            if !kwargs.is_object() {
                *kwargs = json!({});
            }
            kwargs["run_id"] = json!(run_id);
        }
    };
    match messages {
        Json::Array(list) => list.iter_mut().for_each(stamp),
        one => stamp(one),
    }
}

//! The commands of the protocol.

use axum::http::StatusCode;
use serde_json::{Map, Value};

use super::filter::MAX_INTEGER;
use super::reply::{Code, Refusal};
use super::{read, start};
use crate::http::extract::read as read_fields;
use crate::http::fields::{Fields, FromFields};
use crate::http::run_body::{Forked, Responded, Started};

/// A command, before its parameters are read.
#[derive(Debug)]
pub(super) struct Sent {
    /// What the answer names it by.
    pub(super) id: i64,
    method: String,
    params: Map<String, Value>,
}

impl FromFields for Sent {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        Self {
            id: fields.field("id").required().integer(&(0..=MAX_INTEGER)).unwrap_or_default(),
            method: fields.field("method").required().text().unwrap_or_default(),
            params: fields.field("params").object().unwrap_or_default(),
        }
    }
}

/// A command that this gateway does.
#[derive(Debug)]
pub(super) enum Command {
    Start(Started),
    Respond(start::Answers, Responded),
    Fork(Forked),
    State(read::StateQuery),
    Checkpoints(read::CheckpointQuery),
    Tree(read::TreeQuery),
}

/// What this gateway does not do, and what to do instead.
const NOT_SUPPORTED: [(&str, &str); 4] = [
    ("subscription.subscribe", SUBSCRIPTIONS),
    ("subscription.unsubscribe", SUBSCRIPTIONS),
    ("subscription.reconnect", SUBSCRIPTIONS),
    (
        "input.inject",
        "A running run takes no input: send run.start, whose run waits until the active one has ended",
    ),
];
const SUBSCRIPTIONS: &str = "Subscriptions belong to a WebSocket: open /threads/{thread_id}/stream/events with the same channels, namespaces and depth, and close it to unsubscribe";

impl Command {
    /// The command that was sent, with its parameters.
    ///
    /// # Errors
    /// `unknown_command`, `not_supported`, or `invalid_argument` with the problems of the parameters.
    pub(super) fn of(sent: Sent) -> Result<Self, Refusal> {
        let Sent { method, params, .. } = sent;
        Ok(match method.as_str() {
            "run.start" => Self::Start(read_params(params)?),
            "input.respond" => {
                let (answers, responded) = read_params::<start::Response>(params)?.into_parts();
                Self::Respond(answers, responded)
            }
            "state.fork" => Self::Fork(read_params(params)?),
            "state.get" => Self::State(read_params(params)?),
            "state.listCheckpoints" => Self::Checkpoints(read_params(params)?),
            "agent.getTree" => Self::Tree(read_params(params)?),
            other => return Err(unknown(other)),
        })
    }
}

fn unknown(method: &str) -> Refusal {
    match NOT_SUPPORTED.iter().find(|(name, _)| *name == method) {
        Some((_, sentence)) => Refusal::new(Code::NotSupported, StatusCode::NOT_IMPLEMENTED, *sentence),
        None => Refusal::new(
            Code::UnknownCommand,
            StatusCode::UNPROCESSABLE_ENTITY,
            "There is no such command: see the methods of the thread protocol in the description of the API",
        ),
    }
}

fn read_params<T: FromFields>(params: Map<String, Value>) -> Result<T, Refusal> {
    Ok(read_fields(params, vec!["body".into(), "params".into()])?)
}

//! JSON-RPC with an agent, in one task: what it sends is dealt with as it comes, so that nothing queues without bound.

use std::fmt;
use std::io;

use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use serde_json::{Value as Json, json};
use threadkeep_agent::tools::HeadAndTail;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};

use crate::lines::Lines;
use crate::protocol::{INVALID_PARAMS, Incoming, METHOD_NOT_FOUND, RpcError, message_text, permission};

/// How many bytes of answers may wait for an agent that does not read them, before nothing more is read from it.
const ANSWERS_MAX: usize = 256 * 1024;

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    /// The agent refused it.
    #[error("{method} failed: {}", .error.text())]
    Refused { method: &'static str, error: RpcError },
    /// The answer makes no sense.
    #[error("its answer to {method} is not one of the protocol: {problem}")]
    Malformed { method: &'static str, problem: String },
    /// The connection ended or broke.
    #[error(transparent)]
    Broken(#[from] io::Error),
}

/// What the agent may do and what it has said.
pub(crate) struct Dialogue {
    /// Whether requests for permission are granted.
    pub(crate) approve: bool,
    /// Its message, as far as it is kept.
    pub(crate) said: HeadAndTail,
    /// Whether it has said anything but white space.
    pub(crate) has_said: bool,
}

/// A connection to an agent. A future of it that is dropped loses nothing: the next one goes on.
pub(crate) struct Connection<R, W> {
    lines: Lines<R>,
    writer: W,
    /// What is still to be written.
    outgoing: Vec<u8>,
    /// How much of that are answers.
    answers: usize,
    next_id: u64,
}

/// A request that was sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sent {
    method: &'static str,
    id: u64,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Connection<R, W> {
    pub(crate) fn new(reader: R, writer: W) -> Self {
        Self { lines: Lines::new(reader), writer, outgoing: Vec::new(), answers: 0, next_id: 0 }
    }

    /// The side that writes.
    pub(crate) fn into_writer(self) -> W {
        self.writer
    }

    pub(crate) fn send(&mut self, method: &'static str, params: &Json) -> Sent {
        let id = self.next_id;
        self.next_id += 1;
        self.queue(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}));
        Sent { method, id }
    }

    pub(crate) fn notify(&mut self, method: &str, params: &Json) {
        self.queue(&json!({"jsonrpc": "2.0", "method": method, "params": params}));
    }

    fn queue(&mut self, message: &impl fmt::Display) -> usize {
        let line = format!("{message}\n");
        self.outgoing.extend_from_slice(line.as_bytes());
        line.len()
    }

    /// Waits for the answer, and deals with everything that comes before it.
    pub(crate) async fn answer<T: DeserializeOwned>(
        &mut self,
        sent: Sent,
        dialogue: &mut Dialogue,
    ) -> Result<T, RequestError> {
        loop {
            let reads = self.answers < ANSWERS_MAX;
            tokio::select! {
                written = self.writer.write(&self.outgoing), if !self.outgoing.is_empty() => {
                    self.written(written.unwrap_or_default())?;
                }
                line = self.lines.next(), if reads => {
                    let line = line?.ok_or_else(ended)?;
                    // What is no message is a remark of a program that writes to the wrong place.
                    let Ok(message) = serde_json::from_slice::<Incoming<'_>>(line) else { continue };
                    match received(&message, sent, dialogue) {
                        Received::Answer(answer) => return answer,
                        Received::Reply(reply) => self.answers += self.queue(&reply),
                        Received::Nothing => {}
                    }
                }
            }
        }
    }

    fn written(&mut self, count: usize) -> io::Result<()> {
        // It takes nothing any more.
        if count == 0 {
            return Err(ended());
        }
        self.outgoing.drain(..count);
        // Answers are behind requests, so this many of them are left at most.
        self.answers = self.answers.min(self.outgoing.len());
        Ok(())
    }
}

fn ended() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "it ended before it answered")
}

enum Received<T> {
    Answer(Result<T, RequestError>),
    Reply(String),
    Nothing,
}

fn received<T: DeserializeOwned>(message: &Incoming<'_>, sent: Sent, dialogue: &mut Dialogue) -> Received<T> {
    match (message.method.as_deref(), message.id) {
        (Some(method), Some(id)) => {
            let outcome = match method {
                "session/request_permission" => permission(message.params, dialogue.approve)
                    .ok_or((INVALID_PARAMS, "Invalid params: options are required")),
                _ => Err((METHOD_NOT_FOUND, "Method not found")),
            };
            Received::Reply(reply(id, outcome))
        }
        (Some("session/update"), None) => {
            if let Some(text) = message.params.and_then(message_text) {
                dialogue.has_said |= !text.trim().is_empty();
                dialogue.said.push(text.as_bytes());
            }
            Received::Nothing
        }
        (None, id) if id.is_some_and(|id| id.get() == sent.id.to_string()) => {
            Received::Answer(answered(message, sent.method))
        }
        // Another notification, or an answer to a request that nobody waits for.
        (_, _) => Received::Nothing,
    }
}

/// The answer to the agent's request with this id. The id is repeated as it was sent: its value may be a number that no
/// type here holds, or nested more deeply than `serde_json` reads.
fn reply(id: &RawValue, outcome: Result<Json, (i64, &str)>) -> String {
    let outcome = match outcome {
        Ok(result) => format!(r#""result":{result}"#),
        Err((code, text)) => format!(r#""error":{}"#, json!({"code": code, "message": text})),
    };
    format!(r#"{{"jsonrpc":"2.0","id":{id},{outcome}}}"#)
}

fn answered<T: DeserializeOwned>(message: &Incoming<'_>, method: &'static str) -> Result<T, RequestError> {
    if let Some(error) = message.error {
        let error = serde_json::from_str(error.get()).unwrap_or_default();
        return Err(RequestError::Refused { method, error });
    }
    let result = message.result.map_or("null", |result| result.get());
    serde_json::from_str(result)
        .map_err(|error| RequestError::Malformed { method, problem: error.to_string() })
}

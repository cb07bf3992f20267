//! The runs that commands of the thread protocol start: the fields of their parameters.

use std::fmt;

use serde_json::{Map, Value};
use threadkeep_records::MultitaskStrategy;

use super::command::Command;
use super::config::SentConfig;
use super::{RunBody, assistants};
use crate::http::fields::{Fields, Flaw, FromFields};
use crate::runs::request::{RunOptions, StreamMode};

const TRACER: &str = "Traces go where the gateway's own telemetry goes: see `telemetry` in config.yaml";
const OTHER_THREAD: &str = "Input should be the thread of the path";

/// The run of `run.start`.
pub(in crate::http) struct Started(pub(in crate::http) RunBody);

/// The run of `input.respond`, which still needs the answer.
pub(in crate::http) struct Responded(RunBody);

/// The run of `state.fork`.
pub(in crate::http) struct Forked(pub(in crate::http) RunBody);

impl FromFields for Started {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let assistant_id = assistants::named(fields, "assistant_id");
        // The protocol has no name for it; its clients have this one.
        let strategies = ["reject", "rollback", "interrupt", "enqueue"];
        let strategy = fields.field("multitaskStrategy").nullable().one_of(&strategies);
        let strategy = strategy.and_then(|name| name.parse().ok());
        fields.field("langsmith_tracer").unsupported(TRACER);
        let mut body = RunBody::of_command(fields).with_input(fields);
        body.assistant_id = assistant_id;
        // Input for a thread at work is not lost: it waits.
        body.options.multitask_strategy = strategy.unwrap_or(MultitaskStrategy::Enqueue);
        Self(body)
    }
}

impl FromFields for Responded {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let mut body = RunBody::of_command(fields);
        body.command = Command::beside_answer(fields);
        Self(body)
    }
}

impl Responded {
    /// The run with its answer.
    pub(in crate::http) fn with(self, answer: Value) -> RunBody {
        let mut body = self.0;
        body.command.resume = Some(answer);
        body
    }
}

impl FromFields for Forked {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let checkpoint_id = fields.field("checkpoint_id").required().text();
        let mut body = RunBody::of_command(fields).with_input(fields);
        body.checkpoint_id = checkpoint_id;
        Self(body)
    }
}

impl RunBody {
    /// A run with the fields `config` and `metadata`, which shows everything that the protocol has a channel for.
    fn of_command(fields: &mut Fields<'_>) -> Self {
        let options = RunOptions {
            stream_modes: vec![
                StreamMode::Values,
                StreamMode::MessagesTuple,
                StreamMode::Updates,
                StreamMode::Checkpoints,
                StreamMode::Tasks,
                StreamMode::Custom,
            ],
            stream_subgraphs: true,
            ..RunOptions::default()
        };
        Self {
            assistant_id: None,
            input: None,
            command: Command::default(),
            metadata: fields.field("metadata").nullable().object().unwrap_or_default(),
            config: SentConfig::from_fields(fields),
            checkpoint_id: None,
            checkpoint: None,
            options,
            sent_input: Value::Null,
        }
    }

    /// With the field `input`: channel values, nothing, or the answer to what the thread waits for.
    fn with_input(mut self, fields: &mut Fields<'_>) -> Self {
        self.sent_input = fields.peek("input").cloned().unwrap_or_default();
        match fields.field("input").nullable().any() {
            None => {}
            Some(Value::Object(input)) => self.input = Some(input),
            Some(answer) => self.command.resume = Some(answer),
        }
        self
    }

    /// Refuses a thread of the configuration that is not the one of the path.
    pub(in crate::http) fn names_only(&self, thread: &str) -> Option<(Flaw, Value)> {
        let named = self.thread_id().filter(|named| *named != thread)?;
        Some((Flaw::new("value_error", OTHER_THREAD), named.into()))
    }
}

impl fmt::Debug for Started {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Responded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Forked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A list of messages that answers several questions at once.
pub(in crate::http) fn together(answers: Vec<Value>) -> Value {
    let mut messages = Vec::new();
    for answer in answers {
        match answer {
            Value::Object(mut fields) if fields.len() == 1 && fields.contains_key("messages") => {
                match fields.remove("messages") {
                    Some(Value::Array(list)) => messages.extend(list),
                    Some(message) => messages.push(message),
                    None => {}
                }
            }
            answer => messages.push(answer),
        }
    }
    Value::Object(Map::from_iter([("messages".to_owned(), Value::Array(messages))]))
}

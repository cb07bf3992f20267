//! A model that answers from a JSON file: for tests, and for a tour without an API key.
//!
//! # The script
//!
//! ```json
//! {
//!   "chunk_chars": 12,
//!   "rules": [
//!     {
//!       "when": {"contains": ["write a file"], "turn": 0, "caller": "lead_agent"},
//!       "repeat_last": false,
//!       "answers": [
//!         {
//!           "text": "I will write it.",
//!           "tool_calls": [{"name": "write_file", "args": {"path": "a.txt", "content": "{{input}}"}}],
//!           "usage": {"input_tokens": 20, "output_tokens": 9}
//!         },
//!         {"text": "Done: {{tool_result}}"}
//!       ]
//!     },
//!     {"answers": [{"text": "You said: {{input}}"}]}
//!   ]
//! }
//! ```
//!
//! The first rule whose `when` matches answers; a rule without `when` always matches. All given conditions must hold:
//!
//! | Condition | Holds when |
//! |---|---|
//! | `contains` | the user's last message contains one of the texts, ignoring case |
//! | `turn` | that many messages of the user came before the last one |
//! | `caller` | the request's caller is this, or begins with this and a colon |
//! | `system` | the system prompt contains one of the texts, ignoring case |
//! | `offered` | all of these tools are on offer |
//! | `anywhere` | some message of the conversation contains one of the texts, ignoring case |
//!
//! The rule's answers are used in order within a turn: the index of the next one is the number of assistant messages
//! after the user's last message. No other state is kept, so a restarted process continues where the conversation is.
//! After the last answer there is an error, unless `repeat_last` is set.
//!
//! | Key of an answer | Meaning |
//! |---|---|
//! | `text` | streamed in pieces of `chunk_chars` characters (default 16) |
//! | `tool_calls` | list of `{name, args, id}`; without an `id` one is derived from the conversation; the arguments are streamed in pieces, too |
//! | `usage` | `{input_tokens, output_tokens}`; their sum is the total |
//! | `finish_reason` | default `tool_calls` with tool calls, else `stop` |
//! | `error` | `{kind, message, attempts, after_chunks}`: fails, with kind `transient` or `fatal`, after that many chunks (default 0); with `attempts` only in the first that many attempts of a retried call |
//! | `delay_ms` | pause before each chunk |
//! | `gate` | `{name, after_chunks}`: after that many chunks (default 0) the answer waits until the [`gate`] is opened |
//!
//! In texts and in strings of arguments `{{input}}` is replaced by the user's last message and `{{tool_result}}` by the
//! last tool result; `{{result:ID}}` is the newest result of the call with that id. The chunks are deterministic; the
//! message ids are not.
//!
//! With the key `record` beside `rules`, a path, each request is appended to that file as a line of JSON before it is
//! answered: `{model, caller, attempt, system, tools, messages}`. So a test can count the calls of several processes.

mod gate;
mod script;

use std::io::Write as _;
use std::time::Duration;

use async_trait::async_trait;
use futures::{StreamExt, stream};
use serde_json::Value;

use super::message::{kind, text, turn_start};
use super::{
    ChatModel, ChunkStream, ModelChunk, ModelError, ModelErrorKind, ModelRequest, ModelSettings,
    ToolCallChunk, Usage,
};
pub use gate::{Gate, gate};
use script::{Answer, ErrorKind, Failing, Script, Situation, pieces};

/// The demo script, which needs no API key.
const DEMO: &str = include_str!("../../../scripts/demo.json");

/// A model that answers from a script.
#[derive(Debug)]
pub struct ScriptedModel {
    name: String,
    script: Script,
    /// Whether the script needs more than the current turn.
    looks_back: bool,
}

impl ScriptedModel {
    /// A model named `name` with the script in `json`.
    pub fn from_json(name: impl Into<String>, json: &str) -> Result<Self, ModelError> {
        let name = name.into();
        match threadkeep::json::from_str(json) {
            Ok(script) => Ok(Self::new(name, script)),
            Err(error) => {
                Err(ModelError::new(&name, ModelErrorKind::Configuration, format!("script: {error}")))
            }
        }
    }

    /// The model of `settings`, with its script file or the demo. Blocks on the file.
    pub(super) fn from_settings(settings: ModelSettings) -> Result<Self, ModelError> {
        let Some(path) = settings.script else { return Self::from_json(settings.name, DEMO) };
        let in_file = |error: &dyn std::fmt::Display| {
            let detail = format!("script file {}: {error}", path.display());
            ModelError::new(&settings.name, ModelErrorKind::Configuration, detail)
        };
        let json = std::fs::read_to_string(&path).map_err(|error| in_file(&error))?;
        let script = threadkeep::json::from_str(&json).map_err(|error| in_file(&error))?;
        Ok(Self::new(settings.name, script))
    }

    fn new(name: String, script: Script) -> Self {
        Self { looks_back: script.looks_back(), name, script }
    }

    /// Appends the request to the script's record, if it keeps one.
    fn record<'r>(
        &self,
        request: &'r ModelRequest,
        conversation: &impl Fn() -> Result<std::borrow::Cow<'r, [Value]>, ModelError>,
    ) -> Result<(), ModelError> {
        let Some(path) = &self.script.record else { return Ok(()) };
        let tools: Vec<&str> = request.tools.iter().map(|tool| tool.name.as_str()).collect();
        let line = serde_json::json!({
            "model": self.name, "caller": request.caller, "attempt": request.attempt,
            "system": request.system, "tools": tools, "messages": conversation()?,
        });
        let written = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
        written.map_err(|error| {
            let detail = format!("the record {}: {error}", path.display());
            ModelError::new(&self.name, ModelErrorKind::Script, detail)
        })
    }

    fn damaged(&self, error: &threadkeep::Error) -> ModelError {
        ModelError::new(&self.name, ModelErrorKind::Script, format!("the conversation is damaged: {error}"))
    }
}

#[async_trait]
impl ChatModel for ScriptedModel {
    fn name(&self) -> &str {
        &self.name
    }

    fn provider(&self) -> &'static str {
        "scripted"
    }

    async fn stream(&self, request: &ModelRequest) -> Result<ChunkStream, ModelError> {
        let all = || request.conversation().map_err(|error| self.damaged(&error));
        self.record(request, &all)?;
        let situation = if self.looks_back || turn_start(&request.messages).is_none() {
            situation(&all()?, request, self.looks_back)
        } else {
            situation(&request.messages, request, false)
        };
        let Some(answer) = self.script.answer(&situation) else {
            // The error counts the turns.
            let situation = self::situation(&all()?, request, false);
            return Err(ModelError::new(
                &self.name,
                ModelErrorKind::Script,
                format!(
                    "the script has no answer {} in turn {} for caller `{}`",
                    situation.answered, situation.turn, situation.caller
                ),
            ));
        };
        let plan = self.plan(answer, &situation, request.attempt);
        Ok(stream::iter(plan).filter_map(Event::happen).boxed())
    }
}

/// What the script needs to know about the conversation; the texts and results of all messages only if it `looks_back`.
fn situation(messages: &[Value], request: &ModelRequest, looks_back: bool) -> Situation {
    let start = turn_start(messages);
    let turn = messages.iter().filter(|message| super::message::is_from_user(message)).count();
    let since = start.map_or(messages, |start| &messages[start..]);
    Situation {
        input: start.map(|start| text(&messages[start])).unwrap_or_default(),
        input_id: start.and_then(|start| messages[start]["id"].as_str()).unwrap_or("none").to_owned(),
        turn: turn.saturating_sub(1),
        answered: since.iter().filter(|message| kind(message) == "ai").count(),
        tool_result: messages.iter().rfind(|message| kind(message) == "tool").map(text).unwrap_or_default(),
        caller: request.caller.clone(),
        system: request.system.clone().unwrap_or_default(),
        offered: request.tools.iter().map(|tool| tool.name.clone()).collect(),
        said: messages.iter().filter(|_| looks_back).map(text).collect(),
        results: messages
            .iter()
            .filter(|message| looks_back && kind(message) == "tool")
            .filter_map(|message| Some((message["tool_call_id"].as_str()?.to_owned(), text(message))))
            .collect(),
    }
}

/// A step of an answer.
enum Event {
    Pause(Duration),
    Gate(Gate),
    Give(Box<Result<ModelChunk, ModelError>>),
}

impl Event {
    async fn happen(self) -> Option<Result<ModelChunk, ModelError>> {
        match self {
            Self::Pause(duration) => tokio::time::sleep(duration).await,
            Self::Gate(gate) => gate.pass().await,
            Self::Give(item) => return Some(*item),
        }
        None
    }
}

impl ScriptedModel {
    fn plan(&self, answer: &Answer, situation: &Situation, attempt: u32) -> Vec<Event> {
        let error =
            answer.error.as_ref().filter(|error| error.attempts.is_none_or(|failing| attempt < failing));
        let mut plan = Vec::new();
        // The last chunk ends the answer, so a gate or an error comes before it.
        let chunks = chunks(answer, situation, self.script.chunk_chars);
        let count = chunks.len();
        for (given, chunk) in chunks.into_iter().enumerate() {
            if let Some(gate_at) = answer.gate.as_ref().filter(|at| at.after_chunks.min(count - 1) == given) {
                plan.push(Event::Gate(gate(&gate_at.name)));
            }
            if let Some(error) = error.filter(|error| error.after_chunks.min(count - 1) == given) {
                plan.push(Event::Give(Box::new(Err(self.failure(error)))));
                break;
            }
            if let Some(delay) = answer.delay_ms {
                plan.push(Event::Pause(Duration::from_millis(delay)));
            }
            plan.push(Event::Give(Box::new(Ok(chunk))));
        }
        plan
    }

    fn failure(&self, error: &Failing) -> ModelError {
        let kind = match error.kind {
            ErrorKind::Transient => ModelErrorKind::Server,
            ErrorKind::Fatal => ModelErrorKind::Rejected,
        };
        ModelError::new(&self.name, kind, error.message.clone())
    }
}

/// The chunks of `answer`: its text, its calls in order, and the final chunk.
fn chunks(answer: &Answer, situation: &Situation, chunk_chars: usize) -> Vec<ModelChunk> {
    let text = pieces(&situation.expand(&answer.text), chunk_chars);
    let mut chunks: Vec<ModelChunk> =
        text.into_iter().map(|text| ModelChunk { text, ..ModelChunk::default() }).collect();
    for (index, call) in (0u64..).zip(&answer.tool_calls) {
        let id = call
            .id
            .clone()
            .unwrap_or_else(|| format!("call_{}_{}_{index}", situation.input_id, situation.answered));
        let args = Value::Object(situation.expand_args(&call.args)).to_string();
        let head =
            ToolCallChunk { index, id: Some(id), name: Some(call.name.clone()), ..ToolCallChunk::default() };
        let tail = pieces(&args, chunk_chars).into_iter().map(|args| ToolCallChunk {
            index,
            args,
            ..ToolCallChunk::default()
        });
        chunks.extend(
            std::iter::once(head)
                .chain(tail)
                .map(|piece| ModelChunk { tool_call_chunks: vec![piece], ..ModelChunk::default() }),
        );
    }
    let default_reason = if answer.tool_calls.is_empty() { "stop" } else { "tool_calls" };
    chunks.push(ModelChunk {
        finish_reason: Some(answer.finish_reason.clone().unwrap_or_else(|| default_reason.to_owned())),
        usage: answer.usage.map(|tokens| Usage {
            input_tokens: tokens.input_tokens,
            output_tokens: tokens.output_tokens,
            total_tokens: tokens.input_tokens + tokens.output_tokens,
            ..Usage::default()
        }),
        ..ModelChunk::default()
    });
    chunks
}

#[cfg(test)]
// JSON literals are passed by value.
#[allow(clippy::needless_pass_by_value)]
mod tests;

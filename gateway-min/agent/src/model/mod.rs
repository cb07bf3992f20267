//! Chat models: requests of the agent, and their streamed answers.
//!
//! A [`ChatModel`] turns a [`ModelRequest`] into a stream of [`ModelChunk`]s. Two kinds exist: any endpoint that speaks
//! the OpenAI chat-completions protocol, and a scripted model ([`scripted`]) that answers from a JSON file, for tests
//! and for a tour without an API key. [`build`] creates either from [`ModelSettings`].
//!
//! An agent does not call a [`ChatModel`] directly but through a [`RetryingModel`], which retries transient failures
//! and ends in a marked fallback answer instead of an error. A [`ChunkAssembler`] folds the chunks into the stored
//! message, and renders each chunk as the dictionary that clients receive.
//!
//! Messages are JSON objects in their wire format; [`message`] reads and builds them.

mod arguments;
mod assemble;
mod chunk;
mod error;
pub mod message;
mod openai;
mod retry;
pub mod scripted;
mod settings;
mod thinking;

use std::borrow::Cow;
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::BoxStream;
use serde_json::Value;
use threadkeep::value::{Element, ListValue};

use crate::tools::dangling;

pub(crate) use arguments::{LENGTH_CAPPED, capped};
pub use arguments::{call_arguments, is_cut_off};
pub use assemble::ChunkAssembler;
pub use chunk::{Fallback, ModelChunk, ToolCallChunk, Usage};
pub use error::{ModelError, ModelErrorKind};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use openai::fuzz;
pub use openai::is_loopback;
pub use retry::{RetryingModel, Sleeper};
pub use settings::{ModelKind, ModelSettings};
pub(crate) use thinking::without_thinking;
pub use threadkeep_config::Secret;

/// The chunks of one answer, in order. The last one has a [`finish_reason`](ModelChunk::finish_reason); a stream that
/// ends without one has failed, and its last item is the error. Dropping the stream abandons the answer.
pub type ChunkStream = BoxStream<'static, Result<ModelChunk, ModelError>>;

/// A model that answers a conversation.
#[async_trait]
pub trait ChatModel: Send + Sync {
    /// The configured name of the model.
    fn name(&self) -> &str;

    /// The provider's short name (`openai`, `scripted`), for the stream's `ls_provider`.
    fn provider(&self) -> &str;

    /// Starts an answer to `request` and returns its chunks as they arrive.
    ///
    /// Makes one attempt. Fails if the answer cannot be started; a later failure is an item of the stream.
    async fn stream(&self, request: &ModelRequest) -> Result<ChunkStream, ModelError>;
}

/// A request to a model.
#[derive(Debug, Clone, Default)]
pub struct ModelRequest {
    /// The system prompt; sent before `messages`.
    pub system: Option<String>,
    /// What was said before `messages`.
    pub earlier: Earlier,
    /// The conversation, oldest message first, in serialised form; if there is an earlier part, the current turn.
    pub messages: Vec<Value>,
    /// The tools the model may call.
    pub tools: Vec<ToolSpec>,
    /// The caller: `lead_agent`, `subagent` or `middleware[:<name>]`. Scripts can match on it.
    pub caller: String,
    /// Whether the model should think: `Some(true)` adds the settings' `when_thinking_enabled`,
    /// `Some(false)` its `when_thinking_disabled`, `None` neither.
    pub thinking: Option<bool>,
    /// Sent as `reasoning_effort` when set.
    pub reasoning_effort: Option<String>,
    /// How often this request was tried before; set by [`RetryingModel`]. Scripts can use it to fail the first
    /// attempts.
    pub attempt: u32,
}

impl ModelRequest {
    /// The whole conversation. Decodes the earlier part, so it takes as long as that is.
    pub(crate) fn conversation(&self) -> threadkeep::Result<Cow<'_, [Value]>> {
        if self.earlier.is_empty() {
            return Ok(Cow::Borrowed(&self.messages));
        }
        let mut said = self.earlier.decode()?;
        said.extend_from_slice(&self.messages);
        let summary = self.earlier.summary.iter().cloned();
        Ok(summary.chain(dangling::repaired(&said)).collect())
    }
}

/// What was said before the current turn: stored messages, decoded when a model needs them, and the summary of what
/// preceded them. Cloning shares the messages.
#[derive(Debug, Clone, Default)]
pub struct Earlier {
    summary: Option<Value>,
    messages: ListValue,
    /// How many of the messages belong to it.
    len: usize,
}

impl Earlier {
    /// The first `len` of these messages.
    pub(crate) fn new(messages: ListValue, len: usize) -> Self {
        Self { summary: None, messages, len }
    }

    /// The same, after this summary.
    pub(crate) fn after(self, summary: Option<Value>) -> Self {
        Self { summary, ..self }
    }

    fn is_empty(&self) -> bool {
        self.len == 0 && self.summary.is_none()
    }

    /// The messages.
    ///
    /// # Errors
    /// [`threadkeep::Error::Corrupt`] if stored bytes do not decode.
    pub(crate) fn decode(&self) -> threadkeep::Result<Vec<Value>> {
        self.first(self.len)
    }

    /// The first `count` messages, or all.
    ///
    /// # Errors
    /// See [`Self::decode`].
    pub(crate) fn first(&self, count: usize) -> threadkeep::Result<Vec<Value>> {
        self.messages.iter().take(self.len.min(count)).map(Element::to_json).collect()
    }
}

/// A tool as described to the model.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolSpec {
    /// The name that the model calls.
    pub name: String,
    /// What it does and when to use it, for the model.
    pub description: String,
    /// The JSON schema of its arguments: an object schema.
    pub parameters: Value,
}

/// Creates the model that `settings` describe.
///
/// Reads the script file of a scripted model, so call it where blocking is allowed. Fails with kind
/// [`Configuration`](ModelErrorKind::Configuration) if the settings are unusable.
pub fn build(settings: ModelSettings) -> Result<Arc<dyn ChatModel>, ModelError> {
    Ok(match settings.kind {
        ModelKind::OpenAiCompatible => Arc::new(openai::OpenAiModel::new(settings)?),
        ModelKind::Scripted => Arc::new(scripted::ScriptedModel::from_settings(settings)?),
    })
}

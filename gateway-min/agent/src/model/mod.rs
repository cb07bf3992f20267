//! Chat models: what the agent asks for an answer, and how the answer comes back.
//!
//! A [`ChatModel`] turns a [`ModelRequest`] into a stream of [`ModelChunk`]s. Two kinds exist: any endpoint
//! that speaks the OpenAI chat-completions protocol, and a scripted model ([`scripted`]) that answers from a
//! JSON file, for tests and for a first tour without an API key. [`build`] makes either from
//! [`ModelSettings`].
//!
//! An agent does not call a [`ChatModel`] directly but through a [`RetryingModel`], which retries transient
//! failures and ends in a marked fallback answer instead of an error. A [`ChunkAssembler`] folds the chunks
//! into the message that is stored, and renders each one as the dictionary that clients receive.
//!
//! Messages are JSON objects in the serialised form of the wire; [`message`] reads and makes them.

mod assemble;
mod chunk;
mod error;
pub mod message;
mod openai;
mod retry;
pub mod scripted;
mod settings;

use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::BoxStream;
use serde_json::Value;

pub use assemble::ChunkAssembler;
pub use chunk::{Fallback, ModelChunk, ToolCallChunk, Usage};
pub use error::{ModelError, ModelErrorKind};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use openai::fuzz;
pub use retry::{RetryingModel, Sleeper};
pub use settings::{ModelKind, ModelSettings};
pub use threadkeep_config::Secret;

/// The chunks of one answer, in order. The last one has a
/// [`finish_reason`](ModelChunk::finish_reason); a stream that ends without it failed, and says so in its
/// last item. Dropping the stream abandons the answer.
pub type ChunkStream = BoxStream<'static, Result<ModelChunk, ModelError>>;

/// A model that answers a conversation.
#[async_trait]
pub trait ChatModel: Send + Sync {
    /// The name the model is configured under.
    fn name(&self) -> &str;

    /// The provider's short name (`openai`, `scripted`), for the stream's `ls_provider`.
    fn provider(&self) -> &str;

    /// Starts an answer to `request` and returns its chunks as they come.
    ///
    /// Makes one attempt. Fails when the answer cannot be started; a failure after that is an item of the
    /// stream.
    async fn stream(&self, request: &ModelRequest) -> Result<ChunkStream, ModelError>;
}

/// What a model is asked.
#[derive(Debug, Clone, Default)]
pub struct ModelRequest {
    /// The system prompt; sent before `messages`.
    pub system: Option<String>,
    /// The conversation, oldest message first, in serialised form.
    pub messages: Vec<Value>,
    /// The tools the model may call.
    pub tools: Vec<ToolSpec>,
    /// Who asks: `lead_agent`, `subagent` or `middleware[:<name>]`. Scripts can match on it.
    pub caller: String,
    /// Whether the model should think: `Some(true)` adds the settings' `when_thinking_enabled`,
    /// `Some(false)` its `when_thinking_disabled`, `None` neither.
    pub thinking: Option<bool>,
    /// Sent as `reasoning_effort` when set.
    pub reasoning_effort: Option<String>,
    /// How often this very request was tried before; set by [`RetryingModel`]. Scripts can fail the first
    /// attempts by it.
    pub attempt: u32,
}

/// A tool as the model sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolSpec {
    /// The name the model calls it by.
    pub name: String,
    /// What it does and when to use it, for the model.
    pub description: String,
    /// The JSON schema of its arguments: an object schema.
    pub parameters: Value,
}

/// Makes the model that `settings` describe.
///
/// Reads the script file of a scripted model, so call it where blocking is allowed. Fails with kind
/// [`Configuration`](ModelErrorKind::Configuration) when the settings make no usable model.
pub fn build(settings: ModelSettings) -> Result<Arc<dyn ChatModel>, ModelError> {
    Ok(match settings.kind {
        ModelKind::OpenAiCompatible => Arc::new(openai::OpenAiModel::new(settings)?),
        ModelKind::Scripted => Arc::new(scripted::ScriptedModel::from_settings(settings)?),
    })
}

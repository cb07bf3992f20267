//! The body of the routes that create a run.
//!
//! The checks run in the order that the service promises, interleaved with the route's own:
//!
//! 1. [`ApiJson<RunBody>`](super::extract::ApiJson): 422 if the body is malformed;
//! 2. the route: permission, ownership, existing thread;
//! 3. [`RunBody::check`]: 422 for secrets in the metadata, 400 for an unknown model;
//! 4. the route: ownership of the thread named by a stateless request ([`RunBody::thread_id`]);
//! 5. [`RunBody::into_request`]: 400 for a malformed message, then 400 or 404 for the checkpoint selector;
//! 6. the route: 404 for a missing checkpoint, then admission.

mod command;
mod config;
mod context;
mod delegation;
mod input;
mod options;
mod protocol;
mod secrets;

use std::fmt;

use axum::http::StatusCode;
use serde_json::{Map, Value, json};
use threadkeep::id::{IdSource, ThreadId};
use threadkeep_agent::AgentError;

pub(super) use command::Command;
pub(super) use input::{SERVER_OWNED, Selected, messages, selector};
pub(super) use options::stream_modes;
pub(super) use protocol::{Forked, Responded, Started, together};

use super::assistants;
use super::error::ApiError;
use super::fields::{Fields, Flaw, FromFields, shortened};
use crate::runs::request::{RunInput, RunOptions, RunRequest};
use config::SentConfig;

/// A key of the request's metadata in which older clients sent a credential.
const RESERVED_METADATA_KEY: &str = "auth_token";
/// The response to [`RESERVED_METADATA_KEY`].
const RESERVED_METADATA: &str = "Run metadata key 'auth_token' is reserved: metadata is stored; leave it out, no tool takes credentials from a request";

/// A well-formed request body.
pub struct RunBody {
    assistant_id: Option<String>,
    input: Option<Map<String, Value>>,
    command: Command,
    metadata: Map<String, Value>,
    config: SentConfig,
    checkpoint_id: Option<String>,
    checkpoint: Option<Value>,
    options: RunOptions,
    /// `input` as sent.
    sent_input: Value,
}

impl fmt::Debug for RunBody {
    /// Omits the contents, which are a conversation and may contain secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { assistant_id, options, .. } = self;
        let mut debug = f.debug_struct("RunBody");
        debug.field("assistant_id", assistant_id).field("options", options).finish_non_exhaustive()
    }
}

impl FromFields for RunBody {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let assistant_id = assistants::named(fields, "assistant_id");
        let sent_input = fields.peek("input").cloned().unwrap_or_default();
        let body = Self {
            assistant_id,
            input: fields.field("input").nullable().object(),
            command: Command::from_fields(fields),
            metadata: fields.field("metadata").nullable().object().unwrap_or_default(),
            config: SentConfig::from_fields(fields),
            checkpoint_id: fields.field("checkpoint_id").nullable().text(),
            // A malformed selector is a 400, checked later.
            checkpoint: fields.field("checkpoint").nullable().any(),
            options: RunOptions::from_fields(fields),
            sent_input,
        };
        if body.input.is_some() && !body.command.is_empty() {
            let both = "A run starts with an input or with a command, not with both";
            fields.refuse("command", Flaw::new("value_error", both), Value::Null);
        }
        body
    }
}

impl RunBody {
    /// The thread that a stateless request names (`config.configurable.thread_id`); `None` for a new one.
    pub fn thread_id(&self) -> Option<&str> {
        self.config.thread_id.as_deref()
    }

    /// Runs the checks that need the configuration; `is_model` says whether a model is configured.
    ///
    /// # Errors
    /// 422 for a credential in the metadata, then 400 for an unknown model.
    pub fn check(&self, is_model: impl Fn(&str) -> bool) -> Result<(), ApiError> {
        if self.metadata.contains_key(RESERVED_METADATA_KEY) {
            return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, RESERVED_METADATA));
        }
        let name = match self.config.model_name() {
            None => return Ok(()),
            Some(Value::String(name)) if is_model(name) => return Ok(()),
            Some(Value::String(name)) => name.clone(),
            Some(other) => other.to_string(),
        };
        Err(ApiError::bad_request(AgentError::UnknownModel(shortened(name)).to_string()))
    }

    /// The run to start on `thread`. Messages without an id get one from `ids`.
    ///
    /// # Errors
    /// 400 for a malformed message, 400 for a malformed selector or one of another thread, 404 for a selector that cannot
    /// match any checkpoint. The caller checks whether the selected checkpoint exists.
    pub fn into_request(
        self,
        thread: &ThreadId,
        limits: RunLimits,
        ids: &IdSource,
    ) -> Result<RunRequest, ApiError> {
        let kwargs = json!({"input": self.sent_input, "config": self.config.redacted});
        let input = RunInput::new(self.input, self.command, ids)?;
        let fallback = self.checkpoint_id.or_else(|| self.config.checkpoint_id.clone());
        let selected = input::selector(thread, self.checkpoint, fallback)?;
        let checkpoint = selected.of_root("a run starts from the thread's own state")?;
        let delegation = self.config.delegation(limits);
        Ok(RunRequest {
            assistant_id: self.assistant_id,
            agent: None,
            input,
            metadata: self.metadata,
            config: self.config.into_config(limits.max_recursion_limit, limits.internal_caller),
            delegation,
            checkpoint,
            options: self.options,
            kwargs,
        })
    }
}

/// Limits of a run that do not come from its request.
#[derive(Debug, Clone, Copy)]
pub struct RunLimits {
    /// `max_recursion_limit` of the configuration.
    pub max_recursion_limit: u64,
    /// The slots for subagents in this process, which are fixed at start.
    pub max_running: u32,
    /// `subagents.max_total_per_run` of the configuration.
    pub max_total_per_run: u32,
    /// Whether the caller is part of the service, which may start a run without questions to the user.
    pub internal_caller: bool,
}

#[cfg(test)]
mod tests;

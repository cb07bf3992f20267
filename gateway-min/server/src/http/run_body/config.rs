//! The configuration and context of a run: which keys of a request reach it.

use serde_json::{Map, Value};
use threadkeep::metadata::COUNTERS_KEY;
use threadkeep_agent::serialize::is_secret;

use super::secrets::redact;
use super::{RunLimits, context, delegation};
use crate::http::fields::{Fields, Pattern, positive};
use crate::http::threads::OWN_PREFIX;
use crate::runs::request::{DISABLE_CLARIFICATION, Delegation, NON_INTERACTIVE, RunConfig};

/// Context keys that reach the run both as context and as configurable entries.
const SHARED_KEYS: [&str; 10] = [
    "model_name",
    "mode",
    "thinking_enabled",
    "reasoning_effort",
    "is_plan_mode",
    "subagent_enabled",
    "max_concurrent_subagents",
    "max_total_subagents",
    "agent_name",
    "is_bootstrap",
];

/// Keys that only the gateway may set. They end up in checkpoint metadata, where a forged marker would lock a `full`
/// process out of the thread.
const RESERVED_KEYS: [&str; 8] = [
    "thread_id",
    "run_id",
    "checkpoint_id",
    "checkpoint_ns",
    "checkpoint_map",
    COUNTERS_KEY,
    "run_durations",
    "run_message_ids",
];

/// The recursion limit if the request has no usable one.
const DEFAULT_RECURSION_LIMIT: u64 = 100;

/// The configuration in a request, before the caller and the limits are known.
#[derive(Default)]
pub(super) struct SentConfig {
    /// `config` as sent, without secrets.
    pub(super) redacted: Value,
    /// `config.configurable.thread_id`.
    pub(super) thread_id: Option<String>,
    /// `config.configurable.checkpoint_id`.
    pub(super) checkpoint_id: Option<String>,
    config: RunConfig,
    recursion_limit: Value,
    non_interactive: Option<Value>,
}

impl SentConfig {
    /// Takes the fields `config` and `context`.
    pub(super) fn from_fields(fields: &mut Fields<'_>) -> Self {
        let redacted = fields.peek("config").map_or(Value::Null, redact);
        let mut sent = Self { redacted, ..Self::default() };
        let mut inner = Map::new();
        if let Some(mut config) = fields.field("config").nullable().fields() {
            if let Some(mut configurable) = config.field("configurable").nullable().fields() {
                sent.thread_id =
                    configurable.field("thread_id").nullable().text_matching(&Pattern::THREAD_ID);
                sent.checkpoint_id = configurable.field("checkpoint_id").nullable().text();
                context::check(&mut configurable);
                sent.config.configurable = allowed(configurable.into_rest());
            }
            inner = context_of(&mut config);
            sent.config.metadata = allowed(config.field("metadata").nullable().object().unwrap_or_default());
            sent.recursion_limit = config.field("recursion_limit").any().unwrap_or_default();
            sent.config.tags = config.field("tags").nullable().texts().unwrap_or_default();
            config.deny_others();
        }
        let further = context_of(fields);
        sent.take_context(&inner, &further);
        sent
    }

    /// Forwards the known keys of both contexts. Values in `config`, configurable or context, take precedence.
    fn take_context(&mut self, config: &Map<String, Value>, further: &Map<String, Value>) {
        let sent = |key: &str| {
            let value = config.get(key).filter(|value| !value.is_null());
            value.or_else(|| further.get(key).filter(|value| !value.is_null())).cloned()
        };
        let RunConfig { configurable, context, .. } = &mut self.config;
        let take = |configurable: &mut Map<String, Value>, key: &str| {
            configurable.remove(key).filter(|value| !value.is_null()).or_else(|| sent(key))
        };
        self.non_interactive = take(configurable, NON_INTERACTIVE);
        let silent = take(configurable, DISABLE_CLARIFICATION);
        context.extend(silent.map(|value| (DISABLE_CLARIFICATION.to_owned(), value)));
        for key in SHARED_KEYS {
            if let Some(value) = take(configurable, key) {
                configurable.insert(key.to_owned(), value.clone());
                context.insert(key.to_owned(), value);
            }
        }
    }

    /// The model that the request names.
    pub(super) fn model_name(&self) -> Option<&Value> {
        self.config.context.get("model_name")
    }

    /// What the run may delegate.
    pub(super) fn delegation(&self, limits: RunLimits) -> Delegation {
        delegation::of_context(&self.config.context, limits)
    }

    /// The configuration of the run.
    pub(super) fn into_config(self, max_recursion_limit: u64, internal_caller: bool) -> RunConfig {
        let mut config = self.config;
        config.recursion_limit = recursion_limit(&self.recursion_limit, max_recursion_limit);
        if internal_caller {
            config.context.extend(self.non_interactive.map(|value| (NON_INTERACTIVE.to_owned(), value)));
        }
        config
    }
}

/// Takes the field `context`.
fn context_of(fields: &mut Fields<'_>) -> Map<String, Value> {
    let Some(mut context) = fields.field("context").nullable().fields() else { return Map::new() };
    context::check(&mut context);
    context::check_credentials(&mut context);
    context.into_rest()
}

/// Drops the gateway's own keys and credentials, because these entries are stored.
fn allowed(mut entries: Map<String, Value>) -> Map<String, Value> {
    entries.retain(|key, _| {
        let own = key.starts_with("__") || key.starts_with(OWN_PREFIX) || RESERVED_KEYS.contains(&&**key);
        !own && !is_secret(key)
    });
    entries
}

/// A positive integer up to `max`; the default if unusable.
fn recursion_limit(sent: &Value, max: u64) -> u64 {
    positive(sent).unwrap_or(DEFAULT_RECURSION_LIMIT).min(max)
}

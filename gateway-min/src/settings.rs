//! From the configuration to what the gateway's parts take. Each part has settings of its own, so that it can be used
//! and tested without a configuration file.

use std::time::Duration;

use serde_json::Value as Json;
use threadkeep::mode::ChannelMode;

use crate::config::{self, CheckpointChannelMode, Config, RunEventsBackend};
use crate::model::{ModelKind, ModelSettings};
use crate::store::{EventBackend, StoreError};
use crate::tools::ToolSettings;

pub(crate) fn mode(config: &Config) -> ChannelMode {
    match config.database.checkpoint_channel_mode {
        CheckpointChannelMode::Full => ChannelMode::Full,
        CheckpointChannelMode::Delta => ChannelMode::Delta,
    }
}

pub(crate) fn event_backend(config: &Config) -> Result<EventBackend, StoreError> {
    match config.run_events.backend {
        RunEventsBackend::Memory => "memory",
        RunEventsBackend::Db => "db",
        RunEventsBackend::Jsonl => "jsonl",
    }
    .parse()
}

pub(crate) fn tools(config: &Config) -> ToolSettings {
    let sandbox = &config.sandbox;
    ToolSettings {
        allow_host_bash: sandbox.allow_host_bash,
        bash_output_max_chars: sandbox.bash_output_max_chars,
        read_file_output_max_chars: sandbox.read_file_output_max_chars,
        ls_output_max_chars: sandbox.ls_output_max_chars,
        bash_command_timeout: Duration::from_secs(sandbox.bash_command_timeout),
    }
}

pub(crate) fn model(config: &config::Model) -> ModelSettings {
    let (kind, script) = match &config.kind {
        config::ModelKind::Scripted { script } => (ModelKind::Scripted, script.clone()),
        config::ModelKind::OpenAiCompatible => (ModelKind::OpenAiCompatible, None),
    };
    let mut extra = config.client_options.as_map().clone();
    let known: [(&str, Option<Json>); 4] = [
        ("max_tokens", config.max_tokens.map(Json::from)),
        ("temperature", config.temperature.map(Json::from)),
        ("request_timeout", config.request_timeout.map(Json::from)),
        ("max_retries", config.max_retries.map(Json::from)),
    ];
    extra.extend(known.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))));
    ModelSettings {
        base_url: config.base_url.clone(),
        api_key: config.api_key.clone(),
        script,
        extra,
        when_thinking_enabled: config.when_thinking_enabled.as_map().clone(),
        when_thinking_disabled: config.when_thinking_disabled.as_map().clone(),
        stream_chunk_timeout: Duration::from_secs_f64(config.stream_chunk_timeout),
        ..ModelSettings::new(config.name.clone(), kind, config.model.clone())
    }
}

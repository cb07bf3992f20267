//! From the configuration to what the gateway's parts take. Each part has settings of its own, so that it can be used
//! and tested without a configuration file.

use std::time::Duration;

use serde_json::Value as Json;
use threadkeep::mode::ChannelMode;

use crate::config::{self, CheckpointChannelMode, Config, RunEventsBackend, ToolFrequency};
use crate::model::{ModelKind, ModelSettings, Secret};
use crate::store::{EventBackend, StoreError};
use crate::tools::ToolSettings;
use crate::tools::loop_detection::{FrequencyLimits, LoopDetection};

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

pub(crate) fn loop_detection(config: &Config) -> LoopDetection {
    let section = &config.loop_detection;
    let limits = |own: &ToolFrequency| FrequencyLimits {
        warn: own.warn as usize,
        hard_limit: own.hard_limit as usize,
    };
    LoopDetection {
        enabled: section.enabled,
        warn_threshold: section.warn_threshold as usize,
        hard_limit: section.hard_limit as usize,
        window_size: section.window_size,
        tool_freq_warn: section.tool_frequency.warn as usize,
        tool_freq_hard_limit: section.tool_frequency.hard_limit as usize,
        tool_freq_overrides: section
            .tool_freq_overrides
            .iter()
            .map(|(tool, own)| (tool.clone(), limits(own)))
            .collect(),
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
        api_key: config.api_key.as_ref().map(|key| Secret::new(key.expose())),
        script,
        extra,
        when_thinking_enabled: config.when_thinking_enabled.as_map().clone(),
        when_thinking_disabled: config.when_thinking_disabled.as_map().clone(),
        stream_chunk_timeout: Duration::from_secs_f64(config.stream_chunk_timeout),
        ..ModelSettings::new(config.name.clone(), kind, config.model.clone())
    }
}

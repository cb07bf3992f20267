//! The settings of a model.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value};
use threadkeep_config::Secret;

/// The part of an entry of the configuration's `models` that the model itself needs.
#[derive(Clone)]
pub struct ModelSettings {
    /// The configured name.
    pub name: String,
    /// The client to use.
    pub kind: ModelKind,
    /// The provider's own name of the model.
    pub model: String,
    /// The endpoint's URL without `/chat/completions`; default the OpenAI service.
    pub base_url: Option<String>,
    /// Sent as a bearer token; absent for local servers without authentication.
    pub api_key: Option<Secret>,
    /// The script of a scripted model; default the built-in demo.
    pub script: Option<PathBuf>,
    /// Every other key of the entry. `request_timeout` (seconds until the answer must have begun, default 600) is used
    /// here; `max_retries` is ignored, because [`RetryingModel`](super::RetryingModel) handles retries, and so are
    /// `timeout`, which is read before, and `streaming`; `stream_usage`, if it is false, omits `stream_options`; the
    /// entries of `default_headers` are headers of every request, as `organization` is, and those of `default_query`
    /// parameters of its address; the entries of `extra_body` and `model_kwargs` and all other keys become parameters in
    /// its body, where null removes a parameter.
    pub extra: Map<String, Value>,
    /// Merged into `extra` for a request with thinking.
    pub when_thinking_enabled: Map<String, Value>,
    /// Merged into `extra` for a request without thinking.
    pub when_thinking_disabled: Map<String, Value>,
    /// The longest pause between two events of a streamed answer.
    pub stream_chunk_timeout: Duration,
}

/// How a model is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelKind {
    /// An endpoint with the OpenAI chat-completions protocol.
    OpenAiCompatible,
    /// A script in a JSON file; see [`scripted`](super::scripted).
    Scripted,
}

impl ModelSettings {
    /// Settings with a `stream_chunk_timeout` of 240 s and nothing optional set.
    pub fn new(name: impl Into<String>, kind: ModelKind, model: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            kind,
            model: model.into(),
            base_url: None,
            api_key: None,
            script: None,
            extra: Map::new(),
            when_thinking_enabled: Map::new(),
            when_thinking_disabled: Map::new(),
            stream_chunk_timeout: Duration::from_mins(4),
        }
    }
}

/// Omits the values of the free-form maps, because a provider's own keys may be credentials, and the base URL, which
/// may contain a password.
impl fmt::Debug for ModelSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelSettings")
            .field("name", &self.name)
            .field("kind", &self.kind)
            .field("model", &self.model)
            .field("api_key", &self.api_key)
            .field("script", &self.script)
            .field("extra", &self.extra.keys())
            .field("stream_chunk_timeout", &self.stream_chunk_timeout)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn debug_shows_no_secret_and_no_free_form_value() {
        let mut settings = ModelSettings::new("gpt", ModelKind::OpenAiCompatible, "gpt-x");
        settings.api_key = Some(Secret::new("sk-hush"));
        settings.base_url = Some("https://user:hush@host/v1".into());
        settings.extra.insert("default_query".into(), json!({"token": "hush"}));
        settings.when_thinking_enabled.insert("extra_body".into(), json!("hush"));
        let shown = format!("{settings:?}");
        assert!(!shown.contains("hush"), "{shown}");
        assert!(shown.contains("gpt-x") && shown.contains("default_query"), "{shown}");
    }
}

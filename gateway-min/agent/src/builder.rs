//! Builds a lead agent from the configuration, for the gateway's runs and the embedded client.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Map, Value as Json};
use threadkeep_config::{Config, ConfigHandle, Title};
use threadkeep_files::{adopt_thread_names, thread_name};

use crate::agent::CALLER;
use crate::model::{ModelKind, ModelSettings, RetryingModel};
use crate::skills::{self, Skill};
use crate::summary::Summarizer;
use crate::tools::{ToolContext, ToolSettings, ToolSource, Toolbox};
use crate::{Agent, AgentError, DateZone, Middleware, Prompt};

/// What an agent is built for.
pub struct AgentSpec<'a> {
    /// The run.
    pub run_id: &'a str,
    /// Its thread.
    pub thread_id: &'a str,
    /// The configured name of the model; `None` for the first one.
    pub model_name: Option<&'a str>,
    /// Whether the model should think; `None` leaves it to the model.
    pub thinking: Option<bool>,
    /// Passed to the model unchanged.
    pub reasoning_effort: Option<&'a str>,
}

/// What a subagent is built for.
pub struct SubagentSpec<'a> {
    /// Its name: scripts and the sums of usage know it as `subagent:` and this.
    pub name: &'a str,
    /// The run that delegates.
    pub run_id: &'a str,
    /// The thread of that run, in whose directory the subagent works.
    pub thread_id: &'a str,
    /// The configured name of its model.
    pub model_name: &'a str,
    /// Its system prompt.
    pub prompt: Prompt,
    /// The tools that it may call.
    pub toolbox: Toolbox,
    /// Its skills; `None` is all, an empty list none.
    pub skills: Option<Vec<String>>,
    /// What accompanies its model calls.
    pub middleware: Vec<Arc<dyn Middleware>>,
}

/// Builds agents from the current configuration.
pub struct AgentBuilder {
    config: ConfigHandle,
    threads_dir: PathBuf,
    zone: DateZone,
    /// The built-in tools; their settings are fixed at start.
    tools: Arc<Toolbox>,
    /// Where further tools come from.
    sources: Vec<Arc<dyn ToolSource>>,
    /// Models by name, each with the configuration it was built from.
    models: Mutex<HashMap<String, (Arc<Config>, RetryingModel)>>,
}

impl AgentBuilder {
    /// A builder that follows `config`; `current` is the configuration at start.
    pub fn new(config: ConfigHandle, current: &Config) -> Self {
        let threads_dir = current.state_dir.join("threads");
        if let Err(error) = adopt_thread_names(&threads_dir, "") {
            tracing::warn!(%error, directory = %threads_dir.display(), "working directories keep their old names and are not used");
        }
        let tools = Arc::new(Toolbox::builtin(&tool_settings(current)));
        let zone = DateZone::of(config.environment());
        Self { config, tools, sources: Vec::new(), threads_dir, zone, models: Mutex::default() }
    }

    /// The same builder; agents also have the tools of `source`.
    #[must_use]
    pub fn with_source(mut self, source: Arc<dyn ToolSource>) -> Self {
        self.sources.push(source);
        self
    }

    /// The working directory of a thread's tools.
    pub fn thread_dir(&self, thread_id: &str) -> PathBuf {
        self.threads_dir.join(thread_name(thread_id))
    }

    /// The built-in tools that agents have by this configuration.
    pub fn builtin(&self, config: &Config) -> Toolbox {
        let mut toolbox = (*self.tools).clone();
        toolbox.retain(|tool| config.has_builtin_tool(tool));
        toolbox
    }

    /// The tools of every agent: the built-in ones, and those that other sources have now, as far as `tools` and
    /// `tool_groups` say.
    pub async fn toolbox(&self) -> Toolbox {
        let config = self.config.current_async().await;
        let mut toolbox = self.builtin(&config);
        for source in &self.sources {
            for tool in source.tools(&config).await {
                if config.has_tool_group(tool.group()) {
                    toolbox.add(tool);
                }
            }
        }
        toolbox
    }

    /// Builds an agent.
    ///
    /// # Errors
    /// [`AgentError::UnknownModel`], [`AgentError::Model`].
    pub async fn lead(&self, spec: &AgentSpec<'_>) -> Result<Agent, AgentError> {
        let config = self.config.current_async().await;
        let model = self.model(&config, spec.model_name).await?;
        let title_model = self.title_model(&config).await;
        let summarizer = match &config.summarization {
            settings if settings.enabled => {
                let own = spec.model_name;
                Some(self.summarizer(&config, settings.model_name.as_deref().or(own), own).await?)
            }
            _ => None,
        };
        let mut agent = Agent {
            caller: CALLER.to_owned(),
            prompt: Prompt::default(),
            zone: self.zone.clone(),
            middleware: Vec::new(),
            model,
            title_model,
            summarizer,
            toolbox: Arc::new(self.toolbox().await),
            deferred: None,
            tool_context: ToolContext::new(spec.thread_id, spec.run_id, self.thread_dir(spec.thread_id)),
            title: config.title.clone(),
            loop_detection: config.loop_detection.clone(),
            thinking: spec.thinking,
            reasoning_effort: spec.reasoning_effort.map(str::to_owned),
        };
        agent.learn(self.skills(&config, None).await);
        agent.defer(&config.tool_search);
        Ok(agent)
    }

    /// Builds a subagent: without a title, without thinking, with the summaries of the lead agent's configuration.
    ///
    /// # Errors
    /// As [`Self::lead`].
    pub async fn subagent(&self, spec: SubagentSpec<'_>) -> Result<Agent, AgentError> {
        let config = self.config.current_async().await;
        let own = Some(spec.model_name);
        let summarizer = match &config.summarization {
            settings if settings.enabled => {
                Some(self.summarizer(&config, settings.model_name.as_deref().or(own), own).await?)
            }
            _ => None,
        };
        let context = ToolContext::new(spec.thread_id, spec.run_id, self.thread_dir(spec.thread_id));
        let mut agent = Agent {
            caller: format!("subagent:{}", spec.name),
            prompt: spec.prompt,
            zone: self.zone.clone(),
            middleware: spec.middleware,
            summarizer,
            title: Title { enabled: false, ..config.title.clone() },
            loop_detection: config.loop_detection.clone(),
            thinking: Some(false),
            ..Agent::new(self.model(&config, own).await?, spec.toolbox, context)
        };
        agent.learn(self.skills(&config, spec.skills.as_deref()).await);
        agent.defer(&config.tool_search);
        Ok(agent)
    }

    /// The skills with these names, `None` being all, as they are in the configured directory now.
    async fn skills(&self, config: &Config, names: Option<&[String]>) -> Vec<Skill> {
        let Some(path) = config.skills.path.as_ref().filter(|_| names.is_none_or(|names| !names.is_empty()))
        else {
            return Vec::new();
        };
        let directory = config.root.join(path);
        let found = tokio::task::spawn_blocking(move || skills::read_all(&directory)).await;
        skills::permitted(found.unwrap_or_default(), names)
    }

    /// The summarizer for conversations that the model `reader` continues, with summaries by `writer`; without a name,
    /// the first model.
    pub async fn summarizer(
        &self,
        config: &Arc<Config>,
        writer: Option<&str>,
        reader: Option<&str>,
    ) -> Result<Summarizer, AgentError> {
        let section = reader.map_or_else(|| config.models.first(), |name| config.model(name));
        Ok(Summarizer {
            model: self.model(config, writer).await?,
            settings: config.summarization.clone(),
            window: section.and_then(|model| model.context_window),
        })
    }

    /// The model for titles. `None` also if it cannot be used: then titles are cut from the first message, and no run
    /// fails.
    async fn title_model(&self, config: &Arc<Config>) -> Option<RetryingModel> {
        let name = config.title.model_name.as_deref().filter(|_| config.title.enabled)?;
        let model = self.model(config, Some(name)).await;
        model.inspect_err(|error| tracing::warn!(%error, "the model for titles cannot be used")).ok()
    }

    /// The model with this name, or the first one; built once per configuration.
    async fn model(&self, config: &Arc<Config>, name: Option<&str>) -> Result<RetryingModel, AgentError> {
        let section = match name {
            Some(name) => config.model(name),
            None => config.models.first(),
        };
        let section = section.ok_or_else(|| AgentError::UnknownModel(name.unwrap_or_default().to_owned()))?;
        let built = |models: &HashMap<String, (Arc<Config>, RetryingModel)>| {
            let known = models.get(&section.name).filter(|(of, _)| Arc::ptr_eq(of, config));
            known.map(|(_, model)| model.clone())
        };
        if let Some(model) = built(&self.models.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(model);
        }
        let making = model_settings(section);
        let model = tokio::task::spawn_blocking(move || crate::model::build(making)).await;
        let model = RetryingModel::new(model.map_err(|_| AgentError::Stopping)??);
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        models.insert(section.name.clone(), (Arc::clone(config), model.clone()));
        Ok(model)
    }
}

/// The tools' settings from the section `sandbox`.
fn tool_settings(config: &Config) -> ToolSettings {
    let sandbox = &config.sandbox;
    ToolSettings {
        allow_host_bash: sandbox.allow_host_bash,
        bash_output_max_chars: sandbox.bash_output_max_chars,
        read_file_output_max_chars: sandbox.read_file_output_max_chars,
        ls_output_max_chars: sandbox.ls_output_max_chars,
        bash_command_timeout: Duration::from_secs(sandbox.bash_command_timeout),
        environment: Arc::new(sandbox.environment.clone()),
    }
}

/// A model's settings from its entry in `models`.
fn model_settings(config: &threadkeep_config::Model) -> ModelSettings {
    let (kind, script) = match &config.kind {
        threadkeep_config::ModelKind::Scripted { script } => (ModelKind::Scripted, script.clone()),
        threadkeep_config::ModelKind::OpenAiCompatible => (ModelKind::OpenAiCompatible, None),
    };
    let mut extra = config.client_options.as_map().clone();
    let known: [(&str, Option<Json>); 3] = [
        ("max_tokens", config.max_tokens.map(Json::from)),
        ("temperature", config.temperature.map(Json::from)),
        ("request_timeout", config.request_timeout.map(Json::from)),
    ];
    extra.extend(known.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))));
    ModelSettings {
        base_url: config.base_url.clone(),
        api_key: config.api_key.clone(),
        script,
        extra,
        when_thinking_enabled: when_thinking_enabled(config),
        when_thinking_disabled: config.when_thinking_disabled.as_map().clone(),
        stream_chunk_timeout: Duration::from_secs_f64(config.stream_chunk_timeout),
        ..ModelSettings::new(config.name.clone(), kind, config.model.clone())
    }
}

/// What requests with thinking say: `when_thinking_enabled`, with the keys of `thinking` in its field of that name.
fn when_thinking_enabled(config: &threadkeep_config::Model) -> Map<String, Json> {
    let mut fields = config.when_thinking_enabled.as_map().clone();
    let short = config.thinking.as_map().clone();
    match fields.get_mut("thinking") {
        _ if short.is_empty() => {}
        Some(Json::Object(long)) => long.extend(short),
        _ => {
            fields.insert("thinking".to_owned(), short.into());
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn map(value: Json) -> Map<String, Json> {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn the_setting_thinking_is_sent_in_requests_that_think() {
        for (thinking, long, sent) in [
            (json!({"type": "enabled"}), json!({}), json!({"thinking": {"type": "enabled"}})),
            (
                json!({"type": "enabled"}),
                json!({"temperature": 1, "thinking": {"type": "auto", "budget_tokens": 5}}),
                json!({"temperature": 1, "thinking": {"type": "enabled", "budget_tokens": 5}}),
            ),
            (json!({"type": "enabled"}), json!({"thinking": null}), json!({"thinking": {"type": "enabled"}})),
            (json!({}), json!({"thinking": true}), json!({"thinking": true})),
            (json!({}), json!({}), json!({})),
        ] {
            let settings = model_settings(&threadkeep_config::Model {
                thinking: map(thinking).into(),
                when_thinking_enabled: map(long).into(),
                ..threadkeep_config::Model::demo()
            });
            assert_eq!(settings.when_thinking_enabled, map(sent));
            assert_eq!(settings.when_thinking_disabled, Map::new());
        }
    }
}

//! From the configuration to a lead agent: what the gateway's runs and the embedded client have in common.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::summary::Summarizer;
use super::{AgentError, LeadAgent};
use crate::config::{Config, ConfigHandle};
use crate::model::RetryingModel;
use crate::settings;
use crate::tools::{ToolContext, ToolSettings, Toolbox};

/// For what an agent is built.
pub struct AgentSpec<'a> {
    pub run_id: &'a str,
    pub thread_id: &'a str,
    /// None means the first model.
    pub model_name: Option<&'a str>,
    pub thinking: Option<bool>,
    pub reasoning_effort: Option<&'a str>,
}

/// Builds lead agents from the configuration as it is when each of them is asked for.
pub struct AgentBuilder {
    config: ConfigHandle,
    /// Where tools run, as it was at the start.
    tool_settings: ToolSettings,
    threads_dir: PathBuf,
    /// By name, with the state of the configuration of which each was built.
    models: Mutex<HashMap<String, (Arc<Config>, RetryingModel)>>,
}

impl AgentBuilder {
    /// A builder that follows `config`, which is `current` at the start.
    pub fn new(config: ConfigHandle, current: &Config) -> Self {
        Self {
            config,
            tool_settings: settings::tools(current),
            threads_dir: current.state_dir.join("threads"),
            models: Mutex::default(),
        }
    }

    /// The directory in which a thread's tools work.
    pub fn thread_dir(&self, thread_id: &str) -> PathBuf {
        self.threads_dir.join(thread_id)
    }

    /// The tools of every agent.
    pub fn toolbox(&self) -> Toolbox {
        Toolbox::builtin(&self.tool_settings)
    }

    /// Builds an agent.
    ///
    /// # Errors
    /// [`AgentError::UnknownModel`], [`AgentError::Model`].
    pub async fn lead(&self, spec: &AgentSpec<'_>) -> Result<LeadAgent, AgentError> {
        let config = self.config.current_async().await;
        let model = self.model(&config, spec.model_name).await?;
        let title_model = match &config.title.model_name {
            Some(name) => Some(self.model(&config, Some(name)).await?),
            None => None,
        };
        let summarizer = match &config.summarization {
            settings if settings.enabled => {
                let own = spec.model_name;
                Some(self.summarizer(&config, settings.model_name.as_deref().or(own), own).await?)
            }
            _ => None,
        };
        Ok(LeadAgent {
            model,
            title_model,
            summarizer,
            toolbox: Arc::new(self.toolbox()),
            tool_context: ToolContext {
                thread_id: spec.thread_id.to_owned(),
                run_id: spec.run_id.to_owned(),
                tool_call_id: String::new(),
                root: self.thread_dir(spec.thread_id),
            },
            title: config.title.clone(),
            loop_detection: config.loop_detection.clone(),
            thinking: spec.thinking,
            reasoning_effort: spec.reasoning_effort.map(str::to_owned),
        })
    }

    /// What shortens the conversations that `reader` goes on with, by summaries of `writer`; without a name, it is the
    /// first model.
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

    /// The model of this name, or the first one; built once for each state of the configuration.
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
        let making = settings::model(section);
        let model = tokio::task::spawn_blocking(move || crate::model::build(making)).await;
        let model = RetryingModel::new(model.map_err(|_| AgentError::Stopping)??);
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        models.insert(section.name.clone(), (Arc::clone(config), model.clone()));
        Ok(model)
    }
}

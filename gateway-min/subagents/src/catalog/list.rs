//! The list that clients see: every definition, also those that no run may use.

use serde::Serialize;
use threadkeep_config::Config;

use super::definition::{Definition, Source};
use super::resolve;
use super::{Catalog, builtin};
use crate::managed::{Managed, StoreError};

/// A subagent in the list.
#[derive(Debug, Clone, PartialEq)]
pub struct Listed {
    /// The definition. Of a built-in subagent with everything that the configuration sets for it; of others as it was
    /// written, with [`Listed::config_overrides`] beside it.
    pub definition: Definition,
    /// Whether it is enabled; only managed ones can be disabled.
    pub enabled: bool,
    /// Whether it is not used because another source has its name.
    pub conflict: bool,
    /// What `subagents.agents` sets for it.
    pub config_overrides: ConfigOverrides,
}

impl Listed {
    /// Whether it can be changed over HTTP.
    pub fn is_editable(&self) -> bool {
        self.definition.source == Source::Managed
    }
}

/// What the configuration sets for one subagent; only these keys are shown, and only those that are set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ConfigOverrides {
    /// Seconds it may take.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
    /// The model calls it may make.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_turns: Option<u32>,
    /// Its model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Its skills.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skills: Option<Vec<String>>,
}

impl ConfigOverrides {
    fn of(config: &Config, name: &str) -> Self {
        let Some(set) = config.subagents.agents.get(name) else { return Self::default() };
        Self {
            timeout_seconds: set.timeout_seconds,
            max_turns: set.max_turns,
            model: set.model.clone(),
            skills: set.skills.clone(),
        }
    }
}

impl Catalog {
    /// All definitions as they are now, sorted by name, then built-in, configured, managed. It includes those that are
    /// disabled or in conflict, and `bash` also where it is not available.
    ///
    /// # Errors
    /// [`StoreError`]: the managed definitions cannot be read.
    pub async fn list(&self, config: &Config) -> Result<Vec<Listed>, StoreError> {
        let managed = self.managed().await?;
        let builtin = builtin::definitions(config).map(|definition| resolve::overridden(config, definition));
        let custom = config.subagents.custom_agents.iter().map(|agent| resolve::of_config(config, agent));
        let mut list: Vec<Listed> =
            builtin.into_iter().chain(custom).map(|definition| listed(config, definition, true)).collect();
        list.extend(managed.iter().map(|agent| listed_managed(config, agent)));
        list.sort_by(|one, other| {
            let key = |listed: &Listed| (listed.definition.name.clone(), listed.definition.source);
            key(one).cmp(&key(other))
        });
        Ok(list)
    }
}

/// A managed definition as it is listed.
pub(super) fn listed_managed(config: &Config, agent: &Managed) -> Listed {
    listed(config, resolve::of_managed(config, agent), agent.enabled)
}

fn listed(config: &Config, definition: Definition, enabled: bool) -> Listed {
    Listed {
        enabled,
        conflict: resolve::conflicts(config, &definition.name, definition.source),
        config_overrides: ConfigOverrides::of(config, &definition.name),
        definition,
    }
}

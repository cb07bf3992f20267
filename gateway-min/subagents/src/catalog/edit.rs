//! Creating, changing and deleting managed definitions.

use threadkeep_config::Config;

use super::definition::{ModelChoice, Source};
use super::list::{Listed, listed_managed};
use super::{Catalog, resolve};
use crate::managed::{Managed, Replaced, StoreError};

/// What to change of a managed definition; what is `None` stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    /// See [`Managed::display_name`].
    pub display_name: Option<Option<String>>,
    /// See [`Managed::description`].
    pub description: Option<String>,
    /// See [`Managed::system_prompt`].
    pub system_prompt: Option<String>,
    /// See [`Managed::tools`].
    pub tools: Option<Option<Vec<String>>>,
    /// See [`Managed::disallowed_tools`].
    pub disallowed_tools: Option<Vec<String>>,
    /// See [`Managed::skills`].
    pub skills: Option<Option<Vec<String>>>,
    /// See [`Managed::model`].
    pub model: Option<ModelChoice>,
    /// See [`Managed::max_turns`].
    pub max_turns: Option<u32>,
    /// See [`Managed::timeout_seconds`].
    pub timeout_seconds: Option<u64>,
    /// See [`Managed::enabled`].
    pub enabled: Option<bool>,
}

impl Change {
    fn applied_to(self, old: Managed) -> Managed {
        Managed {
            name: old.name,
            display_name: self.display_name.unwrap_or(old.display_name),
            description: self.description.unwrap_or(old.description),
            system_prompt: self.system_prompt.unwrap_or(old.system_prompt),
            tools: self.tools.unwrap_or(old.tools),
            disallowed_tools: self.disallowed_tools.unwrap_or(old.disallowed_tools),
            skills: self.skills.unwrap_or(old.skills),
            model: self.model.unwrap_or(old.model),
            max_turns: self.max_turns.unwrap_or(old.max_turns),
            timeout_seconds: self.timeout_seconds.unwrap_or(old.timeout_seconds),
            enabled: self.enabled.unwrap_or(old.enabled),
        }
    }
}

/// Why a managed definition was not changed. Clients read the texts (service reference, "Subagent and model routes").
#[derive(Debug, thiserror::Error)]
pub enum EditError {
    /// The name is that of a built-in or configured subagent, in any case.
    #[error("Subagent name '{name}' is reserved by a built-in or config.yaml definition.")]
    Reserved {
        /// The name.
        name: String,
    },
    /// There is a managed subagent with this name.
    #[error("Managed subagent '{name}' already exists")]
    Exists {
        /// The name.
        name: String,
    },
    /// There is no managed subagent with this name, or it was deleted meanwhile.
    #[error("Managed subagent '{name}' not found")]
    Missing {
        /// The name.
        name: String,
    },
    /// The model is not configured.
    #[error("Unknown model '{model}'. Use 'inherit' or a configured model name.")]
    UnknownModel {
        /// The name of the model.
        model: String,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Catalog {
    /// Stores a new managed definition and returns it as it is listed.
    ///
    /// # Errors
    /// [`EditError`], except [`EditError::Missing`].
    pub async fn create(&self, config: &Config, new: Managed) -> Result<Listed, EditError> {
        check_model(config, &new.model)?;
        if resolve::conflicts(config, &new.name, Source::Managed) {
            return Err(EditError::Reserved { name: new.name });
        }
        if !self.store.insert(&new.name, &new.to_document()).await? {
            return Err(EditError::Exists { name: new.name });
        }
        self.cache.expire().await;
        Ok(listed_managed(config, &new))
    }

    /// Changes the managed definition with this name and returns it as it is listed. Two changes at a time both take
    /// effect, if they are of different fields.
    ///
    /// # Errors
    /// [`EditError::Missing`], [`EditError::UnknownModel`], [`EditError::Store`].
    pub async fn change(&self, config: &Config, name: &str, change: Change) -> Result<Listed, EditError> {
        let missing = || EditError::Missing { name: name.to_owned() };
        if let Some(model) = &change.model {
            check_model(config, model)?;
        }
        loop {
            let documents = self.store.documents().await?;
            let document =
                documents.into_iter().find(|document| document.name == name).ok_or_else(missing)?;
            // One that cannot be used is not listed either; it can be deleted.
            let old = Managed::of_document(&document).map_err(|_| missing())?;
            let new = change.clone().applied_to(old);
            let old = document.content.unwrap_or_default();
            match self.store.replace(name, &old, &new.to_document()).await? {
                Replaced::Done => {
                    self.cache.expire().await;
                    return Ok(listed_managed(config, &new));
                }
                Replaced::Changed => {}
                Replaced::Missing => return Err(missing()),
            }
        }
    }

    /// Deletes the managed definition with this name, also one that cannot be read.
    ///
    /// # Errors
    /// [`EditError::Missing`], [`EditError::Store`].
    pub async fn delete(&self, name: &str) -> Result<(), EditError> {
        if !self.store.remove(name).await? {
            return Err(EditError::Missing { name: name.to_owned() });
        }
        self.cache.expire().await;
        Ok(())
    }
}

fn check_model(config: &Config, model: &ModelChoice) -> Result<(), EditError> {
    match model {
        ModelChoice::Named(name) if config.model(name).is_none() => {
            Err(EditError::UnknownModel { model: name.clone() })
        }
        _ => Ok(()),
    }
}

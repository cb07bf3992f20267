//! A configured model, as shown to clients.

use serde::Serialize;

use threadkeep_config::Model;

/// A model that turns can ask for. Credentials and addresses are not shown.
#[derive(Debug, Serialize)]
pub struct ModelInfo {
    /// The name by which turns ask for it.
    pub name: String,
    /// The provider's name for it.
    pub model: String,
    /// The name to show.
    pub display_name: Option<String>,
    /// One line about it.
    pub description: Option<String>,
    /// Whether thinking can be switched on.
    pub supports_thinking: bool,
    /// Whether a reasoning effort can be requested.
    pub supports_reasoning_effort: bool,
}

impl From<&Model> for ModelInfo {
    fn from(model: &Model) -> Self {
        Self {
            name: model.name.clone(),
            model: model.model.clone(),
            display_name: model.display_name.clone(),
            description: model.description.clone(),
            supports_thinking: model.supports_thinking,
            supports_reasoning_effort: model.supports_reasoning_effort,
        }
    }
}

//! What a subagent takes over from the run that delegates: tools, skills, and the model.

use threadkeep_config::{Config, Model};

use super::definition::{Definition, ModelChoice};

/// The tools that delegate. No subagent has them, whatever its definition says: delegation is one level deep.
pub const DELEGATION_TOOLS: [&str; 4] = ["task", "batch_task", "batch_status", "cancel_batch"];

/// The tool that calls external agents. A subagent has it only if its definition names it.
const ACP_TOOL: &str = "invoke_acp_agent";
/// The tool that finds deferred tools. What it finds is limited by the definition; itself it is not.
const TOOL_SEARCH: &str = "tool_search";

/// A subagent's model is not configured.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "Unknown model '{model}' of subagent '{subagent}'. Add it to `models`, or set the subagent's model to 'inherit' or a \
     configured model name."
)]
pub struct UnknownModel {
    /// The subagent.
    pub subagent: String,
    /// The name of the model.
    pub model: String,
}

impl Definition {
    /// Whether the subagent has this tool of its parent: its allow list has it, then its deny list does not.
    pub fn permits(&self, tool: &str) -> bool {
        if DELEGATION_TOOLS.contains(&tool) {
            return false;
        }
        if tool == TOOL_SEARCH {
            return true;
        }
        let names = |list: &[String]| list.iter().any(|name| name == tool);
        let allowed = match &self.tools {
            Some(list) => names(list),
            None => tool != ACP_TOOL,
        };
        allowed && !names(&self.disallowed_tools)
    }

    /// The skills of an execution whose parent has the skills `parent`; `None` means all, on either side. The order is
    /// the definition's.
    pub fn skills_within(&self, parent: Option<&[String]>) -> Option<Vec<String>> {
        match (&self.skills, parent) {
            (None, parent) => parent.map(<[String]>::to_vec),
            (Some(own), None) => Some(own.clone()),
            (Some(own), Some(parent)) => {
                Some(own.iter().filter(|skill| parent.contains(skill)).cloned().collect())
            }
        }
    }

    /// The model of an execution: the definition's, else the parent's, else the first configured one.
    ///
    /// # Errors
    /// [`UnknownModel`]: there is no such model, or no longer.
    pub fn model_within<'c>(
        &self,
        parent: Option<&str>,
        config: &'c Config,
    ) -> Result<&'c Model, UnknownModel> {
        let name = match &self.model {
            ModelChoice::Named(name) => Some(name.as_str()),
            ModelChoice::Inherit => parent,
        };
        let model = name.map_or_else(|| config.models.first(), |name| config.model(name));
        model.ok_or_else(|| UnknownModel {
            subagent: self.name.clone(),
            model: name.unwrap_or_default().to_owned(),
        })
    }
}

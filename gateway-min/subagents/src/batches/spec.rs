//! What a worker must know of a batch.

use serde::{Deserialize, Serialize};
use threadkeep_config::TokenBudget;
use threadkeep_records::{ExecutionTokens, JsonObject};

use crate::catalog::Definition;

/// The execution spec of a batch: the subagent and the limits as they were at its submission. Owners never see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Spec {
    /// The subagent.
    pub(super) definition: Definition,
    /// The configured name of the model of the run that submitted it.
    pub(super) model: String,
    /// Whether tool calls get receipts.
    pub(super) receipts: bool,
    /// The run's token budget, which binds the sum of the items as well.
    pub(super) budget: Option<RunBudget>,
}

/// A run's token budget.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct RunBudget {
    pub(super) settings: TokenBudget,
    /// What the run had used of it.
    pub(super) used: ExecutionTokens,
}

impl Spec {
    pub(super) fn to_json(&self) -> JsonObject {
        match serde_json::to_value(self) {
            Ok(serde_json::Value::Object(map)) => map,
            _ => JsonObject::new(),
        }
    }

    /// # Errors
    /// If another version of this program wrote it in another form.
    pub(super) fn from_json(json: &JsonObject) -> serde_json::Result<Self> {
        Self::deserialize(json)
    }
}

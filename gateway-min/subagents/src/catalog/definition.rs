//! What a subagent is.

use std::fmt::Write as _;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use threadkeep_config::{INHERIT_MODEL, TokenBudget};

/// A subagent with everything that its executions depend on: overrides and defaults are applied. An execution stores a
/// copy, so that a later edit does not change it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Definition {
    /// The name by which the lead agent asks for it.
    pub name: String,
    /// The name shown to people, if it has another one.
    pub display_name: Option<String>,
    /// When to delegate to it; the lead agent reads this.
    pub description: String,
    /// Its system prompt.
    pub system_prompt: String,
    /// The tools it may have; `None` means all of the parent's.
    pub tools: Option<Vec<String>>,
    /// Tools it never has.
    pub disallowed_tools: Vec<String>,
    /// Its skills; `None` means the parent's, an empty list none.
    pub skills: Option<Vec<String>>,
    /// Its model.
    pub model: ModelChoice,
    /// The model calls it may make.
    pub max_turns: u32,
    /// How long an execution may take, from its dispatch on.
    #[serde(rename = "timeout_seconds", with = "seconds")]
    pub timeout: Duration,
    /// Who defined it.
    pub source: Source,
    /// The tokens that one execution may use.
    pub token_budget: TokenBudget,
}

impl Definition {
    /// The SHA-256 of all its fields, as 64 lowercase hexadecimal digits. Equal definitions have equal digests.
    pub fn digest(&self) -> String {
        // Fields are serialized in the order of their declaration, and none of them is a map with other keys than text.
        let json = serde_json::to_vec(self).unwrap_or_default();
        Sha256::digest(json).iter().fold(String::with_capacity(64), |mut text, byte| {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

/// Who defined a subagent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// This program.
    Builtin,
    /// The configuration: `subagents.custom_agents`.
    Config,
    /// An administrator, over HTTP.
    Managed,
}

impl Source {
    /// Its name in the API: `builtin`, `config` or `managed`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Builtin => "builtin",
            Self::Config => "config",
            Self::Managed => "managed",
        }
    }
}

/// The model of a subagent.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum ModelChoice {
    /// That of the run that delegates; written `inherit`.
    Inherit,
    /// The one with this name in `models`.
    Named(String),
}

impl ModelChoice {
    /// As it is written in the configuration: `inherit` or a name.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Inherit => INHERIT_MODEL,
            Self::Named(name) => name,
        }
    }
}

impl From<String> for ModelChoice {
    fn from(text: String) -> Self {
        if text == INHERIT_MODEL { Self::Inherit } else { Self::Named(text) }
    }
}

impl From<ModelChoice> for String {
    fn from(model: ModelChoice) -> Self {
        model.as_str().to_owned()
    }
}

/// A duration in JSON, as whole seconds.
mod seconds {
    use super::{Deserialize, Duration};

    pub(super) fn serialize<S: serde::Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(time.as_secs())
    }

    pub(super) fn deserialize<'de, D: serde::Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Duration, D::Error> {
        u64::deserialize(deserializer).map(Duration::from_secs)
    }
}

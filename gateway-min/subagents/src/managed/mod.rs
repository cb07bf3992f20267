//! Managed subagents: those that an administrator defines over HTTP, and where they are stored.
//!
//! A [`ManagedStore`] holds documents by name and knows nothing about their content. [`Managed`] is that content.

mod db;
mod file;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use threadkeep_config::{AgentStorageBackend, Config, INHERIT_MODEL};
use threadkeep_records::{Records, RecordsError};

use crate::catalog::{DISALLOWED_TOOLS, ModelChoice};

pub use db::DbStore;
pub use file::FileStore;

/// Where the configured definitions of administrators are stored (service reference, "Subagent settings").
pub fn configured_store(config: &Config, records: &Records) -> Arc<dyn ManagedStore> {
    match config.agent_storage.backend {
        AgentStorageBackend::File => Arc::new(FileStore::new(&config.state_dir)),
        AgentStorageBackend::Db => Arc::new(DbStore::new(records.subagents())),
    }
}

/// The longest name, in characters: it is the name of a file.
pub const NAME_MAX_CHARS: usize = 64;

/// A subagent that an administrator defined. The defaults are those of fields that were not sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Managed {
    /// Its name: lowercase letters, digits and hyphens, at most [`NAME_MAX_CHARS`].
    pub name: String,
    /// The name shown to people.
    #[serde(default)]
    pub display_name: Option<String>,
    /// When to delegate to it; not blank.
    pub description: String,
    /// Its system prompt; not blank.
    pub system_prompt: String,
    /// The tools it may have; `None` means all of the parent's.
    #[serde(default)]
    pub tools: Option<Vec<String>>,
    /// Tools it never has, besides those that no managed subagent has; see [`Managed::denied_tools`].
    #[serde(default)]
    pub disallowed_tools: Vec<String>,
    /// Its skills; `None` means the parent's, an empty list none.
    #[serde(default)]
    pub skills: Option<Vec<String>>,
    /// Its model.
    #[serde(default = "inherit")]
    pub model: ModelChoice,
    /// The model calls it may make; at least 1, default 50.
    #[serde(default = "default_max_turns")]
    pub max_turns: u32,
    /// Seconds it may take; at least 1, default 900.
    #[serde(default = "default_timeout_seconds")]
    pub timeout_seconds: u64,
    /// Whether runs may delegate to it; default true.
    #[serde(default = "enabled")]
    pub enabled: bool,
}

fn inherit() -> ModelChoice {
    ModelChoice::from(INHERIT_MODEL.to_owned())
}

fn default_max_turns() -> u32 {
    50
}

fn default_timeout_seconds() -> u64 {
    900
}

fn enabled() -> bool {
    true
}

impl Managed {
    /// One with the default of every field that has one.
    pub fn new(
        name: impl Into<String>,
        description: impl Into<String>,
        system_prompt: impl Into<String>,
    ) -> Self {
        Self {
            name: name.into(),
            display_name: None,
            description: description.into(),
            system_prompt: system_prompt.into(),
            tools: None,
            disallowed_tools: Vec::new(),
            skills: None,
            model: inherit(),
            max_turns: default_max_turns(),
            timeout_seconds: default_timeout_seconds(),
            enabled: enabled(),
        }
    }

    /// The tools it never has, sorted: its own list, and those that no managed subagent has.
    pub fn denied_tools(&self) -> Vec<String> {
        let own = self.disallowed_tools.iter().map(String::as_str);
        let all: BTreeSet<&str> = own.chain(DISALLOWED_TOOLS).collect();
        all.into_iter().map(str::to_owned).collect()
    }

    /// The stored form.
    pub(crate) fn to_document(&self) -> Vec<u8> {
        // It has no map and no number that JSON cannot express.
        serde_json::to_vec_pretty(self).unwrap_or_default()
    }

    /// Reads the stored form, which a person may have edited.
    pub(crate) fn of_document(document: &Document) -> Result<Self, String> {
        let content = document.content.as_ref().map_err(Clone::clone)?;
        let managed: Self = serde_json::from_slice(content).map_err(|error| error.to_string())?;
        let problem = if managed.name != document.name {
            Some("it has the name of another subagent")
        } else if !is_name(&managed.name) || managed.name.bytes().any(|byte| byte.is_ascii_uppercase()) {
            Some("its name is not made of lowercase letters, digits and hyphens")
        } else if managed.description.trim().is_empty() || managed.system_prompt.trim().is_empty() {
            Some("its description or its system prompt is blank")
        } else if managed.max_turns == 0 || managed.timeout_seconds == 0 {
            Some("max_turns and timeout_seconds must be at least 1")
        } else {
            None
        };
        problem.map_or(Ok(managed), |problem| Err(problem.to_owned()))
    }

    /// The keys of the stored form of this definition that nothing reads, such as misspelt ones.
    pub(crate) fn unknown_keys(&self, document: &Document) -> Vec<String> {
        let content = document.content.as_deref().unwrap_or_default();
        let stored: Map<String, Value> = serde_json::from_slice(content).unwrap_or_default();
        // Every field is written, also one with its default.
        let known = serde_json::to_value(self).unwrap_or_default();
        stored.into_iter().map(|(key, _)| key).filter(|key| known.get(key).is_none()).collect()
    }
}

/// Whether this can be the name of a managed subagent, in any case: letters, digits and hyphens, at most
/// [`NAME_MAX_CHARS`].
pub fn is_name(text: &str) -> bool {
    (1..=NAME_MAX_CHARS).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// A stored definition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// The name under which it is stored.
    pub name: String,
    /// Its bytes, or why they cannot be read.
    pub content: Result<Vec<u8>, String>,
}

/// Where managed definitions are stored. Each operation happens completely or not at all.
#[async_trait]
pub trait ManagedStore: Send + Sync {
    /// All documents, in any order. One that cannot be read is among them; only the store itself makes this fail.
    async fn documents(&self) -> Result<Vec<Document>, StoreError>;

    /// Stores a new document. Returns false, and changes nothing, if the name is taken.
    async fn insert(&self, name: &str, content: &[u8]) -> Result<bool, StoreError>;

    /// Replaces a document that has the content `old`.
    async fn replace(&self, name: &str, old: &[u8], new: &[u8]) -> Result<Replaced, StoreError>;

    /// Removes a document. Returns false if there is none.
    async fn remove(&self, name: &str) -> Result<bool, StoreError>;
}

/// What became of a replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replaced {
    /// The document has the new content.
    Done,
    /// It had other content than expected, and still has.
    Changed,
    /// There is no such document.
    Missing,
}

/// Managed definitions cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A file or the directory.
    #[error("cannot use the managed subagents in {}: {source}", directory.display())]
    File {
        /// The directory.
        directory: std::path::PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The database.
    #[error("cannot use the managed subagents in the database: {0}")]
    Db(#[from] RecordsError),
}

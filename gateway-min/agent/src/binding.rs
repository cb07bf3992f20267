//! The agent that a checkpoint belongs to, in its metadata.

use serde_json::{Map, Value as Json};

/// Metadata key of the agent that a checkpoint belongs to.
pub const AGENT_BINDING: &str = "svc_agent_name";
/// The binding of a run without a custom agent.
pub const DEFAULT_AGENT: &str = "__default__";

/// The agent binding in a checkpoint's metadata, for a checkpoint that restores or continues it.
pub fn binding(extra: &Map<String, Json>) -> Map<String, Json> {
    let binding = extra.get_key_value(AGENT_BINDING).filter(|(_, name)| name.is_string());
    binding.into_iter().map(|(key, name)| (key.clone(), name.clone())).collect()
}

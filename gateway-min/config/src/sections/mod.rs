//! The sections besides `database` and `models`: one struct per section, whose `Default` applies if the section is
//! missing or null.
//!
//! Defaults are those of the service reference (Subagent settings, Limits). Where it names no range, the range here is
//! the widest sensible one.

mod agent;
mod auth;
mod batches;
mod delegation;
mod gateway;
mod mcp;
mod page;
mod runs;
mod sandbox;
mod skills;
mod subagents;
mod telemetry;
mod tools;

pub use agent::{
    ContextSize, LoopDetection, ReceiptsRenderMode, Summarization, Title, TokenBudget, TokenUsage,
    ToolFrequency, ToolSearch, Verification,
};
pub use auth::Auth;
pub use batches::SubagentBatches;
pub use delegation::{
    AcpAgent, AdmissionPolicy, AgentStorage, AgentStorageBackend, HookCommand, SubagentRuntime,
};
pub use gateway::Gateway;
pub use mcp::{McpServer, ToolRouting};
pub use page::Page;
pub use runs::{RunEvents, RunEventsBackend, RunOwnership, StreamBridge, StreamBridgeType};
pub use sandbox::{Sandbox, SandboxProvider};
pub use skills::Skills;
pub use subagents::{CustomAgent, INHERIT_MODEL, SubagentOverride, Subagents, TokenBudgetOverride};
pub use telemetry::{Telemetry, Traces};
pub use tools::{BUILTIN_TOOLS, Tool, ToolGroup};

pub(super) use tools::{check_groups, read_tool_groups, read_tools};

/// A hundred years in seconds: the longest time of settings from which moments are computed, so that clocks and the
/// times in records reach those.
pub(super) const LONGEST_SECONDS: u32 = 100 * 365 * 86_400;

#[cfg(test)]
mod testing {
    use serde_json::Value;

    use crate::node::{Node, Report};

    /// Reads a tree with one section's reader and returns the section, or the problems as text.
    pub(super) fn read<T>(tree: &Value, read: impl FnOnce(&Node<'_>) -> T) -> Result<T, String> {
        let report = Report::default();
        let section = read(&Node::root(tree.as_object().unwrap(), &report));
        report.finish(None).map(|_| section).map_err(|error| error.to_string())
    }

    /// Asserts that each value of a section is refused with a problem that begins with its dotted key.
    pub(super) fn assert_refused<T>(section: &str, cases: &[(Value, &str)], reader: impl Fn(&Node<'_>) -> T) {
        for (value, key) in cases {
            let mut tree = serde_json::json!({});
            tree[section] = value.clone();
            let Err(error) = read(&tree, &reader) else { panic!("{section}: {value} was accepted") };
            assert!(error.contains(&format!("\n  {section}.{key}: ")), "{value}: {error}");
        }
    }
}

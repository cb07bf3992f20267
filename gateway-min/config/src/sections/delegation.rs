//! Sections about delegation: process capacity, external agents, and where managed subagents are stored.

use std::collections::BTreeMap;

use crate::node::Node;
use crate::secret::Secret;
use crate::sections::sandbox::check_variables;

/// What happens to a delegation when all slots are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdmissionPolicy {
    /// It waits.
    Queue,
    /// It is refused.
    Reject,
}

/// `subagent_runtime`: how many subagents run in this process. Read once at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubagentRuntime {
    /// Subagents that run at once; 1 to 64, default 3.
    pub max_running: u32,
    /// Subagents that wait; 0 to 10,000, default 64.
    pub max_queued: u32,
    /// What happens when all slots are taken; default queue.
    pub admission_policy: AdmissionPolicy,
    /// The maximum seconds a subagent waits; 1 to 86,400, default 300.
    pub queue_timeout_seconds: u64,
}

impl Default for SubagentRuntime {
    fn default() -> Self {
        Self {
            max_running: 3,
            max_queued: 64,
            admission_policy: AdmissionPolicy::Queue,
            queue_timeout_seconds: 300,
        }
    }
}

impl SubagentRuntime {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        let (node, default) = (root.section("subagent_runtime"), Self::default());
        let policies = [("queue", AdmissionPolicy::Queue), ("reject", AdmissionPolicy::Reject)];
        Self {
            max_running: node.int("max_running", default.max_running, 1..=64),
            max_queued: node.int("max_queued", default.max_queued, 0..=10_000),
            admission_policy: node.choice("admission_policy", &policies, default.admission_policy),
            queue_timeout_seconds: node.int(
                "queue_timeout_seconds",
                default.queue_timeout_seconds,
                1..=86_400,
            ),
        }
    }
}

/// An entry of `subagent_runtime.hooks`: a command that is run when tasks start or stop, the lead agent's and subagents'.
/// Read once at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookCommand {
    /// The program: the first word of `command`.
    pub program: String,
    /// Its arguments: the other words of `command`.
    pub arguments: Vec<String>,
    /// Whether it is run when a task starts: `events` contains `start`.
    pub on_start: bool,
    /// Whether it is run when a task stops: `events` contains `stop`.
    pub on_stop: bool,
    /// Its environment, besides `PATH`.
    pub environment: BTreeMap<String, Secret>,
}

impl HookCommand {
    pub(crate) fn read_all(root: &Node<'_>) -> Vec<Self> {
        root.section("subagent_runtime").items("hooks").iter().filter_map(Self::read).collect()
    }

    /// `None` after a problem.
    fn read(node: &Node<'_>) -> Option<Self> {
        let environment = node.variables("environment");
        check_variables(&environment, &node.section("environment"));
        let events = node.texts("events");
        if let Some(other) =
            events.iter().flatten().find(|event| !["start", "stop"].contains(&event.as_str()))
        {
            node.problem("events", format!("has no event '{other}'; the events are start and stop"));
        }
        let wants = |event: &str| events.as_ref().is_none_or(|events| events.iter().any(|it| it == event));
        let (on_start, on_stop) = (wants("start"), wants("stop"));
        if !on_start && !on_stop {
            node.problem(
                "events",
                "names no event, so that the command would never be run; remove the key for both",
            );
        }
        let mut command = node.texts("command").unwrap_or_default().into_iter();
        let program = command.next().filter(|program| !program.is_empty());
        if program.is_none() {
            node.problem(
                "command",
                "is required: a list of the program and its arguments, as [/usr/local/bin/notify, --quiet]",
            );
        }
        Some(Self { program: program?, arguments: command.collect(), on_start, on_stop, environment })
    }
}

/// One entry of `acp_agents`: an external agent that runs as a child process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcpAgent {
    /// The program.
    pub command: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// Variables added to its environment.
    pub env: BTreeMap<String, Secret>,
    /// What the agent is good for; shown to the model.
    pub description: String,
    /// The model it should use.
    pub model: Option<String>,
    /// Whether its requests for permission are granted; default false.
    pub auto_approve_permissions: bool,
    /// Seconds one call may take; at least 1, default 1800.
    pub timeout_seconds: u64,
}

impl AcpAgent {
    pub(crate) fn read_all(root: &Node<'_>) -> BTreeMap<String, Self> {
        let agents = root.named("acp_agents").into_iter();
        agents.map(|(name, node)| (name.to_owned(), Self::read(&node))).collect()
    }

    fn read(node: &Node<'_>) -> Self {
        let env = node.variables("env");
        check_variables(&env, &node.section("env"));
        Self {
            command: node.required_text("command"),
            args: node.texts("args").unwrap_or_default(),
            env,
            description: node.required_text("description"),
            model: node.nonempty_text("model"),
            auto_approve_permissions: node.bool("auto_approve_permissions", false),
            timeout_seconds: node.int("timeout_seconds", 1800, 1..),
        }
    }
}

/// Where managed subagents are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentStorageBackend {
    /// One file per subagent in the state directory.
    File,
    /// The gateway's database, which must be a SQL database.
    Db,
}

/// `agent_storage`, read once at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentStorage {
    /// Where managed subagents are stored; default file.
    pub backend: AgentStorageBackend,
}

impl Default for AgentStorage {
    fn default() -> Self {
        Self { backend: AgentStorageBackend::File }
    }
}

impl AgentStorage {
    pub(crate) fn read(root: &Node<'_>) -> Self {
        let backends = [("file", AgentStorageBackend::File), ("db", AgentStorageBackend::Db)];
        let node = root.section("agent_storage");
        Self { backend: node.choice("backend", &backends, Self::default().backend) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::SubagentBatches;
    use super::super::testing::{assert_refused, read};
    use super::*;

    #[test]
    fn missing_and_null_sections_are_the_documented_defaults() {
        let null = json!({
            "subagent_runtime": null, "subagent_batches": null, "acp_agents": null, "agent_storage": null,
        });
        for tree in [json!({}), null] {
            assert_eq!(
                read(&tree, SubagentRuntime::read).unwrap(),
                SubagentRuntime {
                    max_running: 3,
                    max_queued: 64,
                    admission_policy: AdmissionPolicy::Queue,
                    queue_timeout_seconds: 300,
                }
            );
            assert_eq!(
                read(&tree, SubagentBatches::read).unwrap(),
                SubagentBatches {
                    enabled: false,
                    poll_interval_seconds: 1.0,
                    lease_seconds: 120,
                    max_items_per_batch: 5000,
                    default_max_live_items: 100,
                    max_live_items_per_batch: 1000,
                    default_max_running_items: 3,
                    max_running_items_per_batch: 64,
                    max_attempts: 3,
                    max_result_chars: 100_000,
                    result_preview_max_chars: 2000,
                }
            );
            assert!(read(&tree, AcpAgent::read_all).unwrap().is_empty());
            let storage = read(&tree, AgentStorage::read).unwrap();
            assert_eq!(storage, AgentStorage { backend: AgentStorageBackend::File });
        }
    }

    #[test]
    fn the_runtime_is_read_and_its_ranges_are_closed() {
        let tree = |running: u32, queued: u32, timeout: u32| {
            json!({"subagent_runtime": {
                "max_running": running, "max_queued": queued, "admission_policy": "reject",
                "queue_timeout_seconds": timeout,
            }})
        };
        for (running, queued, timeout) in [(1, 0, 1), (64, 10_000, 86_400)] {
            assert_eq!(
                read(&tree(running, queued, timeout), SubagentRuntime::read).unwrap(),
                SubagentRuntime {
                    max_running: running,
                    max_queued: queued,
                    admission_policy: AdmissionPolicy::Reject,
                    queue_timeout_seconds: timeout.into(),
                }
            );
        }
        assert_refused(
            "subagent_runtime",
            &[
                (json!({"max_running": 0}), "max_running"),
                (json!({"max_running": 65}), "max_running"),
                (json!({"max_running": true}), "max_running"),
                (json!({"max_queued": -1}), "max_queued"),
                (json!({"max_queued": 10_001}), "max_queued"),
                (json!({"max_queued": false}), "max_queued"),
                (json!({"queue_timeout_seconds": 0}), "queue_timeout_seconds"),
                (json!({"queue_timeout_seconds": 86_401}), "queue_timeout_seconds"),
                (json!({"admission_policy": "drop"}), "admission_policy"),
            ],
            SubagentRuntime::read,
        );
    }

    #[test]
    fn hooks_are_read_with_their_events_and_their_environment_is_hidden() {
        let tree = json!({"subagent_runtime": {"hooks": [
            {"command": ["notify"]},
            {"command": ["/bin/notify", "--quiet"], "events": ["stop"], "environment": {"TOKEN": "sk-1"}},
        ]}});
        let hooks = read(&tree, HookCommand::read_all).unwrap();
        let both = HookCommand {
            program: "notify".into(),
            arguments: vec![],
            on_start: true,
            on_stop: true,
            environment: BTreeMap::new(),
        };
        let one = HookCommand {
            program: "/bin/notify".into(),
            arguments: vec!["--quiet".into()],
            on_start: false,
            environment: [("TOKEN".into(), Secret::new("sk-1"))].into(),
            ..both.clone()
        };
        assert!(!format!("{hooks:?}").contains("sk-1"));
        assert_eq!(hooks, [both, one]);
        assert!(read(&json!({"subagent_runtime": {"hooks": []}}), HookCommand::read_all).unwrap().is_empty());
        let hook = |hook: serde_json::Value| json!({ "hooks": [hook] });
        assert_refused(
            "subagent_runtime",
            &[
                (hook(json!({})), "hooks[0].command"),
                (hook(json!({"command": []})), "hooks[0].command"),
                (hook(json!({"command": [""]})), "hooks[0].command"),
                (hook(json!({"command": "notify"})), "hooks[0].command"),
                (hook(json!({"command": ["n"], "events": ["begin"]})), "hooks[0].events"),
                (hook(json!({"command": ["n"], "events": []})), "hooks[0].events"),
                (hook(json!({"command": ["n"], "environment": {"A=B": "c"}})), "hooks[0].environment.A=B"),
            ],
            HookCommand::read_all,
        );
    }

    #[test]
    fn external_agents_are_read_and_their_environment_is_hidden() {
        let tree = json!({"acp_agents": {
            "short": {"command": "c", "description": "d"},
            "full": {
                "command": "c", "args": ["--x"], "env": {"KEY": "sk-1"}, "description": "d", "model": "m",
                "auto_approve_permissions": true, "timeout_seconds": 5,
            },
        }});
        let agents = read(&tree, AcpAgent::read_all).unwrap();
        let short = AcpAgent {
            command: "c".into(),
            args: vec![],
            env: BTreeMap::new(),
            description: "d".into(),
            model: None,
            auto_approve_permissions: false,
            timeout_seconds: 1800,
        };
        assert_eq!(agents["short"], short);
        assert_eq!(
            agents["full"],
            AcpAgent {
                args: vec!["--x".into()],
                env: [("KEY".into(), Secret::new("sk-1"))].into(),
                model: Some("m".into()),
                auto_approve_permissions: true,
                timeout_seconds: 5,
                ..short
            }
        );
        assert!(!format!("{agents:?}").contains("sk-1"));
        assert_refused(
            "acp_agents",
            &[
                (json!({"a": null}), "a.command"),
                (json!({"a": {"command": "c"}}), "a.description"),
                (
                    json!({"a": {"command": "c", "description": "d", "timeout_seconds": 0}}),
                    "a.timeout_seconds",
                ),
                (json!({"a": {"command": "c", "description": "d", "args": "x"}}), "a.args"),
                (json!({"a": {"command": "c", "description": "d", "env": {"A=B": "c"}}}), "a.env.A=B"),
            ],
            AcpAgent::read_all,
        );
    }

    #[test]
    fn agent_storage_is_read() {
        let tree = json!({"agent_storage": {"backend": "db"}});
        assert_eq!(read(&tree, AgentStorage::read).unwrap().backend, AgentStorageBackend::Db);
        assert_refused("agent_storage", &[(json!({"backend": "s3"}), "backend")], AgentStorage::read);
    }
}

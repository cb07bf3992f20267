#![doc = include_str!("../README.md")]
//!
//! # How a file is read
//!
//! [`Config::load`] runs these steps: settle the project root and read its `.env`, find the file, parse it,
//! compare its version with the example file's, replace `$VAR`, carry deprecated keys forward, and build the
//! typed sections. All problems of a file are reported at once, each under its dotted key path. No file at
//! all means the built-in defaults. Nothing here reads or changes the environment of the process, except
//! [`LoadOptions::from_process`].
//!
//! # What an edit changes
//!
//! [`ConfigHandle`] follows the file while the gateway runs. Some sections are read once, at start, and a later edit
//! applies only after a restart: `auth` (the keys follow their file), `gateway`, `page`, `database` (save
//! `checkpoint_graph_cache`), `run_events`, `stream_bridge`, `run_ownership`, `agent_storage`, `sandbox`,
//! `subagent_runtime`, `subagent_batches` and `telemetry`. What was built from them keeps their values. The others are
//! read again for each run: `models`, `tools`, `tool_groups`, `mcp_servers`, `skills`, `subagents`, `acp_agents`,
//! `summarization`, `title`, `loop_detection`, `token_usage`, `token_budget`, `tool_search`, `verification`,
//! `max_recursion_limit`.

mod database;
mod environment;
mod error;
mod find;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod handle;
mod hidden;
mod interpolate;
mod keys;
mod models;
mod node;
mod secret;
mod sections;
mod stamp;
mod trust;
mod unread;
mod upgrade;
mod version;
mod yaml;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

pub use database::{
    Backend, CheckpointCache, CheckpointCacheType, CheckpointChannelMode, CheckpointDelta,
    CheckpointGraphCache, DEFAULT_ACCESSOR_GRAPH_MAX, DEFAULT_REDIS_URL, DEFAULT_SNAPSHOT_FREQUENCY,
    Database, REDIS_URL_VARIABLES, SqliteSynchronous,
};
pub use environment::Environment;
pub use error::{
    BOTH_CADENCE_KEYS, ConfigError, FLAT_CADENCE_KEY_IGNORED, Origin, Problem, SYNC_REDIS_CHECKPOINT_CACHE,
    flat_cadence_key_carried, unknown_checkpoint_cache_type,
};
pub use find::{CONFIG_PATH_VARIABLE, PROJECT_ROOT_VARIABLE, STATE_DIR_VARIABLE};
pub use handle::ConfigHandle;
pub use hidden::Hidden;
pub use keys::{KeyError, KeyFile, KeyRecord, Role};
pub use models::{DEMO_MODEL, Model, ModelKind, OPENAI, SCRIPTED};
pub use secret::{FreeForm, MASK, Secret};
pub use sections::{
    AcpAgent, AdmissionPolicy, AgentStorage, AgentStorageBackend, Auth, BUILTIN_TOOLS, ContextSize,
    CustomAgent, Gateway, HookCommand, INHERIT_MODEL, LoopDetection, McpServer, Page, ReceiptsRenderMode,
    RunEvents, RunEventsBackend, RunOwnership, Sandbox, SandboxProvider, Skills, StreamBridge,
    StreamBridgeType, SubagentBatches, SubagentOverride, SubagentRuntime, Subagents, Summarization,
    Telemetry, Title, TokenBudget, TokenBudgetOverride, TokenUsage, Tool, ToolFrequency, ToolGroup,
    ToolRouting, ToolSearch, Traces, Verification,
};
pub use trust::UserDirs;
pub use unread::{UNREAD, no_effect_warning, unknown_section_warning};
pub use upgrade::{Cadence, Upgrade, UpgradeError, upgrade};
pub use version::{CONFIG_VERSION, CONFIG_VERSION_KEY, EXAMPLE_FILE, outdated_warning, stated_version};

use find::Location;
use node::{Node, Report};

/// The top-level keys that are read here. All others go to [`Config::extra`].
const SECTIONS: [&str; 28] = [
    CONFIG_VERSION_KEY,
    "auth",
    "gateway",
    "page",
    "database",
    "models",
    "run_events",
    "stream_bridge",
    "run_ownership",
    "max_recursion_limit",
    "title",
    "summarization",
    "loop_detection",
    "token_usage",
    "token_budget",
    "tool_search",
    "tools",
    "tool_groups",
    "mcp_servers",
    "skills",
    "sandbox",
    "subagents",
    "subagent_runtime",
    "subagent_batches",
    "acp_agents",
    "agent_storage",
    "verification",
    "telemetry",
];

/// Where to look for the configuration, and with which variables.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// The explicitly named file, for example on the command line.
    pub config_path: Option<PathBuf>,
    /// The environment variables; the `.env` file of the project root adds to them.
    pub environment: Environment,
    /// The base of relative paths in the two above, and the project root unless one is named.
    pub working_dir: PathBuf,
}

impl LoadOptions {
    /// The variables and the working directory of this process.
    ///
    /// # Errors
    /// [`ConfigError::NoWorkingDirectory`].
    pub fn from_process(config_path: Option<PathBuf>) -> Result<Self, ConfigError> {
        let working_dir =
            std::env::current_dir().map_err(|source| ConfigError::NoWorkingDirectory { source })?;
        Ok(Self { config_path, environment: Environment::of_process(), working_dir })
    }
}

/// The result of [`Config::load`].
#[derive(Debug, Clone)]
pub struct Loaded {
    /// The configuration.
    pub config: Config,
    /// The file it came from; `None` if there is no file and the built-in defaults apply.
    pub source: Option<PathBuf>,
    /// The variables, plus those of the `.env` file.
    pub environment: Environment,
    /// The warnings, each of which was also logged.
    pub warnings: Vec<String>,
}

/// A validated configuration. See the module documentation for which sections are read once and which are live.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The schema version that the file states; [`CONFIG_VERSION`] without a file.
    pub config_version: i64,
    /// The project root. Absolute if the working directory is.
    pub root: PathBuf,
    /// Where the process keeps its data: `SVC_HOME`, else `.svc` in the root.
    pub state_dir: PathBuf,
    /// Who may use the gateway.
    pub auth: Auth,
    /// What a client may hold of the gateway.
    pub gateway: Gateway,
    /// Whether there is a page for browsers.
    pub page: Page,
    /// Where and how checkpoints are kept.
    pub database: Database,
    /// The language models, at least one; the first is the default.
    pub models: Vec<Model>,
    /// Where run events are kept.
    pub run_events: RunEvents,
    /// How the frames of a run reach its subscribers.
    pub stream_bridge: StreamBridge,
    /// Which process owns a run.
    pub run_ownership: RunOwnership,
    /// The most supersteps a run may ask for; at least 1, default 1000.
    pub max_recursion_limit: u32,
    /// How a thread gets its title.
    pub title: Title,
    /// When a conversation is summarized.
    pub summarization: Summarization,
    /// When an agent that repeats itself is stopped.
    pub loop_detection: LoopDetection,
    /// Whether the cards of tasks show tokens.
    pub token_usage: TokenUsage,
    /// The lead agent's token budget.
    pub token_budget: TokenBudget,
    /// Deferred loading of tools.
    pub tool_search: ToolSearch,
    /// Servers whose tools agents may call, by name.
    pub mcp_servers: BTreeMap<String, McpServer>,
    /// Instructions for agents, in files.
    pub skills: Skills,
    /// The built-in tools that agents have; `None` means all.
    pub tools: Option<Vec<Tool>>,
    /// The groups whose tools agents have; none listed means all.
    pub tool_groups: Vec<ToolGroup>,
    /// Where tools run.
    pub sandbox: Sandbox,
    /// Limits and definitions of subagents.
    pub subagents: Subagents,
    /// How many subagents run in this process.
    pub subagent_runtime: SubagentRuntime,
    /// `subagent_runtime.hooks`.
    pub subagent_hooks: Vec<HookCommand>,
    /// Durable batches of delegations.
    pub subagent_batches: SubagentBatches,
    /// External agents by name.
    pub acp_agents: BTreeMap<String, AcpAgent>,
    /// Where managed subagents are stored.
    pub agent_storage: AgentStorage,
    /// Receipts and citations.
    pub verification: Verification,
    /// What is sent to an OpenTelemetry collector.
    pub telemetry: Telemetry,
    /// The unknown top-level keys, unchanged.
    pub extra: FreeForm,
}

impl Config {
    /// Finds, reads and validates the configuration.
    ///
    /// The file is the explicit one, else the one that `SVC_CONFIG_PATH` names, else `config.yaml` in
    /// `$SVC_PROJECT_ROOT` or the working directory, else none. Reads files, so it blocks.
    ///
    /// # Errors
    /// Any [`ConfigError`]; an invalid file is reported with all its problems.
    pub fn load(options: &LoadOptions) -> Result<Loaded, ConfigError> {
        let location = Location::of(options)?;
        let source = location.config_file()?.map(|path| location.read(path)).transpose()?;
        let (config, warnings) = Self::build(&location, source.as_ref())?;
        let source = source.map(|file| file.path);
        Ok(Loaded { config, source, environment: location.environment, warnings })
    }

    /// Builds the configuration from a file's text, or the defaults if there is none.
    fn build(location: &Location, source: Option<&SourceFile>) -> Result<(Self, Vec<String>), ConfigError> {
        let Some(SourceFile { path, text }) = source else {
            let built_in = Map::from_iter([(CONFIG_VERSION_KEY.to_owned(), Value::from(CONFIG_VERSION))]);
            let report = Report::default();
            let config = Self::read(&built_in, location, &location.root, &report);
            return Ok((config, report.finish(None)?));
        };
        let mut sections = yaml::parse(text, path)?;
        // Compare the version first: an old file is reported as old even if it is otherwise broken.
        let early = Report::default();
        version::check(&sections, path, &early);
        let from_environment = interpolate::interpolate(&mut sections, &location.environment)?;
        let report = Report::new(from_environment);
        database::carry_flat_cadence(&mut sections, &report);
        let config_dir = path.parent().unwrap_or(&location.root);
        let mut config = Self::read(&sections, location, config_dir, &report);
        config.subagents.in_order(&yaml::custom_agents(text));
        unread::warn(&sections, &report);
        unread::warn_of_missing_models(&config, &report);
        let warnings = [early.finish(None)?, report.finish(Some(path.clone()))?].concat();
        Ok((config, warnings))
    }

    fn read(sections: &Map<String, Value>, location: &Location, config_dir: &Path, report: &Report) -> Self {
        let root = Node::root(sections, report);
        let summarization = Summarization::read(&root);
        let subagent_runtime = SubagentRuntime::read(&root);
        let config = Self {
            config_version: stated_version(sections),
            root: location.root.clone(),
            state_dir: location.state_dir.clone(),
            auth: Auth::read(&root, location),
            gateway: Gateway::read(&root),
            page: Page::read(&root),
            database: Database::read(&root.section("database"), location),
            models: models::read(&root, config_dir),
            run_events: RunEvents::read(&root),
            stream_bridge: StreamBridge::read(&root),
            run_ownership: RunOwnership::read(&root),
            max_recursion_limit: root.int("max_recursion_limit", 1000, 1..),
            title: Title::read(&root),
            loop_detection: LoopDetection::read(&root),
            token_usage: TokenUsage::read(&root),
            token_budget: TokenBudget::read(&root),
            tool_search: ToolSearch::read(&root),
            mcp_servers: McpServer::read_all(&root),
            skills: Skills::read(&root),
            tools: sections::read_tools(&root),
            tool_groups: sections::read_tool_groups(&root),
            sandbox: Sandbox::read(&root, subagent_runtime.max_running),
            subagents: Subagents::read(&root, summarization.enabled),
            subagent_batches: SubagentBatches::read(&root),
            acp_agents: AcpAgent::read_all(&root),
            agent_storage: AgentStorage::read(&root),
            verification: Verification::read(&root),
            telemetry: Telemetry::read(&root),
            extra: root.rest(&SECTIONS),
            summarization,
            subagent_runtime,
            subagent_hooks: HookCommand::read_all(&root),
        };
        config.check_across_sections(report);
        let of_tools = config.tools.iter().flatten().filter_map(|tool| tool.group.as_deref());
        let of_servers = config.mcp_servers.values().filter_map(|server| server.group.as_deref());
        sections::check_groups(&root, &config.tool_groups, of_tools.chain(of_servers));
        config
    }

    /// Rules that need more than one section.
    fn check_across_sections(&self, report: &Report) {
        self.summarization.warn_if_never_due(&self.models, report);
        if self.database.backend.is_sql() {
            return;
        }
        if self.subagent_batches.enabled {
            report.problem("subagent_batches.enabled", error::BATCHES_NEED_SQL);
        }
        if self.agent_storage.backend == AgentStorageBackend::Db {
            report.problem("agent_storage.backend", error::AGENT_STORAGE_NEEDS_SQL);
        }
    }

    /// Whether agents have the tools of this group. Those of no group they have in any case.
    pub fn has_tool_group(&self, group: Option<&str>) -> bool {
        let (Some(group), [_, ..]) = (group, &self.tool_groups[..]) else { return true };
        self.tool_groups.iter().any(|listed| listed.name == group)
    }

    /// Whether agents have this built-in tool, as far as `tools` and `tool_groups` say.
    pub fn has_builtin_tool(&self, name: &str) -> bool {
        let Some(tools) = &self.tools else { return true };
        tools.iter().any(|tool| tool.name == name && self.has_tool_group(tool.group.as_deref()))
    }

    /// The sections that are only read at start and differ from those of `first`.
    fn restart_only_changes(&self, first: &Self) -> Vec<&'static str> {
        // The only key of `database` that is live.
        let live = CheckpointGraphCache::default;
        let database = |of: &Self| Database { checkpoint_graph_cache: live(), ..of.database.clone() };
        let changes = [
            ("auth", self.auth != first.auth),
            ("gateway", self.gateway != first.gateway),
            ("page", self.page != first.page),
            ("database", database(self) != database(first)),
            ("run_events", self.run_events != first.run_events),
            ("stream_bridge", self.stream_bridge != first.stream_bridge),
            ("run_ownership", self.run_ownership != first.run_ownership),
            ("sandbox", self.sandbox != first.sandbox),
            ("subagent_runtime", self.subagent_runtime != first.subagent_runtime),
            ("subagent_runtime.hooks", self.subagent_hooks != first.subagent_hooks),
            ("subagent_batches", self.subagent_batches != first.subagent_batches),
            ("agent_storage", self.agent_storage != first.agent_storage),
            ("telemetry", self.telemetry != first.telemetry),
        ];
        changes.into_iter().filter_map(|(name, changed)| changed.then_some(name)).collect()
    }

    /// Per-step writes between two snapshots in delta mode. It may change under a [`ConfigHandle`], so a run that
    /// starts compares it with the cadence frozen at start.
    pub fn snapshot_frequency(&self) -> u64 {
        self.database.checkpoint_delta.snapshot_frequency
    }

    /// How many threads' newest states a process keeps ready, for the eviction check that re-reads it.
    pub fn accessor_graph_max(&self) -> usize {
        self.database.checkpoint_graph_cache.accessor_graph_max
    }

    /// A model by its name.
    pub fn model(&self, name: &str) -> Option<&Model> {
        self.models.iter().find(|model| model.name == name)
    }

    /// The token budget of a subagent, depending on this configuration's summarization switch.
    pub fn subagent_token_budget(&self, name: &str) -> TokenBudget {
        self.subagents.token_budget_of(name, self.summarization.enabled)
    }
}

/// A configuration file's content.
#[derive(Clone, PartialEq, Eq)]
struct SourceFile {
    path: PathBuf,
    text: String,
}

impl SourceFile {
    fn read(path: PathBuf) -> Result<Self, ConfigError> {
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Self { path, text }),
            Err(source) => Err(ConfigError::Unreadable { path, source }),
        }
    }

    /// Whether there is nothing in it.
    fn is_blank(&self) -> bool {
        self.text.trim().is_empty()
    }
}

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

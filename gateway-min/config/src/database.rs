//! The `database` section: where checkpoints and records are kept, and how (service reference, "Database
//! checkpoint settings").

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::LoadOptions;
use super::environment::Environment;
use super::error::{
    BOTH_CADENCE_KEYS, ConfigError, FLAT_CADENCE_KEY_IGNORED, accessor_graph_max_unusable,
    flat_cadence_key_carried, unknown_checkpoint_cache_type,
};
use super::find::Location;
use super::node::{Node, Report};
use super::secret::Secret;

/// Steps between two full snapshots of the messages, by default (service reference, "Marker constants").
pub const DEFAULT_SNAPSHOT_FREQUENCY: u64 = 10;
/// Cached accessor graphs, by default and if the setting is unusable.
pub const DEFAULT_ACCESSOR_GRAPH_MAX: usize = 64;
/// The history cache's Redis if neither the file nor the environment names one.
pub const DEFAULT_REDIS_URL: &str = "redis://localhost:6379/0";
/// The variables that name the history cache's Redis; the first one that is set wins.
pub const REDIS_URL_VARIABLES: [&str; 2] = ["SVC_CHECKPOINT_CACHE_REDIS_URL", "REDIS_URL"];

pub(super) const SECTION: &str = "database";
pub(super) const FLAT_CADENCE_KEY: &str = "checkpoint_delta_snapshot_frequency";
pub(super) const DELTA_KEY: &str = "checkpoint_delta";
pub(super) const CADENCE_KEY: &str = "snapshot_frequency";

/// What stores the checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// This process's memory; lost when it ends.
    Memory,
    /// Files in [`Database::sqlite_dir`].
    Sqlite,
    /// The server at [`Database::postgres_url`].
    Postgres,
}

impl Backend {
    /// The word in the configuration file.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
        }
    }

    /// Whether the gateway's records are in a SQL database, which some features need.
    pub fn is_sql(self) -> bool {
        !matches!(self, Self::Memory)
    }
}

/// How SQLite flushes a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SqliteSynchronous {
    /// Each commit is durable when it returns.
    Full,
    /// The last commits before a power failure may be lost; the file stays consistent.
    Normal,
}

/// How the accumulating `messages` channel is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointChannelMode {
    /// The whole value in every checkpoint.
    Full,
    /// The writes of each step, and the whole value every `snapshot_frequency` of them.
    Delta,
}

impl CheckpointChannelMode {
    /// The word in the configuration file.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Delta => "delta",
        }
    }
}

/// `database.checkpoint_delta`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointDelta {
    /// A snapshot of `messages` is stored after this many per-step writes; at least 1, default 10.
    pub snapshot_frequency: u64,
}

impl Default for CheckpointDelta {
    fn default() -> Self {
        Self { snapshot_frequency: DEFAULT_SNAPSHOT_FREQUENCY }
    }
}

/// `database.checkpoint_graph_cache`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointGraphCache {
    /// How many compiled thread-state accessors a process keeps; at least 1, default 64. An unusable value only causes
    /// a warning and 64 is used, at start and on a reload, because the cache never changes a result.
    pub accessor_graph_max: usize,
}

impl Default for CheckpointGraphCache {
    fn default() -> Self {
        Self { accessor_graph_max: DEFAULT_ACCESSOR_GRAPH_MAX }
    }
}

/// Where the history cache is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointCacheType {
    /// This process.
    Memory,
    /// The server at [`CheckpointCache::redis_url`].
    Redis,
}

/// `database.checkpoint_cache`: the cache of materialized history in delta mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointCache {
    /// Where it is; default memory.
    pub kind: CheckpointCacheType,
    /// Bound of the memory cache in entries; 0 disables the cache entirely; default 128.
    pub max_entries: usize,
    /// The Redis server: the key, else `SVC_CHECKPOINT_CACHE_REDIS_URL`, else `REDIS_URL`, else
    /// `redis://localhost:6379/0`.
    pub redis_url: Secret,
    /// Lifetime of a Redis entry in seconds; 0 disables expiry; default 86400.
    pub ttl_seconds: u64,
    /// Prefix of every Redis key; empty derives a prefix from the database's identity.
    pub key_prefix: String,
}

impl Default for CheckpointCache {
    fn default() -> Self {
        Self {
            kind: CheckpointCacheType::Memory,
            max_entries: 128,
            redis_url: Secret::new(DEFAULT_REDIS_URL),
            ttl_seconds: 86_400,
            key_prefix: String::new(),
        }
    }
}

/// The `database` section. All of it but [`CheckpointGraphCache`] is read once, at start.
///
/// The default of this type is the `memory` backend; a configuration without `database.backend` gets
/// `sqlite` (service reference, "Database checkpoint settings").
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Database {
    /// What stores the checkpoints.
    pub backend: Backend,
    /// The directory of the SQLite files; default `data` in the state directory. A relative path resolves
    /// against the project root.
    pub sqlite_dir: PathBuf,
    /// How SQLite flushes; default full.
    pub sqlite_synchronous: SqliteSynchronous,
    /// The Postgres server; required by the `postgres` backend.
    pub postgres_url: Option<Secret>,
    /// The Postgres schema of the tables; `None` is `public`.
    pub postgres_schema: Option<String>,
    /// Connections per pool; at least 1, default 5.
    pub pool_size: u32,
    /// Whether the SQL statements of the gateway's records are logged; default false.
    pub echo_sql: bool,
    /// How `messages` is stored; default full.
    pub checkpoint_channel_mode: CheckpointChannelMode,
    /// Settings of the delta mode.
    pub checkpoint_delta: CheckpointDelta,
    /// The accessor cache, reloaded while running.
    pub checkpoint_graph_cache: CheckpointGraphCache,
    /// The history cache.
    pub checkpoint_cache: CheckpointCache,
}

impl Default for Database {
    fn default() -> Self {
        Self {
            backend: Backend::Memory,
            sqlite_dir: PathBuf::from(".svc/data"),
            sqlite_synchronous: SqliteSynchronous::Full,
            postgres_url: None,
            postgres_schema: None,
            pool_size: 5,
            echo_sql: false,
            checkpoint_channel_mode: CheckpointChannelMode::Full,
            checkpoint_delta: CheckpointDelta::default(),
            checkpoint_graph_cache: CheckpointGraphCache::default(),
            checkpoint_cache: CheckpointCache::default(),
        }
    }
}

impl Database {
    /// Builds the section from free-form values and a typed delta section. The typed section overrides whatever `section`
    /// says about the cadence; a deprecated flat key in it is ignored with a warning. Also returns the warnings.
    ///
    /// For programs that configure in code (service reference, "Logged messages"). In a file no section is built already,
    /// so the gateway and its commands have no use for this.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] as for a file; errors of the project's `.env`.
    pub fn around_delta(
        mut section: Map<String, Value>,
        delta: CheckpointDelta,
        options: &LoadOptions,
    ) -> Result<(Self, Vec<String>), ConfigError> {
        let report = Report::default();
        section.remove(DELTA_KEY);
        if section.remove(FLAT_CADENCE_KEY).is_some_and(|flat| !flat.is_null()) {
            report.warn(FLAT_CADENCE_KEY_IGNORED.to_owned());
        }
        let node = Node::at(SECTION, &section, &report);
        let mut database = Self::read(&node, &Location::of(options)?);
        if delta.snapshot_frequency == 0 {
            node.section(DELTA_KEY).problem(CADENCE_KEY, "must be an integer >= 1, got 0");
        }
        database.checkpoint_delta = delta;
        Ok((database, report.finish(None)?))
    }

    /// Reads the section; problems go to the node's report.
    pub(super) fn read(node: &Node<'_>, location: &Location) -> Self {
        let default = Self::default();
        let backends =
            [("memory", Backend::Memory), ("sqlite", Backend::Sqlite), ("postgres", Backend::Postgres)];
        let backend = node.choice("backend", &backends, Backend::Sqlite);
        let postgres_url = node.secret("postgres_url");
        if backend == Backend::Postgres && postgres_url.is_none() {
            node.problem("postgres_url", "is required when database.backend is postgres");
        }
        let modes = [("full", CheckpointChannelMode::Full), ("delta", CheckpointChannelMode::Delta)];
        let synchronous = [("full", SqliteSynchronous::Full), ("normal", SqliteSynchronous::Normal)];
        Self {
            backend,
            sqlite_dir: node
                .given_text("sqlite_dir")
                .map_or_else(|| location.state_dir.join("data"), |dir| location.root.join(dir)),
            sqlite_synchronous: node.choice("sqlite_synchronous", &synchronous, default.sqlite_synchronous),
            postgres_url,
            postgres_schema: node.given_text("postgres_schema"),
            pool_size: node.int("pool_size", default.pool_size, 1..),
            echo_sql: node.bool("echo_sql", default.echo_sql),
            checkpoint_channel_mode: node.choice(
                "checkpoint_channel_mode",
                &modes,
                default.checkpoint_channel_mode,
            ),
            checkpoint_delta: CheckpointDelta {
                snapshot_frequency: node.section(DELTA_KEY).int(CADENCE_KEY, DEFAULT_SNAPSHOT_FREQUENCY, 1..),
            },
            checkpoint_graph_cache: CheckpointGraphCache::read(node),
            checkpoint_cache: CheckpointCache::read(&node.section("checkpoint_cache"), &location.environment),
        }
    }
}

impl CheckpointGraphCache {
    /// Reads the section from the database section; never refuses it.
    fn read(database: &Node<'_>) -> Self {
        // A scratch report, because problems are only warnings here.
        let scratch = database.scratch();
        let read = database
            .reporting_to(&scratch)
            .section("checkpoint_graph_cache")
            .opt_int("accessor_graph_max", 1..);
        if scratch.finish(None).is_err() {
            database.warn(accessor_graph_max_unusable(DEFAULT_ACCESSOR_GRAPH_MAX));
        }
        Self { accessor_graph_max: read.unwrap_or(DEFAULT_ACCESSOR_GRAPH_MAX) }
    }
}

impl CheckpointCache {
    fn read(node: &Node<'_>, environment: &Environment) -> Self {
        let default = Self::default();
        let from_environment =
            || REDIS_URL_VARIABLES.iter().find_map(|name| environment.non_empty(name)).map(Secret::new);
        Self {
            kind: CheckpointCacheType::read(node),
            max_entries: node.int("max_entries", default.max_entries, 0..),
            redis_url: node.secret("redis_url").or_else(from_environment).unwrap_or(default.redis_url),
            ttl_seconds: node.int("ttl_seconds", default.ttl_seconds, 0..),
            key_prefix: node.text("key_prefix").unwrap_or_default(),
        }
    }
}

impl CheckpointCache {
    /// Refuses settings that the embedded client and the console do not support: they read checkpoints synchronously,
    /// and only the memory cache serves that (service reference, "Database checkpoint settings").
    ///
    /// # Errors
    /// [`ConfigError::SyncRedisCache`].
    pub fn check_sync(&self) -> Result<(), ConfigError> {
        match self.kind {
            CheckpointCacheType::Memory => Ok(()),
            CheckpointCacheType::Redis => Err(ConfigError::SyncRedisCache),
        }
    }
}

impl CheckpointCacheType {
    fn read(node: &Node<'_>) -> Self {
        match node.text("type").as_deref() {
            None | Some("memory") => Self::Memory,
            Some("redis") => Self::Redis,
            Some(other) => {
                let text = unknown_checkpoint_cache_type(other);
                node.problem("type", format!("{text}; use memory or redis"));
                Self::Memory
            }
        }
    }
}

/// Moves the deprecated flat cadence key of a `database` section to the nested key, before validation. An explicit
/// nested key wins (service reference, "Validation of settings").
pub(super) fn carry_flat_cadence(sections: &mut Map<String, Value>, report: &Report) {
    let Some(Value::Object(database)) = sections.get_mut(SECTION) else { return };
    let Some(flat) = database.remove(FLAT_CADENCE_KEY).filter(|flat| !flat.is_null()) else { return };
    let delta = database.entry(DELTA_KEY).or_insert(Value::Null);
    if delta.is_null() {
        *delta = Value::Object(Map::new());
    }
    // Reading the section refuses anything but a mapping.
    let Value::Object(delta) = delta else { return };
    if delta.get(CADENCE_KEY).is_some_and(|nested| !nested.is_null()) {
        report.warn(BOTH_CADENCE_KEYS.to_owned());
    } else {
        report.warn(flat_cadence_key_carried(&python_repr(&flat)));
        delta.insert(CADENCE_KEY.to_owned(), flat);
    }
}

/// A scalar as the reference's log shows it: `5`, `'5'`, `True`. Lists and mappings, which are never a cadence, are
/// shown as JSON.
fn python_repr(value: &Value) -> String {
    match value {
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::String(text) => {
            let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
            let escaped: String = text
                .chars()
                .flat_map(|c| match c {
                    '\\' => vec!['\\', '\\'],
                    '\n' => vec!['\\', 'n'],
                    c if c == quote => vec!['\\', c],
                    c => vec![c],
                })
                .collect();
            format!("{quote}{escaped}{quote}")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests;

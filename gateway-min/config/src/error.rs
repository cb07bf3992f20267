//! What can go wrong while the configuration is found, read and validated, and every fixed text of it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Logged when both spellings of the cadence are set. Text of the service reference, "Logged messages".
pub const BOTH_CADENCE_KEYS: &str = "Both database.checkpoint_delta_snapshot_frequency (deprecated) and \
     database.checkpoint_delta.snapshot_frequency are set; the nested key wins.";

/// Logged when the flat key meets a delta section that is already built. Text of the service reference,
/// "Logged messages".
pub const FLAT_CADENCE_KEY_IGNORED: &str = "Ignoring deprecated database.checkpoint_delta_snapshot_frequency \
     because database.checkpoint_delta is already set.";

/// The text that is logged when the flat key's value is carried onto the nested key. `value` is written the
/// way the reference writes it (`5`, `'5'`). Text of the service reference, "Logged messages".
pub fn flat_cadence_key_carried(value: &str) -> String {
    format!(
        "database.checkpoint_delta_snapshot_frequency is deprecated; use \
         database.checkpoint_delta.snapshot_frequency instead. Carried the legacy value ({value}) forward."
    )
}

/// The text about a checkpoint cache type that does not exist. Text of the service reference, "Messages".
pub fn unknown_checkpoint_cache_type(name: &str) -> String {
    format!("Unknown checkpoint cache type: {name}")
}

/// The error for a Redis history cache where only the memory one is supported. Text of the service reference, "Messages".
pub const SYNC_REDIS_CHECKPOINT_CACHE: &str = "database.checkpoint_cache.type 'redis' is not supported on the sync \
     checkpointer path (TUI/embedded); use 'memory'.";

/// The warning that `accessor_graph_max` is unusable. The default is used instead, as the service reference
/// says under "Database checkpoint settings".
pub(super) fn accessor_graph_max_unusable(default: usize) -> String {
    format!(
        "database.checkpoint_graph_cache.accessor_graph_max must be an integer >= 1; its value is unusable, \
         so {default} is used."
    )
}

/// Durable batches need a SQL database.
pub(super) const BATCHES_NEED_SQL: &str =
    "subagent_batches.enabled requires database.backend sqlite or postgres";
/// Managed subagents in the database need a SQL database.
pub(super) const AGENT_STORAGE_NEEDS_SQL: &str =
    "agent_storage.backend db requires database.backend sqlite or postgres";

/// A configuration that could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file was named, or was in use before, and is not there.
    #[error(
        "configuration file {} ({origin}) does not exist or is no file; create it, or name another one",
        path.display()
    )]
    Missing {
        /// The file that was looked for.
        path: PathBuf,
        /// What named it.
        origin: Origin,
    },
    /// A file is there but could not be read as UTF-8 text.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The working directory of the process is unknown.
    #[error(
        "cannot tell the working directory: {source}; set SVC_PROJECT_ROOT and start in a directory that exists"
    )]
    NoWorkingDirectory {
        /// What the operating system said.
        source: io::Error,
    },
    /// A line of the `.env` file is not `NAME=value`. The line is not shown, because it may hold a secret.
    #[error("{}: entry {entry} is not of the form NAME=value (quote values with spaces)", path.display())]
    BadDotEnv {
        /// The `.env` file.
        path: PathBuf,
        /// The entry's number, counted from 1; comments and blank lines do not count.
        entry: usize,
    },
    /// The file is not YAML.
    #[error("{} is not valid YAML: {detail}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What is wrong and where, without the file's content.
        detail: String,
    },
    /// The file's top level is something other than a mapping.
    #[error("{} must hold a mapping of sections at its top level (`database:`, `models:`, ...)", path.display())]
    NotAMapping {
        /// The file.
        path: PathBuf,
    },
    /// A `$VAR` names an environment variable that is not set.
    #[error(
        "Environment variable {variable} not found for config value ${variable} (key {key}); \
         set the variable, or write the value itself"
    )]
    UnsetVariable {
        /// The variable, or a mask where the text after `$` cannot be a name and the key holds secrets.
        variable: String,
        /// The dotted path of the key that uses it.
        key: String,
    },
    /// The history cache is in Redis, and an embedded client is to use it.
    #[error("{SYNC_REDIS_CHECKPOINT_CACHE}")]
    SyncRedisCache,
    /// One or more values are not allowed.
    #[error("invalid configuration{}:\n  {}", in_file(path.as_deref()), listed(problems))]
    Invalid {
        /// The file, if there was one.
        path: Option<PathBuf>,
        /// Every problem found, in the order of the sections.
        problems: Vec<Problem>,
    },
}

/// What named the configuration file that is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// The explicit argument.
    Argument,
    /// The environment variable `SVC_CONFIG_PATH`.
    Environment,
    /// `config.yaml` of the project root, which was there before.
    ProjectRoot,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Argument => "named by the argument",
            Self::Environment => "named by SVC_CONFIG_PATH",
            Self::ProjectRoot => "in use until now",
        })
    }
}

/// One value that is not allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The dotted path of the key, for example `models[0].context_window`.
    pub key: String,
    /// What is allowed and what was found; never a secret.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.message)
    }
}

fn in_file(path: Option<&Path>) -> String {
    path.map(|path| format!(" in {}", path.display())).unwrap_or_default()
}

fn listed(problems: &[Problem]) -> String {
    problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n  ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logged_texts_are_those_of_the_reference() {
        assert_eq!(
            BOTH_CADENCE_KEYS,
            "Both database.checkpoint_delta_snapshot_frequency (deprecated) and database.checkpoint_delta.snapshot_frequency are set; the nested key wins."
        );
        assert_eq!(
            FLAT_CADENCE_KEY_IGNORED,
            "Ignoring deprecated database.checkpoint_delta_snapshot_frequency because database.checkpoint_delta is already set."
        );
        assert_eq!(
            flat_cadence_key_carried("5"),
            "database.checkpoint_delta_snapshot_frequency is deprecated; use database.checkpoint_delta.snapshot_frequency instead. Carried the legacy value (5) forward."
        );
        assert_eq!(
            ConfigError::SyncRedisCache.to_string(),
            "database.checkpoint_cache.type 'redis' is not supported on the sync checkpointer path (TUI/embedded); use 'memory'."
        );
        assert_eq!(unknown_checkpoint_cache_type("disk"), "Unknown checkpoint cache type: disk");
    }

    #[test]
    fn an_invalid_configuration_lists_every_problem_below_the_file() {
        let error = ConfigError::Invalid {
            path: Some(PathBuf::from("/etc/config.yaml")),
            problems: vec![
                Problem { key: "a.b".into(), message: "must be true".into() },
                Problem { key: "c".into(), message: "is required".into() },
            ],
        };
        assert_eq!(
            error.to_string(),
            "invalid configuration in /etc/config.yaml:\n  a.b: must be true\n  c: is required"
        );
    }
}

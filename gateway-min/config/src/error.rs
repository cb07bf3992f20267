//! Errors of finding, reading and validating the configuration, with all their fixed texts.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Logged when both spellings of the cadence are set. Fixed by the service reference, "Logged messages".
pub const BOTH_CADENCE_KEYS: &str = "Both database.checkpoint_delta_snapshot_frequency (deprecated) and \
     database.checkpoint_delta.snapshot_frequency are set; the nested key wins.";

/// Logged when the flat key is set and a delta section is already built. Fixed by the service reference, "Logged
/// messages".
pub const FLAT_CADENCE_KEY_IGNORED: &str = "Ignoring deprecated database.checkpoint_delta_snapshot_frequency \
     because database.checkpoint_delta is already set.";

/// Logged when the flat key's value is moved to the nested key. `value` is written as in the reference (`5`, `'5'`).
/// Fixed by the service reference, "Logged messages".
pub fn flat_cadence_key_carried(value: &str) -> String {
    format!(
        "database.checkpoint_delta_snapshot_frequency is deprecated; use \
         database.checkpoint_delta.snapshot_frequency instead. Carried the legacy value ({value}) forward."
    )
}

/// The error for an unknown checkpoint cache type. Fixed by the service reference, "Messages".
pub fn unknown_checkpoint_cache_type(name: &str) -> String {
    format!("Unknown checkpoint cache type: {name}")
}

/// The error for a Redis history cache where only the memory cache is supported. Fixed by the service reference,
/// "Messages".
pub const SYNC_REDIS_CHECKPOINT_CACHE: &str = "database.checkpoint_cache.type 'redis' is not supported on the sync \
     checkpointer path (TUI/embedded); use 'memory'.";

/// The warning for an unusable `accessor_graph_max`. The default is used instead (service reference, "Database
/// checkpoint settings").
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
    /// The file was named, or was in use before, and is missing.
    #[error(
        "configuration file {} ({origin}) does not exist or is not a file; create it, or name another one",
        path.display()
    )]
    Missing {
        /// The file that was looked for.
        path: PathBuf,
        /// What named it.
        origin: Origin,
    },
    /// The file exists but cannot be read as UTF-8 text.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The file in use became empty.
    #[error("{} is empty; write it, or restart to use the defaults", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A file cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The file is not what its user trusted.
    #[error(
        "{} changed after it was trusted; look at it, then run `threadkeep config trust` in its directory",
        path.display()
    )]
    Untrusted {
        /// The file.
        path: PathBuf,
    },
    /// The home directory of the user is unknown.
    #[error("cannot determine your own configuration directory; set HOME")]
    NoHome,
    /// The working directory of the process is unknown.
    #[error(
        "cannot determine the working directory: {source}; start in a directory that exists and that you may enter"
    )]
    NoWorkingDirectory {
        /// The operating system's error.
        source: io::Error,
    },
    /// A line of the `.env` file is not `NAME=value`. The line is not shown, because it may hold a secret.
    #[error(
        "{}: entry {entry}, not counting comments and blank lines, is not of the form NAME=value (put values with \
         spaces into single quotes)",
        path.display()
    )]
    BadDotEnv {
        /// The `.env` file.
        path: PathBuf,
        /// The entry's number, counted from 1; comments and blank lines do not count.
        entry: usize,
    },
    /// The file is not valid YAML.
    #[error("{} is not valid YAML: {detail}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What is wrong and where, without the file's content.
        detail: String,
    },
    /// The file's top level is not a mapping.
    #[error("{} must hold a mapping of sections at its top level (`database:`, `models:`, ...)", path.display())]
    NotAMapping {
        /// The file.
        path: PathBuf,
    },
    /// A `$VAR` names an environment variable that is not set.
    #[error(
        "Environment variable {variable} not found for config value ${variable} (key {key}); {}",
        remedy(variable)
    )]
    UnsetVariable {
        /// The variable, or a mask where the text after `$` cannot be a name and the key holds secrets.
        variable: String,
        /// The dotted path of the key that uses it.
        key: String,
    },
    /// The history cache is in Redis, which the embedded client does not support.
    #[error("{SYNC_REDIS_CHECKPOINT_CACHE}")]
    SyncRedisCache,
    /// One or more values are invalid.
    #[error("invalid configuration{}:\n  {}", in_file(path.as_deref()), listed(problems))]
    Invalid {
        /// The file, if there is one.
        path: Option<PathBuf>,
        /// Every problem found, in the order of the sections.
        problems: Vec<Problem>,
    },
}

/// What named the missing configuration file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// The explicit argument.
    Argument,
    /// The environment variable `SVC_CONFIG_PATH`.
    Environment,
    /// `config.yaml` of the project root, which existed before.
    ProjectRoot,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Argument => "named by the argument",
            Self::Environment => "named by SVC_CONFIG_PATH",
            Self::ProjectRoot => "in use until it was removed",
        })
    }
}

/// An invalid value.
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

/// What to do about a variable that is not set. A name in braces is one that was written for another program.
fn remedy(variable: &str) -> &'static str {
    if variable.starts_with('{') {
        "write it without braces and without a default, as in $NAME"
    } else {
        "export the variable, add it to `.env` in the project root, or write the value itself"
    }
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

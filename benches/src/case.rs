//! A measured case: a workload on a store.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use threadkeep::channel::{ChannelTable, Schema};
use threadkeep::mode::ChannelMode;

use crate::workload::Workload;

/// One case of the matrix. Each is measured in its own process and database.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// What runs.
    pub workload: Workload,
    /// The store it runs on.
    pub backend: Backend,
    /// How the channel `messages` is stored.
    pub mode: Mode,
    /// Turns per conversation.
    pub turns: usize,
    /// Bytes of a message's text; 0 for workloads with their own sizes.
    pub size: usize,
    /// Conversations. A single one is measured turn by turn and read afterwards; more are run by `writers`
    /// concurrently.
    pub threads: usize,
    /// Tasks that write concurrently; conversation i belongs to writer i mod writers.
    pub writers: usize,
    /// The seed of the first conversation; each following conversation adds 1.
    pub seed: u64,
    /// Which repetition this is, from 0.
    pub rep: usize,
    /// Seconds of writing after which the case ends early and its row says so.
    pub cap_s: u64,
    /// Whether each superstep's bytes are also written to a raw store of the same kind right after it, so that machine
    /// noise affects both sides of the ratio.
    #[serde(default)]
    pub paired: bool,
    /// What is flushed before it is acknowledged.
    #[serde(default)]
    pub flush: Each,
}

impl Case {
    /// Whether the combination is valid; the matrix skips the others.
    pub fn is_meaningful(&self) -> bool {
        let alone = self.threads == 1;
        match self.backend.kind() {
            Kind::Ours if self.flush == Each::Turn => {
                self.writers <= self.threads && self.backend.floor().is_some() && !self.paired
            }
            _ if self.flush == Each::Turn => false,
            Kind::Ours => self.writers <= self.threads,
            // One writer, one table: a floor for a single conversation.
            Kind::Raw => alone && !self.paired,
            Kind::Peer => self.workload.is_sized() && self.writers <= self.threads && !self.paired,
        }
    }
}

/// What is flushed before it is acknowledged.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Each {
    /// Every superstep.
    #[default]
    Step,
    /// Each turn, with its last superstep; only our savers support that.
    Turn,
}

/// The mode of a channel table, with its cadence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Mode {
    /// Every checkpoint refers to the complete value.
    Full,
    /// A snapshot every K updates.
    Delta(u64),
}

impl Mode {
    /// The channels of the service's thread state in this mode.
    ///
    /// # Errors
    /// [`threadkeep::Error::InvalidInput`] for a cadence of 0.
    pub fn table(self) -> threadkeep::Result<ChannelTable> {
        let (mode, frequency) = match self {
            Self::Full => (ChannelMode::Full, 1),
            Self::Delta(frequency) => (ChannelMode::Delta, frequency),
        };
        Schema::thread_state().compile(mode, frequency)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.pad("full"),
            Self::Delta(frequency) => f.pad(&format!("delta:{frequency}")),
        }
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let cadence = text.strip_prefix("delta:").and_then(|k| k.parse().ok()).filter(|k| *k > 0);
        match (text, cadence) {
            ("full", _) => Ok(Self::Full),
            (_, Some(cadence)) => Ok(Self::Delta(cadence)),
            _ => Err(format!("{text} is neither full nor delta:K with a cadence K of at least 1")),
        }
    }
}

impl TryFrom<String> for Mode {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Mode> for String {
    fn from(mode: Mode) -> Self {
        mode.to_string()
    }
}

/// A store that is measured.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
    /// Our saver in memory.
    Memory,
    /// Our SQLite saver as it comes: flushed commits, compression.
    Sqlite,
    /// The same without compression.
    SqlitePlain,
    /// The same with `synchronous=NORMAL`: commits survive the process, not a loss of power.
    SqliteNormal,
    /// Our Postgres saver, on a server that flushes.
    Postgres,
    /// One SQLite table, one flushed insert a superstep: the floor.
    RawSqlite,
    /// One Postgres table, one insert a superstep: the floor.
    RawPostgres,
    /// LangGraph's `SqliteSaver`.
    LanggraphSqlite,
    /// LangGraph's `AsyncSqliteSaver`.
    LanggraphAsync,
    /// LangGraph's `PostgresSaver`.
    LanggraphPostgres,
}

/// Who made a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// We did.
    Ours,
    /// Nobody: the bytes go into a table.
    Raw,
    /// LangGraph; it runs in Python.
    Peer,
}

impl Backend {
    /// Who made it.
    pub const fn kind(self) -> Kind {
        match self {
            Self::Memory | Self::Sqlite | Self::SqlitePlain | Self::SqliteNormal | Self::Postgres => {
                Kind::Ours
            }
            Self::RawSqlite | Self::RawPostgres => Kind::Raw,
            Self::LanggraphSqlite | Self::LanggraphAsync | Self::LanggraphPostgres => Kind::Peer,
        }
    }

    /// Whether it needs a Postgres server.
    pub const fn needs_postgres(self) -> bool {
        matches!(self, Self::Postgres | Self::RawPostgres | Self::LanggraphPostgres)
    }

    /// The raw store on the same engine, if there is one that flushes as this one does.
    pub const fn floor(self) -> Option<Self> {
        match self {
            Self::Sqlite | Self::SqlitePlain => Some(Self::RawSqlite),
            Self::Postgres => Some(Self::RawPostgres),
            _ => None,
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Memory => "memory",
            Self::Sqlite => "sqlite",
            Self::SqlitePlain => "sqlite-plain",
            Self::SqliteNormal => "sqlite-normal",
            Self::Postgres => "postgres",
            Self::RawSqlite => "raw-sqlite",
            Self::RawPostgres => "raw-postgres",
            Self::LanggraphSqlite => "langgraph-sqlite",
            Self::LanggraphAsync => "langgraph-async",
            Self::LanggraphPostgres => "langgraph-postgres",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_is_the_text_that_it_prints() {
        for mode in [Mode::Full, Mode::Delta(1), Mode::Delta(1000)] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
            assert_eq!(serde_json::from_str::<Mode>(&serde_json::to_string(&mode).unwrap()).unwrap(), mode);
        }
        for wrong in ["delta", "delta:0", "delta:x", "Full"] {
            assert!(wrong.parse::<Mode>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_backend_has_one_name_on_the_command_line_in_rows_and_in_tables() {
        for backend in <Backend as clap::ValueEnum>::value_variants() {
            let name = backend.to_string();
            assert_eq!(serde_json::to_value(backend).unwrap(), name);
            assert_eq!(<Backend as clap::ValueEnum>::from_str(&name, false), Ok(*backend));
        }
    }
}

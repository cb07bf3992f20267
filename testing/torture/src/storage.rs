//! Stores to work on, each removed when its place is dropped.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use tempfile::TempDir;
use threadkeep::saver::Saver;
use threadkeep_memory::MemorySaver;
use threadkeep_postgres::PostgresSaver;
use threadkeep_sqlite::SqliteSaver;
use threadkeep_testing::Database;

use crate::trace::Recorder;
use crate::vfs::{self, Recording};

/// How long an operation waits on a busy machine.
pub const PATIENCE: Duration = Duration::from_mins(1);
/// How long what must happen may take: longer than operations that wait for each other on a busy machine.
pub const HUNG: Duration = Duration::from_mins(10);

/// What the sessions of a process that will be killed are called on Postgres.
const MORTAL: &str = "mortal";

/// One of our savers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Kind {
    /// The memory saver.
    Memory,
    /// SQLite.
    Sqlite,
    /// Postgres.
    Postgres,
}

impl Kind {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
        }
    }
}

/// A temporary directory, in memory where the system has such a place.
///
/// # Errors
/// Those of the file system.
pub fn scratch() -> std::io::Result<TempDir> {
    let memory = Path::new("/dev/shm");
    let here = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    here.or_else(|_| tempfile::tempdir())
}

/// A store.
pub struct Storage {
    kind: Kind,
    memory: MemorySaver,
    directory: TempDir,
    database: Option<Database>,
    _unflushed: Option<Recording>,
}

impl Storage {
    /// An empty store. SQLite flushes nothing there.
    ///
    /// # Errors
    /// If it cannot be created.
    pub async fn new(kind: Kind) -> anyhow::Result<Self> {
        let directory = scratch()?;
        let recording = match kind {
            Kind::Sqlite => Some(vfs::record(directory.path(), Arc::new(Recorder::default()))?),
            Kind::Memory | Kind::Postgres => None,
        };
        let database = match kind {
            Kind::Postgres => Some(database().await?),
            Kind::Memory | Kind::Sqlite => None,
        };
        Ok(Self { kind, memory: MemorySaver::new(), directory, database, _unflushed: recording })
    }

    /// The file of an SQLite store.
    pub fn file(&self) -> PathBuf {
        self.directory.path().join("checkpoints.db")
    }

    /// Its address for another process: a path or a URL.
    pub fn address(&self) -> String {
        match &self.database {
            Some(database) => database.url().to_owned(),
            None => self.file().display().to_string(),
        }
    }

    /// The address for a process that will be killed.
    pub fn address_for_mortals(&self) -> String {
        let mut address = self.address();
        if self.database.is_some() {
            address += if address.contains('?') { "&" } else { "?" };
            address += "application_name=";
            address += MORTAL;
        }
        address
    }

    /// Waits until nothing is carried out any more for such a process, which was killed: a session on Postgres may still
    /// have its last statement to do.
    ///
    /// # Errors
    /// Those of the server.
    pub async fn left_by_mortals(&self) -> anyhow::Result<()> {
        match &self.database {
            Some(database) => database.left_by(MORTAL).await.map_err(anyhow::Error::from_boxed),
            None => Ok(()),
        }
    }

    /// Waits until a call on Postgres waits for a lock; on another store none is seen to.
    ///
    /// # Errors
    /// Those of the server.
    pub async fn blocked(&self) -> anyhow::Result<()> {
        match &self.database {
            Some(database) => database.blocked().await.map_err(anyhow::Error::from_boxed),
            None => std::future::pending().await,
        }
    }

    /// A new handle.
    ///
    /// # Errors
    /// The driver's.
    pub async fn open(&self) -> anyhow::Result<Arc<dyn Saver>> {
        match self.kind {
            Kind::Memory => Ok(Arc::new(self.memory.clone())),
            kind => open_at(kind, &self.address()).await,
        }
    }
}

/// A handle on the store at an address.
///
/// # Errors
/// The driver's.
pub async fn open_at(kind: Kind, address: &str) -> anyhow::Result<Arc<dyn Saver>> {
    vfs::install()?;
    Ok(match kind {
        Kind::Memory => anyhow::bail!("a store in memory has no address"),
        Kind::Sqlite => Arc::new(SqliteSaver::open_async(address, sqlite_options()).await?),
        Kind::Postgres => Arc::new(PostgresSaver::connect(address, postgres_options()).await?),
    })
}

/// SQLite, patient.
pub fn sqlite_options() -> threadkeep_sqlite::Options {
    threadkeep_sqlite::Options { busy_timeout: PATIENCE, readers: 2, ..Default::default() }
}

/// Postgres, patient.
pub fn postgres_options() -> threadkeep_postgres::Options {
    threadkeep_postgres::Options { patience: PATIENCE, connections: 4, ..Default::default() }
}

/// A database with our tables on the server of this process.
///
/// # Errors
/// If there is no server.
pub async fn database() -> anyhow::Result<Database> {
    let server = threadkeep_testing::postgres().map_err(anyhow::Error::from_boxed)?;
    let database = server.database().await.map_err(anyhow::Error::from_boxed)?;
    threadkeep_postgres::setup(database.url(), &postgres_options()).await?;
    Ok(database)
}

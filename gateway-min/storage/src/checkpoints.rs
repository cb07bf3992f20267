//! The checkpoint store.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use threadkeep::id::ThreadId;
use threadkeep::saver::Saver;
use threadkeep_config::{Backend, Config, SqliteSynchronous};
use threadkeep_memory::MemorySaver;
use threadkeep_postgres::PostgresSaver;
use threadkeep_sqlite::{Options, SqliteSaver, Synchronous};

use crate::{OpenError, postgres};

/// The file of the checkpoints in `database.sqlite_dir`.
pub const CHECKPOINT_FILE: &str = "checkpoints.db";

/// An open store of checkpoints.
#[derive(Clone)]
pub struct Checkpoints(Driver);

#[derive(Clone)]
enum Driver {
    Memory(Arc<MemorySaver>),
    Sqlite(Arc<SqliteSaver>),
    Postgres(Arc<PostgresSaver>),
    /// A saver of the program's own.
    Own(Arc<dyn Saver>),
}

impl fmt::Debug for Checkpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Checkpoints").field(&self.saver().capabilities().name).finish()
    }
}

impl Checkpoints {
    /// Opens the configured store, creating it if missing.
    ///
    /// # Errors
    /// [`OpenError::Checkpoints`].
    pub(crate) async fn open(config: &Config) -> Result<Self, OpenError> {
        Ok(Self(match config.database.backend {
            Backend::Memory => return Ok(Self::in_memory()),
            Backend::Sqlite => Driver::Sqlite(Arc::new(open_sqlite(config).await?)),
            Backend::Postgres => Driver::Postgres(Arc::new(open_postgres(config).await?)),
        }))
    }

    /// A saver of the program's own.
    pub(crate) fn of(saver: Arc<dyn Saver>) -> Self {
        Self(Driver::Own(saver))
    }

    /// A store that ends with its last clone.
    pub fn in_memory() -> Self {
        Self(Driver::Memory(Arc::default()))
    }

    /// Identifies the configured store; `None` if each process has its own. Contains a password, so never show it.
    pub(crate) fn identity(config: &Config) -> Option<String> {
        let database = &config.database;
        match database.backend {
            Backend::Memory => None,
            Backend::Sqlite => {
                let path = &database.sqlite_dir;
                Some(std::path::absolute(path).unwrap_or_else(|_| path.clone()).display().to_string())
            }
            Backend::Postgres => {
                let schema = postgres::options(database).schema;
                Some(format!("{schema}\n{}", postgres::url(database)))
            }
        }
    }

    /// Opens the database at this path.
    pub(crate) async fn sqlite_at(path: &Path, options: Options) -> threadkeep::Result<Self> {
        Ok(Self(Driver::Sqlite(Arc::new(SqliteSaver::open_async(path, options).await?))))
    }

    /// Opens the database at this path, which cannot be written.
    pub(crate) async fn sqlite_read_only(path: &Path, options: Options) -> threadkeep::Result<Self> {
        let path = path.to_owned();
        let open = tokio::task::spawn_blocking(move || SqliteSaver::open_read_only(path, &options));
        let opened = open.await.map_err(|error| threadkeep::Error::Unavailable {
            saver: "sqlite",
            reason: error.to_string(),
        })??;
        Ok(Self(Driver::Sqlite(Arc::new(opened))))
    }

    /// The store in Postgres.
    pub(crate) fn in_postgres(saver: PostgresSaver) -> Self {
        Self(Driver::Postgres(Arc::new(saver)))
    }

    /// The store as the engine's trait.
    pub fn saver(&self) -> Arc<dyn Saver> {
        match &self.0 {
            Driver::Memory(saver) => Arc::clone(saver) as Arc<dyn Saver>,
            Driver::Sqlite(saver) => Arc::clone(saver) as Arc<dyn Saver>,
            Driver::Postgres(saver) => Arc::clone(saver) as Arc<dyn Saver>,
            Driver::Own(saver) => Arc::clone(saver),
        }
    }

    /// The store, if it is a database in one file.
    pub fn sqlite(&self) -> Option<&Arc<SqliteSaver>> {
        match &self.0 {
            Driver::Sqlite(saver) => Some(saver),
            Driver::Memory(_) | Driver::Postgres(_) | Driver::Own(_) => None,
        }
    }

    /// The bytes of a thread's rows as they are stored: compressed, and each element once. None of a store of the program's
    /// own.
    ///
    /// # Errors
    /// Those of a read.
    pub async fn stored_bytes(&self, thread: &ThreadId) -> threadkeep::Result<Option<u64>> {
        Ok(match &self.0 {
            Driver::Sqlite(saver) => Some(saver.stored_bytes(thread).await?),
            Driver::Postgres(saver) => Some(saver.stored_bytes(thread).await?),
            Driver::Memory(_) | Driver::Own(_) => None,
        })
    }

    /// Whether others than commands work on its server: see [`PostgresSaver::is_serving`].
    ///
    /// # Errors
    /// Those of a read.
    pub(crate) async fn is_serving(&self) -> threadkeep::Result<bool> {
        match &self.0 {
            Driver::Postgres(saver) => saver.is_serving().await,
            Driver::Sqlite(_) | Driver::Memory(_) | Driver::Own(_) => Ok(false),
        }
    }

    /// Waits for running operations and closes it, for every clone.
    pub async fn close(&self) {
        match &self.0 {
            // A saver of the program's own is closed by its last clone.
            Driver::Memory(_) | Driver::Own(_) => {}
            Driver::Sqlite(saver) => saver.close().await,
            Driver::Postgres(saver) => saver.close(),
        }
    }
}

async fn open_sqlite(config: &Config) -> threadkeep::Result<SqliteSaver> {
    let directory = &config.database.sqlite_dir;
    let unusable = |error: std::io::Error| threadkeep::Error::Unavailable {
        saver: "sqlite",
        reason: format!("cannot create the directory {}: {error}", directory.display()),
    };
    // Brief, and once per start.
    threadkeep_files::create_private_dir(directory).map_err(unusable)?;
    SqliteSaver::open_async(directory.join(CHECKPOINT_FILE), sqlite_options(config)).await
}

/// Connects to the Postgres server. Creates missing tables and upgrades old ones, for which the role must own them.
async fn open_postgres(config: &Config) -> threadkeep::Result<PostgresSaver> {
    let (url, options) = (postgres::checked_url(&config.database)?, postgres::options(&config.database));
    match PostgresSaver::connect(url, options.clone()).await {
        Err(error) if threadkeep_postgres::schema::is_wanted(&error) => {
            threadkeep_postgres::setup(url, &options).await?;
            PostgresSaver::connect(url, options).await
        }
        connected => connected,
    }
}

/// The configured options for opening the checkpoint database.
pub(crate) fn sqlite_options(config: &Config) -> Options {
    Options {
        synchronous: match config.database.sqlite_synchronous {
            SqliteSynchronous::Full => Synchronous::Full,
            SqliteSynchronous::Normal => Synchronous::Normal,
        },
        ..Options::default()
    }
}

//! An existing store, for operator commands. Opening never creates anything.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use threadkeep::cache::CachedSaver;
use threadkeep::mode::DEFAULT_SNAPSHOT_FREQUENCY;
use threadkeep::saver::Saver;
use threadkeep_config::{Backend, Config, Database, Secret};
use threadkeep_postgres::PostgresSaver;
use threadkeep_records::{DATABASE_FILE, Store, StoreError, StoreOptions};
use threadkeep_sqlite::{Options, SqliteSaver};

use crate::cache::{PurgeOnly, redis_cache};
use crate::checkpoints::{CHECKPOINT_FILE, sqlite_options};
use crate::{Checkpoints, OpenError, postgres};

/// An open store that existed before.
pub struct Existing {
    name: String,
    checkpoints: Checkpoints,
    saver: Arc<dyn Saver>,
    records: Option<Store>,
    frequency: u64,
}

impl fmt::Debug for Existing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Existing").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Existing {
    /// Opens the configured store. Changed threads are purged from the configured Redis.
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn configured(config: &Config) -> Result<Self, OpenError> {
        let frequency = config.snapshot_frequency();
        let mut opened = match config.database.backend {
            Backend::Memory => return Err(OpenError::InMemory),
            Backend::Postgres => Self::in_postgres(&config.database, frequency).await?,
            Backend::Sqlite => {
                let path = config.database.sqlite_dir.join(CHECKPOINT_FILE);
                Self::in_file(&path, sqlite_options(config), frequency).await?
            }
        };
        if let Some(cache) = redis_cache(config)? {
            opened.saver = Arc::new(CachedSaver::new(opened.saver, Arc::new(PurgeOnly(cache))));
        }
        Ok(opened)
    }

    /// Opens the checkpoint database at this path, regardless of the configuration.
    ///
    /// # Errors
    /// [`OpenError::Missing`], [`OpenError::Checkpoints`].
    pub async fn sqlite(path: &Path) -> Result<Self, OpenError> {
        Self::in_file(path, Options::default(), DEFAULT_SNAPSHOT_FREQUENCY).await
    }

    /// Opens the store in the database at this URL, regardless of the configuration.
    ///
    /// # Errors
    /// [`OpenError::Checkpoints`].
    pub async fn postgres(url: &str) -> Result<Self, OpenError> {
        let database = Database { postgres_url: Some(Secret::new(url)), ..Database::default() };
        Self::in_postgres(&database, DEFAULT_SNAPSHOT_FREQUENCY).await
    }

    async fn in_file(path: &Path, options: Options, frequency: u64) -> Result<Self, OpenError> {
        if !path.is_file() {
            return Err(OpenError::Missing(path.to_owned()));
        }
        let checkpoints = Checkpoints::sqlite_at(path, options).await?;
        let records = path.with_file_name(DATABASE_FILE);
        let records = if records.is_file() {
            readable(Store::open(&records, StoreOptions::default()).await.map(Some))
        } else {
            None
        };
        Ok(Self::new(path.display().to_string(), checkpoints, records, frequency))
    }

    async fn in_postgres(database: &Database, frequency: u64) -> Result<Self, OpenError> {
        let url = postgres::url(database);
        let saver = PostgresSaver::connect(url, postgres::options(database)).await?;
        let records = match postgres::records(database) {
            Ok(target) => readable(Store::open_existing_postgres(&target, StoreOptions::default()).await),
            Err(error) => {
                tracing::warn!(%error);
                None
            }
        };
        Ok(Self::new(postgres::name(url), Checkpoints::in_postgres(saver), records, frequency))
    }

    fn new(name: String, checkpoints: Checkpoints, records: Option<Store>, frequency: u64) -> Self {
        Self { name, saver: checkpoints.saver(), checkpoints, records, frequency }
    }

    /// Its name in messages; contains no secrets.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The checkpoints.
    pub fn saver(&self) -> &Arc<dyn Saver> {
        &self.saver
    }

    /// The checkpoints, if they are a database in one file.
    pub fn sqlite_saver(&self) -> Option<&Arc<SqliteSaver>> {
        self.checkpoints.sqlite()
    }

    /// The gateway's records, if a gateway has created them and they can be read.
    pub fn records(&self) -> Option<&Store> {
        self.records.as_ref()
    }

    /// The cadence of snapshots: the configured one, else the default.
    pub fn snapshot_frequency(&self) -> u64 {
        self.frequency
    }

    /// Closes the store properly.
    pub async fn close(self) {
        if let Some(records) = self.records {
            records.close().await;
        }
        self.checkpoints.close().await;
    }
}

/// The records, if they can be read. They only supply names, so a command continues without them.
fn readable(opened: Result<Option<Store>, StoreError>) -> Option<Store> {
    opened.unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot read the gateway's records; threads are shown without names");
        None
    })
}

//! The stores of a program: those that its configuration names, or checkpoints in a saver of its own.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use threadkeep::saver::Saver;
use threadkeep_config::{Backend, Config};
use threadkeep_records::DATABASE_FILE;

use crate::{CHECKPOINT_FILE, Checkpoints, Existing, OpenError, open_records, postgres};

/// Opens a saver that this workspace does not know.
#[async_trait]
pub trait OpenSaver: Send + Sync + 'static {
    /// Opens the store, and creates what is missing. It is called once when a gateway or an embedded client starts, and once for each
    /// operator's command, which may run while a gateway has the store open. The last clone of the saver closes it.
    ///
    /// # Errors
    /// [`threadkeep::Error::Unavailable`], with a reason that says what to do.
    async fn open(&self, config: &Config) -> threadkeep::Result<Arc<dyn Saver>>;
}

/// Which stores a program works on. By default those that its configuration names.
#[derive(Clone, Default)]
pub struct Stores {
    own: Option<Arc<dyn OpenSaver>>,
}

impl fmt::Debug for Stores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.own.is_some() { "Stores(own saver)" } else { "Stores(configured)" })
    }
}

impl Stores {
    /// Checkpoints in a saver of the program's own. The gateway's records stay in the configured `database.backend`.
    pub fn with_saver(opener: impl OpenSaver) -> Self {
        Self { own: Some(Arc::new(opener)) }
    }

    /// Opens the checkpoints, creating the store if it is missing.
    ///
    /// # Errors
    /// [`OpenError::Checkpoints`].
    pub async fn checkpoints(&self, config: &Config) -> Result<Checkpoints, OpenError> {
        match &self.own {
            Some(opener) => Ok(Checkpoints::of(opener.open(config).await?)),
            None => Checkpoints::open(config).await,
        }
    }

    /// Opens the stores for an operator's command. Those of a configuration must exist. Changed threads are purged from the
    /// configured Redis.
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn existing(&self, config: &Config) -> Result<Existing, OpenError> {
        match &self.own {
            Some(opener) => Existing::of(opener.open(config).await?, config).await,
            None => Existing::configured(config).await,
        }
    }

    /// Creates the stores if they are missing, and migrates older ones: the checkpoints and the gateway's records. Returns
    /// their names.
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn set_up(&self, config: &Config) -> Result<Vec<String>, OpenError> {
        let database = &config.database;
        if self.own.is_none() {
            match database.backend {
                Backend::Memory => return Err(OpenError::InMemory),
                // Opening alone migrates only tables that cannot be used as they are.
                Backend::Postgres => {
                    threadkeep_postgres::setup(postgres::url(database), &postgres::options(database)).await?;
                }
                Backend::Sqlite => {}
            }
        }
        let checkpoints = self.checkpoints(config).await?;
        let saver = checkpoints.saver().capabilities().name;
        checkpoints.close().await;
        open_records(config).await?.close().await;
        let own = self.own.is_some().then(|| format!("the {saver} store"));
        Ok(match database.backend {
            Backend::Memory => own.into_iter().collect(),
            Backend::Postgres => own.into_iter().chain([postgres::name(postgres::url(database))]).collect(),
            Backend::Sqlite => {
                let file = |name| database.sqlite_dir.join(name).display().to_string();
                vec![own.unwrap_or_else(|| file(CHECKPOINT_FILE)), file(DATABASE_FILE)]
            }
        })
    }

    /// Identifies the checkpoints in this process, for as long as these stores or a clone of them exist; `None` if each opening makes
    /// others. Contains a password, so never show it.
    pub fn identity(&self, config: &Config) -> Option<String> {
        let configured = Checkpoints::identity(config);
        match &self.own {
            Some(opener) => Some(format!("{:p}\n{}", Arc::as_ptr(opener), configured.unwrap_or_default())),
            None => configured,
        }
    }
}

//! An existing store, for operator commands. Opening never creates anything.

use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use threadkeep::cache::CachedSaver;
use threadkeep::id::ThreadId;
use threadkeep::mode::DEFAULT_SNAPSHOT_FREQUENCY;
use threadkeep::saver::Saver;
use threadkeep_config::{Backend, Config, Database, RunOwnership, Secret};
use threadkeep_postgres::{Options as PostgresOptions, PostgresSaver};
use threadkeep_records::{DATABASE_FILE, Records, RecordsError, RecordsOptions};
use threadkeep_sqlite::{Options, SqliteSaver, copy_database};

use crate::cache::{PurgeOnly, redis_cache};
use crate::checkpoints::{CHECKPOINT_FILE, sqlite_options};
use crate::records::lease_beside;
use crate::{Checkpoints, OpenError, postgres};

/// How long a backup waits for a lock on the records.
const PATIENCE: Duration = Duration::from_secs(5);

/// An open store that existed before.
pub struct Existing {
    name: String,
    checkpoints: Checkpoints,
    saver: Arc<dyn Saver>,
    found: Found,
    frequency: u64,
}

/// What there is of the gateway's records.
#[derive(Default)]
struct Found {
    records: Option<Records>,
    /// Why they cannot be read, although they are there.
    unreadable: Option<String>,
    /// Where they are if they are a file, which may be there although it cannot be read.
    file: Option<PathBuf>,
}

/// The files of a backup.
#[derive(Debug)]
pub struct BackedUp {
    /// The checkpoints.
    pub checkpoints: PathBuf,
    /// The gateway's records, if there are any.
    pub records: Option<PathBuf>,
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
    pub(crate) async fn configured(config: &Config) -> Result<Self, OpenError> {
        let frequency = config.snapshot_frequency();
        let opened = match config.database.backend {
            Backend::Memory => return Err(OpenError::InMemory),
            Backend::Postgres => {
                Self::in_postgres(&config.database, frequency, records_options(&config.run_ownership)).await?
            }
            Backend::Sqlite => {
                let path = config.database.sqlite_dir.join(CHECKPOINT_FILE);
                let records = records_options(&config.run_ownership);
                Self::in_file(&path, sqlite_options(config), frequency, records).await?
            }
        };
        opened.purging(config)
    }

    /// A saver of the program's own, with the configured records if a gateway has created them.
    pub(crate) async fn of(saver: Arc<dyn Saver>, config: &Config) -> Result<Self, OpenError> {
        let (database, options) = (&config.database, records_options(&config.run_ownership));
        let found = match database.backend {
            Backend::Memory => Found::default(),
            Backend::Postgres => {
                let target = postgres::records(database, true)?;
                Found::of(Records::open_existing_postgres(&target, options).await)
            }
            Backend::Sqlite => Found::in_file(database.sqlite_dir.join(DATABASE_FILE), options).await,
        };
        let name = format!("the {} store", saver.capabilities().name);
        Self::new(name, Checkpoints::of(saver), found, config.snapshot_frequency()).purging(config)
    }

    /// The store, from which changed threads are purged in the configured Redis.
    fn purging(mut self, config: &Config) -> Result<Self, OpenError> {
        if let Some(cache) = redis_cache(config)? {
            self.saver = Arc::new(CachedSaver::new(self.saver, Arc::new(PurgeOnly(cache))));
        }
        Ok(self)
    }

    /// Opens the checkpoint database at this path, regardless of the configuration.
    ///
    /// # Errors
    /// [`OpenError::Missing`], [`OpenError::Checkpoints`].
    pub async fn sqlite(path: &Path) -> Result<Self, OpenError> {
        let records = records_options(&RunOwnership::default());
        Self::in_file(path, Options::default(), DEFAULT_SNAPSHOT_FREQUENCY, records).await
    }

    /// Opens the store in the database at this URL, regardless of the configuration.
    ///
    /// # Errors
    /// [`OpenError::Checkpoints`].
    pub async fn postgres(url: &str) -> Result<Self, OpenError> {
        let database = Database { postgres_url: Some(Secret::new(url)), ..Database::default() };
        let records = records_options(&RunOwnership::default());
        Self::in_postgres(&database, DEFAULT_SNAPSHOT_FREQUENCY, records).await
    }

    async fn in_file(
        path: &Path,
        options: Options,
        frequency: u64,
        records: RecordsOptions,
    ) -> Result<Self, OpenError> {
        if !path.is_file() {
            return Err(OpenError::Missing(path.to_owned()));
        }
        if path.file_name().is_some_and(|name| name == DATABASE_FILE) {
            return Err(OpenError::RecordsFile {
                path: path.to_owned(),
                instead: path.with_file_name(CHECKPOINT_FILE),
            });
        }
        let checkpoints = if is_writable(path) {
            Checkpoints::sqlite_at(path, options).await?
        } else {
            tracing::warn!(path = %path.display(), "the database cannot be written; it is only read");
            Checkpoints::sqlite_read_only(path, options).await?
        };
        let found = Found::beside(path, records).await;
        Ok(Self::new(path.display().to_string(), checkpoints, found, frequency))
    }

    async fn in_postgres(
        database: &Database,
        frequency: u64,
        records: RecordsOptions,
    ) -> Result<Self, OpenError> {
        let url = postgres::checked_url(database)?;
        let options = PostgresOptions { is_command: true, ..postgres::options(database) };
        let saver = Box::pin(PostgresSaver::connect(url, options)).await?;
        let found = match postgres::records(database, true) {
            Ok(target) => Found::of(Records::open_existing_postgres(&target, records).await),
            Err(error) => Found::of(Err(error)),
        };
        Ok(Self::new(postgres::name(url), Checkpoints::in_postgres(saver), found, frequency))
    }

    fn new(name: String, checkpoints: Checkpoints, found: Found, frequency: u64) -> Self {
        Self { name, saver: checkpoints.saver(), checkpoints, found, frequency }
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

    /// The bytes of a thread's rows as they are stored: compressed, and each element once. None of a store of the program's
    /// own.
    ///
    /// # Errors
    /// Those of a read.
    pub async fn stored_bytes(&self, thread: &ThreadId) -> threadkeep::Result<Option<u64>> {
        self.checkpoints.stored_bytes(thread).await
    }

    /// Whether others than commands work on its server: see [`PostgresSaver::is_serving`]. False of a store without a server.
    ///
    /// # Errors
    /// Those of a read.
    pub async fn is_serving(&self) -> threadkeep::Result<bool> {
        self.checkpoints.is_serving().await
    }

    /// The gateway's records, if a gateway has created them and they can be read.
    pub fn records(&self) -> Option<&Records> {
        self.found.records.as_ref()
    }

    /// Why the gateway's records cannot be read, if they are there and cannot. A command that only shows names continues
    /// without them.
    pub fn unreadable_records(&self) -> Option<&str> {
        self.found.unreadable.as_deref()
    }

    /// Copies the store into new files, while others read and write: the checkpoints to `to`, the gateway's records beside it,
    /// where [`Self::sqlite`] finds them.
    /// Each is of one moment. The records are copied first: the checkpoints of every run that they call finished are in
    /// the backup. None for a store that is not in files: its server makes backups.
    ///
    /// # Errors
    /// [`OpenError::Checkpoints`]: a file is there already, the store is damaged, or the disk is full.
    /// [`OpenError::RecordsElsewhere`]: a copy without records would make its threads everybody's. Neither file is there
    /// then, nor if the future is dropped.
    pub async fn backup(&self, to: &Path) -> Result<Option<BackedUp>, OpenError> {
        let Some(sqlite) = self.sqlite_saver() else { return Ok(None) };
        let records = match (&self.found.file, &self.found.unreadable) {
            (None, Some(reason)) => return Err(OpenError::RecordsElsewhere(reason.clone())),
            (Some(from), _) => {
                let file = records_of(to);
                let copied = copy_database(from, &file, PATIENCE).await?;
                Some((file, copied))
            }
            (None, None) => None,
        };
        let checkpoints = sqlite.copied(to).await?;
        // They get their names together: nothing waits from here on.
        let records = match records {
            Some((file, copied)) => {
                copied.keep()?;
                Some(file)
            }
            None => None,
        };
        if let Err(error) = checkpoints.keep() {
            if let Some(Err(left)) = records.as_ref().map(std::fs::remove_file) {
                tracing::warn!(%left, "cannot remove the copy of the records");
            }
            return Err(error.into());
        }
        Ok(Some(BackedUp { checkpoints: to.to_owned(), records }))
    }

    /// The cadence of snapshots: the configured one, else the default.
    pub fn snapshot_frequency(&self) -> u64 {
        self.frequency
    }

    /// Closes the store properly.
    pub async fn close(self) {
        if let Some(records) = self.found.records {
            records.close().await;
        }
        self.checkpoints.close().await;
    }
}

/// Whether the database and its directory, where its log is, can be written.
fn is_writable(path: &Path) -> bool {
    #[cfg(unix)]
    {
        use rustix::fs::{Access, access};
        let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
        access(path, Access::WRITE_OK).is_ok()
            && access(directory.unwrap_or(Path::new(".")), Access::WRITE_OK).is_ok()
    }
    #[cfg(not(unix))]
    {
        std::fs::metadata(path).is_ok_and(|metadata| !metadata.permissions().readonly())
    }
}

/// Where the gateway's records of these checkpoints are: beside those of a gateway, or those of a backup. No two files
/// have theirs in the same place.
fn records_of(checkpoints: &Path) -> PathBuf {
    let name = checkpoints.file_name().unwrap_or_default();
    if name == CHECKPOINT_FILE {
        checkpoints.with_file_name(DATABASE_FILE)
    } else if checkpoints.extension().is_some_and(|extension| extension == "db") {
        checkpoints.with_extension(DATABASE_FILE)
    } else {
        // Of `a` beside `a.db`, and of `a.2026-11-24` beside `a.2026-11-25`.
        let mut name = name.to_owned();
        name.push("-");
        name.push(DATABASE_FILE);
        checkpoints.with_file_name(name)
    }
}

/// How a command opens records: what it reserves is free again soon after it dies.
fn records_options(terms: &RunOwnership) -> RecordsOptions {
    RecordsOptions { lease: Some(lease_beside(terms)), ..RecordsOptions::default() }
}

/// Where an earlier version put the records of a backup whose name does not end with `.db`, if something is there that may
/// be its own: several backups had the same place.
fn shared_records_of(checkpoints: &Path) -> Option<PathBuf> {
    let (shared, owner) = (checkpoints.with_extension(DATABASE_FILE), checkpoints.with_extension("db"));
    (!records_of(checkpoints).exists() && !owner.exists() && shared.is_file()).then_some(shared)
}

impl Found {
    /// The records of the checkpoints in this file, if a gateway has created them.
    async fn beside(checkpoints: &Path, options: RecordsOptions) -> Self {
        let file = records_of(checkpoints);
        match shared_records_of(checkpoints) {
            Some(shared) => Self::unreadable(format!(
                "{} may be of this backup or of another one; rename it to {} if it is of this one, else move it away",
                shared.display(),
                file.display()
            )),
            None => Self::in_file(file, options).await,
        }
    }

    /// The records in this file, if a gateway has created it. Those that cannot be written are only read. Those of an older
    /// build are unreadable: a command does not upgrade what the gateway that wrote them may still need.
    async fn in_file(file: PathBuf, options: RecordsOptions) -> Self {
        // A link to nothing is no reason to believe that there are no records.
        if file.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
            return Self::default();
        }
        let found = if file.is_file() && is_writable(&file) {
            Self::of(Records::open_existing(&file, options).await.map(Some))
        } else if file.is_file() {
            Self::of(Records::open_read_only(&file, options).await.map(Some))
        } else {
            Self::unreadable(format!(
                "{} is not a file; put the gateway's records back there",
                file.display()
            ))
        };
        Self { file: Some(file), ..found }
    }

    fn of(opened: Result<Option<Records>, RecordsError>) -> Self {
        match opened {
            Ok(records) => Self { records, ..Self::default() },
            Err(error) => Self::unreadable(error.to_string()),
        }
    }

    fn unreadable(reason: String) -> Self {
        tracing::warn!(reason, "cannot read the gateway's records; threads are shown without names");
        Self { unreadable: Some(reason), ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use threadkeep_records::WriterKind;

    use super::*;

    /// A command may be killed at any time.
    #[tokio::test]
    async fn what_a_command_reserves_has_a_lease() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(CHECKPOINT_FILE);
        Checkpoints::sqlite_at(&path, Options::default()).await.unwrap().close().await;
        let records = directory.path().join(DATABASE_FILE);
        Records::open(&records, RecordsOptions::default()).await.unwrap().close().await;
        let store = Existing::sqlite(&path).await.unwrap();
        let runs = store.records().unwrap().runs();
        let reservation = runs.reserve("t", WriterKind::Delete).await.unwrap();
        let row = runs.active_for_thread("t").await.unwrap().unwrap();
        assert!(row.lease_expires_at > Some(row.created_at), "{row:?}");
        reservation.release().await.unwrap();
        store.close().await;
    }

    #[test]
    fn no_two_backups_have_their_records_in_one_place() {
        let names =
            ["a", "a.db", "a.bak", "a.db.2026-11-24", "a.db.2026-11-25", "a.2026-11-24", "checkpoints.db"];
        let places: BTreeSet<PathBuf> =
            names.iter().map(|name| records_of(&Path::new("/b").join(name))).collect();
        assert_eq!(places.len(), names.len(), "{places:?}");
        assert_eq!(records_of(Path::new("/b/2026-11-22.db")), Path::new("/b/2026-11-22.gateway.db"));
        assert_eq!(records_of(Path::new("checkpoints.db")), Path::new("gateway.db"));
    }

    /// They decide who may read a thread, so those of another backup are not taken for them, and nor are none.
    #[test]
    fn records_in_a_place_that_backups_shared_are_not_used_and_not_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("a.gateway.db"), "records").unwrap();
        assert_eq!(shared_records_of(&at("a.bak")), Some(at("a.gateway.db")));
        std::fs::write(at("a.bak-gateway.db"), "its own").unwrap();
        assert_eq!(shared_records_of(&at("a.bak")), None);
        assert_eq!(shared_records_of(&at("a.db")), None, "its own");
        std::fs::write(at("a.db"), "checkpoints").unwrap();
        assert_eq!(shared_records_of(&at("a.old")), None, "of a.db");
    }
}

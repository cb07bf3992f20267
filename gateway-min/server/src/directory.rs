//! One gateway per SQLite directory.
//!
//! A gateway without leases takes every unfinished run that it finds for one of its predecessor's, so a second gateway
//! on the same files would end the first one's runs. It is refused instead. Gateways with leases may share the files,
//! and hold a shared lock.
//!
//! The operating system releases the lock when the process dies. Operator's commands and embedded clients hold none:
//! the head that a commit expects protects the threads. A client that asks whether a gateway is alive takes a shared one
//! for a moment, so a gateway that starts tries for longer than that.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use threadkeep_config::{Backend, Config};
use threadkeep_storage::GATEWAY_LOCK;

/// How long a gateway that starts waits for clients that ask, and how often it tries.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(5);

/// Why a directory is not locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another gateway serves the stores.
    #[error(
        "{holder} serves the SQLite stores in {}; stop it first. For several gateways on one database, use \
         `database.backend: postgres`, or set `run_ownership.heartbeat_enabled: true` for each gateway of this directory",
        directory.display()
    )]
    InUse {
        /// The directory.
        directory: PathBuf,
        /// Which one.
        holder: Holder,
    },
    /// The operating system.
    #[error("cannot lock {}: {source}", path.display())]
    System {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The content of the file. It is for people: only the lock decides.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Holder {
    pid: Option<u32>,
    address: Option<SocketAddr>,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("another gateway")?;
        match (self.pid, self.address) {
            (Some(pid), Some(address)) => write!(f, " (process {pid}, http://{address})"),
            (Some(pid), None) => write!(f, " (process {pid})"),
            (None, _) => Ok(()),
        }
    }
}

/// The lock of an SQLite directory, held until this is dropped or the process dies.
#[derive(Debug)]
pub struct DirectoryLock {
    file: File,
}

impl DirectoryLock {
    /// Locks the directory of the configured SQLite stores; `None` for other stores. Blocks briefly.
    ///
    /// # Errors
    /// [`LockError`].
    pub fn take(config: &Config) -> Result<Option<Self>, LockError> {
        let database = &config.database;
        if database.backend != Backend::Sqlite {
            return Ok(None);
        }
        Self::of(&database.sqlite_dir, threadkeep_storage::is_shared(config)).map(Some)
    }

    fn of(directory: &Path, shared: bool) -> Result<Self, LockError> {
        Self::within(PATIENCE, directory, shared)
    }

    fn within(patience: Duration, directory: &Path, shared: bool) -> Result<Self, LockError> {
        let path = directory.join(GATEWAY_LOCK);
        let open = || {
            std::fs::create_dir_all(directory)?;
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)
        };
        let system = |source| LockError::System { path: path.clone(), source };
        let mut file = open().map_err(system)?;
        match lock(&file, shared, patience) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut text = String::new();
                let read = file.read_to_string(&mut text);
                // The holder may be writing it.
                let holder = read.ok().and_then(|_| serde_json::from_str(&text).ok()).unwrap_or_default();
                return Err(LockError::InUse { directory: directory.to_owned(), holder });
            }
            Err(TryLockError::Error(source)) => return Err(system(source)),
        }
        let mut lock = Self { file };
        lock.write(None).map_err(system)?;
        Ok(lock)
    }

    /// Records the address for the error that a second gateway reports.
    pub fn serves_at(&mut self, address: SocketAddr) {
        if let Err(error) = self.write(Some(address)) {
            tracing::debug!(%error, "the lock of the SQLite directory lacks the address");
        }
    }

    fn write(&mut self, address: Option<SocketAddr>) -> io::Result<()> {
        let holder = Holder { pid: Some(std::process::id()), address };
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.file.write_all(&serde_json::to_vec(&holder)?)
    }
}

/// Locks the file, unless a gateway has locked it. A shared lock may be that of a client which asks: then it tries again.
fn lock(file: &File, shared: bool, patience: Duration) -> Result<(), TryLockError> {
    if shared {
        return file.try_lock_shared();
    }
    let until = Instant::now() + patience;
    loop {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) if Instant::now() < until => {
                file.try_lock_shared()?;
                file.unlock().map_err(TryLockError::Error)?;
                std::thread::sleep(PAUSE);
            }
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use threadkeep_config::{Environment, LoadOptions};
    use threadkeep_storage::is_served;

    use super::*;

    fn text(result: Result<DirectoryLock, LockError>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn a_second_gateway_without_leases_is_refused_and_knows_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let mut first = DirectoryLock::of(&data, false).unwrap();
        let pid = std::process::id();
        for shared in [false, true] {
            let refused = text(DirectoryLock::of(&data, shared));
            assert!(refused.starts_with(&format!("another gateway (process {pid}) serves")), "{refused}");
        }
        first.serves_at("127.0.0.1:8001".parse().unwrap());
        let refused = text(DirectoryLock::of(&data, false));
        let named =
            format!("another gateway (process {pid}, http://127.0.0.1:8001) serves the SQLite stores in");
        assert!(refused.starts_with(&named) && refused.contains("heartbeat_enabled: true"), "{refused}");
        std::fs::write(data.join(GATEWAY_LOCK), "{\"pid\": 1").unwrap();
        assert!(text(DirectoryLock::of(&data, false)).starts_with("another gateway serves"));
        drop(first);
        DirectoryLock::of(&data, false).unwrap();
    }

    #[test]
    fn gateways_with_leases_share_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let first = DirectoryLock::of(dir.path(), true).unwrap();
        let second = DirectoryLock::of(dir.path(), true).unwrap();
        drop(first);
        DirectoryLock::of(dir.path(), false).unwrap_err();
        drop(second);
        DirectoryLock::of(dir.path(), false).unwrap();
    }

    #[test]
    fn clients_that_ask_refuse_no_gateway_that_starts() {
        let dir = tempfile::tempdir().unwrap();
        let options = LoadOptions {
            config_path: None,
            environment: Environment::from_iter([("SVC_HOME", "state")]),
            working_dir: dir.path().to_owned(),
        };
        let mut config = Config::load(&options).unwrap().config;
        config.database.backend = Backend::Sqlite;
        config.database.sqlite_dir = dir.path().to_owned();
        drop(DirectoryLock::take(&config).unwrap());
        let started = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !started.load(Ordering::Relaxed) {
                        is_served(&config);
                    }
                });
            }
            // On a busy machine a client may be stopped while it asks, for longer than a gateway waits.
            let patience = Duration::from_mins(10);
            let refused = (0..500).find_map(|_| DirectoryLock::within(patience, dir.path(), false).err());
            started.store(true, Ordering::Relaxed);
            assert!(refused.is_none(), "{refused:?}");
        });
        let lock = DirectoryLock::take(&config).unwrap();
        assert!(is_served(&config));
        drop(lock);
        assert!(!is_served(&config));
    }
}

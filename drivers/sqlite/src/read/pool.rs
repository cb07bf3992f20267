//! The readers: a few connections, each used by one read at a time on a blocking thread.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use threadkeep::{Error, Result};
use tokio::sync::Semaphore;

use crate::config::Options;
use crate::error::{CLOSED, unavailable};
use crate::read::memory::Memory;
use crate::sql::{Db, resting_file};
use crate::stats::Counters;

/// The pool of reading connections.
pub(crate) struct Readers {
    shared: Arc<Shared>,
    places: Arc<Semaphore>,
    count: u32,
}

struct Shared {
    idle: Mutex<Vec<Db>>,
    memory: Memory,
}

impl Readers {
    /// Opens the connections.
    pub(crate) fn open(path: &Path, options: &Options, counters: Arc<Counters>) -> Result<Self> {
        Self::with(options, counters, || Db::reader(path, options))
    }

    /// Opens connections to a database that cannot be written.
    pub(crate) fn open_alone(path: &Path, options: &Options, counters: Arc<Counters>) -> Result<Self> {
        let checked = |db: Db| db.check_format().map(|()| db);
        let shared = Self::with(options, counters.clone(), || checked(Db::reader(path, options)?));
        match (shared, resting_file(path)) {
            // The log and its index cannot be made in a directory that cannot be written.
            (Err(Error::Unavailable { .. }), Some(file)) => {
                Self::with(options, counters, || checked(Db::of_resting_file(&file, options)?))
            }
            (opened, _) => opened,
        }
    }

    fn with(options: &Options, counters: Arc<Counters>, open: impl Fn() -> Result<Db>) -> Result<Self> {
        let count = u32::try_from(options.readers.clamp(1, Semaphore::MAX_PERMITS)).unwrap_or(1);
        let idle = (0..count).map(|_| open()).collect::<Result<_>>()?;
        let shared = Shared { idle: Mutex::new(idle), memory: Memory::new(counters) };
        Ok(Self { shared: Arc::new(shared), places: Arc::new(Semaphore::new(count as usize)), count })
    }

    /// Runs `read` in a read transaction: it sees a consistent snapshot. It runs to completion even if the caller stops
    /// waiting.
    ///
    /// # Errors
    /// Those of `read`; [`threadkeep::Error::Unavailable`] if the store is closed or busy.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Db, &Memory) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let place = self.places.clone().acquire_owned().await.map_err(|_| unavailable(CLOSED))?;
        let shared = self.shared.clone();
        let task = tokio::task::spawn_blocking(move || {
            let db = shared.lock().pop().ok_or_else(|| unavailable(CLOSED))?;
            let result = in_transaction(&db, |db| read(db, &shared.memory));
            shared.lock().push(db);
            drop(place);
            result
        });
        task.await.map_err(|error| unavailable(error.to_string()))?
    }

    /// Waits for running reads, then closes the connections. Later reads are refused.
    pub(crate) async fn close(&self) {
        if let Ok(places) = self.places.acquire_many(self.count).await {
            self.places.close();
            self.shared.lock().clear();
            drop(places);
        }
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Db>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn in_transaction<T>(db: &Db, read: impl FnOnce(&Db) -> Result<T>) -> Result<T> {
    db.execute("BEGIN", [])?;
    let result = read(db);
    // Nothing was changed, so ending it loses nothing; an error may have ended it already.
    if !db.is_autocommit() {
        let ended = db.execute("ROLLBACK", []);
        return result.and_then(|value| ended.map(|_| value));
    }
    result
}

//! The connections that read.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::failure::DatabaseError;
use rusqlite::Connection;
use tokio::sync::Semaphore;

/// How many reads run at the same time.
const COUNT: u32 = 4;

/// A few connections, each used by one read at a time. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Readers {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    idle: Mutex<Vec<Connection>>,
    places: Arc<Semaphore>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read<T>(
        &self,
        read: impl FnOnce(&Connection) -> Result<T, DatabaseError>,
    ) -> Result<T, DatabaseError> {
        // Each of `places` has a connection, unless they are closed.
        let connection = self.lock().pop().ok_or(DatabaseError::Closed)?;
        let result = read(&connection);
        self.lock().push(connection);
        result
    }
}

impl Readers {
    /// Opens the connections. Blocks.
    pub(crate) fn open(path: &Path) -> Result<Self, DatabaseError> {
        Self::with(|| super::open_existing(path))
    }

    /// Opens connections to a file that cannot be written. Blocks.
    pub(crate) fn open_alone(path: &Path) -> Result<Self, DatabaseError> {
        Self::with(|| super::open_alone(path))
    }

    fn with(open: impl Fn() -> Result<Connection, DatabaseError>) -> Result<Self, DatabaseError> {
        let idle = (0..COUNT).map(|_| open()).collect::<Result<_, _>>()?;
        let shared = Shared { idle: Mutex::new(idle), places: Arc::new(Semaphore::new(COUNT as usize)) };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Reads a row by its key, in place: that takes less than handing it to another thread.
    pub(crate) async fn row<T>(
        &self,
        read: impl FnOnce(&Connection) -> Result<T, DatabaseError>,
    ) -> Result<T, DatabaseError> {
        let _place = self.shared.places.acquire().await.map_err(|_| DatabaseError::Closed)?;
        self.shared.read(read)
    }

    /// Reads any number of rows, off the reactor.
    pub(crate) async fn rows<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Connection) -> Result<T, DatabaseError> + Send + 'static,
    ) -> Result<T, DatabaseError> {
        let shared = Arc::clone(&self.shared);
        let place = Arc::clone(&shared.places).acquire_owned().await.map_err(|_| DatabaseError::Closed)?;
        let reading = tokio::task::spawn_blocking(move || {
            // Also if the caller stops waiting: the connection is in use until the end.
            let _place = place;
            shared.read(read)
        });
        reading.await.map_err(|error| DatabaseError::Io(error.into()))?
    }

    /// Reads with one of the connections, where nobody else uses them yet. Blocks.
    pub(crate) fn first<T>(
        &self,
        read: impl FnOnce(&Connection) -> Result<T, DatabaseError>,
    ) -> Result<T, DatabaseError> {
        self.shared.read(read)
    }

    /// Waits for running reads and closes the connections.
    pub(crate) async fn close(&self) {
        if let Ok(places) = self.shared.places.acquire_many(COUNT).await {
            self.shared.places.close();
            self.shared.lock().clear();
            drop(places);
        }
    }
}

//! The database handle that the repositories share: plain reads, and write transactions.
//!
//! One connection writes, a few read. Writers queue in the process for the one connection instead
//! of fighting for the file's lock (which a busy server loses with `database is locked`), and in WAL
//! mode readers neither wait for the writer nor hold it up.

use std::path::Path;

use sqlx::{FromRow, Transaction};

use super::codec::Clock;
use super::error::StoreError;
use super::schema;
use super::sqlite::{self, BEGIN_WRITE, Database, Pool, Row, Sql};

#[derive(Clone, Debug)]
pub(super) struct Db {
    writer: Pool,
    readers: Pool,
    pub(super) clock: Clock,
    #[cfg(test)]
    pub(super) fault: super::tests::fault::Fault,
}

impl Db {
    pub(super) async fn open(path: &Path, clock: Clock) -> Result<Self, StoreError> {
        let not_opened = |cause| match StoreError::from(cause) {
            StoreError::Unavailable { cause } => StoreError::Open { path: path.display().to_string(), cause },
            StoreError::Corrupt { detail, .. } => {
                StoreError::Corrupt { place: path.display().to_string(), detail }
            }
            other => other,
        };
        let writer = sqlite::open_writer(path).await.map_err(not_opened)?;
        sqlite::check_library(&writer).await?;
        schema::migrate(&writer, path).await?;
        let readers = sqlite::open_readers(path).await.map_err(not_opened)?;
        Ok(Self::new(writer, readers, clock))
    }

    pub(super) async fn open_memory(clock: Clock) -> Result<Self, StoreError> {
        let only = sqlite::open_memory().await?;
        sqlite::check_library(&only).await?;
        schema::migrate(&only, Path::new(":memory:")).await?;
        Ok(Self::new(only.clone(), only, clock))
    }

    fn new(writer: Pool, readers: Pool, clock: Clock) -> Self {
        Self {
            writer,
            readers,
            clock,
            #[cfg(test)]
            fault: super::tests::fault::Fault::default(),
        }
    }

    /// Stops waiting for the disk: tests do not survive a power cut anyway.
    #[cfg(test)]
    pub(super) async fn stop_flushing(&self) {
        sqlx::query("PRAGMA synchronous = OFF").execute(&self.writer).await.unwrap();
    }

    pub(super) async fn close(&self) {
        self.readers.close().await;
        // Last: closing the last connection folds the WAL into the file.
        self.writer.close().await;
    }

    pub(super) async fn fetch_optional<T>(&self, sql: Sql<'_>) -> Result<Option<T>, StoreError>
    where
        T: for<'r> FromRow<'r, Row>,
    {
        let row = sql.fetch_optional(&self.readers).await?;
        Ok(row.as_ref().map(T::from_row).transpose()?)
    }

    pub(super) async fn fetch_all<T>(&self, sql: Sql<'_>) -> Result<Vec<T>, StoreError>
    where
        T: for<'r> FromRow<'r, Row>,
    {
        let rows = sql.fetch_all(&self.readers).await?;
        Ok(rows.iter().map(T::from_row).collect::<Result<_, _>>()?)
    }

    /// Begins a write transaction, after those that asked before. Write transactions run one after
    /// the other, and the repositories rely on it: what one has read stays true until it commits.
    pub(super) async fn write(&self) -> Result<WriteTx, StoreError> {
        Ok(WriteTx {
            tx: self.writer.begin_with(BEGIN_WRITE).await?,
            #[cfg(test)]
            fault: self.fault.clone(),
        })
    }
}

/// A write transaction. Dropped without [`WriteTx::commit`], by an error or with the future that
/// holds it, it rolls back.
pub(super) struct WriteTx {
    tx: Transaction<'static, Database>,
    #[cfg(test)]
    fault: super::tests::fault::Fault,
}

impl WriteTx {
    /// Returns the number of rows changed.
    pub(super) async fn execute(&mut self, sql: Sql<'_>) -> Result<u64, StoreError> {
        let done = sql.execute(&mut *self.tx).await?;
        self.statement_done()?;
        Ok(done.rows_affected())
    }

    pub(super) async fn fetch_optional<T>(&mut self, sql: Sql<'_>) -> Result<Option<T>, StoreError>
    where
        T: for<'r> FromRow<'r, Row>,
    {
        let row = sql.fetch_optional(&mut *self.tx).await?;
        self.statement_done()?;
        Ok(row.as_ref().map(T::from_row).transpose()?)
    }

    pub(super) async fn fetch_all<T>(&mut self, sql: Sql<'_>) -> Result<Vec<T>, StoreError>
    where
        T: for<'r> FromRow<'r, Row>,
    {
        let rows = sql.fetch_all(&mut *self.tx).await?;
        self.statement_done()?;
        Ok(rows.iter().map(T::from_row).collect::<Result<_, _>>()?)
    }

    /// Makes the changes durable. A future dropped in here may have committed or not.
    pub(super) async fn commit(self) -> Result<(), StoreError> {
        self.statement_done()?;
        self.tx.commit().await.map_err(|cause| StoreError::InDoubt { cause })
    }

    /// Where tests make the k-th statement of an operation fail, after it took effect.
    #[cfg_attr(
        not(test),
        expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "the hook is for tests")
    )]
    fn statement_done(&self) -> Result<(), StoreError> {
        #[cfg(test)]
        self.fault.statement_done()?;
        Ok(())
    }
}

/// Runs `operation` to its end even when the caller's future is dropped.
pub(super) async fn detached<T, F>(operation: F) -> Result<T, StoreError>
where
    T: Send + 'static,
    F: Future<Output = Result<T, StoreError>> + Send + 'static,
{
    match tokio::spawn(operation).await {
        Ok(result) => result,
        // The operation panicked or the runtime is shutting down.
        Err(error) => Err(StoreError::InDoubt { cause: sqlx::Error::Io(error.into()) }),
    }
}

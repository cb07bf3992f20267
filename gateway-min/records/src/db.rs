//! The database handle that the repositories share: plain reads, and write transactions.
//!
//! In SQLite one connection writes and a few read. Writers queue in the process for that connection instead of
//! contending for the file's lock (which fails with `database is locked` on a busy server), and in WAL mode readers and
//! the writer do not block each other. In Postgres the writers of one thread queue for its lock.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use chrono::{DateTime, TimeDelta};
use sqlx::{Sqlite, Transaction};

use super::codec::Clock;
use super::error::RecordsError;
use super::postgres::{self, Changes, PostgresTarget, Scope};
use super::query::{Builder, Dialect, FromRow, Row, Sql, query};
use super::schema;
use super::sqlite;

/// What the commit of a write transaction waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flush {
    /// The disk: the changes survive a power loss.
    Now,
    /// SQLite does not wait: the commit survives a process crash, and a power loss once a later commit is flushed,
    /// because power loss removes only the end of the log. Used for the steps of a run between its admission and its
    /// decided outcome, which are not acknowledged to anyone: a run that was cut off, as any run is by a power loss, is
    /// recovered the same way from each of them. A Postgres server may fail while the run continues and relies on what
    /// it wrote, so there it means [`Flush::Now`].
    WithNext,
}

/// Counts committed write transactions.
#[derive(Debug, Default)]
pub struct Commits {
    all: AtomicU64,
    flushed: AtomicU64,
}

impl Commits {
    fn add(&self, flush: Flush) {
        self.all.fetch_add(1, Ordering::Relaxed);
        if flush == Flush::Now {
            self.flushed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// All of them.
    pub fn all(&self) -> u64 {
        self.all.load(Ordering::Relaxed)
    }

    /// Those that waited for the disk.
    pub fn flushed(&self) -> u64 {
        self.flushed.load(Ordering::Relaxed)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Db {
    pools: Pools,
    flush: Flush,
    pub(super) commits: Arc<Commits>,
    pub(super) clock: Clock,
    #[cfg(any(test, feature = "testing"))]
    pub(super) fault: super::fault::Fault,
    #[cfg(test)]
    idle_disk: Arc<std::sync::atomic::AtomicBool>,
}

/// What Postgres does is in boxes: its futures are deep and large, and SQLite's callers need not carry them.
#[derive(Clone, Debug)]
enum Pools {
    Sqlite { writer: sqlite::Pool, readers: sqlite::Pool },
    Postgres(postgres::Pool),
}

impl Db {
    pub(super) async fn open(path: &Path, clock: Clock) -> Result<Self, RecordsError> {
        let place = path.display().to_string();
        let not_opened = |cause| not_opened(&place, cause);
        let writer = sqlite::open_writer(path).await.map_err(not_opened)?;
        sqlite::check_library(&writer).await?;
        schema::migrate_sqlite(&writer, &place).await?;
        let readers = sqlite::open_readers(path).await.map_err(not_opened)?;
        Ok(Self::new(Pools::Sqlite { writer, readers }, clock))
    }

    pub(super) async fn open_memory(clock: Clock) -> Result<Self, RecordsError> {
        let only = sqlite::open_memory().await?;
        sqlite::check_library(&only).await?;
        schema::migrate_sqlite(&only, ":memory:").await?;
        Ok(Self::new(Pools::Sqlite { writer: only.clone(), readers: only }, clock))
    }

    pub(super) async fn open_postgres(target: &PostgresTarget, clock: Clock) -> Result<Self, RecordsError> {
        let pool = Box::pin(postgres::Pool::connect(target)).await;
        let pool = pool.map_err(|cause| not_opened(target.place(), cause))?;
        Box::pin(schema::migrate_postgres(&pool, target)).await?;
        Ok(Self::new(Pools::Postgres(pool), clock))
    }

    /// Whether the tables exist.
    pub(super) async fn is_in_postgres(target: &PostgresTarget) -> Result<bool, RecordsError> {
        let opened = Box::pin(target.open()).await;
        let mut connection = opened.map_err(|cause| not_opened(target.place(), cause))?;
        Ok(schema::is_in_postgres(&mut connection, target.tables()).await?)
    }

    /// What other processes announce.
    pub(super) fn changes(&self) -> Changes {
        match &self.pools {
            Pools::Sqlite { .. } => Changes::none(),
            Pools::Postgres(pool) => pool.changes(),
        }
    }

    /// How far the database's clock is ahead of this process's; zero if they share a clock.
    pub(super) async fn clock_skew(&self) -> Result<TimeDelta, RecordsError> {
        if self.dialect() == Dialect::Sqlite {
            return Ok(TimeDelta::zero());
        }
        let sql = query("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint");
        let micros: Option<(i64,)> = self.fetch_optional(sql).await?;
        let there = micros.and_then(|(micros,)| DateTime::from_timestamp_micros(micros));
        Ok(there.map_or(TimeDelta::zero(), |there| there - self.clock.now()))
    }

    fn new(pools: Pools, clock: Clock) -> Self {
        Self {
            pools,
            flush: Flush::Now,
            commits: Arc::default(),
            clock,
            #[cfg(any(test, feature = "testing"))]
            fault: super::fault::Fault::default(),
            #[cfg(test)]
            idle_disk: Arc::default(),
        }
    }

    /// Stops waiting for the disk: tests need not survive a power loss.
    #[cfg(test)]
    pub(super) fn stop_flushing(&self) {
        self.idle_disk.store(true, Ordering::Relaxed);
    }

    /// The same database, with write transactions that do not wait for the disk; see [`Flush::WithNext`].
    pub(super) fn unflushed(&self) -> Self {
        Self { flush: Flush::WithNext, ..self.clone() }
    }

    pub(super) async fn close(&self) {
        match &self.pools {
            Pools::Sqlite { writer, readers } => {
                readers.close().await;
                // Last, because closing the last connection checkpoints the WAL.
                writer.close().await;
            }
            Pools::Postgres(pool) => pool.close().await,
        }
    }

    pub(super) fn dialect(&self) -> Dialect {
        match self.pools {
            Pools::Sqlite { .. } => Dialect::Sqlite,
            Pools::Postgres(_) => Dialect::Postgres,
        }
    }

    /// A statement that starts with `text` and is built piece by piece.
    pub(super) fn builder(&self, text: &str) -> Builder {
        Builder::new(self.dialect(), text)
    }

    pub(super) async fn fetch_optional<T: FromRow>(&self, sql: Sql) -> Result<Option<T>, RecordsError> {
        let row = match &self.pools {
            Pools::Sqlite { readers, .. } => {
                sqlite::prepared(sql).fetch_optional(readers).await?.map(Row::Sqlite)
            }
            Pools::Postgres(pool) => {
                Box::pin(pool.fetch_all(sql)).await?.into_iter().next().map(Row::Postgres)
            }
        };
        Ok(row.as_ref().map(T::from_row).transpose()?)
    }

    pub(super) async fn fetch_all<T: FromRow>(&self, sql: Sql) -> Result<Vec<T>, RecordsError> {
        let rows = match &self.pools {
            Pools::Sqlite { readers, .. } => {
                read_all(sqlite::prepared(sql).fetch_all(readers).await?, Row::Sqlite)
            }
            Pools::Postgres(pool) => read_all(Box::pin(pool.fetch_all(sql)).await?, Row::Postgres),
        };
        Ok(rows?)
    }

    /// Begins a write transaction for a thread, after those requested earlier. Write transactions for one thread run
    /// one after the other, and the repositories rely on it: what one has read of its thread stays valid until it
    /// commits.
    pub(super) async fn write(&self, thread_id: &str) -> Result<WriteTx, RecordsError> {
        self.begin(Scope::Thread(thread_id)).await
    }

    /// Begins a write transaction for the thread of a row of `runs`.
    pub(super) async fn write_of_run(&self, run_id: &str) -> Result<WriteTx, RecordsError> {
        let mut thread_id = None;
        if self.dialect() == Dialect::Postgres {
            // A row's thread never changes.
            thread_id = self
                .fetch_optional(query("SELECT thread_id FROM runs WHERE run_id = $1").bind(run_id))
                .await?;
        }
        // A missing run locks nothing that matters, and nothing will be changed.
        let (thread_id,) = thread_id.unwrap_or_else(|| (run_id.to_owned(),));
        self.begin(Scope::Thread(&thread_id)).await
    }

    /// Begins a write transaction for any number of threads.
    pub(super) async fn write_everywhere(&self) -> Result<WriteTx, RecordsError> {
        self.begin(Scope::EveryThread).await
    }

    async fn begin(&self, scope: Scope<'_>) -> Result<WriteTx, RecordsError> {
        let flush = match self.dialect() {
            Dialect::Sqlite => self.flush,
            Dialect::Postgres => Flush::Now,
        };
        #[cfg(test)]
        let flush = if self.idle_disk.load(Ordering::Relaxed) { Flush::WithNext } else { flush };
        let tx = match &self.pools {
            Pools::Sqlite { writer, .. } => Tx::Sqlite(writer.begin_with(sqlite::begin(flush)).await?),
            Pools::Postgres(pool) => Tx::Postgres(Box::pin(pool.begin(scope)).await?),
        };
        Ok(WriteTx {
            tx,
            flush,
            commits: Arc::clone(&self.commits),
            #[cfg(any(test, feature = "testing"))]
            fault: self.fault.clone(),
        })
    }
}

fn not_opened(place: &str, cause: sqlx::Error) -> RecordsError {
    match RecordsError::from(cause) {
        RecordsError::Unavailable { cause } => RecordsError::Open { place: place.to_owned(), cause },
        RecordsError::Corrupt { detail, .. } => RecordsError::Corrupt { place: place.to_owned(), detail },
        other => other,
    }
}

fn read_all<R, T: FromRow>(rows: Vec<R>, row: fn(R) -> Row) -> sqlx::Result<Vec<T>> {
    rows.into_iter().map(|found| T::from_row(&row(found))).collect()
}

/// A write transaction. If it is dropped without [`WriteTx::commit`], by an error or with its future, it rolls back.
pub(super) struct WriteTx {
    tx: Tx,
    flush: Flush,
    commits: Arc<Commits>,
    #[cfg(any(test, feature = "testing"))]
    fault: super::fault::Fault,
}

enum Tx {
    Sqlite(Transaction<'static, Sqlite>),
    Postgres(postgres::Transaction),
}

impl WriteTx {
    /// Returns the number of changed rows.
    pub(super) async fn execute(&mut self, sql: Sql) -> Result<u64, RecordsError> {
        let changed = match &mut self.tx {
            Tx::Sqlite(tx) => sqlite::prepared(sql).execute(&mut **tx).await?.rows_affected(),
            Tx::Postgres(tx) => Box::pin(tx.execute(sql)).await?,
        };
        self.statement_done()?;
        Ok(changed)
    }

    pub(super) async fn fetch_optional<T: FromRow>(&mut self, sql: Sql) -> Result<Option<T>, RecordsError> {
        let row = match &mut self.tx {
            Tx::Sqlite(tx) => sqlite::prepared(sql).fetch_optional(&mut **tx).await?.map(Row::Sqlite),
            Tx::Postgres(tx) => Box::pin(tx.fetch_all(sql)).await?.into_iter().next().map(Row::Postgres),
        };
        self.statement_done()?;
        Ok(row.as_ref().map(T::from_row).transpose()?)
    }

    pub(super) async fn fetch_all<T: FromRow>(&mut self, sql: Sql) -> Result<Vec<T>, RecordsError> {
        let rows = match &mut self.tx {
            Tx::Sqlite(tx) => read_all(sqlite::prepared(sql).fetch_all(&mut **tx).await?, Row::Sqlite),
            Tx::Postgres(tx) => read_all(Box::pin(tx.fetch_all(sql)).await?, Row::Postgres),
        };
        self.statement_done()?;
        Ok(rows?)
    }

    /// Wakes the processes that own or follow this run, when the transaction commits; see [`Changes`].
    pub(super) async fn announce(&mut self, run_id: &str) -> Result<(), RecordsError> {
        match &mut self.tx {
            Tx::Sqlite(_) => Ok(()),
            Tx::Postgres(tx) => Ok(Box::pin(tx.announce(run_id)).await?),
        }
    }

    /// Makes the changes durable, to the degree of its [`Flush`]. If the future is dropped, the commit may or may not
    /// have happened.
    pub(super) async fn commit(self) -> Result<(), RecordsError> {
        self.statement_done()?;
        let done = match self.tx {
            Tx::Sqlite(tx) => tx.commit().await,
            Tx::Postgres(tx) => Box::pin(tx.commit()).await,
        };
        done.map_err(|cause| RecordsError::InDoubt { cause })?;
        #[cfg(any(test, feature = "testing"))]
        self.fault.committed()?;
        self.commits.add(self.flush);
        Ok(())
    }

    /// Tests make the k-th statement of an operation fail here, after it took effect.
    #[cfg_attr(
        not(any(test, feature = "testing")),
        expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "the hook is for tests")
    )]
    fn statement_done(&self) -> Result<(), RecordsError> {
        #[cfg(any(test, feature = "testing"))]
        self.fault.statement_done()?;
        Ok(())
    }
}

/// Runs `operation` to completion even if the caller's future is dropped.
pub(super) async fn detached<T, F>(operation: F) -> Result<T, RecordsError>
where
    T: Send + 'static,
    F: Future<Output = Result<T, RecordsError>> + Send + 'static,
{
    match tokio::spawn(operation).await {
        Ok(result) => result,
        // The operation panicked or the runtime is shutting down.
        Err(error) => Err(RecordsError::InDoubt { cause: sqlx::Error::Io(error.into()) }),
    }
}

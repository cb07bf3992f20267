//! The database handle that the repositories share: plain reads, and calls of write transactions.
//!
//! In SQLite one thread writes, and a few connections read. Writers queue in the process for that thread instead of
//! contending for the file's lock (which fails with `database is locked` on a busy server); it commits whatever is
//! queued together. In Postgres the writers of one thread queue for its lock.

use std::path::Path;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use chrono::{DateTime, TimeDelta};
use futures::future::BoxFuture;
use rusqlite::Connection;
use tokio::sync::oneshot;

use super::codec::Clock;
use super::commits::{Commits, Flush};
use super::error::RecordsError;
use super::failure::{DatabaseError, SqliteFailure};
use super::postgres::{self, Changes, PostgresTarget, Scope};
use super::query::{Builder, Dialect, FromRow, Row, Sql, query};
use super::schema;
use super::sqlite::{self, Answer, Files, Readers, Writer};
use super::threads_of_runs::ThreadsOfRuns;
use super::transaction::{Tx, WriteTx, read_all};

#[derive(Clone, Debug)]
pub(super) struct Db {
    pools: Pools,
    flush: Flush,
    pub(super) commits: Arc<Commits>,
    pub(super) clock: Clock,
    /// The threads of the runs that this process works on.
    pub(super) threads_of_runs: ThreadsOfRuns,
    #[cfg(any(test, feature = "testing"))]
    pub(super) fault: super::fault::Fault,
    #[cfg(test)]
    idle_disk: Arc<std::sync::atomic::AtomicBool>,
}

/// What Postgres does is in boxes: its futures are deep and large, and SQLite's callers need not carry them.
#[derive(Clone, Debug)]
enum Pools {
    Sqlite {
        writer: Writer,
        /// None for a database in memory, which has only one connection.
        readers: Option<Readers>,
        place: Arc<str>,
    },
    /// A SQLite database that cannot be written.
    ReadOnly {
        readers: Readers,
        place: Arc<str>,
    },
    Postgres(postgres::Pool),
}

/// What a write transaction does. In SQLite it is called on the writer's thread and polled once, so it may wait for
/// nothing but the transaction.
pub(super) type Work<'a, T> = BoxFuture<'a, Result<T, RecordsError>>;

impl Db {
    pub(super) async fn open(path: &Path, clock: Clock) -> Result<Self, RecordsError> {
        let path = path.to_owned();
        let opening = tokio::task::spawn_blocking(move || {
            sqlite::check_library()?;
            let place = path.display().to_string();
            let not_opened = |cause| not_opened(&place, cause);
            let mut connection = sqlite::open_writer(&path).map_err(not_opened)?;
            let files = Files::of(&path).map_err(not_opened)?;
            let migrated = schema::migrate_sqlite(&mut connection, &place);
            migrated.map_err(|error| error.of_write_to(&place))?;
            let readers = Readers::open(&path).map_err(not_opened)?;
            Self::with_sqlite((connection, Some(files.with_log())), Some(readers), &place, clock)
        });
        opening.await.map_err(|error| DatabaseError::Io(error.into()))?
    }

    /// [`Self::open`] of a file that has this build's schema. One that does not is not changed.
    pub(super) async fn open_existing(path: &Path, clock: Clock) -> Result<Self, RecordsError> {
        let existing = path.to_owned();
        let checking = tokio::task::spawn_blocking(move || {
            sqlite::check_library()?;
            let place = existing.display().to_string();
            let connection = sqlite::open_existing(&existing).map_err(|cause| not_opened(&place, cause))?;
            schema::check_existing_sqlite(&connection, &place)
        });
        checking.await.map_err(|error| DatabaseError::Io(error.into()))??;
        Self::open(path, clock).await
    }

    pub(super) async fn open_read_only(path: &Path, clock: Clock) -> Result<Self, RecordsError> {
        let path = path.to_owned();
        let opening = tokio::task::spawn_blocking(move || {
            sqlite::check_library()?;
            let place = path.display().to_string();
            let readers = Readers::open_alone(&path).map_err(|cause| not_opened(&place, cause))?;
            readers.first(|connection| Ok(schema::check_sqlite(connection, &place)))??;
            Ok(Self::new(Pools::ReadOnly { readers, place: place.into() }, clock))
        });
        opening.await.map_err(|error| DatabaseError::Io(error.into()))?
    }

    pub(super) async fn open_memory(clock: Clock) -> Result<Self, RecordsError> {
        let opening = tokio::task::spawn_blocking(move || {
            sqlite::check_library()?;
            let mut connection = sqlite::open_memory()?;
            schema::migrate_sqlite(&mut connection, ":memory:")?;
            Self::with_sqlite((connection, None), None, ":memory:", clock)
        });
        opening.await.map_err(|error| DatabaseError::Io(error.into()))?
    }

    fn with_sqlite(
        (connection, files): (Connection, Option<Files>),
        readers: Option<Readers>,
        place: &str,
        clock: Clock,
    ) -> Result<Self, RecordsError> {
        let commits = Arc::<Commits>::default();
        let writer = Writer::start(connection, files, Arc::clone(&commits))?;
        let pools = Pools::Sqlite { writer, readers, place: place.into() };
        Ok(Self { commits, ..Self::new(pools, clock) })
    }

    pub(super) async fn open_postgres(target: &PostgresTarget, clock: Clock) -> Result<Self, RecordsError> {
        let (pool, commits) = Self::connected(target).await?;
        Box::pin(schema::migrate_postgres(&pool, target)).await?;
        Ok(Self { commits, ..Self::new(Pools::Postgres(pool), clock) })
    }

    /// [`Self::open_postgres`] for tables that have this build's schema. Those that do not are not changed.
    pub(super) async fn open_existing_postgres(
        target: &PostgresTarget,
        clock: Clock,
    ) -> Result<Self, RecordsError> {
        let (pool, commits) = Self::connected(target).await?;
        Box::pin(schema::check_existing_postgres(&pool, target)).await?;
        Ok(Self { commits, ..Self::new(Pools::Postgres(pool), clock) })
    }

    async fn connected(target: &PostgresTarget) -> Result<(postgres::Pool, Arc<Commits>), RecordsError> {
        let commits = Arc::<Commits>::default();
        let pool = Box::pin(postgres::Pool::connect(target, Arc::clone(&commits))).await;
        Ok((pool.map_err(|cause| not_opened(target.place(), cause))?, commits))
    }

    /// Whether the tables exist.
    pub(super) async fn is_in_postgres(target: &PostgresTarget) -> Result<bool, RecordsError> {
        let opened = Box::pin(target.open()).await;
        let session = opened.map_err(|cause| not_opened(target.place(), cause))?;
        Ok(schema::is_in_postgres(&session, target.tables()).await?)
    }

    /// What other processes announce.
    pub(super) fn changes(&self) -> Changes {
        match &self.pools {
            Pools::Sqlite { .. } | Pools::ReadOnly { .. } => Changes::none(),
            Pools::Postgres(pool) => pool.changes(),
        }
    }

    /// How far the database's clock is ahead of this process's; zero if they share a clock, or if the answer shows no
    /// difference: it is of some moment between the question and its arrival.
    pub(super) async fn clock_skew(&self) -> Result<TimeDelta, RecordsError> {
        if self.dialect() == Dialect::Sqlite {
            return Ok(TimeDelta::zero());
        }
        let sql = query("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint");
        let asked = self.clock.now();
        let micros: Option<(i64,)> = self.fetch_optional(sql).await?;
        let answered = self.clock.now();
        let there = micros.and_then(|(micros,)| DateTime::from_timestamp_micros(micros));
        // The clock may have been set back meanwhile.
        let (first, last) = (asked.min(answered), asked.max(answered));
        Ok(there.map_or(TimeDelta::zero(), |there| there - there.clamp(first, last)))
    }

    fn new(pools: Pools, clock: Clock) -> Self {
        Self {
            pools,
            flush: Flush::Now,
            commits: Arc::default(),
            clock,
            threads_of_runs: ThreadsOfRuns::default(),
            #[cfg(any(test, feature = "testing"))]
            fault: super::fault::Fault::default(),
            #[cfg(test)]
            idle_disk: Arc::default(),
        }
    }

    /// Stops waiting for the disk: tests need not survive a power loss.
    #[cfg(test)]
    pub(super) fn stop_flushing(&self) {
        self.idle_disk.store(true, std::sync::atomic::Ordering::Relaxed);
    }

    /// How many transactions wait for the writer's thread.
    #[cfg(test)]
    pub(super) fn queued(&self) -> usize {
        match &self.pools {
            Pools::Sqlite { writer, .. } => writer.queued(),
            Pools::ReadOnly { .. } | Pools::Postgres { .. } => 0,
        }
    }

    /// Makes the next commit of SQLite fail with this code.
    #[cfg(test)]
    pub(super) fn fail_commit(&self, code: i32) {
        if let Pools::Sqlite { writer, .. } = &self.pools {
            writer.fail_commit(code);
        }
    }

    /// The same database, with write transactions that do not wait for the disk; see [`Flush::WithNext`].
    pub(super) fn unflushed(&self) -> Self {
        self.flushing(Flush::WithNext)
    }

    /// The same database, with write transactions that wait for this.
    pub(super) fn flushing(&self, flush: Flush) -> Self {
        Self { flush, ..self.clone() }
    }

    /// The same database, for a caller with a runtime of its own: in Postgres on a connection that only such callers use.
    pub(super) fn apart(&self) -> Self {
        let pools = match &self.pools {
            Pools::Postgres(pool) => Pools::Postgres(pool.apart()),
            sqlite => sqlite.clone(),
        };
        Self { pools, ..self.clone() }
    }

    pub(super) async fn close(&self) {
        match &self.pools {
            Pools::Sqlite { writer, readers, .. } => {
                if let Some(readers) = readers {
                    readers.close().await;
                }
                // Last, because closing the last connection checkpoints the WAL.
                writer.close().await;
            }
            Pools::ReadOnly { readers, .. } => readers.close().await,
            Pools::Postgres(pool) => pool.close().await,
        }
    }

    pub(super) fn dialect(&self) -> Dialect {
        match self.pools {
            Pools::Sqlite { .. } | Pools::ReadOnly { .. } => Dialect::Sqlite,
            Pools::Postgres(_) => Dialect::Postgres,
        }
    }

    /// A statement that starts with `text` and is built piece by piece.
    pub(super) fn builder(&self, text: &str) -> Builder {
        Builder::new(self.dialect(), text)
    }

    /// Reads a row by its key.
    pub(super) async fn fetch_optional<T: FromRow>(&self, sql: Sql) -> Result<Option<T>, RecordsError> {
        self.commits.statement();
        #[cfg(any(test, feature = "testing"))]
        self.fault.reads().and_then(|()| self.fault.says(&sql.text))?;
        match &self.pools {
            Pools::Sqlite { readers: Some(readers), .. } | Pools::ReadOnly { readers, .. } => {
                Ok(readers.row(|connection| sqlite::fetch_optional(connection, &sql)).await?)
            }
            Pools::Sqlite { readers: None, writer, .. } => {
                let read = move |tx: &mut Connection| Ok(sqlite::fetch_optional(tx, &sql)?);
                on_thread(writer, Flush::WithNext, read, || Ok(())).await
            }
            Pools::Postgres(pool) => {
                let row = Box::pin(pool.fetch_all(sql)).await?.into_iter().next().map(Row::Postgres);
                Ok(row.as_ref().map(T::from_row).transpose()?)
            }
        }
    }

    /// Reads any number of rows.
    pub(super) async fn fetch_all<T: FromRow>(&self, sql: Sql) -> Result<Vec<T>, RecordsError> {
        self.commits.statement();
        #[cfg(any(test, feature = "testing"))]
        self.fault.reads().and_then(|()| self.fault.says(&sql.text))?;
        match &self.pools {
            Pools::Sqlite { readers: Some(readers), .. } | Pools::ReadOnly { readers, .. } => {
                Ok(readers.rows(move |connection| sqlite::fetch_all(connection, &sql)).await?)
            }
            Pools::Sqlite { readers: None, writer, .. } => {
                let read = move |tx: &mut Connection| Ok(sqlite::fetch_all(tx, &sql)?);
                on_thread(writer, Flush::WithNext, read, || Ok(())).await
            }
            Pools::Postgres(pool) => Ok(read_all(Box::pin(pool.fetch_all(sql)).await?)?),
        }
    }

    /// Does `work` in a write transaction for a thread, after those that are queued: commits it if `work` succeeds, and
    /// rolls it back otherwise. Write transactions for one thread run one after the other, and the repositories rely on
    /// it: what one has read of its thread stays valid until it commits.
    pub(super) async fn write<T: Send + 'static>(
        &self,
        thread_id: &str,
        work: impl for<'a> FnOnce(&'a mut WriteTx<'_>) -> Work<'a, T> + Send + 'static,
    ) -> Result<T, RecordsError> {
        self.transact(Scope::Thread(thread_id), work).await
    }

    /// As [`Self::write`], for the thread of a row of `runs`.
    pub(super) async fn write_of_run<T: Send + 'static>(
        &self,
        run_id: &str,
        work: impl for<'a> FnOnce(&'a mut WriteTx<'_>) -> Work<'a, T> + Send + 'static,
    ) -> Result<T, RecordsError> {
        // A row's thread never changes.
        let mut thread_id = self.threads_of_runs.get(run_id);
        if thread_id.is_none() && self.dialect() == Dialect::Postgres {
            let sql = query("SELECT thread_id FROM runs WHERE run_id = $1").bind(run_id);
            let found: Option<(String,)> = self.fetch_optional(sql).await?;
            thread_id = found.map(|(thread_id,)| thread_id);
        }
        // A missing run locks nothing that matters, and nothing will be changed.
        let thread_id = thread_id.unwrap_or_else(|| run_id.to_owned());
        self.transact(Scope::Thread(&thread_id), work).await
    }

    /// As [`Self::write`], for any number of threads.
    pub(super) async fn write_everywhere<T: Send + 'static>(
        &self,
        work: impl for<'a> FnOnce(&'a mut WriteTx<'_>) -> Work<'a, T> + Send + 'static,
    ) -> Result<T, RecordsError> {
        self.transact(Scope::EveryThread, work).await
    }

    /// As [`Self::write`], for rows that belong to no thread's lock: in Postgres `work` locks what it reads and changes.
    pub(super) async fn write_rows<T: Send + 'static>(
        &self,
        work: impl for<'a> FnOnce(&'a mut WriteTx<'_>) -> Work<'a, T> + Send + 'static,
    ) -> Result<T, RecordsError> {
        self.transact(Scope::Rows, work).await
    }

    async fn transact<T: Send + 'static>(
        &self,
        scope: Scope<'_>,
        work: impl for<'a> FnOnce(&'a mut WriteTx<'_>) -> Work<'a, T> + Send + 'static,
    ) -> Result<T, RecordsError> {
        #[cfg(any(test, feature = "testing"))]
        let fault = self.fault.clone();
        match &self.pools {
            Pools::Sqlite { writer, place, .. } => {
                let flush = self.flush;
                #[cfg(test)]
                let flush = if self.idle_disk.load(std::sync::atomic::Ordering::Relaxed) {
                    Flush::WithNext
                } else {
                    flush
                };
                #[cfg(any(test, feature = "testing"))]
                let (answered, fault) = (fault.clone(), fault);
                let commits = Arc::clone(&self.commits);
                let work = move |connection: &mut Connection| {
                    let mut tx = WriteTx {
                        tx: Tx::Sqlite(connection),
                        commits,
                        committed: false,
                        #[cfg(any(test, feature = "testing"))]
                        fault,
                    };
                    let done = at_once(work(&mut tx))?;
                    tx.before_commit()?;
                    Ok(done)
                };
                let committed = move || {
                    #[cfg(any(test, feature = "testing"))]
                    answered.committed()?;
                    Ok(())
                };
                let done = on_thread(writer, flush, work, committed).await;
                done.map_err(|error| error.of_write_to(place))
            }
            Pools::ReadOnly { place, .. } => {
                let cause = SqliteFailure::read_only().into();
                Err(RecordsError::ReadOnly { place: place.to_string(), cause })
            }
            Pools::Postgres(pool) => {
                let tx = Box::pin(pool.begin(scope)).await?;
                let mut tx = WriteTx {
                    tx: Tx::Postgres(Box::new(tx)),
                    commits: Arc::clone(&self.commits),
                    committed: false,
                    #[cfg(any(test, feature = "testing"))]
                    fault,
                };
                let done = work(&mut tx).await?;
                tx.commit().await?;
                self.commits.add(Flush::Now);
                Ok(done)
            }
        }
    }
}

/// Does `work` on the writer's thread. If the caller drops the future, it may or may not be done. `committed` is called
/// when the work has succeeded and is committed.
async fn on_thread<T: Send + 'static>(
    writer: &Writer,
    flush: Flush,
    work: impl FnOnce(&mut Connection) -> Result<T, RecordsError> + Send + 'static,
    committed: impl FnOnce() -> Result<(), RecordsError> + Send + 'static,
) -> Result<T, RecordsError> {
    let (reply, answer) = oneshot::channel();
    let queued = writer.send(flush, move |connection| {
        let result = match connection {
            Ok(connection) => work(connection),
            Err(failure) => Err(DatabaseError::from(failure).into()),
        };
        let send = move |ended: sqlite::Committed, result: Result<T, RecordsError>| {
            let result = result.and_then(|done| {
                ended.result()?;
                committed()?;
                Ok(done)
            });
            // The caller may have stopped waiting.
            let _ = reply.send(result);
        };
        Answer { failed: result.is_err(), send: Box::new(move |ended| send(ended, result)) }
    });
    queued.await?;
    // The thread drops what it cannot do: after the store was closed, or a panic, which it takes back.
    answer.await.unwrap_or_else(|_| Err(DatabaseError::Closed.into()))
}

/// The result of work that waits for nothing.
fn at_once<T>(mut work: Work<'_, T>) -> Result<T, RecordsError> {
    match work.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => {
            let problem = "a write transaction waited for something else than the database";
            Err(DatabaseError::Internal(problem.to_owned()).into())
        }
    }
}

fn not_opened(place: &str, cause: DatabaseError) -> RecordsError {
    match RecordsError::from(cause).of_write_to(place) {
        RecordsError::Unavailable { cause } => RecordsError::Open { place: place.to_owned(), cause },
        RecordsError::Corrupt { detail, .. } => RecordsError::Corrupt { place: place.to_owned(), detail },
        other => other,
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
        Err(error) => Err(RecordsError::InDoubt { cause: DatabaseError::Io(error.into()) }),
    }
}

//! The connections of a store.

use std::collections::HashMap;
use std::error::Error;
use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use deadpool::Runtime;
use deadpool::managed::{self, Metrics, Object, PoolError, QueueMode, RecycleError, RecycleResult};
use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout;
use tokio_postgres::Row;
use tokio_postgres::error::SqlState;

use super::changes::{Announced, Changes, Listener};
use super::connect::{PostgresTarget, Session, silent};
use super::sql::{Tables, ask, prepare};
use crate::commits::Commits;
use crate::failure::DatabaseError;
use crate::query::Sql;

/// How long an operation waits for a connection that others use, and for its thread. A machine on which everything is
/// slow needs more than one on which something is wrong.
const TURN: Duration = Duration::from_secs(30);
/// How long it waits for a server that starts, or for the next primary.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a statement may take, unless it is one of a migration; a lock is waited for at most half of it.
pub(super) const ANSWER: Duration = Duration::from_secs(20);
/// A connection that was idle for longer is tested before it is used.
const FRESH: Duration = Duration::from_secs(1);
/// How long that test may take.
const TEST: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Connections to the primary. Clones share them.
#[derive(Clone)]
pub(crate) struct Pool {
    connections: managed::Pool<Opener>,
    shared: Arc<Shared>,
}

struct Shared {
    /// The connections of [`Pool::apart`]: one for the leases of runs, one for those of batches.
    apart: managed::Pool<Opener>,
    tables: Tables,
    /// How long a statement may take.
    answer: Duration,
    commits: Arc<Commits>,
    threads: Threads,
    announced: Announced,
    /// Started for the first that wants to hear something.
    listener: OnceLock<Listener>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").finish_non_exhaustive()
    }
}

impl Pool {
    pub(crate) async fn connect(
        target: &PostgresTarget,
        commits: Arc<Commits>,
    ) -> Result<Self, DatabaseError> {
        Self::connect_within(target, commits, ANSWER).await
    }

    /// The same, with statements that may take this long.
    pub(crate) async fn connect_within(
        target: &PostgresTarget,
        commits: Arc<Commits>,
        answer: Duration,
    ) -> Result<Self, DatabaseError> {
        let shared = Shared {
            apart: connections(target, 2)?,
            tables: target.tables().clone(),
            answer,
            commits,
            threads: Threads::default(),
            announced: Announced::default(),
            listener: OnceLock::new(),
        };
        let connections = connections(target, target.connections())?;
        let pool = Self { connections, shared: Arc::new(shared) };
        let mut first = timeout(ANSWER, pool.acquire()).await.map_err(|_| silent())??;
        if !first.dirty()?.is_own() {
            tracing::info!(
                "the database is behind a pooler: runs of other processes are followed by polling"
            );
        }
        first.clean();
        Ok(pool)
    }

    /// The same database on connections that nothing else uses. The runtime that uses one first drives it, so that it works also
    /// while that of the others is busy.
    pub(crate) fn apart(&self) -> Self {
        Self { connections: self.shared.apart.clone(), shared: Arc::clone(&self.shared) }
    }

    pub(super) fn tables(&self) -> &Tables {
        &self.shared.tables
    }

    /// What other processes announce from now on. Behind a pooler nobody hears anything.
    pub(crate) fn changes(&self) -> Changes {
        let Opener(target) = self.connections.manager();
        self.shared.listener.get_or_init(|| Listener::start(target.clone(), self.shared.announced.clone()));
        self.shared.announced.subscribe()
    }

    /// How long a statement may take.
    pub(super) fn answer(&self) -> Duration {
        self.shared.answer
    }

    /// Somebody waits for the server's answer.
    pub(super) fn add_trip(&self) {
        self.shared.commits.trip();
    }

    /// A connection on which nothing is in progress.
    pub(crate) async fn acquire(&self) -> Result<Held, DatabaseError> {
        let get = || async {
            self.connections.get().await.map_err(|error| match error {
                PoolError::Backend(error) => error,
                PoolError::Closed => DatabaseError::Closed,
                _ => DatabaseError::Busy,
            })
        };
        let object = until_answered(get).await?;
        Ok(Held { object: Some(object), clean: true })
    }

    /// Waits until no other transaction of this process works on the thread.
    pub(super) async fn turn(&self, thread_id: &str) -> Result<OwnedMutexGuard<()>, DatabaseError> {
        let turn = self.shared.threads.of(thread_id).lock_owned();
        timeout(TURN, turn).await.map_err(|_| DatabaseError::Busy)
    }

    /// The rows that a statement reads.
    pub(crate) async fn fetch_all(&self, sql: Sql) -> Result<Vec<Row>, DatabaseError> {
        match self.read(&sql).await {
            Err(error) if self.lost(&error) => self.read(&sql).await,
            done => done,
        }
    }

    async fn read(&self, sql: &Sql) -> Result<Vec<Row>, DatabaseError> {
        let mut held = self.acquire().await?;
        let session = held.dirty()?;
        let reading = async {
            self.prepare(session, std::slice::from_ref(sql)).await?;
            self.add_trip();
            ask(session, sql, self.tables()).await
        };
        let done = timeout(self.answer(), reading).await.map_err(|_| silent())??;
        held.clean();
        Ok(done.rows)
    }

    /// Prepares what this session does not know yet, if it is this connection's alone.
    pub(super) async fn prepare(
        &self,
        session: &Session,
        statements: &[Sql],
    ) -> Result<(), tokio_postgres::Error> {
        if session.is_own() && prepare(session, statements, self.tables()).await? {
            self.add_trip();
        }
        Ok(())
    }

    /// Whether an error means that the connection is lost, so that another one may work. Idle ones are closed then, as
    /// they were probably lost too.
    pub(super) fn lost(&self, error: &DatabaseError) -> bool {
        let spoiled = matches!(error, DatabaseError::Postgres(error) if error.code().is_some_and(spoils));
        if !spoiled && !is_passing(error) {
            return false;
        }
        self.connections.retain(|_, _| false);
        true
    }

    /// Waits for transactions in progress and closes everything.
    pub(crate) async fn close(&self) {
        if let Some(listener) = self.shared.listener.get() {
            listener.stop();
        }
        let pools = [&self.connections, &self.shared.apart];
        for pool in pools {
            pool.close();
        }
        let ended = async {
            while pools.iter().any(|pool| pool.status().size > 0) {
                tokio::time::sleep(PAUSE).await;
            }
        };
        if timeout(ANSWER, ended).await.is_err() {
            tracing::warn!("closed the gateway's records while a transaction was in progress");
        }
    }
}

/// Tries again while a server starts, or the next primary is not there yet.
async fn until_answered<T, F>(attempt: impl Fn() -> F) -> Result<T, DatabaseError>
where
    F: Future<Output = Result<T, DatabaseError>>,
{
    let (started, mut pause) = (Instant::now(), PAUSE);
    loop {
        match attempt().await {
            Err(error) if is_passing(&error) && started.elapsed() + pause < PATIENCE => {
                tracing::debug!(%error, "the database did not answer; trying again");
            }
            done => return done,
        }
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

/// Whether another connection may work: this one is lost, its server starts or stops, or is a standby.
fn is_passing(error: &DatabaseError) -> bool {
    match error {
        DatabaseError::Io(_) => true,
        DatabaseError::Postgres(error) => match error.code() {
            Some(code) => is_of_server(code),
            None => error.is_closed() || error.source().is_some_and(<dyn Error>::is::<io::Error>),
        },
        _ => false,
    }
}

/// Whether a session is of no more use after this error. A prepared statement is missing or there twice: the session is
/// not what it was. Or what was prepared no longer fits: another process has changed the tables. Or the server goes.
pub(super) fn spoils(code: &SqlState) -> bool {
    matches!(code.code(), "26000" | "42P05" | "0A000") || is_of_server(code)
}

/// Whether an error says that the server starts or stops, or is a standby.
fn is_of_server(code: &SqlState) -> bool {
    let code = code.code();
    code.starts_with("08") || code.starts_with("57P") || matches!(code, "25006" | "53300" | "55000")
}

/// A pool of at most `number` connections, none of which is open yet.
fn connections(target: &PostgresTarget, number: usize) -> Result<managed::Pool<Opener>, DatabaseError> {
    managed::Pool::builder(Opener(target.clone()))
        .max_size(number)
        // The session that was used last has most statements prepared.
        .queue_mode(QueueMode::Lifo)
        .runtime(Runtime::Tokio1)
        .wait_timeout(Some(TURN))
        .create_timeout(Some(ANSWER))
        .recycle_timeout(Some(TEST))
        .build()
        .map_err(|error| DatabaseError::Internal(error.to_string()))
}

/// Opens the connections of a pool.
struct Opener(PostgresTarget);

impl managed::Manager for Opener {
    type Type = Session;
    type Error = DatabaseError;

    async fn create(&self) -> Result<Session, DatabaseError> {
        self.0.open().await
    }

    async fn recycle(&self, session: &mut Session, metrics: &Metrics) -> RecycleResult<DatabaseError> {
        if session.is_closed() {
            return Err(RecycleError::message("the server has closed it"));
        }
        if metrics.last_used() > FRESH {
            session.check_connection().await.map_err(DatabaseError::from)?;
        }
        Ok(())
    }
}

/// A connection in use. It goes back to the pool if it is clean, and is closed otherwise.
pub(crate) struct Held {
    object: Option<Object<Opener>>,
    clean: bool,
}

impl Held {
    /// The connection, for something that is in progress until [`Self::clean`] is called.
    pub(crate) fn dirty(&mut self) -> Result<&Session, DatabaseError> {
        self.clean = false;
        self.object.as_deref().ok_or(DatabaseError::Closed)
    }

    /// Nothing is in progress on it any more.
    pub(crate) fn clean(&mut self) {
        self.clean = true;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let (Some(object), false) = (self.object.take(), self.clean) {
            drop(Object::take(object));
        }
    }
}

/// The threads on which transactions of this process work, or for which they wait.
#[derive(Default)]
struct Threads(Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>);

impl Threads {
    fn of(&self, thread_id: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut threads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = threads.get(thread_id).and_then(Weak::upgrade) {
            return found;
        }
        if threads.len() == threads.capacity() {
            threads.retain(|_, thread| thread.strong_count() > 0);
        }
        let thread = Arc::default();
        threads.insert(thread_id.to_owned(), Arc::downgrade(&thread));
        thread
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_forgotten_once_nobody_works_on_it() {
        let threads = Threads::default();
        let held = threads.of("held");
        for n in 0..10_000 {
            drop(threads.of(&n.to_string()));
        }
        assert!(Arc::ptr_eq(&held, &threads.of("held")));
        assert!(threads.0.lock().unwrap().len() < 100);
    }
}

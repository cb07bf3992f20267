//! The connections of a store.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use deadpool::Runtime;
use deadpool::managed::{self, Metrics, Object, PoolError, RecycleResult};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{Connection as _, Row as _};
use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout;

use super::changes::{Announced, Changes, Listener};
use super::connect::{PostgresTarget, silent};
use super::sql::{Tables, prepared};
use crate::query::Sql;

/// How long an operation waits for a connection that others use, and for its thread. A machine on which everything is
/// slow needs more than one on which something is wrong.
const TURN: Duration = Duration::from_secs(30);
/// How long it waits for a server that starts, or for the next primary.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a statement may take; a lock is waited for at most half of it.
pub(super) const ANSWER: Duration = Duration::from_secs(20);
/// A connection that was idle for longer is tested before it is used.
const FRESH: Duration = Duration::from_secs(1);
/// How long that test may take.
const TEST: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Connections to the primary. Clones share them.
#[derive(Clone)]
pub(crate) struct Pool(Arc<Shared>);

struct Shared {
    connections: managed::Pool<Opener>,
    tables: Tables,
    /// Whether the sessions are those of a pooler, which gives each transaction another one: a statement that was
    /// prepared in one is missing in the next, or is another one.
    pooled: AtomicBool,
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
    pub(crate) async fn connect(target: &PostgresTarget) -> Result<Self, sqlx::Error> {
        let connections = managed::Pool::builder(Opener(target.clone()))
            .max_size(target.connections())
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(TURN))
            .create_timeout(Some(ANSWER))
            .recycle_timeout(Some(TEST))
            .build()
            .map_err(|error| sqlx::Error::Configuration(error.into()))?;
        let pool = Self(Arc::new(Shared {
            connections,
            tables: target.tables().clone(),
            pooled: AtomicBool::new(false),
            threads: Threads::default(),
            announced: Announced::default(),
            listener: OnceLock::new(),
        }));
        let pooled = timeout(ANSWER, pool.is_pooled()).await.map_err(|_| silent())??;
        if pooled {
            tracing::info!(
                "the database is behind a pooler: runs of other processes are followed by polling"
            );
            pool.0.pooled.store(true, Ordering::Relaxed);
        }
        Ok(pool)
    }

    /// Whether transactions of one connection run in different sessions. Of two connections through such a pooler one
    /// gets the session that the other one has just used, or one changes its session; the first round shows it, unless
    /// others are as quick.
    async fn is_pooled(&self) -> Result<bool, sqlx::Error> {
        const ROUNDS: usize = 4;
        const SESSION: &str = "SELECT pg_catalog.pg_backend_pid()";
        const BEGUN: &str = "BEGIN; SELECT pg_catalog.pg_backend_pid()";
        let session = async |held: &mut Held, statement: &'static str| {
            sqlx::raw_sql(statement).fetch_one(held.dirty()).await?.try_get::<i32, _>(0)
        };
        let (mut one, mut two) = (self.acquire().await?, self.acquire().await?);
        let here = session(&mut one, SESSION).await?;
        for _ in 0..ROUNDS {
            let there = session(&mut two, BEGUN).await?;
            let again = session(&mut one, SESSION).await?;
            sqlx::raw_sql("ROLLBACK").execute(two.dirty()).await?;
            if there == here || again != here {
                return Ok(true);
            }
        }
        one.clean();
        two.clean();
        Ok(false)
    }

    pub(super) fn tables(&self) -> &Tables {
        &self.0.tables
    }

    /// What other processes announce from now on.
    pub(crate) fn changes(&self) -> Changes {
        if self.prepares() {
            let Opener(target) = self.0.connections.manager();
            self.0.listener.get_or_init(|| Listener::start(target.clone(), self.0.announced.clone()));
        }
        self.0.announced.subscribe()
    }

    /// Whether a statement may stay prepared in its session.
    pub(super) fn prepares(&self) -> bool {
        !self.0.pooled.load(Ordering::Relaxed)
    }

    /// A connection on which nothing is in progress.
    pub(crate) async fn acquire(&self) -> Result<Held, sqlx::Error> {
        let get = || async {
            self.0.connections.get().await.map_err(|error| match error {
                PoolError::Backend(error) => error,
                PoolError::Closed => sqlx::Error::PoolClosed,
                _ => sqlx::Error::PoolTimedOut,
            })
        };
        let object = until_answered(get).await?;
        Ok(Held { object: Some(object), clean: true })
    }

    /// Waits until no other transaction of this process works on the thread.
    pub(super) async fn turn(&self, thread_id: &str) -> Result<OwnedMutexGuard<()>, sqlx::Error> {
        let turn = self.0.threads.of(thread_id).lock_owned();
        timeout(TURN, turn).await.map_err(|_| sqlx::Error::PoolTimedOut)
    }

    /// The rows that a statement reads.
    pub(crate) async fn fetch_all(&self, sql: Sql) -> Result<Vec<PgRow>, sqlx::Error> {
        match self.read(&sql).await {
            Err(error) if self.lost(&error) => self.read(&sql).await,
            done => done,
        }
    }

    async fn read(&self, sql: &Sql) -> Result<Vec<PgRow>, sqlx::Error> {
        let prepares = self.prepares();
        let mut held = self.acquire().await?;
        let connection = held.dirty();
        let query = prepared(sql.clone(), self.tables()).persistent(prepares);
        let reading = async {
            if prepares {
                return query.fetch_all(connection).await;
            }
            // A statement is parsed in one message and executed in another: in one session, within a transaction.
            sqlx::raw_sql("BEGIN READ ONLY").execute(&mut *connection).await?;
            let rows = query.fetch_all(&mut *connection).await?;
            sqlx::raw_sql("COMMIT").execute(connection).await?;
            Ok(rows)
        };
        let done = timeout(ANSWER, reading).await.map_err(|_| silent())?;
        if done.is_ok() {
            held.clean();
        }
        done
    }

    /// Whether an error means that the connection is lost, so that another one may work. Idle ones are closed then, as
    /// they were probably lost too.
    pub(super) fn lost(&self, error: &sqlx::Error) -> bool {
        let code = error.as_database_error().and_then(|error| error.code().map(Cow::into_owned));
        match code.as_deref() {
            // A prepared statement is missing or there twice: a pooler was put before the server since the start.
            Some("26000" | "42P05") => {
                if self.prepares() {
                    tracing::warn!("the database is behind a pooler now: nothing is prepared any more");
                    self.0.pooled.store(true, Ordering::Relaxed);
                }
            }
            _ if is_passing(error) => {}
            _ => return false,
        }
        self.0.connections.retain(|_, _| false);
        true
    }

    /// Waits for transactions in progress and closes everything.
    pub(crate) async fn close(&self) {
        if let Some(listener) = self.0.listener.get() {
            listener.stop();
        }
        self.0.connections.close();
        let ended = async {
            while self.0.connections.status().size > 0 {
                tokio::time::sleep(PAUSE).await;
            }
        };
        if timeout(ANSWER, ended).await.is_err() {
            tracing::warn!("closed the gateway's records while a transaction was in progress");
        }
    }
}

/// Tries again while a server starts, or the next primary is not there yet.
async fn until_answered<T, F>(attempt: impl Fn() -> F) -> Result<T, sqlx::Error>
where
    F: Future<Output = Result<T, sqlx::Error>>,
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
fn is_passing(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) => true,
        sqlx::Error::Database(error) => error.code().is_some_and(|code| {
            code.starts_with("08") || code.starts_with("57P") || matches!(&*code, "25006" | "53300" | "55000")
        }),
        _ => false,
    }
}

/// Opens the connections of a pool.
struct Opener(PostgresTarget);

impl managed::Manager for Opener {
    type Type = PgConnection;
    type Error = sqlx::Error;

    async fn create(&self) -> Result<PgConnection, sqlx::Error> {
        self.0.open().await
    }

    async fn recycle(&self, connection: &mut PgConnection, metrics: &Metrics) -> RecycleResult<sqlx::Error> {
        if metrics.last_used() > FRESH {
            connection.ping().await?;
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
    pub(crate) fn dirty(&mut self) -> &mut PgConnection {
        self.clean = false;
        #[expect(clippy::expect_used, reason = "it is taken only when this is dropped")]
        self.object.as_mut().expect("a connection")
    }

    /// Nothing is in progress on it any more.
    pub(super) fn clean(&mut self) {
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

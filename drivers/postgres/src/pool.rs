//! Connections, each for one user at a time.
//!
//! Outside of a transaction a connection has one statement under way. Two would be faster, but PgBouncer may give a
//! server connection to its next client after the first of two answers, if the client that sent both is gone; the next
//! client then takes the second for its own. The answer of a commit is one boolean, so such a mistake would not even be
//! noticed. In a transaction statements may be pipelined: PgBouncer closes a connection whose client left a transaction.

use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use deadpool_postgres::{
    Hook, HookError, Manager, ManagerConfig, Object, Pool, PoolError, RecyclingMethod, Runtime, TimeoutType,
};
use futures::future::join;
use futures::{FutureExt as _, poll};
use threadkeep::Result;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, Row};

use crate::config::{Options, Target};
use crate::connect::Connector;
use crate::error::{CLOSED, SILENT, Trouble, unavailable};

/// A parameter of a statement with its type, so that no statement needs to be prepared: no state is kept in a session,
/// and a pooler may give each transaction another one.
pub(crate) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// The connections of a saver.
pub(crate) struct Connections {
    pool: Pool,
    /// Connections opened before this moment are not used any more.
    renewed: Arc<Mutex<Option<Instant>>>,
    /// For [`Self::probe`].
    config: Config,
    connector: Connector,
    /// The server that answered the last probe.
    server: Mutex<Option<String>>,
}

/// Identifies a server since its last start, and says whether it is a primary.
const SERVER: &str =
    "SELECT pg_catalog.concat(pg_catalog.pg_postmaster_start_time(), pg_catalog.pg_is_in_recovery())";

/// The result of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Probed {
    /// The server is the same as before.
    Same,
    /// It is another one, or was restarted.
    Other,
    /// There is no answer.
    Silent,
}

impl Connections {
    pub(crate) fn new(target: Target, options: &Options) -> Result<Self> {
        let size = options.connections.max(2);
        let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let Target { config, tls } = target;
        let connector = Connector::new(tls);
        let manager = Manager::from_connect(config.clone(), connector.clone(), recycling);
        let renewed = Arc::new(Mutex::new(None::<Instant>));
        let limit = renewed.clone();
        let mut pool = Pool::builder(manager).max_size(size).runtime(Runtime::Tokio1).pre_recycle(
            Hook::sync_fn(move |_, metrics| {
                let limit = *limit.lock().unwrap_or_else(PoisonError::into_inner);
                if limit.is_some_and(|limit| metrics.created <= limit) {
                    return Err(HookError::message("its server may have been replaced"));
                }
                Ok(())
            }),
        );
        if !options.patience.is_zero() {
            pool = pool.wait_timeout(Some(options.patience)).create_timeout(Some(options.patience));
        }
        let pool = pool.build().map_err(|error| unavailable(error.to_string()))?;
        let server = Mutex::default();
        Ok(Self { pool, renewed, config, connector, server })
    }

    /// A connection for one statement after the other.
    pub(crate) async fn lease(&self) -> Result<Lease, Trouble> {
        let object = self.pool.get().await.map_err(|error| match error {
            // Nothing was sent on it yet.
            PoolError::Backend(error) => match Trouble::from(error) {
                Trouble::Again { reason, renew, .. } => Trouble::Again { reason, in_doubt: false, renew },
                done => done,
            },
            PoolError::Timeout(TimeoutType::Create) => {
                Trouble::Again { reason: SILENT.to_owned(), in_doubt: false, renew: true }
            }
            PoolError::Closed => unavailable(CLOSED).into(),
            error => unavailable(format!("no connection to the database: {error}")).into(),
        })?;
        Ok(Lease { object: Some(object), open: AtomicUsize::new(0) })
    }

    /// Asks on a new connection which server answers now.
    pub(crate) async fn probe(&self, patience: Duration) -> Probed {
        let ask = async {
            let (client, _driver) = self.connector.open(&self.config).await.ok()?;
            let rows = client.query_typed(SERVER, &[]).await.ok()?;
            rows.first()?.try_get::<_, String>(0).ok()
        };
        let Ok(Some(found)) = tokio::time::timeout(patience, ask).await else { return Probed::Silent };
        let mut server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        let same = server.as_ref() == Some(&found);
        *server = Some(found);
        if same { Probed::Same } else { Probed::Other }
    }

    /// Closes idle connections; those in use finish what is in progress on them and are not reused.
    pub(crate) fn renew(&self) {
        *self.renewed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.pool.retain(|_, _| false);
    }

    /// Closes the connections as they are returned; no more are handed out.
    pub(crate) fn close(&self) {
        self.pool.close();
    }
}

/// A connection that is in use. It goes back to the pool when everything that was sent on it is answered: dropped
/// before, it is closed, as its next user would have two statements under way.
pub(crate) struct Lease {
    object: Option<Object>,
    /// Statements and transactions under way.
    open: AtomicUsize,
}

impl Lease {
    /// Runs one statement.
    pub(crate) async fn query(&mut self, statement: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Trouble> {
        self.sent(self.client()?.query_typed(statement, params)).await
    }

    /// Runs `work`, which sends one statement after the other.
    pub(crate) async fn run<T>(
        &mut self,
        work: impl AsyncFnOnce(&Client) -> Result<T, Trouble>,
    ) -> Result<T, Trouble> {
        self.sent(work(self.client()?)).await
    }

    /// Awaits the answer to what is sent.
    async fn sent<T, E>(&self, answer: impl Future<Output = Result<T, E>>) -> Result<T, Trouble>
    where
        Trouble: From<E>,
    {
        self.open.fetch_add(1, Ordering::Relaxed);
        let answer = answer.await;
        self.open.fetch_sub(1, Ordering::Relaxed);
        Ok(answer?)
    }

    /// Present until the end.
    fn client(&self) -> Result<&Client, Trouble> {
        self.object.as_deref().map(|client| &**client).ok_or_else(|| unavailable(CLOSED).into())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let (Some(object), 1..) = (self.object.take(), *self.open.get_mut()) {
            drop(Object::take(object));
        }
    }
}

/// Begins a transaction. It holds the lock of a thread, so the server ends it if this process stands still, between two
/// statements or without taking an answer that fills the buffers of the connection: others waited for as long as a stopped
/// process did not go on. A process that works on a long thread on a busy machine takes seconds between two statements.
pub(crate) const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; \
    SET LOCAL idle_in_transaction_session_timeout = '30s'; SET LOCAL tcp_user_timeout = '30s'";

/// A transaction. Dropped before its end, it takes the connection with it.
pub(crate) struct Transaction(Lease);

impl Transaction {
    /// A transaction that has not begun.
    pub(crate) fn on(lease: Lease) -> Self {
        lease.open.fetch_add(1, Ordering::Relaxed);
        Self(lease)
    }

    /// Begins; `first` is sent in the same round trip.
    pub(crate) async fn begin<T>(
        &self,
        first: impl Future<Output = Result<T, Trouble>>,
    ) -> Result<T, Trouble> {
        let ((), asked) = in_order(self.execute(BEGIN), first).await?;
        Ok(asked)
    }

    /// Runs a statement. Several may be under way.
    pub(crate) async fn query(&self, statement: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Trouble> {
        self.0.sent(self.0.client()?.query_typed(statement, params)).await
    }

    /// Runs statements that have no parameters.
    pub(crate) async fn execute(&self, statements: &str) -> Result<(), Trouble> {
        self.0.sent(self.0.client()?.batch_execute(statements)).await
    }

    /// Commits. `last` sends all its statements when it is polled first; the commit follows them in the same round trip.
    ///
    /// If `last` fails before the commit is sent, it is not sent: an answer that is no answer can come so early, while
    /// `last` still has statements to send, and the server, which has refused nothing, would commit without them.
    pub(crate) async fn commit<T>(
        &self,
        last: impl Future<Output = Result<T, Trouble>>,
    ) -> Result<T, Trouble> {
        let mut last = pin!(last);
        let done = match poll!(&mut last) {
            Poll::Ready(done) => {
                let done = done?;
                self.execute("COMMIT").await?;
                done
            }
            Poll::Pending => {
                // If the server refused a statement, the commit is a rollback.
                in_order(last, self.execute("COMMIT")).await?.0
            }
        };
        self.ended();
        Ok(done)
    }

    /// Ends the transaction without changes.
    pub(crate) async fn roll_back(&self) -> Result<(), Trouble> {
        self.execute("ROLLBACK").await?;
        self.ended();
        Ok(())
    }

    fn ended(&self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Waits for two parts of a transaction that are under way at once. Once a statement failed, those sent after it fail
/// because of that alone: the part sent first says why, whichever answer is seen first.
pub(crate) fn in_order<A, B>(
    first: impl Future<Output = Result<A, Trouble>>,
    then: impl Future<Output = Result<B, Trouble>>,
) -> impl Future<Output = Result<(A, B), Trouble>> {
    join(first, then).map(|(first, then)| Ok((first?, then?)))
}

/// What a single statement can be sent on.
pub(crate) trait Ask {
    /// Runs the statement.
    fn ask(
        &mut self,
        statement: &str,
        params: &[Param<'_>],
    ) -> impl Future<Output = Result<Vec<Row>, Trouble>> + Send;
}

impl Ask for Lease {
    async fn ask(&mut self, statement: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Trouble> {
        self.query(statement, params).await
    }
}

impl Ask for &Transaction {
    async fn ask(&mut self, statement: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Trouble> {
        self.query(statement, params).await
    }
}

#[cfg(test)]
mod tests;

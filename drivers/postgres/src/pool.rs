//! Connections, each for one user at a time.
//!
//! Outside of a transaction a connection has one statement under way. Two would be faster, but PgBouncer may give a
//! server connection to its next client after the first of two answers, if the client that sent both is gone; the next
//! client then takes the second for its own. The answer of a commit is one boolean, so such a mistake would not even be
//! noticed. In a transaction statements may be pipelined: PgBouncer closes a connection whose client left a transaction.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use deadpool::Runtime;
use deadpool::managed::{
    Manager, Metrics, Object, Pool, PoolError, QueueMode, RecycleError, RecycleResult, TimeoutType,
};
use futures::future::join;
use futures::{FutureExt as _, poll};
use threadkeep::Result;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, Row};

use crate::config::{Options, Target};
use crate::connect::{Connector, is_full, servers};
use crate::error::{CLOSED, SILENT, Trouble, unavailable};
use crate::session::Session;
use crate::sql::Statement;
use crate::watch::{Probed, SERVER, Server, Watch};

/// How long a connection stays open without being used: a burst of calls opens many, and servers have a limit.
const IDLE: Duration = Duration::from_mins(3);

/// A parameter of a statement with its type, so that no statement needs to be prepared: behind a pooler each transaction
/// may have another session.
pub(crate) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// The connections of a saver.
pub(crate) struct Connections {
    pool: Pool<Opener>,
    watch: Watch,
}

/// Opens the connections of a pool.
struct Opener {
    config: Config,
    connector: Connector,
    /// Raised by [`Connections::renew`]: connections of an earlier generation are not used again.
    generation: AtomicU64,
    idle: Duration,
}

/// A connection of the pool.
struct Pooled {
    session: Session,
    generation: u64,
}

impl Manager for Opener {
    type Type = Pooled;
    type Error = tokio_postgres::Error;

    async fn create(&self) -> Result<Pooled, tokio_postgres::Error> {
        // Read before it is opened: it may lead to the server that is being left.
        let generation = self.generation.load(Ordering::SeqCst);
        // Most calls find an open connection, and need no room for this.
        let opened = Box::pin(self.connector.open(&self.config)).await?;
        Ok(Pooled { session: Session::of(opened).await?, generation })
    }

    async fn recycle(&self, pooled: &mut Pooled, metrics: &Metrics) -> RecycleResult<tokio_postgres::Error> {
        if pooled.generation != self.generation.load(Ordering::SeqCst) {
            return Err(RecycleError::message("its server may have been replaced"));
        }
        if pooled.session.client().is_closed() {
            return Err(RecycleError::message("the server has closed it"));
        }
        if metrics.last_used() > self.idle {
            return Err(RecycleError::message("it was idle for long"));
        }
        Ok(())
    }
}

impl Connections {
    pub(crate) fn new(target: Target, options: &Options) -> Result<Self> {
        Self::idle_for(target, options, IDLE)
    }

    /// Connections that stay open without being used for this long.
    fn idle_for(target: Target, options: &Options, idle: Duration) -> Result<Self> {
        let size = options.connections.max(2);
        let Target { config, tls } = target;
        let opener = Opener { config, connector: Connector::new(tls), generation: AtomicU64::new(0), idle };
        // The one that was used last has most statements prepared; the others can become idle.
        let mut pool =
            Pool::builder(opener).max_size(size).runtime(Runtime::Tokio1).queue_mode(QueueMode::Lifo);
        if !options.patience.is_zero() {
            pool = pool.wait_timeout(Some(options.patience)).create_timeout(Some(options.patience));
        }
        let pool = pool.build().map_err(|error| unavailable(error.to_string()))?;
        Ok(Self { pool, watch: Watch::default() })
    }

    /// Closes connections that become idle, until the last user of these drops them or they are closed.
    pub(crate) fn close_idle(self: &Arc<Self>) {
        let connections = Arc::downgrade(self);
        let idle = self.pool.manager().idle;
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(idle / 3).await;
                let Some(connections) = connections.upgrade().filter(|all| !all.pool.is_closed()) else {
                    return;
                };
                connections.pool.retain(|_, metrics| metrics.last_used() <= idle);
            }
        });
    }

    /// A connection for one statement after the other.
    pub(crate) async fn lease(&self) -> Result<Lease, Trouble> {
        let object = self.pool.get().await.map_err(|error| match error {
            PoolError::Backend(error) => Trouble::from(error).before_it_was_sent(),
            PoolError::Timeout(TimeoutType::Create) => {
                Trouble::Again { reason: SILENT.to_owned(), in_doubt: false, renew: true }
            }
            PoolError::Closed => unavailable(CLOSED).into(),
            error => unavailable(format!("no connection to the database: {error}")).into(),
        })?;
        Ok(Lease { object: Some(object), open: AtomicUsize::new(0) })
    }

    /// The server that answers, for [`Self::probe`].
    pub(crate) fn server(&self) -> Server {
        self.watch.server()
    }

    /// Learns which server answers on a connection that was just opened: there may be no room for another one.
    pub(crate) async fn meet(&self, lease: &mut Lease) {
        // If it does not say, the first probe learns it.
        let asked = lease.run(async |client| Ok(client.query_typed_one(SERVER, &[]).await?)).await;
        if let Some(server) = asked.ok().and_then(|row| row.try_get(0).ok()) {
            self.watch.note(server, || self.renew());
        }
    }

    /// Asks on a new connection whether the server that a call began with still answers.
    pub(crate) async fn probe(&self, began: Server, patience: Duration) -> Probed {
        let Opener { config, connector, .. } = self.pool.manager();
        let ask = async {
            let (client, _driver) = Box::pin(connector.open(config)).await?;
            client.query_typed_one(SERVER, &[]).await?.try_get::<_, String>(0)
        };
        let ask = tokio::time::timeout(patience, ask).map(|asked| match asked {
            Ok(Ok(server)) => Ok(server),
            Ok(Err(error)) if is_full(&error) => Err(Probed::Full),
            _ => Err(Probed::Silent),
        });
        self.watch.probe(began, ask, || self.renew()).await
    }

    /// Whether the address names one server only.
    pub(crate) fn has_one_server(&self) -> bool {
        servers(&self.pool.manager().config) < 2
    }

    /// Closes idle connections; those in use finish what is in progress on them and are not reused.
    pub(crate) fn renew(&self) {
        self.pool.manager().generation.fetch_add(1, Ordering::SeqCst);
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
    object: Option<Object<Opener>>,
    /// Statements and transactions under way.
    open: AtomicUsize,
}

impl Lease {
    /// Runs one statement.
    pub(crate) async fn query(
        &mut self,
        statement: &Statement,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>, Trouble> {
        self.sent(self.session()?.query(statement, params)).await
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

    fn client(&self) -> Result<&Client, Trouble> {
        Ok(self.session()?.client())
    }

    /// Present until the end.
    fn session(&self) -> Result<&Session, Trouble> {
        let pooled = self.object.as_deref().ok_or_else(|| unavailable(CLOSED))?;
        Ok(&pooled.session)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let (Some(object), 1..) = (self.object.take(), *self.open.get_mut()) {
            drop(Object::take(object));
        }
    }
}

/// The limits of a transaction whose process stands still.
macro_rules! limits {
    () => {
        "SET LOCAL idle_in_transaction_session_timeout = '30s'; SET LOCAL tcp_user_timeout = '30s'"
    };
}

/// Begins a transaction. It holds the lock of a thread, so the server ends it if this process stands still, between two
/// statements or without taking an answer that fills the buffers of the connection: others waited for as long as a stopped
/// process did not go on. A process that works on a long thread on a busy machine takes seconds between two statements.
/// Warnings are as with [`crate::sql::WARNED`].
pub(crate) const BEGIN: &str =
    concat!("BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL client_min_messages = warning; ", limits!());

/// Begins a transaction that reads, and sees the database as it was at its first statement.
const BEGIN_READING: &str = concat!("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; ", limits!());

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

    /// Begins to read at one moment; `first` is sent in the same round trip.
    pub(crate) async fn begin_reading<T>(
        &self,
        first: impl Future<Output = Result<T, Trouble>>,
    ) -> Result<T, Trouble> {
        let ((), asked) = in_order(self.execute(BEGIN_READING), first).await?;
        Ok(asked)
    }

    /// Runs a statement. Several may be under way. None is prepared before: what commits could be sent meanwhile.
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
        statement: &Statement,
        params: &[Param<'_>],
    ) -> impl Future<Output = Result<Vec<Row>, Trouble>> + Send;
}

impl Ask for Lease {
    async fn ask(&mut self, statement: &Statement, params: &[Param<'_>]) -> Result<Vec<Row>, Trouble> {
        self.query(statement, params).await
    }
}

impl Ask for &Transaction {
    async fn ask(&mut self, statement: &Statement, params: &[Param<'_>]) -> Result<Vec<Row>, Trouble> {
        self.query(statement, params).await
    }
}

#[cfg(test)]
mod tests;

//! Connections: an exclusive one for a read or a transaction, shared ones for single statements.
//!
//! A shared connection pipelines many statements: each is sent at once and answered in order, so that commits of many
//! threads do not wait for each other's round trips.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use std::time::{Duration, Instant};

use deadpool_postgres::{
    Hook, HookError, Manager, ManagerConfig, Object, Pool, PoolError, RecyclingMethod, Runtime, TimeoutType,
};
use futures::future::join;
use threadkeep::Result;
use tokio::sync::OnceCell;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, Row};

use crate::config::{Options, Target};
use crate::connect::Connector;
use crate::error::{CLOSED, SILENT, Trouble, unavailable};

/// A parameter of a statement with its type, so that no statement needs to be prepared: no state is kept in a session,
/// and a pooler may give each transaction another one.
pub(crate) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// A connection that statements share. Its first user opens it.
#[derive(Default)]
struct Lane {
    object: OnceCell<Object>,
    /// Somebody stopped waiting for a statement on it, behind which all others would wait: nobody else uses it.
    abandoned: AtomicBool,
}

impl Drop for Lane {
    fn drop(&mut self) {
        if let (Some(object), true) = (self.object.take(), *self.abandoned.get_mut()) {
            drop(Object::take(object));
        }
    }
}

/// The connections of a saver.
pub(crate) struct Connections {
    pool: Pool,
    lanes: Mutex<Vec<Weak<Lane>>>,
    /// The number of connections that may be shared; the rest is for reads.
    width: usize,
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
        Ok(Self { pool, lanes: Mutex::default(), width: size / 2, renewed, config, connector, server })
    }

    /// An exclusive connection.
    pub(crate) async fn own(&self) -> Result<Object, Trouble> {
        self.pool.get().await.map_err(|error| match error {
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
        })
    }

    /// A connection that other statements may be using.
    pub(crate) async fn shared(&self) -> Result<Shared, Trouble> {
        let lane = self.lane();
        lane.object.get_or_try_init(|| self.own()).await?;
        Ok(Shared { lane, waits: AtomicBool::new(false) })
    }

    fn lane(&self) -> Arc<Lane> {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut usable = Vec::with_capacity(lanes.len());
        lanes.retain(|lane| {
            let lane = lane.upgrade().filter(|lane| {
                let closed = lane.object.get().is_some_and(|client| client.is_closed());
                !closed && !lane.abandoned.load(Ordering::Relaxed)
            });
            let keep = lane.is_some();
            usable.extend(lane);
            keep
        });
        if usable.len() < self.width {
            let lane = Arc::<Lane>::default();
            lanes.push(Arc::downgrade(&lane));
            return lane;
        }
        usable.into_iter().min_by_key(Arc::strong_count).unwrap_or_default()
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
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.pool.retain(|_, _| false);
    }

    /// Closes the connections as they are returned; no more are handed out.
    pub(crate) fn close(&self) {
        self.pool.close();
    }
}

/// A shared connection, held while statements run on it.
pub(crate) struct Shared {
    lane: Arc<Lane>,
    /// A statement may be under way.
    waits: AtomicBool,
}

impl Shared {
    /// Runs one statement.
    pub(crate) async fn query(&self, statement: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Trouble> {
        let rows = self.client()?.query_typed(statement, params).await;
        self.answered();
        Ok(rows?)
    }

    /// The connection. Its user says when everything was answered; if it is dropped before, nobody else gets it.
    pub(crate) fn client(&self) -> Result<&Client, Trouble> {
        match self.lane.object.get() {
            Some(object) => {
                self.waits.store(true, Ordering::Relaxed);
                Ok(object)
            }
            None => Err(unavailable(CLOSED).into()),
        }
    }

    /// Nothing is under way any more.
    pub(crate) fn answered(&self) {
        self.waits.store(false, Ordering::Relaxed);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if *self.waits.get_mut() {
            self.lane.abandoned.store(true, Ordering::Relaxed);
        }
    }
}

/// A transaction on a connection of its own. Dropping it before its end closes the connection, so that no connection
/// with an open transaction is reused.
pub(crate) struct Transaction {
    object: Option<Object>,
    ended: AtomicBool,
}

impl Transaction {
    /// A transaction that has not begun.
    pub(crate) fn on(object: Object) -> Self {
        Self { object: Some(object), ended: AtomicBool::new(false) }
    }

    /// Begins; `first` is sent in the same round trip.
    pub(crate) async fn begin<T>(
        &self,
        first: impl Future<Output = Result<T, Trouble>>,
    ) -> Result<T, Trouble> {
        let begin = self.client()?.batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED");
        let (begun, asked) = join(begin, first).await;
        begun?;
        asked
    }

    /// Commits; `last` is sent before it, in the same round trip.
    pub(crate) async fn commit<T>(
        &self,
        last: impl Future<Output = Result<T, Trouble>>,
    ) -> Result<T, Trouble> {
        let (done, committed) = join(last, self.client()?.batch_execute("COMMIT")).await;
        // If the last statement failed, the commit is a rollback.
        let done = done?;
        committed?;
        self.ended.store(true, Ordering::Relaxed);
        Ok(done)
    }

    /// Ends the transaction without changes.
    pub(crate) async fn roll_back(&self) -> Result<(), Trouble> {
        self.client()?.batch_execute("ROLLBACK").await?;
        self.ended.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The connection; present until the end.
    pub(crate) fn client(&self) -> Result<&Client, Trouble> {
        match &self.object {
            Some(object) => Ok(object),
            None => Err(unavailable(CLOSED).into()),
        }
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        if let (Some(object), false) = (self.object.take(), *self.ended.get_mut()) {
            drop(Object::take(object));
        }
    }
}

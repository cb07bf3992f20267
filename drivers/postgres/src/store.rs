//! The database as the saver sees it: attempts, and what is tried again.

use std::time::{Duration, Instant};

use futures::future::{BoxFuture, join};
use threadkeep::id::{CheckpointId, Namespace, ThreadId};
use threadkeep::{Error, Result};
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Row};
use uuid::Uuid;

use crate::change::won;
use crate::element::SPACES;
use crate::error::{BUSY, Trouble, in_doubt, unavailable};
use crate::keys;
use crate::plan::Planned;
use crate::pool::{Connections, Param, Transaction};
use crate::rows::Snapshot;
use crate::sql::Sql;
use crate::thread::{ThreadState, Threads};

/// The first pause before something is tried again; each one is twice as long, up to the longest.
const PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// How often a write may find that its thread was deleted or made since it looked.
const ROUNDS: usize = 8;

/// A database.
pub(crate) struct Store {
    pub(crate) sql: Sql,
    pub(crate) connections: Connections,
    pub(crate) threads: Threads,
    pub(crate) patience: Duration,
}

/// An attempt at an operation.
pub(crate) type Attempt<'a, T> = BoxFuture<'a, Result<T, Trouble>>;

/// Which checkpoints a writer must see beside the head.
pub(crate) struct Wanted<'a> {
    pub(crate) thread: &'a ThreadId,
    pub(crate) namespace: &'a Namespace,
    pub(crate) ids: Vec<CheckpointId>,
}

impl Store {
    /// Attempts a read until it comes to an end, or patience does.
    pub(crate) async fn reading<'a, T>(&self, attempt: impl Fn() -> Attempt<'a, T> + Send) -> Result<T> {
        self.persist(false, move |_| attempt()).await
    }

    /// Attempts a write, which must be idempotent: an attempt whose outcome is in doubt is repeated. The attempt is told
    /// whether an earlier one may have been carried out.
    pub(crate) async fn writing<'a, T>(&self, attempt: impl Fn(bool) -> Attempt<'a, T> + Send) -> Result<T> {
        self.persist(true, attempt).await
    }

    async fn persist<'a, T>(
        &self,
        writes: bool,
        attempt: impl Fn(bool) -> Attempt<'a, T> + Send,
    ) -> Result<T> {
        let started = Instant::now();
        let (mut pause, mut doubt) = (PAUSE, false);
        loop {
            let reason = match attempt(doubt).await {
                Ok(done) => return Ok(done),
                Err(Trouble::Final(Error::Unavailable { reason, .. })) if doubt => {
                    return Err(in_doubt(reason));
                }
                Err(Trouble::Final(error)) => return Err(error),
                Err(Trouble::Again { reason, in_doubt: sent }) => {
                    doubt |= writes && sent;
                    reason
                }
                Err(Trouble::OutOfStep { reason }) => {
                    doubt |= writes;
                    self.connections.renew();
                    reason
                }
            };
            if started.elapsed() + pause > self.patience {
                return Err(if doubt { in_doubt(reason) } else { unavailable(reason) });
            }
            tracing::debug!(%reason, "the database did not answer; trying again");
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// Runs a statement on a connection of its own.
    pub(crate) async fn query(&self, statement: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Trouble> {
        Ok(self.connections.own().await?.query_typed(statement, params).await?)
    }

    /// Writes to a thread. `quick` plans with what is remembered, if that is enough: one statement, which has no effect if the
    /// thread is another by now. Then, or if `quick` has no plan, the thread is locked and looked at, and `sure` decides.
    pub(crate) async fn write(
        &self,
        wanted: Wanted<'_>,
        quick: impl Fn(&ThreadState) -> Option<Planned> + Send + Sync,
        sure: impl Fn(&ThreadState, &Snapshot) -> Result<Option<Planned>> + Send + Sync,
    ) -> Result<(), Trouble> {
        let slot = self.threads.slot(wanted.thread);
        let mut held = slot.hold(&self.threads).await;
        // What is not put back, because an attempt failed or its future was dropped, is forgotten.
        let mut known = held.take();
        let mut state = known.take().unwrap_or_else(ThreadState::absent);
        if let Some(planned) = quick(&state) {
            let client = self.connections.shared().await?;
            let rows = client.query(&self.sql.write, &planned.change.params()).await?;
            if won(&rows)? {
                planned.note(&mut state);
                held.put(state);
                return Ok(());
            }
        }
        for _ in 0..ROUNDS {
            let transaction = Transaction::on(self.connections.own().await?);
            let client = transaction.client()?;
            let rows = transaction.begin(self.look(client, &wanted, &state)).await?;
            let snapshot = Snapshot::of(wanted.thread, &rows)?;
            state = ThreadState::found(Some(state), &snapshot);
            let head = snapshot.head(wanted.thread, &keys::of_namespace(wanted.namespace))?;
            state.heads.put(wanted.namespace.clone(), head.map(|head| head.clone().into()));
            let planned = match sure(&state, &snapshot) {
                Ok(Some(planned)) => planned,
                Ok(None) if state.mark.is_some_and(|mark| !mark.is_flushed()) => {
                    // It is there and may not be on the disk: the lock has written to the log, so a commit flushes that.
                    transaction.commit(async { Ok(()) }).await?;
                    held.put(state);
                    return Ok(());
                }
                decided => {
                    transaction.roll_back().await?;
                    held.put(state);
                    return Ok(decided.map(|_| ())?);
                }
            };
            if transaction.commit(planned.change.write_in(&self.sql, client)).await? {
                planned.note(&mut state);
                held.put(state);
                return Ok(());
            }
        }
        Err(unavailable(BUSY).into())
    }

    /// Flushes the log as far as it is about a thread: a transaction that locks its row writes to the log, and waits for the
    /// disk. A thread that is not there was deleted, and that was flushed.
    pub(crate) async fn flush(&self, thread: &ThreadId) -> Result<(), Trouble> {
        let thread = keys::of_thread(thread);
        self.connections.shared().await?.query(&self.sql.lock, &[(&thread, Type::UUID)]).await?;
        Ok(())
    }

    /// Locks a thread and asks what a writer must know beyond `state`.
    async fn look(
        &self,
        client: &Client,
        wanted: &Wanted<'_>,
        state: &ThreadState,
    ) -> Result<Vec<Row>, Trouble> {
        let thread = keys::of_thread(wanted.thread);
        let ns = keys::of_namespace(wanted.namespace);
        let ids: Vec<Uuid> = wanted.ids.iter().copied().map(keys::uuid).collect();
        let (epoch, next) = known(state);
        let lock: [Param<'_>; 1] = [(&thread, Type::UUID)];
        let look: [Param<'_>; 5] = [
            (&thread, Type::UUID),
            (&ns, Type::BYTEA),
            (&ids, Type::UUID_ARRAY),
            (&epoch, Type::INT8),
            (&next, Type::INT8_ARRAY),
        ];
        let (locked, rows) =
            join(client.query_typed(&self.sql.lock, &lock), client.query_typed(&self.sql.look, &look)).await;
        locked?;
        Ok(rows?)
    }
}

/// The epoch that a writer knows, and in each space the first sequence number that it does not.
pub(crate) fn known(state: &ThreadState) -> (i64, Vec<i64>) {
    let next = SPACES.map(|space| space.seq(state.index.next[space as usize]));
    (state.mark.map_or(0, |mark| mark.epoch), next.to_vec())
}

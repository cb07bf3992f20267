//! The database as the saver sees it: one attempt to read or write.

use std::sync::Arc;
use std::time::Duration;

use threadkeep::Result;
use threadkeep::id::{CheckpointId, Namespace, ThreadId};
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::change::Change;
use crate::convoy::Convoys;
use crate::doubt::{Asked, Fate, Request};
use crate::element::SPACES;
use crate::error::{BUSY, OVERTAKEN, Trouble, in_doubt, unavailable};
use crate::history::{History, Since, lost};
use crate::keys;
use crate::memory::Memory;
use crate::plan::Planned;
use crate::pool::{Ask, Connections, Param, Transaction, in_order};
use crate::rows::{Snapshot, ThreadRow};
use crate::sql::{EMIT, Sql, Statement};
use crate::thread::{Agreement, Known, Slot, ThreadState, Threads};

/// How often a write may find that its thread was deleted or created since it was read.
const ROUNDS: usize = 8;

/// A database.
pub(crate) struct Store {
    pub(crate) sql: Sql,
    pub(crate) connections: Arc<Connections>,
    pub(crate) convoys: Arc<Convoys>,
    pub(crate) threads: Threads,
    pub(crate) memory: Arc<Memory>,
    pub(crate) patience: Duration,
}

/// The checkpoints that a writer must see besides the head.
pub(crate) struct Wanted<'a> {
    pub(crate) thread: &'a ThreadId,
    pub(crate) namespace: &'a Namespace,
    pub(crate) ids: Vec<CheckpointId>,
    /// All children of this one, too.
    pub(crate) children_of: Option<CheckpointId>,
}

impl Store {
    /// Runs a statement on a connection of its own.
    pub(crate) async fn query(
        &self,
        statement: &Statement,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>, Trouble> {
        self.connections.lease().await?.query(statement, params).await
    }

    /// Reads a thread by one statement, and compares the result with what this process knows.
    pub(crate) async fn snapshot(
        &self,
        thread: &ThreadId,
        statement: &Statement,
        params: &[Param<'_>],
    ) -> Result<Snapshot, Trouble> {
        let remembered = self.remembered(thread);
        let mut lease = self.connections.lease().await?;
        let snapshot = Snapshot::of(thread, lease.query(statement, params).await?).await?;
        self.compare(&mut lease, thread, remembered, snapshot.thread.as_ref()).await?;
        Ok(snapshot)
    }

    /// What this process knows of a thread, before it asks.
    pub(crate) fn remembered(&self, thread: &ThreadId) -> Option<(Arc<Slot>, Known)> {
        let slot = self.threads.existing(thread)?;
        let known = slot.known();
        Some((slot, known))
    }

    /// Compares what was read to what this process knew, and remembers it.
    pub(crate) async fn compare(
        &self,
        asks: &mut impl Ask,
        thread: &ThreadId,
        remembered: Option<(Arc<Slot>, Known)>,
        row: Option<&ThreadRow>,
    ) -> Result<(), Trouble> {
        if let Some((slot, known)) = remembered {
            let found = row.map(|row| &row.history);
            self.agree(asks, thread, &known, found).await?;
            slot.found(&known, found);
        }
        Ok(())
    }

    /// Checks that the result includes what this process knew, before it asked, to be flushed.
    pub(crate) async fn agree(
        &self,
        asks: &mut impl Ask,
        thread: &ThreadId,
        known: &Known,
        found: Option<&History>,
    ) -> Result<(), Trouble> {
        let then = match known.compare(found) {
            Agreement::Agrees => return Ok(()),
            Agreement::Lacks(then) => then,
            Agreement::IfBuried(then) if self.is_buried(asks, thread, vec![then.life]).await? => {
                return Ok(());
            }
            Agreement::IfBuried(then) => then.mark,
        };
        Err(Trouble::Lost(lost(thread, then, found_mark(found))))
    }

    /// Whether one of these lives of a thread was deleted recently.
    pub(crate) async fn is_buried(
        &self,
        asks: &mut impl Ask,
        thread: &ThreadId,
        lives: Vec<i64>,
    ) -> Result<bool, Trouble> {
        if lives.is_empty() {
            return Ok(false);
        }
        let key = keys::of_thread(thread);
        let params: [Param<'_>; 2] = [(&key, Type::UUID), (&lives, Type::INT8_ARRAY)];
        Ok(!asks.ask(&self.sql.buried, &params).await?.is_empty())
    }

    /// Ends an operation that has nothing to write: what it relies on may have been committed without a flush, or
    /// without having reached a synchronous standby. A commit now waits for both.
    pub(crate) async fn settle(&self, transaction: &Transaction) -> Result<(), Trouble> {
        transaction.commit(transaction.query(EMIT, &[])).await.map(|_| ())
    }

    /// Whether an earlier attempt, if one is in doubt, was carried out: then the operation is done, and the transaction has
    /// ended. `found` is what it found of the thread.
    ///
    /// # Errors
    /// [`Error::InDoubt`] if that is unknown. The transaction has ended, too.
    pub(crate) async fn was_done(
        &self,
        transaction: &Transaction,
        (thread, found): (&ThreadId, Option<&History>),
        (asked, again): (&Asked, bool),
    ) -> Result<bool, Trouble> {
        if !again {
            return Ok(false);
        }
        let buried = self.is_buried(&mut &*transaction, thread, asked.lives()).await?;
        match asked.fate(found, buried) {
            Fate::NotDone => Ok(false),
            Fate::Done => self.settle(transaction).await.map(|()| true),
            Fate::Unknown => {
                transaction.roll_back().await?;
                Err(in_doubt(OVERTAKEN).into())
            }
        }
    }

    /// Writes to a thread. `quick` plans with what is remembered, if that is enough: one statement, which has no effect
    /// if the thread has another mark by now. Then, or if `quick` has no plan, the thread is locked and read, and
    /// `sure` decides. `asked` holds the requests of earlier attempts; `again` says that one of them is in doubt.
    pub(crate) async fn write(
        &self,
        wanted: Wanted<'_>,
        (asked, again): (&Asked, bool),
        quick: impl Fn(&ThreadState) -> Option<Planned> + Send + Sync,
        sure: impl Fn(&ThreadState, &Snapshot) -> Result<Option<Planned>> + Send + Sync,
    ) -> Result<(), Trouble> {
        let slot = self.threads.slot(wanted.thread);
        let mut held = slot.hold(&self.threads, wanted.thread).await;
        // What is not put back, because an attempt failed or its future was dropped, is forgotten.
        let mut state = held.take().unwrap_or_else(ThreadState::absent);
        // A creation does not prove that the server still has what is known of the thread, as a mark does.
        let is_quick =
            |planned: &Planned| !again && (!planned.after.creates || slot.known().newest().is_none());
        if let Some(planned) = quick(&state).filter(is_quick) {
            let Planned { change, goes_on, after } = planned;
            asked.note(after.request());
            let change = Box::new(change);
            let step = if goes_on { change.into_step() } else { Err(change) };
            let written = match step {
                Ok(step) => self.convoys.commit(step).await?,
                Err(change) => {
                    let mut lease = self.connections.lease().await?;
                    change.write(&self.sql, &mut lease).await?
                }
            };
            if written {
                slot.acknowledged(after.to.moment());
                self.memory.goes_on(keys::of_thread(wanted.thread), &after.to);
                after.note(&mut state);
                held.put(state);
                return Ok(());
            }
            asked.refused();
        }
        for _ in 0..ROUNDS {
            let known = slot.known();
            let transaction = Transaction::on(self.connections.lease().await?);
            let rows = transaction.begin(self.look(&transaction, &wanted, &state)).await?;
            let mut snapshot = Snapshot::of(wanted.thread, rows).await?;
            let found = snapshot.thread.as_ref().map(|row| row.history.clone());
            self.agree(&mut &transaction, wanted.thread, &known, found.as_ref()).await?;
            if let Err(trouble) = keeps_head(&wanted, &state, &snapshot) {
                // The next attempt needs it too.
                held.put(state);
                return Err(trouble);
            }
            if state.since(&snapshot).is_some_and(|since| since != Since::Contained) {
                // What is known of elements may be wrong: only later ones were read from the server.
                state = ThreadState::absent();
                let rows = self.look(&transaction, &wanted, &state).await?;
                snapshot = Snapshot::of(wanted.thread, rows).await?;
            }
            slot.found(&known, found.as_ref());
            state = ThreadState::found(state, &snapshot);
            let head = snapshot.head(wanted.thread, &keys::of_namespace(wanted.namespace))?;
            state.heads.put(wanted.namespace.clone(), head.map(|head| head.clone().into()));
            let fate = if again {
                let buried = self.is_buried(&mut &transaction, wanted.thread, asked.lives()).await?;
                asked.fate(found.as_ref(), buried)
            } else {
                Fate::NotDone
            };
            let decided = match fate {
                Fate::Done => Ok(None),
                Fate::NotDone => sure(&state, &snapshot),
                Fate::Unknown => Err(in_doubt(OVERTAKEN)),
            };
            let planned = match decided {
                Ok(Some(planned)) => planned,
                Ok(None) => {
                    self.settle(&transaction).await?;
                    if let Some(found) = &found {
                        slot.flushed(found.moment());
                    }
                    held.put(state);
                    return Ok(());
                }
                Err(error) => {
                    transaction.roll_back().await?;
                    held.put(state);
                    return Err(error.into());
                }
            };
            let request = planned.after.request();
            asked.note(request);
            let creates_again = again && matches!(request, Request::Write { creates: true, .. });
            let written = if creates_again {
                self.create_again(&transaction, wanted.thread, asked, &planned.change).await?
            } else {
                transaction.commit(planned.change.write(&self.sql, &mut &transaction)).await?
            };
            if written {
                slot.acknowledged(planned.after.to.moment());
                self.memory.goes_on(keys::of_thread(wanted.thread), &planned.after.to);
                planned.after.note(&mut state);
                held.put(state);
                return Ok(());
            }
            asked.refused();
        }
        Err(unavailable(BUSY).into())
    }

    /// Creates a thread, unless an earlier attempt did and the thread was deleted since. As soon as its row exists, no
    /// earlier attempt can be carried out any more; so the graves are checked after that.
    pub(crate) async fn create_again(
        &self,
        transaction: &Transaction,
        thread: &ThreadId,
        asked: &Asked,
        change: &Change,
    ) -> Result<bool, Trouble> {
        let written = change.write(&self.sql, &mut &*transaction).await?;
        if self.is_buried(&mut &*transaction, thread, asked.lives()).await? {
            // The next round finds the grave.
            transaction.roll_back().await?;
            return Ok(false);
        }
        transaction.commit(async { Ok(()) }).await?;
        Ok(written)
    }

    /// Flushes the log of a thread: a transaction that locks its row writes to the log, and waits for the disk and the
    /// standby.
    pub(crate) async fn flush(&self, thread: &ThreadId) -> Result<(), Trouble> {
        let slot = self.threads.slot(thread);
        let known = slot.known();
        let key = keys::of_thread(thread);
        let mut lease = self.connections.lease().await?;
        let rows = lease.query(&self.sql.lock, &[(&key, Type::UUID)]).await?;
        let found = rows.first().map(|row| ThreadRow::of(thread, row)).transpose()?.map(|row| row.history);
        self.agree(&mut lease, thread, &known, found.as_ref()).await?;
        let Some(newest) = known.newest() else { return Ok(()) };
        let gone = match found.as_ref().map(|found| found.since(&newest)) {
            Some(Since::Missing) => true,
            None | Some(Since::AnotherLife) if known.is_unflushed() => {
                !self.is_buried(&mut lease, thread, vec![newest.life]).await?
            }
            _ => false,
        };
        if gone {
            // There is nothing left to flush.
            return Err(Trouble::Lost(lost(thread, newest.mark, found_mark(found.as_ref()))));
        }
        slot.flushed(newest);
        Ok(())
    }

    /// Locks a thread and reads what a writer must know beyond `state`.
    async fn look(
        &self,
        transaction: &Transaction,
        wanted: &Wanted<'_>,
        state: &ThreadState,
    ) -> Result<Vec<Row>, Trouble> {
        let thread = keys::of_thread(wanted.thread);
        let ns = keys::of_namespace(wanted.namespace);
        let ids = wanted.ids.iter().copied().chain(known_head(state, wanted.namespace));
        let ids: Vec<Uuid> = ids.map(keys::uuid).collect();
        let (epoch, next) = known(state);
        let lock: [Param<'_>; 1] = [(&thread, Type::UUID)];
        let mut look: Vec<Param<'_>> = vec![
            (&thread, Type::UUID),
            (&ns, Type::BYTEA),
            (&ids, Type::UUID_ARRAY),
            (&epoch, Type::INT8),
            (&next, Type::INT8_ARRAY),
        ];
        let parent = wanted.children_of.map(keys::uuid);
        let mut statement = &self.sql.look;
        if let Some(parent) = &parent {
            look.push((parent, Type::UUID));
            statement = &self.sql.look_below;
        }
        let lock = transaction.query(&self.sql.lock, &lock);
        let (_, rows) = in_order(lock, transaction.query(statement, &look)).await?;
        Ok(rows)
    }
}

/// The epoch that a writer knows, and in each space the first unknown sequence number.
pub(crate) fn known(state: &ThreadState) -> (i64, Vec<i64>) {
    let next = SPACES.map(|space| space.seq(state.index.next[space as usize]));
    (state.mark().map_or(0, |mark| mark.epoch), next.to_vec())
}

/// The mark that was found, for an error.
fn found_mark(found: Option<&History>) -> String {
    found.map_or_else(|| "no such thread".to_owned(), |found| found.mark.to_string())
}

/// The remembered head of a namespace.
fn known_head(state: &ThreadState, namespace: &Namespace) -> Option<CheckpointId> {
    state.heads.peek(namespace)?.as_ref().map(|head| head.id)
}

/// Checks that a head known to be flushed still exists, where the marks do not show it: within one epoch no checkpoint
/// is removed.
fn keeps_head(wanted: &Wanted<'_>, state: &ThreadState, snapshot: &Snapshot) -> Result<(), Trouble> {
    let (Some(Since::TooLongAgo), Some(mark)) = (state.since(snapshot), state.mark()) else {
        return Ok(());
    };
    let Some(head) = known_head(state, wanted.namespace).filter(|_| mark.is_flushed()) else {
        return Ok(());
    };
    let nodes = snapshot.nodes.get(&keys::of_namespace(wanted.namespace));
    if nodes.is_some_and(|nodes| nodes.contains_key(&head)) {
        return Ok(());
    }
    let found = format!("no checkpoint {head} of it");
    Err(Trouble::Lost(lost(wanted.thread, mark, found)))
}

//! New threads, each written in one transaction by many statements; and the contract's `create_thread`, whose checkpoints
//! are written as they come.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use lru::LruCache;
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::{CheckpointId, Namespace, TaskId, ThreadId};
use threadkeep::saver::{Coming, Flush, LocalKey, check_next};
use threadkeep::{Error, Result};
use threadkeep_layout::Related;
use tokio::sync::Mutex;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::change::Change;
use crate::doubt::{Asked, Request};
use crate::draft::Draft;
use crate::error::{BUSY, NOTHING_LEFT, Trouble, in_doubt, unavailable};
use crate::history::History;
use crate::keys;
use crate::pool::{Param, Transaction};
use crate::rewrite::{PIECE, put};
use crate::rows::{Node, Snapshot};
use crate::store::Store;
use crate::thread::ThreadState;

/// How often another thread of that id may be created and deleted meanwhile.
const ROUNDS: usize = 8;
/// Remembered checkpoints: a parent that is older is read again.
const NODES: NonZeroUsize = NonZeroUsize::MIN.saturating_add(255);

/// What a new thread is made of.
pub(crate) trait Making: Send {
    /// Writes all of it, in a transaction that has not yet seen a thread of this id.
    fn write(
        &mut self,
        store: &Store,
        transaction: &Transaction,
    ) -> impl Future<Output = Result<Made, Trouble>> + Send;

    /// Whether it is nothing, so that it does not matter that there is a thread of this id.
    fn is_nothing(
        &mut self,
        store: &Store,
        transaction: &Transaction,
    ) -> impl Future<Output = Result<bool, Trouble>> + Send;
}

/// What was written.
pub(crate) enum Made {
    Nothing,
    /// A thread with this history.
    Thread(History),
    /// Parts. Another writer was faster, so all of it is written again.
    Parts,
}

impl Store {
    /// One attempt at making a thread. `asked` holds the requests of earlier attempts, and `again` says that one of them is
    /// in doubt.
    pub(crate) async fn make(
        &self,
        thread: &ThreadId,
        making: &Mutex<impl Making>,
        (asked, again): (&Asked, bool),
    ) -> Result<(), Trouble> {
        let mut making = making.lock().await;
        let slot = self.threads.slot(thread);
        let mut held = slot.hold(&self.threads, thread).await;
        held.take();
        for _ in 0..ROUNDS {
            let known = slot.known();
            let transaction = Transaction::on(self.connections.lease().await?);
            let snapshot = transaction.begin(self.look_if_there(&transaction, thread)).await?;
            let found = snapshot.thread.as_ref().map(|row| &row.history);
            self.agree(&mut &transaction, thread, &known, found).await?;
            slot.found(&known, found);
            if self.was_done(&transaction, (thread, found), (asked, again)).await? {
                return Ok(());
            }
            if found.is_some() {
                let nothing = making.is_nothing(self, &transaction).await?;
                transaction.roll_back().await?;
                return if nothing { Ok(()) } else { Err(Error::Stale { thread: thread.clone() }.into()) };
            }
            let to = match making.write(self, &transaction).await {
                Ok(Made::Thread(to)) => to,
                Ok(Made::Nothing) => {
                    transaction.roll_back().await?;
                    // Nothing keeps an earlier attempt from being carried out.
                    return if again { Err(in_doubt(NOTHING_LEFT).into()) } else { Ok(()) };
                }
                Ok(Made::Parts) => {
                    transaction.roll_back().await?;
                    continue;
                }
                Err(Trouble::Final(error)) => {
                    transaction.roll_back().await?;
                    // An earlier attempt may still be carried out.
                    return Err(if again { in_doubt(error.to_string()) } else { error }.into());
                }
                // Nothing is stored before the commit.
                Err(error) => return Err(error.before_it_was_sent()),
            };
            if again && self.is_buried(&mut &transaction, thread, asked.lives()).await? {
                // The next round finds the grave.
                transaction.roll_back().await?;
                continue;
            }
            asked.note(Request::Write { to: to.moment(), creates: true });
            transaction.commit(async { Ok(()) }).await?;
            slot.rewritten(&to);
            return Ok(());
        }
        Err(unavailable(BUSY).into())
    }

    /// Reads a thread that may not exist: its row, its heads, and one checkpoint, if it has any of them.
    pub(crate) async fn look_if_there(
        &self,
        transaction: &Transaction,
        thread: &ThreadId,
    ) -> Result<Snapshot, Trouble> {
        let (key, limit) = (keys::of_thread(thread), 1_i64);
        let (no_bytes, no_id) = (None::<Vec<u8>>, None::<Uuid>);
        let params: [Param<'_>; 5] = [
            (&key, Type::UUID),
            (&no_bytes, Type::BYTEA),
            (&no_id, Type::UUID),
            (&no_bytes, Type::BYTEA),
            (&limit, Type::INT8),
        ];
        let rows = transaction.query(&self.sql.newest, &params).await?;
        Snapshot::of(thread, rows).await
    }

    /// Writes all that comes.
    async fn write_what_comes(
        &self,
        transaction: &Transaction,
        growing: &mut Growing<'_>,
        coming: &mut dyn Coming,
    ) -> Result<Made, Trouble> {
        coming.rewind().await?;
        loop {
            let more = coming.next().await?;
            if more.is_empty() {
                return Ok(if growing.began { Made::Thread(growing.to.clone()) } else { Made::Nothing });
            }
            for tuples in more.chunks(PIECE.0) {
                for tuple in tuples {
                    self.find_parent(transaction, growing, tuple).await?;
                }
                let mut change = growing.plan(tuples)?;
                let pieces = change.pieces(PIECE);
                pieces.iter().chain([&change]).try_for_each(|piece| piece.check(growing.thread))?;
                if !self.write_pieces(transaction, pieces.into_iter().chain([change])).await? {
                    return Ok(Made::Parts);
                }
                growing.began = true;
            }
        }
    }

    /// Reads the parent of a checkpoint again, if it is not remembered.
    async fn find_parent(
        &self,
        transaction: &Transaction,
        growing: &mut Growing<'_>,
        tuple: &CheckpointTuple,
    ) -> Result<(), Trouble> {
        let Some(parent) = tuple.parent.filter(|_| growing.began) else { return Ok(()) };
        let place = (tuple.namespace.clone(), parent);
        // It may also be one of those that just came.
        if growing.nodes.get(&place).is_some() || growing.last.as_ref().is_none_or(|last| place > *last) {
            return Ok(());
        }
        let (key, ns, id) =
            (keys::of_thread(growing.thread), keys::of_namespace(&tuple.namespace), keys::uuid(parent));
        let params: [Param<'_>; 3] = [(&key, Type::UUID), (&ns, Type::BYTEA), (&id, Type::UUID)];
        let rows = transaction.query(&self.sql.by_id, &params).await?;
        let mut snapshot = Snapshot::of(growing.thread, rows).await?;
        if let Some(node) = snapshot.nodes.get_mut(&ns).and_then(|nodes| nodes.remove(&parent)) {
            growing.nodes.put(place, Arc::new(node));
        }
        Ok(())
    }
}

/// A thread that comes.
pub(crate) struct Comes<'a> {
    pub(crate) thread: &'a ThreadId,
    pub(crate) coming: &'a mut dyn Coming,
}

impl Making for Comes<'_> {
    async fn write(&mut self, store: &Store, transaction: &Transaction) -> Result<Made, Trouble> {
        store.write_what_comes(transaction, &mut Growing::new(self.thread), &mut *self.coming).await
    }

    async fn is_nothing(&mut self, _: &Store, _: &Transaction) -> Result<bool, Trouble> {
        Ok(false)
    }
}

/// What is known of a thread that comes.
struct Growing<'a> {
    thread: &'a ThreadId,
    to: History,
    state: ThreadState,
    lists: Related,
    nodes: LruCache<LocalKey, Arc<Node>>,
    last: Option<LocalKey>,
    /// Whether its row is written.
    began: bool,
}

impl<'a> Growing<'a> {
    fn new(thread: &'a ThreadId) -> Self {
        Self {
            thread,
            to: History::first(Flush::Now),
            state: ThreadState::absent(),
            lists: Related::default(),
            nodes: LruCache::new(NODES),
            last: None,
            began: false,
        }
    }

    /// The change that adds checkpoints, whose parents are remembered if they came.
    fn plan(&mut self, tuples: &[CheckpointTuple]) -> Result<Change> {
        let state = std::mem::replace(&mut self.state, ThreadState::absent());
        let (mut draft, mut nodes) = (Draft::new(&state), Vec::with_capacity(tuples.len()));
        let mut heads: BTreeMap<&Namespace, CheckpointId> = BTreeMap::new();
        for tuple in tuples {
            let place = (tuple.namespace.clone(), tuple.checkpoint.id);
            let parent = tuple.parent.and_then(|id| self.nodes.get(&(tuple.namespace.clone(), id)).cloned());
            let tasks: Option<Vec<TaskId>> =
                parent.as_ref().map(|parent| parent.tasks.iter().map(|row| row.task).collect());
            check_next(self.thread, tuple, self.last.as_ref(), tasks.as_deref())?;
            let node = Arc::new(put(&mut draft, &mut self.lists, tuple, parent.as_deref())?);
            let names = draft.names(&node.record)?;
            self.nodes.put(place.clone(), node.clone());
            nodes.push((&tuple.namespace, node, names));
            heads.insert(&tuple.namespace, place.1);
            self.last = Some(place);
        }
        let drafted = draft.done();
        // What was written of it has this mark, and so has what is written now.
        let from = self.began.then_some(self.to.mark);
        let mut change = Change::new(self.thread, from, &self.to, &drafted)?;
        for (namespace, node, names) in &nodes {
            change.put(namespace, node, *names);
        }
        for (namespace, head) in &heads {
            change.head(namespace, keys::uuid(*head));
        }
        self.state = state;
        drafted.note(&mut self.state);
        Ok(change)
    }
}

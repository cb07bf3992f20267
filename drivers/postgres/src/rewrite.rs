//! The contract's `rewrite_thread` and `delete_thread`.
//!
//! Rows that stay keep the element numbers that they refer to. Only sentinels are recomputed, because their paths may
//! begin elsewhere now. At the end, unreferenced elements are deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::{CheckpointId, Namespace, ThreadId};
use threadkeep::saver::{Flush, Outline, Revision, Rewrite};
use threadkeep::{Error, Result};
use threadkeep_layout::Related;
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::aside::aside;
use crate::change::Change;
use crate::doubt::{Asked, Request};
use crate::draft::Draft;
use crate::error::{BUSY, Trouble, unavailable};
use crate::history::{History, Mark, Since};
use crate::keys;
use crate::plan::{described, kept, new_task, seed_of};
use crate::pool::{Param, Transaction, in_order};
use crate::read::{namespace_of, revision};
use crate::record::{CheckpointRecord, Kept, StoredChannel, TaskRecord};
use crate::rows::{Node, Snapshot, ThreadRow, column};
use crate::sql::Sql;
use crate::store::{Store, known};
use crate::thread::ThreadState;
use crate::used::Used;

/// How often a thread may be created or deleted between reading and writing it.
const ROUNDS: usize = 8;
/// Maximum checkpoints, and elements, of a new thread that one statement writes, and the bytes of each, except for a
/// single one with more. A server takes no statement of a gigabyte, and holds several copies of one while it carries
/// it out.
pub(crate) const PIECE: (usize, usize) = (128, 1 << 20);
/// The longest pause between two such statements.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

impl Store {
    /// One attempt. `epoch` is that of the rewritten thread; `asked` holds the requests of earlier attempts, and
    /// `again` says that one of them is in doubt.
    pub(crate) async fn rewrite(
        &self,
        thread: &ThreadId,
        (expected, rewrite): (&Revision, &Arc<Rewrite>),
        epoch: i64,
        (asked, again): (&Asked, bool),
    ) -> Result<(), Trouble> {
        let slot = self.threads.slot(thread);
        let mut held = slot.hold(&self.threads, thread).await;
        // It is not put back: known element numbers may be gone afterwards.
        let mut state = held.take().unwrap_or_else(ThreadState::absent);
        for _ in 0..ROUNDS {
            let known = slot.known();
            let transaction = Transaction::on(self.connections.lease().await?);
            let rows = transaction.begin(self.look_at_all(&transaction, thread, &state)).await?;
            let mut snapshot = Snapshot::of(thread, rows).await?;
            let found = snapshot.thread.as_ref().map(|row| row.history.clone());
            self.agree(&mut &transaction, thread, &known, found.as_ref()).await?;
            if state.since(&snapshot).is_some_and(|since| since != Since::Contained) {
                state = ThreadState::absent();
                let rows = self.look_at_all(&transaction, thread, &state).await?;
                snapshot = Snapshot::of(thread, rows).await?;
            }
            slot.found(&known, found.as_ref());
            state = ThreadState::found(state, &snapshot);
            if self.was_done(&transaction, (thread, found.as_ref()), (asked, again)).await? {
                return Ok(());
            }
            let to = match &found {
                Some(found) => found.rewritten(epoch),
                None => History::first(Flush::Now),
            };
            let planned = aside(rewrite.put.len() + snapshot.size(), {
                let (thread, expected, rewrite) = (thread.clone(), expected.clone(), rewrite.clone());
                let to = to.clone();
                move || plan(&thread, &state, &snapshot, &expected, &rewrite, &to)
            });
            // As above.
            state = ThreadState::absent();
            let (mut change, removal) = match planned.await {
                Ok(Planned::Change(change, removal)) => (change, removal),
                Ok(Planned::Nothing) => return transaction.roll_back().await,
                Ok(Planned::Deletion) => {
                    let life = found.map(|found| found.life);
                    if let Some(life) = life {
                        asked.note(Request::Removal { life });
                    }
                    transaction.commit(self.delete_in(&transaction, thread, life.as_slice())).await?;
                    if let Some(life) = life {
                        slot.deleted(life);
                    }
                    self.memory.forget(keys::of_thread(thread));
                    return Ok(());
                }
                Err(error) => {
                    transaction.roll_back().await?;
                    return Err(error);
                }
            };
            let pieces = change.pieces(PIECE);
            let fit = pieces.iter().chain([&*change]).try_for_each(|piece| piece.check(thread));
            if let Err(error) = fit {
                transaction.roll_back().await?;
                return Err(error.into());
            }
            if !self.write_pieces(&transaction, pieces.into_iter()).await? {
                transaction.roll_back().await?;
                continue;
            }
            asked.note(Request::Write { to: to.moment(), creates: found.is_none() });
            let write = async {
                let mut asks = &transaction;
                let write = change.write(&self.sql, &mut asks);
                let Some(removal) = &removal else { return write.await };
                // In the same round trip.
                let removes = removal.remove(&transaction, &self.sql, (keys::of_thread(thread), to.mark));
                Ok(in_order(write, removes).await?.0)
            };
            let written = if again && found.is_none() {
                // A new thread has nothing to remove.
                self.create_again(&transaction, thread, asked, &change).await?
            } else {
                transaction.commit(write).await?
            };
            if written {
                slot.rewritten(&to);
                self.memory.forget(keys::of_thread(thread));
                return Ok(());
            }
            asked.refused();
        }
        Err(unavailable(BUSY).into())
    }

    /// Writes the pieces of a change, and pauses after each for as long as it took, so that the server has time for other
    /// clients. Returns whether the thread was as expected.
    pub(crate) async fn write_pieces(
        &self,
        transaction: &Transaction,
        pieces: impl Iterator<Item = Change> + Send,
    ) -> Result<bool, Trouble> {
        for piece in pieces {
            let began = Instant::now();
            if !piece.write(&self.sql, &mut &*transaction).await? {
                return Ok(false);
            }
            tokio::time::sleep(began.elapsed().min(PAUSE)).await;
        }
        Ok(true)
    }

    /// The contract's `delete_thread`. `target` is what the first attempt found: the life of the thread, or none. Only
    /// that is deleted: if a later attempt finds another life, the target has ended, and the thread was created again.
    ///
    /// A thread may be deleted even if its row is damaged. What such a row says cannot be compared with what is known, and the
    /// thread gets a grave for each life that it may be in, so that others learn that it was deleted.
    pub(crate) async fn delete_thread(
        &self,
        thread: &ThreadId,
        target: &OnceLock<Option<i64>>,
    ) -> Result<(), Trouble> {
        let slot = self.threads.slot(thread);
        let mut held = slot.hold(&self.threads, thread).await;
        held.take();
        let known = slot.known();
        let transaction = Transaction::on(self.connections.lease().await?);
        let (key, nonce) = (keys::of_thread(thread), Uuid::from_bytes(rand::random()));
        let claim: [Param<'_>; 2] = [(&key, Type::UUID), (&nonce, Type::UUID)];
        let rows = transaction.begin(transaction.query(&self.sql.claim, &claim)).await?;
        let lives = match claimed(thread, &rows, nonce)? {
            Claimed::Damaged(said) => known.newest().map(|then| then.life).into_iter().chain(said).collect(),
            Claimed::Sound(found) => {
                self.agree(&mut &transaction, thread, &known, found.as_ref()).await?;
                found.map(|found| found.life).into_iter().collect::<Vec<_>>()
            }
        };
        let target = *target.get_or_init(|| lives.first().copied());
        if lives.is_empty() || target.is_some_and(|life| lives.contains(&life)) {
            transaction.commit(self.delete_in(&transaction, thread, &lives)).await?;
        } else {
            // The claim has written to the log, so this waits for the disk and the standby.
            transaction.commit(async { Ok(()) }).await?;
        }
        if let Some(life) = target {
            slot.deleted(life);
        }
        self.memory.forget(key);
        Ok(())
    }

    /// One attempt at the contract's `delete_seen`: see [`Self::rewrite`].
    pub(crate) async fn delete_seen(
        &self,
        thread: &ThreadId,
        expected: &Revision,
        (asked, again): (&Asked, bool),
    ) -> Result<(), Trouble> {
        let slot = self.threads.slot(thread);
        let mut held = slot.hold(&self.threads, thread).await;
        held.take();
        let (key, known) = (keys::of_thread(thread), slot.known());
        let transaction = Transaction::on(self.connections.lease().await?);
        let lock: [Param<'_>; 1] = [(&key, Type::UUID)];
        let rows = transaction.begin(transaction.query(&self.sql.lock, &lock)).await?;
        let found = rows.first().map(|row| ThreadRow::of(thread, row)).transpose()?.map(|row| row.history);
        self.agree(&mut &transaction, thread, &known, found.as_ref()).await?;
        slot.found(&known, found.as_ref());
        if self.was_done(&transaction, (thread, found.as_ref()), (asked, again)).await? {
            return Ok(());
        }
        if found.as_ref().map_or_else(Revision::absent, |found| revision(found.mark)) != *expected {
            transaction.roll_back().await?;
            return Err(Error::Stale { thread: thread.clone() }.into());
        }
        let Some(History { life, .. }) = found else { return transaction.roll_back().await };
        asked.note(Request::Removal { life });
        transaction.commit(self.delete_in(&transaction, thread, &[life])).await?;
        slot.deleted(life);
        self.memory.forget(key);
        Ok(())
    }

    /// Removes a thread whose row the transaction has locked or inserted, so that no one can write to it or create it
    /// until the transaction ends. Each statement sees everything that was committed before it began.
    async fn delete_in(
        &self,
        transaction: &Transaction,
        thread: &ThreadId,
        lives: &[i64],
    ) -> Result<(), Trouble> {
        transaction.execute(&self.sql.delete(keys::of_thread(thread), lives)).await
    }

    async fn look_at_all(
        &self,
        transaction: &Transaction,
        thread: &ThreadId,
        state: &ThreadState,
    ) -> Result<Vec<Row>, Trouble> {
        let key = keys::of_thread(thread);
        let (epoch, next) = known(state);
        let lock: [Param<'_>; 1] = [(&key, Type::UUID)];
        let look: [Param<'_>; 3] = [(&key, Type::UUID), (&epoch, Type::INT8), (&next, Type::INT8_ARRAY)];
        let lock = transaction.query(&self.sql.lock, &lock);
        let (_, rows) = in_order(lock, transaction.query(&self.sql.look_at_all, &look)).await?;
        Ok(rows)
    }
}

/// A claimed thread.
enum Claimed {
    /// Its history; none if it does not exist.
    Sound(Option<History>),
    /// The lives that it may be in.
    Damaged(Vec<i64>),
}

/// What the claim with this nonce found. Only the row that it inserted has the nonce: another one may be empty, too, if it is
/// damaged.
fn claimed(thread: &ThreadId, rows: &[Row], nonce: Uuid) -> Result<Claimed> {
    let row = rows.first().ok_or_else(|| Error::corrupt("an answer of the database", "no row of one"))?;
    if column::<Uuid>(row, 5)? == nonce {
        return Ok(Claimed::Sound(None));
    }
    Ok(match ThreadRow::of(thread, row) {
        Ok(row) => Claimed::Sound(Some(row.history)),
        Err(_) => Claimed::Damaged(ThreadRow::possible_lives(row)?),
    })
}

/// The plan of a rewrite.
enum Planned {
    Nothing,
    /// The thread is removed as a whole.
    Deletion,
    /// Rows are written, and then, if the thread existed, others are removed.
    Change(Box<Change>, Option<Removal>),
}

/// The rows that a rewrite removes from a thread.
struct Removal {
    /// Checkpoints.
    ns: Vec<Vec<u8>>,
    ids: Vec<Uuid>,
    /// Runs of elements.
    first: Vec<i64>,
    last: Vec<i64>,
    /// Namespaces that have no checkpoint any more.
    headless: Vec<Vec<u8>>,
}

impl Removal {
    /// Removes them, if the thread has this mark now.
    async fn remove(&self, transaction: &Transaction, sql: &Sql, at: (Uuid, Mark)) -> Result<(), Trouble> {
        let (thread, mark) = at;
        let params: [Param<'_>; 8] = [
            (&thread, Type::UUID),
            (&mark.epoch, Type::INT8),
            (&mark.revision, Type::INT8),
            (&self.ns, Type::BYTEA_ARRAY),
            (&self.ids, Type::UUID_ARRAY),
            (&self.first, Type::INT8_ARRAY),
            (&self.last, Type::INT8_ARRAY),
            (&self.headless, Type::BYTEA_ARRAY),
        ];
        transaction.query(&sql.remove, &params).await?;
        Ok(())
    }
}

fn plan(
    thread: &ThreadId,
    state: &ThreadState,
    snapshot: &Snapshot,
    expected: &Revision,
    rewrite: &Rewrite,
    to: &History,
) -> Result<Planned> {
    if state.mark().map_or_else(Revision::absent, revision) != *expected {
        return Err(Error::Stale { thread: thread.clone() });
    }
    let mut stored = BTreeMap::new();
    for (ns, nodes) in &snapshot.nodes {
        let Some(namespace) = namespace_of(snapshot, ns) else { continue };
        stored.extend(nodes.iter().map(|(id, node)| ((namespace.clone(), *id), node)));
    }
    rewrite.check(thread, stored.iter().map(|(place, node)| (place.clone(), outline(node))).collect())?;
    if rewrite.is_empty() {
        return Ok(Planned::Nothing);
    }

    let (mut draft, mut lists) = (Draft::new(state), Related::default());
    let puts: BTreeMap<_, _> =
        rewrite.put.iter().map(|tuple| ((tuple.namespace.clone(), tuple.checkpoint.id), tuple)).collect();
    let places: BTreeSet<_> = stored.keys().chain(puts.keys()).cloned().collect();
    let mut left: BTreeMap<(Namespace, CheckpointId), (Node, u32)> = BTreeMap::new();
    // Parents come before their children.
    for place in places.into_iter().filter(|place| !rewrite.remove.contains(place)) {
        let parent = |id: Option<CheckpointId>| Some(&left.get(&(place.0.clone(), id?))?.0);
        let node = match (puts.get(&place), stored.get(&place)) {
            (Some(tuple), _) => put(&mut draft, &mut lists, tuple, parent(tuple.parent))?,
            (None, Some(node)) => stay(node, parent(node.record.parent)),
            (None, None) => continue,
        };
        let names = draft.names(&node.record)?;
        left.insert(place, (node, names));
    }
    if left.is_empty() {
        return Ok(Planned::Deletion);
    }

    let drafted = draft.done();
    let mut used = Used::new(thread, snapshot, &drafted.elements);
    let mut change = Change::new(thread, state.mark(), to, &drafted)?;
    let mut heads: BTreeMap<&Namespace, CheckpointId> = BTreeMap::new();
    for (place, (node, names)) in &left {
        used.note(node, *names)?;
        if stored.get(place) != Some(&node) {
            change.put(&place.0, node, *names);
        }
        heads.insert(&place.0, place.1);
    }
    for (namespace, head) in &heads {
        change.head(namespace, keys::uuid(*head));
    }
    let removal = state.history.is_some().then(|| {
        let dead = used.dead(state);
        let headless = snapshot.heads.values().filter(|(namespace, _)| !heads.contains_key(namespace));
        Removal {
            ns: rewrite.remove.iter().map(|(namespace, _)| keys::of_namespace(namespace)).collect(),
            ids: rewrite.remove.iter().map(|(_, id)| keys::uuid(*id)).collect(),
            first: dead.iter().map(|[first, _]| *first).collect(),
            last: dead.iter().map(|[_, last]| *last).collect(),
            headless: headless.map(|(namespace, _)| keys::of_namespace(namespace)).collect(),
        }
    });
    Ok(Planned::Change(Box::new(change), removal))
}

fn outline(node: &Node) -> Outline {
    Outline {
        parent: node.record.parent,
        applied: node.record.applied.clone(),
        tasks: node.tasks.iter().map(|task| task.task).collect(),
    }
}

/// A checkpoint that is put.
pub(crate) fn put(
    draft: &mut Draft<'_>,
    lists: &mut Related,
    tuple: &CheckpointTuple,
    parent: Option<&Node>,
) -> Result<Node> {
    let mut channels = BTreeMap::new();
    for (channel, entry) in &tuple.checkpoint.channels {
        let stored = lists.stored(&tuple.namespace, channel, entry.version, &entry.stored);
        let kept = kept(draft, &tuple.namespace, channel, entry.version, &stored, parent)?;
        channels.insert(channel.clone(), StoredChannel { version: entry.version, kept });
    }
    let record = CheckpointRecord {
        parent: tuple.parent,
        next: tuple.checkpoint.next.clone(),
        applied: tuple.checkpoint.applied.clone(),
        channels,
        ..described(draft, &tuple.metadata)?
    };
    let tasks = tuple.writes.iter().map(|task| new_task(draft, task)).collect::<Result<Vec<TaskRecord>>>()?;
    Ok(Node { id: tuple.checkpoint.id, record, tasks })
}

/// A checkpoint that is neither removed nor put.
fn stay(node: &Node, parent: Option<&Node>) -> Node {
    let mut node = node.clone();
    if let Some(parent) = parent {
        for (channel, entry) in &mut node.record.channels {
            if let Kept::Sentinel(seed) = &mut entry.kept {
                *seed = seed_of(parent, channel);
            }
        }
    }
    node
}

#[cfg(test)]
mod tests;

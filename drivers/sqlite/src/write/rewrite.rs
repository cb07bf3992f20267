//! The contract's `rewrite_thread` of a short thread, inside a transaction of the writer. It reads every row, so a long
//! thread is written again beside itself, see `stage`.
//!
//! Rows that stay keep their ordinals, and the elements that they refer to keep their sequence numbers. Only rows that
//! hold entries of a changed one are rewritten. At the end, unreferenced elements are deleted.

use std::collections::{BTreeMap, HashMap};

use threadkeep::checkpoint::{ChannelEntry, CheckpointTuple, TaskWrites};
use threadkeep::id::{CheckpointId, Namespace, TaskId, ThreadId};
use threadkeep::saver::{Outline, Revision, Rewrite};
use threadkeep::{Error, Result};
use threadkeep_layout::Related;

use crate::care::used::Used;
use crate::read::view::{Channel, Read, View};
use crate::rows::checkpoints::{self, CheckpointRow};
use crate::rows::directory::{self, Chain, Thread, ThreadKey};
use crate::rows::element::Elements;
use crate::rows::record::{CheckpointRecord, NameKey, Ordinal, TaskRecord};
use crate::sql::Db;
use crate::write::commit::{WriterState, places};
use crate::write::thread::ThreadState;

/// A chain with all of its rows, oldest first.
pub(crate) struct ChainRows {
    pub(crate) namespace: Namespace,
    pub(crate) chain: Chain,
    pub(crate) rows: Vec<CheckpointRow>,
}

/// Every row of a thread.
pub(crate) fn rows_of(db: &Db, thread: ThreadKey) -> Result<Vec<ChainRows>> {
    let chains = directory::chains(db, thread)?.into_iter();
    let all = chains.map(|(namespace, chain)| {
        let rows = checkpoints::all(db, chain.key)?;
        Ok(ChainRows { namespace, chain, rows })
    });
    all.collect()
}

/// A digest of every row, and of the thread's rewrite count. It never repeats: ordinals and thread numbers are never
/// reused, rows only grow, and every other change is counted. The rows alone would not suffice, because the numbers of
/// freed elements are reused.
pub(crate) fn revision(thread: Thread, chains: &[ChainRows]) -> Revision {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&thread.key.to_le_bytes());
    hasher.update(&thread.rewrites.to_le_bytes());
    for ChainRows { chain, rows, .. } in chains {
        hasher.update(&chain.key.to_le_bytes());
        for row in rows {
            row.digest(&mut hasher);
        }
    }
    Revision::new(*hasher.finalize().as_bytes())
}

/// The revision of a thread.
pub(crate) fn revision_of(db: &Db, thread: &ThreadId) -> Result<Revision> {
    let Some(thread) = directory::thread(db, thread)? else { return Ok(Revision::absent()) };
    Ok(revision(thread, &rows_of(db, thread.key)?))
}

/// A checkpoint as it will be stored.
struct Planned {
    ordinal: Ordinal,
    id: CheckpointId,
    record: CheckpointRecord,
    tasks: Vec<TaskRecord>,
    channels: Vec<Channel>,
}

/// A chain as it will be stored, by ordinal.
type Plan = BTreeMap<Ordinal, Planned>;

impl WriterState {
    pub(crate) fn rewrite(
        &mut self,
        thread: &ThreadId,
        expected: &Revision,
        rewrite: &Rewrite,
    ) -> Result<()> {
        let known = directory::thread(&self.db, thread)?;
        let key = known.map(|known| known.key);
        let mut chains = key.map(|key| rows_of(&self.db, key)).transpose()?.unwrap_or_default();
        let found = known.map_or_else(Revision::absent, |known| revision(known, &chains));
        if found != *expected {
            return Err(Error::Stale { thread: thread.clone() });
        }
        let outlines = self.outlines(thread, key, &chains)?;
        rewrite.check(thread, outlines)?;
        if rewrite.is_empty() {
            return Ok(());
        }

        // From here on the command changes things; the next command reads the thread again.
        self.threads.forget(thread);
        let known = match known {
            Some(known) => known,
            None => directory::add_thread(&self.db, thread)?,
        };
        let (key, mut state) = (known.key, ThreadState::new(known));
        for tuple in &rewrite.put {
            if !chains.iter().any(|chain| chain.namespace == tuple.namespace) {
                let chain = directory::add_chain(&self.db, key, &tuple.namespace)?;
                chains.push(ChainRows { namespace: tuple.namespace.clone(), chain, rows: Vec::new() });
            }
        }
        let mut used = Used::default();
        let mut left = false;
        for chain in &chains {
            let work = ChainRewrite {
                store: self,
                view: View::new(&self.db, &self.names, thread, key),
                state: &mut state,
                chain: chain.chain,
                plan: Plan::new(),
                ordinals: HashMap::new(),
                lists: Related::default(),
            };
            let plan = work.run(thread, chain, rewrite)?;
            left |= !plan.is_empty();
            let mut elements = Elements::new(&self.db, key);
            for planned in plan.values() {
                used.note(&planned.record, &planned.tasks, &mut elements)?;
            }
        }
        if left {
            used.keep_only(&self.db, key)?;
            directory::rewritten(&self.db, thread)
        } else {
            self.drop_thread(key)
        }
    }

    fn outlines(
        &self,
        thread: &ThreadId,
        key: Option<ThreadKey>,
        chains: &[ChainRows],
    ) -> Result<BTreeMap<(Namespace, CheckpointId), Outline>> {
        let mut outlines = BTreeMap::new();
        let Some(key) = key else { return Ok(outlines) };
        let mut view = View::new(&self.db, &self.names, thread, key);
        for ChainRows { namespace, chain, rows } in chains {
            for row in rows {
                let read = view.read(chain.key, row)?;
                let parent = view.parent(chain.key, &read)?;
                let outline = Outline {
                    parent: parent.as_ref().map(|parent| parent.id),
                    applied: applied(&view, &read, parent.as_deref())?,
                    tasks: read.tasks.iter().map(|task| task.task).collect(),
                };
                outlines.insert((namespace.clone(), read.id), outline);
            }
        }
        Ok(outlines)
    }
}

/// A chain during its rewrite, from its oldest checkpoint on.
struct ChainRewrite<'a> {
    store: &'a WriterState,
    view: View<'a>,
    state: &'a mut ThreadState,
    chain: Chain,
    plan: Plan,
    ordinals: HashMap<CheckpointId, Ordinal>,
    /// The lists that it has stored. One that is kept as it is stored is not among them: the thread's state does not
    /// remember where its elements are.
    lists: Related,
}

impl ChainRewrite<'_> {
    fn run(mut self, thread: &ThreadId, stored: &ChainRows, rewrite: &Rewrite) -> Result<Plan> {
        let (db, key) = (&self.store.db, self.chain.key);
        let puts = rewrite.put.iter().filter(|tuple| tuple.namespace == stored.namespace);
        let mut puts: BTreeMap<CheckpointId, &CheckpointTuple> =
            puts.map(|tuple| (tuple.checkpoint.id, tuple)).collect();
        // Before anything is removed: rows that stay may hold entries of it.
        for row in &stored.rows {
            self.view.read(key, row)?;
        }
        let mut last = self.chain.floor;
        for row in &stored.rows {
            last = last.max(row.ordinal);
            if rewrite.remove.contains(&(stored.namespace.clone(), row.id)) {
                checkpoints::remove(db, key, row.ordinal)?;
                continue;
            }
            let read = self.view.read(key, row)?;
            let planned = match puts.remove(&row.id) {
                Some(tuple) => self.put(row.ordinal, tuple, Some(&read))?,
                None => self.stay(&read)?,
            };
            if planned.record != read.record {
                checkpoints::set_body(db, key, row.ordinal, row.id, &planned.record)?;
            }
            if planned.tasks != read.tasks {
                checkpoints::set_tasks(db, key, row.ordinal, &planned.tasks)?;
            }
            self.add(planned);
        }
        if self.plan.keys().next_back().is_some_and(|newest| *newest < last) && self.chain.floor < last {
            directory::set_floor(db, self.state.key, &stored.namespace, Chain { key, floor: last })?;
        }
        for (id, tuple) in puts {
            last = last.checked_add(1).ok_or_else(|| {
                Error::InvalidInput(format!("thread {thread} cannot hold more checkpoints"))
            })?;
            let planned = self.put(last, tuple, None)?;
            checkpoints::add(db, key, last, id, &planned.record)?;
            if !planned.tasks.is_empty() {
                checkpoints::set_tasks(db, key, last, &planned.tasks)?;
            }
            self.add(planned);
        }
        if self.plan.is_empty() {
            directory::drop_chain(db, key)?;
        }
        Ok(self.plan)
    }

    fn add(&mut self, planned: Planned) {
        self.ordinals.insert(planned.id, planned.ordinal);
        self.plan.insert(planned.ordinal, planned);
    }

    /// Puts a checkpoint. `old` is what is stored under its id.
    fn put(&mut self, ordinal: Ordinal, tuple: &CheckpointTuple, old: Option<&Read>) -> Result<Planned> {
        let (store, key) = (self.store, self.chain.key);
        let old_channels = old.map(|old| self.view.channels(key, old)).transpose()?.unwrap_or_default();
        let mut channels = Vec::with_capacity(tuple.checkpoint.channels.len());
        for (channel, entry) in &tuple.checkpoint.channels {
            let name = store.name(channel.as_str())?;
            let have = find(&old_channels, name).filter(|have| have.version == entry.version);
            let kept = match have {
                Some(have) if self.view.stored(key, have)? == entry.stored => have.kept.clone(),
                _ => {
                    let (namespace, version) = (&tuple.namespace, entry.version);
                    let stored = self.lists.stored(namespace, channel, version, &entry.stored);
                    store.kept(self.state, (key, name), &ChannelEntry { version, stored })?
                }
            };
            channels.push(Channel { name, origin: ordinal, version: entry.version, kept });
        }
        let tasks = self.tasks(&tuple.writes, old)?;
        let parent = tuple.parent.and_then(|id| self.plan.get(self.ordinals.get(&id)?));
        for channel in &mut channels {
            let held = parent.and_then(|parent| find(&parent.channels, channel.name));
            if let Some(held) =
                held.filter(|held| held.version == channel.version && held.kept == channel.kept)
            {
                channel.origin = held.origin;
            }
        }
        let from = parent.map(|parent| (parent.ordinal, &parent.tasks[..]));
        let checkpoint = (&tuple.checkpoint, &tuple.metadata);
        let record = store.record(self.state, checkpoint, from, &channels, ordinal)?;
        Ok(Planned { ordinal, id: tuple.checkpoint.id, record, tasks, channels })
    }

    fn tasks(&mut self, wanted: &[TaskWrites], old: Option<&Read>) -> Result<Vec<TaskRecord>> {
        let mut tasks = Vec::with_capacity(wanted.len());
        for task in wanted {
            let record = old.and_then(|old| old.tasks.iter().find(|record| record.task == task.task));
            tasks.push(match record {
                Some(record) if self.view.task_writes(record, |_| true)? == *task => record.clone(),
                _ => self.store.task(self.state, self.chain.key, task)?,
            });
        }
        Ok(tasks)
    }

    /// A checkpoint that is neither removed nor put. It now stores the entries itself that it held from one that is.
    fn stay(&mut self, read: &Read) -> Result<Planned> {
        let mut channels = self.view.channels(self.chain.key, read)?;
        for channel in &mut channels {
            let origin = self.plan.get(&channel.origin);
            if origin.and_then(|origin| find(&origin.channels, channel.name)) != Some(channel) {
                channel.origin = read.ordinal;
            }
        }
        let mut record = read.record.clone();
        record.channels =
            channels.iter().map(|channel| (channel.name, channel.entry(read.ordinal))).collect();
        let parent = self.view.parent(self.chain.key, read)?;
        if let Some(parent) = parent.and_then(|old| Some((self.plan.get(&old.ordinal)?, old))) {
            record.applied = places(&applied(&self.view, read, Some(&parent.1))?, &parent.0.tasks);
        }
        Ok(Planned { ordinal: read.ordinal, id: read.id, record, tasks: read.tasks.clone(), channels })
    }
}

fn applied(view: &View<'_>, read: &Read, parent: Option<&Read>) -> Result<Vec<TaskId>> {
    let Some(parent) = parent else { return Ok(Vec::new()) };
    Ok(view.applied(read, parent)?.into_iter().map(|task| task.task).collect())
}

fn find(channels: &[Channel], name: NameKey) -> Option<&Channel> {
    channels.iter().find(|channel| channel.name == name)
}

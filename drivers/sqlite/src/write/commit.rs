//! The writing methods of the contract, each inside a transaction of the writer. They check everything before they
//! change anything, so that a refusal leaves what the writer remembers intact.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use threadkeep::checkpoint::{ChannelEntry, Checkpoint, CheckpointKey, Stored, TaskWrites};
use threadkeep::id::{CheckpointId, NodeName, TaskId, ThreadId};
use threadkeep::metadata::Metadata;
use threadkeep::saver::{Flush, Revision, Rewrite, StepCommit};
use threadkeep::{Error, Result};

use crate::read::view::{Channel, View};
use crate::rows::checkpoints;
use crate::rows::directory::{self, Chain, ChainKey};
use crate::rows::names::Names;
use crate::rows::pack;
use crate::rows::record::{CheckpointRecord, Kept, NameKey, Ordinal, TaskRecord, WriteRecord};
use crate::sql::Db;
use crate::stats::Counters;
use crate::write::copy::Rows;
use crate::write::remains::Clearing;
use crate::write::stage::{Naming, Piece};
use crate::write::thread::{Node, ThreadState, Threads};

/// One writing call of the contract.
#[derive(Debug)]
pub(crate) enum Work {
    Commit(Box<StepCommit>),
    PutWrites(CheckpointKey, TaskWrites),
    DeleteThread(ThreadId),
    Rewrite(ThreadId, Revision, Box<Rewrite>),
    /// A piece of a new thread that has no name yet.
    Stage(Box<Piece>),
    /// A piece of a copy of a thread, which has no name yet either.
    Copy(Box<Rows>),
    /// Such a thread gets its name.
    Name(Box<Naming>),
    /// Such a thread is deleted.
    Discard(String),
    /// Rows of a deleted thread are deleted.
    Clear(Clearing),
    /// Of these numbers, the rows that belong to no thread are deleted.
    Sweep(Vec<u32>),
    /// What nothing in a thread refers to is deleted.
    Tidy(ThreadId),
    /// The dictionary of this number.
    Dictionary(pack::DictionaryKey, Vec<u8>),
    /// Only a flush.
    Flush,
}

impl Work {
    /// When it is on the disk.
    pub(crate) fn flush(&self) -> Flush {
        match self {
            Self::Commit(step) => step.flush,
            Self::Stage(_) | Self::Copy(_) | Self::Clear(_) => Flush::WithNext,
            _ => Flush::Now,
        }
    }
}

/// The database as the writer sees it, and what it remembers of it.
pub(crate) struct WriterState {
    pub(crate) db: Db,
    pub(crate) names: Names,
    pub(crate) threads: Threads,
    /// Checkpoints in a piece of a thread.
    pub(crate) piece: usize,
    /// Whether rows of deleted threads may be left.
    pub(crate) remains: Arc<AtomicBool>,
    counters: Arc<Counters>,
}

impl WriterState {
    pub(crate) fn new(db: Db, (piece, remains): (usize, Arc<AtomicBool>), counters: Arc<Counters>) -> Self {
        Self { db, names: Names::default(), threads: Threads::default(), piece, remains, counters }
    }

    /// Forgets everything that can be read again.
    pub(crate) fn forget(&mut self) {
        self.threads = Threads::default();
        self.others_wrote();
        self.db.forget_dictionary();
    }

    /// Forgets what is not true any more after another connection has written to the database.
    pub(crate) fn others_wrote(&mut self) {
        self.names = Names::default();
        self.threads.others_wrote();
        self.db.others_wrote();
    }

    /// Executes one command. After an error, its changes must be rolled back; what was remembered of its thread is
    /// forgotten, unless the command was refused before it changed anything.
    pub(crate) fn apply(&mut self, work: &Work) -> Result<()> {
        let result = match work {
            Work::Commit(step) => self.on_thread(&step.thread, |this, state| this.commit(step, state)),
            Work::PutWrites(at, task) => {
                self.on_thread(&at.thread, |this, state| this.put_writes(at, task, state))
            }
            Work::DeleteThread(thread) => self.delete_thread(thread),
            Work::Sweep(numbers) => self.sweep(numbers),
            Work::Tidy(thread) => self.tidy(thread),
            Work::Dictionary(number, bytes) => pack::add_dictionary(&self.db, *number, bytes),
            Work::Flush => Ok(()),
            Work::Rewrite(thread, expected, rewrite) => self.rewrite(thread, expected, rewrite),
            Work::Stage(piece) => self.stage(piece),
            Work::Copy(rows) => self.copy(rows),
            Work::Name(naming) => self.name_thread(naming),
            Work::Discard(token) => self.discard(token),
            Work::Clear(clearing) => self.clear(clearing),
        };
        if result.as_ref().is_err_and(|error| !is_refusal(error)) {
            self.names = Names::default();
        }
        result
    }

    fn on_thread(
        &mut self,
        thread: &ThreadId,
        run: impl FnOnce(&Self, &mut Option<Box<ThreadState>>) -> Result<()>,
    ) -> Result<()> {
        let mut state = self.threads.take(&self.db, thread)?;
        let result = run(self, &mut state);
        if let (Some(state), true) =
            (state, result.as_ref().is_ok() || result.as_ref().is_err_and(is_refusal))
        {
            self.threads.put(thread.clone(), state);
        }
        result
    }

    fn commit(&self, step: &StepCommit, state: &mut Option<Box<ThreadState>>) -> Result<()> {
        let db = &self.db;
        let id = step.checkpoint.id;
        let chain = match state {
            Some(state) => state.chain(db, &self.names, &step.thread, &step.namespace)?,
            None => None,
        };
        let head = chain.as_ref().and_then(|chain| chain.head.clone());
        let head_id = head.as_ref().map(|head| head.id);
        if let (Some(chain), true) = (&chain, head_id >= Some(id))
            && checkpoints::find(db, chain.chain.key, id)?.is_some()
        {
            return Ok(());
        }
        if head_id != step.expected_head {
            return Err(Error::Conflict {
                thread: step.thread.clone(),
                namespace: step.namespace.clone(),
                expected: step.expected_head,
                found: head_id,
            });
        }
        let parent = match (step.parent, &head, &chain, &*state) {
            (None, ..) => None,
            (Some(parent), Some(head), ..) if parent == head.id => Some(head.clone()),
            (Some(parent), _, Some(chain), Some(state)) => {
                let row = checkpoints::find(db, chain.chain.key, parent)?
                    .ok_or_else(|| not_found(&step.thread, parent))?;
                Some(state.node(db, &self.names, &step.thread, chain.chain, &row)?)
            }
            (Some(parent), ..) => return Err(not_found(&step.thread, parent)),
        };
        if let Some(parent) = parent.as_deref() {
            self.check_parent(step, parent)?;
        }
        check_applied(step, parent.as_ref().map_or(&[], |parent| &parent.tasks))?;

        // From here on the command changes things.
        let state = match state {
            Some(state) => state,
            none => none.insert(ThreadState::new(directory::add_thread(db, &step.thread)?)),
        };
        let chain = match chain {
            Some(chain) => chain.chain,
            None => directory::add_chain(db, state.key, &step.namespace)?,
        };
        let last = head.as_ref().map_or(0, |head| head.ordinal).max(chain.floor);
        let ordinal = last.checked_add(1).ok_or_else(|| {
            Error::InvalidInput(format!("thread {} cannot hold more checkpoints", step.thread))
        })?;
        let tasks = match &parent {
            Some(parent) => self.put_tasks(state, &step.thread, chain.key, parent, &step.writes)?,
            None => Vec::new(),
        };
        self.add_checkpoint(step, state, chain, ordinal, parent.as_deref(), &tasks)
    }

    /// Checks that the step continues what its parent stores.
    fn check_parent(&self, step: &StepCommit, parent: &Node) -> Result<()> {
        step.check_parent(|channel| {
            let Some(held) = self.held(Some(parent), channel.as_str())? else { return Ok(None) };
            let counters = parent.counters.iter().find(|(name, _)| *name == held.name);
            Ok(Some((held.version, counters.map(|(_, counters)| *counters))))
        })
    }

    fn held<'p>(&self, parent: Option<&'p Node>, channel: &str) -> Result<Option<&'p Channel>> {
        let key = self.names.find(&self.db, channel)?;
        Ok(parent.and_then(|parent| parent.channels.iter().find(|held| Some(held.name) == key)))
    }

    fn add_checkpoint(
        &self,
        step: &StepCommit,
        state: &mut ThreadState,
        chain: Chain,
        ordinal: Ordinal,
        parent: Option<&Node>,
        tasks: &[TaskRecord],
    ) -> Result<()> {
        let mut channels = Vec::with_capacity(step.checkpoint.channels.len());
        for (channel, entry) in &step.checkpoint.channels {
            let held = self.held(parent, channel.as_str())?;
            let is_held = match entry.stored {
                Stored::Held => true,
                // A sentinel without new writes equals the parent's: referring to that takes fewer bytes than a
                // version.
                Stored::Sentinel => {
                    held.is_some_and(|held| held.version == entry.version && held.kept == Kept::Sentinel(()))
                }
                Stored::Value(_) | Stored::Snapshot(_) => false,
            };
            if is_held {
                channels.extend(held.cloned());
                continue;
            }
            let name = self.name(channel.as_str())?;
            let kept = self.kept(state, (chain.key, name), entry)?;
            channels.push(Channel { name, origin: ordinal, version: entry.version, kept });
        }
        let parent = parent.map(|parent| (parent.ordinal, tasks));
        let record = self.record(state, (&step.checkpoint, &step.metadata), parent, &channels, ordinal)?;
        let id = step.checkpoint.id;
        checkpoints::add(&self.db, chain.key, ordinal, id, &record)?;
        let mut node = Node { ordinal, id, channels, counters: record.counters, tasks: Vec::new() };
        node.tasks = self.put_tasks(state, &step.thread, chain.key, &node, &step.pending)?;
        state.moved(&step.namespace, chain, node);
        Ok(())
    }

    /// Stores a checkpoint's own entry for a channel.
    pub(crate) fn kept(
        &self,
        state: &mut ThreadState,
        channel: (ChainKey, NameKey),
        entry: &ChannelEntry,
    ) -> Result<Kept> {
        let mut store = |value| state.value(&self.db, &self.counters, channel, Some(entry.version), value);
        Ok(match &entry.stored {
            Stored::Held | Stored::Sentinel => Kept::Sentinel(()),
            Stored::Value(value) => Kept::Value(store(value)?),
            Stored::Snapshot(value) => Kept::Snapshot(store(value)?),
        })
    }

    /// The record of the checkpoint at `own`. `parent` is its parent's ordinal, and the tasks that ran from it.
    pub(crate) fn record(
        &self,
        state: &mut ThreadState,
        (checkpoint, metadata): (&Checkpoint, &Metadata),
        parent: Option<(Ordinal, &[TaskRecord])>,
        channels: &[Channel],
        own: Ordinal,
    ) -> Result<CheckpointRecord> {
        let names =
            |all: &mut dyn Iterator<Item = &str>| all.map(|name| self.name(name)).collect::<Result<Vec<_>>>();
        let mut counters = Vec::with_capacity(metadata.counters.len());
        for (channel, count) in &metadata.counters {
            counters.push((self.name(channel.as_str())?, *count));
        }
        let extra = state.extra(&self.db, &self.counters, &metadata.extra)?;
        Ok(CheckpointRecord {
            parent: parent.map(|(ordinal, _)| ordinal),
            source: metadata.source,
            step: metadata.step,
            delta_marker: metadata.delta_marker,
            next: names(&mut checkpoint.next.iter().map(NodeName::as_str))?,
            applied: parent.map_or_else(Vec::new, |(_, tasks)| places(&checkpoint.applied, tasks)),
            parents: metadata.parents.iter().map(|(ns, id)| (ns.to_string(), *id)).collect(),
            counters,
            extra,
            channels: channels.iter().map(|channel| (channel.name, channel.entry(own))).collect(),
        })
    }

    fn put_writes(
        &self,
        at: &CheckpointKey,
        task: &TaskWrites,
        state: &mut Option<Box<ThreadState>>,
    ) -> Result<()> {
        let unknown = || not_found(&at.thread, at.id);
        let state = state.as_mut().ok_or_else(unknown)?;
        let chain = state.chain(&self.db, &self.names, &at.thread, &at.namespace)?.ok_or_else(unknown)?;
        let (head, chain) = (chain.head, chain.chain);
        let node = match head {
            Some(head) if head.id == at.id => head,
            _ => {
                let row = checkpoints::find(&self.db, chain.key, at.id)?.ok_or_else(unknown)?;
                state.node(&self.db, &self.names, &at.thread, chain, &row)?
            }
        };
        let tasks = self.put_tasks(state, &at.thread, chain.key, &node, std::slice::from_ref(task))?;
        state.wrote(&at.namespace, &node, tasks);
        Ok(())
    }

    /// Adds tasks to those that ran from a checkpoint. Returns all of them.
    fn put_tasks(
        &self,
        state: &mut ThreadState,
        thread: &ThreadId,
        chain: ChainKey,
        node: &Node,
        more: &[TaskWrites],
    ) -> Result<Vec<TaskRecord>> {
        let mut tasks = node.tasks.clone();
        let mut replaced = false;
        for task in more {
            match tasks.iter().position(|record| record.task == task.task) {
                None => tasks.push(self.task(state, chain, task)?),
                Some(place) => {
                    let mut view = View::new(&self.db, &self.names, thread, state.key);
                    let mut merged = view.task_writes(&tasks[place], |_| true)?;
                    let stored = merged.clone();
                    merged.merge(task);
                    if merged != stored && !self.is_applied(chain, node, place)? {
                        tasks[place] = self.task(state, chain, &merged)?;
                        replaced = true;
                    }
                }
            }
        }
        if tasks != node.tasks {
            checkpoints::set_tasks(&self.db, chain, node.ordinal, &tasks)?;
        }
        if replaced {
            // The replaced values are gone, and may be stored again: that must not look as if nothing had happened.
            directory::rewritten(&self.db, thread)?;
        }
        Ok(tasks)
    }

    /// Whether a child of `node` has applied its task at `place`. Children are newer than their parent, so this looks
    /// from the newest checkpoint back to it; rows hardly ever change once they are stored.
    fn is_applied(&self, chain: ChainKey, node: &Node, place: usize) -> Result<bool> {
        let place = u32::try_from(place).ok();
        let mut newest = Ordinal::MAX;
        loop {
            let page = checkpoints::newest_up_to(&self.db, chain, newest, 16)?;
            for row in &page {
                if row.ordinal <= node.ordinal {
                    return Ok(false);
                }
                let child = row.record()?;
                if child.parent == Some(node.ordinal) && place.is_some_and(|at| child.applied.contains(&at)) {
                    return Ok(true);
                }
            }
            let Some(last) = page.last() else { return Ok(false) };
            newest = last.ordinal - 1;
        }
    }

    /// Stores the values that a task wrote.
    pub(crate) fn task(
        &self,
        state: &mut ThreadState,
        chain: ChainKey,
        task: &TaskWrites,
    ) -> Result<TaskRecord> {
        let mut writes = Vec::with_capacity(task.writes.len());
        for write in &task.writes {
            let channel = self.name(write.channel.as_str())?;
            let value = state.value(&self.db, &self.counters, (chain, channel), None, &write.value)?;
            writes.push(WriteRecord { channel, overwrite: write.overwrite, value });
        }
        let node = self.name(task.node.as_str())?;
        Ok(TaskRecord { task: task.task, node, index: task.index, writes })
    }

    pub(crate) fn name(&self, name: &str) -> Result<NameKey> {
        self.names.intern(&self.db, name)
    }

    fn delete_thread(&mut self, thread: &ThreadId) -> Result<()> {
        let Some(state) = self.threads.take(&self.db, thread)? else { return Ok(()) };
        self.drop_thread(state.key)
    }
}

/// Checks that the tasks which the checkpoint applied are known.
fn check_applied(step: &StepCommit, tasks: &[TaskRecord]) -> Result<()> {
    for task in &step.checkpoint.applied {
        let stored = tasks.iter().any(|record| record.task == *task);
        if !stored && !step.writes.iter().any(|writes| writes.task == *task) {
            return Err(Error::InvalidInput(format!(
                "commit of checkpoint {} to thread {}: no writes of its applied task {task} are stored under its parent",
                step.checkpoint.id, step.thread
            )));
        }
    }
    Ok(())
}

/// The positions of these tasks among the parent's rows.
pub(crate) fn places(applied: &[TaskId], rows: &[TaskRecord]) -> Vec<u32> {
    let place = |task: &TaskId| rows.iter().position(|record| record.task == *task);
    applied.iter().filter_map(place).filter_map(|place| u32::try_from(place).ok()).collect()
}

pub(crate) fn not_found(thread: &ThreadId, checkpoint: CheckpointId) -> Error {
    Error::NotFound { thread: thread.clone(), checkpoint }
}

/// Whether a command was refused before it changed anything.
fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Conflict { .. } | Error::NotFound { .. } | Error::Stale { .. })
}

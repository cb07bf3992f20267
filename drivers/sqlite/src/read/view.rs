//! One read of a thread: rows, names and elements assembled into checkpoints. What it needs twice, it reads once.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use threadkeep::checkpoint::{ChannelEntry, Checkpoint, CheckpointTuple, Stored, TaskWrites, Write};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, NodeName, ThreadId, Version};
use threadkeep::metadata::Metadata;
use threadkeep::saver::Load;
use threadkeep::value::{ChannelValue, ListValue};
use threadkeep::{Error, Result};
use threadkeep_layout::{Form, Run, continuation};

use crate::read::memory::{Known, Memory};
use crate::rows::checkpoints::{self, CheckpointRow};
use crate::rows::directory::{ChainKey, Thread, ThreadKey};
use crate::rows::element::{Elements, Space};
use crate::rows::extra;
use crate::rows::names::Names;
use crate::rows::record::{CheckpointRecord, Kept, NameKey, Ordinal, StoredChannel, TaskRecord};
use crate::rows::value;
use crate::sql::Db;

/// Rows that a walk reads along with the one it needs: the next ones it needs are mostly those before it.
const READ_AHEAD: u32 = 32;

/// A checkpoint row, decoded.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) ordinal: Ordinal,
    pub(crate) id: CheckpointId,
    pub(crate) record: CheckpointRecord,
    pub(crate) tasks: Vec<TaskRecord>,
}

/// A channel of a checkpoint, resolved to the checkpoint that stores it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Channel {
    pub(crate) name: NameKey,
    /// The checkpoint that stores the entry.
    pub(crate) origin: Ordinal,
    pub(crate) version: Version,
    pub(crate) kept: Kept,
}

impl Channel {
    /// The entry for it in the checkpoint at `own`.
    pub(crate) fn entry(&self, own: Ordinal) -> StoredChannel {
        if self.origin == own {
            StoredChannel::Own(self.version, self.kept.clone())
        } else {
            StoredChannel::At(self.origin)
        }
    }
}

/// A chain of the thread that is read.
#[derive(Debug, Clone)]
pub(crate) struct ChainRef {
    pub(crate) key: ChainKey,
    pub(crate) namespace: Namespace,
}

/// The most recent list of the channel, so that one that continues it need not be rebuilt.
struct LastList {
    origin: Ordinal,
    runs: Vec<Run>,
    list: ListValue,
}

/// A thread as seen in one transaction.
pub(crate) struct View<'a> {
    db: &'a Db,
    names: &'a Names,
    thread: &'a ThreadId,
    elements: Elements<'a>,
    ahead: u32,
    /// Large objects that other reads have built, and the thread's rewrite count.
    memory: Option<(&'a Memory, u32)>,
    checkpoints: HashMap<(ChainKey, Ordinal), Rc<Read>>,
    lists: HashMap<(ChainKey, NameKey), LastList>,
}

impl<'a> View<'a> {
    pub(crate) fn new(db: &'a Db, names: &'a Names, thread: &'a ThreadId, key: ThreadKey) -> Self {
        Self {
            db,
            names,
            thread,
            elements: Elements::new(db, key),
            ahead: 0,
            memory: None,
            checkpoints: HashMap::new(),
            lists: HashMap::new(),
        }
    }

    /// The view for a walk from child to parent.
    pub(crate) fn walking(self) -> Self {
        Self { ahead: READ_AHEAD, ..self }
    }

    /// The view for a read that other reads may build on.
    pub(crate) fn remembering(self, memory: &'a Memory, thread: Thread) -> Self {
        let elements = self.elements.counted(&memory.counters);
        Self { memory: Some((memory, thread.rewrites)), elements, ..self }
    }

    /// Decodes a row and remembers it.
    pub(crate) fn read(&mut self, chain: ChainKey, row: &CheckpointRow) -> Result<Rc<Read>> {
        if let Some(read) = self.checkpoints.get(&(chain, row.ordinal)) {
            return Ok(read.clone());
        }
        let read =
            Rc::new(Read { ordinal: row.ordinal, id: row.id, record: row.record()?, tasks: row.tasks()? });
        self.checkpoints.insert((chain, row.ordinal), read.clone());
        Ok(read)
    }

    /// The checkpoint with this ordinal, if it exists. Reads `ahead` of its predecessors along with it.
    fn checkpoint(&mut self, chain: ChainKey, ordinal: Ordinal, ahead: u32) -> Result<Option<Rc<Read>>> {
        if !self.checkpoints.contains_key(&(chain, ordinal)) {
            for row in checkpoints::newest_up_to(self.db, chain, ordinal, 1 + ahead)? {
                self.read(chain, &row)?;
            }
        }
        Ok(self.checkpoints.get(&(chain, ordinal)).cloned())
    }

    /// The checkpoint that `child` was made from.
    ///
    /// # Errors
    /// [`Error::BrokenLineage`] if its parent is missing.
    pub(crate) fn parent(&mut self, chain: ChainKey, child: &Read) -> Result<Option<Rc<Read>>> {
        let Some(ordinal) = child.record.parent else { return Ok(None) };
        let parent = self.checkpoint(chain, ordinal, self.ahead)?;
        parent.map(Some).ok_or_else(|| {
            Error::broken(
                self.thread,
                child.id,
                format!("its parent is missing ({})", checkpoints::place(chain, ordinal)),
            )
        })
    }

    /// A channel of a checkpoint, if it was ever written.
    ///
    /// # Errors
    /// [`Error::BrokenLineage`] if the checkpoint that stores the entry is missing or lacks it.
    pub(crate) fn channel(&mut self, chain: ChainKey, at: &Read, name: NameKey) -> Result<Option<Channel>> {
        match at.record.entry(name) {
            None => Ok(None),
            Some(entry) => self.follow(chain, at, name, entry).map(Some),
        }
    }

    /// Loads the elements of these checkpoints at once. Each value would ask for its own.
    pub(crate) fn load_values<'r>(
        &mut self,
        checkpoints: impl IntoIterator<Item = &'r Read>,
        load: &Load,
    ) -> Result<()> {
        let (mut values, mut chunks) = (Vec::new(), Vec::new());
        let mut add = |form: &Form| match form {
            Form::Shared(seq) => values.push(Run { start: *seq, len: 1 }),
            Form::List(manifest) => {
                values.extend(&manifest.tail);
                chunks.extend(&manifest.chunks);
            }
            Form::Plain(_) | Form::Tiny(_) => {}
        };
        let mut wanted: HashMap<NameKey, bool> = HashMap::new();
        for read in checkpoints {
            for (name, entry) in &read.record.channels {
                let StoredChannel::Own(_, kept) = entry else { continue };
                let Some(form) = kept.form() else { continue };
                let wants = match wanted.get(name) {
                    Some(wants) => *wants,
                    None => *wanted.entry(*name).or_insert(load.wants(&self.channel_name(*name)?)),
                };
                if wants {
                    add(form);
                }
            }
            read.tasks.iter().flat_map(|task| &task.writes).for_each(|write| add(&write.value));
        }
        self.elements.load(Space::Chunks, &chunks)?;
        self.elements.load(Space::Values, &values)
    }

    /// Every channel of a checkpoint.
    pub(crate) fn channels(&mut self, chain: ChainKey, at: &Read) -> Result<Vec<Channel>> {
        at.record.channels.iter().map(|(name, entry)| self.follow(chain, at, *name, entry)).collect()
    }

    fn follow(
        &mut self,
        chain: ChainKey,
        at: &Read,
        name: NameKey,
        entry: &StoredChannel,
    ) -> Result<Channel> {
        let own = |origin, entry: &StoredChannel| match entry {
            StoredChannel::Own(version, kept) => {
                Some(Channel { name, origin, version: *version, kept: kept.clone() })
            }
            StoredChannel::At(_) => None,
        };
        let (origin, found) = match entry {
            StoredChannel::Own(..) => (at.ordinal, own(at.ordinal, entry)),
            StoredChannel::At(ordinal) => {
                let holder = self.checkpoint(chain, *ordinal, 0)?;
                (*ordinal, holder.and_then(|holder| own(*ordinal, holder.record.entry(name)?)))
            }
        };
        if let Some(channel) = found {
            return Ok(channel);
        }
        let name = self.names.text(self.db, name)?;
        let place = checkpoints::place(chain, origin);
        Err(Error::broken(
            self.thread,
            at.id,
            format!("what it holds for channel {name} is missing ({place})"),
        ))
    }

    /// What a channel stores, including its value.
    pub(crate) fn stored(&mut self, chain: ChainKey, channel: &Channel) -> Result<Stored> {
        Ok(match &channel.kept {
            Kept::Sentinel(()) => Stored::Sentinel,
            Kept::Value(form) => Stored::Value(self.value(chain, channel, form)?),
            Kept::Snapshot(form) => Stored::Snapshot(self.value(chain, channel, form)?),
        })
    }

    fn value(&mut self, chain: ChainKey, channel: &Channel, form: &Form) -> Result<ChannelValue> {
        let Form::List(manifest) = form else {
            return value::load(form, Some(channel.version), &mut self.elements);
        };
        let last = self.lists.remove(&(chain, channel.name));
        let made = match last {
            Some(last) if last.origin == channel.origin => last,
            last => {
                let runs = self.elements.runs(manifest)?;
                let (mut list, rest) = match last.and_then(|last| last.continued(&runs)) {
                    Some((list, rest)) => (list, rest),
                    None => (ListValue::default(), runs.clone()),
                };
                for element in self.elements.get_all(Space::Values, &rest)? {
                    list.push(element);
                }
                list.rebase(channel.version);
                LastList { origin: channel.origin, runs, list }
            }
        };
        let value = made.list.clone().into();
        self.lists.insert((chain, channel.name), made);
        Ok(value)
    }

    /// What a task wrote to the channels that `wants` names.
    pub(crate) fn task_writes(
        &mut self,
        record: &TaskRecord,
        wants: impl Fn(NameKey) -> bool,
    ) -> Result<TaskWrites> {
        let mut writes = Vec::with_capacity(record.writes.len());
        for write in record.writes.iter().filter(|write| wants(write.channel)) {
            writes.push(Write {
                channel: self.channel_name(write.channel)?,
                value: value::load(&write.value, None, &mut self.elements)?,
                overwrite: write.overwrite,
            });
        }
        let node = NodeName::new(self.names.text(self.db, record.node)?);
        Ok(TaskWrites { task: record.task, node, index: record.index, writes })
    }

    /// The tasks that a checkpoint applied, in the order in which they were applied.
    ///
    /// # Errors
    /// [`Error::BrokenLineage`] if its parent lacks one of them.
    pub(crate) fn applied<'p>(&self, at: &Read, parent: &'p Read) -> Result<Vec<&'p TaskRecord>> {
        let find = |place: &u32| {
            parent.tasks.get(*place as usize).ok_or_else(|| {
                let missing = format!(
                    "the writes of a task that it applied are missing (number {place} of its parent)"
                );
                Error::broken(self.thread, at.id, missing)
            })
        };
        at.record.applied.iter().map(find).collect()
    }

    pub(crate) fn channel_name(&self, key: NameKey) -> Result<ChannelName> {
        self.names.text(self.db, key).map(ChannelName::new)
    }

    /// The metadata of a checkpoint.
    pub(crate) fn metadata(&mut self, chain: ChainKey, read: &Read) -> Result<Metadata> {
        let record = &read.record;
        if let Some((memory, rewrites)) = self.memory {
            for (key, _) in &record.extra.maps {
                let objects = self.elements.objects();
                if objects.get(key).is_none()
                    && let Some(known) = memory.object(chain, key, rewrites)
                    // Not what was stored after this transaction began: it lacks those rows.
                    && (known.ordinal <= read.ordinal || checkpoints::exists(self.db, chain, known.ordinal)?)
                {
                    objects.put(key, known.object);
                }
            }
        }
        let mut metadata = Metadata::new(record.source, record.step);
        metadata.delta_marker = record.delta_marker;
        metadata.parents =
            record.parents.iter().map(|(namespace, id)| (namespace.as_str().into(), *id)).collect();
        for (channel, counters) in &record.counters {
            metadata.counters.insert(self.channel_name(*channel)?, *counters);
        }
        metadata.extra = extra::load(&record.extra, &mut self.elements)?;
        if let Some((memory, rewrites)) = self.memory {
            for (key, _) in &record.extra.maps {
                if let Some(object) = self.elements.objects().get(key) {
                    let (ordinal, object) = (read.ordinal, object.clone());
                    memory.remember(chain, key, Known { ordinal, rewrites, object });
                }
            }
        }
        Ok(metadata)
    }

    /// A checkpoint with everything stored of it.
    pub(crate) fn tuple(
        &mut self,
        chain: &ChainRef,
        read: &Read,
        metadata: Metadata,
        load: &Load,
    ) -> Result<CheckpointTuple> {
        let mut channels = BTreeMap::new();
        for channel in self.channels(chain.key, read)? {
            let name = self.channel_name(channel.name)?;
            let stored = if load.wants(&name) { self.stored(chain.key, &channel)? } else { Stored::Held };
            channels.insert(name, ChannelEntry { version: channel.version, stored });
        }
        let next = read.record.next.iter().map(|node| self.names.text(self.db, *node).map(NodeName::new));
        let next = next.collect::<Result<_>>()?;
        let parent = self.parent(chain.key, read)?;
        let applied = match &parent {
            Some(parent) => self.applied(read, parent)?.into_iter().map(|task| task.task).collect(),
            None => Vec::new(),
        };
        let writes = read.tasks.iter().map(|task| self.task_writes(task, |_| true));
        let writes = writes.collect::<Result<_>>()?;
        Ok(CheckpointTuple {
            thread: self.thread.clone(),
            namespace: chain.namespace.clone(),
            checkpoint: Checkpoint { id: read.id, channels, next, applied },
            parent: parent.map(|parent| parent.id),
            metadata,
            writes,
        })
    }
}

impl LastList {
    /// If this list is a prefix of the list of these runs: this list, and the remaining runs.
    fn continued(self, runs: &[Run]) -> Option<(ListValue, Vec<Run>)> {
        Some((self.list, continuation(&self.runs, runs)?))
    }
}

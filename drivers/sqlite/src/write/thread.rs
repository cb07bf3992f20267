//! What the writer remembers of the threads that it wrote to last, so that the cost of a step depends only on what it
//! changes.
//!
//! All of it can be read again; it is dropped as soon as it may be out of date: after a failed command, and after
//! another connection wrote to the database. Which elements a thread has stays true then, unless the thread was rewritten:
//! others only add some.

use std::num::NonZeroUsize;
use std::sync::Arc;

use lru::LruCache;
use threadkeep::Result;
use threadkeep::id::{CheckpointId, Namespace, ThreadId, Version};
use threadkeep::metadata;
use threadkeep::value::ChannelValue;
use threadkeep_layout::{Form, HASH, PART, Shapes, Stored, draft};

use crate::read::view::{Channel, View};
use crate::rows::checkpoints::{self, CheckpointRow};
use crate::rows::directory::{self, Chain, ChainKey, Thread, ThreadKey};
use crate::rows::element::Index;
use crate::rows::extra::{self, StoredObject};
use crate::rows::names::Names;
use crate::rows::record::{self, NameKey, Ordinal, TaskRecord};
use crate::rows::value::{ListKey, Room, Values};
use crate::sql::Db;
use crate::stats::Counters;

/// Remembered chains of a thread.
const CHAINS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(63);
/// Remembered large metadata objects of a thread.
const OBJECTS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(7);
/// The most bytes of all that is remembered, over all threads.
const BYTES: usize = 48 << 20;

/// A checkpoint from which a step is committed.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) ordinal: Ordinal,
    pub(crate) id: CheckpointId,
    pub(crate) channels: Vec<Channel>,
    pub(crate) counters: Vec<(NameKey, metadata::Counters)>,
    pub(crate) tasks: Vec<TaskRecord>,
}

impl Node {
    /// Its bytes in memory, roughly. Its tasks may be thousands, and so may the writes of one of them.
    fn weight(&self) -> usize {
        let writes = self.tasks.iter().map(|task| task.writes.len()).sum::<usize>();
        (self.channels.len() + self.counters.len() + self.tasks.len() + writes) * PART
    }
}

/// A chain and its head.
#[derive(Debug, Clone)]
pub(crate) struct ChainState {
    pub(crate) chain: Chain,
    pub(crate) head: Option<Arc<Node>>,
}

/// A thread.
pub(crate) struct ThreadState {
    pub(crate) key: ThreadKey,
    /// The thread's rewrite count when it was read.
    rewrites: u32,
    /// What others had written then, see [`Threads::others`].
    others: u64,
    chains: LruCache<Namespace, ChainState>,
    shapes: Shapes<ListKey>,
    /// The most recently stored large metadata objects, by key.
    objects: LruCache<String, StoredObject>,
    index: Index,
    /// What may still be stored in the open transaction.
    pub(crate) room: Room,
}

impl ThreadState {
    /// Boxed, because each command takes it out of [`Threads`] and puts it back.
    pub(crate) fn new(Thread { key, rewrites }: Thread) -> Box<Self> {
        Box::new(Self {
            key,
            rewrites,
            others: 0,
            chains: LruCache::new(CHAINS),
            shapes: Shapes::default(),
            objects: LruCache::new(OBJECTS),
            index: Index::default(),
            room: Room::ANY,
        })
    }

    /// Stores `extra` metadata. Large objects are remembered, so that later ones can build on them.
    pub(crate) fn extra(
        &mut self,
        db: &Db,
        counters: &Counters,
        extra: &metadata::Extra,
    ) -> Result<record::Extra> {
        let (index, room) = (&mut self.index, &mut self.room);
        let mut values = Values { db, thread: self.key, index, room, counters };
        let known = |key: &str| self.objects.pop(key);
        let (extra, stored) = extra::store(extra, known, |space, element| values.element(space, element))?;
        for (key, known) in stored {
            self.objects.put(key, known);
        }
        Ok(extra)
    }

    /// Stores a value of a channel. A list with a version is remembered, so that later ones can build on it.
    pub(crate) fn value(
        &mut self,
        db: &Db,
        counters: &Counters,
        (chain, channel): (ChainKey, NameKey),
        version: Option<Version>,
        value: &ChannelValue,
    ) -> Result<Form> {
        let (index, room) = (&mut self.index, &mut self.room);
        let mut values = Values { db, thread: self.key, index, room, counters };
        let shapes = &mut self.shapes;
        let Stored { form, shape } = draft(&mut values, value, |base| shapes.get(&(chain, channel, base)))?;
        if let Some(version) = version {
            match shape {
                Some(shape) => shapes.put((chain, channel, version), shape),
                // Of an earlier list under this version.
                None => shapes.remove(&(chain, channel, version)),
            }
        }
        Ok(form)
    }

    /// A chain, if it exists.
    pub(crate) fn chain(
        &mut self,
        db: &Db,
        names: &Names,
        thread: &ThreadId,
        namespace: &Namespace,
    ) -> Result<Option<ChainState>> {
        if let Some(state) = self.chains.get(namespace) {
            return Ok(Some(state.clone()));
        }
        let Some(chain) = directory::find_chain(db, self.key, namespace)? else { return Ok(None) };
        let head = checkpoints::head(db, chain.key)?;
        let head = head.map(|row| self.node(db, names, thread, chain, &row)).transpose()?;
        let state = ChainState { chain, head };
        self.chains.put(namespace.clone(), state.clone());
        Ok(Some(state))
    }

    /// A checkpoint, with its channels resolved to where they are stored.
    pub(crate) fn node(
        &self,
        db: &Db,
        names: &Names,
        thread: &ThreadId,
        chain: Chain,
        row: &CheckpointRow,
    ) -> Result<Arc<Node>> {
        let mut view = View::new(db, names, thread, self.key);
        let read = view.read(chain.key, row)?;
        let channels = view.channels(chain.key, &read)?;
        let (counters, tasks) = (read.record.counters.clone(), read.tasks.clone());
        Ok(Arc::new(Node { ordinal: row.ordinal, id: row.id, channels, counters, tasks }))
    }

    /// Remembers the new head of a chain.
    pub(crate) fn moved(&mut self, namespace: &Namespace, chain: Chain, head: Node) {
        self.chains.put(namespace.clone(), ChainState { chain, head: Some(Arc::new(head)) });
    }

    /// Remembers the tasks of a checkpoint, if it is the head of its chain.
    pub(crate) fn wrote(&mut self, namespace: &Namespace, node: &Node, tasks: Vec<TaskRecord>) {
        if let Some(ChainState { head: Some(head), .. }) = self.chains.get_mut(namespace)
            && head.ordinal == node.ordinal
        {
            let channels = node.channels.clone();
            let counters = node.counters.clone();
            *head = Arc::new(Node { ordinal: node.ordinal, id: node.id, channels, counters, tasks });
        }
    }

    /// What is known of a thread that others may have written to meanwhile.
    fn beside_others(self, thread: Thread) -> Box<Self> {
        let mut state = Self::new(thread);
        if (self.key, self.rewrites) == (thread.key, thread.rewrites) {
            state.index = self.index;
            state.index.may_lack_some();
        }
        state
    }

    /// Its bytes in memory.
    fn weight(&self) -> usize {
        let objects = self.objects.iter().map(|(_, known)| known.weight()).sum::<usize>();
        let heads = self.chains.iter().filter_map(|(_, state)| state.head.as_ref());
        let heads = heads.map(|head| head.weight()).sum::<usize>();
        self.index.len() * HASH + objects + heads + self.shapes.bytes()
    }
}

/// The threads that were written to last.
pub(crate) struct Threads {
    states: LruCache<ThreadId, Box<ThreadState>>,
    weight: usize,
    /// How often others were found to have written to the database.
    others: u64,
}

/// The number of remembered threads.
const THREADS: usize = 1024;

impl Default for Threads {
    fn default() -> Self {
        Self { states: LruCache::unbounded(), weight: 0, others: 0 }
    }
}

impl Threads {
    /// Takes a thread out. A thread that is not put back is forgotten.
    pub(crate) fn take(&mut self, db: &Db, thread: &ThreadId) -> Result<Option<Box<ThreadState>>> {
        self.take_or(thread, || directory::thread(db, thread))
    }

    /// [`Self::take`] of a thread that has no name yet, by its token.
    pub(crate) fn take_unnamed(&mut self, db: &Db, token: &ThreadId) -> Result<Option<Box<ThreadState>>> {
        self.take_or(token, || directory::find_unnamed(db, token.as_str()))
    }

    fn take_or(
        &mut self,
        thread: &ThreadId,
        find: impl FnOnce() -> Result<Option<Thread>>,
    ) -> Result<Option<Box<ThreadState>>> {
        Ok(match self.forget(thread) {
            Some(state) if state.others == self.others => Some(state),
            Some(state) => find()?.map(|found| state.beside_others(found)),
            None => find()?.map(ThreadState::new),
        })
    }

    /// Forgets a thread. Returns what was known of it.
    pub(crate) fn forget(&mut self, thread: &ThreadId) -> Option<Box<ThreadState>> {
        self.states.pop(thread).inspect(|state| self.weight -= state.weight())
    }

    /// Others have written to the database: each thread is looked at again when it is taken.
    pub(crate) fn others_wrote(&mut self) {
        self.others += 1;
    }

    /// Puts a thread back, and evicts others if there are too many.
    pub(crate) fn put(&mut self, thread: ThreadId, mut state: Box<ThreadState>) {
        state.others = self.others;
        self.weight += state.weight();
        self.states.put(thread, state);
        while self.states.len() > 1 && (self.weight > BYTES || self.states.len() > THREADS) {
            if let Some((_, old)) = self.states.pop_lru() {
                self.weight -= old.weight();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use threadkeep::id::TaskId;
    use threadkeep_layout::{Manifest, Run, Shape};

    use super::*;
    use crate::rows::record::WriteRecord;

    /// A list that was edited much has thousands of runs, and each of its last versions has them.
    #[test]
    fn the_shapes_of_lists_count() {
        let runs = (0..400_000).map(|n| Run { start: 2 * n, len: 1 }).collect();
        let manifest = Manifest { chunks: Vec::new(), tail: runs };
        let Ok(shape) = Shape::stored(&manifest, |_| Ok::<_, Infallible>(Vec::new()));
        let most = BYTES / shape.bytes();
        let mut threads = Threads::default();
        let names: Vec<_> = (0..most + 3).map(|n| ThreadId::from(n.to_string())).collect();
        for name in &names {
            let mut state = ThreadState::new(Thread { key: 1, rewrites: 0 });
            state.shapes.put((1, 1, Version { counter: 1, random: 1 }), shape.clone());
            threads.put(name.clone(), state);
            assert!(threads.weight <= BYTES, "{} bytes", threads.weight);
        }
        let left = names.iter().filter(|name| threads.forget(name).is_some()).count();
        assert!((most - 1..=most).contains(&left), "{left} of {most}");
        assert_eq!(threads.weight, 0);
    }

    /// A graph that sends to thousands of tasks writes all of them onto one head.
    #[test]
    fn the_tasks_of_heads_count() {
        let write = WriteRecord { channel: 1, overwrite: false, value: Form::Shared(1) };
        let (id, writes) = (TaskId::from_bytes([1; 16]), vec![write; 50_000]);
        let task = TaskRecord { task: id, node: 1, index: 0, writes };
        let most = BYTES / (2 * 50_000 * size_of::<WriteRecord>());
        let mut threads = Threads::default();
        for n in 0..most + 3 {
            let mut state = ThreadState::new(Thread { key: 1, rewrites: 0 });
            let node = Node {
                ordinal: 1,
                id: CheckpointId::from_bytes([1; 16]),
                channels: Vec::new(),
                counters: Vec::new(),
                tasks: vec![task.clone(); 2],
            };
            state.moved(&Namespace::root(), Chain { key: 1, floor: 0 }, node);
            threads.put(ThreadId::from(n.to_string()), state);
            assert!(threads.weight <= BYTES, "{} bytes", threads.weight);
        }
        assert!(threads.states.len() <= most, "{} of {most}", threads.states.len());
    }
}

//! What is known of stored checkpoints without reading them: what a child's commit needs of its parent.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use serde_json::{Map, Value as Json};
use threadkeep::Result;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, Stored, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, TaskId, ThreadId, Version};
use threadkeep::metadata::Counters;
use threadkeep::saver::Load;
use threadkeep::value::{ChannelValue, ListValue};

use crate::frame::{self, FRAME};
use crate::task::{self, Author, Kind};
use crate::types::Place;
use crate::version::Label;

/// Checkpoints remembered. A step needs its parent, so a run has two while it puts one: room for five hundred runs at
/// one time. The others are parents of forks.
const CHECKPOINTS: usize = 1024;
/// The bytes of the values of all of them; those that were used last are remembered in any case.
const BYTES: usize = 64 << 20;
/// The memory of an element of a list besides its bytes.
const ELEMENT: usize = 192;
/// Heads remembered.
const HEADS: usize = 4096;

/// The key of the frame's notes under which labels are kept that are not versions of the engine.
pub(crate) const LABELS: &str = "l";
/// The key of the frame's notes that says that the messages are those that another program stored, in its form: the
/// graph only carries them on.
pub(crate) const CARRIED: &str = "c";

/// A stored checkpoint, as its children need to know it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Known {
    /// Whether its messages are another program's: that wrote it, or a graph that only carries them on.
    pub(crate) foreign: bool,
    pub(crate) channels: BTreeMap<ChannelName, KnownChannel>,
    pub(crate) counters: BTreeMap<ChannelName, Counters>,
    pub(crate) tasks: Vec<KnownTask>,
}

/// A channel of it.
#[derive(Debug, Clone)]
pub(crate) struct KnownChannel {
    pub(crate) version: Version,
    /// `None` if LangGraph gave it a value and no version.
    pub(crate) label: Option<Label>,
    /// The value, unless it was not loaded, or is stored as changes.
    pub(crate) value: Option<ChannelValue>,
    /// Whether it is stored as a snapshot.
    pub(crate) snapshot: bool,
}

/// A row under it.
#[derive(Debug, Clone)]
pub(crate) struct KnownTask {
    pub(crate) id: TaskId,
    pub(crate) author: Author,
    pub(crate) kind: Kind,
    /// How many writes it has.
    pub(crate) len: usize,
    /// The special channels that it wrote.
    pub(crate) special: BTreeSet<String>,
    /// The other channels that it wrote.
    pub(crate) channels: BTreeSet<ChannelName>,
}

impl KnownTask {
    pub(crate) fn new(row: &TaskWrites) -> Result<Self> {
        let (author, kind) = task::author(row)?;
        let special = task::writes(row).filter(|write| write.is_special()).map(|w| w.channel.to_string());
        let channels = task::writes(row).filter(|write| !write.is_special()).map(|w| w.channel.clone());
        Ok(Self {
            id: row.task,
            author,
            kind,
            len: task::writes(row).count(),
            special: special.collect(),
            channels: channels.collect(),
        })
    }
}

impl Known {
    /// What a tuple shows. Values that it does not load are not known.
    pub(crate) fn new(tuple: &CheckpointTuple) -> Result<Self> {
        let notes = match tuple.checkpoint.channels.get(FRAME).and_then(|entry| entry.stored.value()) {
            Some(value) => frame::notes(tuple.checkpoint.id, value)?,
            None => Map::new(),
        };
        let labels = notes.get(LABELS).unwrap_or(&Json::Null);
        let entries = tuple.checkpoint.channels.iter().map(|(name, entry)| {
            let value = entry.stored.value().cloned().map(|value| rebased(value, entry.version));
            let label = label(labels, name.as_str(), entry.version);
            let snapshot = is_snapshot(&entry.stored);
            (name.clone(), KnownChannel { version: entry.version, label, value, snapshot })
        });
        Ok(Self {
            foreign: notes.is_empty() || notes.contains_key(CARRIED),
            channels: entries.collect(),
            counters: tuple.metadata.counters.clone(),
            tasks: tuple.writes.iter().map(KnownTask::new).collect::<Result<_>>()?,
        })
    }

    /// Whether a channel is stored as changes.
    pub(crate) fn is_sentinel(&self, channel: &str) -> bool {
        self.counters.contains_key(channel)
    }

    /// Whether these are the versions of its channels in LangGraph.
    pub(crate) fn has_labels(&self, versions: &BTreeMap<String, Label>) -> bool {
        let channels = self.channels.iter().filter(|(name, _)| !frame::is_private(name.as_str()));
        let labels = channels.filter_map(|(name, known)| Some((name.as_str(), known.label.as_ref()?)));
        labels.eq(versions.iter().map(|(name, label)| (name.as_str(), label)))
    }

    /// Whether the value of a channel has another form in the graph: messages of the gateway become those of LangChain, so
    /// a child stores them again.
    pub(crate) fn is_translated(&self, channel: &str) -> bool {
        self.foreign && channel == MESSAGES_CHANNEL
    }

    /// What to load of the checkpoint so that [`Self::complete`] has the rest.
    pub(crate) fn missing(&self) -> Load {
        let missing = self
            .channels
            .iter()
            .filter(|(name, known)| known.value.is_none() && !self.counters.contains_key(*name));
        let missing: BTreeSet<_> = missing.map(|(name, _)| name.clone()).collect();
        if missing.is_empty() { Load::None } else { Load::Only(missing) }
    }

    /// Gives a checkpoint that was read the values that were not loaded. `false` if they are not its values: the head has
    /// moved, or the thread was rewritten.
    pub(crate) fn complete(&self, tuple: &mut CheckpointTuple) -> bool {
        let channels = &mut tuple.checkpoint.channels;
        let versions = channels.iter().map(|(name, entry)| (name, entry.version));
        if self.counters != tuple.metadata.counters
            || !self.channels.iter().map(|(name, known)| (name, known.version)).eq(versions)
        {
            return false;
        }
        for (entry, (name, known)) in channels.values_mut().zip(&self.channels) {
            if entry.stored != Stored::Held {
                continue;
            }
            entry.stored = match &known.value {
                Some(value) if known.snapshot => Stored::Snapshot(value.clone()),
                Some(value) => Stored::Value(value.clone()),
                None if self.counters.contains_key(name) => Stored::Sentinel,
                None => return false,
            };
        }
        true
    }

    fn bytes(&self) -> usize {
        let bytes = |value: &ChannelValue| match value {
            ChannelValue::Plain(encoded) => encoded.bytes.len(),
            ChannelValue::List(list) => list.bytes_len() + list.len() * ELEMENT,
        };
        self.channels.values().filter_map(|channel| channel.value.as_ref()).map(bytes).sum()
    }

    /// The same without the values.
    fn stripped(&self) -> Self {
        let stripped = |channel: &KnownChannel| KnownChannel {
            version: channel.version,
            label: channel.label.clone(),
            value: None,
            snapshot: channel.snapshot,
        };
        Self {
            foreign: self.foreign,
            channels: self.channels.iter().map(|(name, channel)| (name.clone(), stripped(channel))).collect(),
            counters: self.counters.clone(),
            tasks: self.tasks.clone(),
        }
    }

    /// The list of a private channel.
    pub(crate) fn list(&self, channel: &str) -> Option<&ListValue> {
        self.channels.get(channel)?.value.as_ref()?.as_list()
    }
}

/// The label of a channel, from the notes: `null` for a channel without one.
pub(crate) fn label(labels: &Json, channel: &str, version: Version) -> Option<Label> {
    match labels.get(channel) {
        Some(Json::Null) => None,
        Some(label) => Some(label.clone()),
        None => Some(Json::String(version.to_string())),
    }
}

/// The value as a saver holds it now.
pub(crate) fn rebased(mut value: ChannelValue, version: Version) -> ChannelValue {
    if let ChannelValue::List(list) = &mut value {
        list.rebase(version);
    }
    value
}

/// The remembered checkpoints and heads of a store.
///
/// A row may be stored while its checkpoint is read, or put. It must not be forgotten then: a child that does not know the
/// row would not apply it. So rows are collected from before the read or the commit begins ([`Memory::expect`]), and if they
/// were not collected all the time, because the checkpoint was forgotten in between, it stays unknown.
pub(crate) struct Memory(Mutex<Remembered>);

struct Remembered {
    checkpoints: LruCache<CheckpointKey, Slot>,
    /// The bytes of the values of those that have some.
    values: LruCache<CheckpointKey, usize>,
    /// The sum of these.
    bytes: usize,
    heads: LruCache<Place, Option<CheckpointId>>,
    /// Counts the rows that were stored, and what was forgotten.
    changes: u64,
}

/// What is known of a checkpoint, and until then the rows that were stored under it.
struct Slot {
    /// The changes before it: every row since is collected.
    since: u64,
    /// How many puts of it have begun.
    puts: usize,
    known: Option<Arc<Known>>,
    rows: Vec<KnownTask>,
}

impl Remembered {
    /// The place of a checkpoint.
    fn slot(&mut self, key: &CheckpointKey) -> &mut Slot {
        if self.checkpoints.len() >= CHECKPOINTS
            && !self.checkpoints.contains(key)
            && let Some((oldest, _)) = self.checkpoints.pop_lru()
        {
            self.forget_values(&oldest);
        }
        let since = self.changes;
        let empty = || Slot { since, puts: 0, known: None, rows: Vec::new() };
        self.checkpoints.get_or_insert_mut(key.clone(), empty)
    }

    /// What is known of a checkpoint, which is used.
    fn known(&mut self, key: &CheckpointKey) -> Option<Arc<Known>> {
        self.values.promote(key);
        self.checkpoints.get(key).and_then(|slot| slot.known.clone())
    }

    fn forget(&mut self, key: &CheckpointKey) {
        self.checkpoints.pop(key);
        self.forget_values(key);
    }

    fn forget_values(&mut self, key: &CheckpointKey) {
        self.bytes -= self.values.pop(key).unwrap_or(0);
    }

    /// Notes how many bytes the values of a checkpoint have.
    fn has_values(&mut self, key: &CheckpointKey, bytes: usize) {
        self.forget_values(key);
        if bytes > 0 {
            self.values.put(key.clone(), bytes);
            self.bytes += bytes;
        }
    }

    /// Forgets the values of the checkpoints that were not used for longest, until there are at most this many bytes, or
    /// only those of one checkpoint. Returns them, to be dropped.
    fn bound(&mut self, bytes: usize) -> Vec<Arc<Known>> {
        let mut old = Vec::new();
        while self.bytes > bytes
            && self.values.len() > 1
            && let Some((key, of)) = self.values.pop_lru()
        {
            self.bytes -= of;
            if let Some(known) = self.checkpoints.peek_mut(&key).and_then(|slot| slot.known.as_mut()) {
                let stripped = Arc::new(known.stripped());
                old.push(std::mem::replace(known, stripped));
            }
        }
        old
    }
}

impl Default for Memory {
    fn default() -> Self {
        let size = |size| NonZeroUsize::new(size).unwrap_or(NonZeroUsize::MIN);
        Self(Mutex::new(Remembered {
            checkpoints: LruCache::new(size(CHECKPOINTS)),
            values: LruCache::unbounded(),
            bytes: 0,
            heads: LruCache::new(size(HEADS)),
            changes: 0,
        }))
    }
}

fn add(tasks: &mut Vec<KnownTask>, task: KnownTask) {
    match tasks.iter_mut().find(|old| old.id == task.id) {
        Some(old) => {
            old.len = old.len.max(task.len);
            old.special.extend(task.special);
            old.channels.extend(task.channels);
        }
        None => tasks.push(task),
    }
}

impl Memory {
    fn lock(&self) -> MutexGuard<'_, Remembered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn checkpoint(&self, key: &CheckpointKey) -> Option<Arc<Known>> {
        self.lock().known(key)
    }

    /// Collects the rows of a checkpoint from now on. Returns the changes so far.
    pub(crate) fn expect(&self, key: &CheckpointKey) -> u64 {
        let mut this = self.lock();
        this.slot(key);
        this.changes
    }

    /// A put of a checkpoint begins. Returns whether it is the first thing that is known of the checkpoint.
    pub(crate) fn begins_put(&self, key: &CheckpointKey) -> bool {
        let mut this = self.lock();
        let slot = this.slot(key);
        slot.puts += 1;
        slot.puts == 1 && slot.known.is_none()
    }

    /// Whether no other put of a checkpoint has begun since the first one did.
    pub(crate) fn is_only_put(&self, key: &CheckpointKey) -> bool {
        self.lock().checkpoints.peek(key).is_some_and(|slot| slot.puts == 1)
    }

    /// How many changes there were so far.
    pub(crate) fn changes(&self) -> u64 {
        self.lock().changes
    }

    /// A checkpoint was read or put; `since` is what [`Self::expect`] or [`Self::changes`] returned before. It is not
    /// remembered if a row may have been missed in between.
    pub(crate) fn learned(&self, key: &CheckpointKey, mut known: Known, since: u64) -> Option<Arc<Known>> {
        let mut this = self.lock();
        if this.checkpoints.peek(key).map_or(this.changes, |slot| slot.since) > since {
            return None;
        }
        let slot = this.slot(key);
        let known_before = slot.known.iter().flat_map(|known| known.tasks.clone());
        for task in std::mem::take(&mut slot.rows).into_iter().chain(known_before) {
            add(&mut known.tasks, task);
        }
        let known = Arc::new(known);
        let before = slot.known.replace(known.clone());
        this.has_values(key, known.bytes());
        let old = this.bound(BYTES);
        drop(this);
        // Large values are dropped without the lock.
        drop((before, old));
        Some(known)
    }

    /// What is known of a checkpoint, or of the head, if it is known, and its id.
    pub(crate) fn remembered(
        &self,
        place: &Place,
        id: Option<CheckpointId>,
    ) -> Option<(CheckpointId, Arc<Known>)> {
        let mut this = self.lock();
        let id = id.or_else(|| this.heads.get(place).copied().flatten())?;
        Some((id, this.known(&place.key(id))?))
    }

    /// A row was stored under a checkpoint.
    pub(crate) fn wrote(&self, key: &CheckpointKey, row: &TaskWrites) -> Result<()> {
        let task = KnownTask::new(row)?;
        let mut this = self.lock();
        this.changes += 1;
        if let Some(slot) = this.checkpoints.get_mut(key) {
            match &mut slot.known {
                Some(known) => add(&mut Arc::make_mut(known).tasks, task),
                None => add(&mut slot.rows, task),
            }
        }
        Ok(())
    }

    /// The head of a place; the outer `None` if it is not known.
    #[expect(
        clippy::option_option,
        reason = "a place without checkpoints has no head, and that may be known"
    )]
    pub(crate) fn head(&self, place: &Place) -> Option<Option<CheckpointId>> {
        self.lock().heads.get(place).copied()
    }

    pub(crate) fn is_head(&self, place: &Place, head: Option<CheckpointId>) {
        self.lock().heads.put(place.clone(), head);
    }

    /// A change of a place failed: it may be stored, and be the head.
    pub(crate) fn forget_head(&self, place: &Place) {
        self.lock().heads.pop(place);
    }

    pub(crate) fn forget(&self, key: &CheckpointKey) {
        let mut this = self.lock();
        this.changes += 1;
        this.forget(key);
    }

    pub(crate) fn forget_thread(&self, thread: &ThreadId) {
        let mut this = self.lock();
        this.changes += 1;
        let keys: Vec<_> = this
            .checkpoints
            .iter()
            .map(|(key, _)| key)
            .filter(|key| key.thread == *thread)
            .cloned()
            .collect();
        for key in keys {
            this.forget(&key);
        }
        let places: Vec<_> = this
            .heads
            .iter()
            .map(|(place, _)| place)
            .filter(|place| place.thread == *thread)
            .cloned()
            .collect();
        for place in places {
            this.heads.pop(&place);
        }
    }
}

/// Whether what is stored of a channel is a snapshot.
pub(crate) fn is_snapshot(stored: &Stored) -> bool {
    matches!(stored, Stored::Snapshot(_))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_the_checkpoints_that_were_not_used_for_longest_are_forgotten() {
        let key = |n: usize| Place::new(&n.to_string(), "").key(CheckpointId::from_bytes([7; 16]));
        let value = |n: usize| ChannelValue::from_json(&Json::from("x".repeat(n))).unwrap();
        let known = |bytes: usize| {
            let version = Version { counter: 1, random: 1 };
            let channel = KnownChannel { version, label: None, value: Some(value(bytes)), snapshot: true };
            Known { channels: [("a".into(), channel)].into(), ..Known::default() }
        };
        let memory = Memory::default();
        let put = |n: usize, bytes: usize| {
            let since = memory.expect(&key(n));
            memory.learned(&key(n), known(bytes), since).unwrap();
        };
        let has = |n: usize| {
            memory.lock().checkpoints.peek(&key(n)).map(|slot| {
                let known = slot.known.as_ref().unwrap();
                assert!(known.channels["a"].snapshot);
                known.channels["a"].value.is_some()
            })
        };
        let total = || {
            let this = memory.lock();
            let known = this.checkpoints.iter().filter_map(|(_, slot)| slot.known.as_ref());
            assert_eq!(known.map(|known| known.bytes()).sum::<usize>(), this.bytes);
            assert_eq!(this.values.iter().map(|(_, bytes)| bytes).sum::<usize>(), this.bytes);
        };
        for n in 0..3 {
            put(n, BYTES / 3 - 100);
        }
        memory.checkpoint(&key(0)).unwrap();
        put(3, BYTES / 3 - 100);
        assert_eq!((0..4).map(has).collect::<Vec<_>>(), [Some(true), Some(false), Some(true), Some(true)]);
        total();
        // The same checkpoint again, and one that is larger than all may be.
        put(3, 5);
        total();
        put(4, 2 * BYTES);
        assert_eq!((0..5).map(has).collect::<Vec<_>>(), [false, false, false, false, true].map(Some));
        total();
        memory.forget(&key(4));
        memory.forget_thread(&key(3).thread);
        for n in 0..2 * CHECKPOINTS {
            put(n, 7);
        }
        assert_eq!(memory.lock().values.len(), CHECKPOINTS);
        total();
    }

    #[test]
    fn a_checkpoint_that_was_forgotten_while_it_was_read_is_remembered_if_no_row_was_missed() {
        let key = |n: usize| Place::new(&n.to_string(), "").key(CheckpointId::from_bytes([7; 16]));
        let by = Author { path: String::new(), task: "a".to_owned() };
        let row = task::row(&by, Kind::Ordinary(0), Vec::new()).unwrap();
        let memory = Memory::default();
        let evict = || {
            for n in 1..=CHECKPOINTS {
                memory.expect(&key(n));
            }
        };
        // No row came.
        let since = memory.expect(&key(0));
        evict();
        assert!(memory.learned(&key(0), Known::default(), since).is_some());
        // A row came before it was forgotten, or after it, or others have asked for it since.
        for asked in [false, true] {
            let since = memory.expect(&key(0));
            memory.wrote(&key(0), &row).unwrap();
            evict();
            if asked {
                memory.expect(&key(0));
            }
            assert!(memory.learned(&key(0), Known::default(), since).is_none());
            let since = memory.expect(&key(0));
            evict();
            memory.wrote(&key(0), &row).unwrap();
            assert!(memory.learned(&key(0), Known::default(), since).is_none());
        }
        // What was forgotten on purpose may be another one now.
        let since = memory.expect(&key(0));
        memory.forget(&key(0));
        assert!(memory.learned(&key(0), Known::default(), since).is_none());
        // One that is collected all the time has every row.
        let since = memory.expect(&key(0));
        memory.wrote(&key(0), &row).unwrap();
        assert_eq!(memory.learned(&key(0), Known::default(), since).unwrap().tasks.len(), 1);
    }
}

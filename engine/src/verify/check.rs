//! The check of a thread, a checkpoint at a time: it holds those whose children are still to come.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{Rule, Violation, found_by};
use crate::channel::ChannelTable;
use crate::checkpoint::{CheckpointTuple, Stored};
use crate::foreign;
use crate::id::{ChannelName, CheckpointId, Namespace, Version};
use crate::metadata::Counters;
use crate::replay::{self, Made, Parent};
use crate::value::{ChannelValue, Element, ElementHash};

/// Checks a thread whose checkpoints come one after the other, by namespace and then by id.
///
/// It holds the checkpoints that have children to come, and a digest of the value of each version of the namespace.
#[derive(Debug)]
pub struct Check<'a> {
    table: &'a ChannelTable,
    namespace: Namespace,
    open: HashMap<CheckpointId, Open<'a>>,
    /// The channels of the namespace, by number.
    channels: HashMap<ChannelName, u32>,
    seen: HashMap<(u32, Version), Seen>,
    found: Vec<Violation>,
}

/// A checkpoint that has children to come.
#[derive(Debug)]
struct Open<'a> {
    tuple: Cow<'a, CheckpointTuple>,
    last_child: CheckpointId,
    made: Made,
    /// What follows the nearest value of each channel that is stored as changes.
    counted: BTreeMap<ChannelName, Counters>,
    /// The channels that only LangGraph can replay.
    theirs: BTreeSet<ChannelName>,
    digests: BTreeMap<ChannelName, ElementHash>,
}

/// The values that a version was found to name.
#[derive(Debug, Default)]
struct Seen {
    /// The one that was stored first.
    stored: Option<ElementHash>,
    /// The first one that was stored or replayed here: LangGraph may write down in a form of its own what is replayed here.
    ours: Option<ElementHash>,
}

impl<'a> Check<'a> {
    /// `table` replays delta channels, whatever their thread's mode; nothing of LangGraph's is replayed.
    pub fn new(table: &'a ChannelTable) -> Self {
        Self {
            table,
            namespace: Namespace::root(),
            open: HashMap::new(),
            channels: HashMap::new(),
            seen: HashMap::new(),
            found: Vec::new(),
        }
    }

    /// How many checkpoints it holds.
    pub fn held(&self) -> usize {
        self.open.len()
    }

    /// The parent of the next checkpoint, if it came.
    pub fn parent(&self, tuple: &CheckpointTuple) -> Option<&CheckpointTuple> {
        let open = self.open.get(&tuple.parent?).filter(|_| tuple.namespace == self.namespace)?;
        Some(&open.tuple)
    }

    /// What is wrong with the next checkpoint. `last_child` is the greatest id of those that name it as their parent.
    pub fn next(
        &mut self,
        tuple: Cow<'a, CheckpointTuple>,
        last_child: Option<CheckpointId>,
    ) -> Vec<Violation> {
        if tuple.namespace != self.namespace {
            self.namespace = tuple.namespace.clone();
            self.open.clear();
            self.channels.clear();
            self.seen.clear();
        }
        let id = tuple.checkpoint.id;
        // One that is not older is none, as in a lineage.
        let parent = tuple.parent.filter(|parent| *parent < id);
        // It is taken out meanwhile, so that what is found can be noted.
        let parent = parent.and_then(|parent| self.open.remove_entry(&parent));
        let open = parent.as_ref().map(|(_, open)| open);
        let above = open.map(|open| &*open.tuple);
        self.links(&tuple, above);
        self.rows(&tuple, above);
        let counted = count(&tuple, above, open.map(|open| &open.counted));
        self.counters(&tuple, &counted);
        let theirs = foreign::theirs(&tuple, above, open.map(|open| &open.theirs));
        let made_above = open.map(|open| (&*open.tuple, &open.made));
        let (made, broken) = replay::made(self.table, &tuple, made_above, |channel| theirs.contains(channel));
        match broken {
            None => self.snapshots(&tuple, made_above, &made),
            Some(error) => self.report(Rule::Replayable, &tuple, found_by(error)),
        }
        let digests = digests(&made, open);
        self.versions(&tuple, &digests);
        if let Some((id_above, open)) = parent.filter(|(_, open)| open.last_child > id) {
            self.open.insert(id_above, open);
        }
        if let Some(last_child) = last_child.filter(|last| *last > id) {
            self.open.insert(id, Open { tuple, last_child, made, counted, theirs, digests });
        }
        std::mem::take(&mut self.found)
    }

    fn report(&mut self, rule: Rule, tuple: &CheckpointTuple, found: String) {
        let at = Some((tuple.namespace.clone(), tuple.checkpoint.id));
        self.found.push(Violation { rule, thread: tuple.thread.clone(), at, found });
    }

    fn links(&mut self, tuple: &CheckpointTuple, parent: Option<&CheckpointTuple>) {
        let Some(id) = tuple.parent else { return };
        if id >= tuple.checkpoint.id {
            self.report(Rule::ParentIsOlder, tuple, format!("its parent is {id}"));
            return; // The lineage ends here.
        }
        let Some(parent) = parent else {
            self.report(Rule::ParentIsThere, tuple, format!("its parent {id} is missing"));
            return;
        };
        for (channel, entry) in &tuple.checkpoint.channels {
            let before = parent.checkpoint.channels.get(channel).map(|entry| entry.version);
            if before.is_some_and(|before| before.counter > entry.version.counter) {
                let what =
                    format!("channel {channel} is at version {:?}, its parent is newer", entry.version);
                self.report(Rule::VersionsGrow, tuple, what);
            }
        }
    }

    fn rows(&mut self, tuple: &CheckpointTuple, parent: Option<&CheckpointTuple>) {
        let mut seen = BTreeSet::new();
        for row in &tuple.writes {
            if !seen.insert(row.task) {
                self.report(Rule::OneRowATask, tuple, format!("task {} has two rows", row.task));
            }
        }
        let rows: BTreeSet<_> = match (tuple.parent, parent) {
            (Some(_), None) => return, // Already reported.
            (_, parent) => parent.iter().flat_map(|parent| &parent.writes).map(|row| row.task).collect(),
        };
        for task in tuple.checkpoint.applied.iter().filter(|task| !rows.contains(task)) {
            self.report(Rule::WritesAreThere, tuple, format!("the writes of its task {task} are missing"));
        }
    }

    /// Skips a value that no row of its step writes: an operator may have put it there, or a deletion left it. If it has
    /// the parent's version, [`Rule::OneValueAVersion`] covers it.
    fn snapshots(&mut self, tuple: &CheckpointTuple, parent: Option<Parent<'_>>, made: &Made) {
        let Some(parent) = parent.filter(|_| !foreign::wrote(tuple)) else { return };
        let applied = &tuple.checkpoint.applied;
        for (channel, entry) in &tuple.checkpoint.channels {
            let rows = parent.0.writes.iter().filter(|row| applied.contains(&row.task));
            let is_written = rows.flat_map(|row| &row.writes).any(|write| write.channel == *channel);
            if !matches!(entry.stored, Stored::Snapshot(_)) || !is_written {
                continue;
            }
            // What keeps the replay from being made is another rule's.
            let value = made.values.get(channel);
            if replay::gives(self.table, parent, applied, (channel, value)) == Ok(false) {
                let what =
                    format!("the snapshot of channel {channel} is not what the writes of its step give");
                self.report(Rule::SnapshotIsReplay, tuple, what);
            }
        }
    }

    fn counters(&mut self, tuple: &CheckpointTuple, counted: &BTreeMap<ChannelName, Counters>) {
        if !counted.is_empty() && !tuple.metadata.delta_marker {
            let what = "it stores changes without the marker of delta mode".to_owned();
            self.report(Rule::Marked, tuple, what);
        }
        for (channel, actual) in counted {
            match tuple.metadata.counters.get(channel) {
                None => self.report(Rule::Counted, tuple, format!("channel {channel} has no counters")),
                Some(said) if said.updates < actual.updates || said.supersteps < actual.supersteps => {
                    let what = format!(
                        "channel {channel} claims {} updates and {} supersteps, but there are {} and {}",
                        said.updates, said.supersteps, actual.updates, actual.supersteps
                    );
                    self.report(Rule::Counted, tuple, what);
                }
                Some(_) => {}
            }
        }
        for channel in tuple.metadata.counters.keys().filter(|channel| !counted.contains_key(*channel)) {
            self.report(
                Rule::NotCounted,
                tuple,
                format!("channel {channel} has counters but stores no changes"),
            );
        }
    }

    /// Whether each version names one value.
    fn versions(&mut self, tuple: &CheckpointTuple, digests: &BTreeMap<ChannelName, ElementHash>) {
        let is_theirs = foreign::wrote(tuple);
        for (channel, entry) in &tuple.checkpoint.channels {
            let Some(digest) = digests.get(channel).copied() else { continue };
            let next = u32::try_from(self.channels.len()).unwrap_or(u32::MAX);
            let number = match self.channels.get(channel) {
                Some(number) => *number,
                None => *self.channels.entry(channel.clone()).or_insert(next),
            };
            let seen = self.seen.entry((number, entry.version)).or_default();
            let is_another = match seen.stored {
                Some(first) if entry.stored.value().is_some() => digest != first,
                _ => {
                    if entry.stored.value().is_some() {
                        seen.stored = Some(digest);
                    }
                    !is_theirs && *seen.ours.get_or_insert(digest) != digest
                }
            };
            if is_another {
                let what = format!("channel {channel} has another value elsewhere at the same version");
                self.report(Rule::OneValueAVersion, tuple, what);
            }
        }
    }
}

/// Counts the updates and supersteps of each channel that a checkpoint stores as changes. `since` is what was counted at its
/// parent.
pub(super) fn count(
    tuple: &CheckpointTuple,
    parent: Option<&CheckpointTuple>,
    since: Option<&BTreeMap<ChannelName, Counters>>,
) -> BTreeMap<ChannelName, Counters> {
    let mut counted = BTreeMap::new();
    for (channel, entry) in &tuple.checkpoint.channels {
        if entry.stored != Stored::Sentinel {
            continue;
        }
        let since = since.and_then(|since| since.get(channel).copied());
        let mut counters = since.unwrap_or_default();
        let rows = parent.map_or(&[][..], |parent| &parent.writes);
        let applied = rows.iter().filter(|row| tuple.checkpoint.applied.contains(&row.task));
        let written = applied.flat_map(|row| &row.writes).any(|write| write.channel == *channel);
        counters.updates += u64::from(written);
        counters.supersteps += u64::from(!tuple.checkpoint.applied.is_empty());
        counted.insert(channel.clone(), counters);
    }
    counted
}

/// Digests of the values of a checkpoint. That of a list goes on from its parent's, so that it costs what was added.
fn digests(made: &Made, parent: Option<&Open<'_>>) -> BTreeMap<ChannelName, ElementHash> {
    let digest = |channel: &ChannelName, value: &ChannelValue| {
        let list = match value {
            ChannelValue::Plain(encoded) => return Element::hash_of(&encoded.bytes),
            ChannelValue::List(list) => list,
        };
        let above = parent.and_then(|parent| {
            let above = parent.made.values.get(channel)?.as_list().filter(|above| list.starts_with(above))?;
            Some((above.len(), *parent.digests.get(channel)?))
        });
        let (known, mut digest) = above.unwrap_or_else(|| (0, Element::hash_of(b"list")));
        for element in list.iter_from(known) {
            let mut both = [0; 32];
            both[..16].copy_from_slice(&digest);
            both[16..].copy_from_slice(element.hash());
            digest = Element::hash_of(&both);
        }
        digest
    };
    made.values.iter().map(|(channel, value)| (channel.clone(), digest(channel, value))).collect()
}

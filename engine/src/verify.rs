//! Checks the invariants of a thread, and repairs what can be repaired safely.
//!
//! This checks what a saver returns; the read itself checks the saver's own checksums and references.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use crate::channel::ChannelTable;
use crate::checkpoint::{CheckpointTuple, Stored};
use crate::deletion::Lineage;
use crate::error::{Error, Result};
use crate::foreign;
use crate::id::{ChannelName, CheckpointId, Namespace, ThreadId, Version};
use crate::metadata::Counters;
use crate::replay::{Replay, Values};
use crate::saver::{Rewrite, Saver, ThreadImage};
use crate::value::ChannelValue;

/// What can be wrong with a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// The thread can be read: no row is missing, every checksum matches.
    Readable,
    /// The parent exists.
    ParentIsThere,
    /// The parent is older: ids grow along every lineage.
    ParentIsOlder,
    /// Every applied task has its row under the parent; a root applied none.
    WritesAreThere,
    /// A task has one row under a checkpoint.
    OneRowATask,
    /// A channel that is stored as changes can be replayed.
    Replayable,
    /// A snapshot is what replaying its own step gives.
    SnapshotIsReplay,
    /// A checkpoint that stores changes is marked, so that a process in `full` mode does not read it.
    Marked,
    /// A channel that is stored as changes has counters, which claim at least as much as there is to replay.
    Counted,
    /// A channel that stores its value has no counters.
    NotCounted,
    /// A version names one value, whether that is stored or replayed.
    OneValueAVersion,
    /// The version of a channel does not go back along a lineage.
    VersionsGrow,
}

impl Rule {
    /// Whether [`repair`] can repair it safely.
    pub fn is_repairable(self) -> bool {
        matches!(self, Self::Marked | Self::Counted | Self::NotCounted)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Readable => "readable",
            Self::ParentIsThere => "parent is there",
            Self::ParentIsOlder => "parent is older",
            Self::WritesAreThere => "writes are there",
            Self::OneRowATask => "one row a task",
            Self::Replayable => "replayable",
            Self::SnapshotIsReplay => "equal to its replay",
            Self::Marked => "marked",
            Self::Counted => "counted",
            Self::NotCounted => "not counted",
            Self::OneValueAVersion => "one value a version",
            Self::VersionsGrow => "versions grow",
        })
    }
}

/// A broken rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The rule.
    pub rule: Rule,
    /// The thread.
    pub thread: ThreadId,
    /// The namespace and the checkpoint; none if the thread could not be read at all.
    pub at: Option<(Namespace, CheckpointId)>,
    /// What was found.
    pub found: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "thread {}", self.thread)?;
        if let Some((namespace, id)) = &self.at {
            if !namespace.as_str().is_empty() {
                write!(f, ", namespace {namespace}")?;
            }
            write!(f, ", checkpoint {id}")?;
        }
        write!(f, ": not {}: {}", self.rule, self.found)
    }
}

/// Checks a thread. `table` replays its delta channels, whatever its own mode; nothing of LangGraph's is replayed.
pub fn verify_image(image: &ThreadImage, table: &ChannelTable) -> Vec<Violation> {
    let lineage = Lineage::new(image);
    let replay = Replay::new(&lineage, table);
    Check { lineage: &lineage, replay, found: Vec::new(), behind: HashMap::new() }.run()
}

/// Reads and checks a thread. A thread that cannot be read is a violation, too.
///
/// # Errors
/// Those of the saver that say nothing about the thread, such as [`Error::Unavailable`].
pub async fn verify(saver: &dyn Saver, thread: &ThreadId, table: &ChannelTable) -> Result<Vec<Violation>> {
    match saver.read_thread(thread).await {
        Ok(image) => Ok(verify_image(&image, table)),
        Err(error @ (Error::Corrupt { .. } | Error::BrokenLineage { .. } | Error::InvalidInput(_))) => {
            let (rule, thread, found) = (Rule::Readable, thread.clone(), found_by(error));
            Ok(vec![Violation { rule, thread, at: None, found }])
        }
        Err(error) => Err(error),
    }
}

/// What a read found wrong, without the remedy: a store may have many violations.
fn found_by(error: Error) -> String {
    match error {
        Error::BrokenLineage { checkpoint, missing, .. } => {
            format!("checkpoint {checkpoint}: broken lineage: {missing}")
        }
        other => other.to_string(),
    }
}

/// The result of a repair: the violations that were repaired, and the remaining ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Repair {
    /// Repaired violations.
    pub repaired: Vec<Violation>,
    /// Remaining violations, which cannot be repaired safely. Restore a backup, or delete the damaged part.
    pub left: Vec<Violation>,
}

/// Makes the safe repairs ([`Rule::is_repairable`]), in one atomic change. Changes nothing else. A checkpoint whose
/// parent or rows are missing stays as it is: no rewrite takes it.
///
/// # Errors
/// [`Error::Stale`] if another writer changed the thread meanwhile; those of the saver. [`Error::InDoubt`] also if the
/// repair was stored, and the thread could not be read again to say what is left.
pub async fn repair(saver: &dyn Saver, thread: &ThreadId, table: &ChannelTable) -> Result<Repair> {
    let found = verify(saver, thread, table).await?;
    let (repairable, left): (Vec<_>, Vec<_>) = found.into_iter().partition(|v| v.rule.is_repairable());
    if repairable.is_empty() {
        return Ok(Repair { repaired: repairable, left });
    }
    let image = saver.read_thread(thread).await?;
    let lineage = Lineage::new(&image);
    let wrong: BTreeSet<_> = repairable.iter().filter_map(|violation| violation.at.clone()).collect();
    let mut behind = HashMap::new();
    let mut put = Vec::new();
    for (place, tuple) in &image.checkpoints {
        let counted = count(&lineage, tuple, &mut behind);
        if !wrong.contains(place) || !lineage.can_be_put(tuple) {
            continue;
        }
        let mut new = tuple.clone();
        new.metadata.delta_marker |= !counted.is_empty();
        new.metadata.counters.retain(|channel, _| counted.contains_key(channel));
        for (channel, counters) in counted {
            let said = new.metadata.counters.entry(channel).or_default();
            said.updates = said.updates.max(counters.updates);
            said.supersteps = said.supersteps.max(counters.supersteps);
        }
        put.push(new);
    }
    saver.rewrite_thread(thread, &image.revision, Rewrite { put, ..Rewrite::default() }).await?;
    let still = verify(saver, thread, table).await.map_err(|error| match error {
        Error::Unavailable { saver, reason } => Error::InDoubt {
            saver,
            reason: format!(
                "the repair of thread {thread} was stored, and the thread could not be read again: {reason}"
            ),
        },
        error => error,
    })?;
    let repaired = repairable.into_iter().filter(|violation| !still.contains(violation)).collect();
    Ok(Repair { repaired, left: still })
}

/// What follows the nearest value of each channel that is stored as changes, by checkpoint.
type Behind = HashMap<(Namespace, CheckpointId), BTreeMap<ChannelName, Counters>>;

/// Counts the updates and supersteps of each channel that a checkpoint stores as changes; its parent was counted before.
fn count(
    lineage: &Lineage<'_>,
    tuple: &CheckpointTuple,
    behind: &mut Behind,
) -> BTreeMap<ChannelName, Counters> {
    let mut counted = BTreeMap::new();
    let parent = lineage.parent(tuple);
    for (channel, entry) in &tuple.checkpoint.channels {
        if entry.stored != Stored::Sentinel {
            continue;
        }
        let since = parent.and_then(|parent| {
            behind.get(&(tuple.namespace.clone(), parent.checkpoint.id))?.get(channel).copied()
        });
        let mut counters = since.unwrap_or_default();
        let rows = parent.map_or(&[][..], |parent| &parent.writes);
        let applied = rows.iter().filter(|row| tuple.checkpoint.applied.contains(&row.task));
        let written = applied.flat_map(|row| &row.writes).any(|write| write.channel == *channel);
        counters.updates += u64::from(written);
        counters.supersteps += u64::from(!tuple.checkpoint.applied.is_empty());
        counted.insert(channel.clone(), counters);
    }
    behind.insert((tuple.namespace.clone(), tuple.checkpoint.id), counted.clone());
    counted
}

struct Check<'a> {
    lineage: &'a Lineage<'a>,
    replay: Replay<'a>,
    found: Vec<Violation>,
    behind: Behind,
}

impl<'a> Check<'a> {
    fn run(mut self) -> Vec<Violation> {
        type Place<'p> = (&'p Namespace, &'p ChannelName, Version);
        let mut stored: HashMap<Place<'_>, &ChannelValue> = HashMap::new();
        // Those that a checkpoint yet to come has, too: a replayed list takes kilobytes of its own.
        let mut ours: HashMap<Place<'_>, ChannelValue> = HashMap::new();
        let mut left: HashMap<Place<'_>, usize> = HashMap::new();
        for (place, tuple) in &self.lineage.image().checkpoints {
            for (channel, entry) in &tuple.checkpoint.channels {
                *left.entry((&place.0, channel, entry.version)).or_default() += 1;
            }
        }
        for (place, tuple) in &self.lineage.image().checkpoints {
            self.links(tuple);
            self.rows(tuple);
            self.counters(tuple);
            let replayed = match self.replay.values(place, tuple) {
                Ok(values) => {
                    self.snapshots(tuple, &values);
                    values
                }
                Err(error) => {
                    self.report(Rule::Replayable, tuple, found_by(error));
                    Values::new()
                }
            };
            let is_theirs = foreign::wrote(tuple);
            for (channel, entry) in &tuple.checkpoint.channels {
                let at = (&place.0, channel, entry.version);
                let held = entry.stored.value();
                let is_another = if let (Some(value), Some(first)) = (held, stored.get(&at).copied()) {
                    value != first
                } else {
                    stored.extend(held.map(|value| (at, value)));
                    // LangGraph may write down in a form of its own what is replayed here.
                    let value = held.or_else(|| replayed.get(channel)).filter(|_| !is_theirs);
                    value.is_some_and(|value| ours.entry(at).or_insert_with(|| value.clone()) != value)
                };
                if is_another {
                    let what = format!("channel {channel} has another value elsewhere at the same version");
                    self.report(Rule::OneValueAVersion, tuple, what);
                }
                let others = left.entry(at).and_modify(|count| *count -= 1).or_default();
                if *others == 0 {
                    ours.remove(&at);
                }
            }
        }
        self.found
    }

    fn report(&mut self, rule: Rule, tuple: &CheckpointTuple, found: String) {
        let at = Some((tuple.namespace.clone(), tuple.checkpoint.id));
        self.found.push(Violation { rule, thread: tuple.thread.clone(), at, found });
    }

    fn links(&mut self, tuple: &'a CheckpointTuple) {
        let Some(id) = tuple.parent else { return };
        if id >= tuple.checkpoint.id {
            self.report(Rule::ParentIsOlder, tuple, format!("its parent is {id}"));
            return; // The lineage ends here.
        }
        let Some(parent) = self.lineage.parent(tuple) else {
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

    fn rows(&mut self, tuple: &'a CheckpointTuple) {
        let mut seen = BTreeSet::new();
        for row in &tuple.writes {
            if !seen.insert(row.task) {
                self.report(Rule::OneRowATask, tuple, format!("task {} has two rows", row.task));
            }
        }
        let rows: BTreeSet<_> = match (tuple.parent, self.lineage.parent(tuple)) {
            (Some(_), None) => return, // Already reported.
            (_, parent) => parent.iter().flat_map(|parent| &parent.writes).map(|row| row.task).collect(),
        };
        for task in tuple.checkpoint.applied.iter().filter(|task| !rows.contains(task)) {
            self.report(Rule::WritesAreThere, tuple, format!("the writes of its task {task} are missing"));
        }
    }

    /// Skips a value that no row of its step writes: an operator may have put it there, or a deletion left it. If it has
    /// the parent's version, [`Rule::OneValueAVersion`] covers it.
    fn snapshots(&mut self, tuple: &'a CheckpointTuple, values: &Values) {
        let Some(parent) = self.lineage.parent(tuple).filter(|_| !foreign::wrote(tuple)) else { return };
        let applied = &tuple.checkpoint.applied;
        for (channel, entry) in &tuple.checkpoint.channels {
            let rows = parent.writes.iter().filter(|row| applied.contains(&row.task));
            let is_written = rows.flat_map(|row| &row.writes).any(|write| write.channel == *channel);
            if !matches!(entry.stored, Stored::Snapshot(_)) || !is_written {
                continue;
            }
            // What keeps the replay from being made is another rule's.
            if self.replay.gives(parent, applied, channel, values) == Ok(false) {
                let what =
                    format!("the snapshot of channel {channel} is not what the writes of its step give");
                self.report(Rule::SnapshotIsReplay, tuple, what);
            }
        }
    }

    fn counters(&mut self, tuple: &'a CheckpointTuple) {
        let counted = count(self.lineage, tuple, &mut self.behind);
        if !counted.is_empty() && !tuple.metadata.delta_marker {
            let what = "it stores changes without the marker of delta mode".to_owned();
            self.report(Rule::Marked, tuple, what);
        }
        for (channel, actual) in &counted {
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
}

//! Checks the invariants of a thread, and repairs what can be repaired safely.
//!
//! This checks what a saver returns; the read itself checks the saver's own checksums and references.

mod check;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use crate::channel::ChannelTable;
use crate::deletion::Lineage;
use crate::error::{Error, Result};
use crate::id::{ChannelName, CheckpointId, Namespace, ThreadId};
use crate::metadata::Counters;
use crate::saver::{LocalKey, Rewrite, Saver, ThreadImage};

pub use self::check::Check;
use self::check::count;

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
    let mut check = Check::new(table);
    let mut found = Vec::new();
    for (place, tuple) in &image.checkpoints {
        let last_child = lineage.children(place).last().map(|child| child.checkpoint.id);
        found.extend(check.next(Cow::Borrowed(tuple), last_child));
    }
    found
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
    let mut behind: HashMap<LocalKey, BTreeMap<ChannelName, Counters>> = HashMap::new();
    let mut put = Vec::new();
    for (place, tuple) in &image.checkpoints {
        let parent = lineage.parent(tuple);
        let since = parent.and_then(|parent| behind.get(&(place.0.clone(), parent.checkpoint.id)));
        let counted = count(tuple, parent, since);
        behind.insert(place.clone(), counted.clone());
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

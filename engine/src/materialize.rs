//! Computes values from stored entries: a seed and the writes that checkpoints applied since.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::channel::ChannelTable;
use crate::checkpoint::{ChannelEntry, CheckpointKey, CheckpointTuple, Stored};
use crate::error::{Error, Result};
use crate::foreign;
use crate::id::{ChannelName, CheckpointId};
use crate::metadata::Counters;
use crate::saver::{
    ChannelHistory, CheckpointSelector, DeltaHistory, ListQuery, Load, Saver, ThreadImage, fallback,
};
use crate::state::{Channel, StateSnapshot};
use crate::value::ChannelValue;

/// Where paths are read.
#[derive(Clone, Copy)]
pub(crate) enum Paths<'a> {
    /// From the saver, perhaps later than the checkpoints. What was removed or stored in another way between looks like
    /// damage then; only an image can prove that it is.
    Saver(&'a dyn Saver),
    /// From the image that the checkpoints are of.
    Image(&'a ThreadImage),
}

impl Paths<'_> {
    async fn history(
        self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        match self {
            Self::Saver(saver) => saver.delta_history(at, channels, reach).await,
            Self::Image(image) => fallback::image_history(image, at, channels, reach),
        }
    }

    /// Refuses paths to a checkpoint on which LangGraph changed the channel: its reducers are not known here.
    async fn refuse_foreign(self, tuple: &CheckpointTuple, paths: &DeltaHistory) -> Result<()> {
        let steps = paths.values().flat_map(|path| &path.steps).map(|step| step.checkpoint);
        let Some(oldest) = steps.min().filter(|_| foreign::may_follow(tuple)) else { return Ok(()) };
        let key = tuple.key();
        let read;
        let on_the_way: BTreeMap<CheckpointId, &CheckpointTuple> = match self {
            Self::Image(image) => {
                let tuples = image.checkpoints.values().filter(|tuple| tuple.namespace == key.namespace);
                tuples.map(|tuple| (tuple.checkpoint.id, tuple)).collect()
            }
            Self::Saver(saver) => {
                read = framed(saver, &key, oldest).await?;
                read.iter().map(|tuple| (tuple.checkpoint.id, tuple)).collect()
            }
        };
        for (channel, path) in paths {
            let mut before = path.seed.as_ref().map(|seed| seed.version);
            for step in &path.steps {
                // One that was removed since its path was read.
                let gone = || Error::NotFound { thread: key.thread.clone(), checkpoint: step.checkpoint };
                let at = on_the_way.get(&step.checkpoint).copied().ok_or_else(gone)?;
                if foreign::changed_since(at, before, channel, !step.writes.is_empty()) {
                    return Err(foreign::not_replayed(tuple, channel));
                }
                before = foreign::version(at, channel);
            }
        }
        Ok(())
    }
}

/// How many checkpoints [`framed`] reads at once.
const PAGE: usize = 100;

/// The checkpoints from `at` back to the id `oldest`, with their frames.
async fn framed(saver: &dyn Saver, at: &CheckpointKey, oldest: CheckpointId) -> Result<Vec<CheckpointTuple>> {
    let CheckpointKey { thread, namespace, id } = at;
    let load = Load::Only([ChannelName::from(foreign::FRAME)].into());
    let selector = CheckpointSelector {
        thread: thread.clone(),
        namespace: namespace.clone(),
        id: Some(*id),
        load: load.clone(),
    };
    let mut found: Vec<CheckpointTuple> = saver.get(&selector).await?.into_iter().collect();
    while let Some(last) = found.last().filter(|last| last.checkpoint.id > oldest) {
        let query = ListQuery {
            namespace: Some(namespace.clone()),
            before: Some(last.checkpoint.id),
            limit: Some(PAGE),
            load: load.clone(),
            ..ListQuery::new(thread)
        };
        let page = saver.list(&query).await?;
        if page.is_empty() {
            break;
        }
        found.extend(page);
    }
    Ok(found)
}

/// Materializes checkpoints returned by a saver. `tuples` are newest first; one history read serves all that are on the
/// lineage of the newest, and one more each branch.
///
/// # Errors
/// [`Error::BrokenLineage`] if something the values need is missing, [`Error::ForeignChanges`], and the saver's.
pub(crate) async fn materialize(
    paths: Paths<'_>,
    table: &ChannelTable,
    tuples: Vec<CheckpointTuple>,
    load: &Load,
) -> Result<Vec<StateSnapshot>> {
    let mut replayed = Replayed::new();
    for (at, tuple) in tuples.iter().enumerate() {
        let id = tuple.checkpoint.id;
        let missing: BTreeSet<ChannelName> = sentinels(table, tuple, load)
            .filter(|channel| !replayed.contains_key(&(id, (*channel).clone())))
            .cloned()
            .collect();
        if missing.is_empty() {
            continue;
        }
        let history = paths.history(&tuple.key(), &missing, Some(reach(&tuples[at..], &missing))).await?;
        paths.refuse_foreign(tuple, &history).await?;
        for (channel, path) in history {
            for (checkpoint, value) in replay(table, &channel, path)? {
                replayed.insert((checkpoint, channel.clone()), value);
            }
        }
    }
    tuples.into_iter().map(|tuple| complete(table, tuple, load, &replayed)).collect()
}

/// The oldest checkpoint that the path of the first one serves, too: the path extends past nearer snapshots, from parent to
/// parent on the page. What is not on the page, because it was filtered out, may be a value at which a path must end.
fn reach(page: &[CheckpointTuple], channels: &BTreeSet<ChannelName>) -> CheckpointId {
    let mut lineage = vec![&page[0]];
    if !foreign::may_follow(lineage[0]) {
        for tuple in &page[1..] {
            let child = lineage[lineage.len() - 1];
            if tuple.namespace == child.namespace && child.parent == Some(tuple.checkpoint.id) {
                lineage.push(tuple);
            }
        }
    }
    let begins_at = |at: &usize| {
        let parent = lineage.get(at + 1).copied();
        channels.iter().any(|channel| begins(lineage[*at], parent, channel))
    };
    let end = (1..lineage.len()).find(begins_at).unwrap_or(lineage.len());
    lineage[end - 1].checkpoint.id
}

/// Whether no rows lead to the value of a channel, so that no path may extend past it: it was stored in full mode or by a
/// program with other reducers, or the checkpoint applied nothing. One whose ancestors were deleted is such a one. A note
/// applies nothing either, but repeats its parent's version, which names the same value. What led to the values of
/// LangGraph's checkpoints is not replayed.
fn begins(tuple: &CheckpointTuple, parent: Option<&CheckpointTuple>, channel: &ChannelName) -> bool {
    let Some(entry) = tuple.checkpoint.channels.get(channel) else { return false };
    let before = parent.and_then(|parent| parent.checkpoint.channels.get(channel));
    match entry.stored {
        Stored::Value(_) => true,
        Stored::Snapshot(_) => {
            tuple.checkpoint.applied.is_empty() && before.is_none_or(|before| before.version != entry.version)
        }
        Stored::Sentinel | Stored::Held => false,
    }
}

/// Values by checkpoint and channel.
type Replayed = HashMap<(CheckpointId, ChannelName), Made>;

/// A value, and the contents of its path: updates of the channel, and supersteps that applied a task.
struct Made {
    value: ChannelValue,
    path: Counters,
}

fn sentinels<'a>(
    table: &'a ChannelTable,
    tuple: &'a CheckpointTuple,
    load: &'a Load,
) -> impl Iterator<Item = &'a ChannelName> {
    let entries = tuple.checkpoint.channels.iter();
    let sentinels = entries.filter(|(_, entry)| entry.stored == Stored::Sentinel).map(|(name, _)| name);
    sentinels.filter(|name| load.wants(name) && table.behaviour(name).is_some())
}

/// The value of the channel at each checkpoint of the path.
fn replay(
    table: &ChannelTable,
    channel: &ChannelName,
    path: ChannelHistory,
) -> Result<Vec<(CheckpointId, Made)>> {
    let Some(behaviour) = table.behaviour(channel) else { return Ok(Vec::new()) };
    let mut value = path.seed.map(|seed| {
        let mut value = seed.value;
        if let ChannelValue::List(list) = &mut value {
            list.rebase(seed.version);
        }
        value
    });
    let mut values = Vec::with_capacity(path.steps.len());
    let mut path_so_far = Counters::default();
    for step in path.steps {
        path_so_far.supersteps += u64::from(step.tasks > 0);
        path_so_far.updates += u64::from(!step.writes.is_empty());
        let writes: Vec<_> = step.writes.iter().collect();
        value = behaviour.apply(channel, value, &writes)?;
        if let Some(value) = &value {
            values.push((step.checkpoint, Made { value: value.clone(), path: path_so_far }));
        }
    }
    Ok(values)
}

fn complete(
    table: &ChannelTable,
    tuple: CheckpointTuple,
    load: &Load,
    replayed: &Replayed,
) -> Result<StateSnapshot> {
    let key = tuple.key();
    let mut channels = BTreeMap::new();
    for (name, ChannelEntry { version, stored }) in tuple.checkpoint.channels {
        let known = load.wants(&name) && table.behaviour(&name).is_some();
        let (value, complete) = match stored {
            Stored::Value(mut value) | Stored::Snapshot(mut value) => {
                if let ChannelValue::List(list) = &mut value {
                    list.rebase(version);
                }
                (known.then_some(value), true)
            }
            Stored::Held if known => {
                return Err(Error::corrupt(
                    format!("thread {}, checkpoint {}", key.thread, key.id),
                    format!("the saver did not load channel {name}"),
                ));
            }
            Stored::Held => (None, true),
            Stored::Sentinel if known => {
                let broken = |missing| Error::broken(&key.thread, key.id, missing);
                let Made { value, path } = replayed
                    .get(&(key.id, name.clone()))
                    .ok_or_else(|| broken(format!("no write of channel {name} was found")))?;
                let counters = tuple.metadata.counters.get(&name);
                let expected = counters.ok_or_else(|| broken(format!("channel {name} has no counters")))?;
                if let Some(missing) = expected.lacking_in(*path, &name) {
                    return Err(broken(missing));
                }
                (Some(value.clone()), false)
            }
            Stored::Sentinel => (None, false),
        };
        channels.insert(name, Channel { version, value, complete });
    }
    Ok(StateSnapshot {
        key,
        parent: tuple.parent,
        metadata: tuple.metadata,
        next: tuple.checkpoint.next,
        applied: tuple.checkpoint.applied,
        writes: tuple.writes,
        channels: Arc::new(channels),
    })
}

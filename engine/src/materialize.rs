//! From stored entries to values: a seed and the writes that checkpoints applied since.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::channel::ChannelTable;
use crate::checkpoint::{ChannelEntry, CheckpointTuple, Stored};
use crate::error::{Error, Result};
use crate::id::{ChannelName, CheckpointId};
use crate::saver::{ChannelHistory, Load, Saver};
use crate::state::{Channel, StateSnapshot};
use crate::value::ChannelValue;

/// Materializes checkpoints that a saver returned. `tuples` are newest first; one history read serves all that lie on
/// the lineage of the newest, one more each branch beside it.
///
/// # Errors
/// [`Error::BrokenLineage`] if something that the values need is missing, and the saver's.
pub(crate) async fn materialize(
    saver: &dyn Saver,
    table: &ChannelTable,
    tuples: Vec<CheckpointTuple>,
    load: &Load,
) -> Result<Vec<StateSnapshot>> {
    let mut replayed = Replayed::new();
    for tuple in &tuples {
        let id = tuple.checkpoint.id;
        let missing: BTreeSet<ChannelName> = sentinels(table, tuple, load)
            .filter(|channel| !replayed.contains_key(&(id, (*channel).clone())))
            .cloned()
            .collect();
        if missing.is_empty() {
            continue;
        }
        // The oldest checkpoint of the page: the path goes on past nearer seeds to serve the rest of the page too.
        let reach = tuples.iter().filter(|t| t.namespace == tuple.namespace).map(|t| t.checkpoint.id).min();
        let history = saver.delta_history(&tuple.key(), &missing, reach).await?;
        for (channel, path) in history {
            for (checkpoint, value, updates) in replay(table, &channel, path)? {
                replayed.insert((checkpoint, channel.clone()), (value, updates));
            }
        }
    }
    tuples.into_iter().map(|tuple| complete(table, tuple, load, &replayed)).collect()
}

/// Values by checkpoint and channel, with the number of updates that the path to them held.
type Replayed = HashMap<(CheckpointId, ChannelName), (ChannelValue, u64)>;

fn sentinels<'a>(
    table: &'a ChannelTable,
    tuple: &'a CheckpointTuple,
    load: &'a Load,
) -> impl Iterator<Item = &'a ChannelName> {
    let entries = tuple.checkpoint.channels.iter();
    let sentinels = entries.filter(|(_, entry)| entry.stored == Stored::Sentinel).map(|(name, _)| name);
    sentinels.filter(|name| load.wants(name) && table.behaviour(name).is_some())
}

/// The value of the channel at each checkpoint of the path, and how many updates the path held up to there.
fn replay(
    table: &ChannelTable,
    channel: &ChannelName,
    path: ChannelHistory,
) -> Result<Vec<(CheckpointId, ChannelValue, u64)>> {
    let Some(behaviour) = table.behaviour(channel) else { return Ok(Vec::new()) };
    let mut value = path.seed.map(|seed| {
        let mut value = seed.value;
        if let ChannelValue::List(list) = &mut value {
            list.rebase(seed.version);
        }
        value
    });
    let mut values = Vec::with_capacity(path.steps.len());
    let mut updates = 0;
    for step in path.steps {
        updates += u64::from(!step.writes.is_empty());
        let writes: Vec<_> = step.writes.iter().collect();
        value = behaviour.apply(channel, value, &writes)?;
        if let Some(value) = &value {
            values.push((step.checkpoint, value.clone(), updates));
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
                let (value, found) = replayed
                    .get(&(key.id, name.clone()))
                    .ok_or_else(|| broken(format!("no write of channel {name} was found")))?;
                // The path may begin before the snapshot that the counters start from, so it may hold more.
                let counters = tuple.metadata.counters.get(&name);
                let expected =
                    counters.ok_or_else(|| broken(format!("channel {name} has no counters")))?.updates;
                if *found < expected {
                    return Err(broken(format!(
                        "{expected} updates of channel {name} since its snapshot, found {found}"
                    )));
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
        channels,
    })
}

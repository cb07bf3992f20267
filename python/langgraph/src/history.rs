//! What delta channels are replayed from.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::{ChannelName, CheckpointId};
use threadkeep::saver::{CheckpointSelector, ListQuery, Load, Saver};
use threadkeep::{Error, Result};

use crate::frame::FRAME;
use crate::known::is_snapshot;
use crate::types::{ChannelReplay, Pending, Place, Seed};
use crate::{foreign, task};

/// Checkpoints read at once: the usual distance of two snapshots.
const PAGE: usize = 128;

/// For each channel, the nearest value at an ancestor of `at`, and the writes that were applied since, oldest first.
///
/// The pages of a long path are read one after the other, and the thread may be rewritten or deleted in between. So what is
/// missing is looked for once more, in the whole thread at one moment.
///
/// # Errors
/// [`Error::NotFound`] if `at` does not exist; [`Error::BrokenLineage`] if an ancestor or the row of an applied task is
/// missing; those of the saver.
pub(crate) async fn replay(
    saver: &Arc<dyn Saver>,
    place: &Place,
    at: CheckpointId,
    channels: &BTreeSet<ChannelName>,
) -> Result<BTreeMap<ChannelName, ChannelReplay>> {
    match in_pages(saver, place, at, channels).await {
        Err(Error::BrokenLineage { .. }) => at_once(saver, place, at, channels).await,
        replayed => replayed,
    }
}

async fn in_pages(
    saver: &Arc<dyn Saver>,
    place: &Place,
    at: CheckpointId,
    channels: &BTreeSet<ChannelName>,
) -> Result<BTreeMap<ChannelName, ChannelReplay>> {
    let found = saver.get(&CheckpointSelector::at(&place.key(at)).loading(Load::None)).await?;
    let mut walk = Walk::new(place, at, found, channels)?;
    let mut query = ListQuery {
        namespace: Some(place.namespace.clone()),
        before: Some(at),
        limit: Some(PAGE),
        load: Load::Only(channels.iter().cloned().chain([FRAME.into()]).collect()),
        ..ListQuery::new(&place.thread)
    };
    while walk.next().is_some() {
        let page = saver.list(&query).await?;
        query.before = page.last().map(|tuple| tuple.checkpoint.id);
        for tuple in page {
            // What is not an ancestor is on another branch.
            if walk.next() == Some(tuple.checkpoint.id) {
                walk.enter(saver, tuple).await?;
            }
        }
        // The pages have passed it.
        if walk.next().is_some_and(|next| query.before.is_none_or(|before| before < next)) {
            return Err(missing(place, at));
        }
    }
    Ok(walk.end())
}

async fn at_once(
    saver: &Arc<dyn Saver>,
    place: &Place,
    at: CheckpointId,
    channels: &BTreeSet<ChannelName>,
) -> Result<BTreeMap<ChannelName, ChannelReplay>> {
    let mut image = saver.read_thread(&place.thread).await?;
    let mut take = |id| image.checkpoints.remove(&(place.namespace.clone(), id));
    let mut walk = Walk::new(place, at, take(at), channels)?;
    while let Some(parent) = walk.next() {
        walk.enter(saver, take(parent).ok_or_else(|| missing(place, at))?).await?;
    }
    Ok(walk.end())
}

fn missing(place: &Place, at: CheckpointId) -> Error {
    Error::broken(&place.thread, at, "an ancestor is missing")
}

struct Walk {
    child: CheckpointTuple,
    /// The channels whose value was not found yet.
    open: BTreeSet<ChannelName>,
    seeds: BTreeMap<ChannelName, Seed>,
    /// Newest first.
    steps: BTreeMap<ChannelName, Vec<Vec<Pending>>>,
    /// Whether the checkpoints on the way that carry on messages of the gateway carry on a graph's changes of them:
    /// until one with the graph's own.
    carried: bool,
}

impl Walk {
    /// # Errors
    /// [`Error::NotFound`] if the checkpoint was not found.
    fn new(
        place: &Place,
        at: CheckpointId,
        found: Option<CheckpointTuple>,
        channels: &BTreeSet<ChannelName>,
    ) -> Result<Self> {
        Ok(Self {
            child: found.ok_or_else(|| Error::NotFound { thread: place.thread.clone(), checkpoint: at })?,
            open: channels.clone(),
            seeds: BTreeMap::new(),
            steps: channels.iter().map(|channel| (channel.clone(), Vec::new())).collect(),
            carried: false,
        })
    }

    /// The parent that the path goes on to; none once every channel has its value.
    fn next(&self) -> Option<CheckpointId> {
        self.child.parent.filter(|_| !self.open.is_empty())
    }

    /// Goes from the child to its parent. Messages of the gateway are a value there, also if they are stored as changes: a
    /// graph's reducer does not know the gateway's rows.
    async fn enter(&mut self, saver: &Arc<dyn Saver>, mut parent: CheckpointTuple) -> Result<()> {
        let foreign = self.open.contains(MESSAGES_CHANNEL) && foreign::has_messages(&parent);
        self.carried &= foreign;
        if foreign && !self.carried {
            self.carried = !foreign::complete(saver, &mut parent).await.map_err(|error| match error {
                // It was deleted since it was read.
                Error::NotFound { thread, checkpoint } => Error::broken(
                    &thread,
                    self.child.checkpoint.id,
                    format!("ancestor {checkpoint} is missing"),
                ),
                error => error,
            })?;
        }
        self.step(parent, foreign)
    }

    /// `foreign`: whether the parent has messages of the gateway.
    fn step(&mut self, parent: CheckpointTuple, foreign: bool) -> Result<()> {
        let mut rows = Vec::with_capacity(self.child.checkpoint.applied.len());
        for id in &self.child.checkpoint.applied {
            let row = parent.writes.iter().find(|row| row.task == *id).ok_or_else(|| {
                let missing = format!("the writes of task {id} are missing");
                Error::broken(&parent.thread, self.child.checkpoint.id, missing)
            })?;
            rows.push((task::author(row)?.0.task, row));
        }
        let mut open = BTreeSet::new();
        for channel in std::mem::take(&mut self.open) {
            let writes = rows.iter().flat_map(|(task, row)| {
                let of_channel = task::writes(row).filter(|write| write.channel == channel);
                of_channel.map(|write| (task.clone(), channel.to_string(), write.value.clone()))
            });
            self.steps.entry(channel.clone()).or_default().push(writes.collect());
            let entry = parent.checkpoint.channels.get(&channel);
            let seed = entry.and_then(|entry| {
                let value = entry.stored.value().filter(|value| !value.is_absent())?;
                let foreign = foreign && channel == MESSAGES_CHANNEL.into();
                Some(Seed { value: value.clone(), snapshot: is_snapshot(&entry.stored), foreign })
            });
            match seed {
                Some(seed) => {
                    self.seeds.insert(channel, seed);
                }
                None => {
                    open.insert(channel);
                }
            }
        }
        self.open = open;
        self.child = parent;
        Ok(())
    }

    fn end(mut self) -> BTreeMap<ChannelName, ChannelReplay> {
        let replays = self.steps.into_iter().map(|(channel, steps)| {
            let writes = steps.into_iter().rev().flatten().collect();
            let seed = self.seeds.remove(&channel);
            (channel, ChannelReplay { seed, writes })
        });
        replays.collect()
    }
}

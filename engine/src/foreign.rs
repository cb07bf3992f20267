//! What another program wrote to a thread, whose reducers are not known here.

use std::collections::{BTreeMap, BTreeSet};

use crate::checkpoint::CheckpointTuple;
use crate::deletion::{Lineage, sentinels};
use crate::id::ChannelName;
use crate::saver::LocalKey;

/// The channels, by checkpoint, that are stored as changes which only another program can replay: that program stored
/// one of the checkpoints on the way back to the nearest value.
#[derive(Debug, Default)]
pub struct ForeignChanges(BTreeMap<LocalKey, BTreeSet<ChannelName>>);

impl ForeignChanges {
    /// Those of a thread. `is_foreign` says of a checkpoint whether the other program wrote it.
    pub fn new(lineage: &Lineage<'_>, is_foreign: impl Fn(&CheckpointTuple) -> bool) -> Self {
        let mut found: BTreeMap<LocalKey, BTreeSet<ChannelName>> = BTreeMap::new();
        // Parents come before their children.
        for (at, tuple) in &lineage.image().checkpoints {
            let mut changes = sentinels(tuple).peekable();
            if changes.peek().is_none() {
                continue;
            }
            let is_foreign = is_foreign(tuple);
            let above = tuple.parent.and_then(|parent| found.get(&(at.0.clone(), parent)));
            let is_theirs = |channel: &&ChannelName| {
                is_foreign || above.is_some_and(|channels| channels.contains(*channel))
            };
            let theirs: BTreeSet<_> = changes.filter(is_theirs).cloned().collect();
            if !theirs.is_empty() {
                found.insert(at.clone(), theirs);
            }
        }
        Self(found)
    }

    /// Those of a checkpoint.
    pub fn at(&self, place: &LocalKey) -> impl Iterator<Item = &ChannelName> {
        self.0.get(place).into_iter().flatten()
    }

    /// Whether a checkpoint has such a channel.
    pub(crate) fn are_at(&self, place: &LocalKey) -> bool {
        self.0.contains_key(place)
    }

    /// Whether this channel of a checkpoint is one.
    pub(crate) fn contains(&self, place: &LocalKey, channel: &ChannelName) -> bool {
        self.0.get(place).is_some_and(|channels| channels.contains(channel))
    }
}

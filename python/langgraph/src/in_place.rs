//! Values that were changed in place, in checkpoints of LangGraph's own savers.

use std::collections::{BTreeMap, BTreeSet};

use threadkeep::checkpoint::Stored;
use threadkeep::id::ChannelName;
use threadkeep::saver::{CheckpointSelector, Load};
use threadkeep::value::ChannelValue;
use threadkeep::{Error, Result};

use crate::known::{Known, is_snapshot};
use crate::store::LangGraph;
use crate::types::Put;

/// A value, and whether it is a snapshot of a delta channel.
type Value = (ChannelValue, bool);

impl LangGraph {
    /// Stores a checkpoint of LangGraph's own savers, which has every value.
    ///
    /// A graph's puts say which versions are new, and take the other values from their parent. LangGraph's savers may have
    /// stored a value that was changed in place, under the version that it had before: it is compared with the parent's.
    ///
    /// # Errors
    /// Those of [`Self::put`].
    pub async fn put_moved(&self, put: &Put) -> Result<()> {
        let new = self.changed_in_place(put).await?;
        self.put(&Put { new, ..put.clone() }).await
    }

    /// The channels with a version of the parent's and another value.
    async fn changed_in_place(&self, put: &Put) -> Result<BTreeSet<String>> {
        let Some(known) = self.parent(put).await? else { return Ok(BTreeSet::new()) };
        let repeats = |name: &String| {
            let old = known.channels.get(name.as_str()).and_then(|old| old.label.as_ref());
            old.is_some() && old == put.versions.get(name) && !known.is_sentinel(name)
        };
        let repeated: Vec<&String> = put.versions.keys().filter(|name| repeats(name)).collect();
        let before = self.values_of(put, &known, &repeated).await?;
        let is_changed = |name: &&String| {
            let old = before.get(name.as_str()).map(|(value, snapshot)| (value, *snapshot));
            let new = put.values.get(*name).map(|value| (value, put.snapshots.contains(*name)));
            old != new
        };
        Ok(repeated.into_iter().filter(is_changed).cloned().collect())
    }

    /// The values that the parent has of these channels. Most are known since it was put.
    async fn values_of(
        &self,
        put: &Put,
        known: &Known,
        channels: &[&String],
    ) -> Result<BTreeMap<ChannelName, Value>> {
        let (mut values, mut unknown) = (BTreeMap::new(), BTreeSet::new());
        for name in channels {
            let Some((name, channel)) = known.channels.get_key_value(name.as_str()) else { continue };
            match &channel.value {
                Some(value) => {
                    values.insert(name.clone(), (value.clone(), channel.snapshot));
                }
                None => {
                    unknown.insert(name.clone());
                }
            }
        }
        if let Some(parent) = put.parent.filter(|_| !unknown.is_empty()) {
            let key = put.place.key(parent);
            let found =
                self.saver.get(&CheckpointSelector::at(&key).loading(Load::Only(unknown.clone()))).await?;
            let found = found.ok_or(Error::NotFound { thread: key.thread, checkpoint: key.id })?;
            for (name, entry) in found.checkpoint.channels {
                let snapshot = is_snapshot(&entry.stored);
                if let Stored::Value(value) | Stored::Snapshot(value) = entry.stored
                    && unknown.contains(&name)
                {
                    values.insert(name, (value, snapshot));
                }
            }
        }
        values.retain(|_, (value, _)| !value.is_absent());
        Ok(values)
    }
}

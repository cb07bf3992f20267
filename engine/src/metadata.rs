//! Checkpoint metadata: typed well-known keys, and the rest as JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json, json};

use crate::error::{Error, Result};
pub use crate::extra::{Entries, Entry, Extra};
use crate::id::{ChannelName, CheckpointId, Namespace};
use crate::mode::{CHECKPOINT_MODE_METADATA_KEY, ChannelMode};

/// The metadata key of the counters (service reference, "Marker constants").
pub const COUNTERS_KEY: &str = "counters_since_delta_snapshot";

/// The metadata key of a checkpoint that restores the state of an older one: the id of that one, which it continues,
/// whatever its parent. In delta mode it is written onto what it replaces. Where a deletion removed that one, the nearest
/// that stays of those which it continued is named.
pub const RESTORED_KEY: &str = "svc_restored_checkpoint_id";

/// The metadata key of a checkpoint that rolls a run back: the id of the run.
pub const ROLLED_BACK_KEY: &str = "svc_rolled_back_run_id";

/// The metadata key of what a checkpoint's nodes wrote, which says whether it only notes how long a run took.
pub const WRITES_KEY: &str = "writes";

/// The pseudo-node whose writes mark a duration-only checkpoint.
pub const DURATION_NODE: &str = "runtime_run_duration";

/// Whether metadata with this encoded [`extra`](Metadata::extra) may be that of a
/// [duration-only](Metadata::is_duration_only) checkpoint: few others name the node, so a reader of many decodes these alone.
pub fn may_be_duration_only(encoded: &[u8]) -> bool {
    encoded.windows(DURATION_NODE.len()).any(|part| part == DURATION_NODE.as_bytes())
}

/// What created a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// The input of a run, or the creation of the thread.
    Input,
    /// A superstep of a run.
    Loop,
    /// A write to the state from outside a run.
    Update,
    /// A copy of another checkpoint.
    Fork,
}

/// What happened to a delta channel since its last snapshot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Supersteps that wrote the channel.
    pub updates: u64,
    /// All supersteps.
    pub supersteps: u64,
}

impl Counters {
    /// What a path back to a stored value of a channel lacks of the updates counted here; `None` if nothing.
    ///
    /// The path may start before the snapshot from which these count, so it may contain more. It may also start after
    /// it, at a value that a deletion or a conversion has stored since; then it has fewer supersteps, too.
    pub(crate) fn lacking_in(self, path: Self, channel: &ChannelName) -> Option<String> {
        (path.updates < self.updates && path.supersteps >= self.supersteps).then(|| {
            format!(
                "{} updates of channel {channel} since its snapshot, found {}",
                self.updates, path.updates
            )
        })
    }
}

/// The metadata of a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct Metadata {
    /// What created the checkpoint.
    pub source: Source,
    /// The number of the superstep: -1 for the first input of a thread, then counting up along the lineage.
    pub step: i64,
    /// For a nested graph: the checkpoint of each enclosing namespace.
    pub parents: BTreeMap<Namespace, CheckpointId>,
    /// Whether the checkpoint carries the marker of delta mode.
    pub delta_marker: bool,
    /// Per delta channel, what happened since its snapshot; absent on the checkpoint that holds the snapshot.
    pub counters: BTreeMap<ChannelName, Counters>,
    /// All other keys.
    pub extra: Extra,
}

impl Metadata {
    /// Metadata with this source and step, and nothing else.
    pub fn new(source: Source, step: i64) -> Self {
        Self {
            source,
            step,
            parents: BTreeMap::new(),
            delta_marker: false,
            counters: BTreeMap::new(),
            extra: Extra::default(),
        }
    }

    /// Whether this is the metadata of a delta checkpoint: it has the marker, or counters for `messages` (service
    /// reference, "Marker constants").
    pub fn is_delta(&self) -> bool {
        self.delta_marker || self.counters.contains_key("messages")
    }

    /// Whether this is the metadata of a duration-only checkpoint, which repeats its parent's state to note how long a
    /// run took. Only its `writes` decide, because other checkpoints may inherit the notes. History, lineage walks and
    /// retention share this predicate; where there is a state, see [`crate::state::StateSnapshot::repeats_its_parent`].
    pub fn is_duration_only(&self) -> bool {
        self.extra
            .get(WRITES_KEY)
            .and_then(Json::as_object)
            .is_some_and(|writes| writes.contains_key(DURATION_NODE))
    }

    /// The checkpoint whose state this one restores, of the same namespace.
    pub fn restored(&self) -> Option<CheckpointId> {
        self.extra.get(RESTORED_KEY)?.as_str()?.parse().ok()
    }

    /// As one JSON object, the form shown to clients.
    pub fn to_json(&self) -> Map<String, Json> {
        let mut map = self.extra.to_map();
        map.extend(self.known());
        map
    }

    /// The well-known keys.
    fn known(&self) -> Map<String, Json> {
        let mut map = Map::new();
        map.insert("source".into(), json!(self.source));
        map.insert("step".into(), json!(self.step));
        let parents = self.parents.iter().map(|(ns, id)| (ns.to_string(), json!(id.to_string()))).collect();
        map.insert("parents".into(), Json::Object(parents));
        if self.delta_marker {
            map.insert(CHECKPOINT_MODE_METADATA_KEY.into(), json!(ChannelMode::Delta.as_str()));
        }
        if !self.counters.is_empty() {
            let counters = self.counters.iter();
            let counters = counters.map(|(name, c)| (name.to_string(), json!([c.updates, c.supersteps])));
            map.insert(COUNTERS_KEY.into(), Json::Object(counters.collect()));
        }
        map
    }

    /// Parses the form of [`Self::to_json`].
    ///
    /// # Errors
    /// [`Error::InvalidInput`] naming the missing or malformed key.
    pub fn from_json(mut map: Map<String, Json>) -> Result<Self> {
        fn bad(key: &str) -> Error {
            Error::InvalidInput(format!("checkpoint metadata: {key} is missing or malformed"))
        }
        let source = map.remove("source").ok_or_else(|| bad("source"))?;
        let step = map.remove("step").and_then(|v| v.as_i64()).ok_or_else(|| bad("step"))?;
        let mut metadata = Self::new(serde_json::from_value(source).map_err(|_| bad("source"))?, step);
        if let Some(Json::Object(parents)) = map.remove("parents") {
            for (namespace, id) in parents {
                let id = id.as_str().and_then(|id| id.parse().ok()).ok_or_else(|| bad("parents"))?;
                metadata.parents.insert(namespace.into(), id);
            }
        }
        metadata.delta_marker =
            map.remove(CHECKPOINT_MODE_METADATA_KEY).is_some_and(|v| v == ChannelMode::Delta.as_str());
        if let Some(Json::Object(counters)) = map.remove(COUNTERS_KEY) {
            for (channel, pair) in counters {
                let at = |i: usize| pair.get(i).and_then(Json::as_u64).ok_or_else(|| bad(COUNTERS_KEY));
                let counters = Counters { updates: at(0)?, supersteps: at(1)? };
                metadata.counters.insert(channel.into(), counters);
            }
        }
        metadata.extra = map.into();
        Ok(metadata)
    }

    /// Whether every key of `filter` has an equal value in [`Self::to_json`].
    pub fn matches(&self, filter: &Map<String, Json>) -> bool {
        if filter.is_empty() {
            return true;
        }
        let known = self.known();
        filter.iter().all(|(key, value)| known.get(key).or_else(|| self.extra.get(key)) == Some(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_survives_its_json_form_and_matches_filters_on_it() {
        let mut metadata = Metadata::new(Source::Loop, 7);
        metadata.delta_marker = true;
        metadata.counters.insert("messages".into(), Counters { updates: 3, supersteps: 5 });
        metadata.extra.insert("run_id".into(), json!("r1"));
        let map = metadata.to_json();
        assert_eq!(
            Json::Object(map.clone()),
            json!({"source": "loop", "step": 7, "parents": {}, "svc_checkpoint_channel_mode": "delta",
                   "counters_since_delta_snapshot": {"messages": [3, 5]}, "run_id": "r1"})
        );
        assert_eq!(Metadata::from_json(map).unwrap(), metadata);
        let filter = |v: Json| v.as_object().unwrap().clone();
        assert!(metadata.matches(&filter(json!({"run_id": "r1", "step": 7}))));
        assert!(!metadata.matches(&filter(json!({"run_id": "r2"}))));
        assert!(!metadata.matches(&filter(json!({"absent": null}))));
    }

    #[test]
    fn malformed_metadata_names_the_key() {
        for (json, key) in [
            (json!({"step": 1}), "source"),
            (json!({"source": "loop"}), "step"),
            (
                json!({"source": "loop", "step": 1, "counters_since_delta_snapshot": {"messages": [1]}}),
                COUNTERS_KEY,
            ),
        ] {
            let error = Metadata::from_json(json.as_object().unwrap().clone()).unwrap_err();
            assert!(error.to_string().contains(key), "{error}");
        }
    }

    #[test]
    fn a_checkpoint_is_delta_by_its_marker_or_by_counters_of_messages() {
        let mut metadata = Metadata::new(Source::Loop, 0);
        assert!(!metadata.is_delta());
        metadata.counters.insert("other".into(), Counters::default());
        assert!(!metadata.is_delta());
        metadata.counters.insert("messages".into(), Counters::default());
        assert!(metadata.is_delta());
        metadata.counters.clear();
        metadata.delta_marker = true;
        assert!(metadata.is_delta());
    }

    #[test]
    fn only_the_writes_of_a_checkpoint_decide_whether_it_is_duration_only() {
        let of = |extra: Json| {
            let mut metadata = Metadata::new(Source::Update, 0);
            metadata.extra = extra.as_object().unwrap().clone().into();
            metadata.is_duration_only()
        };
        assert!(of(json!({"writes": {"runtime_run_duration": {}}})));
        assert!(!of(json!({"run_durations": {"r": 1}, "writes": {"goal": {}}})));
        assert!(!of(json!({"run_durations": {"r": 1}})));
        assert!(!of(json!({"writes": null})));
    }
}

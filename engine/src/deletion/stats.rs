//! What a thread holds, in rows and logical bytes (service reference, "Retention policy").

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use serde_json::Value as Json;

use crate::checkpoint::CheckpointTuple;
use crate::id::{ChannelName, Namespace, Version};
use crate::metadata::{Entries, Metadata};
use crate::saver::ThreadImage;

/// The names of the counts, as reports use them.
pub const STATS_KEYS: [&str; 8] = [
    "logical_checkpoint_bytes",
    "logical_write_bytes",
    "checkpoint_rows",
    "checkpoint_bytes",
    "blob_rows",
    "blob_bytes",
    "write_rows",
    "write_bytes",
];

/// The counts of a thread. Bytes are those of the encoded values: what a store without sharing would take, regardless
/// of this one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Checkpoints.
    pub checkpoint_rows: u64,
    /// Bytes of their metadata.
    pub checkpoint_bytes: u64,
    /// Stored values: one for each namespace, channel and version.
    pub blob_rows: u64,
    /// Bytes of those values.
    pub blob_bytes: u64,
    /// Writes under checkpoints.
    pub write_rows: u64,
    /// Bytes of their values.
    pub write_bytes: u64,
}

impl Stats {
    /// Counts an image.
    pub fn of(image: &ThreadImage) -> Self {
        let mut counting = Counting::default();
        image.checkpoints.values().for_each(|tuple| counting.add(tuple));
        counting.stats()
    }

    /// The logical bytes: those of metadata, values and writes.
    pub fn logical(&self) -> u64 {
        self.checkpoint_bytes + self.blob_bytes + self.write_bytes
    }

    /// The eight counts by their names ([`STATS_KEYS`]).
    pub fn to_map(self) -> BTreeMap<&'static str, u64> {
        let counts = [
            self.checkpoint_bytes + self.blob_bytes,
            self.write_bytes,
            self.checkpoint_rows,
            self.checkpoint_bytes,
            self.blob_rows,
            self.blob_bytes,
            self.write_rows,
            self.write_bytes,
        ];
        STATS_KEYS.into_iter().zip(counts).collect()
    }
}

/// Counts the checkpoints of a thread one after the other, each once, in any order. What two consecutive checkpoints
/// have in common of a large metadata map is looked at once.
#[derive(Debug, Default)]
struct Counting {
    stats: Stats,
    seen: HashSet<(Namespace, ChannelName, Version)>,
    /// The latest large map under each key, and the bytes of its entries.
    maps: HashMap<String, (Entries, usize)>,
}

impl Counting {
    /// Counts a checkpoint, which must have all of its values.
    fn add(&mut self, tuple: &CheckpointTuple) {
        self.stats.checkpoint_rows += 1;
        self.stats.checkpoint_bytes += self.metadata_len(&tuple.metadata) as u64;
        for (name, entry) in &tuple.checkpoint.channels {
            if let Some(value) = entry.stored.value()
                && self.seen.insert((tuple.namespace.clone(), name.clone(), entry.version))
            {
                self.stats.blob_rows += 1;
                self.stats.blob_bytes += value.encoded_len() as u64;
            }
        }
        for write in tuple.writes.iter().flat_map(|row| &row.writes) {
            self.stats.write_rows += 1;
            self.stats.write_bytes += write.value.encoded_len() as u64;
        }
    }

    /// The counts so far.
    fn stats(&self) -> Stats {
        self.stats
    }

    /// The length of metadata as JSON text.
    fn metadata_len(&mut self, metadata: &Metadata) -> usize {
        let (rest, large) = metadata.extra.split();
        let rest = Metadata { extra: rest.into(), ..metadata.clone() }.to_json();
        let known: HashSet<&String> = rest.keys().collect();
        // A comma, the key, a colon and two braces around the map's entries and the commas between them.
        let large = large.into_iter().filter(|(key, _)| !known.contains(key));
        let large =
            large.map(|(key, map)| text_len(&key) + 3 + map.len().max(1) + self.entries_len(key, map));
        let large: usize = large.sum();
        json_len(&Json::Object(rest)) + large
    }

    /// The length of all entries of a map as JSON text.
    fn entries_len(&mut self, key: String, map: Entries) -> usize {
        let of = |entries: Vec<(&Arc<str>, &Arc<Json>)>| -> usize {
            entries.into_iter().map(|(name, value)| text_len(name) + 1 + json_len(value)).sum()
        };
        let known = self.maps.remove(&key);
        let len = known.and_then(|(known, len)| match (map.added_to(&known), known.added_to(&map)) {
            (Some(more), _) => Some(len + of(more)),
            (_, Some(less)) => len.checked_sub(of(less)),
            (None, None) => None,
        });
        let len = len.unwrap_or_else(|| of(map.iter().collect()));
        self.maps.insert(key, (map, len));
        len
    }
}

fn json_len(value: &Json) -> usize {
    value.to_string().len()
}

fn text_len(text: &str) -> usize {
    json_len(&Json::from(text))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::metadata::Source;

    #[test]
    fn maps_that_grow_and_shrink_count_as_if_each_was_written_out() {
        let mut counting = Counting::default();
        let map =
            |len: usize| (0..len).map(|n| (format!("run \"{n}").into(), Arc::new(json!({"s": n})))).collect();
        for (len, text) in [(9, "a"), (10, "b"), (200, "ü"), (12, ""), (8, "x"), (3, "y"), (0, "z"), (40, "")]
        {
            let mut metadata = Metadata::new(Source::Loop, 1);
            metadata.extra.insert("text".to_owned(), json!(text));
            metadata.extra.insert_object("runs", map(len));
            metadata.extra.insert_object("other", map(12));
            let written = Json::Object(metadata.to_json()).to_string();
            assert_eq!(counting.metadata_len(&metadata), written.len(), "{len}: {written}");
        }
    }
}

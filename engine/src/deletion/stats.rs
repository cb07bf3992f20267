//! What a thread holds, in rows and logical bytes (service reference, "Retention policy").

use std::collections::{BTreeMap, HashSet};

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
        let mut stats = Self::default();
        let mut seen = HashSet::new();
        for ((namespace, _), tuple) in &image.checkpoints {
            stats.checkpoint_rows += 1;
            let metadata = serde_json::Value::Object(tuple.metadata.to_json());
            stats.checkpoint_bytes += metadata.to_string().len() as u64;
            for (name, entry) in &tuple.checkpoint.channels {
                if let Some(value) = entry.stored.value()
                    && seen.insert((namespace, name, entry.version))
                {
                    stats.blob_rows += 1;
                    stats.blob_bytes += value.encoded_len() as u64;
                }
            }
            for write in tuple.writes.iter().flat_map(|row| &row.writes) {
                stats.write_rows += 1;
                stats.write_bytes += write.value.encoded_len() as u64;
            }
        }
        stats
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

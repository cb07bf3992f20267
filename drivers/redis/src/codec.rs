//! Encodes paths to and from the bytes in Redis.
//!
//! A path is stored as two fields: the *seed* it starts from, which all checkpoints up to the next snapshot share, and
//! the *path* after it, a few writes. So a step writes the long value only when it changes. Each field is sealed: a
//! format number, a checksum over its key and its bytes, and MessagePack.

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use threadkeep::cache::{CachedHistory, HistoryKey};
use threadkeep::checkpoint::Write;
use threadkeep::id::{CheckpointId, Version};
use threadkeep::saver::{ChannelHistory, HistoryStep, Seed};
use threadkeep::value::{ChannelValue, Codec, Encoded};

/// The first byte of every field. Any other number is another format, and therefore a miss.
const FORMAT: u8 = 1;
const CHECKSUM: usize = 16;
/// The longest field that is written or read. A thread with a longer snapshot is not cached.
pub(crate) const MAX_BYTES: usize = 32 << 20;

/// The two fields of a path.
pub(crate) struct Sealed {
    pub(crate) path: Vec<u8>,
    /// `None` if the channel had never been written where the path starts.
    pub(crate) seed: Option<SealedSeed>,
}

pub(crate) struct SealedSeed {
    /// Identifies the seed.
    pub(crate) name: Vec<u8>,
    pub(crate) bytes: Vec<u8>,
}

/// Identifies the value of a channel at a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    checkpoint: [u8; 16],
    counter: u64,
    random: u64,
}

impl Mark {
    fn new(checkpoint: CheckpointId, version: Version) -> Self {
        Self { checkpoint: *checkpoint.as_bytes(), counter: version.counter, random: version.random }
    }

    fn checkpoint(self) -> CheckpointId {
        CheckpointId::from_bytes(self.checkpoint)
    }

    fn version(self) -> Version {
        Version { counter: self.counter, random: self.random }
    }
}

#[derive(Serialize, Deserialize)]
struct PathRecord {
    end: Mark,
    seed: Option<Mark>,
    steps: Vec<StepRecord>,
}

#[derive(Serialize, Deserialize)]
struct StepRecord {
    checkpoint: [u8; 16],
    tasks: usize,
    writes: Vec<WriteRecord>,
}

#[derive(Serialize, Deserialize)]
struct WriteRecord {
    value: Bytes,
    overwrite: bool,
}

#[derive(Serialize, Deserialize)]
struct SeedRecord {
    mark: Mark,
    value: Bytes,
}

/// Encodes a path; `None` if it would be too long.
pub(crate) fn seal(key: &HistoryKey, path: &CachedHistory) -> Option<Sealed> {
    let steps = path.history.steps.iter().map(|step| StepRecord {
        checkpoint: *step.checkpoint.as_bytes(),
        tasks: step.tasks,
        writes: step.writes.iter().map(write_record).collect(),
    });
    let seed = path.history.seed.as_ref().map(|seed| (Mark::new(seed.checkpoint, seed.version), &seed.value));
    let record = PathRecord {
        end: Mark::new(path.checkpoint, path.version),
        seed: seed.map(|(mark, _)| mark),
        steps: steps.collect(),
    };
    let seed = match seed {
        None => None,
        Some((_, value)) if value.encoded_len() > MAX_BYTES => return None,
        Some((mark, value)) => Some(SealedSeed {
            name: rmp_serde::to_vec(&mark).ok()?,
            bytes: field(key, b"seed", &SeedRecord { mark, value: value.to_encoded().bytes })?,
        }),
    };
    Some(Sealed { path: field(key, b"path", &record)?, seed })
}

/// Decodes a path from its two fields; `None` unless they are intact, were written for this key and belong together.
pub(crate) fn open(key: &HistoryKey, path: &[u8], seed: Option<&[u8]>) -> Option<CachedHistory> {
    let record: PathRecord = record(key, b"path", path)?;
    let seed = match record.seed {
        None => None,
        Some(mark) => {
            let seed: SeedRecord = self::record(key, b"seed", seed?)?;
            (seed.mark == mark).then_some(())?;
            let (checkpoint, version) = (mark.checkpoint(), mark.version());
            Some(Seed { checkpoint, value: value(seed.value)?, version })
        }
    };
    let step = |step: StepRecord| {
        let write = |write: WriteRecord| {
            let value = value(write.value)?;
            Some(Write { channel: key.channel.clone(), value, overwrite: write.overwrite })
        };
        let writes = step.writes.into_iter().map(write).collect::<Option<_>>()?;
        Some(HistoryStep { checkpoint: CheckpointId::from_bytes(step.checkpoint), tasks: step.tasks, writes })
    };
    let steps = record.steps.into_iter().map(step).collect::<Option<_>>()?;
    Some(CachedHistory {
        checkpoint: record.end.checkpoint(),
        version: record.end.version(),
        history: ChannelHistory { seed, steps },
    })
}

fn write_record(write: &Write) -> WriteRecord {
    let Encoded { codec: Codec::MessagePack, bytes } = write.value.to_encoded();
    WriteRecord { value: bytes, overwrite: write.overwrite }
}

fn value(bytes: Bytes) -> Option<ChannelValue> {
    ChannelValue::from_encoded(Encoded { codec: Codec::MessagePack, bytes }).ok()
}

fn field(key: &HistoryKey, kind: &[u8], record: &impl Serialize) -> Option<Vec<u8>> {
    let mut field = vec![FORMAT];
    field.resize(1 + CHECKSUM, 0);
    rmp_serde::encode::write(&mut field, record).ok()?;
    let sum = checksum(key, kind, &field[1 + CHECKSUM..]);
    field[1..=CHECKSUM].copy_from_slice(&sum);
    (field.len() <= MAX_BYTES).then_some(field)
}

fn record<T: DeserializeOwned>(key: &HistoryKey, kind: &[u8], field: &[u8]) -> Option<T> {
    let sealed = field.strip_prefix(&[FORMAT]).filter(|_| field.len() <= MAX_BYTES)?;
    let (sum, body) = sealed.split_at_checked(CHECKSUM)?;
    (sum == checksum(key, kind, body)).then_some(())?;
    rmp_serde::from_slice(body).ok()
}

/// A sealed field with these bytes, valid or not.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn with_checksum(key: &HistoryKey, kind: &[u8], body: &[u8]) -> Vec<u8> {
    [&[FORMAT][..], &checksum(key, kind, body), body].concat()
}

/// Covers the field's key, so that a field in the wrong place fails like a flipped bit.
fn checksum(key: &HistoryKey, kind: &[u8], body: &[u8]) -> [u8; CHECKSUM] {
    let mut hasher = blake3::Hasher::new();
    let names = [key.thread.as_str(), key.namespace.as_str(), key.channel.as_str()];
    for part in [kind].into_iter().chain(names.iter().map(|name| name.as_bytes())) {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    let mut sum = [0; CHECKSUM];
    sum.copy_from_slice(&hasher.update(body).finalize().as_bytes()[..CHECKSUM]);
    sum
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value as Json, json};
    use threadkeep::id::ThreadId;

    use super::*;

    fn key(thread: &str, namespace: &str, channel: &str) -> HistoryKey {
        HistoryKey { thread: ThreadId::from(thread), namespace: namespace.into(), channel: channel.into() }
    }

    fn any_value() -> impl Strategy<Value = ChannelValue> {
        let json = prop_oneof![
            Just(Json::Null),
            ".{0,20}".prop_map(Json::from),
            any::<i64>().prop_map(Json::from),
            prop::collection::vec(any::<u8>().prop_map(|n| json!({"id": format!("m{n}"), "n": n})), 0..20)
                .prop_map(Json::from),
        ];
        json.prop_map(|json| ChannelValue::from_json(&json).unwrap())
    }

    fn any_version() -> impl Strategy<Value = Version> {
        (any::<u64>(), any::<u64>()).prop_map(|(counter, random)| Version { counter, random })
    }

    fn any_id() -> impl Strategy<Value = CheckpointId> {
        any::<[u8; 16]>().prop_map(CheckpointId::from_bytes)
    }

    fn any_path() -> impl Strategy<Value = CachedHistory> {
        let write = (any_value(), any::<bool>()).prop_map(|(value, overwrite)| Write {
            channel: "messages".into(),
            value,
            overwrite,
        });
        let step = (any_id(), any::<usize>(), prop::collection::vec(write, 0..3))
            .prop_map(|(checkpoint, tasks, writes)| HistoryStep { checkpoint, tasks, writes });
        let seed = (any_id(), any_value(), any_version()).prop_map(|(checkpoint, value, version)| Seed {
            checkpoint,
            value,
            version,
        });
        (any_id(), any_version(), prop::option::of(seed), prop::collection::vec(step, 0..5)).prop_map(
            |(checkpoint, version, seed, steps)| CachedHistory {
                checkpoint,
                version,
                history: ChannelHistory { seed, steps },
            },
        )
    }

    fn opened(key: &HistoryKey, sealed: &Sealed) -> Option<CachedHistory> {
        open(key, &sealed.path, sealed.seed.as_ref().map(|seed| &seed.bytes[..]))
    }

    proptest! {
        #[test]
        fn a_path_survives_and_one_flipped_bit_anywhere_is_a_miss(
            path in any_path(), at in any::<prop::sample::Index>(), bit in 0..8_u8
        ) {
            let key = key("t", "", "messages");
            let mut sealed = seal(&key, &path).unwrap();
            prop_assert_eq!(opened(&key, &sealed), Some(path));
            let seed = sealed.seed.as_mut().map_or(&mut [][..], |seed| &mut seed.bytes[..]);
            let mut all: Vec<&mut u8> = sealed.path.iter_mut().chain(seed).collect();
            let at = at.index(all.len());
            *all[at] ^= 1 << bit;
            prop_assert_eq!(opened(&key, &sealed), None);
        }

        #[test]
        fn a_path_under_another_key_and_a_seed_of_another_path_are_misses(a in any_path(), b in any_path()) {
            let here = key("t", "n", "messages");
            let sealed = seal(&here, &a).unwrap();
            for there in [key("u", "n", "messages"), key("t", "m", "messages"), key("t", "n", "other"), key("tn", "", "messages")] {
                prop_assert_eq!(opened(&there, &sealed), None);
            }
            let other = seal(&here, &b).unwrap();
            if let (Some(_), Some(seed)) = (&sealed.seed, &other.seed) {
                prop_assert_eq!(open(&here, &sealed.path, Some(&seed.bytes)), None);
                prop_assert_eq!(open(&here, &sealed.path, Some(&sealed.path)), None);
                prop_assert_eq!(open(&here, &sealed.path, None), None);
            }
        }

        #[test]
        fn arbitrary_bytes_are_a_miss_and_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let key = key("t", "", "messages");
            prop_assert_eq!(open(&key, &bytes, Some(&bytes)), None);
            // Also with a valid checksum, which only an attacker would produce.
            let _ = open(&key, &with_checksum(&key, b"path", &bytes), None);
        }
    }

    #[test]
    fn a_seed_above_the_bound_is_not_sealed() {
        let version = Version { counter: 1, random: 1 };
        let id = CheckpointId::from_bytes([1; 16]);
        let value = ChannelValue::from_json(&Json::from("x".repeat(MAX_BYTES))).unwrap();
        let history =
            ChannelHistory { seed: Some(Seed { checkpoint: id, value, version }), steps: Vec::new() };
        assert!(seal(&key("t", "", "c"), &CachedHistory { checkpoint: id, version, history }).is_none());
    }
}

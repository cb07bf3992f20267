//! The contents of checkpoint rows.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use threadkeep::id::{ChannelName, CheckpointId, NodeName, TaskId, Version};
use threadkeep::metadata::{Counters, Source};
use threadkeep_layout::{
    Decoder, FORM, Form, Malformed, Run, form_bits, put_bytes, put_form, put_int, put_len, put_runs,
    put_uint, take_form, take_runs,
};

use crate::element::Space;

/// The version of all encodings, in the high half of their first byte.
const FORM_VERSION: u8 = 1;
/// The flag of a thread's body that describes its past.
const PAST: u8 = 1;

/// What a checkpoint stores for a channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredChannel {
    pub(crate) version: Version,
    pub(crate) kept: Kept,
}

/// An entry without its version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kept {
    /// A delta channel between snapshots. Holds the checkpoint at which its path begins: the nearest stored value, or
    /// the first one after which the channel was written.
    Sentinel(CheckpointId),
    Value(Form),
    Snapshot(Form),
}

/// How `extra` metadata is stored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Extra {
    /// The object without the keys in `maps`.
    pub(crate) rest: Rest,
    /// Large objects, each by the entries that it has.
    pub(crate) maps: Vec<(String, Vec<Run>)>,
}

/// An object: none, its bytes, or the structure element that holds it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Rest {
    #[default]
    Empty,
    Inline(Bytes),
    Shared(u32),
}

/// A checkpoint, with values as [`Form`]s.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CheckpointRecord {
    pub(crate) parent: Option<CheckpointId>,
    pub(crate) source: Source,
    pub(crate) step: i64,
    pub(crate) delta_marker: bool,
    pub(crate) next: Vec<NodeName>,
    pub(crate) applied: Vec<TaskId>,
    pub(crate) parents: Vec<(String, CheckpointId)>,
    pub(crate) counters: BTreeMap<ChannelName, Counters>,
    pub(crate) extra: Extra,
    pub(crate) channels: BTreeMap<ChannelName, StoredChannel>,
}

// The low half of the first byte: the source and the marker.
const SOURCE: u8 = 3;
const DELTA_MARKER: u8 = 1 << 2;

// The second byte: how `rest` is stored, and which optional fields are present.
const REST: u8 = 3;
const REST_INLINE: u8 = 1;
const REST_SHARED: u8 = 2;
const HAS_MAPS: u8 = 1 << 2;
const HAS_PARENTS: u8 = 1 << 3;
const HAS_COUNTERS: u8 = 1 << 4;
const KNOWN_FLAGS: u8 = REST | HAS_MAPS | HAS_PARENTS | HAS_COUNTERS;

// The byte of an entry: its kind, and the form of its value.
const KIND: u8 = 3;
const SENTINEL: u8 = 1;
const VALUE: u8 = 2;
const SNAPSHOT: u8 = 3;
// The byte of a write holds the form too.
const OVERWRITE: u8 = 1;

impl CheckpointRecord {
    /// The names that the body refers to by number, in order.
    pub(crate) fn names(&self) -> BTreeSet<&ChannelName> {
        self.channels.keys().chain(self.counters.keys()).collect()
    }

    /// The oldest checkpoint from which a sentinel is replayed; none if there is no sentinel.
    pub(crate) fn seed(&self) -> Option<CheckpointId> {
        let seeds = self.channels.values().filter_map(|entry| match entry.kept {
            Kept::Sentinel(seed) => Some(seed),
            _ => None,
        });
        seeds.min()
    }

    /// The structure element that holds `extra`, if one does.
    pub(crate) fn extra_element(&self) -> Option<u32> {
        match self.extra.rest {
            Rest::Shared(n) => Some(n),
            _ => None,
        }
    }

    /// The bytes of the body.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let source = match self.source {
            Source::Input => 0,
            Source::Loop => 1,
            Source::Update => 2,
            Source::Fork => 3,
        };
        let marker = if self.delta_marker { DELTA_MARKER } else { 0 };
        let flag = |is: bool, flag| if is { flag } else { 0 };
        let rest = match &self.extra.rest {
            Rest::Empty => 0,
            Rest::Inline(_) => REST_INLINE,
            Rest::Shared(_) => REST_SHARED,
        };
        let flags = rest
            | flag(!self.extra.maps.is_empty(), HAS_MAPS)
            | flag(!self.parents.is_empty(), HAS_PARENTS)
            | flag(!self.counters.is_empty(), HAS_COUNTERS);
        let names: BTreeMap<&ChannelName, u64> = self.names().into_iter().zip(0..).collect();
        let number = |name| names.get(name).copied().unwrap_or_default();
        let mut out = vec![FORM_VERSION << 4 | marker | source, flags];
        put_int(&mut out, self.step);
        put_len(&mut out, self.next.len());
        for node in &self.next {
            put_bytes(&mut out, node.as_str().as_bytes());
        }
        put_len(&mut out, self.applied.len());
        for task in &self.applied {
            out.extend_from_slice(task.as_bytes());
        }
        if flags & HAS_PARENTS != 0 {
            put_len(&mut out, self.parents.len());
            for (namespace, id) in &self.parents {
                put_bytes(&mut out, namespace.as_bytes());
                out.extend_from_slice(id.as_bytes());
            }
        }
        if flags & HAS_COUNTERS != 0 {
            put_len(&mut out, self.counters.len());
            for (channel, counters) in &self.counters {
                put_uint(&mut out, number(channel));
                put_uint(&mut out, counters.updates);
                put_uint(&mut out, counters.supersteps);
            }
        }
        // A shared one is named in a column of the row.
        if let Rest::Inline(bytes) = &self.extra.rest {
            put_bytes(&mut out, bytes);
        }
        if flags & HAS_MAPS != 0 {
            put_len(&mut out, self.extra.maps.len());
            for (key, runs) in &self.extra.maps {
                put_bytes(&mut out, key.as_bytes());
                put_runs(&mut out, runs);
            }
        }
        put_len(&mut out, self.channels.len());
        for (channel, entry) in &self.channels {
            put_uint(&mut out, number(channel));
            let tag = match &entry.kept {
                Kept::Sentinel(_) => SENTINEL,
                Kept::Value(form) => VALUE | form_bits(form),
                Kept::Snapshot(form) => SNAPSHOT | form_bits(form),
            };
            out.push(tag);
            put_uint(&mut out, entry.version.counter);
            out.extend_from_slice(&entry.version.random.to_le_bytes());
            match &entry.kept {
                Kept::Sentinel(seed) => out.extend_from_slice(seed.as_bytes()),
                Kept::Value(form) | Kept::Snapshot(form) => put_form(&mut out, form),
            }
        }
        out
    }

    /// Reads a body whose columns have this parent, these names and this metadata element.
    pub(crate) fn decode(
        bytes: &[u8],
        parent: Option<CheckpointId>,
        names: &[ChannelName],
        extra: Option<u32>,
    ) -> Result<Self, Malformed> {
        let mut decoder = Decoder::new(bytes);
        let first = known_version(decoder.byte()?)?;
        let flags = decoder.byte()?;
        if first & !(DELTA_MARKER | SOURCE) != 0 || flags & !KNOWN_FLAGS != 0 {
            return Err(Malformed("unknown flags"));
        }
        let source = match first & SOURCE {
            0 => Source::Input,
            1 => Source::Loop,
            2 => Source::Update,
            _ => Source::Fork,
        };
        let step = decoder.int()?;
        let next =
            (0..decoder.count()?).map(|_| decoder.text().map(NodeName::from)).collect::<Result<_, _>>()?;
        let applied = (0..decoder.count()?)
            .map(|_| decoder.array().map(TaskId::from_bytes))
            .collect::<Result<_, _>>()?;
        let mut parents = Vec::new();
        if flags & HAS_PARENTS != 0 {
            for _ in 0..decoder.count()? {
                let namespace = decoder.text()?.to_owned();
                parents.push((namespace, CheckpointId::from_bytes(decoder.array()?)));
            }
        }
        let name =
            |number: u32| names.get(number as usize).cloned().ok_or(Malformed("a channel has no name"));
        let mut counters = BTreeMap::new();
        if flags & HAS_COUNTERS != 0 {
            for _ in 0..decoder.count()? {
                let channel = name(decoder.u32()?)?;
                counters.insert(channel, Counters { updates: decoder.uint()?, supersteps: decoder.uint()? });
            }
        }
        let rest = match (flags & REST, extra) {
            (0, None) => Rest::Empty,
            (REST_INLINE, None) => Rest::Inline(Bytes::copy_from_slice(decoder.bytes()?)),
            (REST_SHARED, Some(n)) => Rest::Shared(n),
            _ => return Err(Malformed("unknown form of metadata")),
        };
        let mut maps = Vec::new();
        if flags & HAS_MAPS != 0 {
            for _ in 0..decoder.count()? {
                let key = decoder.text()?.to_owned();
                maps.push((key, take_runs(&mut decoder)?));
            }
        }
        let mut channels = BTreeMap::new();
        for _ in 0..decoder.count()? {
            let channel = name(decoder.u32()?)?;
            let tag = decoder.byte()?;
            let version = Version { counter: decoder.uint()?, random: u64::from_le_bytes(decoder.array()?) };
            let kept = match tag & KIND {
                SENTINEL if tag == SENTINEL => Kept::Sentinel(CheckpointId::from_bytes(decoder.array()?)),
                VALUE => Kept::Value(take_form(&mut decoder, tag)?),
                SNAPSHOT => Kept::Snapshot(take_form(&mut decoder, tag)?),
                _ => return Err(Malformed("unknown kind of entry")),
            };
            if tag & !(KIND | FORM) != 0 {
                return Err(Malformed("unknown flags"));
            }
            channels.insert(channel, StoredChannel { version, kept });
        }
        decoder.finish()?;
        Ok(Self {
            parent,
            source,
            step,
            delta_marker: first & DELTA_MARKER != 0,
            next,
            applied,
            parents,
            counters,
            extra: Extra { rest, maps },
            channels,
        })
    }

    /// The forms of the stored values.
    pub(crate) fn forms(&self) -> impl Iterator<Item = &Form> {
        self.channels.values().filter_map(|entry| match &entry.kept {
            Kept::Sentinel(_) => None,
            Kept::Value(form) | Kept::Snapshot(form) => Some(form),
        })
    }
}

/// The bytes of the element that lists the names of channels.
pub(crate) fn encode_names<'a>(names: impl ExactSizeIterator<Item = &'a ChannelName>) -> Vec<u8> {
    let mut out = vec![FORM_VERSION << 4];
    put_len(&mut out, names.len());
    for name in names {
        put_bytes(&mut out, name.as_str().as_bytes());
    }
    out
}

/// Reads what [`encode_names`] wrote.
pub(crate) fn decode_names(bytes: &[u8]) -> Result<Vec<ChannelName>, Malformed> {
    let mut decoder = Decoder::new(bytes);
    if known_version(decoder.byte()?)? != 0 {
        return Err(Malformed("unknown flags"));
    }
    let names =
        (0..decoder.count()?).map(|_| decoder.text().map(ChannelName::from)).collect::<Result<_, _>>()?;
    decoder.finish()?;
    Ok(names)
}

/// A task that ran from a checkpoint. The tasks of a checkpoint are one column of its row, in the order in which they
/// were stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TaskRecord {
    pub(crate) task: TaskId,
    pub(crate) node: NodeName,
    pub(crate) index: u32,
    pub(crate) writes: Vec<WriteRecord>,
}

/// One write of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WriteRecord {
    pub(crate) channel: ChannelName,
    pub(crate) overwrite: bool,
    pub(crate) value: Form,
}

/// The bytes of the tasks of a checkpoint.
pub(crate) fn encode_tasks(tasks: &[TaskRecord]) -> Vec<u8> {
    let mut out = vec![FORM_VERSION << 4];
    put_len(&mut out, tasks.len());
    for task in tasks {
        out.extend_from_slice(task.task.as_bytes());
        put_bytes(&mut out, task.node.as_str().as_bytes());
        put_uint(&mut out, task.index);
        put_len(&mut out, task.writes.len());
        for write in &task.writes {
            put_bytes(&mut out, write.channel.as_str().as_bytes());
            out.push(form_bits(&write.value) | if write.overwrite { OVERWRITE } else { 0 });
            put_form(&mut out, &write.value);
        }
    }
    out
}

/// Reads what [`encode_tasks`] wrote.
pub(crate) fn decode_tasks(bytes: &[u8]) -> Result<Vec<TaskRecord>, Malformed> {
    let mut decoder = Decoder::new(bytes);
    if known_version(decoder.byte()?)? != 0 {
        return Err(Malformed("unknown flags"));
    }
    let mut tasks = Vec::new();
    for _ in 0..decoder.count()? {
        let task = TaskId::from_bytes(decoder.array()?);
        let node = decoder.text()?.into();
        let index = decoder.u32()?;
        let mut writes = Vec::new();
        for _ in 0..decoder.count()? {
            let channel = decoder.text()?.into();
            let tag = decoder.byte()?;
            if tag & !(OVERWRITE | FORM) != 0 {
                return Err(Malformed("unknown flags"));
            }
            let value = take_form(&mut decoder, tag)?;
            writes.push(WriteRecord { channel, overwrite: tag & OVERWRITE != 0, value });
        }
        tasks.push(TaskRecord { task, node, index, writes });
    }
    decoder.finish()?;
    Ok(tasks)
}

/// The body of a thread's row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ThreadBody {
    /// The next number of each space.
    pub(crate) next: [u32; 3],
    /// The thread's life and the trail of its marks. Rows from before version 4 of the format have none.
    pub(crate) past: Option<(i64, Vec<u32>)>,
}

impl ThreadBody {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let flags = if self.past.is_some() { PAST } else { 0 };
        let mut out = vec![FORM_VERSION << 4 | flags];
        for number in self.next {
            put_uint(&mut out, number);
        }
        if let Some((life, trail)) = &self.past {
            out.extend_from_slice(&life.to_le_bytes());
            put_len(&mut out, trail.len());
            for bits in trail {
                out.extend_from_slice(&bits.to_le_bytes());
            }
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut decoder = Decoder::new(bytes);
        let flags = known_version(decoder.byte()?)?;
        let next = [decoder.u32()?, decoder.u32()?, decoder.u32()?];
        let past = match flags {
            0 => None,
            PAST => {
                let life = i64::from_le_bytes(decoder.array()?);
                let trail = (0..decoder.count()?).map(|_| decoder.array().map(u32::from_le_bytes));
                Some((life, trail.collect::<Result<_, _>>()?))
            }
            _ => return Err(Malformed("unknown flags")),
        };
        decoder.finish()?;
        Ok(Self { next, past })
    }
}

/// The first and last sequence numbers of the elements needed to decode a row, besides its names and its metadata
/// element.
pub(crate) fn needs(record: &CheckpointRecord, tasks: &[TaskRecord]) -> Vec<i64> {
    let of_tasks = tasks.iter().flat_map(|task| &task.writes).map(|write| &write.value);
    let chunks = record.forms().chain(of_tasks).filter_map(|form| match form {
        Form::List(manifest) => Some(&manifest.chunks),
        _ => None,
    });
    let chunks = chunks.flatten().map(|run| Space::Structure.bounds(*run));
    let entries = record.extra.maps.iter().flat_map(|(_, runs)| runs);
    let entries = entries.map(|run| Space::Entries.bounds(*run));
    let all: BTreeSet<[i64; 2]> = chunks.chain(entries).collect();
    all.into_iter().flatten().collect()
}

fn known_version(first: u8) -> Result<u8, Malformed> {
    if first >> 4 == FORM_VERSION { Ok(first & 0x0f) } else { Err(Malformed("unknown version of the row")) }
}

#[cfg(test)]
mod tests;

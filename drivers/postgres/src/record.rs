//! The contents of checkpoint rows.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use threadkeep::id::{ChannelName, CheckpointId, NodeName, TaskId, Version};
use threadkeep::metadata::{Counters, Source};
pub(crate) use threadkeep_layout::Rest;
use threadkeep_layout::{
    Decoder, FORM, Form, Heading, Malformed, RestKind, Run, bits_of, first_byte, form_bits, put_bytes,
    put_counters, put_form, put_int, put_len, put_parents, put_runs, put_uint, put_version, put_write,
    take_counters, take_form, take_parents, take_plain_start, take_runs, take_version, take_write,
};

use crate::element::Space;

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

// The byte of an entry: its kind, and the form of its value.
const KIND: u8 = 3;
const SENTINEL: u8 = 1;
const VALUE: u8 = 2;
const SNAPSHOT: u8 = 3;

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
        let heading = Heading {
            source: self.source,
            delta_marker: self.delta_marker,
            rest: self.extra.rest.kind(),
            maps: !self.extra.maps.is_empty(),
            parents: !self.parents.is_empty(),
            counters: !self.counters.is_empty(),
        };
        let names: BTreeMap<&ChannelName, u64> = self.names().into_iter().zip(0..).collect();
        let number = |name| names.get(name).copied().unwrap_or_default();
        let mut out = Vec::new();
        heading.put(&mut out);
        put_int(&mut out, self.step);
        put_len(&mut out, self.next.len());
        for node in &self.next {
            put_bytes(&mut out, node.as_str().as_bytes());
        }
        put_len(&mut out, self.applied.len());
        for task in &self.applied {
            out.extend_from_slice(task.as_bytes());
        }
        if heading.parents {
            put_parents(&mut out, &self.parents);
        }
        if heading.counters {
            put_len(&mut out, self.counters.len());
            for (channel, counters) in &self.counters {
                put_uint(&mut out, number(channel));
                put_counters(&mut out, *counters);
            }
        }
        // A shared one is named in a column of the row.
        if let Rest::Inline(bytes) = &self.extra.rest {
            put_bytes(&mut out, bytes);
        }
        if heading.maps {
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
            put_version(&mut out, entry.version);
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
        let heading = Heading::take(&mut decoder)?;
        let step = decoder.int()?;
        let next =
            (0..decoder.count()?).map(|_| decoder.text().map(NodeName::from)).collect::<Result<_, _>>()?;
        let applied = (0..decoder.count()?)
            .map(|_| decoder.array().map(TaskId::from_bytes))
            .collect::<Result<_, _>>()?;
        let parents = if heading.parents { take_parents(&mut decoder)? } else { Vec::new() };
        let name =
            |number: u32| names.get(number as usize).cloned().ok_or(Malformed("a channel has no name"));
        let mut counters = BTreeMap::new();
        if heading.counters {
            for _ in 0..decoder.count()? {
                let channel = name(decoder.u32()?)?;
                counters.insert(channel, take_counters(&mut decoder)?);
            }
        }
        let rest = match (heading.rest, extra) {
            (RestKind::Empty, None) => Rest::Empty,
            (RestKind::Inline, None) => Rest::Inline(Bytes::copy_from_slice(decoder.bytes()?)),
            (RestKind::Shared, Some(n)) => Rest::Shared(n),
            _ => return Err(Malformed("unknown form of metadata")),
        };
        let mut maps = Vec::new();
        if heading.maps {
            for _ in 0..decoder.count()? {
                let key = decoder.text()?.to_owned();
                maps.push((key, take_runs(&mut decoder)?));
            }
        }
        let mut channels = BTreeMap::new();
        for _ in 0..decoder.count()? {
            let channel = name(decoder.u32()?)?;
            let tag = decoder.byte()?;
            let version = take_version(&mut decoder)?;
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
            source: heading.source,
            step,
            delta_marker: heading.delta_marker,
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
    let mut out = vec![first_byte(0)];
    put_len(&mut out, tasks.len());
    for task in tasks {
        out.extend_from_slice(task.task.as_bytes());
        put_bytes(&mut out, task.node.as_str().as_bytes());
        put_uint(&mut out, task.index);
        put_len(&mut out, task.writes.len());
        for write in &task.writes {
            put_bytes(&mut out, write.channel.as_str().as_bytes());
            put_write(&mut out, write.overwrite, &write.value);
        }
    }
    out
}

/// Reads what [`encode_tasks`] wrote.
pub(crate) fn decode_tasks(bytes: &[u8]) -> Result<Vec<TaskRecord>, Malformed> {
    let mut decoder = Decoder::new(bytes);
    take_plain_start(&mut decoder)?;
    let mut tasks = Vec::new();
    for _ in 0..decoder.count()? {
        let task = TaskId::from_bytes(decoder.array()?);
        let node = decoder.text()?.into();
        let index = decoder.u32()?;
        let mut writes = Vec::new();
        for _ in 0..decoder.count()? {
            let channel = decoder.text()?.into();
            let (overwrite, value) = take_write(&mut decoder)?;
            writes.push(WriteRecord { channel, overwrite, value });
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
        let mut out = vec![first_byte(flags)];
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
        let flags = bits_of(decoder.byte()?)?;
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
    let sorted: BTreeSet<[i64; 2]> = chunks.chain(entries).collect();
    // Objects that grow together have every second number each, and all of them together.
    let mut needs: Vec<i64> = Vec::new();
    for [first, last] in sorted {
        match needs.last_mut() {
            Some(end) if first <= *end + 1 => *end = last.max(*end),
            _ => needs.extend([first, last]),
        }
    }
    needs
}

#[cfg(test)]
mod tests;

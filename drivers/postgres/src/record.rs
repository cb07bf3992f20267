//! The contents of checkpoint rows.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use threadkeep::id::{ChannelName, CheckpointId, NodeName, TaskId};
use threadkeep::metadata::{Counters, Source};
use threadkeep_layout::{
    Decoder, Form, Heading, Malformed, Places, RestKind, Run, bits_of, first_byte, put_all_counters,
    put_bytes, put_channels, put_int, put_len, put_nodes, put_parents, put_runs, put_task, put_task_ids,
    put_uint, take_all_counters, take_channels, take_nodes, take_parents, take_plain_start, take_runs,
    take_task, take_task_ids,
};
pub(crate) use threadkeep_layout::{Rest, WriteRecord};

use crate::element::Space;

/// The flag of a thread's body that describes its past.
const PAST: u8 = 1;

/// What a checkpoint stores for a channel.
pub(crate) type StoredChannel = threadkeep_layout::StoredChannel<CheckpointId>;
/// An entry without its version. A sentinel holds the checkpoint at which its path begins: the nearest stored value, or
/// the first one after which the channel was written.
pub(crate) type Kept = threadkeep_layout::Kept<CheckpointId>;

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
        let places = Places::of(self.names());
        let mut out = Vec::new();
        heading.put(&mut out);
        put_int(&mut out, self.step);
        put_nodes(&mut out, &self.next);
        put_task_ids(&mut out, &self.applied);
        if heading.parents {
            put_parents(&mut out, &self.parents);
        }
        if heading.counters {
            put_all_counters(&mut out, &self.counters, &places);
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
        put_channels(&mut out, &self.channels, &places);
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
        let next = take_nodes(&mut decoder)?;
        let applied = take_task_ids(&mut decoder)?;
        let parents = if heading.parents { take_parents(&mut decoder)? } else { Vec::new() };
        let counters =
            if heading.counters { take_all_counters(&mut decoder, names)? } else { BTreeMap::new() };
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
        let channels = take_channels(&mut decoder, names)?;
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
        self.channels.values().filter_map(|entry| entry.kept.form())
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

/// The bytes of the tasks of a checkpoint.
pub(crate) fn encode_tasks(tasks: &[TaskRecord]) -> Vec<u8> {
    let mut out = vec![first_byte(0)];
    put_len(&mut out, tasks.len());
    for task in tasks {
        out.extend_from_slice(task.task.as_bytes());
        put_task(&mut out, &task.node, task.index, &task.writes);
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
        let (node, index, writes) = take_task(&mut decoder)?;
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
    let mut sorted: Vec<[i64; 2]> = chunks.chain(entries).collect();
    #[expect(clippy::stable_sort_primitive, reason = "it merges what is in order, as each object's are")]
    sorted.sort();
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

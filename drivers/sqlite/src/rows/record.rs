//! The bodies of checkpoint and scope rows, with names as numbers and values as [`Form`]s.

use bytes::Bytes;
use threadkeep::id::{CheckpointId, TaskId, Version};
use threadkeep::metadata::{Counters, Source};
pub(crate) use threadkeep_layout::Rest;
use threadkeep_layout::{
    Decoder, Form, Heading, Malformed, Manifest, RestKind, first_byte, put_bytes, put_counters, put_int,
    put_kept, put_len, put_parents, put_runs, put_uint, put_version, put_write, take_counters,
    take_entry_bits, take_kept, take_number, take_parents, take_plain_start, take_runs, take_version,
    take_write,
};

/// The number of an interned channel or node name.
pub(crate) type NameKey = u32;
/// The position of a checkpoint in its chain, from 1.
pub(crate) type Ordinal = u32;

/// What a checkpoint stores for a channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StoredChannel {
    /// What the checkpoint with this ordinal stores for it.
    At(Ordinal),
    /// Stored here.
    Own(Version, Kept),
}

/// An entry of its own.
pub(crate) type Kept = threadkeep_layout::Kept<()>;

/// How `extra` metadata is stored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Extra {
    /// The object without the keys in `maps`.
    pub(crate) rest: Rest,
    /// Large objects, each by the entries that it has.
    pub(crate) maps: Vec<(String, Manifest)>,
}

/// The body of a row of table `checkpoint`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CheckpointRecord {
    pub(crate) parent: Option<Ordinal>,
    pub(crate) source: Source,
    pub(crate) step: i64,
    pub(crate) delta_marker: bool,
    pub(crate) next: Vec<NameKey>,
    pub(crate) applied: Vec<u32>,
    pub(crate) parents: Vec<(String, CheckpointId)>,
    pub(crate) counters: Vec<(NameKey, Counters)>,
    pub(crate) extra: Extra,
    pub(crate) channels: Vec<(NameKey, StoredChannel)>,
}

/// Bytes for most bodies, and for the checksum that [`seal`](crate::rows::seal::seal) appends.
const USUAL: usize = 128;

// What this driver adds to the byte of an entry: a kind, and whether its version equals the previous one.
const AT: u8 = 0;
const SAME_VERSION: u8 = 1 << 2;

impl CheckpointRecord {
    /// The bytes of the record of checkpoint `own`.
    pub(crate) fn encode(&self, own: Ordinal) -> Vec<u8> {
        let heading = Heading {
            source: self.source,
            delta_marker: self.delta_marker,
            rest: self.extra.rest.kind(),
            maps: !self.extra.maps.is_empty(),
            parents: !self.parents.is_empty(),
            counters: !self.counters.is_empty(),
        };
        let mut out = Vec::with_capacity(USUAL);
        heading.put(&mut out);
        put_uint(&mut out, self.parent.map_or(0, |parent| own - parent + 1));
        put_int(&mut out, self.step);
        put_numbers(&mut out, &self.next);
        put_numbers(&mut out, &self.applied);
        if heading.parents {
            put_parents(&mut out, &self.parents);
        }
        if heading.counters {
            put_len(&mut out, self.counters.len());
            for (channel, counters) in &self.counters {
                put_uint(&mut out, *channel);
                put_counters(&mut out, *counters);
            }
        }
        match &self.extra.rest {
            Rest::Empty => {}
            Rest::Inline(bytes) => put_bytes(&mut out, bytes),
            Rest::Shared(seq) => put_uint(&mut out, *seq),
        }
        if heading.maps {
            put_len(&mut out, self.extra.maps.len());
            for (key, manifest) in &self.extra.maps {
                put_bytes(&mut out, key.as_bytes());
                put_runs(&mut out, &manifest.chunks);
                put_runs(&mut out, &manifest.tail);
            }
        }
        put_channels(&mut out, &self.channels);
        out
    }

    /// Reads the record of checkpoint `own`.
    pub(crate) fn decode(own: Ordinal, bytes: &[u8]) -> Result<Self, Malformed> {
        let mut decoder = Decoder::new(bytes);
        let heading = Heading::take(&mut decoder)?;
        let parent = match decoder.u32()? {
            0 => None,
            distance => Some(
                own.checked_sub(distance - 1)
                    .filter(|parent| (1..own).contains(parent))
                    .ok_or(Malformed("the parent is out of range"))?,
            ),
        };
        let step = decoder.int()?;
        let next = take_numbers(&mut decoder)?;
        let applied = take_numbers(&mut decoder)?;
        let parents = if heading.parents { take_parents(&mut decoder)? } else { Vec::new() };
        let mut counters = Vec::new();
        if heading.counters {
            for _ in 0..decoder.count()? {
                let channel = decoder.u32()?;
                counters.push((channel, take_counters(&mut decoder)?));
            }
        }
        let rest = match heading.rest {
            RestKind::Empty => Rest::Empty,
            RestKind::Inline => Rest::Inline(Bytes::copy_from_slice(decoder.bytes()?)),
            RestKind::Shared => Rest::Shared(take_number(&mut decoder)?),
        };
        let mut maps = Vec::new();
        if heading.maps {
            for _ in 0..decoder.count()? {
                let key = decoder.text()?.to_owned();
                maps.push((key, take_manifest(&mut decoder)?));
            }
        }
        let channels = take_channels(&mut decoder, own)?;
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

    /// What this checkpoint stores for a channel.
    pub(crate) fn entry(&self, channel: NameKey) -> Option<&StoredChannel> {
        self.channels.iter().find(|(name, _)| *name == channel).map(|(_, entry)| entry)
    }
}

fn put_channels(out: &mut Vec<u8>, channels: &[(NameKey, StoredChannel)]) {
    put_len(out, channels.len());
    let mut last = None;
    for (channel, entry) in channels {
        put_uint(out, *channel);
        match entry {
            StoredChannel::At(ordinal) => {
                out.push(AT);
                put_uint(out, *ordinal);
            }
            StoredChannel::Own(version, kept) => {
                let same = if last == Some(version) { SAME_VERSION } else { 0 };
                out.push(kept.bits() | same);
                if same == 0 {
                    put_version(out, *version);
                }
                put_kept(out, kept);
                last = Some(version);
            }
        }
    }
}

fn take_channels(
    decoder: &mut Decoder<'_>,
    own: Ordinal,
) -> Result<Vec<(NameKey, StoredChannel)>, Malformed> {
    let mut channels = Vec::new();
    let mut last = None;
    for _ in 0..decoder.count()? {
        let channel = decoder.u32()?;
        let bits = take_entry_bits(decoder, SAME_VERSION)?;
        if bits == AT {
            let ordinal = decoder.u32()?;
            if !(1..own).contains(&ordinal) {
                return Err(Malformed("an entry is taken over from an ordinal out of range"));
            }
            channels.push((channel, StoredChannel::At(ordinal)));
            continue;
        }
        let version = if bits & SAME_VERSION != 0 {
            last.ok_or(Malformed("no version to repeat"))?
        } else {
            take_version(decoder)?
        };
        last = Some(version);
        let kept = take_kept(decoder, bits)?;
        channels.push((channel, StoredChannel::Own(version, kept)));
    }
    Ok(channels)
}

/// A task that ran from a checkpoint. The tasks of a checkpoint are one column of its row, in the order in which they
/// were stored.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TaskRecord {
    pub(crate) task: TaskId,
    pub(crate) node: NameKey,
    pub(crate) index: u32,
    pub(crate) writes: Vec<WriteRecord>,
}

/// One write of a task.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct WriteRecord {
    pub(crate) channel: NameKey,
    pub(crate) overwrite: bool,
    pub(crate) value: Form,
}

/// The bytes of the tasks of a checkpoint.
pub(crate) fn encode_tasks(tasks: &[TaskRecord]) -> Vec<u8> {
    let mut out = Vec::with_capacity(USUAL);
    out.push(first_byte(0));
    put_len(&mut out, tasks.len());
    for task in tasks {
        task.put(&mut out);
    }
    out
}

/// Reads what [`encode_tasks`] wrote.
pub(crate) fn decode_tasks(bytes: &[u8]) -> Result<Vec<TaskRecord>, Malformed> {
    let mut decoder = Decoder::new(bytes);
    take_plain_start(&mut decoder)?;
    let mut tasks = Vec::new();
    for _ in 0..decoder.count()? {
        tasks.push(TaskRecord::take(&mut decoder)?);
    }
    decoder.finish()?;
    Ok(tasks)
}

impl TaskRecord {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.task.as_bytes());
        put_uint(out, self.node);
        put_uint(out, self.index);
        put_len(out, self.writes.len());
        for write in &self.writes {
            put_uint(out, write.channel);
            put_write(out, write.overwrite, &write.value);
        }
    }

    fn take(decoder: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let task = TaskId::from_bytes(decoder.array()?);
        let (node, index) = (decoder.u32()?, decoder.u32()?);
        let mut writes = Vec::new();
        for _ in 0..decoder.count()? {
            let channel = decoder.u32()?;
            let (overwrite, value) = take_write(decoder)?;
            writes.push(WriteRecord { channel, overwrite, value });
        }
        Ok(Self { task, node, index, writes })
    }
}

/// The body of a row of table `scope`: of a chain the greatest ordinal ever deleted, of a thread its rewrite count.
pub(crate) fn encode_floor(floor: Ordinal) -> Vec<u8> {
    let mut out = vec![first_byte(0)];
    put_uint(&mut out, floor);
    out
}

/// Reads what [`encode_floor`] wrote.
pub(crate) fn decode_floor(bytes: &[u8]) -> Result<Ordinal, Malformed> {
    let mut decoder = Decoder::new(bytes);
    take_plain_start(&mut decoder)?;
    let floor = decoder.u32()?;
    decoder.finish()?;
    Ok(floor)
}

fn put_numbers(out: &mut Vec<u8>, numbers: &[u32]) {
    put_len(out, numbers.len());
    for number in numbers {
        put_uint(out, *number);
    }
}

fn take_numbers(decoder: &mut Decoder<'_>) -> Result<Vec<u32>, Malformed> {
    (0..decoder.count()?).map(|_| decoder.u32()).collect()
}

fn take_manifest(decoder: &mut Decoder<'_>) -> Result<Manifest, Malformed> {
    Ok(Manifest { chunks: take_runs(decoder)?, tail: take_runs(decoder)? })
}

#[cfg(test)]
mod tests;

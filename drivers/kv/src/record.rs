//! The bodies of rows. Values are [`Form`](threadkeep_layout::Form)s: in place if they are small, otherwise the numbers
//! of elements.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use threadkeep::id::{ChannelName, CheckpointId, NodeName, TaskId};
use threadkeep::metadata::{Counters, Source};
pub(crate) use threadkeep_layout::WriteRecord;
use threadkeep_layout::{
    Decoder, Heading, Malformed, Manifest, Places, Rest, RestKind, first_byte, put_all_counters, put_bytes,
    put_channels, put_int, put_len, put_nodes, put_parents, put_runs, put_task, put_task_ids, put_uint,
    take_all_counters, take_channels, take_nodes, take_number, take_parents, take_plain_start, take_runs,
    take_task, take_task_ids,
};

use crate::keys::ThreadNumber;

/// A random number that every write to a thread draws, so that two contents of it never have the same one.
pub(crate) type Mark = [u8; 16];

/// The row of a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ThreadRecord {
    pub(crate) number: ThreadNumber,
    pub(crate) mark: Mark,
    /// The next number of each space.
    pub(crate) next: [u32; 3],
    /// The next place of a task.
    pub(crate) tasks: u64,
}

impl ThreadRecord {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![first_byte(0)];
        put_uint(&mut out, self.number);
        out.extend_from_slice(&self.mark);
        for next in self.next {
            put_uint(&mut out, next);
        }
        put_uint(&mut out, self.tasks);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut decoder = Decoder::new(bytes);
        take_plain_start(&mut decoder)?;
        let number = decoder.uint()?;
        let mark = decoder.array()?;
        let next = [decoder.u32()?, decoder.u32()?, decoder.u32()?];
        let tasks = decoder.uint()?;
        decoder.finish()?;
        Ok(Self { number, mark, next, tasks })
    }
}

/// What a checkpoint stores for a channel.
pub(crate) type StoredChannel = threadkeep_layout::StoredChannel<()>;
/// An entry without its version.
pub(crate) type Kept = threadkeep_layout::Kept<()>;

/// How `extra` metadata is stored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Extra {
    /// The object without the keys in `maps`.
    pub(crate) rest: Rest,
    /// Large objects, each by the entries that it has.
    pub(crate) maps: Vec<(String, Manifest)>,
}

/// A checkpoint.
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

    /// The bytes of the body; `names` is the number of the element that lists the names.
    pub(crate) fn encode(&self, names: u32) -> Vec<u8> {
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
        put_uint(&mut out, names);
        put_len(&mut out, usize::from(self.parent.is_some()));
        if let Some(parent) = self.parent {
            out.extend_from_slice(parent.as_bytes());
        }
        put_int(&mut out, self.step);
        put_nodes(&mut out, &self.next);
        put_task_ids(&mut out, &self.applied);
        if heading.parents {
            put_parents(&mut out, &self.parents);
        }
        if heading.counters {
            put_all_counters(&mut out, &self.counters, &places);
        }
        match &self.extra.rest {
            Rest::Empty => {}
            Rest::Inline(bytes) => put_bytes(&mut out, bytes),
            Rest::Shared(number) => put_uint(&mut out, *number),
        }
        if heading.maps {
            put_len(&mut out, self.extra.maps.len());
            for (key, manifest) in &self.extra.maps {
                put_bytes(&mut out, key.as_bytes());
                put_runs(&mut out, &manifest.chunks);
                put_runs(&mut out, &manifest.tail);
            }
        }
        put_channels(&mut out, &self.channels, &places);
        out
    }

    /// The number of the element that lists the names of the body.
    pub(crate) fn names_of(bytes: &[u8]) -> Result<u32, Malformed> {
        let mut decoder = Decoder::new(bytes);
        Heading::take(&mut decoder)?;
        take_number(&mut decoder)
    }

    /// Reads a body with these names.
    pub(crate) fn decode(bytes: &[u8], names: &[ChannelName]) -> Result<Self, Malformed> {
        let mut decoder = Decoder::new(bytes);
        let heading = Heading::take(&mut decoder)?;
        take_number(&mut decoder)?;
        let parent = match decoder.byte()? {
            0 => None,
            1 => Some(CheckpointId::from_bytes(decoder.array()?)),
            _ => return Err(Malformed("more than one parent")),
        };
        let step = decoder.int()?;
        let next = take_nodes(&mut decoder)?;
        let applied = take_task_ids(&mut decoder)?;
        let parents = if heading.parents { take_parents(&mut decoder)? } else { Vec::new() };
        let counters =
            if heading.counters { take_all_counters(&mut decoder, names)? } else { BTreeMap::new() };
        let rest = match heading.rest {
            RestKind::Empty => Rest::Empty,
            RestKind::Inline => Rest::Inline(Bytes::copy_from_slice(decoder.bytes()?)),
            RestKind::Shared => Rest::Shared(take_number(&mut decoder)?),
        };
        let mut maps = Vec::new();
        if heading.maps {
            for _ in 0..decoder.count()? {
                let key = decoder.text()?.to_owned();
                let chunks = take_runs(&mut decoder)?;
                maps.push((key, Manifest { chunks, tail: take_runs(&mut decoder)? }));
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
}

/// A task that ran from a checkpoint. Its id is in its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TaskRecord {
    /// Its place among the tasks of its thread, in the order in which they were stored.
    pub(crate) place: u64,
    pub(crate) node: NodeName,
    pub(crate) index: u32,
    pub(crate) writes: Vec<WriteRecord>,
}

impl TaskRecord {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![first_byte(0)];
        put_uint(&mut out, self.place);
        put_task(&mut out, &self.node, self.index, &self.writes);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut decoder = Decoder::new(bytes);
        take_plain_start(&mut decoder)?;
        let place = decoder.uint()?;
        let (node, index, writes) = take_task(&mut decoder)?;
        decoder.finish()?;
        Ok(Self { place, node, index, writes })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use threadkeep::id::Version;
    use threadkeep_layout::{Form, Run, decode_names, encode_names};

    use super::*;

    fn record(step: i64, number: u32, text: &str, parent: bool) -> CheckpointRecord {
        let version = Version { counter: 7, random: u64::from(number) };
        let list = Form::List(Manifest {
            chunks: vec![Run { start: number, len: 2 }],
            tail: vec![Run { start: 1, len: number + 1 }, Run { start: 0, len: 1 }],
        });
        let channel = |name: &str, kept| (name.into(), StoredChannel { version, kept });
        CheckpointRecord {
            parent: parent.then(|| CheckpointId::from_bytes([3; 16])),
            source: Source::Fork,
            step,
            delta_marker: parent,
            next: vec![text.into(), "".into()],
            applied: vec![TaskId::from_bytes([1; 16]), TaskId::from_bytes([2; 16])],
            parents: vec![(text.to_owned(), CheckpointId::from_bytes([9; 16]))],
            counters: [("gone".into(), Counters { updates: 3, supersteps: 900 })].into_iter().collect(),
            extra: Extra { rest: Rest::Shared(number), maps: vec![(text.to_owned(), Manifest::default())] },
            channels: [
                channel("a", Kept::Sentinel(())),
                channel("b", Kept::Value(list)),
                channel(text, Kept::Snapshot(Form::Plain(Bytes::from(text.to_owned())))),
            ]
            .into_iter()
            .collect(),
        }
    }

    proptest! {
        #[test]
        fn records_survive_and_cut_ones_are_refused(step in any::<i64>(), number in 0..1_000_000_u32, text in ".{0,20}", parent in any::<bool>()) {
            let record = record(step, number, &text, parent);
            let names: Vec<_> = record.names().into_iter().cloned().collect();
            prop_assert_eq!(decode_names(&encode_names(names.iter())).unwrap(), names.clone());
            let bytes = record.encode(number);
            prop_assert_eq!(CheckpointRecord::names_of(&bytes).unwrap(), number);
            prop_assert_eq!(CheckpointRecord::decode(&bytes, &names).unwrap(), record);
            prop_assert!((0..bytes.len()).all(|len| CheckpointRecord::decode(&bytes[..len], &names).is_err()));

            let writes = vec![WriteRecord { channel: "c".into(), overwrite: parent, value: Form::Shared(number) }];
            let task = TaskRecord { place: u64::from(number), node: text.as_str().into(), index: number, writes };
            prop_assert_eq!(TaskRecord::decode(&task.encode()).unwrap(), task);
            let thread = ThreadRecord { number: 5, mark: [6; 16], next: [number, 1, 2], tasks: 9 };
            prop_assert_eq!(ThreadRecord::decode(&thread.encode()).unwrap(), thread);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = CheckpointRecord::decode(&bytes, &["a".into()]);
            let _ = TaskRecord::decode(&bytes);
            let _ = ThreadRecord::decode(&bytes);
            let _ = decode_names(&bytes);
        }
    }
}

//! Writes a thread to a file.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Map, Value as Json, json};
use threadkeep::checkpoint::{CheckpointTuple, Stored};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, Version};
use threadkeep::metadata::Metadata;
use threadkeep::saver::ThreadImage;
use threadkeep::value::{ChannelValue, Element, ElementHash, ListValue};

use super::ArchiveError;
use super::format::{
    Append, ChannelPart, CheckpointLine, ElementLine, End, FORMAT, Form, Header, Line, MetadataPart, Record,
    Runs, Source, StoredName, TaskPart, VERSION, WritePart, entries_of, exact_json, hex, shallow,
};

/// Larger values are written as elements, so that a value that stays the same over many checkpoints is in the file
/// once.
const INLINE: usize = 64;
/// Larger metadata maps are written entry by entry: they often grow by one entry per run.
const SMALL_MAP: usize = 16;

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Checkpoints.
    pub checkpoints: u64,
    /// Elements.
    pub elements: u64,
    /// Bytes of the file.
    pub bytes: u64,
}

/// Writes a thread. The same image always yields the same bytes.
///
/// # Errors
/// [`ArchiveError::Io`], and [`ArchiveError::Value`] for metadata that no store can hold.
pub fn write(
    image: &ThreadImage,
    source: Source,
    record: Option<Record>,
    to: impl Write,
) -> Result<Written, ArchiveError> {
    let mut writer = Writer {
        lines: Lines { to, hash: blake3::Hasher::new(), count: 0, bytes: 0 },
        elements: HashMap::new(),
        lists: HashMap::new(),
        entries: HashMap::new(),
    };
    let thread = image.thread.to_string();
    let header = Header { format: FORMAT.to_owned(), version: VERSION, thread, source, record };
    writer.lines.add(&Line::Header(header))?;
    let mut tasks = 0;
    for tuple in image.checkpoints.values() {
        tasks += tuple.writes.len() as u64;
        writer.checkpoint(image, tuple)?;
    }
    let (checkpoints, elements) =
        (image.checkpoints.len() as u64, writer.elements.values().map(|of| of.len() as u64).sum());
    let blake3 = writer.lines.hash.finalize().to_hex().to_string();
    writer.lines.add(&Line::End(End { elements, checkpoints, tasks, blake3 }))?;
    let mut lines = writer.lines;
    lines.to.flush().map_err(|cause| ArchiveError::Io { line: lines.count, cause })?;
    Ok(Written { checkpoints, elements, bytes: lines.bytes })
}

/// Writes the lines and hashes them.
struct Lines<W> {
    to: W,
    hash: blake3::Hasher,
    count: u64,
    bytes: u64,
}

impl<W: Write> Lines<W> {
    fn add(&mut self, line: &Line) -> Result<(), ArchiveError> {
        self.count += 1;
        let failed = |cause| ArchiveError::Io { line: self.count, cause };
        let mut text = serde_json::to_vec(line).map_err(|error| failed(io::Error::from(error)))?;
        text.push(b'\n');
        self.hash.update(&text);
        self.bytes += text.len() as u64;
        self.to.write_all(&text).map_err(failed)
    }
}

struct Writer<W> {
    lines: Lines<W>,
    /// The numbers of elements, counted separately for each channel and each metadata map, so that lists and maps that
    /// grow are few runs.
    elements: HashMap<String, HashMap<ElementHash, u32>>,
    /// The lists written so far, for lists that extend them.
    lists: HashMap<(Namespace, ChannelName, Version), ListValue>,
    /// The entries of metadata maps that are already elements, by the map's key and their own.
    entries: HashMap<String, HashMap<String, (Json, u32)>>,
}

impl<W: Write> Writer<W> {
    /// The number of an element, which is written if it is new.
    fn element(&mut self, of: &str, element: &Element) -> Result<u32, ArchiveError> {
        if let Some(n) = self.elements.get(of).and_then(|known| known.get(element.hash())) {
            return Ok(*n);
        }
        let known = self.elements.entry(of.to_owned()).or_default();
        let n = u32::try_from(known.len()).map_err(|_| ArchiveError::Line {
            line: self.lines.count,
            reason: "a file cannot hold more elements".to_owned(),
        })?;
        known.insert(*element.hash(), n);
        let (hash, value) = (hex(element.hash()), inline(element));
        self.lines.add(&Line::Element(ElementLine { of: of.to_owned(), n, hash, value }))?;
        Ok(n)
    }

    fn runs(&mut self, of: &str, list: &ListValue, start: usize) -> Result<Runs, ArchiveError> {
        let mut runs = Runs::new();
        for element in list.iter_from(start) {
            push(&mut runs, self.element(of, element)?);
        }
        Ok(runs)
    }

    fn value(&mut self, channel: &ChannelName, value: &ChannelValue) -> Result<Form, ArchiveError> {
        match value {
            ChannelValue::List(list) => self.runs(channel.as_str(), list, 0).map(Form::List),
            ChannelValue::Plain(encoded) => {
                let element = Element::from_bytes(encoded.bytes.clone());
                if encoded.bytes.len() > INLINE {
                    self.element(channel.as_str(), &element).map(Form::Element)
                } else {
                    Ok(inline(&element))
                }
            }
        }
    }

    /// The value of a channel. `above` is the version at the parent: a list that extends that one is written as such.
    fn channel(
        &mut self,
        (namespace, name): (&Namespace, &ChannelName),
        (version, above): (Version, Option<Version>),
        value: &ChannelValue,
    ) -> Result<Form, ArchiveError> {
        let ChannelValue::List(list) = value else { return self.value(name, value) };
        let key = |version| (namespace.clone(), name.clone(), version);
        let base = above.and_then(|above| Some((above, self.lists.get(&key(above))?)));
        let base = base.filter(|(_, base)| begins_with(list, base)).map(|(above, base)| (above, base.len()));
        let form = match base {
            Some((above, len)) => {
                Form::Append(Append { to: above.to_string(), list: self.runs(name.as_str(), list, len)? })
            }
            None => self.value(name, value)?,
        };
        self.lists.insert(key(version), list.clone());
        Ok(form)
    }

    fn extra(&mut self, at: CheckpointId, key: &str, value: &Json) -> Result<Form, ArchiveError> {
        match value {
            Json::Object(map) if map.len() > SMALL_MAP => self.map(at, key, map).map(Form::Map),
            value if shallow(value) => Ok(Form::Json(value.clone())),
            value => encoded(at, value).map(|element| inline(&element)),
        }
    }

    fn map(&mut self, at: CheckpointId, key: &str, map: &Map<String, Json>) -> Result<Runs, ArchiveError> {
        let mut numbers = Vec::with_capacity(map.len());
        for (name, value) in map {
            let known = self.entries.get(key).and_then(|known| known.get(name));
            if let Some((_, n)) = known.filter(|(known, _)| known == value) {
                numbers.push(*n);
                continue;
            }
            let n = self.element(&entries_of(key), &encoded(at, &json!([name, value]))?)?;
            self.entries.entry(key.to_owned()).or_default().insert(name.clone(), (value.clone(), n));
            numbers.push(n);
        }
        // The order of entries has no meaning, and sorted a map that grew is few runs.
        numbers.sort_unstable();
        let mut runs = Runs::new();
        for n in numbers {
            push(&mut runs, n);
        }
        Ok(runs)
    }

    fn checkpoint(&mut self, image: &ThreadImage, tuple: &CheckpointTuple) -> Result<(), ArchiveError> {
        let id = tuple.checkpoint.id;
        let parent =
            tuple.parent.and_then(|parent| image.checkpoints.get(&(tuple.namespace.clone(), parent)));
        let mut channels = BTreeMap::new();
        for (name, entry) in &tuple.checkpoint.channels {
            let (stored, value) = match &entry.stored {
                Stored::Value(value) => (StoredName::Value, Some(value)),
                Stored::Snapshot(value) => (StoredName::Snapshot, Some(value)),
                Stored::Sentinel => (StoredName::Sentinel, None),
                Stored::Held => {
                    let cause = threadkeep::Error::corrupt(
                        format!("thread {}, checkpoint {id}", tuple.thread),
                        format!("the saver did not load channel {name}"),
                    );
                    return Err(ArchiveError::Value { checkpoint: id, cause });
                }
            };
            let above =
                parent.and_then(|parent| parent.checkpoint.channels.get(name)).map(|above| above.version);
            let at = (&tuple.namespace, name);
            let value = value.map(|value| self.channel(at, (entry.version, above), value)).transpose()?;
            channels
                .insert(name.to_string(), ChannelPart { version: entry.version.to_string(), stored, value });
        }
        let mut tasks = Vec::with_capacity(tuple.writes.len());
        for row in &tuple.writes {
            let mut writes = Vec::with_capacity(row.writes.len());
            for write in &row.writes {
                let value = self.value(&write.channel, &write.value)?;
                writes.push(WritePart {
                    channel: write.channel.to_string(),
                    overwrite: write.overwrite,
                    value,
                });
            }
            let (task, node) = (row.task.to_string(), row.node.to_string());
            tasks.push(TaskPart { task, node, index: row.index, writes });
        }
        let line = CheckpointLine {
            id: id.to_string(),
            namespace: tuple.namespace.to_string(),
            parent: tuple.parent.map(|id| id.to_string()),
            metadata: self.metadata(id, &tuple.metadata)?,
            next: tuple.checkpoint.next.iter().map(ToString::to_string).collect(),
            applied: tuple.checkpoint.applied.iter().map(ToString::to_string).collect(),
            channels,
            tasks,
        };
        self.lines.add(&Line::Checkpoint(Box::new(line)))
    }

    fn metadata(&mut self, at: CheckpointId, metadata: &Metadata) -> Result<MetadataPart, ArchiveError> {
        let extra = metadata.extra.iter().map(|(key, value)| Ok((key.clone(), self.extra(at, key, value)?)));
        let extra = extra.collect::<Result<_, ArchiveError>>()?;
        let parents = metadata.parents.iter().map(|(namespace, id)| (namespace.to_string(), id.to_string()));
        let counters = metadata.counters.iter();
        let counters =
            counters.map(|(name, counters)| (name.to_string(), (counters.updates, counters.supersteps)));
        Ok(MetadataPart {
            source: metadata.source,
            step: metadata.step,
            parents: parents.collect(),
            delta_marker: metadata.delta_marker,
            counters: counters.collect(),
            extra,
        })
    }
}

fn encoded(at: CheckpointId, value: &Json) -> Result<Element, ArchiveError> {
    Element::from_json(value).map_err(|cause| ArchiveError::Value { checkpoint: at, cause })
}

fn inline(element: &Element) -> Form {
    match exact_json(element) {
        Some(json) => Form::Json(json),
        None => Form::Msgpack(BASE64.encode(element.bytes())),
    }
}

fn begins_with(list: &ListValue, base: &ListValue) -> bool {
    base.len() <= list.len() && base.iter().zip(list.iter()).all(|(a, b)| a == b)
}

fn push(runs: &mut Runs, n: u32) {
    match runs.last_mut() {
        Some((start, count)) if *start + *count == n => *count += 1,
        _ => runs.push((n, 1)),
    }
}

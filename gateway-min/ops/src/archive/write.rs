//! Writes a thread to a file.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use lru::LruCache;
use serde_json::{Value as Json, json};
use threadkeep::checkpoint::{CheckpointTuple, Stored};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, ThreadId, Version};
use threadkeep::metadata::{Entries, Metadata};
use threadkeep::saver::{LocalKey, ThreadImage};
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
/// How many lists are remembered, and of how many checkpoints: a list that extends an older one is written as a list of its
/// own. Those of a page share nothing with those of another page, so each page from which one is remembered is held
/// with all elements of its lists.
const REMEMBERED: NonZeroUsize = NonZeroUsize::MIN.saturating_add((1 << 7) - 1);

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Checkpoints.
    pub checkpoints: u64,
    /// Elements.
    pub elements: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// Places of lists and entries of maps that were looked up: what the writing costs besides the bytes.
    pub compared: u64,
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
    let mut writer = Writer::begin(&image.thread, source, record, to)?;
    for tuple in image.checkpoints.values() {
        writer.checkpoint(tuple)?;
    }
    writer.end()
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

/// Writes a thread checkpoint by checkpoint, in the order of namespaces and ids. It holds the hash of each element, and
/// lists and maps of the latest checkpoints, which share what they have in common.
pub struct Writer<W> {
    lines: Lines<W>,
    /// The numbers of elements, counted separately for each channel and each metadata map, so that lists and maps that
    /// grow are few runs.
    elements: HashMap<String, HashMap<ElementHash, u32>>,
    /// The latest lists, for lists that extend them.
    lists: LruCache<(Namespace, ChannelName, Version), ListValue>,
    /// The versions of the lists of the latest checkpoints.
    versions: LruCache<LocalKey, Vec<(ChannelName, Version)>>,
    /// The latest metadata map of each key, and its runs.
    maps: HashMap<String, (Entries, Runs)>,
    checkpoints: u64,
    tasks: u64,
    compared: u64,
}

impl<W: Write> Writer<W> {
    /// Writes the header.
    ///
    /// # Errors
    /// [`ArchiveError::Io`], and [`ArchiveError::Line`] for metadata of the record that cannot be encoded.
    pub fn begin(
        thread: &ThreadId,
        source: Source,
        mut record: Option<Record>,
        to: W,
    ) -> Result<Self, ArchiveError> {
        let mut lines = Lines { to, hash: blake3::Hasher::new(), count: 0, bytes: 0 };
        let thread = thread.to_string();
        let record_metadata = record.as_mut().map(deep_metadata).transpose()?.flatten();
        let header =
            Header { format: FORMAT.to_owned(), version: VERSION, thread, source, record, record_metadata };
        lines.add(&Line::Header(header))?;
        Ok(Self {
            lines,
            elements: HashMap::new(),
            lists: LruCache::new(REMEMBERED),
            versions: LruCache::new(REMEMBERED),
            maps: HashMap::new(),
            checkpoints: 0,
            tasks: 0,
            compared: 0,
        })
    }

    /// Writes the end.
    ///
    /// # Errors
    /// [`ArchiveError::Io`].
    pub fn end(self) -> Result<Written, ArchiveError> {
        let Self { mut lines, elements, checkpoints, tasks, compared, .. } = self;
        let elements = elements.values().map(|of| of.len() as u64).sum();
        let blake3 = lines.hash.finalize().to_hex().to_string();
        lines.add(&Line::End(End { elements, checkpoints, tasks, blake3 }))?;
        lines.to.flush().map_err(|cause| ArchiveError::Io { line: lines.count, cause })?;
        Ok(Written { checkpoints, elements, bytes: lines.bytes, compared })
    }

    /// The number of an element, which is written if it is new.
    fn element(&mut self, of: &str, element: &Element) -> Result<u32, ArchiveError> {
        self.compared += 1;
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
        let base = above.and_then(|above| Some((above, self.lists.peek(&key(above))?)));
        let base = base.filter(|(_, base)| list.starts_with(base)).map(|(above, base)| (above, base.len()));
        let form = match base {
            Some((above, len)) => {
                Form::Append(Append { to: above.to_string(), list: self.runs(name.as_str(), list, len)? })
            }
            None => self.value(name, value)?,
        };
        self.lists.put(key(version), list.clone());
        Ok(form)
    }

    /// A value of metadata that is not a larger map.
    fn extra(at: CheckpointId, value: Json) -> Result<Form, ArchiveError> {
        if shallow(&value) {
            Ok(Form::Json(value))
        } else {
            encoded(at, &value).map(|element| inline(&element))
        }
    }

    /// A larger map. Only the entries that the latest one under the same key does not have are looked at.
    fn map(&mut self, at: CheckpointId, key: &str, map: &Entries) -> Result<Runs, ArchiveError> {
        let of = entries_of(key);
        if let Some((known, mut runs)) = self.maps.remove(key)
            && let Some(added) = map.added_to(&known)
        {
            let numbers = self.numbers(at, &of, added)?;
            let next = runs.last().map_or(0, |(start, count)| start + count);
            if numbers.first().is_none_or(|first| *first >= next) {
                for n in numbers {
                    push(&mut runs, n);
                }
                self.maps.insert(key.to_owned(), (map.clone(), runs.clone()));
                return Ok(runs);
            }
        }
        let mut runs = Runs::new();
        for n in self.numbers(at, &of, map.iter())? {
            push(&mut runs, n);
        }
        self.maps.insert(key.to_owned(), (map.clone(), runs.clone()));
        Ok(runs)
    }

    /// The numbers of the elements that hold these entries, sorted: their order has no meaning, and sorted a map that
    /// grew is few runs.
    fn numbers<'e>(
        &mut self,
        at: CheckpointId,
        of: &str,
        entries: impl IntoIterator<Item = (&'e Arc<str>, &'e Arc<Json>)>,
    ) -> Result<Vec<u32>, ArchiveError> {
        let entries = entries.into_iter();
        let numbers =
            entries.map(|(name, value)| self.element(of, &encoded(at, &json!([&**name, &**value]))?));
        let mut numbers = numbers.collect::<Result<Vec<_>, _>>()?;
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Writes a checkpoint, whose namespace and id must be greater than those of the one before.
    ///
    /// # Errors
    /// As [`write()`].
    pub fn checkpoint(&mut self, tuple: &CheckpointTuple) -> Result<(), ArchiveError> {
        let id = tuple.checkpoint.id;
        let place = |id| (tuple.namespace.clone(), id);
        let parent = tuple.parent.and_then(|parent| self.versions.get(&place(parent)).cloned());
        let parent = parent.unwrap_or_default();
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
            let above = parent.iter().find(|(above, _)| above == name).map(|(_, version)| *version);
            let at = (&tuple.namespace, name);
            let value = value.map(|value| self.channel(at, (entry.version, above), value)).transpose()?;
            channels
                .insert(name.to_string(), ChannelPart { version: entry.version.to_string(), stored, value });
        }
        let lists = tuple.checkpoint.channels.iter().filter(|(_, entry)| is_list(&entry.stored));
        let versions = lists.map(|(name, entry)| (name.clone(), entry.version)).collect();
        self.versions.put(place(id), versions);
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
        self.checkpoints += 1;
        self.tasks += tuple.writes.len() as u64;
        self.lines.add(&Line::Checkpoint(Box::new(line)))
    }

    fn metadata(&mut self, at: CheckpointId, metadata: &Metadata) -> Result<MetadataPart, ArchiveError> {
        let (rest, large) = metadata.extra.split();
        let mut extra = BTreeMap::new();
        for (key, value) in rest {
            extra.insert(key, Self::extra(at, value)?);
        }
        for (key, map) in large {
            let form = if map.len() > SMALL_MAP {
                Form::Map(self.map(at, &key, &map)?)
            } else {
                let map = map.iter().map(|(name, value)| (name.to_string(), Json::clone(value)));
                Self::extra(at, Json::Object(map.collect()))?
            };
            extra.insert(key, form);
        }
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

/// The metadata of a record, taken out of it, if it is nested too deep for JSON.
fn deep_metadata(record: &mut Record) -> Result<Option<String>, ArchiveError> {
    let metadata = Json::Object(std::mem::take(&mut record.metadata));
    if !shallow(&metadata) {
        let element = Element::from_json(&metadata);
        let element = element.map_err(|error| ArchiveError::Line { line: 1, reason: error.to_string() })?;
        return Ok(Some(BASE64.encode(element.bytes())));
    }
    if let Json::Object(metadata) = metadata {
        record.metadata = metadata;
    }
    Ok(None)
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

fn is_list(stored: &Stored) -> bool {
    stored.value().is_some_and(|value| value.as_list().is_some())
}

fn push(runs: &mut Runs, n: u32) {
    match runs.last_mut() {
        Some((start, count)) if *start + *count == n => *count += 1,
        _ => runs.push((n, 1)),
    }
}

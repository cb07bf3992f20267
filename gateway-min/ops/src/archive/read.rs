//! Reads a thread from a file, a checkpoint at a time.

use std::collections::{BTreeMap, HashMap};
use std::io::{Cursor, Read, Seek};
use std::sync::Arc;

use serde_json::{Map, Value as Json};
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, CheckpointTuple, Stored, TaskWrites, Write};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, ThreadId, Version};
use threadkeep::metadata::{Counters, Entries, Extra, Metadata};
use threadkeep::saver::LocalKey;
use threadkeep::value::{ChannelValue, Element, ListValue};

use super::ArchiveError;
use super::format::{
    Append, ChannelPart, CheckpointLine, End, Form, Header, Line, MetadataPart, Record, Runs, Source,
    StoredName, TaskPart, entries_of,
};
use super::known::{Elements, Lists};
use super::lines::{Lines, header};
use super::values::{beyond, bytes, nodes, parsed, plain, version_of};

/// The default of [`read_within`], so that a small file cannot fill the memory.
pub const MAX_PLACES: u64 = 16 << 20;
/// How often the elements of a channel may occur in one of its lists on average, and how many places a list may have
/// anyway, of each million that all may have. A list of messages repeats few of its elements, because they differ by their ids.
const MAX_REPEATS: u64 = 4;
const FREE_PLACES: u64 = 625;
/// What an element of a list takes, compared with a value of a map.
const LIST_COST: u64 = 4;

/// The content of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Archive {
    /// The thread's id when it was exported.
    pub thread: ThreadId,
    /// Where it was exported from.
    pub source: Source,
    /// The gateway's record of it.
    pub record: Option<Record>,
    /// Its checkpoints, by namespace and id.
    pub checkpoints: Vec<CheckpointTuple>,
}

/// Reads a file and checks all of it, with the default limit of [`read_within`].
///
/// # Errors
/// [`ArchiveError`] naming the line.
pub fn read(from: impl Read) -> Result<Archive, ArchiveError> {
    read_within(from, MAX_PLACES)
}

/// [`read`] with another limit. `max_places` is the maximum number of elements in lists, where a list that extends
/// another one counts only its own; four values of a map count as one element.
///
/// It holds the file and all that it returns: [`Reader`] does not.
///
/// # Errors
/// [`ArchiveError`] naming the line.
pub fn read_within(mut from: impl Read, max_places: u64) -> Result<Archive, ArchiveError> {
    let mut file = Vec::new();
    from.read_to_end(&mut file).map_err(|cause| ArchiveError::Io { line: 1, cause })?;
    let mut reader = Reader::begin(Cursor::new(file), max_places)?;
    let mut checkpoints = Vec::new();
    while let Some(tuple) = reader.next_checkpoint()? {
        checkpoints.push(tuple);
    }
    let Reader { thread, source, record, .. } = reader;
    Ok(Archive { thread, source, record, checkpoints })
}

/// Puts metadata that is nested too deep for JSON into its record.
fn put_metadata(record: Option<&mut Record>, text: &str) -> Result<(), String> {
    let record = record.ok_or("record_metadata without a record")?;
    if !record.metadata.is_empty() {
        return Err("record_metadata beside other metadata of the record".to_owned());
    }
    match Element::from_bytes(bytes(text)?).to_json() {
        Ok(Json::Object(metadata)) => record.metadata = metadata,
        Ok(_) => return Err("record_metadata is no object".to_owned()),
        Err(error) => return Err(error.to_string()),
    }
    Ok(())
}

/// Reads a file checkpoint by checkpoint. It holds the latest elements and lists, and for each of the others where it is.
pub struct Reader<R> {
    lines: Lines<R>,
    thread: ThreadId,
    source: Source,
    record: Option<Record>,
    elements: Elements,
    /// What the rest of the file may expand to: [`LIST_COST`] for an element of a list, 1 for a value of a map.
    room: u64,
    max_places: u64,
    lists: Lists,
    /// The latest metadata map of each key, with its runs, for maps that extend it.
    maps: HashMap<String, (Runs, Entries)>,
    last: Option<LocalKey>,
    checkpoints: u64,
    count: u64,
    tasks: u64,
    has_ended: bool,
}

impl<R: Read + Seek> Reader<R> {
    /// Reads the header of a file, which is at its beginning. `max_places` is as for [`read_within`].
    ///
    /// # Errors
    /// [`ArchiveError`] naming the line.
    pub fn begin(from: R, max_places: u64) -> Result<Self, ArchiveError> {
        let mut lines = Lines::new(from);
        let Header { thread, source, mut record, record_metadata, .. } = header(&mut lines)?;
        if let Some(text) = record_metadata {
            put_metadata(record.as_mut(), &text)
                .map_err(|reason| ArchiveError::Line { line: lines.number, reason })?;
        }
        Ok(Self {
            lines,
            thread: thread.as_str().into(),
            source,
            record,
            elements: Elements::new(),
            room: max_places.saturating_mul(LIST_COST),
            max_places,
            lists: Lists::new(),
            maps: HashMap::new(),
            last: None,
            checkpoints: 0,
            count: 0,
            tasks: 0,
            has_ended: false,
        })
    }

    /// The id of the thread when it was exported.
    pub fn thread(&self) -> &ThreadId {
        &self.thread
    }

    /// The gateway's record of it.
    pub fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }

    /// The hash of a file that was read to its end.
    pub fn digest(&self) -> Option<blake3::Hash> {
        self.has_ended.then(|| self.lines.hash())
    }

    /// The bytes of the elements that it holds.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        self.elements.held()
    }

    /// The bytes that were read so far. What was read again counts again.
    pub fn bytes(&self) -> u64 {
        self.lines.bytes() + self.elements.again() as u64
    }

    /// The next checkpoint; none after the last one, once the whole file was checked.
    ///
    /// # Errors
    /// [`ArchiveError`] naming the line.
    pub fn next_checkpoint(&mut self) -> Result<Option<CheckpointTuple>, ArchiveError> {
        while !self.has_ended {
            if !self.lines.next()? {
                return Err(ArchiveError::Truncated { lines: self.lines.number });
            }
            let line = self.lines.number;
            let wrong = |reason: String| ArchiveError::Line { line, reason };
            match self.lines.parse()? {
                Line::Header(_) => return Err(wrong("a second header".to_owned())),
                Line::Element(element) => {
                    self.elements.add(&element, self.lines.spot()).map_err(wrong)?;
                    self.count += 1;
                }
                Line::Checkpoint(checkpoint) => return self.checkpoint(*checkpoint).map(Some).map_err(wrong),
                Line::End(end) => self.end(&end)?,
            }
        }
        Ok(None)
    }

    fn end(&mut self, end: &End) -> Result<(), ArchiveError> {
        let line = self.lines.number;
        if end.blake3 != self.lines.hash().to_hex().as_str() {
            return Err(ArchiveError::Altered { line });
        }
        if (end.elements, end.checkpoints, end.tasks) != (self.count, self.checkpoints, self.tasks) {
            let reason = "the counts in 'end' do not match the lines".to_owned();
            return Err(ArchiveError::Line { line, reason });
        }
        if self.lines.next()? {
            return Err(ArchiveError::Line {
                line: self.lines.number,
                reason: "a line after 'end'".to_owned(),
            });
        }
        self.has_ended = true;
        Ok(())
    }

    /// The elements of a run, which must have been read before.
    fn run(&mut self, of: &str, run: (u32, u32)) -> Result<Vec<Element>, String> {
        self.charge(u64::from(run.1).saturating_mul(LIST_COST))?;
        self.elements.run(&mut self.lines, of, run)
    }

    fn charge(&mut self, cost: u64) -> Result<(), String> {
        let max = self.max_places;
        self.room = self.room.checked_sub(cost).ok_or_else(|| {
            format!(
                "the lists of the file have more than {max} elements in total; --max-elements allows more"
            )
        })?;
        Ok(())
    }

    fn list(
        &mut self,
        channel: &ChannelName,
        mut list: ListValue,
        runs: &[(u32, u32)],
    ) -> Result<ListValue, String> {
        let known = self.elements.count(channel.as_str()) as u64;
        let free = (self.max_places >> 20).saturating_mul(FREE_PLACES);
        let most = known.saturating_mul(MAX_REPEATS).saturating_add(free);
        for run in runs {
            let elements = self.run(channel.as_str(), *run)?;
            if (list.len() + elements.len()) as u64 > most {
                return Err(format!(
                    "a list of {channel} repeats its {known} elements too often; --max-elements allows more"
                ));
            }
            for element in elements {
                list.push(element);
            }
        }
        Ok(list)
    }

    fn value(&mut self, channel: &ChannelName, form: Form) -> Result<ChannelValue, String> {
        let value = match form {
            Form::List(runs) => {
                return self.list(channel, ListValue::default(), &runs).map(ChannelValue::List);
            }
            Form::Append(_) => return Err("only the value of a channel can append to another one".to_owned()),
            Form::Map(_) => return Err("a map can occur only in metadata".to_owned()),
            Form::Json(json) => ChannelValue::from_json(&json).map_err(|error| error.to_string())?,
            Form::Msgpack(text) => plain(bytes(&text)?)?,
            Form::Element(n) => {
                let elements = self.run(channel.as_str(), (n, 1))?;
                plain(elements.first().ok_or("no such element")?.bytes().clone())?
            }
        };
        match value {
            ChannelValue::List(_) => Err("a list must be given as runs of elements".to_owned()),
            value @ ChannelValue::Plain(_) => Ok(value),
        }
    }

    /// The value of a channel. A list that extends another one shares its elements.
    fn channel(&mut self, name: &ChannelName, version: Version, form: Form) -> Result<ChannelValue, String> {
        let again = self.elements.again();
        let (list, is_known) = match form {
            Form::Append(Append { to, list }) => {
                let above = version_of(&to)?;
                let mut base = self.lists.get((&mut self.lines, &mut self.elements), name, above)?;
                base.rebase(above);
                // A checkpoint that repeats a version says nothing new of it.
                let is_known = above == version && list.is_empty();
                (self.list(name, base, &list)?, is_known)
            }
            form => match self.value(name, form)? {
                ChannelValue::List(list) => (list, false),
                plain @ ChannelValue::Plain(_) => return Ok(plain),
            },
        };
        let again = self.elements.again() - again;
        let spot = (!is_known).then(|| self.lines.spot());
        self.lists.add(name, version, (list.clone(), again), spot);
        Ok(list.into())
    }

    /// A metadata map. One that extends the latest one under the same key shares its entries.
    fn map(&mut self, key: &str, runs: Runs) -> Result<Entries, String> {
        let of = entries_of(key);
        let known = self.maps.remove(key);
        let known = known.and_then(|(have, entries)| Some((entries, beyond(&have, &runs)?)));
        let (mut entries, rest) = known.unwrap_or_else(|| (Entries::default(), runs.clone()));
        for run in rest {
            for element in self.run(&of, run)? {
                let entry = element.to_json().map_err(|error| error.to_string())?;
                self.charge(nodes(&entry))?;
                let Json::Array(pair) = entry else {
                    return Err("an entry of a map is not an array".to_owned());
                };
                match <[Json; 2]>::try_from(pair) {
                    Ok([Json::String(key), value]) if entries.get(&key).is_none() => {
                        entries.insert((key.into(), Arc::new(value)));
                    }
                    _ => return Err("an entry of a map is not a new key with its value".to_owned()),
                }
            }
        }
        self.maps.insert(key.to_owned(), (runs, entries.clone()));
        Ok(entries)
    }

    fn extra(&mut self, part: BTreeMap<String, Form>) -> Result<Extra, String> {
        let (mut rest, mut large) = (Map::new(), Vec::new());
        for (key, form) in part {
            match form {
                Form::Json(json) => drop(rest.insert(key, json)),
                Form::Map(runs) => {
                    let entries = self.map(&key, runs)?;
                    large.push((key, entries));
                }
                // Not as the value of a channel, which is no array.
                Form::Msgpack(text) => {
                    let value = Element::from_bytes(bytes(&text)?).to_json();
                    rest.insert(key, value.map_err(|error| error.to_string())?);
                }
                form => {
                    let value = self.value(&key.as_str().into(), form)?;
                    let value = value.to_json().map_err(|error| error.to_string())?;
                    rest.insert(key, value);
                }
            }
        }
        Ok(Extra::sharing(rest, large))
    }

    fn checkpoint(&mut self, line: CheckpointLine) -> Result<CheckpointTuple, String> {
        self.elements.begin();
        let id: CheckpointId = parsed("id", &line.id)?;
        let namespace = Namespace::from(line.namespace);
        let place: LocalKey = (namespace.clone(), id);
        if self.last.as_ref().is_some_and(|last| *last >= place) {
            return Err(format!("checkpoint {id} is out of order"));
        }
        if self.last.as_ref().is_some_and(|last| last.0 != namespace) {
            self.lists.clear();
        }
        let mut channels = BTreeMap::new();
        for (name, ChannelPart { version, stored, value }) in line.channels {
            let version = version_of(&version)?;
            let name = ChannelName::from(name);
            let value = value.map(|form| self.channel(&name, version, form)).transpose()?;
            let stored = match (stored, value) {
                (StoredName::Value, Some(value)) => Stored::Value(value),
                (StoredName::Snapshot, Some(value)) => Stored::Snapshot(value),
                (StoredName::Sentinel, None) => Stored::Sentinel,
                (StoredName::Sentinel, Some(_)) => {
                    return Err(format!("channel {name}: a sentinel with a value"));
                }
                (_, None) => return Err(format!("channel {name} has no value")),
            };
            channels.insert(name, ChannelEntry { version, stored });
        }
        let applied = line.applied.iter().map(|task| parsed("applied", task)).collect::<Result<_, _>>()?;
        let tuple = CheckpointTuple {
            thread: self.thread.clone(),
            namespace,
            checkpoint: Checkpoint {
                id,
                channels,
                next: line.next.into_iter().map(Into::into).collect(),
                applied,
            },
            parent: line.parent.map(|parent| parsed("parent", &parent)).transpose()?,
            metadata: self.metadata(line.metadata)?,
            writes: line.tasks.into_iter().map(|task| self.task(task)).collect::<Result<_, _>>()?,
        };
        self.tasks += tuple.writes.len() as u64;
        self.checkpoints += 1;
        self.last = Some(place);
        Ok(tuple)
    }

    fn metadata(&mut self, part: MetadataPart) -> Result<Metadata, String> {
        let parents = part.parents.into_iter().map(|(ns, id)| Ok((ns.into(), parsed("parents", &id)?)));
        let parents = parents.collect::<Result<_, String>>()?;
        let counters = part.counters.into_iter();
        let counters = counters
            .map(|(name, (updates, supersteps))| (name.into(), Counters { updates, supersteps }))
            .collect();
        let extra = self.extra(part.extra)?;
        Ok(Metadata {
            source: part.source,
            step: part.step,
            parents,
            delta_marker: part.delta_marker,
            counters,
            extra,
        })
    }

    fn task(&mut self, part: TaskPart) -> Result<TaskWrites, String> {
        let writes = part.writes.into_iter().map(|write| {
            let channel = ChannelName::from(write.channel);
            Ok(Write { value: self.value(&channel, write.value)?, channel, overwrite: write.overwrite })
        });
        let writes = writes.collect::<Result<_, String>>()?;
        Ok(TaskWrites {
            task: parsed("task", &part.task)?,
            node: part.node.into(),
            index: part.index,
            writes,
        })
    }
}

//! Reads a thread from a file. Everything is checked before anything is returned.

use std::collections::{BTreeMap, HashMap};
use std::io::BufRead;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Map, Value as Json};
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, CheckpointTuple, Stored, TaskWrites, Write};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, ThreadId, Version};
use threadkeep::metadata::{Counters, Entries, Extra, Metadata};
use threadkeep::saver::LocalKey;
use threadkeep::value::{ChannelValue, Codec, Element, Encoded, ListValue};

use super::ArchiveError;
use super::format::{
    Append, ChannelPart, CheckpointLine, ElementLine, Form, Header, Line, MetadataPart, Record, Runs, Source,
    StoredName, TaskPart, entries_of, hex,
};
use super::lines::{Lines, header};

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
pub fn read(from: impl BufRead) -> Result<Archive, ArchiveError> {
    read_within(from, MAX_PLACES)
}

/// [`read`] with another limit. `max_places` is the maximum number of elements in lists, where a list that extends
/// another one counts only its own; four values of a map count as one element.
///
/// # Errors
/// [`ArchiveError`] naming the line.
pub fn read_within(from: impl BufRead, max_places: u64) -> Result<Archive, ArchiveError> {
    let mut lines = Lines::new(from);
    let Header { thread, source, mut record, record_metadata, .. } = header(&mut lines)?;
    if let Some(text) = record_metadata {
        put_metadata(record.as_mut(), &text)
            .map_err(|reason| ArchiveError::Line { line: lines.number, reason })?;
    }
    let mut reader = Reader {
        thread: thread.as_str().into(),
        elements: HashMap::new(),
        room: max_places.saturating_mul(LIST_COST),
        max_places,
        lists: HashMap::new(),
        maps: HashMap::new(),
        checkpoints: Vec::new(),
        count: 0,
        tasks: 0,
    };
    loop {
        let before = lines.hash().to_hex();
        if !lines.next()? {
            return Err(ArchiveError::Truncated { lines: lines.number });
        }
        let number = lines.number;
        let wrong = |reason: String| ArchiveError::Line { line: number, reason };
        match lines.parse()? {
            Line::Header(_) => return Err(wrong("a second header".to_owned())),
            Line::Element(line) => reader.element(&line).map_err(wrong)?,
            Line::Checkpoint(line) => reader.checkpoint(*line).map_err(wrong)?,
            Line::End(end) => {
                if end.blake3 != before.as_str() {
                    return Err(ArchiveError::Altered { line: number });
                }
                let found = (reader.count, reader.checkpoints.len() as u64, reader.tasks);
                if (end.elements, end.checkpoints, end.tasks) != found {
                    return Err(wrong("the counts in 'end' do not match the lines".to_owned()));
                }
                if lines.next()? {
                    let reason = "a line after 'end'".to_owned();
                    return Err(ArchiveError::Line { line: lines.number, reason });
                }
                let Reader { thread, checkpoints, .. } = reader;
                return Ok(Archive { thread, source, record, checkpoints });
            }
        }
    }
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

struct Reader {
    thread: ThreadId,
    /// The elements read so far, for each channel and each metadata map.
    elements: HashMap<String, Vec<Element>>,
    /// What the rest of the file may expand to: [`LIST_COST`] for an element of a list, 1 for a value of a map.
    room: u64,
    max_places: u64,
    /// The lists read so far, for lists that extend them.
    lists: HashMap<(Namespace, ChannelName, Version), ListValue>,
    /// The latest metadata map of each key, with its runs, for maps that extend it.
    maps: HashMap<String, (Runs, Entries)>,
    checkpoints: Vec<CheckpointTuple>,
    count: u64,
    tasks: u64,
}

impl Reader {
    fn element(&mut self, line: &ElementLine) -> Result<(), String> {
        let elements = self.elements.entry(line.of.clone()).or_default();
        if line.n as usize != elements.len() {
            return Err(format!("element {} of {} where {} is expected", line.n, line.of, elements.len()));
        }
        let element = match &line.value {
            Form::Json(json) => Element::from_json(json).map_err(|error| error.to_string())?,
            Form::Msgpack(text) => Element::from_bytes(bytes(text)?),
            _ => return Err(format!("element {} of {} is neither json nor msgpack", line.n, line.of)),
        };
        if hex(element.hash()) != line.hash {
            return Err(format!("element {} of {} does not match its hash", line.n, line.of));
        }
        elements.push(element);
        self.count += 1;
        Ok(())
    }

    /// The elements of a run, which must have been read before.
    fn run(&mut self, of: &str, (start, count): (u32, u32)) -> Result<&[Element], String> {
        self.charge(u64::from(count).saturating_mul(LIST_COST))?;
        let (from, to) = (start as usize, start as usize + count as usize);
        let elements = self.elements.get(of).and_then(|elements| elements.get(from..to));
        elements.ok_or_else(|| format!("elements {from} to {to} of {of} are missing"))
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
        let known = self.elements.get(channel.as_str()).map_or(0, Vec::len) as u64;
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
                list.push(element.clone());
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
                let element = self.run(channel.as_str(), (n, 1))?.first().ok_or("no such element")?;
                plain(element.bytes().clone())?
            }
        };
        match value {
            ChannelValue::List(_) => Err("a list must be given as runs of elements".to_owned()),
            value @ ChannelValue::Plain(_) => Ok(value),
        }
    }

    /// The value of a channel. A list that extends another one shares its elements.
    fn channel(
        &mut self,
        (namespace, name): (&Namespace, &ChannelName),
        version: Version,
        form: Form,
    ) -> Result<ChannelValue, String> {
        let key = |version| (namespace.clone(), name.clone(), version);
        let list = match form {
            Form::Append(Append { to, list }) => {
                let above = version_of(&to)?;
                let base = self.lists.get(&key(above)).cloned();
                let mut base = base.ok_or_else(|| format!("channel {name} has no list of version {to}"))?;
                base.rebase(above);
                self.list(name, base, &list)?
            }
            form => match self.value(name, form)? {
                ChannelValue::List(list) => list,
                plain @ ChannelValue::Plain(_) => return Ok(plain),
            },
        };
        self.lists.insert(key(version), list.clone());
        Ok(list.into())
    }

    /// A metadata map. One that extends the latest one under the same key shares its entries.
    fn map(&mut self, key: &str, runs: Runs) -> Result<Entries, String> {
        let of = entries_of(key);
        let known = self.maps.remove(key);
        let known = known.and_then(|(have, entries)| Some((entries, beyond(&have, &runs)?)));
        let (mut entries, rest) = known.unwrap_or_else(|| (Entries::default(), runs.clone()));
        for run in rest {
            for element in self.run(&of, run)?.to_vec() {
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

    fn checkpoint(&mut self, line: CheckpointLine) -> Result<(), String> {
        let id: CheckpointId = parsed("id", &line.id)?;
        let namespace = Namespace::from(line.namespace);
        let place: LocalKey = (namespace.clone(), id);
        let last = self.checkpoints.last().map(|tuple| (tuple.namespace.clone(), tuple.checkpoint.id));
        if last.is_some_and(|last| last >= place) {
            return Err(format!("checkpoint {id} is out of order"));
        }
        let mut channels = BTreeMap::new();
        for (name, ChannelPart { version, stored, value }) in line.channels {
            let version = version_of(&version)?;
            let name = ChannelName::from(name);
            let value = value.map(|form| self.channel((&namespace, &name), version, form)).transpose()?;
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
        self.checkpoints.push(tuple);
        Ok(())
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

/// The runs that follow `have`, if these runs begin with it.
fn beyond(have: &[(u32, u32)], runs: &[(u32, u32)]) -> Option<Runs> {
    let Some(((start, count), whole)) = have.split_last() else { return Some(runs.to_vec()) };
    let ((next, total), more) = runs.strip_prefix(whole)?.split_first()?;
    let grown = total.checked_sub(*count).filter(|_| next == start)?;
    let first = (grown > 0).then_some((start + count, grown));
    Some(first.into_iter().chain(more.iter().copied()).collect())
}

/// The values in a value; a long text counts as several.
fn nodes(value: &Json) -> u64 {
    match value {
        Json::Array(items) => 1 + items.iter().map(nodes).sum::<u64>(),
        Json::Object(map) => 1 + map.values().map(|value| 1 + nodes(value)).sum::<u64>(),
        Json::String(text) => 1 + text.len() as u64 / 32,
        _ => 1,
    }
}

fn plain(bytes: bytes::Bytes) -> Result<ChannelValue, String> {
    ChannelValue::from_encoded(Encoded { codec: Codec::MessagePack, bytes })
        .map_err(|error| error.to_string())
}

fn bytes(text: &str) -> Result<bytes::Bytes, String> {
    BASE64.decode(text).map(Into::into).map_err(|error| format!("msgpack is not valid base64: {error}"))
}

fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(what: &str, text: &str) -> Result<T, String> {
    text.parse().map_err(|error| format!("{what} '{text}': {error}"))
}

fn version_of(text: &str) -> Result<Version, String> {
    let version = || {
        let (counter, random) = text.split_once('.')?;
        let random = u64::from_str_radix(random, 16).ok().filter(|_| random.len() == 16)?;
        let version = Version { counter: counter.parse().ok()?, random };
        (version.to_string() == text).then_some(version)
    };
    version().ok_or_else(|| format!("version '{text}' is not 32 digits, a dot and 16 hexadecimal digits"))
}

//! Reading a thread from a file. Everything is checked before anything is handed out.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, Read as _};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Map, Value as Json};
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, CheckpointTuple, Stored, TaskWrites, Write};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, ThreadId, Version};
use threadkeep::metadata::{Counters, Metadata};
use threadkeep::saver::Place;
use threadkeep::value::{ChannelValue, Codec, Element, Encoded, ListValue};

use super::ArchiveError;
use super::format::{
    ChannelPart, CheckpointLine, ElementLine, FORMAT, Form, Header, Line, MetadataPart, Record, Runs, Source,
    StoredName, TaskPart, VERSION, hex,
};

/// The longest line, in bytes. A line holds one value at most that is larger than a few words.
const MAX_LINE: u64 = 512 << 20;
/// The most elements in lists and maps that are not those of the list before: a small file cannot fill the memory.
const MAX_PLACES: u64 = 64 << 20;

/// What a file holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Archive {
    /// The thread's id when it was exported.
    pub thread: ThreadId,
    /// Where it was exported from.
    pub source: Source,
    /// What the gateway knew of it.
    pub record: Option<Record>,
    /// Its checkpoints, by namespace and id.
    pub checkpoints: Vec<CheckpointTuple>,
}

/// Reads a file and checks all of it.
///
/// # Errors
/// [`ArchiveError`] naming the line.
pub fn read(from: impl BufRead) -> Result<Archive, ArchiveError> {
    let mut lines = Lines { from, hash: blake3::Hasher::new(), number: 0, text: Vec::new() };
    let Header { thread, source, record, .. } = header(&mut lines)?;
    let mut reader = Reader {
        thread: thread.as_str().into(),
        elements: Vec::new(),
        places: 0,
        lists: HashMap::new(),
        checkpoints: Vec::new(),
        tasks: 0,
    };
    loop {
        let before = lines.hash.finalize().to_hex();
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
                let found = (reader.elements.len() as u64, reader.checkpoints.len() as u64, reader.tasks);
                if (end.elements, end.checkpoints, end.tasks) != found {
                    return Err(wrong("the counts in 'end' are not those of the lines".to_owned()));
                }
                if lines.next()? {
                    let reason = "a line behind 'end'".to_owned();
                    return Err(ArchiveError::Line { line: lines.number, reason });
                }
                let Reader { thread, checkpoints, .. } = reader;
                return Ok(Archive { thread, source, record, checkpoints });
            }
        }
    }
}

fn header(lines: &mut Lines<impl BufRead>) -> Result<Header, ArchiveError> {
    let not_ours = |reason: String| ArchiveError::NotOurs { reason };
    if !lines.next()? {
        return Err(not_ours("the file is empty".to_owned()));
    }
    // A newer header may have more keys; its version says so before they are looked at.
    let text: Json = serde_json::from_slice(&lines.text).map_err(|error| not_ours(error.to_string()))?;
    let found = &text["header"];
    if found["format"] != FORMAT {
        return Err(not_ours("it has no such format".to_owned()));
    }
    match found["version"].as_u64() {
        Some(VERSION) => {}
        Some(found) if found > VERSION => return Err(ArchiveError::NewerVersion { found }),
        _ => return Err(not_ours("it has no version".to_owned())),
    }
    match lines.parse()? {
        Line::Header(header) => Ok(header),
        _ => Err(not_ours("it is another line".to_owned())),
    }
}

/// The lines of a file, one at a time.
struct Lines<R> {
    from: R,
    /// Of all lines that were read.
    hash: blake3::Hasher,
    number: u64,
    text: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    /// Reads the next line; false at the end of the file.
    fn next(&mut self) -> Result<bool, ArchiveError> {
        self.text.clear();
        let line = self.number + 1;
        let read = self.from.by_ref().take(MAX_LINE + 1).read_until(b'\n', &mut self.text);
        let read = read.map_err(|cause| ArchiveError::Io { line, cause })?;
        if read == 0 {
            return Ok(false);
        }
        if self.text.last() != Some(&b'\n') {
            return Err(if read as u64 > MAX_LINE {
                ArchiveError::Line { line, reason: format!("it is longer than {MAX_LINE} bytes") }
            } else {
                ArchiveError::Truncated { lines: self.number }
            });
        }
        self.number = line;
        self.hash.update(&self.text);
        Ok(true)
    }

    fn parse(&self) -> Result<Line, ArchiveError> {
        serde_json::from_slice(&self.text)
            .map_err(|error| ArchiveError::Line { line: self.number, reason: error.to_string() })
    }
}

/// The list that a channel had last, and what it is made from.
struct Last {
    runs: Runs,
    list: ListValue,
    version: Version,
}

struct Reader {
    thread: ThreadId,
    elements: Vec<Element>,
    places: u64,
    lists: HashMap<(Namespace, ChannelName), Last>,
    checkpoints: Vec<CheckpointTuple>,
    tasks: u64,
}

impl Reader {
    fn element(&mut self, line: &ElementLine) -> Result<(), String> {
        if line.n as usize != self.elements.len() {
            return Err(format!("element {} where {} comes next", line.n, self.elements.len()));
        }
        let element = match &line.value {
            Form::Json(json) => Element::from_json(json).map_err(|error| error.to_string())?,
            Form::Msgpack(text) => Element::from_bytes(bytes(text)?),
            _ => return Err(format!("element {} is neither json nor msgpack", line.n)),
        };
        if hex(element.hash()) != line.hash {
            return Err(format!("element {} does not have its hash", line.n));
        }
        self.elements.push(element);
        Ok(())
    }

    /// The elements of a run, all of which were told before.
    fn run(&mut self, (start, count): (u32, u32)) -> Result<&[Element], String> {
        self.places += u64::from(count);
        if self.places > MAX_PLACES {
            return Err(format!("the lists of the file have more than {MAX_PLACES} elements of their own"));
        }
        let (from, to) = (start as usize, start as usize + count as usize);
        self.elements.get(from..to).ok_or_else(|| format!("elements {from} to {to} are not there"))
    }

    fn list(&mut self, mut list: ListValue, runs: &[(u32, u32)]) -> Result<ListValue, String> {
        for run in runs {
            for element in self.run(*run)? {
                list.push(element.clone());
            }
        }
        Ok(list)
    }

    fn value(&mut self, form: Form) -> Result<ChannelValue, String> {
        let value = match form {
            Form::List(runs) => return self.list(ListValue::default(), &runs).map(ChannelValue::List),
            Form::Map(_) => return Err("a map stands in metadata only".to_owned()),
            Form::Json(json) => ChannelValue::from_json(&json).map_err(|error| error.to_string())?,
            Form::Msgpack(text) => plain(bytes(&text)?)?,
            Form::Element(n) => plain(self.run((n, 1))?[0].bytes().clone())?,
        };
        match value {
            ChannelValue::List(_) => Err("a list comes as runs of elements".to_owned()),
            value @ ChannelValue::Plain(_) => Ok(value),
        }
    }

    /// The value of a channel. A list that goes on where the last one of the channel ended shares its elements.
    fn channel(
        &mut self,
        key: (Namespace, ChannelName),
        version: Version,
        form: Form,
    ) -> Result<ChannelValue, String> {
        let Form::List(runs) = form else { return self.value(form) };
        let list = match self.lists.get(&key).and_then(|last| Some((behind(&last.runs, &runs)?, last))) {
            Some((more, last)) => {
                let mut list = last.list.clone();
                list.rebase(last.version);
                self.list(list, &more)?
            }
            None => self.list(ListValue::default(), &runs)?,
        };
        self.lists.insert(key, Last { runs, list: list.clone(), version });
        Ok(list.into())
    }

    fn extra(&mut self, form: Form) -> Result<Json, String> {
        match form {
            Form::Json(json) => Ok(json),
            Form::Map(runs) => {
                let mut map = Map::new();
                for run in runs {
                    for element in self.run(run)? {
                        let entry = element.to_json().map_err(|error| error.to_string())?;
                        match entry {
                            Json::Array(pair) => match <[Json; 2]>::try_from(pair) {
                                Ok([Json::String(key), value]) if !map.contains_key(&key) => {
                                    map.insert(key, value);
                                }
                                _ => return Err("an entry of a map is no new key with its value".to_owned()),
                            },
                            _ => return Err("an entry of a map is no array".to_owned()),
                        }
                    }
                }
                Ok(Json::Object(map))
            }
            form => self.value(form)?.to_json().map_err(|error| error.to_string()),
        }
    }

    fn checkpoint(&mut self, line: CheckpointLine) -> Result<(), String> {
        let id: CheckpointId = parsed("id", &line.id)?;
        let namespace = Namespace::from(line.namespace);
        let place: Place = (namespace.clone(), id);
        let last = self.checkpoints.last().map(|tuple| (tuple.namespace.clone(), tuple.checkpoint.id));
        if last.is_some_and(|last| last >= place) {
            return Err(format!("checkpoint {id} does not come behind the one before it"));
        }
        let mut channels = BTreeMap::new();
        for (name, ChannelPart { version, stored, value }) in line.channels {
            let version = version_of(&version)?;
            let name = ChannelName::from(name);
            let value = value
                .map(|form| self.channel((namespace.clone(), name.clone()), version, form))
                .transpose()?;
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
        let extra = part.extra.into_iter().map(|(key, form)| Ok((key, self.extra(form)?)));
        let extra = extra.collect::<Result<_, String>>()?;
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
            let (channel, overwrite) = (write.channel.into(), write.overwrite);
            Ok(Write { channel, value: self.value(write.value)?, overwrite })
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

/// What `runs` has behind all of `last`; none if it does not begin with it.
fn behind(last: &[(u32, u32)], runs: &[(u32, u32)]) -> Option<Runs> {
    let Some(((start, count), before)) = last.split_last() else { return Some(runs.to_vec()) };
    let (head, rest) = runs.split_at_checked(before.len())?;
    let (&(first, more), rest) = rest.split_first()?;
    if head != before || first != *start || more < *count {
        return None;
    }
    let mut behind = Runs::new();
    if more > *count {
        behind.push((first.checked_add(*count)?, more - count));
    }
    behind.extend(rest);
    Some(behind)
}

fn plain(bytes: bytes::Bytes) -> Result<ChannelValue, String> {
    ChannelValue::from_encoded(Encoded { codec: Codec::MessagePack, bytes })
        .map_err(|error| error.to_string())
}

fn bytes(text: &str) -> Result<bytes::Bytes, String> {
    BASE64.decode(text).map(Into::into).map_err(|error| format!("msgpack is no base64: {error}"))
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

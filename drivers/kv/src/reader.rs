//! Reads the rows of one thread at one moment.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Map, Value as Json};
use threadkeep::checkpoint::{ChannelEntry, Checkpoint, CheckpointTuple, Stored, TaskWrites, Write};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, TaskId, ThreadId};
use threadkeep::metadata::{Extra, Metadata};
use threadkeep::saver::{Load, Revision};
use threadkeep::value::Element;
use threadkeep::{Error, Result};
use threadkeep_layout::{
    EntrySource, Form, Manifest, Objects, Rest, Run, StoredEntry, ValueSource, Values, chunk_runs,
    decode_names, entry, push_run,
};

use crate::element;
use crate::keys::{self, Space, ThreadNumber, under};
use crate::record::{CheckpointRecord, Kept, StoredChannel, TaskRecord, ThreadRecord};
use crate::rows;
use crate::store::Snapshot;

/// The row of a thread.
pub(crate) fn thread(rows: &dyn Snapshot, id: &ThreadId) -> Result<Option<ThreadRecord>> {
    let key = keys::thread(id);
    let Some(body) = rows::get(rows, &key)? else { return Ok(None) };
    ThreadRecord::decode(&body).map(Some).map_err(|reason| rows::corrupt(&key, reason))
}

pub(crate) fn revision(thread: &ThreadRecord) -> Revision {
    Revision::new(thread.mark)
}

/// Reads a thread, and remembers what several of its checkpoints share.
pub(crate) struct Reader<'a> {
    id: ThreadId,
    loaded: Loaded<'a>,
    names: HashMap<u32, Arc<[ChannelName]>>,
    /// The last list of each channel; those of task writes have no key.
    values: Values<Option<(Namespace, ChannelName)>>,
    objects: Objects,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(rows: &'a dyn Snapshot, id: &ThreadId, thread: &ThreadRecord) -> Self {
        Self {
            id: id.clone(),
            loaded: Loaded { rows, thread: thread.number, elements: HashMap::new() },
            names: HashMap::new(),
            values: Values::default(),
            objects: Objects::default(),
        }
    }

    pub(crate) fn thread(&self) -> ThreadNumber {
        self.loaded.thread
    }

    pub(crate) fn rows(&self) -> &'a dyn Snapshot {
        self.loaded.rows
    }

    /// The head of a namespace.
    pub(crate) fn head(&self, namespace: &Namespace) -> Result<Option<CheckpointId>> {
        let Some(key) = rows::last(self.rows(), under(keys::chain(self.thread(), namespace)))? else {
            return Ok(None);
        };
        match keys::place(self.thread(), &key) {
            Some((_, id)) => Ok(Some(id)),
            None => Err(rows::corrupt(&key, "the key is not one of a checkpoint")),
        }
    }

    /// A checkpoint.
    pub(crate) fn record(
        &mut self,
        namespace: &Namespace,
        id: CheckpointId,
    ) -> Result<Option<CheckpointRecord>> {
        let key = keys::checkpoint(self.thread(), namespace, id);
        let body = rows::get(self.rows(), &key)?;
        body.map(|body| self.decode(&key, &body)).transpose()
    }

    /// Reads the body of a checkpoint's row.
    pub(crate) fn decode(&mut self, key: &[u8], body: &[u8]) -> Result<CheckpointRecord> {
        let malformed = |reason| rows::corrupt(key, reason);
        let number = CheckpointRecord::names_of(body).map_err(malformed)?;
        let names = self.names(number)?;
        CheckpointRecord::decode(body, &names).map_err(malformed)
    }

    /// The names in a structure element.
    fn names(&mut self, number: u32) -> Result<Arc<[ChannelName]>> {
        if let Some(names) = self.names.get(&number) {
            return Ok(names.clone());
        }
        let element = self.loaded.one(Space::Structure, number)?;
        let names: Arc<[_]> = decode_names(element.bytes())
            .map_err(|reason| self.loaded.corrupt(Space::Structure, number, reason))?
            .into();
        self.names.insert(number, names.clone());
        Ok(names)
    }

    /// The tasks that ran from a checkpoint, in the order in which they were stored.
    pub(crate) fn tasks(&self, namespace: &Namespace, id: CheckpointId) -> Result<Vec<(TaskId, TaskRecord)>> {
        let mut tasks = Vec::new();
        rows::each(self.rows(), under(keys::tasks(self.thread(), namespace, id)), |key, body| {
            let task = keys::task_id(key).ok_or_else(|| rows::corrupt(key, "the key has no task"))?;
            let record = TaskRecord::decode(body).map_err(|reason| rows::corrupt(key, reason))?;
            tasks.push((task, record));
            Ok(())
        })?;
        tasks.sort_by_key(|(_, record)| record.place);
        Ok(tasks)
    }

    /// One task of a checkpoint.
    pub(crate) fn task(
        &self,
        namespace: &Namespace,
        id: CheckpointId,
        task: TaskId,
    ) -> Result<Option<TaskRecord>> {
        let key = keys::task(self.thread(), namespace, id, task);
        let body = rows::get(self.rows(), &key)?;
        let decode = |body: Vec<u8>| TaskRecord::decode(&body).map_err(|reason| rows::corrupt(&key, reason));
        body.map(decode).transpose()
    }

    /// The writes of a task to the channels that are wanted.
    pub(crate) fn writes(
        &mut self,
        task: TaskId,
        record: &TaskRecord,
        wanted: impl Fn(&ChannelName) -> bool,
    ) -> Result<TaskWrites> {
        let mut writes = Vec::with_capacity(record.writes.len());
        for write in record.writes.iter().filter(|write| wanted(&write.channel)) {
            let value = self.values.read(None, &write.value, &mut self.loaded)?;
            writes.push(Write { channel: write.channel.clone(), value, overwrite: write.overwrite });
        }
        Ok(TaskWrites { task, node: record.node.clone(), index: record.index, writes })
    }

    /// What is stored for a channel, with its value.
    pub(crate) fn stored(
        &mut self,
        namespace: &Namespace,
        channel: &ChannelName,
        entry: &StoredChannel,
    ) -> Result<ChannelEntry> {
        let mut value = |form: &Form| {
            self.values.read(Some((namespace.clone(), channel.clone())), form, &mut self.loaded)
        };
        let stored = match &entry.kept {
            Kept::Sentinel(()) => Stored::Sentinel,
            Kept::Value(form) => Stored::Value(value(form)?),
            Kept::Snapshot(form) => Stored::Snapshot(value(form)?),
        };
        Ok(ChannelEntry { version: entry.version, stored })
    }

    /// The metadata of a checkpoint.
    pub(crate) fn metadata(&mut self, record: &CheckpointRecord) -> Result<Metadata> {
        let object = |element: &Element| match element.to_json()? {
            Json::Object(map) => Ok(map),
            _ => Err(Error::corrupt("checkpoint metadata", "it is not an object")),
        };
        let rest = match &record.extra.rest {
            Rest::Empty => Map::new(),
            Rest::Inline(bytes) => object(&Element::from_bytes(bytes.clone()))?,
            Rest::Shared(number) => object(&self.loaded.one(Space::Structure, *number)?)?,
        };
        let mut maps = Vec::with_capacity(record.extra.maps.len());
        for (key, manifest) in &record.extra.maps {
            maps.push((key.clone(), self.objects.made(key, manifest, &mut self.loaded)?));
        }
        let mut metadata = Metadata::new(record.source, record.step);
        metadata.delta_marker = record.delta_marker;
        metadata.parents =
            record.parents.iter().map(|(namespace, id)| (namespace.as_str().into(), *id)).collect();
        metadata.counters.clone_from(&record.counters);
        metadata.extra = Extra::sharing(rest, maps);
        Ok(metadata)
    }

    /// A checkpoint with everything that is stored about it.
    pub(crate) fn tuple(
        &mut self,
        (namespace, id): (&Namespace, CheckpointId),
        record: &CheckpointRecord,
        metadata: Metadata,
        load: &Load,
    ) -> Result<CheckpointTuple> {
        let mut channels = std::collections::BTreeMap::new();
        for (channel, entry) in &record.channels {
            let entry = if load.wants(channel) {
                self.stored(namespace, channel, entry)?
            } else {
                ChannelEntry { version: entry.version, stored: Stored::Held }
            };
            channels.insert(channel.clone(), entry);
        }
        let mut writes = Vec::new();
        for (task, record) in self.tasks(namespace, id)? {
            writes.push(self.writes(task, &record, |_| true)?);
        }
        Ok(CheckpointTuple {
            thread: self.id.clone(),
            namespace: namespace.clone(),
            checkpoint: Checkpoint {
                id,
                channels,
                next: record.next.clone(),
                applied: record.applied.clone(),
            },
            parent: record.parent,
            metadata,
            writes,
        })
    }

    /// The runs in a chunk, for what the layout asks of chunks.
    pub(crate) fn chunk(&mut self, number: u32) -> Result<Vec<Run>> {
        self.loaded.chunk(number)
    }
}

/// The elements that were read.
struct Loaded<'a> {
    rows: &'a dyn Snapshot,
    thread: ThreadNumber,
    elements: HashMap<(Space, u32), Element>,
}

impl Loaded<'_> {
    fn one(&mut self, space: Space, number: u32) -> Result<Element> {
        if let Some(element) = self.elements.get(&(space, number)) {
            return Ok(element.clone());
        }
        let key = keys::element(self.thread, space, number);
        let body = rows::get(self.rows, &key)?;
        let body = body.ok_or_else(|| self.corrupt(space, number, "the row is missing"))?;
        let element = element::decode(&key, &body)?;
        self.elements.insert((space, number), element.clone());
        Ok(element)
    }

    /// The elements of these runs, each run in one pass over its rows.
    fn all(&mut self, space: Space, runs: &[Run]) -> Result<Vec<Element>> {
        let mut all = Vec::new();
        for run in runs {
            if run.len > 1 && !self.elements.contains_key(&(space, run.start)) {
                let [start, end] = [run.start, run.end()].map(|at| keys::element(self.thread, space, at));
                let (thread, elements) = (self.thread, &mut self.elements);
                rows::each(self.rows, start..end, |key, body| {
                    if let Some(number) = keys::element_number(thread, space, key) {
                        elements.insert((space, number), element::decode(key, body)?);
                    }
                    Ok(())
                })?;
            }
            for number in run.numbers() {
                all.push(self.one(space, number)?);
            }
        }
        Ok(all)
    }

    fn corrupt(&self, space: Space, number: u32, reason: impl std::fmt::Display) -> Error {
        rows::corrupt(&keys::element(self.thread, space, number), reason)
    }
}

impl ValueSource for Loaded<'_> {
    fn elements(&mut self, runs: &[Run]) -> Result<Vec<Element>> {
        self.all(Space::Values, runs)
    }

    fn chunk(&mut self, number: u32) -> Result<Vec<Run>> {
        let chunk = self.one(Space::Structure, number)?;
        chunk_runs(chunk.bytes()).map_err(|reason| self.corrupt(Space::Structure, number, reason))
    }
}

impl EntrySource for Loaded<'_> {
    fn unpacked(&mut self, chunks: Vec<Run>) -> Result<Vec<Run>> {
        let manifest = Manifest { chunks, tail: Vec::new() };
        let mut runs = Vec::new();
        manifest
            .refers(|number| self.chunk(number))?
            .elements
            .iter()
            .for_each(|run| push_run(&mut runs, *run));
        Ok(runs)
    }

    fn load(&mut self, runs: &[Run]) -> Result<Vec<StoredEntry>> {
        self.all(Space::Entries, runs)?.iter().map(entry).collect()
    }
}

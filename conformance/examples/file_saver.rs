//! A saver from nothing: each thread is one file, written whole beside the old one and renamed over it.
//!
//! It is plain and slow (a commit costs what the thread holds), and right: it passes the whole suite. Read it from the
//! bottom: the [`Factory`] that the suite asks for stores, the methods of the contract, a commit, and how a file is
//! read and replaced. Run it with `cargo run -p threadkeep-conformance --example file_saver`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use tempfile::TempDir;
use threadkeep::checkpoint::{
    ChannelEntry, Checkpoint, CheckpointKey, CheckpointTuple, Stored, TaskWrites, Write,
};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, NodeName, TaskId, ThreadId, Version};
use threadkeep::metadata::Metadata;
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, ListQuery, Load, Saver, StepCommit, fallback,
};
use threadkeep::value::{ChannelValue, Codec, Encoded};
use threadkeep::{Error, Result};
use threadkeep_conformance::{BoxError, Claim, Factory};

const NAME: &str = "file";

/// A checkpoint as a file holds it, in MessagePack. How things are stored is the saver's business alone.
#[derive(Serialize, Deserialize)]
struct Record {
    namespace: Namespace,
    id: CheckpointId,
    parent: Option<CheckpointId>,
    next: Vec<NodeName>,
    applied: Vec<TaskId>,
    metadata: Map<String, Json>,
    /// Name, version, and (is it a snapshot, bytes); none of the latter is a sentinel.
    channels: Vec<(ChannelName, (u64, u64), Option<(bool, Bytes)>)>,
    tasks: Vec<(TaskId, NodeName, u32, Vec<(ChannelName, bool, Bytes)>)>,
}

fn encode(tuple: &CheckpointTuple) -> Result<Bytes> {
    let bytes = |value: &ChannelValue| value.to_encoded().bytes;
    let channel = |(name, ChannelEntry { version, stored }): (&ChannelName, &ChannelEntry)| {
        let value = stored.value().map(|value| (matches!(stored, Stored::Snapshot(_)), bytes(value)));
        (name.clone(), (version.counter, version.random), value)
    };
    let write = |write: &Write| (write.channel.clone(), write.overwrite, bytes(&write.value));
    let task =
        |row: &TaskWrites| (row.task, row.node.clone(), row.index, row.writes.iter().map(write).collect());
    let record = Record {
        namespace: tuple.namespace.clone(),
        id: tuple.checkpoint.id,
        parent: tuple.parent,
        next: tuple.checkpoint.next.clone(),
        applied: tuple.checkpoint.applied.clone(),
        metadata: tuple.metadata.to_json(),
        channels: tuple.checkpoint.channels.iter().map(channel).collect(),
        tasks: tuple.writes.iter().map(task).collect(),
    };
    rmp_serde::to_vec(&record).map(Bytes::from).map_err(unavailable)
}

fn decode(thread: &ThreadId, bytes: &[u8]) -> Result<CheckpointTuple> {
    let record = rmp_serde::from_slice(bytes).map_err(|error| Error::corrupt("a checkpoint", error))?;
    let value = |bytes| ChannelValue::from_encoded(Encoded { codec: Codec::MessagePack, bytes });
    let channel = |(name, (counter, random), stored)| {
        let stored = match stored {
            Some((true, bytes)) => Stored::Snapshot(value(bytes)?),
            Some((false, bytes)) => Stored::Value(value(bytes)?),
            None => Stored::Sentinel,
        };
        Ok((name, ChannelEntry { version: Version { counter, random }, stored }))
    };
    let write = |(channel, overwrite, bytes)| Ok(Write { channel, value: value(bytes)?, overwrite });
    let task = |(task, node, index, writes): (_, _, _, Vec<_>)| {
        Ok(TaskWrites { task, node, index, writes: writes.into_iter().map(write).collect::<Result<_>>()? })
    };
    let Record { namespace, id, parent, next, applied, metadata, channels, tasks } = record;
    let channels = channels.into_iter().map(channel).collect::<Result<_>>()?;
    let checkpoint = Checkpoint { id, channels, next, applied };
    let metadata = Metadata::from_json(metadata)?;
    let writes = tasks.into_iter().map(task).collect::<Result<_>>()?;
    Ok(CheckpointTuple { thread: thread.clone(), namespace, checkpoint, parent, metadata, writes })
}

/// A thread in memory: its checkpoints in the order of their ids, each still encoded.
struct Thread {
    id: ThreadId,
    checkpoints: BTreeMap<(Namespace, CheckpointId), Bytes>,
    changed: bool,
}

impl Thread {
    fn get(&self, namespace: &Namespace, id: CheckpointId) -> Result<Option<CheckpointTuple>> {
        self.checkpoints.get(&(namespace.clone(), id)).map(|bytes| decode(&self.id, bytes)).transpose()
    }

    fn head(&self, namespace: &Namespace) -> Option<CheckpointId> {
        self.checkpoints.keys().filter(|(of, _)| of == namespace).map(|(_, id)| *id).next_back()
    }

    fn put(&mut self, tuple: &CheckpointTuple) -> Result<()> {
        let place = (tuple.namespace.clone(), tuple.checkpoint.id);
        self.checkpoints.insert(place, encode(tuple)?);
        self.changed = true;
        Ok(())
    }

    /// Adds a superstep. Everything is checked before anything is put.
    fn commit(&mut self, step: StepCommit) -> Result<()> {
        let key = step.key();
        if self.get(&key.namespace, key.id)?.is_some() {
            return Ok(());
        }
        let found = self.head(&key.namespace);
        if found != step.expected_head {
            let expected = step.expected_head;
            return Err(Error::Conflict { thread: key.thread, namespace: key.namespace, expected, found });
        }
        let mut parent = match step.parent {
            Some(id) => Some(self.get(&key.namespace, id)?.ok_or_else(|| not_found(&key, id))?),
            None => None,
        };
        let mut checkpoint = step.checkpoint.clone();
        for (name, entry) in checkpoint.channels.iter_mut().filter(|(_, entry)| entry.stored == Stored::Held)
        {
            let held = parent.as_ref().and_then(|parent| parent.checkpoint.channels.get(name));
            step.check_held(name, entry.version, held.map(|held| held.version))?;
            entry.stored = held.map_or(Stored::Held, |held| held.stored.clone());
        }
        if let Some(parent) = &mut parent {
            step.writes.iter().for_each(|task| put(&mut parent.writes, task));
        }
        let rows = parent.as_ref().map_or(&[][..], |parent| &parent.writes);
        if let Some(task) = checkpoint.applied.iter().find(|task| rows.iter().all(|row| row.task != **task)) {
            let id = key.id;
            return Err(Error::InvalidInput(format!(
                "checkpoint {id} applies task {task}, which has no writes"
            )));
        }
        let StepCommit { thread, namespace, metadata, parent: parent_id, .. } = step;
        self.put(&CheckpointTuple {
            thread,
            namespace,
            checkpoint,
            parent: parent_id,
            metadata,
            writes: vec![],
        })?;
        parent.map_or(Ok(()), |parent| self.put(&parent))
    }
}

/// Puts the writes of a task among `rows`.
fn put(rows: &mut Vec<TaskWrites>, task: &TaskWrites) {
    match rows.iter_mut().find(|row| row.task == task.task) {
        Some(row) => row.merge(task),
        None => rows.push(task.clone()),
    }
}

/// Takes away the values that were not asked for.
fn loaded(mut tuple: CheckpointTuple, load: &Load) -> CheckpointTuple {
    let unwanted = tuple.checkpoint.channels.iter_mut().filter(|(name, _)| !load.wants(name));
    unwanted.for_each(|(_, entry)| entry.stored = Stored::Held);
    tuple
}

fn not_found(key: &CheckpointKey, checkpoint: CheckpointId) -> Error {
    Error::NotFound { thread: key.thread.clone(), checkpoint }
}

fn unavailable(error: impl std::fmt::Display) -> Error {
    Error::Unavailable { saver: NAME, reason: error.to_string() }
}

fn in_doubt(error: impl std::fmt::Display) -> Error {
    Error::InDoubt { saver: NAME, reason: error.to_string() }
}

/// The file of a thread. An id can be any text, so its hash is the name.
fn path(dir: &Path, thread: &ThreadId) -> PathBuf {
    dir.join(blake3::hash(thread.as_str().as_bytes()).to_hex().as_str())
}

/// Reads a thread. Its file is only ever replaced whole, so that needs no lock.
fn load(dir: &Path, id: &ThreadId) -> Result<Thread> {
    let path = path(dir, id);
    let mut thread = Thread { id: id.clone(), checkpoints: BTreeMap::new(), changed: false };
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(thread),
        Err(error) => return Err(unavailable(error)),
    };
    // A checksum stands in front: a changed byte is an error, never another state.
    let corrupt = |reason: &str| Error::corrupt(path.display().to_string(), reason);
    let (sum, body) = bytes.split_first_chunk().ok_or_else(|| corrupt("the file is too short"))?;
    if blake3::hash(body) != *sum {
        return Err(corrupt("the checksum does not match"));
    }
    thread.checkpoints = rmp_serde::from_slice(body).map_err(|error| corrupt(&error.to_string()))?;
    Ok(thread)
}

/// Replaces the file of a thread; one without checkpoints has none.
fn store(dir: &Path, thread: &Thread) -> Result<()> {
    let (new, path) = (dir.join("new"), path(dir, &thread.id));
    let body = rmp_serde::to_vec(&thread.checkpoints).map_err(unavailable)?;
    let write = || -> io::Result<()> {
        let mut file = File::create(&new)?;
        file.write_all(blake3::hash(&body).as_bytes())?;
        file.write_all(&body)?;
        file.sync_all()
    };
    write().map_err(unavailable)?;
    let replace =
        || if thread.checkpoints.is_empty() { fs::remove_file(&path) } else { fs::rename(&new, &path) };
    // From here on an error does not tell what happened. The directory is flushed to make the new name durable.
    replace().and_then(|()| File::open(dir)?.sync_all()).map_err(in_doubt)
}

/// A store in a directory.
struct FileSaver(PathBuf);

impl FileSaver {
    /// Looks at a thread, on a thread of the runtime that may block.
    async fn read<T, F>(&self, id: &ThreadId, look: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(Thread) -> Result<T> + Send + 'static,
    {
        let (dir, id) = (self.0.clone(), id.clone());
        tokio::task::spawn_blocking(move || look(load(&dir, &id)?)).await.map_err(unavailable)?
    }

    /// Changes a thread, alone among all writers of all processes. It comes to its end also if its caller went away.
    async fn change<F>(&self, id: &ThreadId, change: F) -> Result<()>
    where
        F: FnOnce(&mut Thread) -> Result<()> + Send + 'static,
    {
        let (dir, id) = (self.0.clone(), id.clone());
        let alone = move || {
            let lock = File::create(dir.join("lock")).map_err(unavailable)?;
            lock.lock().map_err(unavailable)?; // Until it is dropped, or the process is killed.
            let mut thread = load(&dir, &id)?;
            change(&mut thread)?;
            if thread.changed { store(&dir, &thread) } else { Ok(()) }
        };
        tokio::task::spawn_blocking(alone).await.map_err(in_doubt)?
    }
}

#[async_trait]
impl Saver for FileSaver {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        let CheckpointSelector { thread, namespace, id, load } = at.clone();
        let look = move |thread: Thread| {
            let Some(id) = id.or_else(|| thread.head(&namespace)) else { return Ok(None) };
            Ok(thread.get(&namespace, id)?.map(|tuple| loaded(tuple, &load)))
        };
        self.read(&thread, look).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        let ListQuery { thread, namespace, before, limit, filter, load } = query.clone();
        let look = move |thread: Thread| {
            let mut found = Vec::new();
            for ((of, id), bytes) in &thread.checkpoints {
                if namespace.as_ref().is_none_or(|only| only == of)
                    && before.is_none_or(|before| *id < before)
                {
                    found.push(decode(&thread.id, bytes)?);
                }
            }
            found.retain(|tuple| tuple.metadata.matches(&filter));
            found.sort_by_key(|tuple| Reverse(tuple.checkpoint.id));
            found.truncate(limit.unwrap_or(usize::MAX));
            Ok(found.into_iter().map(|tuple| loaded(tuple, &load)).collect())
        };
        self.read(&thread, look).await
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        let (key, task) = (at.clone(), task.clone());
        let change = move |thread: &mut Thread| {
            let mut tuple = thread.get(&key.namespace, key.id)?.ok_or_else(|| not_found(&key, key.id))?;
            put(&mut tuple.writes, &task);
            thread.put(&tuple)
        };
        self.change(&at.thread, change).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        step.validate()?;
        let key = step.key();
        self.change(&key.thread, move |thread| thread.commit(step)).await?;
        Ok(key)
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        fallback::delta_history(self, at, channels, reach).await
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        let change = |thread: &mut Thread| {
            thread.changed = !thread.checkpoints.is_empty();
            thread.checkpoints.clear();
            Ok(())
        };
        self.change(thread, change).await
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { name: NAME, durable: true, shared_elements: false }
    }
}

struct Files;

#[async_trait]
impl Factory for Files {
    type Place = TempDir;

    fn name(&self) -> &'static str {
        NAME
    }

    fn claims(&self) -> &'static [Claim] {
        &[Claim::Durable]
    }

    async fn create(&self) -> Result<TempDir, BoxError> {
        Ok(tempfile::tempdir()?)
    }

    async fn open(&self, place: &TempDir) -> Result<Arc<dyn Saver>, BoxError> {
        Ok(Arc::new(FileSaver(place.path().to_owned())))
    }
}

fn main() -> ExitCode {
    threadkeep_conformance::main(Files)
}

//! Each thread is one file, written in full next to the old one and renamed over it. Read it from the bottom up.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use threadkeep::checkpoint::{
    ChannelEntry, Checkpoint, CheckpointKey, CheckpointTuple, Stored, TaskWrites, Write,
};
use threadkeep::id::{ChannelName, CheckpointId, IdSource, Namespace, NodeName, TaskId, ThreadId, Version};
use threadkeep::metadata::Metadata;
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, ListQuery, LocalKey, Outline, Revision, Rewrite, Saver,
    StepCommit, ThreadImage, fallback,
};
use threadkeep::value::{ChannelValue, Codec, Encoded};
use threadkeep::{Error, Result};
use tokio::task::spawn_blocking;

pub(crate) const NAME: &str = "file"; // Used in errors and reports.

/// A checkpoint in its file, as MessagePack. Each saver chooses its own format.
#[derive(Serialize, Deserialize)]
struct Record {
    namespace: Namespace,
    id: CheckpointId,
    parent: Option<CheckpointId>,
    next: Vec<NodeName>,
    applied: Vec<TaskId>,
    metadata: Map<String, Json>,
    channels: Vec<Channel>,
    tasks: Vec<(TaskId, NodeName, u32, Vec<Written>)>,
}

type Channel = (ChannelName, (u64, u64), Option<(bool, Bytes)>); // (is it a snapshot, bytes); `None` for a sentinel
type Written = (ChannelName, bool, Bytes); // The flag says whether the value is replaced.

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

/// A thread in its file: its checkpoints by id, each encoded separately.
#[derive(Serialize, Deserialize)]
struct Thread {
    id: ThreadId,
    /// Drawn randomly on each write; empty for a thread that does not exist.
    revision: Vec<u8>,
    checkpoints: BTreeMap<LocalKey, Bytes>,
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
        encode(tuple).map(|bytes| drop(self.checkpoints.insert(place, bytes)))
    }

    fn image(&self) -> Result<ThreadImage> {
        let mut image = ThreadImage::absent(&self.id);
        image.revision = Revision::new(self.revision.clone());
        for (place, bytes) in &self.checkpoints {
            image.checkpoints.insert(place.clone(), decode(&self.id, bytes)?);
        }
        Ok(image)
    }
}

fn unavailable(error: impl std::fmt::Display) -> Error {
    Error::Unavailable { saver: NAME, reason: error.to_string() }
}

fn in_doubt(error: impl std::fmt::Display) -> Error {
    Error::InDoubt { saver: NAME, reason: error.to_string() }
}

/// The file of a thread. An id can be any string, so the name is its hash.
fn path(dir: &Path, thread: &ThreadId) -> PathBuf {
    dir.join(blake3::hash(thread.as_str().as_bytes()).to_hex().as_str())
}

/// Reads a thread's file. It is only ever replaced as a whole, so this needs no lock.
fn read(path: &Path) -> Result<Option<Thread>> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unavailable(error)),
    };
    // The file starts with a checksum: a changed byte is an error, never another state.
    let corrupt = |reason: &str| Error::corrupt(path.display().to_string(), reason);
    let (sum, body) = bytes.split_first_chunk().ok_or_else(|| corrupt("the file is too short"))?;
    if blake3::hash(body) != *sum {
        return Err(corrupt("the checksum does not match"));
    }
    rmp_serde::from_slice(body).map(Some).map_err(|error| corrupt(&error.to_string()))
}

/// Replaces the file of a thread; a thread without checkpoints has no file.
fn store(dir: &Path, thread: &Thread) -> Result<()> {
    let (new, path) = (dir.join("new"), path(dir, &thread.id));
    let body = rmp_serde::to_vec(thread).map_err(unavailable)?;
    let write = |file: &mut File| {
        file.write_all(blake3::hash(&body).as_bytes())?;
        file.write_all(&body)?;
        file.sync_all()
    };
    File::create(&new).and_then(|mut file| write(&mut file)).map_err(unavailable)?;
    let done = if thread.checkpoints.is_empty() { fs::remove_file(&path) } else { fs::rename(&new, &path) };
    // From here on, an error leaves the outcome in doubt.
    done.map_err(in_doubt)?;
    flush(dir)
}

/// Flushes the directory, which makes new names durable. A file is flushed before it gets its name.
fn flush(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(in_doubt)
}

/// Excludes all other writers in all processes, until it is dropped or the process is killed.
fn lock(dir: &Path) -> Result<File> {
    let lock = File::create(dir.join("lock")).map_err(unavailable)?;
    lock.lock().map_err(unavailable)?;
    Ok(lock)
}

/// The thread with this id; an unknown one has no checkpoints.
fn load(dir: &Path, id: &ThreadId) -> Result<Thread> {
    let unknown = || Thread { id: id.clone(), revision: Vec::new(), checkpoints: BTreeMap::new() };
    Ok(read(&path(dir, id))?.unwrap_or_else(unknown))
}

/// A store in a directory.
pub(crate) struct FileSaver(pub(crate) PathBuf);

impl FileSaver {
    /// Runs blocking work on the directory. It is completed even if the caller is dropped.
    async fn run<T: Send + 'static>(&self, f: impl FnOnce(&Path) -> Result<T> + Send + 'static) -> Result<T> {
        let dir = self.0.clone();
        spawn_blocking(move || f(&dir)).await.map_err(in_doubt)?
    }

    /// Changes a thread.
    async fn change(
        &self,
        id: &ThreadId,
        change: impl FnOnce(&mut Thread) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let id = id.clone();
        let alone = move |dir: &Path| {
            let _lock = lock(dir)?;
            let mut thread = load(dir, &id)?;
            let (revision, before) = (thread.revision.clone(), thread.checkpoints.clone());
            change(&mut thread)?;
            // A repeat finds its change, and acknowledges it: the first call may have failed, or its process may have been
            // killed, before the change was flushed.
            if thread.revision == revision && thread.checkpoints == before {
                return flush(dir);
            }
            thread.revision = IdSource::default().task().as_bytes().to_vec();
            store(dir, &thread)
        };
        self.run(alone).await
    }
}

#[async_trait]
impl Saver for FileSaver {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        let at = at.clone();
        let look = move |dir: &Path| {
            let thread = load(dir, &at.thread)?;
            let Some(id) = at.id.or_else(|| thread.head(&at.namespace)) else { return Ok(None) };
            Ok(thread.get(&at.namespace, id)?.map(|tuple| at.load.of(tuple)))
        };
        self.run(look).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        let all = self.read_thread(&query.thread).await?;
        Ok(fallback::list(all.checkpoints.into_values(), query))
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        let (key, task) = (at.clone(), task.clone());
        let change = move |thread: &mut Thread| {
            let missing = || Error::NotFound { thread: thread.id.clone(), checkpoint: key.id };
            let mut tuple = thread.get(&key.namespace, key.id)?.ok_or_else(missing)?;
            let children = thread.image()?.checkpoints;
            tuple.put(&task, || children.values().any(|child| child.has_applied(&key, task.task)));
            thread.put(&tuple)
        };
        self.change(&at.thread, change).await
    }

    async fn commit(&self, step: StepCommit) -> Result<CheckpointKey> {
        step.validate()?;
        let key = step.key();
        let own = key.clone();
        let change = move |thread: &mut Thread| {
            if thread.get(&own.namespace, own.id)?.is_some() {
                return Ok(());
            }
            let parent = step.parent.map(|id| thread.get(&own.namespace, id)).transpose()?.flatten();
            let above = step.parent.map(|id| CheckpointKey { id, ..own.clone() });
            let children = thread.image()?.checkpoints;
            let applied = |task| {
                above.iter().any(|parent| children.values().any(|child| child.has_applied(parent, task)))
            };
            let (new, parent) = fallback::commit(step, thread.head(&own.namespace), parent, applied)?;
            parent.iter().chain([&new]).try_for_each(|tuple| thread.put(tuple))
        };
        self.change(&key.thread, change).await?;
        Ok(key)
    }

    async fn flush(&self, _: &ThreadId) -> Result<()> {
        Ok(()) // Every change is flushed before it is acknowledged.
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
            thread.checkpoints.clear();
            Ok(())
        };
        self.change(thread, change).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        // The simple way: read every file. A saver for many threads would keep an index.
        let after = after.cloned();
        let look = move |dir: &Path| {
            let _lock = lock(dir)?; // The files are those of one moment.
            let mut found = BTreeSet::new();
            for file in fs::read_dir(dir).map_err(unavailable)? {
                let path = file.map_err(unavailable)?.path();
                if path.file_name().is_some_and(|name| name.len() == 64) {
                    found.extend(read(&path)?.map(|thread| thread.id));
                }
            }
            found.retain(|id| after.as_ref().is_none_or(|after| id > after));
            Ok(found.into_iter().take(limit).collect())
        };
        self.run(look).await
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        let id = thread.clone();
        self.run(move |dir| load(dir, &id)?.image()).await
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        let expected = expected.clone();
        let change = move |thread: &mut Thread| {
            let image = thread.image()?;
            if image.revision != expected {
                return Err(Error::Stale { thread: image.thread });
            }
            let outlines = image.checkpoints.iter().map(|(place, tuple)| (place.clone(), Outline::of(tuple)));
            rewrite.check(&image.thread, outlines.collect())?;
            thread.checkpoints.retain(|place, _| !rewrite.remove.contains(place));
            rewrite.put.iter().try_for_each(|tuple| thread.put(tuple))?;
            if !rewrite.is_empty() {
                thread.revision.clear(); // It gets another one, also if it puts what is there.
            }
            Ok(())
        };
        self.change(thread, change).await
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { name: NAME, durable: true, shared_elements: false }
    }
}

//! The contract's reads, each on one snapshot.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use threadkeep::checkpoint::{ChannelEntry, CheckpointKey, CheckpointTuple, Stored};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, ThreadId};
use threadkeep::metadata::Metadata;
use threadkeep::saver::fallback::HistoryWalk;
use threadkeep::saver::{CheckpointSelector, DeltaHistory, ListQuery, Load, ThreadImage};
use threadkeep::{Error, Result};

use crate::keys::{self, under};
use crate::newest::Newest;
use crate::reader::{Reader, revision, thread};
use crate::record::CheckpointRecord;
use crate::rows;
use crate::store::{Order, Snapshot};

pub(crate) fn get(rows: &dyn Snapshot, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
    let Some(found) = thread(rows, &at.thread)? else { return Ok(None) };
    let mut reader = Reader::new(rows, &at.thread, &found);
    let head = || reader.head(&at.namespace);
    let Some(id) = at.id.map_or_else(head, |id| Ok(Some(id)))? else { return Ok(None) };
    let Some(record) = reader.record(&at.namespace, id)? else { return Ok(None) };
    let metadata = reader.metadata(&record)?;
    reader.tuple((&at.namespace, id), &record, metadata, &at.load).map(Some)
}

/// A checkpoint that is listed, before its values are read.
type Listed = (Namespace, CheckpointId, CheckpointRecord, Metadata);

pub(crate) fn list(rows: &dyn Snapshot, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
    let limit = query.limit.unwrap_or(usize::MAX);
    let Some(found) = thread(rows, &query.thread)?.filter(|_| limit > 0) else { return Ok(Vec::new()) };
    let mut reader = Reader::new(rows, &query.thread, &found);
    let mut listed: Vec<Listed> = Vec::new();
    let mut newest = Newest::new(rows, found.number, query)?;
    while listed.len() < limit
        && let Some(row) = newest.take()?
    {
        let record = reader.decode(&row.key, rows::opened(&row.key, &row.value)?)?;
        let metadata = reader.metadata(&record)?;
        if metadata.matches(&query.filter) {
            listed.push((row.namespace, row.id, record, metadata));
        }
    }
    // Oldest first: a list shares what it has in common with its older versions.
    let mut tuples = Vec::with_capacity(listed.len());
    for (namespace, id, record, metadata) in listed.into_iter().rev() {
        tuples.push(reader.tuple((&namespace, id), &record, metadata, &query.load)?);
    }
    tuples.reverse();
    Ok(tuples)
}

pub(crate) fn read_thread(rows: &dyn Snapshot, id: &ThreadId) -> Result<ThreadImage> {
    let mut image = ThreadImage::absent(id);
    let Some(found) = thread(rows, id)? else { return Ok(image) };
    image.revision = revision(&found);
    let mut reader = Reader::new(rows, id, &found);
    for (namespace, id, record) in records(&mut reader)? {
        let metadata = reader.metadata(&record)?;
        let tuple = reader.tuple((&namespace, id), &record, metadata, &Load::All)?;
        image.checkpoints.insert((namespace, id), tuple);
    }
    Ok(image)
}

/// Every checkpoint of a thread, by namespace and oldest first.
pub(crate) fn records(reader: &mut Reader<'_>) -> Result<Vec<(Namespace, CheckpointId, CheckpointRecord)>> {
    let mut all = Vec::new();
    let number = reader.thread();
    rows::each(reader.rows(), under(keys::checkpoints(number)), |key, body| {
        let (namespace, id) = place(number, key)?;
        all.push((namespace, id, reader.decode(key, body)?));
        Ok(())
    })?;
    Ok(all)
}

/// The namespace and the id of a checkpoint with this key.
pub(crate) fn place(number: keys::ThreadNumber, key: &[u8]) -> Result<(Namespace, CheckpointId)> {
    keys::place(number, key).ok_or_else(|| rows::corrupt(key, "the key is not one of a checkpoint"))
}

pub(crate) fn threads(rows: &dyn Snapshot, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
    let mut found = Vec::new();
    let keys = keys::threads(after);
    rows.range(&keys.start..&keys.end, Order::Ascending, &mut |key, value| {
        if found.len() == limit {
            return Ok(ControlFlow::Break(()));
        }
        rows::opened(key, value)?;
        let id = keys::thread_id(key).ok_or_else(|| rows::corrupt(key, "the thread's id is not UTF-8"))?;
        found.push(id);
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(found)
}

pub(crate) fn delta_history(
    rows: &dyn Snapshot,
    at: &CheckpointKey,
    channels: &BTreeSet<ChannelName>,
    reach: Option<CheckpointId>,
) -> Result<DeltaHistory> {
    let not_found = || Error::NotFound { thread: at.thread.clone(), checkpoint: at.id };
    let found = thread(rows, &at.thread)?.ok_or_else(not_found)?;
    let mut reader = Reader::new(rows, &at.thread, &found);
    let mut walk = HistoryWalk::new(at, channels, reach);
    let mut id = at.id;
    let mut child = reader.record(&at.namespace, id)?.ok_or_else(not_found)?;
    loop {
        let complete =
            walk.visit(id, child.parent.is_none(), |channel, wanted| match child.channels.get(channel) {
                None => Ok(None),
                Some(entry) if wanted => reader.stored(&at.namespace, channel, entry).map(Some),
                Some(entry) => Ok(Some(ChannelEntry { version: entry.version, stored: Stored::Held })),
            })?;
        if complete {
            return Ok(walk.finish());
        }
        let parent_id = child.parent.ok_or_else(|| walk.no_seed(id))?;
        let parent = reader.record(&at.namespace, parent_id)?;
        let parent = parent.ok_or_else(|| walk.no_parent(id, parent_id))?;
        let open: BTreeSet<ChannelName> = walk.open().cloned().collect();
        let mut tasks = Vec::with_capacity(child.applied.len());
        for task in &child.applied {
            if let Some(record) = reader.task(&at.namespace, parent_id, *task)? {
                tasks.push(reader.writes(*task, &record, |channel| open.contains(channel))?);
            }
        }
        walk.apply(id, &child.applied, &tasks)?;
        (id, child) = (parent_id, parent);
    }
}

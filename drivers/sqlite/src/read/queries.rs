//! The reading methods of the contract, each inside one read transaction.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use threadkeep::checkpoint::{ChannelEntry, CheckpointKey, CheckpointTuple, Stored};
use threadkeep::id::{ChannelName, CheckpointId, ThreadId};
use threadkeep::saver::fallback::HistoryWalk;
use threadkeep::saver::{CheckpointSelector, DeltaHistory, ListQuery, Load, ThreadImage};
use threadkeep::{Error, Result};

use crate::read::memory::Memory;
use crate::read::view::{ChainRef, View};
use crate::rows::checkpoints::{self, CheckpointRow};
use crate::rows::directory::{self, Chain};
use crate::rows::names::Names;
use crate::rows::record::{Kept, NameKey, Ordinal};
use crate::sql::Db;
use crate::write::rewrite::{self, ChainRows};

/// The contract's `get`.
pub(crate) fn get(db: &Db, memory: &Memory, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
    let Some(thread) = directory::thread(db, &at.thread)? else { return Ok(None) };
    let Some(chain) = directory::find_chain(db, thread.key, &at.namespace)? else { return Ok(None) };
    let row = match at.id {
        None => checkpoints::head(db, chain.key)?,
        Some(id) => checkpoints::find(db, chain.key, id)?,
    };
    let Some(row) = row else { return Ok(None) };
    let mut view = View::new(db, &memory.names, &at.thread, thread.key).remembering(memory, thread);
    let read = view.read(chain.key, &row)?;
    let metadata = view.metadata(chain.key, &read)?;
    let chain = ChainRef { key: chain.key, namespace: at.namespace.clone() };
    view.tuple(&chain, &read, metadata, &at.load).map(Some)
}

/// Rows that a listing reads from a chain at a time.
const PAGE: u32 = 64;

/// The checkpoints of a chain, newest first, read page by page.
struct Newest {
    chain: ChainRef,
    /// Rows that were read but not taken yet, oldest first.
    rows: Vec<CheckpointRow>,
    /// The greatest ordinal that was not read yet.
    below: Ordinal,
    page: u32,
}

impl Newest {
    fn new(db: &Db, chain: ChainRef, query: &ListQuery) -> Result<Self> {
        let page = query.limit.map_or(PAGE, |limit| u32::try_from(limit).unwrap_or(PAGE).clamp(1, PAGE));
        let below = match query.before {
            None => Ordinal::MAX,
            Some(before) => match checkpoints::newest_not_after(db, chain.key, before)? {
                None => 0,
                Some(row) if row.id == before => row.ordinal.saturating_sub(1),
                Some(row) => row.ordinal,
            },
        };
        Ok(Self { chain, rows: Vec::new(), below, page })
    }

    /// The newest row that was not taken yet.
    fn peek(&mut self, db: &Db) -> Result<Option<&CheckpointRow>> {
        if self.rows.is_empty() && self.below > 0 {
            self.rows = checkpoints::newest_up_to(db, self.chain.key, self.below, self.page)?;
            self.rows.reverse();
            self.below = self.rows.first().map_or(0, |oldest| oldest.ordinal.saturating_sub(1));
        }
        Ok(self.rows.last())
    }
}

/// The contract's `list`.
pub(crate) fn list(db: &Db, memory: &Memory, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
    let Some(thread) = directory::thread(db, &query.thread)? else { return Ok(Vec::new()) };
    let chains: Vec<_> = match &query.namespace {
        Some(namespace) => directory::find_chain(db, thread.key, namespace)?
            .map(|chain| (namespace.clone(), chain))
            .into_iter()
            .collect(),
        None => directory::chains(db, thread.key)?,
    };
    let chains = chains.into_iter().map(|(namespace, Chain { key, .. })| ChainRef { key, namespace });
    let mut sources = chains.map(|chain| Newest::new(db, chain, query)).collect::<Result<Vec<_>>>()?;
    let mut view = View::new(db, &memory.names, &query.thread, thread.key).remembering(memory, thread);
    let mut matches = Vec::new();
    while query.limit.is_none_or(|limit| matches.len() < limit) {
        let mut newest: Option<(CheckpointId, usize)> = None;
        for (i, source) in sources.iter_mut().enumerate() {
            if let Some(row) = source.peek(db)?
                && newest.is_none_or(|(id, _)| row.id > id)
            {
                newest = Some((row.id, i));
            }
        }
        let Some((source, row)) =
            newest.and_then(|(_, i)| sources[i].rows.pop().map(|row| (&sources[i], row)))
        else {
            break;
        };
        let read = view.read(source.chain.key, &row)?;
        let metadata = view.metadata(source.chain.key, &read)?;
        if metadata.matches(&query.filter) {
            matches.push((source.chain.clone(), read, metadata));
        }
    }
    view.load_values(matches.iter().map(|(_, read, _)| &**read), &query.load)?;
    // From the oldest on, so that a list that grew is built from the previous one.
    let tuples = matches.into_iter().rev();
    let tuples = tuples.map(|(chain, read, metadata)| view.tuple(&chain, &read, metadata, &query.load));
    let mut tuples = tuples.collect::<Result<Vec<_>>>()?;
    tuples.reverse();
    Ok(tuples)
}

/// The contract's `read_thread`.
pub(crate) fn read_thread(db: &Db, memory: &Memory, thread: &ThreadId) -> Result<ThreadImage> {
    let Some(found) = directory::thread(db, thread)? else { return Ok(ThreadImage::absent(thread)) };
    let chains = rewrite::rows_of(db, found.key)?;
    let revision = rewrite::revision(found, &chains);
    let mut view = View::new(db, &memory.names, thread, found.key).remembering(memory, found);
    let mut checkpoints = BTreeMap::new();
    for ChainRows { namespace, chain, rows } in &chains {
        let chain = ChainRef { key: chain.key, namespace: namespace.clone() };
        let reads = rows.iter().map(|row| view.read(chain.key, row)).collect::<Result<Vec<_>>>()?;
        view.load_values(reads.iter().map(|read| &**read), &Load::All)?;
        for (row, read) in rows.iter().zip(&reads) {
            let metadata = view.metadata(chain.key, read)?;
            let tuple = view.tuple(&chain, read, metadata, &Load::All)?;
            checkpoints.insert((namespace.clone(), row.id), tuple);
        }
    }
    Ok(ThreadImage { thread: thread.clone(), revision, checkpoints })
}

/// The contract's `delta_history`.
pub(crate) fn delta_history(
    db: &Db,
    names: &Names,
    at: &CheckpointKey,
    channels: &BTreeSet<ChannelName>,
    reach: Option<CheckpointId>,
) -> Result<DeltaHistory> {
    let unknown = || Error::NotFound { thread: at.thread.clone(), checkpoint: at.id };
    let thread = directory::find_thread(db, &at.thread)?.ok_or_else(unknown)?;
    let chain = directory::find_chain(db, thread, &at.namespace)?.ok_or_else(unknown)?.key;
    let row = checkpoints::find(db, chain, at.id)?.ok_or_else(unknown)?;
    let mut view = View::new(db, names, &at.thread, thread).walking();
    let mut child = view.read(chain, &row)?;
    let mut walk = HistoryWalk::new(at, channels, reach);
    let mut keys: HashMap<&ChannelName, NameKey> = HashMap::new();
    for channel in channels {
        // A channel with an unknown name was never written.
        keys.extend(names.find(db, channel.as_str())?.map(|key| (channel, key)));
    }
    let wanted: HashSet<NameKey> = keys.values().copied().collect();
    loop {
        let done = walk.visit(child.id, child.record.parent.is_none(), |channel, far_enough| {
            let Some(key) = keys.get(channel) else { return Ok(None) };
            let Some(found) = view.channel(chain, &child, *key)? else { return Ok(None) };
            let stored = match found.kept {
                Kept::Value(_) | Kept::Snapshot(_) if !far_enough => Stored::Held,
                _ => view.stored(chain, &found)?,
            };
            Ok(Some(ChannelEntry { version: found.version, stored }))
        })?;
        if done {
            return Ok(walk.finish());
        }
        let Some(parent) = view.parent(chain, &child)? else { return Err(walk.no_seed(child.id)) };
        let (mut applied, mut writes) = (Vec::new(), Vec::new());
        for task in view.applied(&child, &parent)? {
            applied.push(task.task);
            writes.push(view.task_writes(task, |key| wanted.contains(&key))?);
        }
        walk.apply(child.id, &applied, &writes)?;
        child = parent;
    }
}

//! The reading methods of the contract: one statement for rows and structure, a second one for values.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use threadkeep::checkpoint::{ChannelEntry, CheckpointKey, CheckpointTuple, Stored};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, ThreadId};
use threadkeep::saver::fallback::HistoryWalk;
use threadkeep::saver::{CheckpointSelector, DeltaHistory, Load, Revision, ThreadImage};
use threadkeep::{Error, Result};
use threadkeep_layout::Run;
use tokio_postgres::types::Type;

use crate::aside::aside;
use crate::element::Space;
use crate::error::{BUSY, Trouble, unavailable};
use crate::history::{Mark, Since};
use crate::keys;
use crate::memory::LeftOut;
use crate::pool::Param;
use crate::record::Kept;
use crate::rows::{Node, Snapshot, ThreadRow, thread_name};
use crate::sql::Statement;
use crate::store::Store;
use crate::view::Values;

/// How often a read may find that its thread was deleted, rewritten or lost between its two statements, or that they
/// went to two servers of which one lags.
pub(crate) const ROUNDS: usize = 8;

impl Store {
    /// The contract's `get`.
    pub(crate) async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>, Trouble> {
        let (thread, ns) = (keys::of_thread(&at.thread), keys::of_namespace(&at.namespace));
        let make = {
            let (at, ns, memory) = (at.clone(), ns.clone(), self.memory.clone());
            move |snapshot: &Snapshot, values: &mut Values<'_>| {
                let node = match at.id {
                    Some(id) => snapshot.nodes.get(&ns).and_then(|nodes| nodes.get(&id)),
                    None => snapshot.head(&at.thread, &ns)?,
                };
                let Some(node) = node else { return Ok(None) };
                let tuple = values.tuple(&at.thread, &at.namespace, node, &at.load)?;
                if let Some(row) = snapshot.thread.as_ref().filter(|_| values.are_collected()) {
                    let objects = node.record.extra.maps.iter().map(|(key, _)| key.as_str());
                    memory.learn((thread, &ns), &row.history, objects, &snapshot.elements);
                }
                Ok(Some(tuple))
            }
        };
        let make = Arc::new(make);
        for _ in 0..ROUNDS {
            let snapshot = self.one(&at.thread, &ns, at.id).await?;
            if let Some(made) = self.with_values(&at.thread, snapshot, make.clone()).await? {
                return Ok(made);
            }
        }
        Err(unavailable(BUSY).into())
    }

    /// Reads the head of a namespace, or the checkpoint with an id, by one statement. What is remembered of its metadata
    /// is left out, unless the thread turns out to have another history: then that is forgotten, and a second statement
    /// asks for all.
    async fn one(
        &self,
        thread: &ThreadId,
        ns: &Vec<u8>,
        id: Option<CheckpointId>,
    ) -> Result<Snapshot, Trouble> {
        let (key, id) = (keys::of_thread(thread), id.map(keys::uuid));
        let mut params: Vec<Param<'_>> = vec![(&key, Type::UUID), (ns, Type::BYTEA)];
        params.extend(id.as_ref().map(|id| -> Param<'_> { (id, Type::UUID) }));
        let (all, beyond) = match id {
            Some(_) => (&self.sql.by_id, &self.sql.by_id_beyond),
            None => (&self.sql.head, &self.sql.head_beyond),
        };
        let Some(remembered) = self.memory.of(key, ns) else {
            return self.snapshot(thread, all, &params).await;
        };
        let left_out = remembered.left_out();
        let LeftOut { epoch, least, most, first, last } = &left_out;
        let mut more = params.clone();
        more.extend::<[Param<'_>; 5]>([
            (epoch, Type::INT8),
            (least, Type::INT8),
            (most, Type::INT8),
            (first, Type::INT8_ARRAY),
            (last, Type::INT8_ARRAY),
        ]);
        let mut snapshot = self.snapshot(thread, beyond, &more).await?;
        let found = snapshot.thread.as_ref().map(|row| &row.history);
        if found.is_some_and(|found| remembered.holds_in(found)) {
            snapshot.elements.remember(remembered.content);
            return Ok(snapshot);
        }
        let is_whole = !found.is_some_and(|found| remembered.was_left_out(found));
        self.memory.drop_it(key, ns, &remembered);
        if is_whole { Ok(snapshot) } else { self.snapshot(thread, all, &params).await }
    }

    /// The contract's `delta_history`.
    pub(crate) async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory, Trouble> {
        let (thread, ns) = (keys::of_thread(&at.thread), keys::of_namespace(&at.namespace));
        let (id, until) = (keys::uuid(at.id), keys::uuid(reach.unwrap_or(at.id)));
        let params: [Param<'_>; 4] =
            [(&thread, Type::UUID), (&ns, Type::BYTEA), (&id, Type::UUID), (&until, Type::UUID)];
        let make = {
            let (at, ns, channels) = (at.clone(), ns.clone(), channels.clone());
            move |snapshot: &Snapshot, values: &mut Values<'_>| {
                let none = BTreeMap::new();
                let nodes = snapshot.nodes.get(&ns).unwrap_or(&none);
                history(&at, &channels, reach, nodes, values)
            }
        };
        self.made(&at.thread, &self.sql.lineage, &params, make).await
    }

    /// The contract's `read_thread`.
    pub(crate) async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage, Trouble> {
        let key = keys::of_thread(thread);
        let params: [Param<'_>; 1] = [(&key, Type::UUID)];
        let of = thread.clone();
        let make = move |snapshot: &Snapshot, values: &mut Values<'_>| image(&of, snapshot, values);
        self.made(thread, &self.sql.all, &params, make).await
    }

    /// The contract's `revision`.
    pub(crate) async fn revision(&self, thread: &ThreadId) -> Result<Revision, Trouble> {
        let (key, remembered) = (keys::of_thread(thread), self.remembered(thread));
        let mut lease = self.connections.lease().await?;
        let rows = lease.query(&self.sql.thread, &[(&key, Type::UUID)]).await?;
        let row = rows.first().map(|row| ThreadRow::of(thread, row)).transpose()?;
        self.compare(&mut lease, thread, remembered, row.as_ref()).await?;
        Ok(row.map_or_else(Revision::absent, |row| revision(row.history.mark)))
    }

    /// The contract's `threads`.
    pub(crate) async fn threads_after(
        &self,
        after: Option<&ThreadId>,
        limit: usize,
    ) -> Result<Vec<ThreadId>, Trouble> {
        let after = after.map(|thread| thread.as_str().as_bytes());
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let rows = self.query(&self.sql.threads, &[(&after, Type::BYTEA), (&limit, Type::INT8)]).await?;
        Ok(rows.iter().map(thread_name).collect::<Result<_>>()?)
    }

    /// Reads a thread by one statement, and passes it to `make`.
    async fn made<T: Send + 'static>(
        &self,
        thread: &ThreadId,
        statement: &Statement,
        params: &[Param<'_>],
        make: impl Fn(&Snapshot, &mut Values<'_>) -> Result<T> + Send + Sync + 'static,
    ) -> Result<T, Trouble> {
        let make = Arc::new(make);
        for _ in 0..ROUNDS {
            let snapshot = self.snapshot(thread, statement, params).await?;
            if let Some(made) = self.with_values(thread, snapshot, make.clone()).await? {
                return Ok(made);
            }
        }
        Err(unavailable(BUSY).into())
    }

    /// Loads the values that `make` needs and runs it on them. None if the thread was deleted or rewritten since the
    /// snapshot, or the server lost a write that it has: then elements may be gone, or their numbers reused.
    pub(crate) async fn with_values<T: Send + 'static>(
        &self,
        thread: &ThreadId,
        snapshot: Snapshot,
        make: Arc<impl Fn(&Snapshot, &mut Values<'_>) -> Result<T> + Send + Sync + 'static>,
    ) -> Result<Option<T>, Trouble> {
        let size = snapshot.size();
        let collect = {
            let make = make.clone();
            move || -> Result<_> {
                let mut values = Values::collecting(&snapshot.elements);
                let made = make(&snapshot, &mut values)?;
                let wanted = values.wanted();
                Ok((wanted.is_empty().then_some(made), wanted, snapshot))
            }
        };
        let (made, wanted, mut snapshot) = aside(size, collect).await?;
        if made.is_some() {
            return Ok(made);
        }
        let loaded = self.elements(thread, &wanted).await?;
        if !continues(&loaded, &snapshot) {
            return Ok(None);
        }
        let size = size + loaded.elements.len();
        let load = move || {
            snapshot.elements.join(loaded.elements);
            make(&snapshot, &mut Values::loaded(&snapshot.elements))
        };
        aside(size, load).await.map(Some)
    }

    async fn elements(&self, thread: &ThreadId, runs: &[Run]) -> Result<Snapshot, Trouble> {
        let key = keys::of_thread(thread);
        let (first, last): (Vec<i64>, Vec<i64>) =
            runs.iter().map(|run| Space::Values.bounds(*run)).map(|[first, last]| (first, last)).unzip();
        let params: [Param<'_>; 3] =
            [(&key, Type::UUID), (&first, Type::INT8_ARRAY), (&last, Type::INT8_ARRAY)];
        self.snapshot(thread, &self.sql.elements, &params).await
    }
}

/// A thread's image.
fn image(thread: &ThreadId, snapshot: &Snapshot, values: &mut Values<'_>) -> Result<ThreadImage> {
    let Some(row) = &snapshot.thread else { return Ok(ThreadImage::absent(thread)) };
    check_heads(thread, snapshot, None)?;
    check_parents(thread, snapshot, None)?;
    let mut checkpoints = BTreeMap::new();
    for (ns, nodes) in &snapshot.nodes {
        let Some((namespace, _)) = snapshot.heads.get(ns) else { continue };
        for (id, node) in nodes {
            let tuple = values.tuple(thread, namespace, node, &Load::All)?;
            checkpoints.insert((namespace.clone(), *id), tuple);
        }
    }
    Ok(ThreadImage { thread: thread.clone(), revision: revision(row.history.mark), checkpoints })
}

/// The contract's revision of a thread.
pub(crate) fn revision(mark: Mark) -> Revision {
    let (epoch, revision) = (mark.epoch.to_le_bytes(), mark.revision.to_le_bytes());
    Revision::new([&epoch[..], &revision, mark.nonce.as_bytes()].concat())
}

/// Whether what was found later has the elements of a snapshot, under the same numbers.
fn continues(found: &Snapshot, snapshot: &Snapshot) -> bool {
    match (&found.thread, &snapshot.thread) {
        (None, None) => true,
        (Some(found), Some(then)) => {
            let (found, then) = (&found.history, then.history.moment());
            found.mark.epoch == then.mark.epoch
                && matches!(found.since(&then), Since::Contained | Since::TooLongAgo)
        }
        _ => false,
    }
}

/// Checks that no head is missing among the newest checkpoints: those after `floor`, or all.
pub(crate) fn check_heads(thread: &ThreadId, snapshot: &Snapshot, floor: Option<CheckpointId>) -> Result<()> {
    for (ns, (_, head)) in &snapshot.heads {
        if floor.is_none_or(|floor| *head > floor) {
            snapshot.head(thread, ns)?;
        }
    }
    Ok(())
}

/// Checks that no parent is missing among these checkpoints, which are all that exist after `floor`, or all.
pub(crate) fn check_parents(
    thread: &ThreadId,
    snapshot: &Snapshot,
    floor: Option<CheckpointId>,
) -> Result<()> {
    for nodes in snapshot.nodes.values() {
        for node in nodes.values() {
            let parent = node.record.parent.filter(|parent| floor.is_none_or(|floor| *parent > floor));
            if let Some(parent) = parent.filter(|parent| !nodes.contains_key(parent)) {
                return Err(Error::broken(thread, node.id, format!("its parent {parent} is missing")));
            }
        }
    }
    Ok(())
}

fn history(
    at: &CheckpointKey,
    channels: &BTreeSet<ChannelName>,
    reach: Option<CheckpointId>,
    nodes: &BTreeMap<CheckpointId, Node>,
    values: &mut Values<'_>,
) -> Result<DeltaHistory> {
    let mut child =
        nodes.get(&at.id).ok_or_else(|| Error::NotFound { thread: at.thread.clone(), checkpoint: at.id })?;
    let mut walk = HistoryWalk::new(at, channels, reach);
    loop {
        let Node { id, record, .. } = child;
        let complete = walk.visit(*id, record.parent.is_none(), |channel, wanted| {
            let Some(entry) = record.channels.get(channel) else { return Ok(None) };
            let stored = match entry.kept {
                Kept::Value(_) | Kept::Snapshot(_) if !wanted => Stored::Held,
                _ => values.stored(&at.namespace, channel, entry)?,
            };
            Ok(Some(ChannelEntry { version: entry.version, stored }))
        })?;
        if complete {
            return Ok(walk.finish());
        }
        let parent = record.parent.ok_or_else(|| walk.no_seed(*id))?;
        let parent = nodes.get(&parent).ok_or_else(|| walk.no_parent(*id, parent))?;
        let mut rows = Vec::with_capacity(record.applied.len());
        for task in parent.tasks.iter().filter(|task| record.applied.contains(&task.task)) {
            rows.push(values.task(task, |channel| channels.contains(channel))?);
        }
        walk.apply(*id, &record.applied, &rows)?;
        child = parent;
    }
}

/// The namespace of a key, which has a head.
pub(crate) fn namespace_of<'s>(snapshot: &'s Snapshot, ns: &[u8]) -> Option<&'s Namespace> {
    snapshot.heads.get(ns).map(|(namespace, _)| namespace)
}

//! Deliberately broken savers: the memory saver with one fault.

mod comers;
mod fault;
mod lapse;
mod loner;
mod seeds;
mod twisted;
mod workshop;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
pub(crate) use comers::{Comers, Slip};
pub(crate) use fault::Fault;
pub(crate) use lapse::Lapse;
pub(crate) use loner::Loners;
use seeds::Seeds;
use threadkeep::checkpoint::{ChannelEntry, CheckpointKey, CheckpointTuple, Stored, TaskWrites, Write};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, TaskId, ThreadId, Version};
use threadkeep::saver::{
    Capabilities, ChannelHistory, CheckpointSelector, DeltaHistory, Flush, HistoryStep, ListQuery, Load,
    Revision, Rewrite, Saver, StepCommit, Summary, ThreadImage, fallback,
};
use threadkeep::value::{ChannelValue, ListValue, Part};
use threadkeep::{Error, Result};
use threadkeep_memory::MemorySaver;
pub(crate) use twisted::{Twist, Twister};
pub(crate) use workshop::Workshop;

/// What broken savers remember besides the store.
#[derive(Default)]
struct Shared {
    /// The revision reported for a thread, by what it was derived from.
    revisions: HashMap<ThreadId, Revision>,
    seen: BTreeSet<ThreadId>,
    threads: HashSet<ThreadId>,
    by_counter: HashMap<(ThreadId, Namespace, ChannelName, u64), ChannelValue>,
    lists: HashMap<(ThreadId, Version), ListValue>,
    pauses: usize,
}

struct Broken {
    inner: MemorySaver,
    fault: Fault,
    shared: Arc<Mutex<Shared>>,
    /// Set when the operation that should fail has failed.
    failing: Option<Arc<AtomicBool>>,
    /// Held by what excludes the other calls of this handle.
    alone: tokio::sync::Mutex<()>,
}

impl Broken {
    /// Whether this is the operation that should fail.
    fn fails(&self) -> bool {
        self.failing.as_ref().is_some_and(|failed| !failed.swap(true, Ordering::SeqCst))
    }

    fn broken<T>() -> Result<T> {
        Err(Error::Unavailable { saver: "broken", reason: "arranged".to_owned() })
    }

    /// Excludes the other calls of this handle, if the fault does.
    async fn alone(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        if self.is(Fault::ReadsOneByOne) { Some(self.alone.lock().await) } else { None }
    }

    fn is(&self, fault: Fault) -> bool {
        self.fault == fault
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn namespace(&self, namespace: &Namespace) -> Namespace {
        if self.is(Fault::IgnoresNamespaces) { Namespace::root() } else { namespace.clone() }
    }

    async fn head(&self, thread: &ThreadId, namespace: &Namespace) -> Result<Option<CheckpointId>> {
        let head = CheckpointSelector { namespace: namespace.clone(), ..CheckpointSelector::head(thread) };
        Ok(self.inner.get(&head).await?.map(|tuple| tuple.checkpoint.id))
    }

    /// The tuple as a read returns it.
    fn shown(&self, mut tuple: CheckpointTuple, namespace: &Namespace) -> CheckpointTuple {
        tuple.namespace = namespace.clone();
        let (thread, shared) = (tuple.thread.clone(), self.shared());
        for (name, entry) in &mut tuple.checkpoint.channels {
            let place = (thread.clone(), namespace.clone(), name.clone(), entry.version.counter);
            if self.is(Fault::IgnoresTheRandomPart)
                && let (Stored::Value(value) | Stored::Snapshot(value), Some(found)) =
                    (&mut entry.stored, shared.by_counter.get(&place))
            {
                *value = found.clone();
            }
        }
        if self.is(Fault::UnloadedIsAbsent) {
            tuple.checkpoint.channels.retain(|_, entry| entry.stored != Stored::Held);
        }
        tuple
    }

    /// The list with its base taken from what is held under the base's version.
    fn rebuilt(&self, thread: &ThreadId, list: &ListValue) -> ListValue {
        let shared = self.shared();
        let base = list.base().and_then(|base| shared.lists.get(&(thread.clone(), base)));
        let (mut elements, mut at) = (Vec::new(), 0);
        for part in list.parts() {
            let len = match part {
                Part::New { len } => {
                    elements.extend(list.iter_from(at).take(len).cloned());
                    len
                }
                Part::Base { start, len } => {
                    elements
                        .extend(base.into_iter().flat_map(|base| base.iter_from(start).take(len)).cloned());
                    len
                }
            };
            at += len;
        }
        elements.into_iter().collect()
    }

    /// A path, read checkpoint by checkpoint.
    async fn walked(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        let mut image = ThreadImage::absent(&at.thread);
        let mut next = Some(at.id);
        while let Some(id) = next {
            let key = CheckpointKey { id, ..at.clone() };
            let Some(tuple) = self.inner.get(&CheckpointSelector::at(&key)).await? else { break };
            next = tuple.parent;
            image.checkpoints.insert((key.namespace, id), tuple);
            self.pause(&at.thread).await?;
        }
        fallback::image_history(&image, at, channels, reach)
    }

    /// Waits until somebody has changed the thread, if anybody does. Patience differs from call to call: readers in
    /// step would all be between two reads whenever a change comes that waits for one of them. One in four outlasts
    /// what others do meanwhile.
    async fn pause(&self, thread: &ThreadId) -> Result<()> {
        const PATIENCE: [usize; 4] = [20, 40, 60, 500];
        let before = self.inner.read_thread(thread).await?.revision;
        let number = {
            let mut shared = self.shared();
            shared.pauses += 1;
            shared.pauses
        };
        for _ in 0..PATIENCE[number % PATIENCE.len()] {
            tokio::task::yield_now().await;
            if self.inner.read_thread(thread).await?.revision != before {
                break;
            }
        }
        Ok(())
    }

    /// The checkpoints of a list or a thread, each read again by itself.
    async fn one_by_one(&self, found: Vec<CheckpointTuple>) -> Result<Vec<CheckpointTuple>> {
        let mut read = Vec::new();
        for tuple in found {
            self.pause(&tuple.thread).await?;
            read.extend(self.inner.get(&CheckpointSelector::at(&tuple.key())).await?);
        }
        Ok(read)
    }

    fn spoil(&self, step: &mut StepCommit) {
        step.namespace = self.namespace(&step.namespace);
        if self.is(Fault::DropsAWrite) {
            for row in &mut step.writes {
                row.writes.pop();
            }
        }
        if self.is(Fault::ForgetsPendingRows) {
            step.pending.clear();
        }
        if self.is(Fault::DropsHeldValues) {
            step.checkpoint.channels.retain(|_, entry| entry.stored != Stored::Held);
        }
        let mut rebuilt = Vec::new();
        for (name, ChannelEntry { version, stored }) in &step.checkpoint.channels {
            let Some(value) = stored.value() else { continue };
            let place = (step.thread.clone(), step.namespace.clone(), name.clone(), version.counter);
            self.shared().by_counter.insert(place, value.clone());
            if let ChannelValue::List(list) = value {
                rebuilt.push((name.clone(), *version, self.rebuilt(&step.thread, list)));
            }
        }
        if self.is(Fault::TrustsBases) {
            for (name, version, list) in rebuilt {
                self.shared().lists.insert((step.thread.clone(), version), list.clone());
                let Some(entry) = step.checkpoint.channels.get_mut(&name) else { continue };
                let (Stored::Value(value) | Stored::Snapshot(value)) = &mut entry.stored else { continue };
                *value = list.into();
            }
        }
    }

    /// The rows under the parent of a checkpoint, and the tasks it applied.
    async fn made_by(&self, at: &CheckpointKey) -> Result<(Vec<TaskWrites>, Vec<TaskId>)> {
        let Some(child) = self.inner.get(&CheckpointSelector::at(at)).await? else {
            return Ok((vec![], vec![]));
        };
        let Some(parent) = child.parent else { return Ok((vec![], vec![])) };
        let parent =
            self.inner.get(&CheckpointSelector::at(&CheckpointKey { id: parent, ..at.clone() })).await?;
        Ok((parent.map(|parent| parent.writes).unwrap_or_default(), child.checkpoint.applied))
    }

    /// What a path says that a checkpoint applied to a channel.
    async fn replayed(
        &self,
        at: &CheckpointKey,
        channel: &ChannelName,
        right: Vec<Write>,
    ) -> Result<Vec<Write>> {
        let (mut rows, applied) = self.made_by(at).await?;
        match self.fault {
            Fault::ReplaysSiblings => {}
            Fault::ReplaysById => {
                rows.retain(|row| applied.contains(&row.task));
                rows.sort_by_key(|row| row.task);
            }
            Fault::ReplaysSpecialRows => {
                rows.retain(|row| applied.contains(&row.task));
                rows.sort_by_key(|row| applied.iter().position(|task| *task == row.task));
                let wanted = |write: &Write| write.is_special() || write.channel == *channel;
                let writes = rows.into_iter().flat_map(|row| row.writes).filter(wanted);
                return Ok(writes.map(|write| Write { channel: channel.clone(), ..write }).collect());
            }
            _ => return Ok(right),
        }
        Ok(rows.into_iter().flat_map(|row| row.writes).filter(|write| write.channel == *channel).collect())
    }
}

fn nothing(channels: &BTreeSet<ChannelName>) -> DeltaHistory {
    let empty = || ChannelHistory { seed: None, steps: vec![] };
    channels.iter().map(|channel| (channel.clone(), empty())).collect()
}

#[async_trait]
impl Saver for Broken {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        let inside = CheckpointSelector { namespace: self.namespace(&at.namespace), ..at.clone() };
        let mut found = self.inner.get(&inside).await?;
        if found.is_none() && self.is(Fault::FallsBackToTheHead) {
            found = self.inner.get(&CheckpointSelector { id: None, ..inside }).await?;
        }
        if let Some(tuple) = &mut found
            && at.load == Load::None
            && self.is(Fault::ForgetsRowsWithoutValues)
        {
            tuple.writes.clear();
        }
        Ok(found.map(|tuple| self.shown(tuple, &at.namespace)))
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        let mut inside = query.clone();
        inside.namespace = query.namespace.as_ref().map(|namespace| self.namespace(namespace));
        if self.is(Fault::BeforeIsInclusive) {
            let next =
                query.before.map(|id| (u128::from_be_bytes(*id.as_bytes()).saturating_add(1)).to_be_bytes());
            inside.before = next.map(CheckpointId::from_bytes);
        }
        if self.is(Fault::LimitsBeforeFiltering) {
            inside.filter.clear();
        }
        let alone = self.alone().await;
        let mut found = self.inner.list(&inside).await?;
        if self.is(Fault::ReadsOneByOne) {
            found = self.one_by_one(found).await?;
        }
        drop(alone);
        if query.load == Load::None && self.is(Fault::ForgetsRowsWithoutValues) {
            for tuple in &mut found {
                tuple.writes.clear();
            }
        }
        let found = found.into_iter().filter(|tuple| tuple.metadata.matches(&query.filter));
        Ok(found.map(|tuple| self.shown(tuple.clone(), &tuple.namespace)).collect())
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        if self.fails() {
            return Self::broken();
        }
        let at = CheckpointKey { namespace: self.namespace(&at.namespace), ..at.clone() };
        let rows = self.inner.get(&CheckpointSelector::at(&at)).await?.map(|tuple| tuple.writes);
        let known = rows.into_iter().flatten().find(|row| row.task == task.task);
        let mut task = task.clone();
        match known {
            Some(mut known) if self.is(Fault::ChangesAppliedRows) => {
                known.merge(&task);
                task = known;
                // The saver below keeps what a child has applied.
                self.inner.lose_writes(&at, task.task);
            }
            Some(known) if self.is(Fault::PutsTwice) => {
                let ordinary = known.writes.into_iter().filter(|write| !write.is_special());
                task.writes = ordinary.chain(task.writes).collect();
                // The inner saver keeps what a known task has written.
                self.inner.lose_writes(&at, task.task);
            }
            Some(known) if self.is(Fault::KeepsSpecialRows) => {
                let has = |write: &Write| known.writes.iter().any(|old| old.channel == write.channel);
                task.writes.retain(|write| !write.is_special() || !has(write));
            }
            _ => {}
        }
        match self.inner.put_writes(&at, &task).await {
            Err(Error::NotFound { .. }) if self.is(Fault::PutsIntoTheVoid) => Ok(()),
            done => done,
        }
    }

    async fn commit(&self, mut step: StepCommit) -> Result<CheckpointKey> {
        let key = step.key();
        let parent = step.parent.map(|id| CheckpointKey { id, ..key.clone() });
        if self.fails() {
            if let (Fault::FailsHalfWay, Some(parent)) = (self.fault, &parent) {
                for row in &step.writes {
                    self.inner.put_writes(parent, row).await?;
                }
            }
            return Self::broken();
        }
        assert!(!(self.is(Fault::Panics) && parent.is_some()), "the store is out of order");
        if step.flush == Flush::WithNext && self.is(Fault::LeavesOutWhatMayWait) {
            return Ok(key);
        }
        self.shared().threads.insert(step.thread.clone());
        self.spoil(&mut step);
        let head = self.head(&step.thread, &step.namespace).await?;
        if self.is(Fault::RefusesRepeats) && self.inner.get(&CheckpointSelector::at(&key)).await?.is_some() {
            let (expected, found) = (step.expected_head, head);
            return Err(Error::Conflict { thread: key.thread, namespace: key.namespace, expected, found });
        }
        let hurries = matches!(self.fault, Fault::LooksForTheParentFirst | Fault::ChecksTheFormFirst);
        if let (true, Some(above)) = (hurries, &parent) {
            match self.inner.get(&CheckpointSelector::at(above)).await? {
                None if self.is(Fault::LooksForTheParentFirst) => {
                    return Err(Error::NotFound { thread: key.thread, checkpoint: above.id });
                }
                Some(above) if self.is(Fault::ChecksTheFormFirst) => {
                    step.check_parent(|name| Ok(above.counted(name)))?;
                }
                _ => {}
            }
        }
        if self.is(Fault::IgnoresTheExpectedHead) {
            step.expected_head = head;
        }
        if self.is(Fault::ChecksThenCommits) && head == step.expected_head {
            self.pause(&step.thread).await?;
            step.expected_head = self.head(&step.thread, &step.namespace).await?;
        }
        if let (Fault::CommitsInTwoParts, Some(parent)) = (self.fault, &parent) {
            for row in &step.writes {
                self.inner.put_writes(parent, row).await?;
            }
            tokio::task::yield_now().await;
        }
        if self.is(Fault::DoublesPendingRows)
            && self.inner.get(&CheckpointSelector::at(&key)).await?.is_some()
        {
            for row in &step.pending {
                let twice = [&row.writes[..], &row.writes[..]].concat();
                self.inner.put_writes(&key, &TaskWrites { writes: twice, ..row.clone() }).await?;
            }
        }
        let afterwards = match self.fault {
            Fault::PutsPendingRowsAfterwards => std::mem::take(&mut step.pending),
            _ => Vec::new(),
        };
        let rows = step.writes.clone();
        let mut done = self.inner.commit(step.clone()).await;
        if done.is_ok() {
            for row in &afterwards {
                tokio::task::yield_now().await;
                self.inner.put_writes(&key, row).await?;
            }
        }
        if let (Err(Error::Stale { .. }), Fault::IgnoresTheForm, Some(parent)) = (&done, self.fault, &parent)
            && let Some(parent) = self.inner.get(&CheckpointSelector::at(parent)).await?
        {
            // The saver below takes it only with the parent's counters.
            step.metadata.counters = parent.metadata.counters;
            done = self.inner.commit(step).await;
        }
        if let (Err(_), Fault::KeepsWritesOfRefusedCommits, Some(parent)) = (&done, self.fault, &parent) {
            for row in &rows {
                // There may be no parent to store them under.
                drop(self.inner.put_writes(parent, row).await);
            }
        }
        done.map(|_| key)
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        if self.is(Fault::FlushesOnlyWhatItHas) && self.head(thread, &Namespace::root()).await?.is_none() {
            return Err(Error::Unavailable { saver: "broken", reason: format!("there is no {thread}") });
        }
        self.inner.flush(thread).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        let at = &CheckpointKey { namespace: self.namespace(&at.namespace), ..at.clone() };
        let reach = if self.is(Fault::IgnoresReach) { None } else { reach };
        if matches!(self.fault, Fault::IgnoresPlainSeeds | Fault::NullIsNoSeed) {
            return Seeds(&self.inner, self.fault).delta_history(at, channels, reach).await;
        }
        if self.is(Fault::ReadsInTwoParts) {
            return self.walked(at, channels, reach).await;
        }
        if self.is(Fault::WalksOnePage) {
            let page = ListQuery { limit: Some(1024), load: Load::None, ..ListQuery::new(&at.thread) };
            let page = self.inner.list(&page).await?;
            if page.len() == 1024 && page.iter().all(|tuple| tuple.checkpoint.id != at.id) {
                return Ok(nothing(channels));
            }
        }
        let mut paths = match self.inner.delta_history(at, channels, reach).await {
            Err(Error::BrokenLineage { .. }) if self.is(Fault::GapsAreBeginnings) => nothing(channels),
            paths => paths?,
        };
        for (channel, path) in &mut paths {
            for HistoryStep { checkpoint, writes, .. } in &mut path.steps {
                let at = CheckpointKey { id: *checkpoint, ..at.clone() };
                *writes = self.replayed(&at, channel, std::mem::take(writes)).await?;
            }
        }
        Ok(paths)
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        if self.fails() {
            return Self::broken();
        }
        let _alone = self.alone().await;
        match self.fault {
            Fault::DeletesInTwoParts => {
                for tuple in self.inner.list(&ListQuery::new(thread)).await?.into_iter().take(2) {
                    self.inner.lose_checkpoint(&tuple.key());
                }
                tokio::task::yield_now().await;
                self.inner.delete_thread(thread).await
            }
            Fault::DeletesOneNamespace => {
                for tuple in self.inner.list(&ListQuery::new(thread)).await? {
                    self.inner.lose_checkpoint(&tuple.key());
                }
                Ok(())
            }
            Fault::DeletesByPrefix => {
                let known: Vec<_> = self.shared().threads.iter().cloned().collect();
                for other in known.iter().filter(|other| other.as_str().starts_with(thread.as_str())) {
                    self.inner.delete_thread(other).await?;
                }
                Ok(())
            }
            _ => self.inner.delete_thread(thread).await,
        }
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        if self.is(Fault::AfterIsInclusive) {
            let all = self.inner.threads(None, usize::MAX).await?;
            return Ok(all
                .into_iter()
                .filter(|id| after.is_none_or(|after| id >= after))
                .take(limit)
                .collect());
        }
        let mut found = self.inner.threads(after, limit).await?;
        if self.is(Fault::KeepsEmptyThreads) {
            let seen = self.shared().seen.clone();
            found.extend(seen.into_iter().filter(|id| after.is_none_or(|after| id > after)));
            found.sort();
            found.dedup();
            found.truncate(limit);
        }
        Ok(found)
    }

    async fn summary(&self, thread: &ThreadId) -> Result<Summary> {
        let mut summary = self.inner.summary(thread).await?;
        if self.is(Fault::CountsAppliedRows) {
            for chain in summary.values_mut() {
                chain.pending = chain.rows;
            }
        }
        Ok(summary)
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        let alone = self.alone().await;
        let mut image = self.inner.read_thread(thread).await?;
        if image.checkpoints.is_empty() {
            return Ok(image);
        }
        if self.is(Fault::ReadsOneByOne) {
            let read = self.one_by_one(image.checkpoints.into_values().collect()).await?;
            let place = |tuple: &CheckpointTuple| (tuple.namespace.clone(), tuple.checkpoint.id);
            image.checkpoints = read.into_iter().map(|tuple| (place(&tuple), tuple)).collect();
        }
        drop(alone);
        match self.fault {
            Fault::ReadsOneNamespace => {
                image.checkpoints.retain(|(namespace, _), _| namespace.as_str().is_empty());
            }
            Fault::RevisionsMissRows => {
                let ids: Vec<u8> = image.checkpoints.keys().flat_map(|(_, id)| *id.as_bytes()).collect();
                image.revision = Revision::new(ids);
            }
            Fault::RevisionsAreDigests => {
                image.revision = Revision::new(format!("{:?}", image.checkpoints).into_bytes());
            }
            Fault::RevisionsMissMetadata => {
                let blank = |tuple: &CheckpointTuple| (tuple.checkpoint.clone(), tuple.writes.clone());
                let rows: Vec<_> = image.checkpoints.values().map(blank).collect();
                image.revision = Revision::new(format!("{rows:?}").into_bytes());
            }
            _ => {}
        }
        self.shared().revisions.insert(thread.clone(), image.revision.clone());
        Ok(image)
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        if self.fails() {
            return Self::broken();
        }
        let _alone = self.alone().await;
        self.shared().seen.insert(thread.clone());
        let current = self.inner.read_thread(thread).await?.revision;
        let told = self.shared().revisions.get(thread).cloned();
        let expected = match self.fault {
            Fault::IgnoresTheRevision => current,
            Fault::RevisionsMissRows | Fault::RevisionsAreDigests | Fault::RevisionsMissMetadata
                if told.as_ref() == Some(expected) =>
            {
                current
            }
            _ => expected.clone(),
        };
        if self.is(Fault::MakesNoThreads) && expected == Revision::absent() {
            return Ok(());
        }
        let (image, mut rewrite) = (self.inner.read_thread(thread).await?, rewrite);
        match self.fault {
            Fault::ForgetsAnAncestor | Fault::CutsAtAMissingRow => {
                let done = self.inner.rewrite_thread(thread, &expected, rewrite.clone()).await;
                let Err(Error::InvalidInput(_)) = done else { return done };
                if self.is(Fault::CutsAtAMissingRow) {
                    return Ok(());
                }
                for (namespace, id) in rewrite.remove {
                    self.inner.lose_checkpoint(&CheckpointKey { thread: thread.clone(), namespace, id });
                }
                return Ok(());
            }
            Fault::RewritesInTwoParts => {
                let put = Rewrite { put: std::mem::take(&mut rewrite.put), ..Rewrite::default() };
                self.inner.rewrite_thread(thread, &expected, put).await?;
                tokio::task::yield_now().await;
                let revision = self.inner.read_thread(thread).await?.revision;
                return self.inner.rewrite_thread(thread, &revision, rewrite).await;
            }
            Fault::TakesTheRowsOfSiblings => {
                let remove = rewrite.remove.clone();
                self.inner.rewrite_thread(thread, &expected, rewrite).await?;
                for (namespace, id) in remove {
                    let gone = image.checkpoints.get(&(namespace.clone(), id));
                    let Some(id) = gone.and_then(|gone| gone.parent) else { continue };
                    let rows = image.checkpoints.get(&(namespace.clone(), id)).map(|tuple| &tuple.writes);
                    let parent = CheckpointKey { thread: thread.clone(), namespace, id };
                    for row in rows.into_iter().flatten() {
                        self.inner.lose_writes(&parent, row.task);
                    }
                }
                return Ok(());
            }
            Fault::LosesWhatWasTakenOver => {
                let gone: Vec<_> =
                    rewrite.remove.iter().filter_map(|place| image.checkpoints.get(place)).collect();
                for tuple in &mut rewrite.put {
                    tuple.checkpoint.channels.retain(|name, entry| {
                        let held = |other: &&CheckpointTuple| {
                            other.checkpoint.channels.get(name).map(|other| other.version)
                                == Some(entry.version)
                        };
                        !gone.iter().any(held) || matches!(entry.stored, Stored::Snapshot(_))
                    });
                }
            }
            _ => {}
        }
        self.inner.rewrite_thread(thread, &expected, rewrite).await
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { durable: self.is(Fault::ForgetsOnReopening), ..self.inner.capabilities() }
    }
}

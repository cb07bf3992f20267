//! Savers that break one sentence of the contract each: a right saver, with one answer or one request twisted.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, Stored, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, ThreadId, Version};
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, ListQuery, LocalKey, Revision, Rewrite, Saver, Seed,
    StepCommit, ThreadImage,
};
use threadkeep::value::{ChannelValue, ListValue, Part};
use threadkeep::{Error, Result};
use threadkeep_conformance::{BoxError, Claim, Damage, Factory};
use threadkeep_memory::MemorySaver;
use tokio::task::yield_now;

/// What the saver does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Twist {
    /// Takes the ranges of a list's base from the list that the parent holds, whatever its version is.
    TakesTheParentForTheBase,
    /// Lists the oldest checkpoint first.
    ListsTheOldestFirst,
    /// Lists the root namespace if all are asked for.
    ListsOneNamespace,
    /// Lists what matches any key of a filter.
    MatchesAnyKey,
    /// Ignores the filter of a list of all namespaces.
    FiltersOneNamespace,
    /// Stores values as the JSON that they show, if they show any.
    StoresValuesAsJson,
    /// Shows the rows of a checkpoint in reverse order.
    ShowsRowsBackwards,
    /// Forgets which nodes are next.
    ForgetsWhatIsNext,
    /// Shows snapshots as plain values.
    ShowsSnapshotsAsValues,
    /// Takes a commit whose applied tasks have no rows, without them.
    AppliesUnknownTasks,
    /// Takes a commit whose parent is missing, as a root.
    CommitsWithoutItsParent,
    /// Expects the newest checkpoint of any namespace to be the head.
    HasOneHead,
    /// Keeps a task's first put, and ignores what a longer one adds.
    KeepsTheFirstPut,
    /// Finds an unknown thread an error when it should be deleted.
    RefusesToDeleteTheUnknown,
    /// Has an empty history for a checkpoint that does not exist.
    HasAHistoryOfTheUnknown,
    /// Says that a channel that was never written began with null.
    SeedsTheUnwrittenWithNull,
    /// Gives an unknown thread a revision.
    GivesTheUnknownARevision,
    /// Takes a rewrite that changes nothing of an absent thread for done, also if the thread is there by now.
    TakesNothingForDone,
    /// Lists the threads that have a checkpoint in the root namespace.
    ListsThreadsWithARoot,
    /// Removes what a rewrite removes, and forgets what it puts beside.
    ForgetsWhatIsPut,
    /// Changes the checkpoints of a thread that a rewrite puts, and adds none to a thread that is there.
    PutsOnlyWhatIsThere,
    /// Keeps the rows that a checkpoint has when it is put again with others for the same tasks.
    KeepsKnownRows,
    /// Takes a rewrite that puts what is there for one that changes nothing.
    SkipsWhatIsThere,
    /// Deletes the root namespace in one change, and what is in the others in another.
    DeletesByNamespace,
    /// Deletes a thread without the rows under its nested checkpoints.
    LeavesNestedRows,
    /// Claims to share elements, and stores each list whole.
    StoresEachListWhole,
    /// Shares elements, and says that it does not.
    SharesInSecret,
    /// Says that it shares elements, and its factory, which measures its stores, does not claim it.
    SharesUnclaimed,
    /// Frees nothing.
    FreesNothing,
    /// Looks at no checksum.
    ChecksNothing,
}

/// Creates stores with one twist.
pub(crate) struct Twister(pub(crate) Twist);

#[async_trait]
impl Factory for Twister {
    type Storage = Place;

    fn name(&self) -> &'static str {
        "twisted"
    }

    fn claims(&self) -> &'static [Claim] {
        match self.0 {
            Twist::StoresEachListWhole | Twist::SharesInSecret => &[Claim::SharedElements],
            Twist::FreesNothing | Twist::SharesUnclaimed => &[Claim::StoredBytes],
            Twist::ChecksNothing => &[Claim::ChangeByte],
            _ => &[],
        }
    }

    async fn create(&self) -> Result<Place, BoxError> {
        Ok(Place { store: MemorySaver::new(), most: AtomicU64::default() })
    }

    async fn open(&self, place: &Place) -> Result<Arc<dyn Saver>, BoxError> {
        Ok(Arc::new(Twisted { inner: place.store.clone(), twist: self.0, left: Mutex::default() }))
    }

    /// As if each checkpoint had its lists for itself, and nothing were freed.
    async fn stored_bytes(&self, place: &Place) -> Result<u64, BoxError> {
        let mut bytes = 0;
        for thread in place.store.threads(None, usize::MAX).await? {
            for tuple in place.store.list(&ListQuery::new(&thread)).await? {
                let lists =
                    tuple.checkpoint.channels.values().filter_map(|entry| entry.stored.value()?.as_list());
                bytes += lists.map(|list| list.bytes_len() as u64).sum::<u64>();
            }
        }
        Ok(place.most.fetch_max(bytes, Ordering::SeqCst).max(bytes))
    }

    async fn damage(&self, place: &Place, damage: &Damage) -> Result<(), BoxError> {
        let Damage::ChangeByte(key) = damage else { return Err("not claimed".into()) };
        let image = place.store.read_thread(&key.thread).await?;
        let mut tuple = image.checkpoints[&(key.namespace.clone(), key.id)].clone();
        for entry in tuple.checkpoint.channels.values_mut() {
            entry.stored = Stored::Value(ListValue::default().into());
        }
        let rewrite = Rewrite { put: vec![tuple], ..Rewrite::default() };
        Ok(place.store.rewrite_thread(&key.thread, &image.revision, rewrite).await?)
    }
}

pub(crate) struct Place {
    store: MemorySaver,
    /// The most bytes that were ever stored.
    most: AtomicU64,
}

struct Twisted {
    inner: MemorySaver,
    twist: Twist,
    /// Rows that a deletion left.
    left: Mutex<HashMap<CheckpointKey, Vec<TaskWrites>>>,
}

impl Twisted {
    fn is(&self, twist: Twist) -> bool {
        self.twist == twist
    }

    fn left(&self) -> MutexGuard<'_, HashMap<CheckpointKey, Vec<TaskWrites>>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn at(&self, key: &CheckpointKey) -> Result<Option<CheckpointTuple>> {
        self.inner.get(&CheckpointSelector::at(key)).await
    }

    fn shown(&self, mut tuple: CheckpointTuple) -> CheckpointTuple {
        match self.twist {
            Twist::ShowsRowsBackwards => tuple.writes.reverse(),
            Twist::ForgetsWhatIsNext => tuple.checkpoint.next.clear(),
            Twist::LeavesNestedRows => {
                let key = tuple.key();
                tuple.writes.extend(self.left().get(&key).into_iter().flatten().cloned());
            }
            Twist::StoresValuesAsJson => {
                for entry in tuple.checkpoint.channels.values_mut() {
                    if let Stored::Value(value) | Stored::Snapshot(value) = &mut entry.stored
                        && let Ok(json) = value.to_json()
                        && let Ok(again) = ChannelValue::from_json(&json)
                    {
                        *value = again;
                    }
                }
            }
            Twist::ShowsSnapshotsAsValues => {
                for entry in tuple.checkpoint.channels.values_mut() {
                    if let Stored::Snapshot(value) = &entry.stored {
                        entry.stored = Stored::Value(value.clone());
                    }
                }
            }
            _ => {}
        }
        tuple
    }

    /// Removes the checkpoints of a thread at these places, whatever else happens to it.
    async fn remove(&self, thread: &ThreadId, gone: impl Fn(&LocalKey) -> bool + Send) -> Result<()> {
        loop {
            let image = self.inner.read_thread(thread).await?;
            let remove = image.checkpoints.into_keys().filter(&gone).collect();
            let rewrite = Rewrite { remove, ..Rewrite::default() };
            match self.inner.rewrite_thread(thread, &image.revision, rewrite).await {
                Err(Error::Stale { .. }) => {}
                done => return done,
            }
        }
    }

    /// Puts the lists of a step together from what its parent holds.
    async fn take_from_parent(&self, step: &mut StepCommit) -> Result<()> {
        let Some(id) = step.parent else { return Ok(()) };
        let Some(parent) = self.at(&CheckpointKey { id, ..step.key() }).await? else { return Ok(()) };
        for (name, entry) in &mut step.checkpoint.channels {
            let (Stored::Value(value) | Stored::Snapshot(value)) = &mut entry.stored else { continue };
            let held = parent.checkpoint.channels.get(name).and_then(|held| held.stored.value());
            let (ChannelValue::List(list), Some(ChannelValue::List(held))) = (&*value, held) else {
                continue;
            };
            if let Some(list) = on_base(list, held) {
                *value = list.into();
            }
        }
        Ok(())
    }
}

/// What an image has in the place of a checkpoint.
fn stored<'i>(image: &'i ThreadImage, tuple: &CheckpointTuple) -> Option<&'i CheckpointTuple> {
    image.checkpoints.get(&(tuple.namespace.clone(), tuple.checkpoint.id))
}

/// The list with the ranges of its base taken from another one, if that is long enough.
fn on_base(list: &ListValue, base: &ListValue) -> Option<ListValue> {
    list.base()?;
    let (mut elements, mut at) = (Vec::new(), 0);
    for part in list.parts() {
        let (from, start, len) = match part {
            Part::New { len } => (list, at, len),
            Part::Base { start, len } => (base, start, len),
        };
        if start + len > from.len() {
            return None;
        }
        elements.extend(from.iter_from(start).take(len).cloned());
        at += len;
    }
    Some(elements.into_iter().collect())
}

#[async_trait]
impl Saver for Twisted {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        Ok(self.inner.get(at).await?.map(|tuple| self.shown(tuple)))
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        let mut inside = query.clone();
        if self.is(Twist::ListsOneNamespace) {
            inside.namespace.get_or_insert_with(Namespace::root);
        }
        if self.is(Twist::FiltersOneNamespace) && query.namespace.is_none() {
            inside.filter.clear();
        }
        let any = self.is(Twist::MatchesAnyKey) && query.filter.len() > 1;
        if any {
            inside.filter.clear();
            inside.limit = None;
        }
        let mut found = self.inner.list(&inside).await?;
        if any {
            let matches = |tuple: &CheckpointTuple, (key, value): (&String, &serde_json::Value)| {
                tuple.metadata.matches(&[(key.clone(), value.clone())].into_iter().collect())
            };
            found.retain(|tuple| query.filter.iter().any(|pair| matches(tuple, pair)));
            found.truncate(query.limit.unwrap_or(usize::MAX));
        }
        if self.is(Twist::ListsTheOldestFirst) {
            found.reverse();
        }
        Ok(found.into_iter().map(|tuple| self.shown(tuple)).collect())
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        let mut task = task.clone();
        if self.is(Twist::KeepsTheFirstPut)
            && let Some(tuple) = self.at(at).await?
            && tuple.writes.iter().any(|row| row.task == task.task)
        {
            task.writes.retain(threadkeep::checkpoint::Write::is_special);
        }
        self.inner.put_writes(at, &task).await
    }

    async fn commit(&self, mut step: StepCommit) -> Result<CheckpointKey> {
        if self.is(Twist::TakesTheParentForTheBase) {
            self.take_from_parent(&mut step).await?;
        }
        if self.is(Twist::HasOneHead) {
            let newest =
                self.inner.list(&ListQuery { limit: Some(1), ..ListQuery::new(&step.thread) }).await?;
            let found = newest.first().map(|tuple| tuple.checkpoint.id);
            if found != step.expected_head {
                let (thread, namespace, expected) = (step.thread, step.namespace, step.expected_head);
                return Err(Error::Conflict { thread, namespace, expected, found });
            }
        }
        let done = self.inner.commit(step.clone()).await;
        match (&done, self.twist) {
            (Err(Error::InvalidInput(_)), Twist::AppliesUnknownTasks) => step.checkpoint.applied.clear(),
            (Err(Error::NotFound { .. }), Twist::CommitsWithoutItsParent) => {
                step.parent = None;
                step.checkpoint.applied.clear();
            }
            _ => return done,
        }
        self.inner.commit(step).await
    }

    async fn flush(&self, thread: &ThreadId) -> Result<()> {
        self.inner.flush(thread).await
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        let mut paths = match self.inner.delta_history(at, channels, reach).await {
            Err(Error::NotFound { .. }) if self.is(Twist::HasAHistoryOfTheUnknown) => {
                super::nothing(channels)
            }
            paths => paths?,
        };
        if self.is(Twist::SeedsTheUnwrittenWithNull) {
            let null = ChannelValue::from_json(&serde_json::Value::Null)?;
            let version = Version { counter: 1, random: 1 };
            let seed = Seed { checkpoint: at.id, value: null, version };
            for path in paths.values_mut() {
                path.seed.get_or_insert_with(|| seed.clone());
            }
        }
        Ok(paths)
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        if self.is(Twist::DeletesByNamespace) {
            let is_root = |place: &LocalKey| place.0.as_str().is_empty();
            self.remove(thread, is_root).await?;
            // Until another call has begun the thread, if any does.
            for _ in 0..500 {
                yield_now().await;
                let image = self.inner.read_thread(thread).await?;
                if image.checkpoints.keys().any(|place| !is_root(place)) {
                    break;
                }
            }
            return self.remove(thread, |place| !is_root(place)).await;
        }
        let image = self.inner.read_thread(thread).await?;
        if self.is(Twist::RefusesToDeleteTheUnknown) && image.checkpoints.is_empty() {
            return Err(Error::InvalidInput(format!("there is no thread {thread}")));
        }
        if self.is(Twist::LeavesNestedRows) {
            let nested = image.checkpoints.into_values().filter(|tuple| !tuple.namespace.as_str().is_empty());
            self.left().extend(nested.map(|tuple| (tuple.key(), tuple.writes)));
        }
        self.inner.delete_thread(thread).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        let mut found = self.inner.threads(after, limit).await?;
        if self.is(Twist::ListsThreadsWithARoot) {
            let mut rooted = Vec::new();
            for thread in found {
                rooted.extend(self.inner.get(&CheckpointSelector::head(&thread)).await?.map(|_| thread));
            }
            found = rooted;
        }
        Ok(found)
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        let mut image = self.inner.read_thread(thread).await?;
        if self.is(Twist::GivesTheUnknownARevision) && image.checkpoints.is_empty() {
            image.revision = Revision::new(b"unknown".to_vec());
        }
        Ok(image)
    }

    async fn rewrite_thread(
        &self,
        thread: &ThreadId,
        expected: &Revision,
        mut rewrite: Rewrite,
    ) -> Result<()> {
        if self.is(Twist::TakesNothingForDone) && rewrite.is_empty() && *expected == Revision::absent() {
            return Ok(());
        }
        if self.is(Twist::ForgetsWhatIsPut) && !rewrite.remove.is_empty() {
            rewrite.put.clear();
        }
        let image = self.inner.read_thread(thread).await?;
        let is_there = |tuple: &CheckpointTuple| stored(&image, tuple) == Some(tuple);
        if self.is(Twist::SkipsWhatIsThere)
            && image.revision == *expected
            && rewrite.remove.is_empty()
            && rewrite.put.iter().all(is_there)
        {
            return Ok(());
        }
        if self.is(Twist::PutsOnlyWhatIsThere) && !image.checkpoints.is_empty() {
            rewrite.put.retain(|tuple| stored(&image, tuple).is_some());
        }
        if self.is(Twist::KeepsKnownRows) {
            for tuple in &mut rewrite.put {
                let known = stored(&image, tuple).map_or(&[][..], |known| &known.writes);
                for row in &mut tuple.writes {
                    if let Some(known) = known.iter().find(|known| known.task == row.task) {
                        *row = known.clone();
                    }
                }
            }
        }
        self.inner.rewrite_thread(thread, expected, rewrite).await
    }

    fn capabilities(&self) -> Capabilities {
        let capabilities = self.inner.capabilities();
        let secret = self.is(Twist::SharesInSecret);
        Capabilities { shared_elements: capabilities.shared_elements && !secret, ..capabilities }
    }
}

//! A saver with one document for each thread, as over a store of documents or a directory of files: each change reads it,
//! changes it and stores it again. With one lapse of its author.

mod shelf;
mod shown;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use threadkeep::checkpoint::{CheckpointKey, CheckpointTuple, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId, Namespace, ThreadId};
use threadkeep::saver::{
    Capabilities, CheckpointSelector, DeltaHistory, ListQuery, LocalKey, Outline, Revision, Rewrite, Saver,
    StepCommit, ThreadImage, fallback,
};
use threadkeep::{Error, Result};
use threadkeep_conformance::{BoxError, Claim, Factory, Failing};
use tokio::task::yield_now;

use self::shelf::{Document, Shelf, whole};
use super::Lapse;

/// The most that a saver shows which asks for one page only.
const PAGE: usize = 1_000;

/// Creates stores with one lapse.
pub(crate) struct Loners(pub(crate) Lapse);

#[async_trait]
impl Factory for Loners {
    type Storage = Arc<Shelf>;

    fn name(&self) -> &'static str {
        "loner"
    }

    fn claims(&self) -> &'static [Claim] {
        &[Claim::FailOperations]
    }

    async fn create(&self) -> Result<Arc<Shelf>, BoxError> {
        Ok(Arc::default())
    }

    async fn open(&self, place: &Arc<Shelf>) -> Result<Arc<dyn Saver>, BoxError> {
        Ok(Arc::new(Loner::new(place, self.0, None)))
    }

    /// Storing a document is the one operation of each change.
    async fn open_failing(&self, place: &Arc<Shelf>, nth: u32) -> Result<Failing, BoxError> {
        let failed = Arc::new(AtomicBool::new(false));
        let failing = (nth == 0).then(|| failed.clone());
        Ok(Failing { saver: Arc::new(Loner::new(place, self.0, failing)), failed })
    }
}

/// What a change is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Put,
    Commit(Namespace),
    Rewrite,
    Delete,
}

/// A path that was read: of which checkpoint and channels, and how far back.
type Asked = (CheckpointKey, BTreeSet<ChannelName>, Option<CheckpointId>);

struct Inner {
    shelf: Arc<Shelf>,
    lapse: Lapse,
    /// Set when the operation that should fail has failed.
    failing: Option<Arc<AtomicBool>>,
    count: AtomicU64,
    lock: tokio::sync::Mutex<()>,
    known: Mutex<HashSet<CheckpointKey>>,
    paths: Mutex<HashMap<Asked, DeltaHistory>>,
    /// For [`Lapse::ShowsWhatWasBefore`]: what its thread was before the change that failed.
    before: Mutex<Option<Document>>,
}

#[derive(Clone)]
struct Loner(Arc<Inner>);

impl Loner {
    fn new(shelf: &Arc<Shelf>, lapse: Lapse, failing: Option<Arc<AtomicBool>>) -> Self {
        Self(Arc::new(Inner {
            shelf: shelf.clone(),
            lapse,
            failing,
            count: AtomicU64::default(),
            lock: tokio::sync::Mutex::default(),
            known: Mutex::default(),
            paths: Mutex::default(),
            before: Mutex::default(),
        }))
    }

    fn is(&self, lapse: Lapse) -> bool {
        self.0.lapse == lapse
    }

    /// Whether another change may come between the reading and the storing of a document.
    fn locks_too_little(&self) -> bool {
        matches!(
            self.0.lapse,
            Lapse::LocksWhatExists
                | Lapse::CopiesWithoutALock
                | Lapse::LocksItsRewrites
                | Lapse::LocksItsHandle
                | Lapse::PutsWithoutALock
                | Lapse::PutsUnderAnotherLock
                | Lapse::RewritesUnderAnotherLock
                | Lapse::DeletesWithoutALock
        )
    }

    fn shelf(&self) -> &Shelf {
        &self.0.shelf
    }

    fn thread(&self, thread: &ThreadId) -> ThreadId {
        match thread.as_str().char_indices().nth(255) {
            Some((end, _)) if self.is(Lapse::CutsIds) => thread.as_str()[..end].into(),
            _ => thread.clone(),
        }
    }

    fn namespace(&self, namespace: &Namespace) -> Namespace {
        match self.0.lapse {
            Lapse::FoldsNamespaces => namespace.as_str().to_lowercase().as_str().into(),
            Lapse::TrimsNamespaces => namespace.as_str().trim_end().into(),
            _ => namespace.clone(),
        }
    }

    fn head(&self, document: &Document, namespace: &Namespace) -> Option<CheckpointId> {
        match self.0.lapse {
            Lapse::KeepsTheHead => document.heads.get(namespace).copied(),
            Lapse::ListsByInsertion => {
                document.order.iter().rev().find(|place| place.0 == *namespace).map(|place| place.1)
            }
            _ => document.newest(namespace),
        }
    }

    fn revision(&self, document: &Document) -> Revision {
        if document.checkpoints.is_empty() {
            return Revision::absent();
        }
        match self.0.lapse {
            Lapse::CountsWhatIsThere => {
                let rows: usize = document.tuples().map(|tuple| tuple.writes.len()).sum();
                Revision::new(format!("{} {rows}", document.checkpoints.len()))
            }
            Lapse::TakesTheTime => Revision::new((document.revision / 8 + 1).to_be_bytes()),
            _ => Revision::new(document.revision.to_be_bytes()),
        }
    }

    fn next_revision(&self, before: &Document) -> u64 {
        match self.0.lapse {
            Lapse::CountsInTheThread => before.revision + 1,
            Lapse::CountsInTheHandle => self.0.count.fetch_add(1, Ordering::SeqCst) + 1,
            _ => self.shelf().count.fetch_add(1, Ordering::SeqCst) + 1,
        }
    }

    /// The lock that such a change takes.
    async fn lock(&self, thread: &ThreadId, kind: &Kind) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        let shelf = self.shelf();
        let lock = match (self.0.lapse, kind) {
            (Lapse::PutsWithoutALock, Kind::Put) | (Lapse::DeletesWithoutALock, Kind::Delete) => return None,
            (Lapse::LocksWhatExists, Kind::Commit(namespace))
                if shelf.read(thread).newest(namespace).is_none() =>
            {
                return None;
            }
            (Lapse::CopiesWithoutALock, Kind::Rewrite) if shelf.read(thread).checkpoints.is_empty() => {
                return None;
            }
            (Lapse::LeavesItsLock, _) => {
                while shelf.taken.swap(true, Ordering::SeqCst) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                return None;
            }
            (Lapse::LocksItsHandle, _) | (Lapse::LocksItsRewrites, Kind::Rewrite) => &self.0.lock,
            (Lapse::PutsUnderAnotherLock, Kind::Put) | (Lapse::RewritesUnderAnotherLock, Kind::Rewrite) => {
                &shelf.other_lock
            }
            _ => &shelf.lock,
        };
        Some(lock.lock().await)
    }

    /// Changes a document. It goes on if the caller is dropped, with one exception.
    async fn change(
        &self,
        thread: &ThreadId,
        kind: Kind,
        change: impl FnOnce(&Loner, &mut Document) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        if matches!(kind, Kind::Rewrite | Kind::Delete) {
            whole(&self.0.paths).clear();
        }
        if kind == Kind::Delete || kind == Kind::Rewrite && !self.is(Lapse::RemembersWhatWasRemoved) {
            whole(&self.0.known).retain(|key| key.thread != *thread);
        }
        let (of, own) = (self.clone(), thread.clone());
        let whole = async move {
            let _lock = of.lock(&own, &kind).await;
            let changed = of.changed(&own, &kind, change).await;
            of.shelf().taken.store(false, Ordering::SeqCst);
            changed
        };
        if self.is(Lapse::LeavesItsLock) {
            return whole.await;
        }
        let lost =
            |error: tokio::task::JoinError| Error::InDoubt { saver: "loner", reason: error.to_string() };
        tokio::spawn(whole).await.map_err(lost)?
    }

    async fn changed(
        &self,
        thread: &ThreadId,
        kind: &Kind,
        change: impl FnOnce(&Loner, &mut Document) -> Result<()>,
    ) -> Result<()> {
        if whole(&self.0.before).is_some() {
            return Err(Error::Unavailable { saver: "loner", reason: "an earlier change failed".to_owned() });
        }
        let before = self.shelf().read(thread);
        let mut after = before.clone();
        change(self, &mut after)?;
        if self.locks_too_little() {
            self.shelf().pause(thread).await;
        } else if self.is(Lapse::LeavesItsLock) {
            // Its caller may be dropped here.
            yield_now().await;
        }
        if after.is_like(&before) {
            return Ok(());
        }
        after.revision = self.next_revision(&before);
        for namespace in after.checkpoints.keys().map(|place| place.0.clone()).collect::<BTreeSet<_>>() {
            let newest = after.newest(&namespace);
            after.heads.extend(newest.map(|id| (namespace, id)));
        }
        let fails = self.0.failing.as_ref().is_some_and(|failed| !failed.swap(true, Ordering::SeqCst));
        if fails && self.is(Lapse::SwallowsFailures) {
            return Ok(());
        }
        if fails && self.is(Lapse::ShowsWhatWasBefore) {
            self.store(thread, kind, &before, after).await;
            *whole(&self.0.before) = Some(before);
            return Err(Error::InDoubt { saver: "loner", reason: "arranged".to_owned() });
        }
        if !fails || self.is(Lapse::DeniesWhatItStored) {
            self.store(thread, kind, &before, after).await;
        }
        if fails {
            return Err(Error::Unavailable { saver: "loner", reason: "arranged".to_owned() });
        }
        Ok(())
    }

    /// Stores a document, in one change or in several.
    async fn store(&self, thread: &ThreadId, kind: &Kind, before: &Document, after: Document) {
        let mut between = before.clone();
        let gone = before.checkpoints.keys().filter(|place| !after.checkpoints.contains_key(*place));
        match (self.0.lapse, kind) {
            (Lapse::RewritesInPieces, Kind::Rewrite) => gone.for_each(|place| between.remove(place)),
            (Lapse::DeletesInPieces, Kind::Delete) => gone.take(2).for_each(|place| between.remove(place)),
            (Lapse::CommitsRowsFirst, Kind::Commit(_)) => {
                between = after.clone();
                let new = after.checkpoints.keys().filter(|place| !before.checkpoints.contains_key(*place));
                new.for_each(|place| between.remove(place));
            }
            _ => return self.shelf().store(thread, after),
        }
        self.shelf().store(thread, between);
        // Until others have looked at it in every way, if they do.
        let reads = || self.shelf().reads.load(Ordering::SeqCst);
        let before = reads();
        for _ in 0..1_000 {
            yield_now().await;
            if reads() > before + 24 {
                break;
            }
        }
        self.shelf().store(thread, after);
    }
}

#[async_trait]
impl Saver for Loner {
    async fn get(&self, at: &CheckpointSelector) -> Result<Option<CheckpointTuple>> {
        let mut document = self.shelf().read(&self.thread(&at.thread));
        let namespace = self.namespace(&at.namespace);
        let Some(id) = at.id.or_else(|| self.head(&document, &namespace)) else { return Ok(None) };
        if at.id.is_none() && self.is(Lapse::ReadsTheHeadInTwo) {
            self.shelf().pause_until_gone(&at.thread, &namespace, id).await;
            document = self.shelf().read(&at.thread);
        }
        let Some(mut tuple) = document.get(&namespace, id).cloned() else { return Ok(None) };
        if self.is(Lapse::ReadsMetadataLast) {
            self.shelf().pause(&at.thread).await;
            let document = self.shelf().read(&at.thread);
            if let Some(newer) = document.get(&namespace, id) {
                tuple.metadata = newer.metadata.clone();
            }
        }
        Ok(Some(at.load.of(self.shown(tuple))))
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<CheckpointTuple>> {
        let document = if self.is(Lapse::ListsFromAReplica) {
            whole(&self.shelf().replica).get(&query.thread).cloned().unwrap_or_default()
        } else {
            self.shelf().read(&query.thread)
        };
        Ok(self.listed(&document, query))
    }

    async fn put_writes(&self, at: &CheckpointKey, task: &TaskWrites) -> Result<()> {
        let (key, task) =
            (CheckpointKey { namespace: self.namespace(&at.namespace), ..at.clone() }, task.clone());
        let put = move |of: &Loner, document: &mut Document| {
            let mut tuple = document
                .get(&key.namespace, key.id)
                .cloned()
                .ok_or_else(|| Error::NotFound { thread: key.thread.clone(), checkpoint: key.id })?;
            let stored = |tuple: &CheckpointTuple| tuple.writes.iter().any(|row| row.task == task.task);
            if of.is(Lapse::StoresATaskOnce) && !stored(&tuple) && document.tuples().any(stored) {
                return Ok(());
            }
            if tuple.put(&task, || document.tuples().any(|child| child.has_applied(&key, task.task))) {
                let place = (key.namespace.clone(), key.id);
                // Rows are kept beside the checkpoint, which stays where it is in the order.
                document.checkpoints.insert(place, Arc::new(tuple));
            }
            Ok(())
        };
        self.change(&at.thread, Kind::Put, put).await
    }

    async fn commit(&self, mut step: StepCommit) -> Result<CheckpointKey> {
        step.validate()?;
        let given = step.key();
        step.thread = self.thread(&step.thread);
        step.namespace = self.namespace(&step.namespace);
        let key = step.key();
        let remembers = matches!(
            self.0.lapse,
            Lapse::RemembersTooEarly | Lapse::RemembersForItself | Lapse::RemembersWhatWasRemoved
        );
        if remembers && whole(&self.0.known).contains(&key) {
            return Ok(given);
        }
        let own = key.clone();
        let commit = move |of: &Loner, document: &mut Document| {
            if document.get(&own.namespace, own.id).is_some() {
                return Ok(());
            }
            let parent = step.parent.and_then(|id| document.get(&own.namespace, id)).cloned();
            let above = step.parent.map(|id| CheckpointKey { id, ..own.clone() });
            let applied = |task| {
                above.iter().any(|parent| document.tuples().any(|child| child.has_applied(parent, task)))
            };
            let head = of.head(document, &own.namespace);
            let (new, parent) = fallback::commit(step, head, parent, applied)?;
            if let Some(parent) = parent {
                let place = (parent.namespace.clone(), parent.checkpoint.id);
                document.checkpoints.insert(place, Arc::new(parent));
            }
            document.put(new);
            if of.is(Lapse::RemembersTooEarly) {
                whole(&of.0.known).insert(own);
            }
            Ok(())
        };
        self.change(&key.thread, Kind::Commit(key.namespace.clone()), commit).await?;
        if remembers {
            whole(&self.0.known).insert(key);
        }
        Ok(given)
    }

    async fn flush(&self, _: &ThreadId) -> Result<()> {
        Ok(())
    }

    async fn delta_history(
        &self,
        at: &CheckpointKey,
        channels: &BTreeSet<ChannelName>,
        reach: Option<CheckpointId>,
    ) -> Result<DeltaHistory> {
        let asked = (at.clone(), channels.clone(), reach);
        if let Some(known) = whole(&self.0.paths).get(&asked).filter(|_| self.is(Lapse::CachesPaths)) {
            return Ok(known.clone());
        }
        let at = &CheckpointKey { namespace: self.namespace(&at.namespace), ..at.clone() };
        let mut image = self.shelf().read(&at.thread).image(&at.thread);
        let mut paths = DeltaHistory::new();
        if self.is(Lapse::ReadsChannelByChannel) {
            for channel in channels {
                paths.extend(fallback::image_history(&image, at, &[channel.clone()].into(), reach)?);
                self.shelf().pause(&at.thread).await;
                image = self.shelf().read(&at.thread).image(&at.thread);
            }
        }
        if paths.is_empty() {
            paths = fallback::image_history(&image, at, channels, reach)?;
        }
        if self.is(Lapse::WalksAPage) {
            for path in paths.values_mut().filter(|path| path.steps.len() > PAGE) {
                path.seed = None;
                path.steps.drain(..path.steps.len() - PAGE);
            }
        }
        whole(&self.0.paths).insert(asked, paths.clone());
        Ok(paths)
    }

    async fn delete_thread(&self, thread: &ThreadId) -> Result<()> {
        let delete = |of: &Loner, document: &mut Document| {
            if of.is(Lapse::DeletesAPage) && document.checkpoints.len() > PAGE {
                let gone: Vec<_> = document.checkpoints.keys().take(PAGE).cloned().collect();
                for place in &gone {
                    document.remove(place);
                }
            } else {
                *document = Document::default();
            }
            Ok(())
        };
        self.change(thread, Kind::Delete, delete).await
    }

    async fn threads(&self, after: Option<&ThreadId>, limit: usize) -> Result<Vec<ThreadId>> {
        let mut found: Vec<ThreadId> = whole(&self.shelf().documents).keys().cloned().collect();
        if self.is(Lapse::ListsThreadByThread) {
            let mut there = Vec::new();
            for thread in found {
                self.shelf().pause(&thread).await;
                there.extend((!self.shelf().read(&thread).checkpoints.is_empty()).then_some(thread));
            }
            found = there;
        }
        if self.is(Lapse::SortsByUtf16) {
            let utf16 = |thread: &ThreadId| thread.as_str().encode_utf16().collect::<Vec<_>>();
            found.sort_by_key(utf16);
            found.retain(|thread| after.is_none_or(|after| utf16(thread) > utf16(after)));
        } else {
            found.retain(|thread| after.is_none_or(|after| thread > after));
        }
        if self.is(Lapse::LimitsBeforeDistinct) {
            let documents = whole(&self.shelf().documents);
            let count = |thread| documents.get(thread).map_or(0, |document| document.checkpoints.len());
            let rows = found.iter().flat_map(|thread| std::iter::repeat_n(thread, count(thread))).take(limit);
            let distinct: BTreeSet<ThreadId> = rows.cloned().collect();
            drop(documents);
            found = distinct.into_iter().collect();
        }
        found.truncate(if self.is(Lapse::ListsAPageOfThreads) { limit.min(PAGE) } else { limit });
        Ok(found)
    }

    async fn read_thread(&self, thread: &ThreadId) -> Result<ThreadImage> {
        let mut document = self.shelf().read(thread);
        if let Some(before) = &*whole(&self.0.before) {
            document.clone_from(before);
        }
        let mut image = document.image(thread);
        image.checkpoints =
            image.checkpoints.into_iter().map(|(place, tuple)| (place, self.shown(tuple))).collect();
        if self.is(Lapse::ReadsAPage) {
            image.checkpoints = image.checkpoints.into_iter().take(PAGE).collect();
        }
        if self.is(Lapse::ReadsTheRevisionLast) {
            self.shelf().pause(thread).await;
            document = self.shelf().read(thread);
        }
        image.revision = self.revision(&document);
        Ok(image)
    }

    async fn rewrite_thread(&self, thread: &ThreadId, expected: &Revision, rewrite: Rewrite) -> Result<()> {
        let (expected, of, mut rewrite) = (expected.clone(), thread.clone(), rewrite);
        rewrite.remove = rewrite.remove.iter().map(|(of, id)| (self.namespace(of), *id)).collect();
        let change = move |own: &Loner, document: &mut Document| {
            if own.revision(document) != expected {
                return Err(Error::Stale { thread: of });
            }
            let outlines = document.checkpoints.iter();
            let outlines = outlines.map(|(place, tuple)| (place.clone(), Outline::of(tuple)));
            rewrite.check(&of, outlines.collect())?;
            let mut gone = rewrite.remove;
            if own.is(Lapse::RemovesByPrefix) {
                let begins = |place: &LocalKey, (of, id): &LocalKey| {
                    place.1 == *id && !of.as_str().is_empty() && place.0.as_str().starts_with(of.as_str())
                };
                let more =
                    document.checkpoints.keys().filter(|place| gone.iter().any(|by| begins(place, by)));
                gone = more.chain(&gone).cloned().collect();
            }
            let emptied = document.checkpoints.is_empty();
            for place in &gone {
                document.remove(place);
            }
            let put = rewrite.put.clone();
            let most = if own.is(Lapse::RewritesAPage) { PAGE } else { usize::MAX };
            for mut tuple in rewrite.put.into_iter().take(most) {
                let key = tuple.key();
                if own.is(Lapse::CopiesWithoutPending) && emptied {
                    tuple.writes.retain(|row| put.iter().any(|child| child.has_applied(&key, row.task)));
                }
                if own.is(Lapse::SortsRows) {
                    tuple.writes.sort_by_key(|row| row.task);
                }
                document.put(tuple);
            }
            Ok(())
        };
        self.change(thread, Kind::Rewrite, change).await
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { name: "loner", durable: false, shared_elements: false }
    }
}

//! Where the documents are.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::{CheckpointId, Namespace, ThreadId};
use threadkeep::saver::{LocalKey, ThreadImage};
use tokio::task::yield_now;

/// A thread.
#[derive(Clone, Default)]
pub(super) struct Document {
    pub(super) checkpoints: BTreeMap<LocalKey, Arc<CheckpointTuple>>,
    /// The places of the checkpoints, the one that was stored last at the end.
    pub(super) order: Vec<LocalKey>,
    pub(super) heads: BTreeMap<Namespace, CheckpointId>,
    pub(super) revision: u64,
}

impl Document {
    pub(super) fn get(&self, namespace: &Namespace, id: CheckpointId) -> Option<&CheckpointTuple> {
        self.checkpoints.get(&(namespace.clone(), id)).map(|tuple| &**tuple)
    }

    pub(super) fn put(&mut self, tuple: CheckpointTuple) {
        let place = (tuple.namespace.clone(), tuple.checkpoint.id);
        self.order.retain(|other| *other != place);
        self.order.push(place.clone());
        self.checkpoints.insert(place, Arc::new(tuple));
    }

    pub(super) fn remove(&mut self, place: &LocalKey) {
        self.order.retain(|other| other != place);
        self.checkpoints.remove(place);
    }

    pub(super) fn newest(&self, namespace: &Namespace) -> Option<CheckpointId> {
        let of = |(place, _): &(&LocalKey, &Arc<CheckpointTuple>)| place.0 == *namespace;
        self.checkpoints.iter().filter(of).map(|(place, _)| place.1).next_back()
    }

    pub(super) fn tuples(&self) -> impl Iterator<Item = &CheckpointTuple> {
        self.checkpoints.values().map(|tuple| &**tuple)
    }

    pub(super) fn is_like(&self, other: &Self) -> bool {
        let pairs = self.checkpoints.iter().zip(&other.checkpoints);
        self.checkpoints.len() == other.checkpoints.len()
            && pairs.into_iter().all(|((a, one), (b, two))| a == b && Arc::ptr_eq(one, two))
    }

    pub(super) fn image(&self, thread: &ThreadId) -> ThreadImage {
        let tuples = self.checkpoints.iter().map(|(place, tuple)| (place.clone(), (**tuple).clone()));
        ThreadImage { checkpoints: tuples.collect(), ..ThreadImage::absent(thread) }
    }
}

/// What all handles share.
#[derive(Default)]
pub(crate) struct Shelf {
    pub(super) documents: Mutex<BTreeMap<ThreadId, Document>>,
    /// The documents before the last change.
    pub(super) replica: Mutex<BTreeMap<ThreadId, Document>>,
    pub(super) count: AtomicU64,
    pub(super) reads: AtomicU64,
    pauses: AtomicUsize,
    pub(super) lock: tokio::sync::Mutex<()>,
    pub(super) other_lock: tokio::sync::Mutex<()>,
    /// For [`Lapse::LeavesItsLock`].
    pub(super) taken: AtomicBool,
}

pub(super) fn whole<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shelf {
    pub(super) fn read(&self, thread: &ThreadId) -> Document {
        self.reads.fetch_add(1, Ordering::SeqCst);
        whole(&self.documents).get(thread).cloned().unwrap_or_default()
    }

    pub(super) fn store(&self, thread: &ThreadId, document: Document) {
        let mut documents = whole(&self.documents);
        whole(&self.replica).clone_from(&documents);
        if document.checkpoints.is_empty() {
            documents.remove(thread);
        } else {
            documents.insert(thread.clone(), document);
        }
    }

    /// Waits until another call has changed the thread, if any does.
    pub(super) async fn pause(&self, thread: &ThreadId) {
        let revision = || whole(&self.documents).get(thread).map(|document| document.revision);
        let before = revision();
        self.pause_until(|| revision() != before).await;
    }

    /// Waits until another call has removed the checkpoint, if any does.
    pub(super) async fn pause_until_gone(&self, thread: &ThreadId, namespace: &Namespace, id: CheckpointId) {
        let is_gone = |document: &Document| document.get(namespace, id).is_none();
        self.pause_until(|| whole(&self.documents).get(thread).is_none_or(is_gone)).await;
    }

    /// Waits until something is so, if it ever is. Patience differs from call to call: readers in step would all be
    /// between two reads whenever a change comes that waits for one of them. One in four outlasts what others do
    /// meanwhile.
    async fn pause_until(&self, is_so: impl Fn() -> bool) {
        const PATIENCE: [usize; 4] = [200, 400, 600, 5_000];
        let number = self.pauses.fetch_add(1, Ordering::SeqCst);
        for _ in 0..PATIENCE[number % PATIENCE.len()] {
            yield_now().await;
            if is_so() {
                break;
            }
        }
    }
}

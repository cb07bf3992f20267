//! What is remembered of threads, so that a step looks only at what it adds: the last large objects in their metadata, and where
//! the elements of their last lists are.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use threadkeep::id::{ChannelName, Namespace, Version};
use threadkeep::metadata::Entries;
use threadkeep_layout::Shape;

use crate::keys::ThreadNumber;
use crate::record::Mark;

/// The number of threads of which something is remembered.
const THREADS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(255);

/// A stored object.
#[derive(Clone)]
pub(crate) struct Known {
    pub(crate) entries: Entries,
    pub(crate) shape: Shape,
}

/// What a step stored of a thread.
#[derive(Default)]
pub(crate) struct Stored {
    /// Large objects of metadata, by their keys.
    pub(crate) objects: HashMap<String, Known>,
    /// The last list of each channel: its version, and where its elements are.
    pub(crate) lists: HashMap<(Namespace, ChannelName), (Version, Shape)>,
}

/// What is remembered of the threads that were written last. It counts only while the thread has the mark that it was given
/// with it: any other write, also one that failed in the end or that another handle made, draws another one.
pub(crate) struct Memo(Mutex<LruCache<ThreadNumber, (Mark, Stored)>>);

impl Default for Memo {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(THREADS)))
    }
}

impl Memo {
    /// The object under a key of metadata.
    pub(crate) fn object(&self, thread: ThreadNumber, mark: Mark, key: &str) -> Option<Known> {
        let memo = self.lock();
        let (_, stored) = memo.peek(&thread).filter(|(at, _)| *at == mark)?;
        stored.objects.get(key).cloned()
    }

    /// Where the elements of a channel's list are, if its last one has this version.
    pub(crate) fn list(
        &self,
        thread: ThreadNumber,
        mark: Mark,
        channel: &(Namespace, ChannelName),
        version: Version,
    ) -> Option<Shape> {
        let memo = self.lock();
        let (_, stored) = memo.peek(&thread).filter(|(at, _)| *at == mark)?;
        let (_, shape) = stored.lists.get(channel).filter(|(of, _)| *of == version)?;
        Some(shape.clone())
    }

    /// A thread has another mark now, and this is stored of it besides what was there.
    pub(crate) fn note(&self, thread: ThreadNumber, (from, to): (Mark, Mark), more: Stored) {
        let mut memo = self.lock();
        match memo.get_mut(&thread) {
            Some((at, stored)) if *at == from => {
                *at = to;
                stored.objects.extend(more.objects);
                stored.lists.extend(more.lists);
            }
            _ => drop(memo.put(thread, (to, more))),
        }
    }

    /// Elements of a thread may be deleted.
    pub(crate) fn forget(&self, thread: ThreadNumber) {
        self.lock().pop(&thread);
    }

    // What a panic leaves here is whole.
    fn lock(&self) -> MutexGuard<'_, LruCache<ThreadNumber, (Mark, Stored)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

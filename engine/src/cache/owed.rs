//! Purges that a call owes.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::id::ThreadId;

/// The threads that a call had not purged, or looked at, when its caller gave it up. The next call purges them: that is
/// always right, and nobody else would.
#[derive(Default)]
pub(super) struct Owed(Mutex<BTreeSet<ThreadId>>);

impl Owed {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<ThreadId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call owes a purge of a thread, until that is [settled](Debt::settled).
    pub(super) fn by_call(&self, thread: &ThreadId) -> Debt<'_> {
        Debt { owed: self, thread: Some(thread.clone()) }
    }

    /// One of the threads, which the caller purges now.
    pub(super) fn take_one(&self) -> Option<ThreadId> {
        self.lock().pop_first()
    }
}

/// What a call under way owes.
pub(super) struct Debt<'o> {
    owed: &'o Owed,
    /// `None` once it is settled.
    thread: Option<ThreadId>,
}

impl Debt<'_> {
    /// The cache was asked to purge the thread, or there is no reason to. It may have lost that: see
    /// [`HistoryCache`](super::HistoryCache).
    pub(super) fn settled(mut self) {
        self.thread = None;
    }
}

impl Drop for Debt<'_> {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.owed.lock().insert(thread);
        }
    }
}

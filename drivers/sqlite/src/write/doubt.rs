//! Commands whose transaction failed at commit: whether they took effect is unknown until the file is read again.
//!
//! Such a command stays in doubt: if it is repeated and the writer refuses to write, the *repeat* wrote nothing, but
//! the first attempt may be stored. "Nothing was written" would be wrong.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use threadkeep::Error;
use threadkeep::checkpoint::CheckpointKey;
use threadkeep::id::{TaskId, ThreadId};
use threadkeep::saver::Revision;

use super::commit::Work;
use crate::error::in_doubt;

/// The identity of a command, to recognize a repeat.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Identity {
    Commit(CheckpointKey),
    PutWrites(CheckpointKey, TaskId),
    Delete(ThreadId),
    Rewrite(ThreadId, Revision),
}

impl Identity {
    /// None for what may simply be repeated.
    fn of(work: &Work) -> Option<Self> {
        match work {
            Work::Commit(step) => Some(Self::Commit(step.key())),
            Work::PutWrites(at, task) => Some(Self::PutWrites(at.clone(), task.task)),
            Work::DeleteThread(thread) => Some(Self::Delete(thread.clone())),
            Work::Rewrite(thread, expected, _) => Some(Self::Rewrite(thread.clone(), expected.clone())),
            Work::Name(naming) => Some(Self::Rewrite(naming.thread.clone(), naming.expected.clone())),
            Work::Stage(_)
            | Work::Copy(_)
            | Work::Discard(_)
            | Work::Clear(_)
            | Work::Sweep(_)
            | Work::Tidy(_)
            | Work::Dictionary(..)
            | Work::Flush => None,
        }
    }
}

/// The commands that are in doubt.
#[derive(Debug, Default)]
pub(crate) struct Doubt(Mutex<HashSet<Identity>>);

impl Doubt {
    /// Adds commands whose transaction failed at commit.
    pub(crate) fn add<'a>(&self, commands: impl Iterator<Item = &'a Work>) {
        self.lock().extend(commands.filter_map(Identity::of));
    }

    /// Clears the doubt after a later commit, which overwrote what the failed ones left in the log.
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    /// The error of a command, which is in doubt if an earlier attempt at it is.
    pub(crate) fn error(&self, work: &Work, error: Error) -> Error {
        self.of(|| Identity::of(work), error)
    }

    /// The error of a rewrite, also of one that fails before the command that is in doubt: it looks first at its thread, and
    /// a long one is written in pieces.
    pub(crate) fn of_rewrite(&self, thread: &ThreadId, expected: &Revision, error: Error) -> Error {
        self.of(|| Some(Identity::Rewrite(thread.clone(), expected.clone())), error)
    }

    fn of(&self, identity: impl FnOnce() -> Option<Identity>, error: Error) -> Error {
        let doubtful = self.lock();
        match error {
            Error::Unavailable { reason, .. }
                if !doubtful.is_empty()
                    && identity().is_some_and(|identity| doubtful.contains(&identity)) =>
            {
                in_doubt(format!("an earlier attempt may have been stored: {reason}"))
            }
            error => error,
        }
    }

    // Each change is whole before anything can fail, so a poisoned lock guards nothing half done.
    fn lock(&self) -> MutexGuard<'_, HashSet<Identity>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

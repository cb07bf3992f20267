//! Deleting the rows of a thread piece by piece, so that other commands get their turn in between.
//!
//! The first transaction takes the thread out of the directory: from then on no reader finds it. If a process ends
//! before the last row is gone, the next one that opens the database goes on. Rows on a damaged page cannot be deleted:
//! those of their thread stay, and the next deletion tries them again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use threadkeep::{Error, Result};

use crate::rows::directory::{self, ThreadKey};
use crate::rows::{checkpoints, element};
use crate::sql::Db;
use crate::write::commit::{Work, WriterState};
use crate::write::turn::Turns;

/// Rows in a piece, for each checkpoint in a piece of a new thread: deleting is that much quicker.
const ROWS: usize = 4;
/// The most bytes of elements in a piece, except for a single one with more.
const BYTES: usize = 1 << 20;
/// How long writers of other processes have after each piece. They ask for the lock once a millisecond.
const PAUSE: Duration = if cfg!(test) { Duration::ZERO } else { Duration::from_millis(3) };

/// Lets writers of other processes in between two pieces. They cannot queue for the lock: without a pause, the one that
/// released it has it again before they ask.
pub(crate) async fn pause() {
    // The timer of the runtime may not be enabled. An error means that the runtime is being shut down.
    let _ = tokio::task::spawn_blocking(|| std::thread::sleep(PAUSE)).await;
}

/// Which of the deleted threads is next, and which one it was.
#[derive(Debug, Clone, Default)]
pub(crate) struct Clearing {
    /// Threads up to this one are left as they are.
    after: Option<ThreadKey>,
    /// The thread whose rows were to be deleted, also if that failed; 0 if there was none.
    met: Arc<AtomicU32>,
}

impl Clearing {
    fn after(thread: Option<ThreadKey>) -> Self {
        Self { after: thread, met: Arc::default() }
    }

    fn met(&self) -> Option<ThreadKey> {
        Some(self.met.load(Ordering::Acquire)).filter(|key| *key != 0)
    }
}

/// Orders a command if it is dropped: for futures that are given up.
pub(crate) struct Unfinished<'a> {
    pub(crate) turns: &'a Arc<Turns>,
    pub(crate) order: Option<Work>,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Some(work) = self.order.take() {
            self.turns.order(work);
        }
    }
}

impl Turns {
    /// Deletes what is left of deleted threads. Goes on if the caller stops waiting.
    pub(crate) async fn clear(self: &Arc<Self>) {
        if self.remains() {
            // An error means that the runtime is being shut down.
            let _ = tokio::spawn(self.clone().clear_all()).await;
        }
    }

    /// [`Self::clear`], without waiting for it. Does nothing outside a runtime.
    pub(crate) fn begin_to_clear(self: &Arc<Self>) {
        if let (true, Ok(runtime)) = (self.remains(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(self.clone().clear_all());
        }
    }

    /// Executes a command, after which rows of deleted threads may be left, without waiting for it, and deletes those.
    /// Does nothing outside a runtime.
    pub(crate) fn order(self: &Arc<Self>, work: Work) {
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let turns = self.clone();
            runtime.spawn(async move {
                if turns.write(work).await.is_ok() {
                    turns.clear_all().await;
                }
            });
        }
    }

    async fn clear_all(self: Arc<Self>) {
        let mut after = None;
        while self.remains() {
            let clearing = Clearing::after(after);
            let cleared = self.write(Work::Clear(clearing.clone())).await;
            // The threads are deleted all the same.
            match (cleared, clearing.met()) {
                (Ok(()), Some(_)) => {}
                (Ok(()), None) => return,
                (Err(error @ Error::Corrupt { .. }), Some(thread)) => {
                    tracing::warn!(%error, thread, "rows of a deleted thread cannot be deleted and are left");
                    after = Some(thread);
                }
                (Err(error), _) => {
                    tracing::warn!(%error, "rows of deleted threads are left; the next deletion goes on with them");
                    return;
                }
            }
            pause().await;
        }
    }
}

impl WriterState {
    /// Deletes the rows of a thread: all of them, or the first piece.
    pub(crate) fn drop_thread(&self, key: ThreadKey) -> Result<()> {
        if self.drop_piece(key)? {
            return directory::drop_thread(&self.db, key);
        }
        self.leave_to_be_cleared(key)
    }

    /// Takes a thread out of the directory, and leaves its rows to [`Work::Clear`].
    pub(crate) fn leave_to_be_cleared(&self, key: ThreadKey) -> Result<()> {
        directory::mark_deleted(&self.db, key)?;
        self.remains.store(true, Ordering::Release);
        Ok(())
    }

    /// Deletes a piece of what is left of a deleted thread.
    pub(crate) fn clear(&mut self, clearing: &Clearing) -> Result<()> {
        let next = directory::next_deleted(&self.db, clearing.after)?;
        clearing.met.store(next.unwrap_or_default(), Ordering::Release);
        match next {
            Some(key) if self.drop_piece(key)? => directory::drop_thread(&self.db, key),
            Some(_) => Ok(()),
            None => {
                // Those that cannot be deleted are left.
                self.remains.store(clearing.after.is_some(), Ordering::Release);
                Ok(())
            }
        }
    }

    /// Deletes rows of a thread, but not its own in the directory. Returns whether they were all.
    fn drop_piece(&self, key: ThreadKey) -> Result<bool> {
        let mut left = self.piece * ROWS;
        // Each of them takes at least one of the rows that may be deleted; the next piece begins with those after them.
        for chain in directory::first_chains(&self.db, key, left)? {
            left -= checkpoints::drop_oldest(&self.db, chain, left)?;
            if left == 0 {
                return Ok(false);
            }
            directory::drop_chain(&self.db, chain)?;
            left -= 1;
        }
        Ok(left > 0 && element::drop_first(&self.db, key, left, BYTES)?)
    }
}

/// Whether a database has rows of deleted threads. If that cannot be read, clearing says why.
pub(crate) fn are_there(db: &Db) -> bool {
    !matches!(directory::next_deleted(db, None), Ok(None))
}

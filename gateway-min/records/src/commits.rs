//! What commits wait for, and how many there were.

use std::sync::atomic::{AtomicU64, Ordering};

/// What the commit of a write transaction waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flush {
    /// The disk: the changes survive a power loss.
    Now,
    /// SQLite does not wait: the commit survives a process crash, and a power loss once a later commit is flushed,
    /// because power loss removes only the end of the log. Used for the steps of a run between its admission and its
    /// decided outcome, which are not acknowledged to anyone: a run that was cut off, as any run is by a power loss, is
    /// recovered the same way from each of them. A Postgres server may fail while the run continues and relies on what
    /// it wrote, so there it means [`Flush::Now`].
    WithNext,
}

/// Counts statements, and committed transactions that changed something. In SQLite one may serve several callers.
#[derive(Debug, Default)]
pub struct Commits {
    all: AtomicU64,
    flushed: AtomicU64,
    statements: AtomicU64,
    trips: AtomicU64,
}

impl Commits {
    pub(super) fn add(&self, flush: Flush) {
        self.all.fetch_add(1, Ordering::Relaxed);
        if flush == Flush::Now {
            self.flushed.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn statement(&self) {
        self.statements.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn trip(&self) {
        self.trips.fetch_add(1, Ordering::Relaxed);
    }

    /// How often somebody waited for the answer of a Postgres server; 0 on SQLite.
    pub fn round_trips(&self) -> u64 {
        self.trips.load(Ordering::Relaxed)
    }

    /// The statements, reads included.
    pub fn statements(&self) -> u64 {
        self.statements.load(Ordering::Relaxed)
    }

    /// All transactions.
    pub fn all(&self) -> u64 {
        self.all.load(Ordering::Relaxed)
    }

    /// Those that waited for the disk.
    pub fn flushed(&self) -> u64 {
        self.flushed.load(Ordering::Relaxed)
    }
}

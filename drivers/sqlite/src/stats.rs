//! What a saver counted since it was opened.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of a [`crate::SqliteSaver`] since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Writing operations that were carried out or refused.
    pub commands: u64,
    /// Transactions that were committed. Fewer than commands: those that wait are committed together.
    pub transactions: u64,
    /// Those of them that waited until they were on the disk.
    pub flushes: u64,
    /// Elements that were looked up by their hash to see whether they are stored already. Grows by what changes, not by
    /// the length of the lists that are written.
    pub elements_examined: u64,
    /// Elements that were stored.
    pub elements_stored: u64,
    /// Bytes of elements that were stored, before they were compressed.
    pub bytes_stored: u64,
}

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counters behind [`Stats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) commands: Counter,
    pub(crate) transactions: Counter,
    pub(crate) flushes: Counter,
    pub(crate) elements_examined: Counter,
    pub(crate) elements_stored: Counter,
    pub(crate) bytes_stored: Counter,
}

impl Counters {
    pub(crate) fn stats(&self) -> Stats {
        Stats {
            commands: self.commands.get(),
            transactions: self.transactions.get(),
            flushes: self.flushes.get(),
            elements_examined: self.elements_examined.get(),
            elements_stored: self.elements_stored.get(),
            bytes_stored: self.bytes_stored.get(),
        }
    }
}

//! The counts of a saver since it was opened.

use std::sync::atomic::{AtomicU64, Ordering};

/// The number of buckets for transaction sizes. The last one includes everything larger.
pub(crate) const SIZES: usize = 10;

/// Counts of a [`crate::SqliteSaver`] since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Writing operations that were carried out or refused.
    pub commands: u64,
    /// Committed transactions. Fewer than commands: those that wait are committed together.
    pub transactions: u64,
    /// Transactions that their caller carried out itself, because nobody else wrote.
    pub in_place: u64,
    /// Transactions that waited until they were on disk.
    pub flushes: u64,
    /// Commands in committed transactions.
    pub committed: u64,
    /// Transactions by the number of commands that each committed: index `n` counts those of more than 2^(n-1) and at
    /// most 2^n.
    pub transaction_sizes: [u64; SIZES],
    /// The most rows that one transaction read and wrote: what the other writers waited for at most.
    pub most_rows: u64,
    /// Elements that were looked up by hash to see whether they are stored already. Grows with what changes, not with
    /// the length of the lists.
    pub elements_examined: u64,
    /// Elements that reads of checkpoints loaded from the database.
    pub elements_loaded: u64,
    /// Elements that were stored.
    pub elements_stored: u64,
    /// Bytes of stored elements, before compression.
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
    pub(crate) committed: Counter,
    pub(crate) in_place: Counter,
    pub(crate) flushes: Counter,
    transaction_sizes: [Counter; SIZES],
    most_rows: Counter,
    pub(crate) elements_examined: Counter,
    pub(crate) elements_loaded: Counter,
    pub(crate) elements_stored: Counter,
    pub(crate) bytes_stored: Counter,
}

impl Counters {
    /// Counts the commit of a transaction of `commands` commands that read and wrote this many rows.
    pub(crate) fn transaction(&self, commands: usize, rows: u64) {
        self.most_rows.0.fetch_max(rows, Ordering::Relaxed);
        let size = commands.max(1).next_power_of_two().trailing_zeros() as usize;
        self.transaction_sizes[size.min(SIZES - 1)].add(1);
        self.committed.add(commands as u64);
    }

    pub(crate) fn stats(&self) -> Stats {
        Stats {
            commands: self.commands.get(),
            transactions: self.transaction_sizes.iter().map(Counter::get).sum(),
            in_place: self.in_place.get(),
            flushes: self.flushes.get(),
            committed: self.committed.get(),
            transaction_sizes: std::array::from_fn(|size| self.transaction_sizes[size].get()),
            most_rows: self.most_rows.get(),
            elements_examined: self.elements_examined.get(),
            elements_loaded: self.elements_loaded.get(),
            elements_stored: self.elements_stored.get(),
            bytes_stored: self.bytes_stored.get(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transactions_are_counted_by_their_size() {
        let counters = Counters::default();
        for commands in [1, 1, 2, 3, 4, 5, 256, 257, 512, 513, 10_000] {
            counters.transaction(commands, commands as u64 / 2);
        }
        let stats = counters.stats();
        assert_eq!(stats.transaction_sizes, [2, 1, 2, 1, 0, 0, 0, 0, 1, 4]);
        assert_eq!((stats.transactions, stats.committed, stats.most_rows), (11, 11_554, 5_000));
    }
}

//! When to snapshot a delta channel: counts the updates and supersteps since its last snapshot.

use crate::metadata::Counters;

/// A snapshot is also stored after this many supersteps without one, so that a rarely written channel does not make
/// replay walk without bound.
pub const SUPERSTEP_BOUND: u64 = 5000;

/// The effect of a superstep on a delta channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// The checkpoint stores a snapshot, and has no counters for the channel.
    Snapshot,
    /// The checkpoint stores a sentinel and these counters.
    Counters(Counters),
}

/// Counts one superstep. `since` is the parent checkpoint's counters (zero if it holds the value), `written` whether
/// this superstep wrote the channel, `frequency` the cadence.
pub fn advance(since: Counters, written: bool, frequency: u64) -> Due {
    // A damaged or hostile checkpoint may count anything.
    let counters = Counters {
        updates: since.updates.saturating_add(u64::from(written)),
        supersteps: since.supersteps.saturating_add(1),
    };
    if counters.updates >= frequency || counters.supersteps >= SUPERSTEP_BOUND {
        Due::Snapshot
    } else {
        Due::Counters(counters)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the rule over a program of writes and returns the steps (from 1) that snapshot.
    fn snapshots(program: impl Iterator<Item = bool>, frequency: u64) -> Vec<usize> {
        let mut since = Counters::default();
        let mut due = Vec::new();
        for (i, written) in program.enumerate() {
            match advance(since, written, frequency) {
                Due::Snapshot => {
                    since = Counters::default();
                    due.push(i + 1);
                }
                Due::Counters(counters) => since = counters,
            }
        }
        due
    }

    #[test]
    fn a_snapshot_falls_due_every_n_updates_whatever_lies_between() {
        assert_eq!(snapshots([true; 7].into_iter(), 1), [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(snapshots([true; 7].into_iter(), 2), [2, 4, 6]);
        assert_eq!(snapshots([true, false, false, true, true].into_iter(), 2), [4]);
        assert_eq!(snapshots([true; 35].into_iter(), 10), [10, 20, 30]);
    }

    #[test]
    fn an_unwritten_channel_is_snapshotted_after_five_thousand_supersteps() {
        assert_eq!(snapshots(std::iter::repeat_n(false, 10_001), 1000), [5000, 10_000]);
    }
}

//! The marks of a thread, and what they prove about its history.
//!
//! Every write gives the thread a new mark: a count that increases by one, and random bits. A server can lose writes
//! that it acknowledged, in a failover to a lagging replica or by a restored backup. Writers on the restored history
//! then reach the same counts again, but never the same bits. So a process that remembers a mark can tell whether the
//! history that it finds contains it.

use std::fmt;

use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep::saver::Flush;
use uuid::Uuid;

/// The greatest revision of a row that is read. No thread reaches it, and what follows it can be counted.
const MOST: i64 = i64::MAX / 2;
/// The number of earlier marks that the row of a thread lists.
pub(crate) const TRAIL: usize = 16;

/// Identifies one state of a thread: see the module `schema`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mark {
    /// Drawn at random when the thread is created and when it is rewritten. Element numbers are valid within one epoch.
    pub(crate) epoch: i64,
    /// Twice the number of writes, plus one if the write was acknowledged before it was flushed.
    pub(crate) revision: i64,
    /// Drawn at random by every write. Nil in rows that a version before 4 of the format wrote.
    pub(crate) nonce: Uuid,
}

impl Mark {
    fn count(self) -> i64 {
        self.revision >> 1
    }

    /// The part of it that later rows list.
    fn bits(self) -> u32 {
        let [a, b, c, d, ..] = *self.nonce.as_bytes();
        u32::from_le_bytes([a, b, c, d])
    }

    /// Whether a write can count on from it: a damaged or hostile row may say anything.
    pub(crate) fn has_successor(self) -> bool {
        (0..=MOST).contains(&self.revision)
    }

    /// Whether it was flushed before it was acknowledged. If not, a crash of the server may lose it, as the caller
    /// allowed.
    pub(crate) fn is_flushed(self) -> bool {
        self.revision & 1 == 0
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "write {} ({:08x})", self.count(), self.bits().swap_bytes())
    }
}

/// The history of a thread, as far as its row describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct History {
    /// Drawn at random when the thread is created. Unlike the epoch, it survives rewrites.
    pub(crate) life: i64,
    pub(crate) mark: Mark,
    /// The bits of the previous marks, newest first.
    pub(crate) trail: Vec<u32>,
}

/// A moment in the history of a thread that a process remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment {
    pub(crate) life: i64,
    pub(crate) mark: Mark,
}

impl Moment {
    /// The least and the greatest revision of a history that can prove that it contains this.
    pub(crate) fn provable(&self) -> [i64; 2] {
        let (count, trail) = (self.mark.count(), i64::try_from(TRAIL).unwrap_or_default());
        [2 * count, 2 * (count + trail) + 1]
    }
}

/// What a history proves about a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Since {
    /// The moment is part of it.
    Contained,
    /// The moment is not part of it.
    Missing,
    /// The moment is older than the marks that the row lists.
    TooLongAgo,
    /// The thread was deleted and created again, or the moment belongs to a later life.
    AnotherLife,
}

impl History {
    /// The first write of a thread.
    pub(crate) fn first(flush: Flush) -> Self {
        let mark = Mark { epoch: rand::random(), revision: 0, nonce: Uuid::nil() };
        let mut first = Self { life: rand::random(), mark, trail: Vec::new() }.next(flush);
        first.trail.clear();
        first
    }

    /// The history after another write.
    pub(crate) fn next(&self, flush: Flush) -> Self {
        let revision = 2 * (self.mark.count() + 1) + i64::from(flush == Flush::WithNext);
        let nonce = Uuid::from_bytes(rand::random());
        let before = std::iter::once(self.mark.bits());
        let trail = before.chain(self.trail.iter().copied()).take(TRAIL).collect();
        Self { life: self.life, mark: Mark { revision, nonce, ..self.mark }, trail }
    }

    /// The history after a rewrite, which gives the thread this epoch.
    pub(crate) fn rewritten(&self, epoch: i64) -> Self {
        let mut next = self.next(Flush::Now);
        next.mark.epoch = epoch;
        next
    }

    pub(crate) fn moment(&self) -> Moment {
        Moment { life: self.life, mark: self.mark }
    }

    /// What it proves about `then`.
    pub(crate) fn since(&self, then: &Moment) -> Since {
        if self.life != then.life {
            return Since::AnotherLife;
        }
        let contains = |same: bool| if same { Since::Contained } else { Since::Missing };
        match usize::try_from(self.mark.count() - then.mark.count()) {
            Err(_) => Since::Missing,
            Ok(0) => contains(self.mark == then.mark),
            Ok(writes) => match self.trail.get(writes - 1) {
                Some(bits) => contains(*bits == then.mark.bits()),
                None => Since::TooLongAgo,
            },
        }
    }
}

/// The error for a thread whose history lacks what this process knows was acknowledged.
pub(crate) fn lost(thread: &ThreadId, known: Mark, found: impl fmt::Display) -> Error {
    Error::HistoryLost {
        thread: thread.clone(),
        seen: format!("this process knew {known}, the server has {found}"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn written(mut history: History, writes: usize) -> History {
        for n in 0..writes {
            history = match n % 3 {
                0 => history.next(Flush::Now),
                1 => history.next(Flush::WithNext),
                _ => history.rewritten(rand::random()),
            };
        }
        history
    }

    proptest! {
        /// Two processes continue the same history separately: neither mistakes the other's for its own.
        #[test]
        fn a_history_contains_its_past_and_nothing_else(common in 0..30_usize, ours in 1..30_usize, theirs in 0..60_usize) {
            let common = written(History::first(Flush::Now), common);
            let our = written(common.clone(), ours);
            let their = written(common.clone(), theirs);
            let expected = if theirs <= TRAIL { Since::Contained } else { Since::TooLongAgo };
            prop_assert_eq!(their.since(&common.moment()), expected);
            let expected = if theirs <= ours + TRAIL { Since::Missing } else { Since::TooLongAgo };
            prop_assert_eq!(their.since(&our.moment()), expected);
            prop_assert_eq!(our.since(&our.moment()), Since::Contained);
            prop_assert_eq!(History::first(Flush::Now).since(&our.moment()), Since::AnotherLife);
        }
    }

    /// A row beyond it is refused when it is read.
    #[test]
    fn a_count_of_writes_has_an_end() {
        for (revision, goes_on) in
            [(2, true), (MOST, true), (MOST + 1, false), (i64::MAX, false), (-1, false)]
        {
            let mark = Mark { epoch: 1, revision, nonce: Uuid::nil() };
            assert_eq!(mark.has_successor(), goes_on, "{revision}");
            if goes_on {
                let next = History { life: 1, mark, trail: Vec::new() }.next(Flush::WithNext);
                assert!(next.mark.revision > revision);
            }
        }
    }

    #[test]
    fn a_mark_says_whether_it_was_flushed_and_goes_on_from_those_of_older_versions() {
        for revision in [0, 1, 6, 7, 40] {
            let mark = Mark { epoch: 1, revision, nonce: Uuid::nil() };
            let old = History { life: 1, mark, trail: Vec::new() };
            let (now, later) = (old.next(Flush::Now), old.next(Flush::WithNext));
            assert!(now.mark.is_flushed() && !later.mark.is_flushed());
            for next in [now, later] {
                assert!(next.mark.revision > revision);
                assert_eq!(next.since(&old.moment()), Since::Contained);
            }
        }
    }
}

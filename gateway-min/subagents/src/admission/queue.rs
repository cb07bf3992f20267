//! Who has a slot, who waits, and who is next: a state machine without time, tasks or locks.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::Counts;

/// Of this many slots that are freed while both classes wait, one goes to a batch.
const BATCH_TURN: u32 = 4;

/// What happens to an execution that arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrival {
    /// It has a slot.
    Runs,
    /// It waits under this number.
    Waits(u64),
    /// There is no place for it.
    Refused,
}

/// The slots and those who wait for them; each has a `W`, by which it is woken.
///
/// Invariants: while somebody waits, every slot is taken; a slot that is handed over stays taken.
pub(super) struct Queue<W> {
    capacity: usize,
    /// Slots that are taken, also by those who were handed one and have not seen it yet.
    running: usize,
    next_number: u64,
    interactive: VecDeque<u64>,
    /// The batches that wait, in the order of their turns, each with its items.
    batches: VecDeque<(Arc<str>, VecDeque<u64>)>,
    /// Those who wait, and those who were handed a slot and have not taken it.
    waiters: BTreeMap<u64, Waiter<W>>,
    /// Slots given to interactive executions since a batch had its turn, counted while a batch waits.
    interactive_turns: u32,
}

enum Waiter<W> {
    Waits { batch: Option<Arc<str>>, waker: W },
    Granted,
}

impl<W: Default> Queue<W> {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            running: 0,
            next_number: 0,
            interactive: VecDeque::new(),
            batches: VecDeque::new(),
            waiters: BTreeMap::new(),
            interactive_turns: 0,
        }
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn counts(&self) -> Counts {
        Counts {
            running: self.running,
            waiting_interactive: self.interactive.len(),
            waiting_batch: self.batches.iter().map(|(_, items)| items.len()).sum(),
        }
    }

    /// Whether nobody runs; then nobody waits either.
    pub(super) fn is_idle(&self) -> bool {
        self.running == 0
    }

    /// An execution arrives, of this batch or interactive; at most `most` may wait.
    pub(super) fn arrive(&mut self, batch: Option<&Arc<str>>, most: usize) -> Arrival {
        if self.running < self.capacity {
            self.running += 1;
            return Arrival::Runs;
        }
        if self.counts().waiting() >= most {
            return Arrival::Refused;
        }
        let number = self.next_number;
        self.next_number += 1;
        match batch {
            None => self.interactive.push_back(number),
            Some(batch) => match self.batches.iter_mut().find(|(known, _)| known == batch) {
                Some((_, items)) => items.push_back(number),
                None => self.batches.push_back((Arc::clone(batch), [number].into())),
            },
        }
        self.waiters.insert(number, Waiter::Waits { batch: batch.cloned(), waker: W::default() });
        Arrival::Waits(number)
    }

    /// Whether the one under this number was handed a slot; the slot is then its own, and the number is gone.
    pub(super) fn take(&mut self, number: u64) -> bool {
        let granted = matches!(self.waiters.get(&number), Some(Waiter::Granted));
        if granted {
            self.waiters.remove(&number);
        }
        granted
    }

    /// The waker of the one under this number, while it waits.
    pub(super) fn waiting(&mut self, number: u64) -> Option<&mut W> {
        match self.waiters.get_mut(&number) {
            Some(Waiter::Waits { waker, .. }) => Some(waker),
            Some(Waiter::Granted) | None => None,
        }
    }

    /// The one under this number gives up. If it was handed a slot, that goes to the next in line, who is to be woken.
    pub(super) fn leave(&mut self, number: u64) -> Option<W> {
        match self.waiters.remove(&number)? {
            Waiter::Granted => self.release(),
            Waiter::Waits { batch: None, .. } => {
                self.interactive.retain(|other| *other != number);
                None
            }
            Waiter::Waits { batch: Some(batch), .. } => {
                if let Some((_, items)) = self.batches.iter_mut().find(|(known, _)| *known == batch) {
                    items.retain(|other| *other != number);
                }
                self.batches.retain(|(_, items)| !items.is_empty());
                None
            }
        }
    }

    /// A slot is given back. It goes to the next in line, who is to be woken, or is free.
    pub(super) fn release(&mut self) -> Option<W> {
        let Some(next) = self.next() else {
            self.running = self.running.saturating_sub(1);
            return None;
        };
        match self.waiters.insert(next, Waiter::Granted) {
            Some(Waiter::Waits { waker, .. }) => Some(waker),
            Some(Waiter::Granted) | None => None,
        }
    }

    /// Takes the next in line out of its queue.
    fn next(&mut self) -> Option<u64> {
        if self.batches.is_empty() {
            self.interactive_turns = 0;
            return self.interactive.pop_front();
        }
        if !self.interactive.is_empty() && self.interactive_turns + 1 < BATCH_TURN {
            self.interactive_turns += 1;
            return self.interactive.pop_front();
        }
        self.interactive_turns = 0;
        let (batch, mut items) = self.batches.pop_front()?;
        let next = items.pop_front();
        if !items.is_empty() {
            self.batches.push_back((batch, items));
        }
        next
    }
}

//! A gate that what runs passes, and that closes once nothing runs any more.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::Duration;

/// Set in a [`Gate`] while it is closed.
const CLOSED: usize = 1 << (usize::BITS - 1);
/// The pause between two looks at a gate.
pub(crate) const PAUSE: Duration = Duration::from_millis(1);

/// Counts what is inside. Not under a lock, which the child of a fork could find locked.
pub(crate) struct Gate(AtomicUsize);

/// Something inside a gate, until it is dropped.
pub(crate) struct Inside(&'static Gate);

impl Drop for Inside {
    fn drop(&mut self) {
        // What was inside when the process forked may end in the child, which counts it no more.
        self.0.moved(|inside| (inside & !CLOSED > 0).then(|| inside - 1));
    }
}

impl Gate {
    /// An open gate.
    pub(crate) const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Enters, unless the gate is closed.
    pub(crate) fn enter(&'static self) -> Option<Inside> {
        // Not made if the gate is closed: dropping it would count.
        self.moved(|inside| (inside & CLOSED == 0).then_some(inside + 1)).then(|| Inside(self))
    }

    /// Enters, also if the gate is closed: for what has to be done before it counts as empty.
    pub(crate) fn stay(&'static self) -> Inside {
        self.0.fetch_add(1, Ordering::AcqRel);
        Inside(self)
    }

    /// Waits until the gate is open, closes it, and waits until nothing is inside.
    pub(crate) fn close(&self) {
        while !self.shut() {
            sleep(PAUSE);
        }
        self.wait();
    }

    /// Closes the gate, also if something is inside. Returns `false` if it is closed already.
    pub(crate) fn shut(&self) -> bool {
        self.moved(|inside| (inside & CLOSED == 0).then_some(inside | CLOSED))
    }

    /// Waits until nothing is inside.
    pub(crate) fn wait(&self) {
        while !self.is_empty() {
            sleep(PAUSE);
        }
    }

    /// Whether nothing is inside.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.load(Ordering::Acquire) & !CLOSED == 0
    }

    /// Whether it is closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.0.load(Ordering::Acquire) & CLOSED != 0
    }

    /// Opens it again.
    pub(crate) fn open(&self) {
        self.0.fetch_and(!CLOSED, Ordering::Release);
    }

    /// Opens it in the child of a fork, where nothing of what was inside runs.
    pub(crate) fn reset(&self) {
        self.0.store(0, Ordering::Release);
    }

    fn moved(&self, to: impl Fn(usize) -> Option<usize>) -> bool {
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, to).is_ok()
    }
}

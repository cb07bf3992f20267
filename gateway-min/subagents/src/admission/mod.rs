//! How many subagents run at once in this process, and who is next.
//!
//! [`Admission`] has a fixed number of slots. A [`Slot`] is a guard: dropping it hands the slot to the next in line, at
//! once and without waiting for anything, so that no cancellation can lose it. A [`Ticket`] is a place in the queue;
//! dropping it leaves the queue, or gives the slot back that was handed over at that very moment.
//!
//! There are two classes. Interactive executions, for which somebody waits, go first, but of four freed slots at least one
//! goes to a batch while batches wait; batches take turns. Within a class, and within a batch, the order is that of
//! arrival: a newcomer never overtakes, because a freed slot goes to the head of the queue without becoming free.
//!
//! Everything is decided under one lock by a queue (`queue.rs`), which knows neither time nor tasks.

mod limits;
mod queue;
#[cfg(test)]
mod tests;

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use threadkeep_config::{AdmissionPolicy, SubagentRuntime};
use tokio::time::{Instant, Sleep};

pub use self::limits::{concurrency, total};
use self::queue::{Arrival, Queue};

/// The configuration was changed while subagents run or wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("subagent_runtime is restart-required and cannot change while subagents run or wait")]
pub struct Busy;

/// Why an execution gets no slot. Clients read the texts (service reference, "Subagent settings").
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// All slots are taken, and the queue is full or not used.
    #[error("Subagent execution capacity is full ({running} running, {queued} queued)")]
    Full {
        /// The number of slots.
        running: usize,
        /// How many wait.
        queued: usize,
    },
    /// It waited as long as it may.
    #[error("Timed out after {seconds}s waiting for a subagent execution slot")]
    TimedOut {
        /// The setting `subagent_runtime.queue_timeout_seconds`.
        seconds: u64,
    },
}

/// What an execution is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Class {
    /// A run waits for it.
    Interactive,
    /// It is an item of the batch with this id.
    Batch(Arc<str>),
}

/// How many executions run and wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Slots in use.
    pub running: usize,
    /// Interactive executions that wait.
    pub waiting_interactive: usize,
    /// Items of batches that wait.
    pub waiting_batch: usize,
}

impl Counts {
    /// All that wait.
    pub fn waiting(&self) -> usize {
        self.waiting_interactive + self.waiting_batch
    }
}

/// The slots of this process. Clones share them.
#[derive(Clone)]
pub struct Admission {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
}

struct State {
    settings: SubagentRuntime,
    queue: Queue<Option<Waker>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while it was held leaves a complete state: each transition is one call of the queue.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives one slot to the next in line.
    fn release(&self) {
        let woken = self.lock().queue.release();
        if let Some(waker) = woken.flatten() {
            waker.wake();
        }
    }
}

impl Admission {
    /// Slots as configured.
    pub fn new(settings: &SubagentRuntime) -> Self {
        let queue = Queue::new(settings.max_running as usize);
        Self { shared: Arc::new(Shared { state: Mutex::new(State { settings: settings.clone(), queue }) }) }
    }

    /// Installs a configuration. The one that is installed already changes nothing.
    ///
    /// # Errors
    /// [`Busy`]: it is another one, and executions run or wait.
    pub fn install(&self, settings: &SubagentRuntime) -> Result<(), Busy> {
        let mut state = self.shared.lock();
        if state.settings == *settings {
            return Ok(());
        }
        if !state.queue.is_idle() {
            return Err(Busy);
        }
        *state = State { settings: settings.clone(), queue: Queue::new(settings.max_running as usize) };
        Ok(())
    }

    /// How many executions may run at once.
    pub fn capacity(&self) -> usize {
        self.shared.lock().queue.capacity()
    }

    /// How many run and wait now.
    pub fn counts(&self) -> Counts {
        self.shared.lock().queue.counts()
    }

    /// Takes a place in the queue, or a slot if one is free. The time in the queue starts now; the order of the calls is
    /// the order in the queue.
    ///
    /// # Errors
    /// [`Refused::Full`].
    pub fn enter(&self, class: &Class) -> Result<Ticket, Refused> {
        let mut state = self.shared.lock();
        let most = match state.settings.admission_policy {
            AdmissionPolicy::Queue => state.settings.max_queued as usize,
            AdmissionPolicy::Reject => 0,
        };
        let batch = match class {
            Class::Interactive => None,
            Class::Batch(batch) => Some(batch),
        };
        let position = match state.queue.arrive(batch, most) {
            Arrival::Runs => Position::Slot(Slot::new(&self.shared)),
            Arrival::Waits(number) => Position::Queue(number),
            Arrival::Refused => {
                let (running, queued) = (state.queue.capacity(), state.queue.counts().waiting());
                return Err(Refused::Full { running, queued });
            }
        };
        let timeout = Duration::from_secs(state.settings.queue_timeout_seconds);
        drop(state);
        let entered = Instant::now();
        Ok(Ticket { shared: Arc::clone(&self.shared), position, entered, timeout, deadline: None })
    }

    /// [`Admission::enter`], and waits for the slot.
    ///
    /// # Errors
    /// [`Refused`].
    pub async fn acquire(&self, class: &Class) -> Result<Slot, Refused> {
        self.enter(class)?.await
    }

    /// A slot that is free right now. Nobody who waits is overtaken: while somebody waits, no slot is free.
    pub fn try_acquire(&self) -> Option<Slot> {
        let runs = matches!(self.shared.lock().queue.arrive(None, 0), Arrival::Runs);
        runs.then(|| Slot::new(&self.shared))
    }
}

/// The right to run one execution. Dropping it gives the slot to the next in line.
#[must_use = "the slot is given back when this is dropped"]
pub struct Slot {
    shared: Arc<Shared>,
    waited: Duration,
}

impl Slot {
    fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::clone(shared), waited: Duration::ZERO }
    }

    /// How long it was waited for.
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.shared.release();
    }
}

/// A place in the queue; a future of the slot. Dropping it gives the place up.
#[must_use = "the place is given up when this is dropped"]
pub struct Ticket {
    shared: Arc<Shared>,
    position: Position,
    entered: Instant,
    timeout: Duration,
    /// Started when it is first waited for; it ends `timeout` after `entered`.
    deadline: Option<Pin<Box<Sleep>>>,
}

enum Position {
    Slot(Slot),
    Queue(u64),
    /// It has given its slot or its refusal.
    Left,
}

impl Future for Ticket {
    type Output = Result<Slot, Refused>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let ticket = self.get_mut();
        if let Position::Queue(number) = ticket.position {
            let mut state = ticket.shared.lock();
            if state.queue.take(number) {
                drop(state);
                ticket.position = Position::Slot(Slot::new(&ticket.shared));
            } else if let Some(waker) = state.queue.waiting(number) {
                *waker = Some(context.waker().clone());
            }
        }
        match std::mem::replace(&mut ticket.position, Position::Left) {
            Position::Slot(mut slot) => {
                slot.waited = ticket.entered.elapsed();
                Poll::Ready(Ok(slot))
            }
            position => {
                ticket.position = position;
                let ends = ticket.entered + ticket.timeout;
                let deadline =
                    ticket.deadline.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(ends)));
                std::task::ready!(deadline.as_mut().poll(context));
                ticket.leave();
                Poll::Ready(Err(Refused::TimedOut { seconds: ticket.timeout.as_secs() }))
            }
        }
    }
}

impl Ticket {
    /// Leaves the queue. A slot that was handed over meanwhile goes to the next in line.
    fn leave(&mut self) {
        let Position::Queue(number) = std::mem::replace(&mut self.position, Position::Left) else { return };
        let woken = self.shared.lock().queue.leave(number);
        if let Some(waker) = woken.flatten() {
            waker.wake();
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.leave();
    }
}

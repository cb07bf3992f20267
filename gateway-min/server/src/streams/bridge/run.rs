//! The buffer of one run's stream.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use tokio_util::sync::CancellationToken;

use super::memory::{self, Memory};
use super::{Event, EventId, lock};

/// The event that says why a run failed.
pub(super) const ERROR: &str = "error";

/// The stream of one run, shared by its publisher, its subscribers and the bridge.
pub(super) struct Run {
    pub(super) id: Arc<str>,
    pub(super) capacity: usize,
    pub(super) max_bytes: usize,
    /// Whether the events belong to another process, so that a client may know more of them than this one.
    pub(super) relayed: bool,
    /// Whether other processes get the events.
    pub(super) handed_on: AtomicBool,
    pub(super) abandoned: CancellationToken,
    /// The bridge's count of subscriptions.
    pub(super) followers: Arc<AtomicUsize>,
    pub(super) memory: Arc<Memory>,
    pub(super) state: Mutex<Buffer>,
}

#[derive(Default)]
pub(super) struct Buffer {
    pub(super) events: VecDeque<Event>,
    /// The bytes of `events`.
    bytes: usize,
    /// The newest event, even if it is no longer kept.
    pub(super) latest: Option<EventId>,
    /// No event of this process has an earlier time.
    pub(super) not_before_ms: u64,
    /// The `seq` of the next event.
    next_seq: u64,
    ended: bool,
    /// The first `seq` that other processes do not get, because the run ends elsewhere.
    pub(super) left_at: Option<u64>,
    /// The run's key among the ended ones.
    pub(super) ended_as: Option<u64>,
    /// Whether the first events of another process have not arrived.
    catching_up: bool,
    /// The last `error` event, also if it is no longer among `events`.
    pub(super) outcome: Option<Event>,
    next_subscriber: u64,
    /// The wakers of waiting subscribers.
    pub(super) waiting: Vec<(u64, Waker)>,
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run").field("id", &self.id).finish_non_exhaustive()
    }
}

/// What a cursor points to.
pub(super) enum Found {
    Event(Event),
    /// Before the buffer, whose first and last ids these are.
    Behind(EventId, EventId),
    End,
}

impl Buffer {
    /// Of a run of this process, or a relayed one.
    pub(super) fn new(relayed: bool) -> Self {
        Self { catching_up: relayed, ..Self::default() }
    }

    /// The `seq` of the oldest kept event, or of the next one if there is none.
    fn first_seq(&self) -> u64 {
        self.next_seq - self.events.len() as u64
    }

    /// The kept event with this `seq`.
    fn event(&self, seq: u64) -> Option<&Event> {
        let index = usize::try_from(seq.checked_sub(self.first_seq())?).ok()?;
        self.events.get(index)
    }

    /// Why the run failed, if it did and a client whose last event is this one was not sent that. A number beyond the
    /// last event is one of the process that had the run, and says nothing of what this process found.
    fn outcome_after(&self, last: Option<EventId>) -> Option<&Event> {
        let outcome = self.outcome.as_ref()?;
        let sent = last.is_some_and(|last| {
            (outcome.id.seq..self.next_seq).contains(&last.seq) && last.unix_ms >= outcome.id.unix_ms
        });
        (!sent).then_some(outcome)
    }

    /// Why the run failed, if that is older than the oldest kept event.
    fn outcome_before(&self, first: u64) -> Option<&Event> {
        self.outcome.as_ref().filter(|outcome| outcome.id.seq < first)
    }

    fn wait(&mut self, subscriber: u64, waker: &Waker) {
        match self.waiting.iter_mut().find(|(key, _)| *key == subscriber) {
            Some((_, old)) => old.clone_from(waker),
            None => self.waiting.push((subscriber, waker.clone())),
        }
    }
}

impl Run {
    pub(super) fn push(&self, name: Arc<str>, data: Bytes, now_ms: u64) -> Option<EventId> {
        let state = lock(&self.state);
        if state.ended {
            return None;
        }
        let now_ms = now_ms.max(state.not_before_ms);
        let first = EventId { unix_ms: now_ms, seq: state.next_seq };
        let id = state.latest.map_or(first, |latest| latest.next(now_ms));
        self.keep(state, Event { id, name, data });
        Some(id)
    }

    pub(super) fn repeat(&self, event: Event) {
        let mut state = lock(&self.state);
        if state.ended || event.id.seq < state.next_seq {
            return;
        }
        if event.id.seq > state.next_seq {
            self.drop_oldest(&mut state, |state| !state.events.is_empty());
        }
        self.keep(state, event);
    }

    /// Another process has lost all events up to this one, its newest.
    pub(super) fn lose(&self, newest: EventId) {
        let mut state = lock(&self.state);
        if state.ended || newest.seq < state.next_seq {
            return;
        }
        self.drop_oldest(&mut state, |state| !state.events.is_empty());
        state.latest = Some(newest);
        state.next_seq = newest.seq + 1;
        wake(state);
    }

    /// The run's key among the ended ones, if it is this process's and other processes do not get its events.
    pub(super) fn ended_alone(&self) -> Option<u64> {
        let alone = !self.relayed && !self.handed_on.load(Ordering::Relaxed);
        if alone { lock(&self.state).ended_as } else { None }
    }

    /// Whether the run is this process's, and its events are handed on to other processes from this call on.
    pub(super) fn hand_on(&self) -> bool {
        !self.relayed && !self.handed_on.swap(true, Ordering::Relaxed)
    }

    fn keep(&self, mut state: MutexGuard<'_, Buffer>, event: Event) {
        let bytes = memory::size(&event);
        self.memory.add(bytes);
        state.bytes += bytes;
        state.latest = Some(event.id);
        state.next_seq = event.id.seq + 1;
        if &*event.name == ERROR {
            state.outcome = Some(event.clone());
        }
        state.events.push_back(event);
        self.drop_oldest(&mut state, |state| {
            let kept = state.events.len();
            kept > self.capacity || (kept > 1 && state.bytes > self.max_bytes)
        });
        wake(state);
    }

    /// Drops every event but the newest, which nobody may have read yet.
    pub(super) fn keep_newest(&self) {
        self.drop_oldest(&mut lock(&self.state), |state| state.events.len() > 1);
    }

    /// Drops every event.
    pub(super) fn empty(&self) {
        self.drop_oldest(&mut lock(&self.state), |state| !state.events.is_empty());
    }

    /// Drops the oldest event while `more` says so.
    fn drop_oldest(&self, state: &mut Buffer, more: impl Fn(&Buffer) -> bool) {
        while more(state) {
            let Some(event) = state.events.pop_front() else { break };
            let bytes = memory::size(&event);
            state.bytes -= bytes;
            self.memory.free(bytes);
        }
    }

    /// Lets subscribers begin with the oldest event.
    pub(super) fn caught_up(&self) {
        let mut state = lock(&self.state);
        if std::mem::take(&mut state.catching_up) {
            wake(state);
        }
    }

    /// Keeps what follows, up to the end, from other processes.
    pub(super) fn leave_to_others(&self) {
        let mut state = lock(&self.state);
        if !state.ended {
            let next = state.next_seq;
            state.left_at.get_or_insert(next);
        }
    }

    /// Whether this call ended the stream.
    pub(super) fn end(&self) -> bool {
        let mut state = lock(&self.state);
        let first = !state.ended;
        state.ended = true;
        state.catching_up = false;
        wake(state);
        first
    }

    /// Adds a subscriber that claims to have everything up to `last`: returns its key, `last` if the run did publish
    /// it, and the next `seq`; none if its first event is found with [`Self::poll`]: the oldest of another process,
    /// which is not known yet, or why the run failed, if that is no longer among the events.
    pub(super) fn join(&self, last: Option<EventId>) -> (u64, Option<EventId>, Option<u64>) {
        self.followers.fetch_add(1, Ordering::Relaxed);
        let mut state = lock(&self.state);
        let first = state.first_seq();
        // For an evicted event only the number can be checked; for a kept one, the whole id. A later event of another
        // process the client may have received there.
        let published = |id: &EventId| {
            id.seq < first
                || (self.relayed && id.seq >= state.next_seq)
                || state.event(id.seq).is_some_and(|event| event.id == *id)
        };
        let last = last.filter(published);
        let key = state.next_subscriber;
        state.next_subscriber += 1;
        let oldest = (!state.catching_up && state.outcome_before(first).is_none()).then_some(first);
        (key, last, last.map_or(oldest, |id| Some(id.seq.saturating_add(1))))
    }

    /// What comes next for a subscriber at `cursor` whose last event is `last`. Without a cursor it begins with the oldest
    /// event, once that is known, and before it with why the run failed.
    pub(super) fn poll(
        &self,
        subscriber: u64,
        (cursor, last): (&mut Option<u64>, Option<EventId>),
        cx: &Context<'_>,
    ) -> Poll<Found> {
        let mut state = lock(&self.state);
        if cursor.is_none() && state.catching_up {
            state.wait(subscriber, cx.waker());
            return Poll::Pending;
        }
        let first = state.first_seq();
        if cursor.is_none()
            && let Some(outcome) = state.outcome_before(first)
        {
            *cursor = Some(first);
            return Poll::Ready(Found::Event(outcome.clone()));
        }
        let cursor = *cursor.get_or_insert(first);
        if let Some(event) = state.event(cursor) {
            return Poll::Ready(Found::Event(event.clone()));
        }
        if let Some(latest) = state.latest.filter(|_| cursor < state.first_seq()) {
            // The newest event of another process is on its way, which a gap names.
            if state.catching_up {
                state.wait(subscriber, cx.waker());
                return Poll::Pending;
            }
            let outcome = state.outcome.as_ref().filter(|outcome| outcome.id.seq == cursor);
            let earliest = state.events.front().map_or(latest, |first| first.id);
            return Poll::Ready(match outcome {
                Some(outcome) => Found::Event(outcome.clone()),
                None => Found::Behind(earliest, latest),
            });
        }
        if state.ended {
            return Poll::Ready(
                state.outcome_after(last).map_or(Found::End, |outcome| Found::Event(outcome.clone())),
            );
        }
        state.wait(subscriber, cx.waker());
        Poll::Pending
    }

    pub(super) fn poll_end(&self, subscriber: u64, cx: &Context<'_>) -> Poll<()> {
        let mut state = lock(&self.state);
        if state.ended {
            return Poll::Ready(());
        }
        state.wait(subscriber, cx.waker());
        Poll::Pending
    }

    /// Removes a subscriber; returns whether the run is still live.
    pub(super) fn leave(&self, subscriber: u64) -> bool {
        self.followers.fetch_sub(1, Ordering::Relaxed);
        let mut state = lock(&self.state);
        state.waiting.retain(|(key, _)| *key != subscriber);
        !state.ended
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.memory.free(state.bytes);
        if let Some(key) = state.ended_as {
            self.memory.gone(key);
        }
    }
}

/// Wakes all subscribers, after releasing the lock: a waker may run code that takes it.
fn wake(mut state: MutexGuard<'_, Buffer>) {
    let waiting = std::mem::take(&mut state.waiting);
    drop(state);
    for (_, waker) in waiting {
        waker.wake();
    }
}

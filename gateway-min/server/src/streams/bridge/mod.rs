//! The stream bridge: keeps what a run publishes for the clients that follow it.
//!
//! A run publishes into a buffer of its last events and never waits. A subscriber is a cursor into that buffer; one
//! that falls out of it, or reconnects with an older id, gets a [`Frame::Gap`] and must reload the thread's durable
//! state. The buffer outlives the run by [`BridgeOptions::cleanup_delay`], so that a client whose connection broke near
//! the end still gets the rest. Why a run failed is kept with it, even if the buffer is emptied: it comes before the end,
//! to every client that was not sent it.
//!
//! The bridge belongs to one process and stores nothing durably: for an unknown run it returns the end.

mod memory;
mod run;
mod subscription;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use threadkeep::id::{Clock, SystemClock};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use self::memory::Memory;
use self::run::{Buffer, ERROR, Run};
pub use self::subscription::{HEARTBEAT, Subscription};

/// How much is kept, and how long.
#[derive(Debug, Clone, Copy)]
pub struct BridgeOptions {
    /// Events kept per run (`stream_bridge.queue_maxsize`); at least one is.
    pub queue_maxsize: usize,
    /// Bytes kept per run (`stream_bridge.queue_max_bytes`); the newest event is, whatever its size.
    pub queue_max_bytes: usize,
    /// Bytes kept for all runs (`stream_bridge.total_max_bytes`), plus the newest event of each running one.
    pub total_max_bytes: usize,
    /// How long the events of a run are kept after its end.
    pub cleanup_delay: Duration,
}

impl Default for BridgeOptions {
    /// 256 events or 8 MiB of a run, 256 MiB of all; 60 s.
    fn default() -> Self {
        Self {
            queue_maxsize: 256,
            queue_max_bytes: 8 << 20,
            total_max_bytes: 256 << 20,
            cleanup_delay: Duration::from_mins(1),
        }
    }
}

/// How far the newest event of a thread may be ahead of this process's clock, as the records take it. It is farther if the
/// clock was set back since, or is not that of the records, as in tests.
pub(crate) const AHEAD_MS: u64 = threadkeep_records::AHEAD.num_milliseconds().unsigned_abs();

/// The id of an event: `<unix ms>-<seq>`. `seq` counts the events of the run from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventId {
    /// When the event was published, in milliseconds since the Unix epoch; never less than for an earlier event, and
    /// more than for those of the thread's earlier runs.
    pub unix_ms: u64,
    /// The event's index within its run.
    pub seq: u64,
}

impl EventId {
    /// The maximum number of events of a run in the same millisecond, so that the time and the remainder of `seq` by this
    /// number order them. An event beyond it gets the next millisecond.
    pub(crate) const PER_MS: u64 = 32;

    /// The id of the event after this one, now.
    fn next(self, now_ms: u64) -> Self {
        let seq = self.seq + 1;
        let full = seq.is_multiple_of(Self::PER_MS) && self.unix_ms >= now_ms;
        let unix_ms = if full { self.unix_ms + 1 } else { self.unix_ms.max(now_ms) };
        Self { unix_ms, seq }
    }

    /// Parses what a client sent; `None` if it is not exactly the text of an id.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (unix_ms, seq) = text.split_once('-')?;
        let id = Self { unix_ms: unix_ms.parse().ok()?, seq: seq.parse().ok()? };
        (id.to_string() == text).then_some(id)
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.unix_ms, self.seq)
    }
}

/// One published event. Clones share its bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct Event {
    /// Its id.
    pub id: EventId,
    /// Its name, for example `values`.
    pub name: Arc<str>,
    /// Its data as JSON on one line.
    pub data: Bytes,
}

impl fmt::Debug for Event {
    /// Omits the data, which is a conversation.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({}, {}, {} bytes)", self.id, self.name, self.data.len())
    }
}

/// Events between the subscriber and the buffer are lost. The run continues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gap {
    /// The run.
    pub run_id: Arc<str>,
    /// The last event that the subscriber has; `None` if it has none.
    pub requested: Option<EventId>,
    /// The oldest event in the buffer; the newest of all if the buffer was emptied.
    pub earliest: EventId,
    /// The newest event.
    pub latest: EventId,
}

/// What a subscriber receives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// The next event.
    Event(Event),
    /// Events are missing; nothing follows in this subscription.
    Gap(Gap),
    /// No event for [`HEARTBEAT`].
    Heartbeat,
    /// The run has ended and every event was delivered; nothing follows.
    End,
}

/// The streams of this process's runs. Clones share them.
#[derive(Clone)]
pub struct StreamBridge {
    shared: Arc<Shared>,
}

struct Shared {
    options: BridgeOptions,
    clock: Box<dyn Clock>,
    runs: Mutex<HashMap<Arc<str>, Arc<Run>>>,
    followers: Arc<AtomicUsize>,
    memory: Arc<Memory>,
}

impl fmt::Debug for StreamBridge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamBridge")
            .field("options", &self.shared.options)
            .field("runs", &self.kept())
            .finish()
    }
}

impl StreamBridge {
    /// A bridge without runs.
    pub fn new(options: BridgeOptions) -> Self {
        Self::with_clock(options, SystemClock)
    }

    /// A bridge whose event ids carry the time of this clock.
    pub fn with_clock(options: BridgeOptions, clock: impl Clock + 'static) -> Self {
        let shared = Shared {
            options,
            clock: Box::new(clock),
            runs: Mutex::default(),
            followers: Arc::default(),
            memory: Arc::new(Memory::new(options.total_max_bytes)),
        };
        Self { shared: Arc::new(shared) }
    }

    /// How many runs have a buffer.
    pub(crate) fn kept(&self) -> usize {
        lock(&self.shared.runs).len()
    }

    /// The number of subscriptions.
    pub(crate) fn followers(&self) -> usize {
        self.shared.followers.load(Ordering::Relaxed)
    }

    /// The bytes of all buffers.
    pub(crate) fn bytes(&self) -> usize {
        self.shared.memory.used()
    }

    /// Starts the stream of a run. Call it before publishing the run's id: a subscription to a run without a stream
    /// gets the end.
    pub fn open(&self, run_id: &str) -> Publisher {
        let run = self.new_run(run_id, false);
        lock(&self.shared.runs).insert(Arc::clone(&run.id), Arc::clone(&run));
        Publisher { run, bridge: Arc::clone(&self.shared) }
    }

    /// Starts the stream of another process's run, whose events will be [repeated](Publisher::repeat); `None` if there
    /// is one already, so that one of several concurrent callers gets it.
    pub(crate) fn open_relayed(&self, run_id: &str) -> Option<Publisher> {
        let run = self.new_run(run_id, true);
        match lock(&self.shared.runs).entry(Arc::clone(&run.id)) {
            Entry::Occupied(_) => return None,
            Entry::Vacant(place) => place.insert(Arc::clone(&run)),
        };
        Some(Publisher { run, bridge: Arc::clone(&self.shared) })
    }

    /// How many events of a run are kept, and how many bytes of them.
    pub(crate) fn capacity(&self) -> (usize, usize) {
        (self.shared.options.queue_maxsize.max(1), self.shared.options.queue_max_bytes)
    }

    /// How long the events of a run are kept after its end.
    pub(crate) fn cleanup_delay(&self) -> Duration {
        self.shared.options.cleanup_delay
    }

    fn new_run(&self, run_id: &str, relayed: bool) -> Arc<Run> {
        Arc::new(Run {
            id: run_id.into(),
            capacity: self.shared.options.queue_maxsize.max(1),
            max_bytes: self.shared.options.queue_max_bytes,
            relayed,
            handed_on: AtomicBool::new(false),
            abandoned: CancellationToken::new(),
            followers: Arc::clone(&self.shared.followers),
            memory: Arc::clone(&self.shared.memory),
            state: Mutex::new(Buffer::new(relayed)),
        })
    }

    /// Follows a run, from the event after `last_event_id` (the `Last-Event-ID` of a reconnecting client).
    ///
    /// - Without an id, or with one that the run never published: starts at the oldest event that is kept.
    /// - With an id whose next event is no longer kept: one [`Frame::Gap`].
    /// - For a run without a stream (unknown, or ended longer ago than the cleanup delay): one [`Frame::End`].
    /// - The event that says why the run failed comes before the end, unless the id is that of this or a later event.
    pub fn subscribe(&self, run_id: &str, last_event_id: Option<&str>) -> Subscription {
        let run = lock(&self.shared.runs).get(run_id).cloned();
        Subscription::new(run, last_event_id)
    }

    /// The events of a run of this process from the oldest that is kept, for the other processes; `None` if they get
    /// them already, or none are kept.
    pub(crate) fn hand_on(&self, run_id: &str) -> Option<Subscription> {
        let run = lock(&self.shared.runs).get(run_id).cloned()?;
        run.hand_on().then(|| Subscription::new(Some(run), None))
    }

    /// The runs of this process that have ended and are kept, and that other processes do not get: at most `limit`,
    /// the last to end first.
    pub(crate) fn ended_alone(&self, limit: usize) -> Vec<String> {
        let runs: Vec<_> = lock(&self.shared.runs).values().cloned().collect();
        let mut ended: Vec<_> = runs.iter().filter_map(|run| Some((run.ended_alone()?, &run.id))).collect();
        ended.sort_unstable();
        ended.into_iter().rev().take(limit).map(|(_, id)| id.to_string()).collect()
    }

    /// Whether the run is one of this process that has ended and is kept, and that other processes do not get.
    pub(crate) fn has_ended_alone(&self, run_id: &str) -> bool {
        let run = lock(&self.shared.runs).get(run_id).cloned();
        run.is_some_and(|run| run.ended_alone().is_some())
    }
}

impl Shared {
    /// Removes `run`, unless another stream was opened under its id.
    fn forget(&self, run: &Arc<Run>) {
        let mut runs = lock(&self.runs);
        if runs.get(&run.id).is_some_and(|kept| Arc::ptr_eq(kept, run)) {
            runs.remove(&run.id);
        }
    }
}

/// What is shown in the place of an end that was not said.
const ABANDONED: &str =
    "The gateway stopped working on this run before it showed how it ended. Read the run to know how it did.";

/// The run's side of its stream. Dropping it ends the stream, so that no subscriber waits for a dead run, with an error:
/// a success [says so](Publisher::end).
pub struct Publisher {
    run: Arc<Run>,
    bridge: Arc<Shared>,
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher").field("run", &self.run.id).finish_non_exhaustive()
    }
}

impl Publisher {
    /// Publishes an event; never waits. After [`Self::end`] the event is dropped and has no id.
    pub fn publish(&self, event: &str, data: &Value) -> Option<EventId> {
        self.publish_text(event, data.to_string().into())
    }

    /// As [`Self::publish`], of data that is JSON text in one line.
    pub(crate) fn publish_text(&self, event: &str, data: Bytes) -> Option<EventId> {
        let id = self.run.push(event.into(), data, self.bridge.clock.now_ms());
        self.relieve();
        id
    }

    /// The current time, on the clock of the events' ids.
    pub(crate) fn now(&self) -> DateTime<Utc> {
        time(self.bridge.clock.now_ms())
    }

    /// The time of the newest event.
    pub(crate) fn latest(&self) -> Option<DateTime<Utc>> {
        lock(&self.run.state).latest.map(|id| time(id.unix_ms))
    }

    /// Gives the events later times than this one, at which an earlier run of the thread has ended: whether its last
    /// frames were ahead of the clock, or its process's clock is ahead, or it ended in this very millisecond. So the
    /// order of the ids is that of the thread's frames.
    pub(crate) fn begin_after(&self, time: DateTime<Utc>) {
        let after = unix_ms(time);
        if after <= self.bridge.clock.now_ms().saturating_add(AHEAD_MS) {
            lock(&self.run.state).not_before_ms = after.saturating_add(1);
        }
    }

    /// Publishes why the run failed, unless that was published before: a stream that ends without it has succeeded.
    pub(crate) fn fail(&self, error: &Value) {
        if lock(&self.run.state).outcome.is_none() {
            self.publish(ERROR, error);
        }
    }

    /// Publishes an event of another process under its own id. Events come in order; if some are missing, earlier ones
    /// are dropped, so that a subscriber that has not seen them gets a [`Frame::Gap`].
    pub(crate) fn repeat(&self, event: Event) {
        self.run.repeat(event);
        self.relieve();
    }

    /// Another process has lost all its events up to this one, the newest: a subscriber that has not seen it gets a
    /// [`Frame::Gap`].
    pub(crate) fn lose(&self, newest: EventId) {
        self.run.lose(newest);
    }

    /// The oldest events of another process that it has kept are repeated: subscribers without an id begin with them.
    pub(crate) fn caught_up(&self) {
        self.run.caught_up();
    }

    /// Keeps the buffers of all runs within their limit.
    fn relieve(&self) {
        self.bridge.memory.relieve();
        if self.bridge.memory.is_exceeded() {
            self.run.keep_newest();
        }
    }

    /// Ends the stream here, with this error, of a run whose end is not known yet. The other processes do not get this
    /// end, and wait for that of the run.
    pub(crate) fn leave(&self, error: &Value) {
        self.run.leave_to_others();
        self.fail(error);
        self.end();
    }

    /// Ends the stream and removes it after the cleanup delay. Without an error event before it, that is the end of a
    /// success. Idempotent.
    pub fn end(&self) {
        if !self.run.end() {
            return;
        }
        lock(&self.run.state).ended_as = Some(self.bridge.memory.ended(&self.run));
        // Without a runtime the process is ending, and no client can reconnect for the events.
        let Ok(runtime) = Handle::try_current() else { return self.bridge.forget(&self.run) };
        let (run, bridge) = (Arc::clone(&self.run), Arc::clone(&self.bridge));
        let until = Instant::now() + bridge.options.cleanup_delay;
        runtime.spawn(async move {
            sleep_until(until).await;
            bridge.forget(&run);
        });
    }

    /// Ends the stream of a run that was not admitted: nobody can follow it, and nothing of it is kept.
    pub(crate) fn discard(self) {
        self.run.end();
        self.bridge.forget(&self.run);
    }

    /// Cancelled when a subscriber that [owns](Subscription::owning) the run leaves it before its end. The run handles
    /// the consequence (`on_disconnect`).
    pub fn abandoned(&self) -> CancellationToken {
        self.run.abandoned.clone()
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.leave(&json!({"message": ABANDONED, "name": "RunError"}));
    }
}

fn time(unix_ms: u64) -> DateTime<Utc> {
    let ms = i64::try_from(unix_ms).unwrap_or(i64::MAX);
    DateTime::from_timestamp_millis(ms).unwrap_or(DateTime::<Utc>::MAX_UTC)
}

/// A time in milliseconds since the Unix epoch.
pub(crate) fn unix_ms(time: DateTime<Utc>) -> u64 {
    u64::try_from(time.timestamp_millis()).unwrap_or_default()
}

/// No code can panic half-way through a change under one of these locks, so a poisoned one is still consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;

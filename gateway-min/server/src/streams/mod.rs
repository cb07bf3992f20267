//! Streams: publishing the events of this process's runs, and following any run, whichever process works on it.

pub mod bridge;
mod mirror;
mod relay;
pub(crate) mod verdict;

use std::sync::Arc;

use chrono::Utc;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio_util::task::TaskTracker;

use self::bridge::{Publisher, StreamBridge, Subscription};
use crate::threads::Threads;
use threadkeep_agent::serialize::Rendered;
use threadkeep_records::{Records, RecordsError, RunRow};

/// How many ended runs a poll asks about: a process may keep those of thousands.
const LOOKED_AT: usize = 256;

/// The streams of runs.
pub(crate) struct Streams {
    records: Records,
    threads: Arc<Threads>,
    bridge: StreamBridge,
    rendered: Arc<Rendered>,
    /// Relays streams to other processes.
    background: TaskTracker,
    /// Tells those who follow a thread that a run was created.
    created: Notify,
}

impl Streams {
    pub(crate) fn new(
        records: Records,
        threads: Arc<Threads>,
        bridge: StreamBridge,
        background: TaskTracker,
    ) -> Self {
        Self { records, threads, bridge, rendered: Arc::default(), background, created: Notify::new() }
    }

    /// What renders the states in frames.
    pub(crate) fn rendered(&self) -> Arc<Rendered> {
        Arc::clone(&self.rendered)
    }

    /// Announces a run of this process, once its row exists.
    pub(crate) fn announce(&self) {
        self.created.notify_waiters();
    }

    /// Waits for the next announcement.
    pub(crate) fn announced(&self) -> Notified<'_> {
        self.created.notified()
    }

    /// Starts the stream of a run of this process.
    pub(crate) fn open(&self, run_id: &str) -> Publisher {
        self.bridge.open(run_id)
    }

    /// Follows a run of this process.
    pub(crate) fn subscribe(&self, run_id: &str) -> Subscription {
        self.bridge.subscribe(run_id, None)
    }

    /// The stream of a run, whichever process works on it, from the event after `last_event_id`.
    pub(crate) fn follow(self: &Arc<Self>, run: &RunRow, last_event_id: Option<&str>) -> Subscription {
        loop {
            // An active run of this process without a stream is rolled back for a process that is gone: its row says
            // when it has ended.
            let publisher = self.bridge.open_relayed(&run.run_id);
            if (self.is_foreign(run) || run.status.is_active()) && self.may_have_frames(run) {
                if let Some(publisher) = publisher {
                    tokio::spawn(relay::relay(Arc::clone(self), run.clone(), publisher));
                }
            } else if let Some(publisher) = publisher {
                // Nothing is kept of it but how it ended.
                let (streams, row) = (Arc::clone(self), run.clone());
                tokio::spawn(async move { streams.end_as(&row, &publisher).await });
            }
            let stream = self.bridge.subscribe(&run.run_id, last_event_id);
            // Otherwise it was forgotten in between, and no longer says how the run ended.
            if stream.has_stream() {
                return stream;
            }
        }
    }

    /// Ends a stream as the row of its run, which has ended, says.
    pub(crate) async fn end_as(&self, row: &RunRow, publisher: &Publisher) {
        if let Some(error) = verdict::error_of(&self.records, row).await {
            publisher.fail(&error);
        }
        publisher.end();
    }

    /// Does this in the background. A stopping gateway waits for it.
    pub(crate) fn in_background(&self, what: impl Future<Output = ()> + Send + 'static) {
        self.background.spawn(what);
    }

    /// Relays the stream of a run of this process to the other processes, unless it is already, or none is kept.
    pub(crate) fn hand_on(self: &Arc<Self>, thread_id: String, run_id: String) {
        if let Some(stream) = self.bridge.hand_on(&run_id) {
            self.background.spawn(mirror::mirror(Arc::clone(self), thread_id, run_id, stream));
        }
    }

    /// Relays the kept stream of an ended run of this process if another process asks for it.
    pub(crate) async fn hand_on_if_ended(self: &Arc<Self>, run_id: &str) -> Result<(), RecordsError> {
        if self.bridge.has_ended_alone(run_id) { self.hand_on_of(&[run_id.to_owned()]).await } else { Ok(()) }
    }

    /// Relays the kept streams of ended runs of this process that other processes ask for. Only of those that ended
    /// last, whose clients come back: a request for another one is heard, or not answered.
    pub(crate) async fn hand_on_ended(self: &Arc<Self>) -> Result<(), RecordsError> {
        self.hand_on_of(&self.bridge.ended_alone(LOOKED_AT)).await
    }

    async fn hand_on_of(self: &Arc<Self>, kept: &[String]) -> Result<(), RecordsError> {
        for (run_id, thread_id) in self.records.runs().followed(kept).await? {
            self.hand_on(thread_id, run_id);
        }
        Ok(())
    }

    /// Whether another process works on the run, as far as its row says.
    pub(crate) fn is_foreign(&self, run: &RunRow) -> bool {
        self.records.runs().owner().is_some_and(|owner| run.owner_worker_id.as_deref() != Some(owner))
    }

    /// The number of runs whose frames are kept, and of clients that follow one.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.bridge.kept(), self.bridge.followers())
    }

    /// The bytes of the kept frames.
    pub(crate) fn bytes(&self) -> usize {
        self.bridge.bytes()
    }

    /// Whether there may be frames of the run: those of an ended one stay for a while, for clients that lost their
    /// connection at its end.
    fn may_have_frames(&self, run: &RunRow) -> bool {
        let ended = (Utc::now() - run.updated_at).to_std().unwrap_or_default();
        run.status.is_active() || ended < self.bridge.cleanup_delay()
    }
}

//! Streams: publishing the events of this process's runs, and following any run, whichever process works on it.

pub mod bridge;
mod mirror;
mod relay;

use std::sync::Arc;

use chrono::Utc;
use serde_json::{Value as Json, json};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio_util::task::TaskTracker;

use self::bridge::{Publisher, StreamBridge, Subscription};
use crate::threads::Threads;
use threadkeep_agent::serialize::Rendered;
use threadkeep_records::{Records, RecordsError, RunRow, persistently};

/// What is shown in the place of an end that cannot be read.
const UNREAD: &str =
    "Another process has ended this run, or ends it, and how cannot be read now. Read the run shortly.";
/// What is shown in the place of an end of which nothing is left.
pub(crate) const DELETED: &str =
    "This run was deleted, alone or with its thread, before its end was shown: how it ended is not known.";

/// How many ended runs a poll asks about: a process may keep those of thousands.
const LOOKED_AT: usize = 256;

/// The data of the `error` frame of a run that failed for this reason.
fn failure(message: &str) -> Json {
    json!({"message": message, "name": "RunError"})
}

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
        // An active run of this process without a stream is rolled back for a process that is gone: its row says when it
        // has ended.
        if (self.is_foreign(run) || run.status.is_active())
            && self.may_have_frames(run)
            && let Some(publisher) = self.bridge.open_relayed(&run.run_id)
        {
            tokio::spawn(relay::relay(Arc::clone(self), run.clone(), publisher));
        } else if !run.status.is_active()
            && let Some(publisher) = self.bridge.open_relayed(&run.run_id)
        {
            // Nothing is kept of it but how it ended.
            let (streams, row) = (Arc::clone(self), run.clone());
            tokio::spawn(async move { relay::tell(&streams, &row, &publisher).await });
        }
        self.bridge.subscribe(&run.run_id, last_event_id)
    }

    /// Publishes why a run failed that another process has ended, or that could not be written, unless that was published.
    pub(crate) async fn tell_failure(&self, run_id: &str, publisher: &Publisher) {
        match persistently(|| self.records.runs().get(run_id)).await {
            Ok(Some(row)) => relay::tell(self, &row, publisher).await,
            // A bare end would be that of a success.
            Ok(None) => publisher.fail(&failure(DELETED)),
            Err(error) => {
                tracing::warn!(run_id, %error, "cannot read why a run was ended");
                publisher.fail(&failure(UNREAD));
            }
        }
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

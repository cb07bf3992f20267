//! The reader's side of a run's stream.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::Stream;
use tokio::time::{Instant, Sleep, sleep};

use super::run::{Found, Run};
use super::{EventId, Frame, Gap, lock};

/// How long a subscriber waits for an event before it gets a [`Frame::Heartbeat`].
pub const HEARTBEAT: Duration = Duration::from_secs(15);

/// One client's position in the stream of a run. It costs the run nothing while it is not polled.
///
/// The stream ends after [`Frame::Gap`] and after [`Frame::End`]. Polling needs a tokio runtime with a timer.
#[derive(Debug)]
pub struct Subscription {
    /// `None` for a run without a stream.
    run: Option<Arc<Run>>,
    key: u64,
    /// The `seq` of its next event; none before the first one, if that was not known when it came.
    cursor: Option<u64>,
    /// The last event that the client has.
    last: Option<EventId>,
    owning: bool,
    finished: bool,
    /// Set while the subscriber waits for an event.
    heartbeat: Option<Pin<Box<Sleep>>>,
}

impl Subscription {
    pub(super) fn new(run: Option<Arc<Run>>, last_event_id: Option<&str>) -> Self {
        let asked = last_event_id.and_then(EventId::parse);
        let (key, last, cursor) = run.as_ref().map_or((0, None, None), |run| run.join(asked));
        Self { run, key, cursor, last, owning: false, finished: false, heartbeat: None }
    }

    /// Another subscription to the run, from the oldest event that is kept.
    pub(crate) fn again(&self) -> Self {
        Self::new(self.run.clone(), None)
    }

    /// Whether there is a stream of the run.
    pub(crate) fn has_stream(&self) -> bool {
        self.run.is_some()
    }

    /// The first `seq` of the run that other processes do not get; `None` if they get all, and its end.
    pub(crate) fn left_at(&self) -> Option<u64> {
        lock(&self.run.as_ref()?.state).left_at
    }

    /// The newest event of the run, also if it is no longer kept.
    pub(crate) fn latest(&self) -> Option<EventId> {
        lock(&self.run.as_ref()?.state).latest
    }

    /// Makes the run depend on this subscriber: if it is dropped while the run is live and before a [`Frame::Gap`], the
    /// run counts as [abandoned](super::Publisher::abandoned). For the request that created a run with `on_disconnect:
    /// cancel`, and for one that joined it with `cancel_on_disconnect`.
    #[must_use = "dropping an owning subscription abandons the run"]
    pub fn owning(mut self) -> Self {
        self.owning = true;
        self
    }

    /// Waits for the end of the run without reading its events, so that it cannot fall behind.
    pub async fn ended(self) {
        if let Some(run) = &self.run {
            poll_fn(|cx| run.poll_end(self.key, cx)).await;
        }
    }

    /// The next frame, except a heartbeat.
    fn poll_frame(&mut self, cx: &Context<'_>) -> Poll<Frame> {
        let Some(run) = &self.run else { return Poll::Ready(Frame::End) };
        Poll::Ready(match ready!(run.poll(self.key, (&mut self.cursor, self.last), cx)) {
            Found::Event(event) => {
                self.heartbeat = None;
                // Why the run failed may come after a later event of another process.
                self.cursor = self.cursor.max(Some(event.id.seq + 1));
                self.last = Some(event.id);
                Frame::Event(event)
            }
            Found::Behind(earliest, latest) => {
                Frame::Gap(Gap { run_id: Arc::clone(&run.id), requested: self.last, earliest, latest })
            }
            Found::End => Frame::End,
        })
    }

    fn poll_heartbeat(&mut self, cx: &mut Context<'_>) -> Poll<Frame> {
        let heartbeat = self.heartbeat.get_or_insert_with(|| Box::pin(sleep(HEARTBEAT)));
        ready!(heartbeat.as_mut().poll(cx));
        heartbeat.as_mut().reset(Instant::now() + HEARTBEAT);
        Poll::Ready(Frame::Heartbeat)
    }
}

impl Stream for Subscription {
    type Item = Frame;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Frame>> {
        let this = self.get_mut();
        if this.finished {
            return Poll::Ready(None);
        }
        match this.poll_frame(cx) {
            Poll::Ready(frame) => {
                this.finished = matches!(frame, Frame::Gap(_) | Frame::End);
                Poll::Ready(Some(frame))
            }
            Poll::Pending => this.poll_heartbeat(cx).map(Some),
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let Some(run) = &self.run else { return };
        let live = run.leave(self.key);
        if live && self.owning && !self.finished {
            run.abandoned.cancel();
        }
    }
}

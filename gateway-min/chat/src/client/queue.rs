//! The events between a turn and its reader.
//!
//! An event may hold the whole conversation, so the queue is bounded in bytes. A turn whose reader is slow waits: it is
//! not polled while the queue is full.

use std::future::poll_fn;
use std::io::{self, Write};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_util::sync::CancellationToken;

use super::{ClientError, Event};

/// The bytes of queued events from which on a turn waits.
const MAX_BYTES: usize = 16 << 20;
/// What an event takes besides its JSON.
const EVENT_BYTES: usize = 256;

type Item = (Result<Event, ClientError>, usize);

/// What both ends share.
#[derive(Debug, Default)]
struct Room {
    bytes: AtomicUsize,
    freed: Notify,
}

/// The turn's end.
#[derive(Debug, Clone)]
pub(super) struct Sender {
    events: UnboundedSender<Item>,
    room: Arc<Room>,
}

/// The reader's end.
#[derive(Debug)]
pub(super) struct Receiver {
    events: UnboundedReceiver<Item>,
    room: Arc<Room>,
}

/// An empty queue.
pub(super) fn queue() -> (Sender, Receiver) {
    let (sender, receiver) = unbounded_channel();
    let room = Arc::new(Room::default());
    (Sender { events: sender, room: Arc::clone(&room) }, Receiver { events: receiver, room })
}

impl Sender {
    /// Adds an event; never waits.
    pub(super) fn send(&self, event: Result<Event, ClientError>) {
        let bytes = event.as_ref().map_or(EVENT_BYTES, size);
        self.room.bytes.fetch_add(bytes, Ordering::Relaxed);
        // An error means that the receiver is gone, and nobody counts any more.
        let _ = self.events.send((event, bytes));
    }

    /// Runs `work`, which sends events, but not while the queue is full, unless it was cancelled or the client is closing.
    pub(super) async fn pace<T>(
        &self,
        work: impl Future<Output = T>,
        cancelled: &CancellationToken,
        closing: &CancellationToken,
    ) -> T {
        let mut work = pin!(work);
        loop {
            let freed = self.room.freed.notified();
            let done = poll_fn(|cx| {
                let ending = cancelled.is_cancelled() || closing.is_cancelled() || self.events.is_closed();
                if self.is_full() && !ending {
                    return Poll::Ready(None);
                }
                work.as_mut().poll(cx).map(Some)
            });
            if let Some(done) = done.await {
                return done;
            }
            tokio::select! {
                () = freed => {}
                () = cancelled.cancelled() => {}
                () = closing.cancelled() => {}
                () = self.events.closed() => {}
            }
        }
    }

    fn is_full(&self) -> bool {
        self.room.bytes.load(Ordering::Relaxed) >= MAX_BYTES
    }
}

impl Receiver {
    /// The next event; `None` if the turn is gone.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Event, ClientError>>> {
        self.events.poll_recv(cx).map(|item| {
            item.map(|(event, bytes)| {
                self.room.bytes.fetch_sub(bytes, Ordering::Relaxed);
                self.room.freed.notify_one();
                event
            })
        })
    }
}

/// About what an event takes: the length of its JSON.
fn size(event: &Event) -> usize {
    let mut count = Count(EVENT_BYTES);
    // Counting cannot fail, and what cannot be serialised is small.
    let _ = serde_json::to_writer(&mut count, event);
    count.0
}

struct Count(usize);

impl Write for Count {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::task::yield_now;

    use super::*;

    /// Sends thirty events of a megabyte, and counts them.
    async fn flood(sender: Sender, sent: Arc<AtomicUsize>) {
        for _ in 0..30 {
            sender.send(Ok(Event::Custom(json!("x".repeat(1 << 20)))));
            sent.fetch_add(1, Ordering::Relaxed);
            yield_now().await;
        }
    }

    fn start() -> (Receiver, Arc<AtomicUsize>, CancellationToken, tokio::task::JoinHandle<()>) {
        let (sender, receiver) = queue();
        let (sent, regardless) = (Arc::new(AtomicUsize::new(0)), CancellationToken::new());
        let work = flood(sender.clone(), Arc::clone(&sent));
        let token = regardless.clone();
        let working = tokio::spawn(async move { sender.pace(work, &token, &CancellationToken::new()).await });
        (receiver, sent, regardless, working)
    }

    /// The clock is paused, so it only moves when nothing else can be done.
    async fn settled() {
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_waits_for_a_reader_that_is_slow() {
        let (mut receiver, sent, _, working) = start();
        settled().await;
        assert_eq!(sent.load(Ordering::Relaxed), 16);
        for _ in 0..5 {
            poll_fn(|cx| receiver.poll(cx)).await.unwrap().unwrap();
        }
        settled().await;
        assert_eq!(sent.load(Ordering::Relaxed), 21);
        for _ in 5..30 {
            poll_fn(|cx| receiver.poll(cx)).await.unwrap().unwrap();
        }
        working.await.unwrap();
        assert!(poll_fn(|cx| receiver.poll(cx)).await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_that_is_stopped_or_has_no_reader_waits_for_nobody() {
        let (_receiver, sent, regardless, working) = start();
        settled().await;
        regardless.cancel();
        working.await.unwrap();
        assert_eq!(sent.load(Ordering::Relaxed), 30);

        let (receiver, sent, _, working) = start();
        settled().await;
        drop(receiver);
        working.await.unwrap();
        assert_eq!(sent.load(Ordering::Relaxed), 30);
    }
}

//! Which server answers. Calls that wait for an answer ask it together: one of them opens a connection, and all learn what
//! it found.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Identifies a server since its last start, and says whether it is a primary. The seconds are the same whatever the time
/// zone and the style of dates of the session are.
pub(crate) const SERVER: &str =
    "SELECT pg_catalog.concat(EXTRACT(epoch FROM pg_catalog.pg_postmaster_start_time()),
    pg_catalog.pg_is_in_recovery())";

/// The server that answered when a call began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Server(u64);

/// The result of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Probed {
    /// The server is the one that the call began with.
    Same,
    /// It is another one, or was restarted.
    Other,
    /// A server answers that it takes no more connections.
    Full,
    /// There is no answer.
    Silent,
}

/// The servers that answered so far.
#[derive(Default)]
pub(crate) struct Watch {
    seen: Mutex<Seen>,
    /// Held by the call that asks.
    last: tokio::sync::Mutex<Option<Asked>>,
}

#[derive(Default)]
struct Seen {
    /// The number of servers so far.
    count: u64,
    /// What the last one said of itself.
    server: Option<String>,
}

/// The last probe.
struct Asked {
    ended: Instant,
    /// What it found, unless the server was replaced.
    probed: Probed,
}

impl Watch {
    /// The server that answers now, as far as it is known.
    pub(crate) fn server(&self) -> Server {
        Server(self.seen().count)
    }

    /// Compares the server that a call began with to the one that answers now. `ask` asks that one, unless another call has done
    /// so meanwhile; it gives what the server says of itself, or what there is instead. `replaced` is called before anybody
    /// hears of another server.
    pub(crate) async fn probe(
        &self,
        began: Server,
        ask: impl Future<Output = Result<String, Probed>>,
        replaced: impl FnOnce(),
    ) -> Probed {
        let called = Instant::now();
        let mut last = self.last.lock().await;
        if self.server() != began {
            return Probed::Other;
        }
        let probed = match &*last {
            Some(asked) if asked.ended >= called => asked.probed,
            _ => {
                let found = ask.await;
                let probed = found.as_ref().err().copied().unwrap_or(Probed::Same);
                *last = Some(Asked { ended: Instant::now(), probed });
                if let Ok(found) = found {
                    self.note(found, replaced);
                }
                probed
            }
        };
        if self.server() == began { probed } else { Probed::Other }
    }

    /// Notes what the server that answers now says of itself. `replaced` is called if it is another one than before.
    pub(crate) fn note(&self, found: String, replaced: impl FnOnce()) {
        let mut seen = self.seen();
        if seen.server.as_ref() != Some(&found) {
            // The first one that is heard of has replaced nobody.
            if seen.server.is_some() {
                replaced();
            }
            seen.count += 1;
            seen.server = Some(found);
        }
    }

    // Each change is whole before anything can fail, so a poisoned lock guards nothing half done.
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::future::{Ready, ready};
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::future::join_all;

    use super::*;

    fn says(server: &str) -> Ready<Result<String, Probed>> {
        ready(Ok(server.to_owned()))
    }

    #[tokio::test]
    async fn all_who_began_with_another_server_hear_that_it_was_replaced() {
        let watch = Watch::default();
        assert_eq!(watch.probe(watch.server(), says("a"), || {}).await, Probed::Other, "none was known");
        let (began, closed) = (watch.server(), AtomicUsize::new(0));
        let close = || {
            closed.fetch_add(1, Ordering::SeqCst);
        };
        assert_eq!(watch.probe(began, says("a"), close).await, Probed::Same);
        for none in [Probed::Silent, Probed::Full] {
            assert_eq!(watch.probe(began, async { Err(none) }, close).await, none);
        }
        assert_eq!(closed.load(Ordering::SeqCst), 0);
        // One after the other, and several at once.
        for _ in 0..2 {
            assert_eq!(watch.probe(began, says("b"), close).await, Probed::Other);
        }
        let all = join_all((0..5).map(|_| watch.probe(began, says("b"), close))).await;
        assert_eq!(all, [Probed::Other; 5]);
        assert_eq!(closed.load(Ordering::SeqCst), 1);
        // Who began after that is where it should be, and hears of the next one.
        let next = watch.server();
        assert_eq!(watch.probe(next, says("b"), close).await, Probed::Same);
        assert_eq!(watch.probe(next, says("a"), close).await, Probed::Other);
        assert_eq!(watch.probe(began, says("a"), close).await, Probed::Other);
    }

    #[tokio::test]
    async fn calls_that_wait_at_once_ask_once() {
        let watch = Watch::default();
        watch.probe(watch.server(), says("a"), || {}).await;
        let (began, asked) = (watch.server(), AtomicUsize::new(0));
        let none = |probed| (Err(probed), probed);
        for (found, expected) in [(Ok("a"), Probed::Same), none(Probed::Silent), none(Probed::Full)] {
            asked.store(0, Ordering::SeqCst);
            let ask = || async {
                asked.fetch_add(1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                found.map(str::to_owned)
            };
            let all = join_all((0..5).map(|_| watch.probe(began, ask(), || {}))).await;
            assert_eq!(all, [expected; 5]);
            assert_eq!(asked.load(Ordering::SeqCst), 1);
        }
    }

    /// The call that asks is given up: the next one asks.
    #[tokio::test]
    async fn a_probe_that_is_dropped_leaves_the_question_to_the_next() {
        let watch = Watch::default();
        let began = watch.server();
        let mut first = Box::pin(watch.probe(began, std::future::pending(), || {}));
        assert!(futures::poll!(&mut first).is_pending());
        let mut second = Box::pin(watch.probe(began, says("a"), || {}));
        assert!(futures::poll!(&mut second).is_pending());
        drop(first);
        assert_eq!(second.await, Probed::Other);
    }
}

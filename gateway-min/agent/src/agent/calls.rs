//! The tool calls of a superstep while they work.

use std::collections::VecDeque;
use std::pin::pin;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;

/// Calls at work, and those that have ended since the loop last asked.
///
/// They go on whatever the loop waits for, as long as it waits [`beside`](Self::beside) them: a call may hold what the
/// loop waits for, for example the one transaction that writes to a database, and gives it back only when it goes on.
pub(super) struct Calls<F: Future> {
    running: FuturesUnordered<F>,
    ended: VecDeque<F::Output>,
}

impl<F: Future> Calls<F> {
    /// None.
    pub(super) fn new() -> Self {
        Self { running: FuturesUnordered::new(), ended: VecDeque::new() }
    }

    /// Adds a call.
    pub(super) fn push(&mut self, call: F) {
        self.running.push(call);
    }

    /// Whether the last one has been returned.
    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty() && self.ended.is_empty()
    }

    /// What the next call to end returned, in the order in which they end; `None` after the last.
    pub(super) async fn next(&mut self) -> Option<F::Output> {
        match self.ended.pop_front() {
            Some(ended) => Some(ended),
            None => self.running.next().await,
        }
    }

    /// Waits for something else while the calls go on.
    pub(super) async fn beside<T>(&mut self, other: impl Future<Output = T>) -> T {
        let mut other = pin!(other);
        loop {
            tokio::select! {
                biased;
                done = &mut other => return done,
                Some(ended) = self.running.next() => self.ended.push_back(ended),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::Mutex;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_ends_meanwhile_is_kept_in_order() {
        let mut calls = Calls::new();
        for number in [3_u64, 1, 2] {
            calls.push(async move {
                tokio::time::sleep(Duration::from_secs(number)).await;
                number
            });
        }
        calls.beside(tokio::time::sleep(Duration::from_millis(2500))).await;
        assert!(!calls.is_empty());
        assert_eq!([calls.next().await, calls.next().await], [Some(1), Some(2)]);
        assert!(!calls.is_empty());
        assert_eq!((calls.next().await, calls.is_empty(), calls.next().await), (Some(3), true, None));
        assert_eq!(calls.beside(async { "alone" }).await, "alone");
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_holds_what_is_waited_for_gives_it_back() {
        let held = Mutex::new(());
        let mut calls = Calls::new();
        calls.push(async {
            let _held = held.lock().await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        });
        calls.beside(tokio::task::yield_now()).await;
        let waiting = calls.beside(held.lock());
        assert!(tokio::time::timeout(Duration::from_mins(10), waiting).await.is_ok());
    }
}

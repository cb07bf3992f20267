//! Outages: no call waits for a server known to be down, and the log reports the outage once.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How long after a failure the server is left alone. Then one caller tries.
pub(crate) const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct Outage(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Set during an outage: when the next caller may try.
    next: Option<Instant>,
    /// Whether a refusal was logged.
    refused: bool,
}

impl Outage {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the caller may use the server. During an outage, one caller per pause may.
    pub(crate) fn may_ask(&self) -> bool {
        let mut state = self.lock();
        let now = Instant::now();
        match state.next {
            Some(next) if now < next => false,
            Some(_) => {
                state.next = Some(now + PAUSE);
                true
            }
            None => true,
        }
    }

    /// The server answered.
    pub(crate) fn answered(&self, address: &str) {
        if self.lock().next.take().is_some() {
            tracing::info!(address, "the history cache answers again");
        }
    }

    /// The server did not answer.
    pub(crate) fn failed(&self, address: &str, reason: &str) {
        if self.lock().next.replace(Instant::now() + PAUSE).is_none() {
            tracing::warn!(
                address,
                reason,
                "the history cache does not answer; threads are read without it until it does"
            );
        }
    }

    /// The server answered with a refusal: it is full, read-only, or the key holds another type. Logged once, because
    /// it affects many calls.
    pub(crate) fn refused(&self, address: &str, reason: &str) {
        let mut state = self.lock();
        state.next = None;
        if !std::mem::replace(&mut state.refused, true) {
            tracing::warn!(address, reason, "the history cache refuses; some threads are read without it");
        }
    }
}

#[cfg(test)]
mod tests {
    use threadkeep_testing::Log;

    use super::*;

    #[test]
    fn an_outage_and_its_end_are_logged_once_and_refusals_once_for_all() {
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
        let _logging = tracing::subscriber::set_default(subscriber);
        let outage = Outage::default();
        for _ in 0..2 {
            for _ in 0..3 {
                outage.failed("a", "away");
            }
            for _ in 0..3 {
                outage.answered("a");
            }
            for _ in 0..3 {
                outage.refused("a", "full");
            }
        }
        let count = |text| log.count(text);
        assert_eq!(
            (count("does not answer"), count("answers again"), count("refuses")),
            (2, 2, 1),
            "{}",
            log.text()
        );
    }

    #[tokio::test(start_paused = true)]
    async fn one_caller_asks_in_each_pause_until_there_is_an_answer() {
        // The first thread that meets an event could decide for the other test, too, that nobody wants it.
        let subscriber = tracing_subscriber::fmt().with_writer(Log::default()).finish();
        let _logging = tracing::subscriber::set_default(subscriber);
        let outage = Outage::default();
        assert!(outage.may_ask() && outage.may_ask());
        outage.failed("a", "away");
        assert!(!outage.may_ask());
        tokio::time::advance(PAUSE).await;
        assert!(outage.may_ask(), "one looks");
        assert!(!outage.may_ask(), "other callers do not wait");
        outage.failed("a", "still away");
        assert!(!outage.may_ask());
        tokio::time::advance(PAUSE).await;
        assert!(outage.may_ask());
        outage.answered("a");
        assert!(outage.may_ask() && outage.may_ask());
        outage.refused("a", "full");
        assert!(outage.may_ask(), "a refusal counts as an answer");
    }
}

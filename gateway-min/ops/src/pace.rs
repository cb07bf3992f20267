//! A command that goes over many threads leaves a server to those that it serves, half of the time.

use std::time::{Duration, Instant};

use super::target::Target;

/// A shorter time is not worth a pause yet.
const LEAST: Duration = Duration::from_millis(5);
/// The longest pause.
const LONGEST: Duration = Duration::from_millis(250);
/// How long it is believed that others use the server, or do not.
const BELIEVED: Duration = Duration::from_secs(1);

/// When a command pauses between two threads.
pub(crate) struct Pace<'t> {
    target: &'t Target,
    /// The end of the last pause.
    since: Instant,
    /// Whether others used the server, and when that was asked.
    serving: Option<(bool, Instant)>,
}

impl<'t> Pace<'t> {
    pub(crate) fn on(target: &'t Target) -> Self {
        Self { target, since: Instant::now(), serving: None }
    }

    /// Pauses for as long as the command worked since the last pause, if others use the server.
    pub(crate) async fn rest(&mut self) {
        let worked = self.since.elapsed();
        if worked < LEAST {
            return;
        }
        if self.is_serving().await {
            tokio::time::sleep(worked.min(LONGEST)).await;
        }
        self.since = Instant::now();
    }

    async fn is_serving(&mut self) -> bool {
        if let Some((serving, asked)) = self.serving
            && asked.elapsed() < BELIEVED
        {
            return serving;
        }
        // What keeps the server from answering keeps the next thread from being read, which says why.
        let serving = self.target.is_serving().await.unwrap_or_default();
        self.serving = Some((serving, Instant::now()));
        serving
    }
}
